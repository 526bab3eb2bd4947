"""`runs`, `status` and `logs`: what there is to know about runs without starting anything."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from drivetrain import runs
from drivetrain.cli import ending
from drivetrain.cli.flags import Parser, whole_number
from drivetrain.outcomes import Problem
from drivetrain.runs import Run
from drivetrain.terminal import one_line, show
from drivetrain.watch.spent import Spent


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
        return _rm(args.targets, args.yes, args.dry_run)
    if args.action == "prune":
        return _prune(args.targets, args.dry_run)
    rows = [_facts(r) for r in runs.all_runs()] + [_study(f.parent) for f in sorted(runs.RUNS.glob("*/tune.json"))]
    if args.json:
        print(json.dumps(rows))
    elif not rows:
        show(f"no runs in {runs.RUNS.absolute()}; start one: drivetrain train digits")
    else:
        _table(rows)
    return 0


def _facts(found: Run) -> dict[str, Any]:
    try:
        info = found.read()
        status = found.status
        label = info["recipe"]["identity"]["task"]
        created = info["created"][:16].replace("T", " ")
    except (Problem, KeyError):
        return {
            "name": found.name,
            "task": "?",
            "status": "unreadable",
            "step": 0,
            "metric": "",
            "bytes": found.disk_bytes(),
            "created": "",
        }
    rows = found.rows()
    evaluated: dict[str, Any] = next((r for r in reversed(rows) if any(k.startswith("eval/") for k in r)), {})
    metric = next((_metric(k.removeprefix("eval/"), v) for k, v in evaluated.items() if k.startswith("eval/")), "")
    step = rows[-1]["step"] if rows else 0
    return {
        "name": found.name,
        "task": label,
        "status": status,
        "step": step,
        "metric": metric,
        "bytes": found.disk_bytes(),
        "created": created,
    }


def _study(path: Path) -> dict[str, Any]:
    """A search by `tune`, whose trials are runs of its own."""
    facts = {"name": path.name, "task": "?", "status": "unreadable", "trials": len(list(path.glob("trials/*/run.json"))), "metric": ""}
    facts |= {"bytes": Run(path).disk_bytes(), "created": ""}
    with contextlib.suppress(OSError, ValueError, KeyError):
        told = json.loads((path / "tune.json").read_text())
        facts |= {"task": told["task"], "created": told["created"][:16].replace("T", " ")}
        facts["status"] = "running" if runs.holder(path) else told["status"]
        *_, name, value = (path / "best.yaml").read_text().partition("\n")[0].split()
        facts["metric"] = f"best {_metric(name.removeprefix('eval/'), float(value))}"
    return facts


def _metric(name: str, value: float) -> str:
    return f"{name} {100 * value:.1f} %" if "accuracy" in name else f"{name} {value:.4g}"


def _size(count: float) -> str:
    return f"{count / 1e6:,.1f} MB" if count < 1e9 else f"{count / 1e9:,.1f} GB"


def _table(rows: list[dict[str, Any]]) -> None:
    lines = [["run", "task", "status", "step", "metric", "disk", "begun (UTC)"]]
    for r in rows:
        done = f"{r['trials']:,} trials" if "trials" in r else f"{r['step']:,}"
        lines.append([r["name"], r["task"], r["status"], done, r["metric"], _size(r["bytes"]), r["created"]])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    right = (3, 5)
    for line in lines:
        show("  ".join(c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))).rstrip())
    show(f"\n{len(rows)} run{'s' if len(rows) != 1 else ''}, {_size(sum(r['bytes'] for r in rows))}")


def _not_running(found: Run) -> None:
    if pid := runs.holder(found.path):
        raise Problem(f"{found.name} is in use by process {pid}: stop it first")


def _rm(names: list[str], yes: bool, dry: bool) -> int:
    if not names:
        raise Problem("name the runs to delete: drivetrain runs rm NAME ...")
    found = [one for name in names for one in _with_stages(name)]
    for one in found:
        _not_running(one)
        show(f"{'would delete' if dry else 'delete'} {one.name}  {_size(one.disk_bytes())}")
    if dry:
        return 0
    if not yes:
        if not sys.stdin.isatty():
            raise Problem("deleting needs --yes where nobody can be asked")
        if input("delete? [y/N] ").strip().lower() not in ("y", "yes"):
            return 1
    for one in found:
        shutil.rmtree(one.path)
        if one.path.parent.parent == runs.RUNS and not any(one.path.parent.iterdir()):
            one.path.parent.rmdir()  # of stages
    return 0


def _with_stages(name: str) -> list[Run]:
    """The run or study of this name, or all stages of a recipe of this name."""
    if (runs.RUNS / name / "tune.json").is_file():
        return [Run(runs.RUNS / name)]
    stages = sorted((runs.RUNS / name).glob("*/run.json")) if not (runs.RUNS / name / "run.json").is_file() else []
    return [Run(f.parent) for f in stages] or [runs.find(name)]


def _prune(names: list[str], dry: bool) -> int:
    """Checkpoints of finished runs, whose weights are in model/ already; and what interrupted saves left."""
    freed = 0
    for one in [runs.find(n) for n in names] if names else runs.all_runs():
        if runs.holder(one.path):
            continue
        doomed = list(one.checkpoints.glob(".*"))
        if one.finished and one.model_path.is_file():
            doomed += sorted(one.checkpoints.glob("step-*"))
        count = sum(Run(p).disk_bytes() for p in doomed)
        if doomed:
            show(f"{'would free' if dry else 'freed'} {_size(count)}  {one.name}")
            freed += count
        for path in doomed:
            if not dry:
                shutil.rmtree(path)
    show(f"{_size(freed)} {'could be freed' if dry else 'freed'}")
    return 0


# --- status ------------------------------------------------------------------------------------


def _spent(found: Run) -> Spent | None:
    """Where its time went, as far as that was noted."""
    try:
        return Spent(**json.loads(found.time_path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _status(words: list[str]) -> int:
    parser = Parser("drivetrain status", "How a run is doing: its state, progress, last figures, checkpoints and events.")
    parser.add_argument("target", metavar="RUN")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    args = parser.parse(words)
    found = runs.find(args.target)
    info, rows, events = found.read(), found.rows(), found.events()
    last = rows[-1] if rows else {}
    evaluated: dict[str, Any] = next((r for r in reversed(rows) if any(k.startswith("eval/") for k in r)), {})
    remarks = [e for e in events if e["event"] == "remark"]
    facts = {
        "name": found.name, "status": found.status, "message": info["message"], "last": last, "evaluated": evaluated,
        "checkpoints": found.steps(), "plan": info["plan"], "bytes": found.disk_bytes(),
        "events": [e for e in events if e["event"] != "remark"][-5:], "remarks": [e for e in remarks if e["step"] == remarks[-1]["step"]],
    }  # fmt: skip
    spent = _spent(found)
    if spent is not None:
        facts["time"] = spent.to_json() | {"shares": spent.shares, "bottleneck": ending.bottleneck(found, spent)}
    if args.json:
        print(json.dumps(facts))
        return 0
    plan = info["plan"]
    show(f"run          {found.name}   {info['recipe']['identity']['task']}   {facts['status']}")
    if info["message"]:
        show(f"             {info['message'].splitlines()[-1]}")
    show(f"plan         {plan['world_size']} process(es) on {plan['device']}, {plan['precision']}, global batch {plan['global_batch']}")
    if last:
        speed = f", {last['samples_per_second']:,.0f} samples/s" if "samples_per_second" in last else ""
        show(f"step         {last['step']:,}   epoch {last['epoch']}   loss {last.get('train/loss', float('nan')):.4g}{speed}")
    if evaluated:
        figures = "   ".join(_metric(k.removeprefix("eval/"), v) for k, v in evaluated.items() if k.startswith("eval/"))
        show(f"eval         {figures}   (step {evaluated['step']:,})")
    for remark in facts["remarks"]:
        show(f"remark       {remark['text']}   (step {remark['step']:,})")
    if spent is not None and spent.steps:
        show(f"time         {spent.sentence()}")
        if facts["time"]["bottleneck"]:
            show(f"             {facts['time']['bottleneck']}")
    show(f"checkpoints  {', '.join(f'{s:,}' for s in facts['checkpoints']) or 'none'}   ({_size(facts['bytes'])} in all)")
    for event in facts["events"]:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["time"]))
        detail = "  ".join(
            f"{k}={str(v).splitlines()[0] if str(v) else ''}" for k, v in event.items() if k not in ("time", "event", "rank")
        )
        show(f"  {when}  {event['event']:<12} {detail}".rstrip())
    if facts["status"] not in ("finished", "running"):
        show(f"go on with   drivetrain resume {found.name}")
    return 0


# --- logs --------------------------------------------------------------------------------------


def _logs(words: list[str]) -> int:
    parser = Parser("drivetrain logs", "What a run's processes printed.")
    parser.add_argument("target", metavar="RUN")
    parser.add_argument("-f", "--follow", action="store_true", help="go on printing until the run ends")
    parser.add_argument("--rank", type=whole_number(0), metavar="K", help="only this process's")
    args = parser.parse(words)
    found = runs.find(args.target)
    pattern = "rank-*.log" if args.rank is None else f"rank-{args.rank}.log"
    seen: dict[Path, int] = {}
    _print_new(found, pattern, seen)
    if not seen:
        raise Problem(f"{found.name} has no logs{'' if args.rank is None else f' of rank {args.rank}'} yet")
    while args.follow and found.status == "running":
        time.sleep(0.3)
        _print_new(found, pattern, seen)
    return 0


def _print_new(found: Run, pattern: str, seen: dict[Path, int]) -> None:
    files = sorted((found.path / "logs").glob(pattern), key=lambda p: int(p.stem.split("-")[1]))
    for file in files:
        with open(file, "rb") as stream:
            stream.seek(seen.get(file, 0))
            data = stream.read()
        seen[file] = seen.get(file, 0) + len(data)
        prefix, colours = f"[{file.stem}] " if len(files) > 1 else "", sys.stdout.isatty()
        for line in data.decode(errors="replace").splitlines():
            print(f"{prefix}{one_line(line, colours)}", flush=True)
