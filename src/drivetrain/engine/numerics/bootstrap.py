"""Bootstrap: the metrics of an evaluation, computed again for samples drawn with replacement.

The draws depend on the number of samples alone, so that the resamples of two runs on the same data are pairs.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from drivetrain.engine.numerics.metrics import means_of, read_summary
from drivetrain.task import Task, overrides


def resample_metrics(task: Task, values: dict[str, Tensor], num_resamples: int) -> dict[str, list[float]]:
    """Returns name -> the metric in each resample; NaN where a resample does not give it.

    Metrics that `metrics` returns as (total, count) are left out: their values per sample are not known.
    A row of a table is named `TABLE: ROW`.
    """
    results: list[dict[str, float]] = []
    for number in range(num_resamples if values else 0):
        length = len(next(iter(values.values())))
        drawn = torch.from_numpy(np.random.default_rng([length, number]).integers(0, length, length))
        chosen = {name: value[drawn] for name, value in values.items()}
        numbers, figures = read_summary(task.summary(chosen)) if overrides(task, "summary") else ({}, {})
        tables = {f"{name}: {row}": value for name, table in figures.items() if isinstance(table, dict) for row, value in table.items()}
        results.append(means_of(chosen) | numbers | tables)
    names = dict.fromkeys(name for result in results for name in result)
    return {name: [result.get(name, math.nan) for result in results] for name in names}
