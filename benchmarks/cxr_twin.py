"""Trains the recipe cxr-twin, also with labels of other studies, and with 1 and 4 questions an image; writes scores and times.

    python benchmarks/cxr_twin.py --json benchmarks/results/cxr-twin-cpu.json          # all four, one after another
    python benchmarks/cxr_twin.py --rows shuffled --json benchmarks/results/cxr-twin-cpu.json     # replaces this row of the file

recipe      the recipe as it is
shuffled    each training image belongs to another study: its questions, answers, scene graph and labels are those of that study
K=1, K=4    the recipe's model with so many questions an image, on an equal number of question-answer pairs, and in steps of equal size

Scores are those of the validation split without a scene graph. Chance is the accuracy of the most frequent answer, of all training questions
and of those with the same text. CPU seconds are those of all processes; on a machine that does other work too, only they say what a run costs.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import resource
import sys
import tempfile
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from drivetrain import __version__, recipe
from drivetrain.engine.group import Group
from drivetrain.engine.log.observe import Observers
from drivetrain.engine.loop import Training
from drivetrain.hardware import cpu_cores, detect
from drivetrain.plan.choose import choose
from drivetrain.runs import Run
from drivetrain.tasks.cxr.cxr import Cxr
from drivetrain.tasks.cxr.data.samples import CxrDataset, Sample
from drivetrain.watch.files import MetricsFile

ROWS = ("recipe", "shuffled", "K=1", "K=4")
PAIRS_PER_STEP = 128
"""Question-answer pairs of a step in the comparison of 1 and 4 questions an image."""
SCORES = ("accuracy", "binary_accuracy", "category_accuracy", "region_accuracy", "severity_accuracy", "chexpert_auroc")
GRAPHS = ("accuracy_predicted", "accuracy_oracle", "binary_accuracy_predicted", "binary_accuracy_oracle")


class ExchangedImages(torch.utils.data.Dataset[Sample]):
    """A data set in which each study has the image of another study."""

    def __init__(self, data: CxrDataset, seed: int = 0) -> None:
        self.data = data
        order = np.random.default_rng(seed).permutation(len(data.selection.image))
        self.image_of_group = np.empty_like(data.selection.image)
        self.image_of_group[order] = np.asarray(data.selection.image)[np.roll(order, 1)]  # one cycle: no study keeps its image

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Sample:
        group, _ = self.data.question_rows(index)
        pixels = self.data.images.read(int(self.image_of_group[group]))
        assert pixels is not None, "images of the twin can be read"
        return self.data[index] | {"image": torch.from_numpy(pixels.copy())[None]}


class ShuffledCxr(Cxr):
    """The task with the labels of other studies in training; evaluations have the true ones."""

    def train_data(self) -> Any:
        return ExchangedImages(super().train_data())


def settings_of(row: str, more: list[str], num_pairs: int) -> dict[str, Any]:
    """Returns the settings of a row; `more` are words such as studies=500."""
    (stage,) = recipe.load("cxr-twin", more)
    settings = dict(stage.settings) | {"check": False}
    if row in ("K=1", "K=4"):
        questions = int(row.removeprefix("K="))
        steps = num_pairs // PAIRS_PER_STEP
        settings |= {"questions_per_image": questions, "global_batch": PAIRS_PER_STEP // questions, "steps": steps, "eval_every": steps}
    return settings


def train(row: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Trains; returns scores, times and the curve."""
    task = (ShuffledCxr if row == "shuffled" else Cxr)(**settings)
    task.train_data(), task.eval_data()  # the twin and its index, which are made once, are not in the times
    plan = choose(
        task.settings(), detect(), device="cpu", world_size=1, local_procs=1, pins={"compile": "off", "micro_batch": task.global_batch}
    )
    wall, cpu = time.monotonic(), cpu_seconds()
    with tempfile.TemporaryDirectory() as folder:
        observer = Observers([MetricsFile(Run(folder))])
        training = Training(task, plan, Run(folder), Group(0, 1, torch.device("cpu")), observer, False)
        training.run_to_end()
        observer.close()
        curve = evaluations((Path(folder) / "metrics.jsonl").read_text().splitlines())
        num_steps = training.setup.total_steps
    wall, cpu = time.monotonic() - wall, cpu_seconds() - cpu
    num_pairs = num_steps * task.global_batch * task.questions_per_image
    facts = {
        "name": row,
        "questions_per_image": task.questions_per_image,
        "batch": task.global_batch,
        "steps": num_steps,
        "pairs": num_pairs,
    }
    last = curve[-1]
    return facts | {
        "seconds": round(wall), "cpu_seconds": round(cpu), "threads": torch.get_num_threads(),
        "scores": {name: last.get(name) for name in SCORES}, "with_a_graph": {name: last.get(name) for name in GRAPHS},
        "chance": chance(task), "curve": [{name: each.get(name) for name in ("step", "binary_accuracy", "chexpert_auroc")} for each in curve],
    }  # fmt: skip


