"""metrics.jsonl and TensorBoard event files, written by rank 0."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from drivetrain.engine.observe import Observer
from drivetrain.runs import Run, read_lines, write_atomic

FLUSH_SECONDS = 1.0


class MetricsFile(Observer):
    """One JSON object a line. Rows are kept back for up to a second, and written before every checkpoint:
    what a kill loses is what the resume will do again."""

    def __init__(self, run: Run) -> None:
        self.path = run.metrics_path
        self._waiting: list[dict[str, Any]] = []
        self._last = time.monotonic()

    def resumed(self, step: int) -> None:
        rows = [row for row in read_lines(self.path) if row.get("step", 0) <= step]
        write_atomic(self.path, "".join(json.dumps(row) + "\n" for row in rows))

    def row(self, row: dict[str, Any]) -> None:
        self._waiting.append(row)
        if time.monotonic() - self._last > FLUSH_SECONDS:
            self._write()

    def _write(self) -> None:
        self._last = time.monotonic()
        if not self._waiting:
            return
        text = "".join(json.dumps(row) + "\n" for row in self._waiting).encode()
        before = self.path.stat().st_size if self.path.exists() else 0
        try:
            with open(self.path, "ab", buffering=0) as file:
                if file.write(text) != len(text):
                    raise OSError("short write")
        except OSError:  # a full disk: keep the rows for the next try
            if self.path.exists():
                os.truncate(self.path, before)
            return
        self._waiting.clear()

    def flush(self) -> None:
        self._write()

    def close(self) -> None:
        self._write()


class TensorBoard(Observer):
    """Scalars for TensorBoard; a resume purges what lies beyond its checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writer: Any = None

    def resumed(self, step: int) -> None:
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event = event_pb2.Event
        try:
            self._writer = EventFileWriter(str(self.folder), flush_secs=10)
        except OSError:
            return  # a full disk; the metrics file will say so
        if step:
            session = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._writer.add_event(event_pb2.Event(wall_time=time.time(), step=step + 1, session_log=session))

    def row(self, row: dict[str, Any]) -> None:
        if self._writer is None:
            return
        event = self._event(wall_time=time.time(), step=row["step"])
        for name, value in row.items():
            if name not in ("step", "epoch", "time"):
                event.summary.value.add(tag=name, simple_value=value)
        self._writer.add_event(event)

    def flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
