"""metrics.jsonl and TensorBoard event files, written by rank 0."""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
import time
from pathlib import Path
from typing import Any

from drivetrain.engine.log.observe import Observer
from drivetrain.runs import Run, truncate_rows

FLUSH_SECONDS = 1.0
ROW_SECONDS = 0.1  # TensorBoard's files get ten rows a second at most: its page shows no more, and they are slow to write


class MetricsFile(Observer):
    """Writes one JSON object a line, up to a second later, and before every checkpoint: a kill loses only rows of steps that the resume repeats."""

    def __init__(self, run: Run) -> None:
        self.path = run.metrics_path
        self._rows: list[dict[str, Any]] = []
        self._written_at = time.monotonic()
        self._last_step = 0

    def resumed(self, step: int) -> None:
        self._last_step = truncate_rows(self.path, step)

    def row(self, row: dict[str, Any]) -> None:
        if row["step"] <= self._last_step:  # an evaluation that is repeated
            self.resumed(row["step"] - 1)
        self._rows.append(row)
        if time.monotonic() - self._written_at > FLUSH_SECONDS:
            self._write()

    def _write(self) -> None:
        self._written_at = time.monotonic()
        if not self._rows:
            return
        text = "".join(_line(row) for row in self._rows).encode()
        before = self.path.stat().st_size if self.path.exists() else 0
        try:
            with open(self.path, "ab", buffering=0) as file:
                if file.write(text) != len(text):
                    raise OSError("short write")
        except OSError:  # a full disk: keep the rows for the next try
            if self.path.exists():
                os.truncate(self.path, before)
            return
        self._rows.clear()

    def flush(self) -> None:
        self._write()

    def close(self) -> None:
        self._write()


def _line(row: dict[str, Any]) -> str:
    """Returns one line of standard JSON: NaN and infinity become null."""
    return json.dumps({k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}) + "\n"


class TensorBoard(Observer):
    """Writes scalars for TensorBoard; a resume purges the steps beyond its checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file: Any = None
        self._records: Any = None
        self._rows: list[tuple[float, dict[str, Any]]] = []
        self._written_at = self._row_at = time.monotonic()

    def resumed(self, step: int) -> None:
        if step:
            self._open(purge=step + 1)
        else:  # rows of an earlier start are invalid
            shutil.rmtree(self.folder, ignore_errors=True)

    def _open(self, purge: int = 0) -> None:
        # Its record writer works in this thread; the usual event writer's thread would contend with the step.
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event = event_pb2.Event
        self.folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        self._file = open(self.folder / name, "ab")  # noqa: SIM115 (open as long as the run)
        self._records = RecordWriter(self._file)
        self._add(event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2"))
        if purge:
            session = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._add(event_pb2.Event(wall_time=time.time(), step=purge, session_log=session))

    def _add(self, event: Any) -> None:
        self._records.write(event.SerializeToString())

    def row(self, row: dict[str, Any]) -> None:
        now = time.monotonic()
        if self._rows and now - self._row_at < ROW_SECONDS and not any(name.startswith("eval/") for name in self._rows[-1][1]):
            self._rows.pop()  # the newer row replaces it
        else:
            self._row_at = now
        self._rows.append((time.time(), row))
        if now - self._written_at > FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        self._written_at = time.monotonic()
        rows, self._rows = self._rows, []
        try:
            if self._records is None:
                self._open()
            for when, row in rows:
                event = self._event(wall_time=when, step=row["step"])
                for name, value in row.items():
                    if name not in ("step", "epoch", "time"):
                        event.summary.value.add(tag=name, simple_value=value)
                self._add(event)
            self._file.flush()
        except OSError:
            pass  # a full disk stops nothing but the save, which says so

    def close(self) -> None:
        self.flush()
        if self._file is not None:
            self._file.close()
