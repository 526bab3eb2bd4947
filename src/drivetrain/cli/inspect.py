"""`runs`, `status` and `logs`: what there is to know about runs without starting anything."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from drivetrain import runs
from drivetrain.cli import cleanup
from drivetrain.cli.cleanup import disk_size
from drivetrain.cli.flags import Parser, whole_number
from drivetrain.launch.report import bottleneck
from drivetrain.outcomes import Problem
from drivetrain.runs import Run, rows_backwards
from drivetrain.terminal import one_line, show
from drivetrain.watch.spent import Spent

EVENTS = 5  # that `status` shows
LOG_LINES = 1000


def run(verb: str, words: list[str]) -> int:
    return {"runs": _runs, "status": _status, "logs": _logs}[verb](words)


# --- runs --------------------------------------------------------------------------------------


def _runs(words: list[str]) -> int:
    parser = Parser(
        "drivetrain runs",
        "List the runs and studies in runs/ with their disk use. `rm` deletes them, `prune` deletes checkpoints of finished runs.",
    )
    parser.add_argument(
        "action",
        nargs="?",
        choices=["rm", "prune"],
        help="rm RUN ...: delete runs or studies; prune [RUN ...]: keep only the weights of finished runs",
    )
    parser.add_argument("targets", nargs="*", metavar="RUN")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    parser.add_argument("--json", action="store_true", help="print the list as JSON")
    args = parser.parse(words)
    if args.action == "rm":
        return cleanup.remove(args.targets, args.yes, args.dry_run)
    if args.action == "prune":
        return cleanup.prune(args.targets, args.dry_run)
    rows = [_facts(r) for r in runs.all_runs()] + [_study(f.parent) for f in sorted(runs.RUNS.glob("*/tune.json"))]
    if args.json:
        print(json.dumps(rows))
    elif not rows:
        show(f"no runs in {runs.RUNS.absolute()}; start one: drivetrain train digits")
    else:
        _table(rows)
    return 0


def _facts(found: Run) -> dict[str, Any]:
    facts: dict[str, Any] = {"name": found.name, "task": "?", "status": "unreadable", "step": 0, "metric": "", "bytes": found.disk_bytes()}
    try:
        info = found.read()
        facts |= {"task": info["recipe"]["identity"]["task"], "status": found.status, "created": info["created"][:16].replace("T", " ")}
    except Problem:
        return facts | {"created": ""}
    metric = next((_metric(name, value) for name, value in _figures(found.evaluation()).items()), "")
    return facts | {"step": found.last_row().get("step", 0), "metric": metric}


def _figures(row: dict[str, Any]) -> dict[str, Any]:
    """The evaluation's figures of a row."""
    return {name.removeprefix("eval/"): value for name, value in row.items() if name.startswith("eval/")}


def _study(path: Path) -> dict[str, Any]:
    """A search by `tune`, whose trials are runs of its own."""
    facts = {"name": path.name, "task": "?", "status": "unreadable", "trials": len(list(path.glob("trials/*/run.json"))), "metric": ""}
    facts |= {"bytes": Run(path).disk_bytes(), "created": ""}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        told = json.loads((path / "tune.json").read_text())
        facts |= {"task": told["task"], "created": told["created"][:16].replace("T", " ")}
        facts["status"] = "running" if runs.lock_holder(path) else told["status"]
        *_, name, value = (path / "best.yaml").read_text().partition("\n")[0].split()
        facts["metric"] = f"best {_metric(name.removeprefix('eval/'), float(value))}"
    return facts


def _metric(name: str, value: Any) -> str:
    if not isinstance(value, (int, float)):
        return f"{name} not a number"  # which JSON has no word for
    return f"{name} {100 * value:.1f} %" if "accuracy" in name else f"{name} {value:.4g}"


def _table(rows: list[dict[str, Any]]) -> None:
    lines = [["run", "task", "status", "step", "metric", "disk", "begun (UTC)"]]
    for r in rows:
        done = f"{r['trials']:,} trials" if "trials" in r else f"{r['step']:,}"
        lines.append(
            [one_line(text) for text in (r["name"], r["task"], r["status"], done, r["metric"], disk_size(r["bytes"]), r["created"])]
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    right = (3, 5)
    for line in lines:
        print("  ".join(c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))).rstrip())
    print(f"\n{len(rows)} run{'s' if len(rows) != 1 else ''}, {disk_size(sum(r['bytes'] for r in rows))}")


# --- status ------------------------------------------------------------------------------------


