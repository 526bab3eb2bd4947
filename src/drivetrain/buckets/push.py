"""Copies a run to its bucket, again and again while it trains.

A checkpoint's files come first and its mark last, so that a part of one is never taken. Its files are linked before they are copied:
the training may delete them meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from drivetrain.buckets.layout import (
    MARK,
    STATE,
    STEP,
    RemoteCheckpoint,
    complete_checkpoints,
    make_mark,
    read_mark,
    small_files,
    stage_number,
    stages_in,
)
from drivetrain.buckets.store import Store
from drivetrain.runs import Run, rows_backwards

LARGE_BYTES = 1 << 20
BYTES_PER_SECOND = 1 << 20
"""A file over LARGE_BYTES that grows is copied again at most at this average rate, because objects cannot be appended to."""


class Pusher:
    def __init__(self, store: Store, folder: Path, check: Callable[[], None] = lambda: None) -> None:
        """`check` raises Problem if this process may not write to the bucket any more. It is called before each write."""
        self.store, self.folder, self.check = store, folder, check
        self.sent_bytes = 0
        self._seen: dict[str, tuple[int, int]] = {}
        self._sent_at: dict[str, float] = {}
        self._marks: dict[RemoteCheckpoint, dict[str, dict[str, Any]]] = {}
        """The local checkpoints that are complete in the bucket, with the files of their marks."""
        shutil.rmtree(self._pins, ignore_errors=True)

    @property
    def _pins(self) -> Path:
        return self.folder / STATE / "pins"

    def push(self, is_last: bool = False) -> None:
        """Copies what has changed. With `is_last` all of it; else large files that grow are not copied each time."""
        waiting = [checkpoint for checkpoint in self._local_checkpoints() if not self._is_complete(checkpoint)]
        newest_first = sorted(waiting, key=lambda checkpoint: (stage_number(checkpoint.stage), checkpoint.step), reverse=True)
        pinned = {checkpoint: self._pin(checkpoint) for checkpoint in newest_first[:1]}  # before the metrics: they have its rows then
        self._push_small_files(is_last)
        for checkpoint in newest_first:
            with contextlib.suppress(FileNotFoundError):  # deleted by the training meanwhile
                self._push_checkpoint(checkpoint, pinned.get(checkpoint) or self._pin(checkpoint))
        self._delete_old()

    def missing(self) -> list[str]:
        """Returns the files that are not in the bucket as they are here."""
        small = [name for name in small_files(self.folder) if self._seen.get(name) != _version(self.folder / name)]
        return small + [checkpoint.prefix for checkpoint in self._local_checkpoints() if not self._is_complete(checkpoint)]

    def missing_bytes(self) -> int:
        return sum(_size(self.folder / name) for name in self.missing())

    # --- small files ---

    def _push_small_files(self, is_last: bool) -> None:
        for name in small_files(self.folder):
            version = _version(self.folder / name)
            if version is None or self._seen.get(name) == version:
                continue
            pause = version[0] / BYTES_PER_SECOND if version[0] > LARGE_BYTES else 0.0
            if not is_last and time.monotonic() < self._sent_at.get(name, -1e9) + pause:
                continue
            self.check()
            with contextlib.suppress(FileNotFoundError):
                self.store.upload(self.folder / name, name)
                self._seen[name], self._sent_at[name] = version, time.monotonic()
                self.sent_bytes += version[0]

    # --- checkpoints ---

    def _local_checkpoints(self) -> list[RemoteCheckpoint]:
        return [RemoteCheckpoint(stage, step) for stage in stages_in(self.folder) for step in Run(self.folder / stage).checkpoint_steps()]

    def _is_complete(self, checkpoint: RemoteCheckpoint) -> bool:
        if (mark := self._marks.get(checkpoint)) is None:
            return False
        try:
            return read_mark(make_mark(self.folder / checkpoint.prefix, checkpoint.step, 0)).files == mark
        except (OSError, ValueError, KeyError, TypeError):
            return True  # damaged or deleted here: what is there stays

    def _pin(self, checkpoint: RemoteCheckpoint) -> Path:
        """Links the files of a checkpoint into a folder of the mirror, so that they stay until they are copied."""
        source, pins = self.folder / checkpoint.prefix, self._pins / checkpoint.prefix
        shutil.rmtree(pins, ignore_errors=True)
        try:
            pins.mkdir(parents=True)
            for file in source.iterdir():
                os.link(file, pins / file.name)
        except OSError:  # no links on this disk, or deleted meanwhile
            shutil.rmtree(pins, ignore_errors=True)
            return source
        return pins

    def _push_checkpoint(self, checkpoint: RemoteCheckpoint, source: Path) -> None:
        try:
            mark = make_mark(source, checkpoint.step, self._last_row(checkpoint))
        except (ValueError, KeyError, TypeError):
            return  # a damaged manifest: the training reports it
        try:
            self.check()
            existing, files = self.store.read(checkpoint.prefix + MARK), read_mark(mark).files
            if read_mark(existing).files != files:
                if existing is not None:  # another checkpoint of the same step
                    self.store.delete(checkpoint.prefix + MARK)
                self._push_files(checkpoint, source, mark)
            self._marks[checkpoint] = files
        finally:
            shutil.rmtree(self._pins, ignore_errors=True)

    def _last_row(self, checkpoint: RemoteCheckpoint) -> int:
        """Returns the step of the last row of metrics up to a checkpoint; 0 if there is none."""
        steps = (row.get("step") for row in rows_backwards(self.folder / checkpoint.stage / "metrics.jsonl"))
        return next((step for step in steps if isinstance(step, int) and step <= checkpoint.step), 0)

    def _push_files(self, checkpoint: RemoteCheckpoint, source: Path, mark: bytes) -> None:
        names = sorted(file.name for file in source.iterdir() if file.is_file())
        for name in sorted(names, key=lambda name: name == "manifest.json"):
            self.check()
            self.store.upload(source / name, checkpoint.prefix + name)
            self.sent_bytes += _size(source / name)
        self.check()
        self.store.write(checkpoint.prefix + MARK, mark)

    def _delete_old(self) -> None:
        """Deletes the checkpoints that the training has deleted here, and parts of them; never the last complete one."""
        local = set(self._local_checkpoints())
        if not local <= set(self._marks):
            return  # not all of it is there yet
        names = self.store.list()
        complete = complete_checkpoints(names)
        keep = {*local, *complete[-1:]}
        old = [name for name in names if (match := STEP.fullmatch(name)) and RemoteCheckpoint(match[1], int(match[2])) not in keep]
        if old:
            self.check()
            self.store.delete(*sorted(old, key=lambda name: not name.endswith(f"/{MARK}")))  # the marks first
        for checkpoint in set(self._marks) - keep:
            del self._marks[checkpoint]


def _version(file: Path) -> tuple[int, int] | None:
    """Returns what changes when a file is written; None if it is not there."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def _size(path: Path) -> int:
    try:
        return sum(file.stat().st_size for file in path.iterdir()) if path.is_dir() else path.stat().st_size
    except OSError:
        return 0
