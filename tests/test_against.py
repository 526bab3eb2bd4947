"""`eval --bootstrap` and `--against`: intervals for any task's metrics, and the paired bootstrap of two runs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from drivetrain.engine.numerics.bootstrap import resample_metrics, sample_groups
from drivetrain.engine.numerics.metrics import read_summary
from drivetrain.launch.evaluation import compare, interval
from drivetrain.outcomes import Problem
from drivetrain.task import Task
from tests.command import TASK, expect_error, run_ok, write_task

SUMMARY = """
    def summary(self, values):
        right = values["accuracy"]
        return {"errors": float((right == 0).sum()), "halves": {"first": float(right[: len(right) // 2].mean()), "second": 0.5}}
"""


class Ranked(Task):
    """A task with a metric of its summary."""

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def summary(self, values: dict[str, Tensor]) -> dict[str, Any]:
        return {"largest": float(values["score"].max()), "table": {"smallest": float(values["score"].min())}}


def result(means: dict[str, list[float]], samples: int = 100, **tables: dict[str, float]) -> dict[str, Any]:
    return {
        "metrics": {name: float(np.mean(values)) for name, values in means.items()},
        "samples": samples,
        "figures": tables,
        "resamples": means,
    }


def test_resamples_have_the_means_and_the_summary_of_the_drawn_samples() -> None:
    values = {"score": torch.arange(20.0), "rank": torch.arange(20)}
    found = resample_metrics(Ranked(), values, 3)
    assert set(found) == {"score", "largest", "table: smallest"}
    for number in range(3):
        drawn = np.random.default_rng([20, number]).integers(0, 20, 20)
        assert found["score"][number] == pytest.approx(drawn.mean())
        assert found["largest"][number] == drawn.max() and found["table: smallest"][number] == drawn.min()
    assert resample_metrics(Ranked(), values, 0) == {}


class Grouped(Ranked):
    """A task whose samples belong to groups."""

    def resample_groups(self, values: dict[str, Tensor]) -> Tensor:
        return values["group"]


def test_samples_of_a_group_are_drawn_together() -> None:
    single = {"score": torch.from_numpy(np.random.default_rng(0).normal(size=50)), "group": torch.arange(50).flip(0)}
    repeated = {name: value.repeat(10) for name, value in single.items()}
    found = [resample_metrics(Grouped(), values, 200, sample_groups(Grouped(), values)) for values in (single, repeated)]
    assert found[1]["score"] == pytest.approx(found[0]["score"]), "ten copies of a sample say as much as one"
    alone = interval(resample_metrics(Ranked(), repeated, 200)["score"])
    together = interval(found[1]["score"])
    assert alone is not None and together is not None and together[1] - together[0] > 2 * (alone[1] - alone[0])


@pytest.mark.parametrize(
    ("groups", "message"), [(torch.zeros(3, dtype=torch.long), "each of the 4"), (torch.zeros(4), "whole numbers"), (1, "whole numbers")]
)
def test_groups_that_do_not_fit_are_refused(groups: Any, message: str) -> None:
    with pytest.raises(Problem, match=message):
        sample_groups(Grouped(), {"score": torch.zeros(4), "group": groups})


def test_runs_are_compared_by_what_was_evaluated() -> None:
    one, other = result({"a": [1.0, 2.0]}, 10) | {"digest": "x"}, result({"a": [1.0, 1.0]}, 40) | {"digest": "x"}
    assert compare(one, other)[0].name == "a", "other samples, the same questions"
    with pytest.raises(Problem, match="other evaluation data"):
        compare(one, other | {"digest": "y", "samples": 10})


def test_the_interval_of_a_mean_is_that_of_the_normal_distribution() -> None:
    values = {"score": torch.from_numpy(np.random.default_rng(0).normal(size=400))}
    bounds = interval(resample_metrics(Ranked(), values, 1000)["score"])
    assert bounds is not None
    half = 1.96 * float(values["score"].std()) / math.sqrt(400)
    assert bounds[1] - bounds[0] == pytest.approx(2 * half, rel=0.1)
    assert interval([math.nan]) is None and interval([math.nan, 2.0, 1.0]) == [1.0, 2.0]


def test_a_paired_difference_is_surer_than_two_intervals() -> None:
    rng = np.random.default_rng(1)
    easy = rng.normal(size=300)  # both runs find the same samples hard
    one, other = (resample_metrics(Ranked(), {"score": torch.from_numpy(easy + shift)}, 300) for shift in (0.05, 0.0))
    (difference, *_) = compare(result({"score": one["score"]}), result({"score": other["score"]}))
    assert difference.interval[0] == pytest.approx(0.05) and difference.p < 0.01
    assert np.std(one["score"]) > 0.05


def test_equal_runs_have_no_difference() -> None:
    (difference,) = compare(result({"a": [0.5, 0.6, 0.4]}), result({"a": [0.5, 0.6, 0.4]}))
    assert difference.interval == [0, 0] and difference.p == 1


def test_runs_with_other_data_or_metrics_are_refused() -> None:
    with pytest.raises(Problem, match="same samples"):
        compare(result({"a": [1.0]}, 10), result({"a": [1.0]}, 11))
    with pytest.raises(Problem, match="no metric in common"):
        compare(result({"a": [1.0]}), result({"b": [1.0]}))


def test_a_summary_may_hold_tables() -> None:
    numbers, figures = read_summary({"a": 1, "table": {"x": 0.5, 3: torch.tensor(2)}, "matrix": torch.eye(2)})
    assert numbers == {"a": 1.0} and figures["table"] == {"x": 0.5, "3": 2.0} and figures["matrix"].shape == (2, 2)
    with pytest.raises(Problem, match="'table: x'"):
        read_summary({"table": {"x": "text"}})


def test_eval_compares_two_runs_of_any_task(folder: Path) -> None:
    write_task(text=TASK + SUMMARY)
    run_ok("train", "small.py", "epochs=1", "--name", "short")
    run_ok("train", "small.py", "epochs=6", "--name", "longer")
    plain = run_ok("eval", "longer", "--bootstrap", "100")
    assert "halves:" in plain and "second" in plain
    facts = json.loads(Path("runs/longer/eval.json").read_text())
    low, high = facts["intervals"]["accuracy"]
    assert low < facts["metrics"]["accuracy"] < high and facts["figures"]["halves"]["second"] == 0.5
    shown = json.loads(run_ok("eval", "longer", "--against", "short", "--json", "--bootstrap", "100"))
    change = {difference["name"]: difference for difference in shown["against"]}
    assert change["accuracy"]["interval"][0] > 0 and change["errors"]["interval"][1] < 0 and "halves: first" in change
    lines = run_ok("eval", "short", "--against", "longer", "--bootstrap", "100")
    assert "against" in lines and "95 % interval" in lines
    assert "number of resamples" in expect_error("eval", "short", "--bootstrap", "none")
