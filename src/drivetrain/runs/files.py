"""Files of a run: JSON lines, read from either end, and writes that a kill cannot leave half done."""

from __future__ import annotations

import io
import json
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from drivetrain.runs.locks import is_alive

BLOCK_BYTES = 1 << 16
MAX_SCAN_BYTES = 32 << 20  # how far back a reader searches for a rare row: over 100,000 rows


def parse_row(line: bytes) -> dict[str, Any] | None:
    """Returns the JSON object of a line; None for anything else, such as a half-written line."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the rows of a file from first to last; skips lines that are no complete JSON object."""
    try:
        file = open(path, "rb")  # noqa: SIM115 (closed below; the generator may never be finished)
    except OSError:
        return
    with file:
        for line in file:
            if (row := parse_row(line)) is not None:
                yield row


def lines_backwards(file: BinaryIO, max_bytes: int | None = None) -> Iterator[tuple[int, bytes]]:
    """Yields (end offset, line with its newline) from the last line to the first, and reads no more than needed.

    Stops after `max_bytes`, and skips the line that begins before that.
    """
    position = end = file.seek(0, os.SEEK_END)
    stop = 0 if max_bytes is None else max(0, end - max_bytes)
    incomplete_line, block_bytes = b"", BLOCK_BYTES
    while position > stop:
        size = min(block_bytes, position - stop)
        position -= size
        file.seek(position)
        data = file.read(size) + incomplete_line
        incomplete_line, *lines = io.BytesIO(data).readlines()
        for line in reversed(lines):
            yield end, line
            end -= len(line)
        block_bytes = BLOCK_BYTES if lines else 2 * block_bytes  # so that a long line is not read many times
    if incomplete_line and stop == 0:
        yield end, incomplete_line


def rows_backwards(path: Path, needle: bytes = b"", max_bytes: int = MAX_SCAN_BYTES) -> Iterator[dict[str, Any]]:
    """Yields the rows from last to first: those whose line contains `needle`, within the last `max_bytes` of the file."""
    try:
        file = open(path, "rb")  # noqa: SIM115 (closed below; the generator may never be finished)
    except OSError:
        return
    with file:
        for _, line in lines_backwards(file, max_bytes):
            if needle in line and (row := parse_row(line)) is not None:
                yield row


def truncate_rows(path: Path, step: int) -> int:
    """Removes a half-written last line and all rows beyond a step; returns the step of the last row that stays, or 0.

    Rows are ordered by step, so only the end is read. The file is truncated in place, which a kill cannot leave half done.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b", buffering=0) as file:
        last_step, kept_bytes = 0, 0
        for end, line in lines_backwards(file):
            row = parse_row(line)
            if row is not None and isinstance(row.get("step"), int) and row["step"] <= step:
                last_step, kept_bytes = row["step"], end
                break
        if kept_bytes != file.seek(0, os.SEEK_END):
            file.truncate(kept_bytes)
        if kept_bytes and not line.endswith(b"\n"):  # a complete row that lacks only its newline
            file.seek(kept_bytes)
            file.write(b"\n")
        return last_step


def offset_of_last_lines(path: Path, num_lines: int) -> int:
    """Returns the offset at which the last `num_lines` lines begin."""
    with open(path, "rb") as file:
        offset = file.seek(0, os.SEEK_END)
        for count, (end, line) in enumerate(lines_backwards(file), 1):
            offset = end - len(line)
            if count == num_lines:
                break
        return offset


class Follower:
    """Reads the lines that are added to a file. Begins again at the start if the file was truncated."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        """Bytes that were read."""
        self._last_line = b""

    def was_truncated(self) -> bool:
        """Returns whether lines that were read are gone; `new_lines` then begins again at the first line."""
        if not self._offset:
            return False
        try:
            with open(self.path, "rb") as file:
                file.seek(self._offset - len(self._last_line))
                is_same = file.read(len(self._last_line)) == self._last_line
        except OSError:
            is_same = False
        if not is_same:
            self._offset, self._last_line = 0, b""
        return not is_same

    def new_lines(self) -> Iterator[bytes]:
        """Yields the complete lines that were added since the last call."""
        try:
            file = open(self.path, "rb")  # noqa: SIM115 (closed below)
        except OSError:
            return
        with file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # still being written
                self._offset, self._last_line = self._offset + len(line), line
                yield line


def write_atomic(path: Path, content: str | bytes) -> None:
    """Writes a temporary file and renames it, so that readers see the old or the new content, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-{socket.gethostname()}-{os.getpid()}-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def remove_half_written_files(folder: Path) -> None:
    """Removes the temporary files of `write_atomic` whose writers were killed on this machine."""
    for file in folder.glob(f".*-{socket.gethostname()}-*-*"):
        pid = file.name.rsplit("-", 2)[1]
        if file.is_file() and pid.isdigit() and not is_alive(int(pid)):
            file.unlink(missing_ok=True)
