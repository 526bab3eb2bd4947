"""How far a run has come in a folder: what a machine has of it is compared with what this machine has. Part of the host's program."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from drivetrain.targets.host.library import folder, read_json


class Position(NamedTuple):
    """How far the checkpoints of a run go. A later one is greater."""

    stage: int = 0
    """The number of the stage; 0: the run has no stages."""
    step: int = 0
    """The step of the newest complete checkpoint; 0: there is none."""


def position_of(run: str) -> dict[str, Any]:
    """Returns the position of a run on this machine, and whether its folder has a run at all."""
    folders = _run_folders(folder(run))
    positions = [Position(number, newest_complete_step(path)) for number, path in folders]
    return {"is_run": bool(folders), "position": max((position for position in positions if position.step), default=Position())}


def _run_folders(root: Path) -> list[tuple[int, Path]]:
    """Returns the folder of a run, or the folders of its stages with their numbers."""
    if (root / "run.json").is_file():
        return [(0, root)]
    stages = [(re.match(r"(\d+)-", path.parent.name), path.parent) for path in root.glob("*/run.json")]
    return [(int(match[1]), path) for match, path in stages if match]


def newest_complete_step(run: Path) -> int:
    """Returns the step of the newest checkpoint whose manifest is as it was written and whose files have their sizes; 0 if there is none.
    The training itself verifies every byte."""
    steps = [int(path.name.partition("-")[2]) for path in run.glob("checkpoints/step-*") if re.fullmatch(r"step-\d+", path.name)]
    complete = (step for step in sorted(steps, reverse=True) if _is_complete(run / "checkpoints" / f"step-{step:08d}"))
    return next(complete, 0)


def _is_complete(checkpoint: Path) -> bool:
    manifest = read_json(checkpoint / "manifest.json")
    digest = manifest.pop("digest", "")
    with contextlib.suppress(OSError, KeyError, TypeError, AttributeError):
        sizes = {name: entry["bytes"] for name, entry in manifest["files"].items()}
        is_as_written = digest == hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
        return is_as_written and all((checkpoint / name).stat().st_size == size for name, size in sizes.items())
    return False
