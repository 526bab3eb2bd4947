"""The cache of converted models and tokenised texts: folders that are created once, by one process of several."""

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
    """Gives an empty folder to fill, which is then renamed to `folder`; None where `folder` exists already.

    Of several processes one fills it and the others wait. If that one dies, the kernel passes its lock on.
    """
    if folder.is_dir():
        yield None
        return
    lock, temporary = (folder.with_name(f".{folder.name}.{end}") for end in ("lock", os.getpid()))
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            if folder.is_dir():
                yield None
                return
            shutil.rmtree(temporary, ignore_errors=True)  # left by a killed process with the same pid
            temporary.mkdir()
            yield temporary
            temporary.rename(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            lock.unlink(missing_ok=True)
