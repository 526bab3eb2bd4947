"""Checks the names of runs, studies and folders that users give, and creates private cache folders."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import tempfile
from pathlib import Path

from drivetrain.outcomes import Problem

MAX_PART_BYTES, MAX_NAME_BYTES = 120, 240
"""Less than the 255 bytes of most file systems, which leaves room for suffixes."""
PART = re.compile(r"\w(?:[\w.,+=@%() -]*[\w.,+=@%()-])?")
URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")


def check_name(name: object, label: str) -> str:
    """Returns the name of a run or study; raises Problem unless it is plain path parts, so that its folder is in runs/."""
    if not isinstance(name, str):
        raise Problem(f"{label} is text, not {str(name)[:80]}: put it in quotes, such as 'night-3'")
    if len(name.encode(errors="replace")) > MAX_NAME_BYTES or any(
        len(part.encode(errors="replace")) > MAX_PART_BYTES for part in name.split("/")
    ):
        raise Problem(f"{label} {name[:20]}... has {len(name)} characters: write a name of at most {MAX_PART_BYTES}")
    if not all(PART.fullmatch(part) for part in name.split("/")):
        raise Problem(
            f"{label} {name!r} is no name: write letters, digits, - and _, with / between parts, such as night-3;"
            " a folder elsewhere is --run-dir DIR"
        )
    return name


def private_cache(kind: str) -> Path:
    """Returns a folder that only this user can write, for cached files that are executed later.

    It is in the user's cache folder, else in the temporary folder. A folder that somebody else made there is never used.
    """
    caches = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    for base in (caches / "drivetrain", Path(tempfile.gettempdir()) / f"drivetrain-{os.geteuid()}"):
        folder = base / kind
        with contextlib.suppress(OSError):
            base.parent.mkdir(parents=True, exist_ok=True)
            for part in (base, folder):
                part.mkdir(mode=0o700, exist_ok=True)
            if base.is_absolute() and _is_private(base) and _is_private(folder) and os.access(folder, os.W_OK):
                return folder
    return Path(tempfile.mkdtemp(prefix=f"drivetrain-{kind}-"))


def _is_private(folder: Path) -> bool:
    """Whether a folder is this user's, is no link, and cannot be written by others."""
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022


def check_folder(text: str, label: str) -> str:
    """Returns the path of a folder on this machine; raises Problem for a URL."""
    if match := URL.match(text):
        raise Problem(
            f"{label} {text[:80]}: {match[1]} addresses are not supported: give a folder of this machine (mount the storage, or copy"
            " it there afterwards)"
        )
    if not text or "\0" in text:
        raise Problem(f"{label} {text!r}: give the path of a folder")
    return text
