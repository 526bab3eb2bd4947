"""Names that become folders, folders that must be on this machine, and folders that nobody else may write."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import tempfile
from pathlib import Path

from drivetrain.outcomes import Problem

MAX_PART, MAX_NAME = 120, 240  # bytes; file systems take 255 in a part, and files in a run have names of their own
PART = re.compile(r"\w(?:[\w.,+=@%() -]*[\w.,+=@%()-])?")
URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")


def check_name(name: object, what: str) -> str:
    """Returns the name of a run or study: plain path parts, so that its folder lies in runs/."""
    if not isinstance(name, str):
        raise Problem(f"{what} is text, not {str(name)[:80]}: put it in quotes, such as 'night-3'")
    if len(name.encode(errors="replace")) > MAX_NAME or any(len(part.encode(errors="replace")) > MAX_PART for part in name.split("/")):
        raise Problem(f"{what} {name[:20]}... has {len(name)} characters: write a name of at most {MAX_PART}")
    if not all(PART.fullmatch(part) for part in name.split("/")):
        raise Problem(
            f"{what} {name!r} is no name: write letters, digits, - and _, with / between parts, such as night-3;"
            " a folder elsewhere is --run-dir DIR"
        )
    return name


def private_cache(kind: str) -> Path:
    """Returns a folder that only this user can write, for files that are run later: among the user's caches, else in the
    temporary folder, where a folder that somebody else made is never taken."""
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
    """Whether a folder is this user's, no link, and for others to read at most."""
    facts = folder.lstat()
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid() and not facts.st_mode & 0o022


def check_folder(text: str, what: str) -> str:
    """Returns the path of a folder on this machine; a URL is refused."""
    if match := URL.match(text):
        raise Problem(
            f"{what} {text[:80]}: {match[1]} addresses are not supported: give a folder of this machine (mount the storage, or copy"
            " it there afterwards)"
        )
    if not text or "\0" in text:
        raise Problem(f"{what} {text!r}: give the path of a folder")
    return text
