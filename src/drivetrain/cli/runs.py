"""`runs`: list runs and studies, delete them, delete checkpoints of finished runs."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from drivetrain import runs
from drivetrain.cli import delete_runs
from drivetrain.cli.delete_runs import format_disk_size
from drivetrain.cli.flags import Parser
from drivetrain.outcomes import Problem
from drivetrain.runs import Run
from drivetrain.targets.record import Record, all_records
from drivetrain.terminal import one_line, show

TABLE_HEAD = ["run", "task", "status", "step", "metric", "disk", "begun (UTC)"]
RIGHT_ALIGNED = (3, 5)  # columns of numbers


def parser(verb: str) -> Parser:
    parser = Parser(
        "drivetrain runs",
        "List the runs and studies in runs/ with their disk use. `rm` deletes them, `prune` deletes checkpoints of finished runs.",
    )
    parser.add_argument(
        "action", nargs="?", choices=["rm", "prune"],
        help="rm RUN ...: delete runs or studies; prune [RUN ...]: keep only the weights of finished runs",
    )  # fmt: skip
    parser.add_argument("targets", nargs="*", metavar="RUN", help="names or folders of runs or studies")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    parser.add_argument("--json", action="store_true", help="print the list as JSON")
    return parser


def run(verb: str, words: list[str]) -> int:
    args = parser(verb).parse(words)
    if args.action == "rm":
        return delete_runs.remove(args.targets, args.yes, args.dry_run)
    if args.action == "prune":
        return delete_runs.prune(args.targets, args.dry_run)
    rows = [_run_facts(run_dir) for run_dir in runs.all_runs()]
    rows += [_study_facts(file.parent) for file in sorted(runs.RUNS.glob("*/tune.json"))]
    rows += [_submitted_facts(record) for record in all_records() if not runs.is_run(record.run.path)]
    if args.json:
        print(json.dumps(rows))
    elif not rows:
        show(f"no runs in {runs.RUNS.absolute()}; start one: drivetrain train digits")
    else:
        _print_table(rows)
    return 0


def _run_facts(run_dir: Run) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "name": run_dir.name,
        "task": "?",
        "status": "unreadable",
        "step": 0,
        "metric": "",
        "bytes": run_dir.disk_bytes(),
    }
    try:
        info = run_dir.read()
        facts |= {"task": info["recipe"]["identity"]["task"], "status": run_dir.status, "created": info["created"][:16].replace("T", " ")}
    except Problem:
        return facts | {"created": ""}
    metric = next((format_metric(name, value) for name, value in evaluation_metrics(run_dir.evaluation()).items()), "")
    return facts | {"step": run_dir.last_row().get("step", 0), "metric": metric}


def _submitted_facts(record: Record) -> dict[str, Any]:
    """Returns the table row of a run on a target that has not begun, as _run_facts does for a run."""
    created = str(record.facts["versions"]["created"])[:16].replace("T", " ")
    facts = {"name": record.run.name, "task": record.facts["task"], "status": f"{record.phase} on {record.target}", "step": 0}
    return facts | {"metric": "", "bytes": record.run.disk_bytes(), "created": created}


def _study_facts(path: Path) -> dict[str, Any]:
    """Returns the table row of a study, as _run_facts does for a run."""
    facts = {"name": path.name, "task": "?", "status": "unreadable", "trials": len(list(path.glob("trials/*/run.json"))), "metric": ""}
    facts |= {"bytes": Run(path).disk_bytes(), "created": ""}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        info = json.loads((path / "tune.json").read_text())
        facts |= {"task": info["task"], "created": info["created"][:16].replace("T", " ")}
        facts["status"] = "running" if runs.lock_holder(path) else info["status"]
        *_, name, value = (path / "best.yaml").read_text().partition("\n")[0].split()
        facts["metric"] = f"best {format_metric(name.removeprefix('eval/'), float(value))}"
    return facts


def _print_table(rows: list[dict[str, Any]]) -> None:
    lines = [TABLE_HEAD]
    for row in rows:
        progress = f"{row['trials']:,} trials" if "trials" in row else f"{row['step']:,}"
        cells = (row["name"], row["task"], row["status"], progress, row["metric"], format_disk_size(row["bytes"]), row["created"])
        lines.append([one_line(text) for text in cells])
    widths = [max(len(line[column]) for line in lines) for column in range(len(TABLE_HEAD))]
    for line in lines:
        padded = []
        for column, (cell, width) in enumerate(zip(line, widths, strict=True)):
            padded.append(cell.rjust(width) if column in RIGHT_ALIGNED else cell.ljust(width))
        print("  ".join(padded).rstrip())
    print(f"\n{len(rows)} run{'s' if len(rows) != 1 else ''}, {format_disk_size(sum(row['bytes'] for row in rows))}")


def evaluation_metrics(row: dict[str, Any]) -> dict[str, Any]:
    """Returns the metrics of a row's evaluation, without the prefix `eval/`."""
    return {name.removeprefix("eval/"): value for name, value in row.items() if name.startswith("eval/")}


def format_metric(name: str, value: Any) -> str:
    if not isinstance(value, (int, float)):
        return f"{name} not a number"  # rows have null for NaN, which JSON lacks
    return f"{name} {100 * value:.1f} %" if "accuracy" in name else f"{name} {value:.4g}"
