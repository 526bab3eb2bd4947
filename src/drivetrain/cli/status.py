"""`status`: how a run is doing."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

from drivetrain import runs
from drivetrain.cli.delete_runs import format_disk_size
from drivetrain.cli.flags import Parser
from drivetrain.cli.runs import evaluation_metrics, format_metric
from drivetrain.launch.report import bottleneck
from drivetrain.runs import Run, rows_backwards
from drivetrain.terminal import one_line
from drivetrain.watch.time_breakdown import TimeBreakdown

NUM_EVENTS = 5  # shown


def parser(verb: str) -> Parser:
    parser = Parser("drivetrain status", "How a run is doing: its state, progress, last figures, checkpoints and events.")
    parser.add_argument("target", metavar="RUN", help="a run's name or folder")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    return parser


def run(verb: str, words: list[str]) -> int:
    args = parser(verb).parse(words)
    run_dir = runs.find(args.target)
    info = run_dir.read()
    facts = _facts(run_dir, info)
    if args.json:
        print(json.dumps(facts))
        return 0
    for label, text in _lines(facts, info["recipe"]["identity"]["task"]):
        print(f"{label:<13}{one_line(text)}".rstrip())
    return 0


def _facts(run_dir: Run, info: dict[str, Any]) -> dict[str, Any]:
    """Returns what --json prints."""
    events, remarks = _newest_events(run_dir)
    weights = run_dir.final_weights()
    facts = {
        "name": run_dir.name, "status": run_dir.status, "message": info["message"], "last": run_dir.last_row(), "evaluated": run_dir.evaluation(),
        "weights_step": weights and weights["step"], "checkpoints": run_dir.checkpoint_steps(), "plan": info["plan"], "bytes": run_dir.disk_bytes(),
        "events": events, "remarks": remarks,
    }  # fmt: skip
    if (time_breakdown := _time_breakdown(run_dir)) is not None:
        facts["time"] = time_breakdown
    return facts


def _time_breakdown(run_dir: Run) -> dict[str, Any] | None:
    """Returns the run's time breakdown, or None if there is none."""
    try:
        spent = TimeBreakdown(**json.loads(run_dir.time_breakdown_path.read_text()))
        return spent.to_json() | {"shares": spent.shares, "bottleneck": bottleneck(run_dir, spent), "sentence": spent.sentence()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _newest_events(run_dir: Run) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns the newest events, and the task's remarks at its newest evaluation; each oldest first."""
    events: list[dict[str, Any]] = []
    remarks: list[dict[str, Any]] = []
    for event in rows_backwards(run_dir.events_path):
        if not isinstance(event.get("event"), str) or not isinstance(event.get("time"), (int, float)):
            continue
        if event["event"] != "remark" and len(events) < NUM_EVENTS:
            events.append(event)
        elif event["event"] == "remark" and isinstance(event.get("step"), int):
            if not remarks or event["step"] == remarks[0]["step"]:
                remarks.append(event)
            elif len(events) == NUM_EVENTS:
                break
    return events[::-1], remarks[::-1]


def _lines(facts: dict[str, Any], task: str) -> Iterator[tuple[str, str]]:
    """Yields the label and text of each line."""
    plan = facts["plan"]
    yield "run", f"{facts['name']}   {task}   {facts['status']}"
    if facts["message"].strip():
        yield "", facts["message"].strip().splitlines()[-1]
    yield "plan", f"{plan['world_size']} process(es) on {plan['device']}, {plan['precision']}, global batch {plan['global_batch']}"
    yield from _progress_lines(facts)
    yield "checkpoints", f"{', '.join(f'{s:,}' for s in facts['checkpoints']) or 'none'}   ({format_disk_size(facts['bytes'])} in all)"
    for event in facts["events"]:
        yield "", _event_line(event)
    if facts["status"] not in ("finished", "running"):
        yield "go on with", f"drivetrain resume {facts['name']}"


def _progress_lines(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    row, evaluation, time_breakdown = facts["last"], facts["evaluated"], facts.get("time")
    if row:
        speed = row.get("samples_per_second")
        speed_text = f", {speed:,.0f} samples/s" if isinstance(speed, (int, float)) else ""
        yield "step", f"{row['step']:,}   epoch {row.get('epoch', '?')}   {format_metric('loss', row.get('train/loss'))}{speed_text}"
    if metrics := evaluation_metrics(evaluation):
        weights_text = "" if facts["weights_step"] is None else ", the weights in model/"
        yield "eval", f"{'   '.join(format_metric(k, v) for k, v in metrics.items())}   (step {evaluation['step']:,}{weights_text})"
    for remark in facts["remarks"]:
        yield "remark", f"{remark.get('text')}   (step {remark['step']:,})"
    if time_breakdown is not None and time_breakdown["steps"]:
        yield "time", time_breakdown["sentence"]
        if time_breakdown["bottleneck"]:
            yield "", time_breakdown["bottleneck"]


def _event_line(event: dict[str, Any]) -> str:
    try:
        date = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["time"]))
    except (OverflowError, ValueError, OSError):
        date = "?"
    details = [f"{key}={_first_line(value)}" for key, value in event.items() if key not in ("time", "event", "rank")]
    return f"{date}  {event['event']:<12} {'  '.join(details)}"


def _first_line(value: Any) -> str:
    return (str(value).splitlines() or [""])[0]
