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
from drivetrain.runs.files import parse_row, read_lines, rows_backwards, write_atomic
from drivetrain.runs.locks import holder

if TYPE_CHECKING:
    from torch import nn

FORMAT = 1
RUNS = Path("runs")

# What every reader of run.json relies on.
SHAPE: dict[str, Any] = {
    "recipe": {"task": {"path": str, "label": str}, "identity": {"task": str, "code": str, "settings": dict}, "settings": dict, "pins": dict},
    "plan": {"world_size": int, "nodes": int, "device": str, "precision": str, "global_batch": int, "reasons": dict},
    "status": str, "outcome": str, "message": str, "folder": str, "created": str,
}  # fmt: skip


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

    @property
    def card_path(self) -> Path:
        """What the final weights are: task, settings, step, metrics."""
        return self.path / "model" / "task.json"

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
            text = self.json_path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise Problem(f"{self.path} is no run: it has no run.json") from None
        except (OSError, ValueError) as error:
            raise Problem(f"{self.json_path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
        info = parse_row(text)
        if info is None:
            raise Problem(f"{self.json_path} is damaged: it is no JSON object")
        if info.get("format") != FORMAT:
            raise Problem(f"{self.path} has format {info.get('format')}; this drivetrain reads format {FORMAT}")
        if fault := _misfit(info, SHAPE):
            raise Problem(f"{self.json_path} is damaged: {fault}")
        return info

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

    def last_row(self) -> dict[str, Any]:
        """The newest row of metrics; empty where there is none."""
        return next((row for row in rows_backwards(self.metrics_path) if isinstance(row.get("step"), int)), {})

    def last_evaluation(self) -> dict[str, Any]:
        """The newest row that has an evaluation's figures; empty where none of the newest 100,000 has."""
        return next((row for row in rows_backwards(self.metrics_path, b'"eval/') if isinstance(row.get("step"), int)), {})

    def final_weights(self) -> dict[str, Any] | None:
        """What is known of the weights of a finished run, which are in model/: their `step`, and their `metrics`."""
        with contextlib.suppress(OSError, Problem):
            card = parse_row(self.card_path.read_bytes()) if self.finished else None
            if card and isinstance(card.get("step"), int) and isinstance(card.get("metrics"), dict):
                return {"step": card["step"], "metrics": card["metrics"]}
        return None

    def evaluated(self) -> dict[str, Any]:
        """The evaluation that counts, as a row: of a finished run that of its final weights, else the newest."""
        if (weights := self.final_weights()) is None:
            return self.last_evaluation()
        figures = {f"eval/{name}": value for name, value in weights["metrics"].items()}
        return {"step": weights["step"]} | figures if figures else {}

    def events(self) -> list[dict[str, Any]]:
        return list(read_lines(self.events_path))

    def steps(self) -> list[int]:
        """The steps that have a published checkpoint, oldest first."""
        found = (re.fullmatch(r"step-(\d+)", p.name) for p in self.checkpoints.glob("step-*") if p.is_dir())
        return sorted(int(m[1]) for m in found if m)

    @property
    def last_step(self) -> int:
        """The newest of them; 0 where there is none."""
        return max(self.steps(), default=0)

    def disk_bytes(self) -> int:
        total = 0
        for folder, _, names in os.walk(self.path):  # links are not followed
            for name in names:
                with contextlib.suppress(OSError):  # a run under way removes files
                    total += os.lstat(os.path.join(folder, name)).st_size
        return total

    def model(self) -> nn.Module:
        """The trained model, from the final weights or the last good checkpoint."""
        import drivetrain

        return drivetrain.load(self)


def _misfit(value: Any, shape: Any, name: str = "") -> str:
    """The first part of a JSON value that is missing or of another type than `shape` says; empty where all fits."""
    if isinstance(shape, type):
        fits = isinstance(value, shape) and not (shape is int and isinstance(value, bool))
        return "" if fits else f"{name} is {type(value).__name__}, not {shape.__name__}"
    if not isinstance(value, dict):
        return f"{name} is {type(value).__name__}, not dict"
    for key, inner in shape.items():
        label = f"{name}.{key}".lstrip(".")
        if key not in value:
            return f"{label} is missing"
        if fault := _misfit(value[key], inner, label):
            return fault
    return ""


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