def _spent(found: Run) -> dict[str, Any] | None:
    """Where its time went, as far as that was noted."""
    try:
        spent = Spent(**json.loads(found.time_breakdown_path.read_text()))
        return spent.to_json() | {"shares": spent.shares, "bottleneck": bottleneck(found, spent), "sentence": spent.sentence()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _events(found: Run) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Its newest events, and what its task remarked at its newest evaluation; each oldest first."""
    events: list[dict[str, Any]] = []
    remarks: list[dict[str, Any]] = []
    for event in rows_backwards(found.events_path):
        if not isinstance(event.get("event"), str) or not isinstance(event.get("time"), (int, float)):
            continue
        if event["event"] != "remark" and len(events) < EVENTS:
            events.append(event)
        elif event["event"] == "remark" and isinstance(event.get("step"), int):
            if not remarks or event["step"] == remarks[0]["step"]:
                remarks.append(event)
            elif len(events) == EVENTS:
                break
    return events[::-1], remarks[::-1]


def _status(words: list[str]) -> int:
    parser = Parser("drivetrain status", "How a run is doing: its state, progress, last figures, checkpoints and events.")
    parser.add_argument("target", metavar="RUN")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    args = parser.parse(words)
    found = runs.find(args.target)
    info, last, evaluated = found.read(), found.last_row(), found.evaluation()
    events, remarks = _events(found)
    weights = found.final_weights()
    facts = {
        "name": found.name, "status": found.status, "message": info["message"], "last": last, "evaluated": evaluated,
        "weights_step": weights and weights["step"], "checkpoints": found.checkpoint_steps(), "plan": info["plan"], "bytes": found.disk_bytes(),
        "events": events, "remarks": remarks,
    }  # fmt: skip
    if (spent := _spent(found)) is not None:
        facts["time"] = spent
    if args.json:
        print(json.dumps(facts))
        return 0
    for label, text in _status_lines(facts, info["recipe"]["identity"]["task"]):
        print(f"{label:<13}{one_line(text)}".rstrip())
    return 0


def _status_lines(facts: dict[str, Any], task: str) -> Iterator[tuple[str, str]]:
    """(label, text) of each line."""
    plan, last, evaluated, spent = facts["plan"], facts["last"], facts["evaluated"], facts.get("time")
    yield "run", f"{facts['name']}   {task}   {facts['status']}"
    if facts["message"].strip():
        yield "", facts["message"].strip().splitlines()[-1]
    yield "plan", f"{plan['world_size']} process(es) on {plan['device']}, {plan['precision']}, global batch {plan['global_batch']}"
    if last:
        speed = last.get("samples_per_second")
        told = f", {speed:,.0f} samples/s" if isinstance(speed, (int, float)) else ""
        yield "step", f"{last['step']:,}   epoch {last.get('epoch', '?')}   {_metric('loss', last.get('train/loss'))}{told}"
    if figures := _figures(evaluated):
        whose = "" if facts["weights_step"] is None else ", the weights in model/"
        yield "eval", f"{'   '.join(_metric(k, v) for k, v in figures.items())}   (step {evaluated['step']:,}{whose})"
    for remark in facts["remarks"]:
        yield "remark", f"{remark.get('text')}   (step {remark['step']:,})"
    if spent is not None and spent["steps"]:
        yield "time", spent["sentence"]
        if spent["bottleneck"]:
            yield "", spent["bottleneck"]
    yield "checkpoints", f"{', '.join(f'{s:,}' for s in facts['checkpoints']) or 'none'}   ({disk_size(facts['bytes'])} in all)"
    for event in facts["events"]:
        yield "", _event_line(event)
    if facts["status"] not in ("finished", "running"):
        yield "go on with", f"drivetrain resume {facts['name']}"


def _event_line(event: dict[str, Any]) -> str:
    try:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["time"]))
    except (OverflowError, ValueError, OSError):
        when = "?"
    detail = "  ".join(f"{k}={(str(v).splitlines() or [''])[0]}" for k, v in event.items() if k not in ("time", "event", "rank"))
    return f"{when}  {event['event']:<12} {detail}"


# --- logs --------------------------------------------------------------------------------------


def _logs(words: list[str]) -> int:
    parser = Parser("drivetrain logs", "What a run's processes printed: the last lines of each.")
    parser.add_argument("target", metavar="RUN")
    parser.add_argument("-f", "--follow", action="store_true", help="go on printing until the run ends")
    parser.add_argument("--rank", type=whole_number(0), metavar="K", help="only this process's")
    parser.add_argument(
        "-n", "--lines", type=whole_number(0), default=LOG_LINES, metavar="N", help=f"so many of each; 0: all (usual: {LOG_LINES:,})"
    )
    args = parser.parse(words)
    found = runs.find(args.target)
    seen: dict[Path, int] = {}
    _print_new(found, args.rank, seen, args.lines)
    if not seen:
        raise Problem(f"{found.name} has no logs{'' if args.rank is None else f' of rank {args.rank}'} yet")
    while args.follow and found.status == "running":
        time.sleep(0.3)
        _print_new(found, args.rank, seen, 0)
    return 0


def _print_new(found: Run, rank: int | None, seen: dict[Path, int], most_lines: int) -> None:
    """Print what the logs have beyond what was seen of them; of a new one the last lines, unless `most_lines` is 0."""
    files = {int(m[1]): p for p in (found.path / "logs").glob("rank-*.log") if (m := re.fullmatch(r"rank-(\d+)\.log", p.name))}
    chosen = [file for number, file in sorted(files.items()) if rank in (None, number) and file.is_file()]
    for file in chosen:
        if file not in seen:
            seen[file] = runs.offset_of_last_lines(file, most_lines) if most_lines else 0
            if seen[file]:
                print(f"(the last {most_lines:,} lines of {file}; all: --lines 0)", file=sys.stderr, flush=True)
        prefix, colours = f"[{file.stem}] " if len(chosen) > 1 else "", sys.stdout.isatty()
        with open(file, "rb") as stream:
            stream.seek(seen[file])
            for line in stream:
                seen[file] += len(line)
                print(f"{prefix}{one_line(line.decode(errors='replace'), colours)}")
    sys.stdout.flush()
