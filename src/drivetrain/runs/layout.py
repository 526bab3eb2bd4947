"""A run directory (`Run`): the paths of its files, and reading and writing run.json, rows and events."""

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
from drivetrain.runs.locks import lock_holder

if TYPE_CHECKING:
    from torch import nn

FORMAT = 1
RUNS = Path("runs")

# The keys of run.json that readers rely on, with their types.
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
        """The name that users see: the path relative to `runs/`, or the full path of a run elsewhere."""
        try:
            return str(self.path.resolve().relative_to(RUNS.resolve()))
        except ValueError:
            return str(self.path)

    # --- paths ---

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
    def data(self) -> Path:
        """What a finished run hands on besides its weights."""
        return self.path / "data"

    @property
    def model_path(self) -> Path:
        return self.path / "model" / "model.safetensors"

    @property
    def card_path(self) -> Path:
        """Describes the final weights: task, settings, step, metrics."""
        return self.path / "model" / "task.json"

    @property
    def media(self) -> Path:
        """The folder of the pictures that the task's `remarks` returned."""
        return self.path / "media"

    def picture_path(self, name: str, step: int) -> Path:
        return self.media / f"{name}-{step:08d}.png"

    def log_path(self, rank: int) -> Path:
        return self.path / "logs" / f"rank-{rank}.log"

    @property
    def time_breakdown_path(self) -> Path:
        """Records what each rank's time is spent on."""
        return self.path / "logs" / "time.json"

    @property
    def first_steps_path(self) -> Path:
        """Records how long first steps take on this machine."""
        return self.path / "logs" / f"first-{socket.gethostname()}.json"

    # --- run.json ---

    def read(self) -> dict[str, Any]:
        """Returns run.json; raises Problem where it is missing, damaged or of another format."""
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
        if fault := _first_mismatch(info, SHAPE):
            raise Problem(f"{self.json_path} is damaged: {fault}")
        return info

    def write(self, info: dict[str, Any]) -> None:
        write_atomic(self.json_path, json.dumps({"format": FORMAT} | info, indent=1) + "\n")

    def update(self, **changes: Any) -> None:
        self.write(self.read() | changes)

    def log_event(self, kind: str, **detail: Any) -> None:
        """Appends a line to events.jsonl, in one write so that lines of concurrent writers do not mix."""
        row = {"time": time.time(), "event": kind, "rank": int(os.environ.get("RANK", 0))} | detail
        try:
            with open(self.events_path, "ab", buffering=0) as file:
                file.write(json.dumps(row).encode() + b"\n")
        except OSError:
            pass  # a full disk must not stop the training; the next save reports it

    @property
    def status(self) -> str:
        """`running`, `finished`, the outcome of a run that stopped, or `killed` where it left no outcome."""
        info = self.read()
        if info["status"] == "running":
            return "running" if lock_holder(self.path) or self._runs_on_target() else "killed"
        return str(info["outcome"]) if info["status"] == "stopped" else str(info["status"])

    def _runs_on_target(self) -> bool:
        """Whether it ran on a target (`drivetrain.targets`) when that was last asked."""
        with contextlib.suppress(OSError):
            record = parse_row((self.path / "target.json").read_bytes())
            return record is not None and record.get("phase") in ("queued", "running")
        return False

    @property
    def is_finished(self) -> bool:
        return bool(self.read()["status"] == "finished")

    # --- metrics, events and checkpoints ---

    def rows(self) -> list[dict[str, Any]]:
        """Returns the logged metrics, one dict for each line of metrics.jsonl."""
        return list(read_lines(self.metrics_path))

    def last_row(self) -> dict[str, Any]:
        """Returns the newest row of metrics; an empty dict if there is none."""
        return next((row for row in rows_backwards(self.metrics_path) if isinstance(row.get("step"), int)), {})

    def last_evaluation(self) -> dict[str, Any]:
        """Returns the newest row with the metrics of an evaluation; an empty dict if none of the newest 100,000 has any."""
        return next((row for row in rows_backwards(self.metrics_path, b'"eval/') if isinstance(row.get("step"), int)), {})

    def final_weights(self) -> dict[str, Any] | None:
        """Returns the `step` and the `metrics` of the weights in model/; None unless the run is finished."""
        with contextlib.suppress(OSError, Problem):
            card = parse_row(self.card_path.read_bytes()) if self.is_finished else None
            if card and isinstance(card.get("step"), int) and isinstance(card.get("metrics"), dict):
                return {"step": card["step"], "metrics": card["metrics"]}
        return None

    def evaluation(self) -> dict[str, Any]:
        """Returns, as a row, the evaluation of the final weights of a finished run, or the newest one of an unfinished run."""
        if (weights := self.final_weights()) is None:
            return self.last_evaluation()
        metrics = {f"eval/{name}": value for name, value in weights["metrics"].items()}
        return {"step": weights["step"]} | metrics if metrics else {}

    def events(self) -> list[dict[str, Any]]:
        return list(read_lines(self.events_path))

    def checkpoint_steps(self) -> list[int]:
        """Returns the steps that have a published checkpoint, oldest first."""
        matches = (re.fullmatch(r"step-(\d+)", p.name) for p in self.checkpoints.glob("step-*") if p.is_dir())
        return sorted(int(m[1]) for m in matches if m)

    @property
    def last_checkpoint_step(self) -> int:
        """The step of the newest published checkpoint; 0 if there is none."""
        return max(self.checkpoint_steps(), default=0)

    def disk_bytes(self) -> int:
        total = 0
        for folder, _, names in os.walk(self.path):  # links are not followed
            for name in names:
                with contextlib.suppress(OSError):  # a running training removes files
                    total += os.lstat(os.path.join(folder, name)).st_size
        return total

    def model(self) -> nn.Module:
        """Returns the trained model, from the final weights or the last good checkpoint."""
        import drivetrain

        return drivetrain.load(self)


def _first_mismatch(value: Any, shape: Any, name: str = "") -> str:
    """Returns what is missing, or of another type than `shape` says, in a JSON value; "" if all of it fits."""
    if isinstance(shape, type):
        has_type = isinstance(value, shape) and not (shape is int and isinstance(value, bool))
        return "" if has_type else f"{name} is {type(value).__name__}, not {shape.__name__}"
    if not isinstance(value, dict):
        return f"{name} is {type(value).__name__}, not dict"
    for key, inner in shape.items():
        label = f"{name}.{key}".lstrip(".")
        if key not in value:
            return f"{label} is missing"
        if fault := _first_mismatch(value[key], inner, label):
            return fault
    return ""


def record_plan(run: Run, facts: dict[str, Any]) -> None:
    """Writes choices of the plan that the first steps made (such as compile or capture) into run.json."""
    with contextlib.suppress(OSError, Problem, KeyError):  # a full disk must not stop the training
        plan = run.read()["plan"]
        chosen = {k: v for k, v in facts.items() if k in plan and k != "reasons"}
        run.update(plan=plan | chosen | {"reasons": plan["reasons"] | facts["reasons"]})


def record_total_steps(run: Run, steps: int) -> None:
    """Writes into run.json how many steps the run will have in all."""
    with contextlib.suppress(OSError, Problem):  # a full disk must not stop the training
        if run.read().get("steps") != steps:
            run.update(steps=steps)


def stop_info(outcome: Outcome, message: str = "") -> dict[str, Any]:
    """Returns what run.json records when a run ends."""
    return {
        "status": "finished" if outcome is Outcome.OK else "stopped",
        "outcome": str(outcome),
        "message": message,
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
    }
