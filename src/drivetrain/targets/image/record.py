"""The images that `drivetrain image build` has made on this machine: images.json in the user's state folder."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from drivetrain import runs
from drivetrain.targets.archive import package_archive

Variant = Literal["cpu", "gpu"]
DEFAULT_TAGS: dict[Variant, str] = {"cpu": "drivetrain:cpu", "gpu": "drivetrain:gpu"}
SOURCE_LABEL = "drivetrain.source"
"""The label of an image with the digest of the source it was built from."""


@dataclass(frozen=True, kw_only=True)
class BuiltImage:
    tag: str
    """The name to run it with."""
    digest: str
    """The image's id, or the registry's digest if it was pushed."""
    source: str
    """The digest of the source that it was built from."""
    version: str
    base: str
    built: float
    """Seconds since the epoch."""


def record_file() -> Path:
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return state / "drivetrain" / "images.json"


def log_file() -> Path:
    """Returns the file with the output of the last build."""
    return record_file().with_name("image-build.log")


def read_images() -> dict[Variant, BuiltImage]:
    """Returns the image that was built last, for each variant; a damaged record counts as none."""
    try:
        content = json.loads(record_file().read_bytes())
        return {variant: BuiltImage(**content[variant]) for variant in DEFAULT_TAGS if variant in content}
    except (OSError, ValueError, TypeError):
        return {}


def record_image(variant: Variant, image: BuiltImage) -> None:
    images = read_images() | {variant: image}
    runs.write_atomic(record_file(), json.dumps({name: asdict(built) for name, built in images.items()}, indent=1) + "\n")


def source_digest() -> str:
    """Returns the digest of this package's source."""
    return package_archive().digest
