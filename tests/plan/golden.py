"""Plans for twelve machines and three tasks, as text. `python -m tests.plan.golden` rewrites golden.txt after an intended change."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from benchmarks.plan_models import Cnn, Smol135, Smol1700

from drivetrain.engine.measure.survey import survey
from drivetrain.hardware.described import parse
from drivetrain.outcomes import Problem
from drivetrain.plan import Plan
from drivetrain.plan.choose import choose
from drivetrain.plan.profile import Profile
from drivetrain.task import Task

FILE = Path(__file__).with_name("golden.txt")
TASKS: dict[str, tuple[type[Task], int]] = {"cnn": (Cnn, 1024), "135M": (Smol135, 512), "1.7B": (Smol1700, 512)}
MACHINES = (
    "cpu, 16 cores, 64GB RAM",
    "1x6GB",
    "1xT4-16GB",
    "1xRTX4090-24GB",
    "2xRTX3090-24GB",
    "4xL4-24GB",
    "4xT4-16GB",
    "1xH200-141GB",
    "8xA100-40GB",
    "8xH100-80GB",
    "2 nodes x 8xA100-40GB, 100Gb/s",
    "32 nodes x 8xH100-80GB, 400Gb/s",
)


@cache
def profile(name: str, precision: str) -> Profile:
    return survey(TASKS[name][0](), precision)


def plan(name: str, machine: str, **pins: object) -> Plan:
    hardware = parse(machine)
    procs = max(1, len(hardware.gpus))
    device = "cuda" if hardware.gpus else "cpu"
    settings = TASKS[name][0](global_batch=TASKS[name][1]).settings()
    processes = {"device": device, "world_size": procs * hardware.nodes, "local_procs": procs, "nodes": hardware.nodes}
    first_plan = choose(settings, hardware, **processes)  # type: ignore[arg-type]
    return choose(settings, hardware, **processes, pins=pins, profile=profile(name, first_plan.precision))  # type: ignore[arg-type]


def text() -> str:
    lines = []
    for name in TASKS:
        for machine in MACHINES:
            lines.append(f"{name} on {machine}")
            try:
                chosen = plan(name, machine)
            except Problem as problem:
                lines += [f"    {line}" for line in str(problem).splitlines()]
                continue
            gib = sum(chosen.predicted["memory_bytes"].values()) / 2**30
            lines.append(f"    {chosen.sentence()}; evaluation {chosen.eval_micro_batch}")
            lines.append(f"    {gib:.3g} GiB, {chosen.predicted['step_seconds'] * 1e3:.3g} ms; {chosen.reasons['strategy']}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
