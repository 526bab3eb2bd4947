"""Compares plans with measurements: memory and time of models, predicted from a machine's description alone and after measuring.

For each model: the prediction for `1xH200-141GB` (or --hardware WORDS) at every micro-batch of a sweep over 2^k and 3*2^k; the same
after some of them were measured, as planning measures them; and how fast the chosen micro-batch is beside the best of the sweep.

    python benchmarks/plan.py --json benchmarks/results/plan-h200.json     # on the described GPU
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import platform
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
from plan_further import FURTHER, UNSEEN
from plan_models import NAMED

from drivetrain import __version__
from drivetrain.engine.measure.probe import Probe
from drivetrain.engine.measure.survey import survey
from drivetrain.hardware.described import parse
from drivetrain.plan import Plan
from drivetrain.plan.candidates import Candidate
from drivetrain.plan.capacity import MachineCapacity
from drivetrain.plan.fit import Fit, Point, next_size_to_measure, sizes_to_measure
from drivetrain.plan.predict_memory import memory_by_part
from drivetrain.plan.predict_time import step_seconds
from drivetrain.plan.rating import Rater

LARGEST_MICRO_BATCH = {
    "Cnn": 4096,
    "VitB": 192,
    "Smol135": 32,
    "Smol1700": 16,
    "Lstm": 512,
    "Bert": 96,
    "Unet": 128,
    "Mlp": 8192,
    "Gru": 192,
    "Residual": 192,
    "Mixer": 192,
    "ByHand": 96,
    "Autoencoder": 256,
    "Recommender": 8192,
    "Depthwise": 192,
    "Translator": 96,
    "Points": 384,
    "Graph": 512,
    "Film": 128,
}
NUM_SIZES = 9  # of a sweep: a factor of 16 between the smallest and the largest


def sweep_sizes(name: str) -> list[int]:
    largest = LARGEST_MICRO_BATCH.get(name, 128)
    return sorted({s for k in range(14) for s in (2**k, 3 * 2**k) if s <= largest})[-NUM_SIZES:]


def run(task_class: Any, words: str, seconds: float) -> dict[str, Any]:
    task = task_class()
    started = time.monotonic()
    profile = survey(task, "bf16")
    survey_seconds = time.monotonic() - started
    machine = MachineCapacity.of(parse(words), "cuda", 1)
    plan = Plan(device="cuda", precision="bf16", channels_last=True, pin_memory=True, threads=8)
    probe = Probe(task, plan, torch.device("cuda", 0))
    points: list[Point] = []
    started = time.monotonic()
    for size in sweep_sizes(task_class.__name__):
        point = probe.measure(size)
        if not point.fits or time.monotonic() - started > seconds:
            break
        points.append(point)
    probe.free_memory()
    del probe
    gc.collect()
    torch.cuda.empty_cache()
    if leaked := torch.cuda.memory_allocated():
        raise SystemExit(f"{leaked:,} bytes are left of {task_class.__name__}: the next model's memory would be wrong")
    return {"survey_seconds": survey_seconds, "sizes": _rows(profile, machine, points), **_choice(task, profile, machine, points)}


def compare_again(task_class: Any, words: str, known: dict[str, Any]) -> dict[str, Any]:
    """Compares earlier measurements with predictions of now."""
    task, machine, started = task_class(), MachineCapacity.of(parse(words), "cuda", 1), time.monotonic()
    profile = survey(task, "bf16")
    survey_seconds = time.monotonic() - started
    names = ("peak_bytes", "step_seconds", "update_seconds", "kind")
    points = [Point(r["micro_batch"], True, *(r[n] for n in names)) for r in known["sizes"]]
    return {"survey_seconds": survey_seconds, "sizes": _rows(profile, machine, points), **_choice(task, profile, machine, points)}


def _candidate(size: int) -> Candidate:
    return Candidate("single", size, 1, 1)


def _measured_by_planning(profile: Any, machine: MachineCapacity, points: list[Point]) -> list[Point]:
    """Returns the points that planning would measure."""
    known = {p.micro_batch: p for p in points}
    predicted = {s: step_seconds(profile, _candidate(s), machine)["work"] for s in known}
    wanted, measured = sizes_to_measure(list(known), points[-1].micro_batch), list[Point]()
    while (size := next_size_to_measure(measured, wanted, predicted)) is not None:
        measured.append(known[size])
    return measured


def _rows(profile: Any, machine: MachineCapacity, points: list[Point]) -> list[dict[str, Any]]:
    probed = _measured_by_planning(profile, machine, points)
    fit = Fit.of(probed)
    assert fit is not None

    def bytes_at(size: int) -> float:
        return float(sum(memory_by_part(profile, _candidate(size)).values()))

    def work_at(size: int) -> float:
        return step_seconds(profile, _candidate(size), machine)["work"]

    rows = []
    for p in points:
        predicted = sum(step_seconds(profile, _candidate(p.micro_batch), machine).values())
        fitted = fit.work_seconds(p.micro_batch, work_at) + fit.update_seconds()
        rows.append(
            {
                "micro_batch": p.micro_batch, "kind": p.kind, "peak_bytes": p.peak_bytes, "step_seconds": p.step_seconds,
                "update_seconds": p.update_seconds,
                "memory_error": bytes_at(p.micro_batch) / p.peak_bytes - 1, "time_factor": predicted / p.step_seconds,
                "probed": p in probed, "fitted_memory_error": fit.peak_bytes(p.micro_batch, bytes_at) / p.peak_bytes - 1,
                "fitted_time_error": fitted / p.step_seconds - 1,
            }
        )  # fmt: skip
    return rows


def _choice(task: Any, profile: Any, machine: MachineCapacity, points: list[Point]) -> dict[str, Any]:
    """Returns how well samples per second of the micro-batches are ordered, and how fast the chosen one is beside the best."""
    measured = {p.micro_batch: p.micro_batch / (p.step_seconds - p.update_seconds) for p in points}
    predicted = {p.micro_batch: p.micro_batch / step_seconds(profile, _candidate(p.micro_batch), machine)["work"] for p in points}
    largest = points[-1].micro_batch
    chosen = {}
    for source, fit in (("described", None), ("measured", Fit.of(_measured_by_planning(profile, machine, points)))):
        rater = Rater(profile, machine, largest * 3 * 2**4, 1, 1, fit)
        candidate = rater.candidates({}, deepspeed=False)[0]
        rated = {size: rater.rate(candidate, size) for size in measured}
        fastest = max(r.samples_per_second for r in rated.values())
        best = min((s for s, r in rated.items() if r.samples_per_second >= 0.98 * fastest), key=lambda s: rated[s].needed_bytes)
        chosen[source] = {"micro_batch": best, "of_the_best": measured[best] / max(measured.values())}
    return {"kendall_tau": kendall([measured[s] for s in measured], [predicted[s] for s in measured]), "chosen": chosen}


def kendall(a: list[float], b: list[float]) -> float:
    """Returns the rank correlation; pairs whose measured values differ by less than 2 % are left out."""
    score, pairs = 0, 0
    for i in range(len(a)):
        for j in range(i):
            if abs(math.log(a[i] / a[j])) < 0.02:
                continue
            pairs += 1
            score += 1 if (a[i] - a[j]) * (b[i] - b[j]) > 0 else -1
    return score / pairs if pairs else 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hardware", default="1xH200-141GB", help="how this machine would be described")
    parser.add_argument("--json", help="write the results here")
    parser.add_argument("--only", nargs="*", help="names of task classes to measure")
    parser.add_argument("--again", help="for other models: take the measurements of a results file and predict again (needs no GPU)")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="at most, for the sweep of one of the five named models; half for others"
    )
    args = parser.parse_args()
    models = []
    before = json.loads(Path(args.again).read_text()) if args.again else {"rows": []}
    known = {m["model"]: m for m in before["rows"]}
    for name, task_class in {**NAMED, **FURTHER, **UNSEEN}.items():
        found = {"model": name, "unseen": name in UNSEEN}
        if not args.only or task_class.__name__ in args.only:
            found |= run(task_class, args.hardware, args.seconds if name in NAMED else args.seconds / 2)
        elif name in known:
            found |= compare_again(task_class, args.hardware, known[name])
        else:
            continue
        models.append(found)
        _print(found)
        if args.json:
            _write(args, models, before)


def _print(found: dict[str, Any]) -> None:
    rows = found["sizes"]
    new = [r for r in rows if not r["probed"]] or rows
    worst = {k: max(rows, key=lambda r: abs(r[k])) for k in ("memory_error",)}
    slowest = max(rows, key=lambda r: abs(math.log(r["time_factor"])))
    memory_after, time_after = (max(new, key=lambda r: abs(r[k])) for k in ("fitted_memory_error", "fitted_time_error"))
    print(
        f"{found['model']:<22} {len(rows)} sizes {rows[0]['micro_batch']}-{rows[-1]['micro_batch']}:"
        f" memory {worst['memory_error']['memory_error']:+.1%}, time x{slowest['time_factor']:.2f}, tau {found['kendall_tau']:.2f};"
        f" measured: memory {memory_after['fitted_memory_error']:+.1%}, time {time_after['fitted_time_error']:+.1%};"
        f" chosen {found['chosen']['described']['of_the_best']:.0%} / {found['chosen']['measured']['of_the_best']:.0%} of the best",
        flush=True,
    )


def _write(args: argparse.Namespace, models: list[dict[str, Any]], before: dict[str, Any]) -> None:
    measured = {k: v for k, v in before.items() if k != "rows"}
    if torch.cuda.is_available():
        measured = {
            "date": date.today().isoformat(), "hardware": torch.cuda.get_device_name(0), "described": args.hardware,
            "python": platform.python_version(), "torch": torch.__version__,
            "command": " ".join(["python benchmarks/plan.py", *sys.argv[1:]]),
        }  # fmt: skip
    facts = {**measured, "drivetrain": __version__, "rows": models}
    Path(args.json).write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
