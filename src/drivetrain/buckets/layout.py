"""Which files of a run are copied, and how they are named in a bucket. A recipe with stages has one run in each subfolder."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from drivetrain.outcomes import Problem
from drivetrain.runs import FORMAT, RUNS, parse_row

STATE = ".bucket"
"""The folder in a run's folder that holds what this machine knows of the bucket. It is not copied."""
LINK = f"{STATE}/bucket.json"
MARK = "uploaded.json"
"""The last object of a checkpoint in a bucket: without it the checkpoint is not complete."""
CHECKPOINTS = "checkpoints"
LATEST = "latest"
"""The name of the copy of the newest model."""
OF_MACHINE = frozenset({"lock", "job", "code", "code.tar.gz", "target.json", CHECKPOINTS})
"""What belongs to one machine, or is copied in another way."""
PART = re.compile(r"[\w,+=@%() -][\w.,+=@%() -]*")
STEP = re.compile(r"((?:\d+-[^/]+/)?)checkpoints/step-(\d{8,})/([^/]+)")


class RemoteCheckpoint(NamedTuple):
    """A complete checkpoint in a bucket."""

    stage: str
    """"" or the folder of the stage with a slash, such as "2-tune/"."""
    step: int

    @property
    def prefix(self) -> str:
        return f"{self.stage}{CHECKPOINTS}/step-{self.step:08d}/"


def is_safe(name: str) -> bool:
    """Whether a name from a bucket is that of a file of a run: plain parts, none hidden."""
    return all(PART.fullmatch(part) and len(part.encode()) <= 240 for part in name.split("/"))


def stages_in(folder: Path) -> list[str]:
    """Returns the prefixes of the runs in a folder: "" for a run, else those of the stages."""
    if (folder / "run.json").is_file():
        return [""]
    stages = [path.parent.name for path in folder.glob("*/run.json") if re.match(r"\d+-", path.parent.name)]
    return [f"{name}/" for name in sorted(stages, key=stage_number)]


def stages_of_names(names: Iterable[str]) -> list[str]:
    """Returns the prefixes of the runs among names in a bucket."""
    files = [name for name in names if is_safe(name) and re.fullmatch(r"(?:\d+-[^/]+/)?run\.json", name)]
    prefixes = [name.removesuffix("run.json") for name in files]
    return [""] if "" in prefixes else sorted(prefixes, key=stage_number)


def stage_number(stage: str) -> int:
    match = re.match(r"(\d+)-", stage)
    return int(match[1]) if match else 0


def small_files(folder: Path) -> Iterator[str]:
    """Yields the names of the files of a run that are no checkpoints; run.json last, because it tells whether the run is finished."""
    last = []
    for stage in stages_in(folder):
        root = folder / stage
        for parent, folders, files in os.walk(root):  # links are not followed
            relative = os.path.relpath(parent, root)
            is_top = relative == "."
            folders[:] = sorted(name for name in folders if PART.fullmatch(name) and not (is_top and name in OF_MACHINE))
            for file in sorted(files):
                name = stage + (file if is_top else f"{relative}/{file}")
                if not is_safe(name) or (is_top and file in OF_MACHINE) or os.path.islink(os.path.join(parent, file)):
                    continue
                if is_top and file == "run.json":
                    last.append(name)
                else:
                    yield name
    yield from last


def is_small(name: str) -> bool:
    """Whether an object of a run in a bucket is one that `small_files` yields."""
    in_run = re.sub(r"^\d+-[^/]+/", "", name)
    return is_safe(name) and in_run.partition("/")[0] not in OF_MACHINE and name.partition("/")[0] not in OF_MACHINE


def complete_checkpoints(names: Iterable[str]) -> list[RemoteCheckpoint]:
    """Returns the complete checkpoints among names in a bucket, oldest first."""
    matches = (STEP.fullmatch(name) for name in names)
    found = [RemoteCheckpoint(match[1], int(match[2])) for match in matches if match and match[3] == MARK]
    return sorted(found, key=lambda checkpoint: (stage_number(checkpoint.stage), checkpoint.step))


def make_mark(checkpoint: Path, step: int, last_row: int) -> bytes:
    """Returns the last object of a checkpoint: its files with sizes and hashes, as the training wrote them into its manifest.

    `last_row`: the step of the last row of metrics up to this checkpoint."""
    text = (checkpoint / "manifest.json").read_bytes()
    files = dict(json.loads(text)["files"]) | {"manifest.json": {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}}
    return json.dumps({"format": FORMAT, "step": step, "last_row": last_row, "files": files}, indent=1).encode()


class Mark(NamedTuple):
    """The last object of a checkpoint."""

    last_row: int
    files: dict[str, dict[str, Any]]
    """Name -> {bytes, sha256}; empty if the object is none that `make_mark` returned."""


def read_mark(content: bytes | None) -> Mark:
    row = parse_row(content or b"") or {}
    files, last_row = row.get("files"), row.get("last_row")
    if row.get("format") != FORMAT or not isinstance(files, dict) or "manifest.json" not in files or not isinstance(last_row, int):
        return Mark(0, {})
    is_valid = all(
        re.fullmatch(r"[\w.-]+", name) and name not in (".", "..") and isinstance(entry, dict) and {"bytes", "sha256"} <= set(entry)
        for name, entry in files.items()
    )
    return Mark(last_row, files if is_valid else {})


def folder_of(url: str) -> Path:
    """Returns the folder of this machine in which a run with an address is trained."""
    return RUNS / url.rstrip("/").rpartition("/")[2]


def read_link(folder: Path) -> dict[str, Any]:
    """Returns what a run's folder tells of its bucket: `url` and `owner`; {} if it has none."""
    try:
        return parse_row((folder / LINK).read_bytes()) or {}
    except OSError:
        return {}


def check_folder_of(folder: Path, url: object) -> None:
    """Raises Problem if the folder here is that of another run."""
    if read_link(folder).get("url") != str(url) and stages_in(folder):
        raise Problem(f"{folder} is a run that is not in {url}: choose another last part for the address, or move that folder away")


def check_uploadable(name: str) -> None:
    """Raises Problem for the name of a run whose copy would be the one of the newest model."""
    if name == LATEST:
        raise Problem(f"models/{LATEST} is the newest model: a run whose model is uploaded needs another name (--name NAME)")
