"""Compares predicted with measured memory and step time: predicted from a machine's description alone, and after measurements.

For each model it predicts every micro-batch of a sweep over 2^k and 3*2^k: first from the description `1xH200-141GB` (or
--hardware DESCRIPTION), then with the measurements that planning would make. It also compares the speed of the chosen
micro-batch with the best of the sweep.

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
NUM_SIZES = 9  # micro-batches of a sweep; the largest is 16 times the smallest


def sweep_sizes(name: str) -> list[int]:
    largest = LARGEST_MICRO_BATCH.get(name, 128)
    sizes = {2**k for k in range(14)} | {3 * 2**k for k in range(14)}
    return sorted(size for size in sizes if size <= largest)[-NUM_SIZES:]


def run(task_class: Any, description: str, seconds: float) -> dict[str, Any]:
    task = task_class()
    started = time.monotonic()
    profile = survey(task, "bf16")
    survey_seconds = time.monotonic() - started
    machine = MachineCapacity.of(parse(description), "cuda", 1)
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
        raise SystemExit(f"{leaked:,} bytes of {task_class.__name__} are still allocated: the next model's memory would be wrong")
    return {"survey_seconds": survey_seconds, "sizes": _compare(profile, machine, points), **_choice(task, profile, machine, points)}


def predict_again(task_class: Any, description: str, earlier: dict[str, Any]) -> dict[str, Any]:
    """Compares earlier measurements with predictions of the present code."""
    task, machine, started = task_class(), MachineCapacity.of(parse(description), "cuda", 1), time.monotonic()
    profile = survey(task, "bf16")
    survey_seconds = time.monotonic() - started
    points = [Point(r["micro_batch"], True, r["peak_bytes"], r["step_seconds"], r["update_seconds"], r["kind"]) for r in earlier["sizes"]]
    return {"survey_seconds": survey_seconds, "sizes": _compare(profile, machine, points), **_choice(task, profile, machine, points)}


def _candidate(size: int) -> Candidate:
    return Candidate("single", size, 1, 1)


def _measured_by_planning(profile: Any, machine: MachineCapacity, points: list[Point]) -> list[Point]:
    """Returns the points that planning would measure."""
    point_of_size = {p.micro_batch: p for p in points}
    predicted = {size: step_seconds(profile, _candidate(size), machine)["work"] for size in point_of_size}
    sizes = sizes_to_measure(list(point_of_size), points[-1].micro_batch)
    measured: list[Point] = []
    while (size := next_size_to_measure(measured, sizes, predicted)) is not None:
        measured.append(point_of_size[size])
    return measured


def _compare(profile: Any, machine: MachineCapacity, points: list[Point]) -> list[dict[str, Any]]:
    """Returns a row for each micro-batch: what was measured, and the errors of the predictions."""
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
    """Compares the predicted order of the micro-batches with the measured one, and the speed of the chosen one with the best."""
    # Samples per second by micro-batch, without the update.
    measured = {p.micro_batch: p.micro_batch / (p.step_seconds - p.update_seconds) for p in points}
    predicted = {p.micro_batch: p.micro_batch / step_seconds(profile, _candidate(p.micro_batch), machine)["work"] for p in points}
    largest = points[-1].micro_batch
    chosen = {}
    measured_fit = Fit.of(_measured_by_planning(profile, machine, points))
    for source, fit in (("described", None), ("measured", measured_fit)):
        rater = Rater(profile, machine, largest * 3 * 2**4, 1, 1, fit)
        candidate = rater.candidates({}, deepspeed=False)[0]
        rated = {size: rater.rate(candidate, size) for size in measured}
        fastest = max(r.samples_per_second for r in rated.values())
        # As planning chooses: of micro-batches of about the same speed, the one that needs the least memory.
        fast_sizes = [size for size, rating in rated.items() if rating.samples_per_second >= 0.98 * fastest]
        best = min(fast_sizes, key=lambda size: rated[size].needed_bytes)
        chosen[source] = {"micro_batch": best, "of_the_best": measured[best] / max(measured.values())}
    return {"kendall_tau": kendall([measured[s] for s in measured], [predicted[s] for s in measured]), "chosen": chosen}


def kendall(a: list[float], b: list[float]) -> float:
    """Returns Kendall's rank correlation, without pairs whose first values differ by less than 2 %."""
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
    parser.add_argument("--hardware", default="1xH200-141GB", help="the description of this machine")
    parser.add_argument("--json", help="write the results here")
    parser.add_argument("--only", nargs="*", help="names of task classes to measure")
    parser.add_argument(
        "--again", help="a results file: predict again the models that --only does not name, with its measurements (needs no GPU)"
    )
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="the longest sweep of one of the five named models; others get half of it"
    )
    args = parser.parse_args()
    models = []
    earlier = json.loads(Path(args.again).read_text()) if args.again else {"rows": []}
    earlier_of_model = {row["model"]: row for row in earlier["rows"]}
    for name, task_class in {**NAMED, **FURTHER, **UNSEEN}.items():
        model = {"model": name, "unseen": name in UNSEEN}
        if not args.only or task_class.__name__ in args.only:
            model |= run(task_class, args.hardware, args.seconds if name in NAMED else args.seconds / 2)
        elif name in earlier_of_model:
            model |= predict_again(task_class, args.hardware, earlier_of_model[name])
        else:
            continue
        models.append(model)
        _print(model)
        if args.json:
            _write(args, models, earlier)


def _print(model: dict[str, Any]) -> None:
    """Prints the largest errors; after measuring, only of micro-batches that planning does not measure."""
    rows = model["sizes"]
    unmeasured = [r for r in rows if not r["probed"]] or rows
    memory_error = max((r["memory_error"] for r in rows), key=abs)
    time_factor = max((r["time_factor"] for r in rows), key=lambda factor: abs(math.log(factor)))
    fitted_memory_error = max((r["fitted_memory_error"] for r in unmeasured), key=abs)
    fitted_time_error = max((r["fitted_time_error"] for r in unmeasured), key=abs)
    print(
        f"{model['model']:<22} {len(rows)} sizes {rows[0]['micro_batch']}-{rows[-1]['micro_batch']}:"
        f" memory {memory_error:+.1%}, time x{time_factor:.2f}, tau {model['kendall_tau']:.2f};"
        f" measured: memory {fitted_memory_error:+.1%}, time {fitted_time_error:+.1%};"
        f" chosen {model['chosen']['described']['of_the_best']:.0%} / {model['chosen']['measured']['of_the_best']:.0%} of the best",
        flush=True,
    )


def _write(args: argparse.Namespace, models: list[dict[str, Any]], earlier: dict[str, Any]) -> None:
    origin = {k: v for k, v in earlier.items() if k != "rows"}
    if torch.cuda.is_available():
        origin = {
            "date": date.today().isoformat(), "hardware": torch.cuda.get_device_name(0), "described": args.hardware,
            "python": platform.python_version(), "torch": torch.__version__,
            "command": " ".join(["python benchmarks/plan.py", *sys.argv[1:]]),
        }  # fmt: skip
    facts = {**origin, "drivetrain": __version__, "rows": models}
    Path(args.json).write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
