"""Files of a run: rows of JSON, read from either end, and writing that a kill cannot leave half done."""

from __future__ import annotations

import io
import json
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from drivetrain.runs.locks import alive

BLOCK_BYTES = 1 << 16
SCAN_BYTES = 32 << 20  # how far back a reader looks for a row that may be rare: over 100,000 rows


def parse_row(line: bytes) -> dict[str, Any] | None:
    """The JSON object of a line; None where it is none, such as a half-written one."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file, from the first on; what is no whole JSON object is left out."""
    try:
        file = open(path, "rb")  # noqa: SIM115 (closed below; the generator may never be finished)
    except OSError:
        return
    with file:
        for line in file:
            if (row := parse_row(line)) is not None:
                yield row


def lines_backwards(file: BinaryIO, most_bytes: int | None = None) -> Iterator[tuple[int, bytes]]:
    """Yields (where it ends, the line with its newline) from the last line to the first, reading no more than it must.

    Stops after `most_bytes`; a line that begins before that is left out.
    """
    position = end = file.seek(0, os.SEEK_END)
    stop = 0 if most_bytes is None else max(0, end - most_bytes)
    rest, block = b"", BLOCK_BYTES
    while position > stop:
        size = min(block, position - stop)
        position -= size
        file.seek(position)
        rest = file.read(size) + rest
        first, *lines = io.BytesIO(rest).readlines()
        for line in reversed(lines):
            yield end, line
            end -= len(line)
        block = BLOCK_BYTES if lines else 2 * block  # a long line is not read again and again
        rest = first
    if rest and stop == 0:
        yield end, rest


def rows_backwards(path: Path, needle: bytes = b"", most_bytes: int = SCAN_BYTES) -> Iterator[dict[str, Any]]:
    """The rows of a file from the last one back; only those that contain `needle`, only of its last `most_bytes`."""
    try:
        file = open(path, "rb")  # noqa: SIM115 (closed below; the generator may never be finished)
    except OSError:
        return
    with file:
        for _, line in lines_backwards(file, most_bytes):
            if needle in line and (row := parse_row(line)) is not None:
                yield row


def cut_rows(path: Path, step: int) -> int:
    """Removes a half-written last line and all rows beyond a step; gives the step of the last row that stays, or 0.

    Rows are ordered by step, so only the end is read. The file is truncated in place, which a kill cannot leave half done.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b", buffering=0) as file:
        last, keep = 0, 0
        for end, line in lines_backwards(file):
            row = parse_row(line)
            if row is not None and isinstance(row.get("step"), int) and row["step"] <= step:
                last, keep = row["step"], end
                break
        if keep != file.seek(0, os.SEEK_END):
            file.truncate(keep)
        if keep and not line.endswith(b"\n"):  # whole but for its end
            file.seek(keep)
            file.write(b"\n")
        return last


def tail_begin(path: Path, num_lines: int) -> int:
    """Where the last lines of a file begin."""
    with open(path, "rb") as file:
        begin = file.seek(0, os.SEEK_END)
        for count, (end, line) in enumerate(lines_backwards(file), 1):
            begin = end - len(line)
            if count == num_lines:
                break
        return begin


class Follower:
    """Reads the lines that are added to a file; from its beginning where it was cut meanwhile."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset, self._last = 0, b""  # how far it was read, and the last line of that

    def rewound(self) -> bool:
        """Whether what was read is no longer there, so that all lines come again."""
        if not self._offset:
            return False
        try:
            with open(self.path, "rb") as file:
                file.seek(self._offset - len(self._last))
                same = file.read(len(self._last)) == self._last
        except OSError:
            same = False
        if not same:
            self._offset, self._last = 0, b""
        return not same

    def new_lines(self) -> Iterator[bytes]:
        """The whole lines that were added since."""
        try:
            file = open(self.path, "rb")  # noqa: SIM115 (closed below)
        except OSError:
            return
        with file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # still being written
                self._offset, self._last = self._offset + len(line), line
                yield line


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