def cpu_seconds() -> float:
    """Returns the CPU time of this process and of its children that have ended."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def evaluations(lines: Iterable[str]) -> list[dict[str, float]]:
    """Returns the scores of all evaluations in lines of metrics.jsonl."""
    rows = [json.loads(line) for line in lines]
    names = {f"eval/{name}": name for name in (*SCORES, *GRAPHS)}
    return [
        {"step": row["step"]} | {names[key]: round(value, 4) for key, value in row.items() if key in names}
        for row in rows
        if "eval/accuracy" in row
    ]


def chance(task: Cxr) -> dict[str, float]:
    """Returns the validation accuracy of yes-or-no questions of the most frequent answer in training, and of that of each text."""
    index = task._index
    rows = {}
    for split in ("train", task.eval_split):
        selected = np.asarray(task._dataset(split, None).selection.rows)
        rows[split] = selected[np.asarray(index.question["binary"])[selected] >= 0]
    answers, texts = (np.asarray(index.question[name]) for name in ("binary", "text"))
    balance = np.zeros(len(index.question_texts), np.int64)
    np.add.at(balance, texts[rows["train"]], 2 * answers[rows["train"]].astype(np.int64) - 1)
    is_yes = balance.sum() > 0
    by_text = np.where(balance == 0, is_yes, balance > 0)
    right = answers[rows[task.eval_split]]
    return {
        "binary_accuracy": round(float((right == is_yes).mean()), 4),
        "binary_accuracy_by_text": round(float((right == by_text[texts[rows[task.eval_split]]]).mean()), 4),
        "chexpert_auroc": 0.5,
    }


def show(row: dict[str, Any]) -> None:
    scores = row["scores"]
    print(
        f"{row['name']:<9} {row['pairs']:>9,} pairs in {row['seconds']:,} s ({row['cpu_seconds']:,} CPU s)   "
        f"binary {scores['binary_accuracy']:.1%} (chance {row['chance']['binary_accuracy']:.1%}, "
        f"by text {row['chance']['binary_accuracy_by_text']:.1%})   AUROC {scores['chexpert_auroc'] or math.nan:.3f}",
        flush=True,
    )


def write(path: Path, row: dict[str, Any]) -> None:
    """Writes a row into the file; other rows stay as they are."""
    rows = {each["name"]: each for each in json.loads(path.read_text())["rows"]} if path.is_file() else {}
    rows[row["name"]] = row
    facts = {
        "date": datetime.now(UTC).date().isoformat(), "hardware": f"{cpu_cores()} CPU cores ({platform.machine()})", "torch": torch.__version__,
        "python": platform.python_version(), "drivetrain": __version__,
        "command": "python benchmarks/cxr_twin.py", "rows": [rows[name] for name in ROWS if name in rows],
    }  # fmt: skip
    path.write_text(json.dumps(facts, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--pairs", type=int, default=102_400, help="question-answer pairs of K=1 and K=4 (default 102,400)")
    parser.add_argument("--json", metavar="FILE", help="write the rows to this file, each as soon as it is measured")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="settings that differ from the recipe's")
    args = parser.parse_args()
    for name in args.rows:
        row = train(name, settings_of(name, args.settings, args.pairs))
        show(row)
        if args.json:
            write(Path(args.json), row | {"command": " ".join(["python benchmarks/cxr_twin.py", *sys.argv[1:]])})


if __name__ == "__main__":
    main()
