"""How far plans are from what is measured: memory and time of models from a machine's description alone, and after measuring.

For each model: the prediction for `1xH200-141GB` (or --hardware WORDS) at every micro-batch of a sweep over 2^k and 3*2^k, the same
after some of them were measured (three, and those between where these do not tell), and whether the chosen micro-batch is as fast as the best of the sweep.

    python benchmarks/plan.py --json benchmarks/results/plan-h200.json     # on the GPU it is about
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

LARGEST = {
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
POINTS = 9  # micro-batches of a sweep, over a factor of sixteen


def sweep_sizes(name: str) -> list[int]:
    largest = LARGEST.get(name, 128)
    return sorted({s for k in range(14) for s in (2**k, 3 * 2**k) if s <= largest})[-POINTS:]


def run(task_class: Any, words: str, seconds: float) -> dict[str, Any]:
    task = task_class()
    begun = time.monotonic()
    profile = survey(task, "bf16")
    surveyed = time.monotonic() - begun
    machine = MachineCapacity.of(parse(words), "cuda", 1)
    plan = Plan(device="cuda", precision="bf16", channels_last=True, pin_memory=True, threads=8)
    probe = Probe(task, plan, torch.device("cuda", 0))
    points: list[Point] = []
    begun = time.monotonic()
    for size in sweep_sizes(task_class.__name__):
        point = probe.measure(size)
        if not point.fits or time.monotonic() - begun > seconds:
            break
        points.append(point)
    probe.free_memory()
    del probe
    gc.collect()
    torch.cuda.empty_cache()
    if held := torch.cuda.memory_allocated():
        raise SystemExit(f"{held:,} bytes are left of {task_class.__name__}: the next model's memory would be wrong")
    return {"survey_seconds": surveyed, "sizes": _rows(profile, machine, points), **_choice(task, profile, machine, points)}


def predicted_anew(task_class: Any, words: str, known: dict[str, Any]) -> dict[str, Any]:
    """What was measured before, beside what is predicted now."""
    task, machine, begun = task_class(), MachineCapacity.of(parse(words), "cuda", 1), time.monotonic()
    profile = survey(task, "bf16")
    surveyed = time.monotonic() - begun
    names = ("peak_bytes", "step_seconds", "update_seconds", "kind")
    points = [Point(r["micro_batch"], True, *(r[n] for n in names)) for r in known["sizes"]]
    return {"survey_seconds": surveyed, "sizes": _rows(profile, machine, points), **_choice(task, profile, machine, points)}


def _candidate(size: int) -> Candidate:
    return Candidate("single", size, 1, 1)


def _probed(profile: Any, machine: MachineCapacity, points: list[Point]) -> list[Point]:
    """Those that planning would measure."""
    known = {p.micro_batch: p for p in points}
    predicted = {s: step_seconds(profile, _candidate(s), machine)["work"] for s in known}
    wanted, found = sizes_to_measure(list(known), points[-1].micro_batch), list[Point]()
    while (size := next_size_to_measure(found, wanted, predicted)) is not None:
        found.append(known[size])
    return found


def _rows(profile: Any, machine: MachineCapacity, points: list[Point]) -> list[dict[str, Any]]:
    probed = _probed(profile, machine, points)
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
    """The order of candidates, and the chosen one against the best: samples a second of one micro-batch after another."""
    real = {p.micro_batch: p.micro_batch / (p.step_seconds - p.update_seconds) for p in points}
    said = {p.micro_batch: p.micro_batch / step_seconds(profile, _candidate(p.micro_batch), machine)["work"] for p in points}
    largest = points[-1].micro_batch
    chosen = {}
    for how, fit in (("described", None), ("measured", Fit.of(_probed(profile, machine, points)))):
        rater = Rater(profile, machine, largest * 3 * 2**4, 1, 1, fit)
        way = rater.candidates({}, deepspeed=False)[0]
        rated = {size: rater.rate(way, size) for size in real}
        fastest = max(r.samples_per_second for r in rated.values())
        best = min((s for s, r in rated.items() if r.samples_per_second >= 0.98 * fastest), key=lambda s: rated[s].needed_bytes)
        chosen[how] = {"micro_batch": best, "of_the_best": real[best] / max(real.values())}
    return {"kendall_tau": kendall([real[s] for s in real], [said[s] for s in real]), "chosen": chosen}


def kendall(a: list[float], b: list[float]) -> float:
    """The rank correlation; pairs that differ by less than 2 % in truth count for neither order."""
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
    parser.add_argument("--again", help="take what a file of results has measured of the others, and predict it anew (needs no GPU)")
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
            found |= predicted_anew(task_class, args.hardware, known[name])
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
