"""Caches profiles and measurements for later plans: files in the user's cache, whose names hash all that their content depends on."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from drivetrain import __version__
from drivetrain.hardware import Hardware
from drivetrain.plan import Plan
from drivetrain.plan.profile import PROFILE_FORMAT
from drivetrain.recipe import MAY_CHANGE, Recipe

IRRELEVANT_SETTINGS = {
    *MAY_CHANGE, "seed", "learning_rate", "weight_decay", "clip", "warmup", "decay", "start", "global_batch", "deterministic",
}  # fmt: skip
"""Settings that change neither the shapes nor the work of a micro-batch."""


class CacheFile:
    def __init__(self, kind: str, recipe: Recipe, key_parts: dict[str, Any]) -> None:
        settings = {k: v for k, v in recipe.settings.items() if k not in IRRELEVANT_SETTINGS}
        parts = [
            kind, recipe.task.class_name, recipe.task.digest(), settings, file_stamps(settings), key_parts, __version__, _torch_version(),
        ]  # fmt: skip
        key = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:24]
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        self.path = Path(base) / "drivetrain" / "plans" / f"{kind}-{key}.json"

    def read(self) -> Any:
        """Returns the content; None if there is no readable file."""
        with contextlib.suppress(OSError, ValueError):
            return json.loads(self.path.read_text())
        return None

    def write(self, value: Any) -> None:
        with contextlib.suppress(OSError):  # a cache that cannot be written costs a few seconds next time
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary_file = self.path.with_name(f".{self.path.name}.{os.getpid()}")
            temporary_file.write_text(json.dumps(value))
            temporary_file.replace(self.path)


def profile_cache(recipe: Recipe, plan: Plan) -> CacheFile:
    """Returns the file for the task's profile."""
    return CacheFile("profile", recipe, {"precision": plan.precision, "format": PROFILE_FORMAT})


def points_cache(recipe: Recipe, plan: Plan, hardware: Hardware) -> CacheFile:
    """Returns the file for the points measured on this hardware."""
    if hardware.gpus:
        device = min(hardware.gpus, key=lambda gpu: gpu.memory_bytes).name
    else:
        device = f"CPU with {hardware.cpu_cores} cores"
    key_parts = {"precision": plan.precision, "gpu": device, "capture": plan.capture, "batch": plan.global_batch}
    return CacheFile("measured", recipe, key_parts)


def file_stamps(settings: dict[str, Any]) -> list[Any]:
    """Returns path, time and size of the files and folders that settings name; in a folder also of two levels of subfolders."""
    stamps = []
    for value in settings.values():
        if isinstance(value, str) and value:
            with contextlib.suppress(OSError, ValueError):
                root = Path(value).expanduser()
                paths = [root, *root.glob("*/"), *root.glob("*/*/")] if root.is_dir() else [root]
                stamps += [[str(path), path.stat().st_mtime_ns, path.stat().st_size] for path in sorted(paths)]
    return stamps


def _torch_version() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        return ""
