"""The cache of converted models and tokenised texts. Of several processes, one creates each folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


def cache_folder(kind: str) -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "drivetrain" / kind
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextlib.contextmanager
def create_once(folder: Path) -> Iterator[Path | None]:
    """Yields an empty folder to fill, and renames it to `folder` afterwards; yields None if `folder` exists already.

    Of several processes one fills it and the others wait. If that process dies, the operating system releases its lock.
    """
    if folder.is_dir():
        yield None
        return
    lock, temporary = (folder.with_name(f".{folder.name}.{suffix}") for suffix in ("lock", os.getpid()))
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            if folder.is_dir():
                yield None
                return
            shutil.rmtree(temporary, ignore_errors=True)  # from a killed process with the same pid
            temporary.mkdir()
            yield temporary
            temporary.rename(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            lock.unlink(missing_ok=True)
