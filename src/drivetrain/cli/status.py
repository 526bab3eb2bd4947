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
from drivetrain.cli.submitted import refreshed
from drivetrain.launch.report import bottleneck
from drivetrain.outcomes import Problem
from drivetrain.runs import Run, rows_backwards
from drivetrain.targets.record import Record
from drivetrain.terminal import one_line, show
from drivetrain.watch.screen import format_duration
from drivetrain.watch.time_breakdown import TimeBreakdown

NUM_EVENTS = 5  # shown


def parser(verb: str) -> Parser:
    parser = Parser("drivetrain status", "How a run is doing: its state, progress, last figures, checkpoints and events.")
    parser.add_argument("target", metavar="RUN", help="a run's name or folder")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    return parser


def run(verb: str, words: list[str]) -> int:
    args = parser(verb).parse(words)
    record = refreshed(args.target)
    if record is not None and not runs.is_run(record.run.path) and not runs.stages_of(record.run.path):
        return _print_waiting(record, args.json)
    run_dir = runs.find(args.target)  # of a recipe with stages, the last one
    info = run_dir.read()
    facts = _facts(run_dir, info)
    if record is not None:
        facts["target"] = _target_facts(record)
    if args.json:
        print(json.dumps(facts))
        return 0
    for label, text in _lines(facts, info["recipe"]["identity"]["task"]):
        print(f"{label:<13}{one_line(text)}".rstrip())
    _print_details(record)
    return 0


def _print_details(record: Record | None) -> None:
    """Prints what the target says of an active run's machines."""
    if record is None or not record.is_active or not record.handle:
        return
    from drivetrain.targets import submit

    try:
        lines = list(submit.target_of(record).details(record))
    except Problem as problem:
        lines = [str(problem)]
    for line in lines:
        show(f"{'':<13}{one_line(line)}".rstrip())


def _target_facts(record: Record) -> dict[str, Any]:
    return {
        "name": record.target,
        **record.handle,
        **{key: record.facts.get(key) for key in ("kind", "phase", "reason", "exit_code", "seen")},
    }


def _print_waiting(record: Record, as_json: bool) -> int:
    """Prints the status of a run whose command has not written anything yet."""
    facts = _target_facts(record)
    if as_json:
        print(json.dumps({"name": record.run.name, "status": record.phase, "target": facts}))
        return 0
    show(f"{'run':<13}{record.run.name}   {record.phase} on {record.target}")
    if facts["reason"]:
        show(f"{'':<13}{one_line(facts['reason'])}")
    output = record.run.path / "logs" / "output.log"
    if not record.is_active and output.is_file():
        lines = output.read_text(errors="replace").splitlines()[-3:]
        show("\n".join(f"{'':<13}{one_line(line)}" for line in lines))
    _print_details(record)
    return 0


def _facts(run_dir: Run, info: dict[str, Any]) -> dict[str, Any]:
    """Returns what --json prints."""
    events, remarks = _newest_events(run_dir)
    weights = run_dir.final_weights()
    facts = {
        "name": run_dir.name, "status": run_dir.status, "message": info["message"], "last": run_dir.last_row(), "evaluated": run_dir.evaluation(),
        "weights_step": weights and weights["step"], "checkpoints": run_dir.checkpoint_steps(), "plan": info["plan"], "bytes": run_dir.disk_bytes(),
        "events": events, "remarks": remarks, "steps": info.get("steps"),
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
    place = f" on {facts['target']['name']}" if "target" in facts else ""
    yield "run", f"{facts['name']}   {task}   {facts['status']}{place}"
    if facts["message"].strip():
        yield "", facts["message"].strip().splitlines()[-1]
    yield from _end_lines(facts)
    yield "plan", f"{plan['world_size']} process(es) on {plan['device']}, {plan['precision']}, global batch {plan['global_batch']}"
    yield from _progress_lines(facts)
    yield "checkpoints", f"{', '.join(f'{s:,}' for s in facts['checkpoints']) or 'none'}   ({format_disk_size(facts['bytes'])} in all)"
    for event in facts["events"]:
        yield "", _event_line(event)
    if facts["status"] not in ("finished", "running"):
        yield "go on with", f"drivetrain resume {facts['name']}"


def _end_lines(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields what the target says of a run's end, such as a deadline; of lost machines, unless the run had finished."""
    target = facts.get("target") or {}
    is_told = target.get("phase") == "ended" or (target.get("phase") == "lost" and facts["status"] != "finished")
    if is_told and target.get("reason"):
        yield "", target["reason"]


def _progress_lines(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    row, evaluation, time_breakdown = facts["last"], facts["evaluated"], facts.get("time")
    if row:
        speed = row.get("samples_per_second")
        speed_text = f", {speed:,.0f} samples/s" if isinstance(speed, (int, float)) else ""
        of_all = f" of {facts['steps']:,}" if facts["steps"] else ""
        yield (
            "step",
            f"{row['step']:,}{of_all}   epoch {row.get('epoch', '?')}   {format_metric('loss', row.get('train/loss'))}{speed_text}",
        )
    if (remaining := _remaining_seconds(facts)) is not None:
        yield "ends in", f"about {format_duration(remaining)}"
    if metrics := evaluation_metrics(evaluation):
        weights_text = "" if facts["weights_step"] is None else ", the weights in model/"
        yield "eval", f"{'   '.join(format_metric(k, v) for k, v in metrics.items())}   (step {evaluation['step']:,}{weights_text})"
    for remark in facts["remarks"]:
        yield "remark", f"{remark.get('text')}   (step {remark['step']:,})"
    if time_breakdown is not None and time_breakdown["steps"]:
        yield "time", time_breakdown["sentence"]
        if time_breakdown["bottleneck"]:
            yield "", time_breakdown["bottleneck"]


def _remaining_seconds(facts: dict[str, Any]) -> float | None:
    """Returns the predicted time to the end of a running run, at the speed of its newest row."""
    speed = facts["last"].get("samples_per_second")
    if facts["status"] != "running" or not facts["steps"] or not isinstance(speed, (int, float)) or speed <= 0:
        return None
    return float((facts["steps"] - facts["last"]["step"]) * facts["plan"]["global_batch"] / speed)


def _event_line(event: dict[str, Any]) -> str:
    try:
        date = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["time"]))
    except (OverflowError, ValueError, OSError):
        date = "?"
    details = [f"{key}={_first_line(value)}" for key, value in event.items() if key not in ("time", "event", "rank")]
    return f"{date}  {event['event']:<12} {'  '.join(details)}"


def _first_line(value: Any) -> str:
    return (str(value).splitlines() or [""])[0]
