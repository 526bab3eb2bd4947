"""metrics.jsonl, TensorBoard event files and pictures, written by rank 0."""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.engine.log.observe import Observer
from drivetrain.runs import Run, truncate_rows, write_atomic

if TYPE_CHECKING:
    from drivetrain.engine.log.pictures import PngImage

FLUSH_SECONDS = 1.0
ROW_SECONDS = 0.1  # at most one TensorBoard row in this time: its files are slow to write, and its page shows no more


class MetricsFile(Observer):
    """Writes one JSON object a line. Rows are written within about a second, and before every checkpoint; so a resume repeats all lost rows."""

    def __init__(self, run: Run) -> None:
        self.path = run.metrics_path
        self._rows: list[dict[str, Any]] = []
        self._written_at = time.monotonic()
        self._last_step = 0

    def resumed(self, step: int) -> None:
        self._last_step = truncate_rows(self.path, step)

    def row(self, row: dict[str, Any]) -> None:
        if row["step"] <= self._last_step:  # a resumed run repeats an evaluation
            self.resumed(row["step"] - 1)
        self._rows.append(row)
        if time.monotonic() - self._written_at > FLUSH_SECONDS:
            self._write()

    def _write(self) -> None:
        self._written_at = time.monotonic()
        if not self._rows:
            return
        text = "".join(_line(row) for row in self._rows).encode()
        size_before = self.path.stat().st_size if self.path.exists() else 0
        try:
            with open(self.path, "ab", buffering=0) as file:
                if file.write(text) != len(text):
                    raise OSError("short write")
        except OSError:  # a full disk: keep the rows for the next try
            if self.path.exists():
                os.truncate(self.path, size_before)
            return
        self._rows.clear()

    def flush(self) -> None:
        self._write()

    def close(self) -> None:
        self._write()


def _line(row: dict[str, Any]) -> str:
    """Returns one line of standard JSON: NaN and infinity become null."""
    values = {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()}
    return json.dumps(values) + "\n"


class PictureFiles(Observer):
    """Writes pictures as PNG files. A resumed run replaces those of the steps that it repeats."""

    def __init__(self, run: Run, report: Callable[[str], None]) -> None:
        self.run, self._report = run, report
        self._has_failed = False

    def picture(self, step: int, image: PngImage) -> None:
        path = self.run.picture_path(image.name, step)
        try:
            write_atomic(path, image.content)
            if image.page:
                write_atomic(path.with_suffix(".html"), image.page)
        except OSError as error:  # such as a full disk, which must not stop the training
            if not self._has_failed:
                self._report(f"{path} cannot be written: {error.strerror or error}; the training continues without such pictures")
            self._has_failed = True


class TensorBoard(Observer):
    """Writes scalars and pictures for TensorBoard; a resume removes the steps after its checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file: Any = None
        self._record_writer: Any = None
        self._rows: list[tuple[float, dict[str, Any]]] = []
        self._written_at = self._row_at = time.monotonic()

    def resumed(self, step: int) -> None:
        if step:
            self._open(first_removed_step=step + 1)
        else:  # the run begins again, so earlier rows are invalid
            shutil.rmtree(self.folder, ignore_errors=True)

    def _open(self, first_removed_step: int = 0) -> None:
        # Writes in this thread: the thread of the usual SummaryWriter would slow the training step.
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event = event_pb2.Event
        self.folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        self._file = open(self.folder / name, "ab")  # noqa: SIM115 (open as long as the run)
        self._record_writer = RecordWriter(self._file)
        self._add(event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2"))
        if first_removed_step:
            session = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._add(event_pb2.Event(wall_time=time.time(), step=first_removed_step, session_log=session))

    def _add(self, event: Any) -> None:
        self._record_writer.write(event.SerializeToString())

    def row(self, row: dict[str, Any]) -> None:
        now = time.monotonic()
        if self._rows and now - self._row_at < ROW_SECONDS and not any(name.startswith("eval/") for name in self._rows[-1][1]):
            self._rows.pop()  # the newer row replaces it
        else:
            self._row_at = now
        self._rows.append((time.time(), row))
        if now - self._written_at > FLUSH_SECONDS:
            self.flush()

    def picture(self, step: int, image: PngImage) -> None:
        try:
            if self._record_writer is None:
                self._open()
            event = self._event(wall_time=time.time(), step=step)
            value = event.summary.value.add(tag=image.name).image
            value.height, value.width, value.colorspace = image.height, image.width, 1 if image.is_grey else 3
            value.encoded_image_string = image.content
            self._add(event)
            self._file.flush()
        except OSError:
            pass  # as for rows

    def flush(self) -> None:
        self._written_at = time.monotonic()
        rows, self._rows = self._rows, []
        try:
            if self._record_writer is None:
                self._open()
            for time_logged, row in rows:
                event = self._event(wall_time=time_logged, step=row["step"])
                for name, value in row.items():
                    if name not in ("step", "epoch", "time"):
                        event.summary.value.add(tag=name, simple_value=value)
                self._add(event)
            self._file.flush()
        except OSError:
            pass  # a full disk must not stop the training; the next save reports it

    def close(self) -> None:
        self.flush()
        if self._file is not None:
            self._file.close()
