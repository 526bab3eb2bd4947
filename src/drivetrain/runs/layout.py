"""One run directory: its layout and the files in it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.outcomes import Outcome, Problem
from drivetrain.runs.files import read_lines, write_atomic
from drivetrain.runs.locks import holder

if TYPE_CHECKING:
    from torch import nn

FORMAT = 1
RUNS = Path("runs")


class Run:
    """One execution of a recipe: a directory that holds everything about it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @property
    def name(self) -> str:
        """How users name it: relative to `runs/` where it is there."""
        try:
            return str(self.path.resolve().relative_to(RUNS.resolve()))
        except ValueError:
            return str(self.path)

    # files
    @property
    def json_path(self) -> Path:
        return self.path / "run.json"

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def events_path(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def model_path(self) -> Path:
        return self.path / "model" / "model.safetensors"

    def log_path(self, rank: int) -> Path:
        return self.path / "logs" / f"rank-{rank}.log"

    @property
    def time_path(self) -> Path:
        """Where the time of its ranks goes."""
        return self.path / "logs" / "time.json"

    @property
    def first_path(self) -> Path:
        """How long first steps take on this machine."""
        return self.path / "logs" / f"first-{socket.gethostname()}.json"

    # run.json
    def read(self) -> dict[str, Any]:
        try:
            info = json.loads(self.json_path.read_text())
        except FileNotFoundError:
            raise Problem(f"{self.path} is no run: it has no run.json") from None
        except (OSError, ValueError) as error:
            raise Problem(f"{self.json_path} cannot be read: {error}") from None
        if info.get("format") != FORMAT:
            raise Problem(f"{self.path} has format {info.get('format')}; this drivetrain reads format {FORMAT}")
        return dict(info)

    def write(self, info: dict[str, Any]) -> None:
        write_atomic(self.json_path, json.dumps({"format": FORMAT} | info, indent=1) + "\n")

    def update(self, **changes: Any) -> None:
        self.write(self.read() | changes)

    def event(self, kind: str, **detail: Any) -> None:
        """Append to events.jsonl; one write, so that concurrent writers do not mix."""
        row = {"time": time.time(), "event": kind, "rank": int(os.environ.get("RANK", 0))} | detail
        try:
            with open(self.events_path, "ab", buffering=0) as file:
                file.write(json.dumps(row).encode() + b"\n")
        except OSError:
            pass  # a full disk stops nothing but the save, which says so

    @property
    def status(self) -> str:
        """finished, running, or how it stopped: an outcome's word, or `killed` where it could not say."""
        info = self.read()
        if info["status"] == "running":
            return "running" if holder(self.path) else "killed"
        return str(info["outcome"]) if info["status"] == "stopped" else str(info["status"])

    @property
    def finished(self) -> bool:
        return bool(self.read()["status"] == "finished")

    # metrics
    def rows(self) -> list[dict[str, Any]]:
        """The logged metrics, one dict a row."""
        return list(read_lines(self.metrics_path))

    def events(self) -> list[dict[str, Any]]:
        return list(read_lines(self.events_path))

    def steps(self) -> list[int]:
        """The steps that have a published checkpoint, oldest first."""
        found = (re.fullmatch(r"step-(\d+)", p.name) for p in self.checkpoints.glob("step-*"))
        return sorted(int(m[1]) for m in found if m)

    @property
    def last_step(self) -> int:
        """The newest of them; 0 where there is none."""
        return max(self.steps(), default=0)

    def disk_bytes(self) -> int:
        return sum(f.lstat().st_size for f in self.path.rglob("*") if f.is_file())

    def model(self) -> nn.Module:
        """The trained model, from the final weights or the last good checkpoint."""
        import drivetrain

        return drivetrain.load(self)


def record_plan(run: Run, facts: dict[str, Any]) -> None:
    """Note choices of the plan that the first steps settled."""
    with contextlib.suppress(OSError, Problem, KeyError):  # a full disk must not stop the training
        plan = run.read()["plan"]
        settled = {k: v for k, v in facts.items() if k in plan and k != "reasons"}
        run.update(plan=plan | settled | {"reasons": plan["reasons"] | facts["reasons"]})


def stop_info(outcome: Outcome, message: str = "") -> dict[str, Any]:
    """What run.json says of a run's end."""
    return {
        "status": "finished" if outcome is Outcome.OK else "stopped",
        "outcome": str(outcome),
        "message": message,
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
    }
