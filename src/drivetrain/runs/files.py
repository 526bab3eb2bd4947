"""Files of a run: JSON lines, and writing that a kill cannot leave half done."""

from __future__ import annotations

import json
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from drivetrain.runs.locks import alive


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole JSON lines of a file; a half-written last one is left out."""
    try:
        text = path.read_text(errors="replace")
    except FileNotFoundError:
        return
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            yield row


def write_atomic(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-{socket.gethostname()}-{os.getpid()}-")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def sweep(folder: Path) -> None:
    """Remove what processes of this machine were writing when they were killed."""
    for half in folder.glob(f".*-{socket.gethostname()}-*-*"):
        writer = half.name.rsplit("-", 2)[1]
        if half.is_file() and writer.isdigit() and not alive(int(writer)):
            half.unlink(missing_ok=True)
