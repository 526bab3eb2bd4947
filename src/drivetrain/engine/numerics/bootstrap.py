"""Bootstrap: the metrics of an evaluation, computed again for groups of samples drawn with replacement.

The draws depend on the number of groups alone, so that the resamples of two runs on the same data are pairs.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from drivetrain.engine.numerics.losses import describe_value
from drivetrain.engine.numerics.metrics import means_of, read_summary
from drivetrain.outcomes import Problem
from drivetrain.task import Task, overrides

Array = np.ndarray[Any, Any]


class SampleGroups(NamedTuple):
    """The groups of an evaluation's samples."""

    members: list[Array]
    """The samples of each group, in the order of the groups' numbers."""
    digest: str
    """A hash of what was evaluated, where the task names it; else empty."""


def sample_groups(task: Task, values: dict[str, Tensor]) -> SampleGroups | None:
    """Returns the groups that the task gives its samples; None if every sample is one."""
    if not values or (found := task.resample_groups(values)) is None:
        return None
    groups, items = found if isinstance(found, tuple) else (found, None)
    length = len(next(iter(values.values())))
    for tensor, form in ((groups, f"{length} whole numbers"), *([(items, "rows of whole numbers")] if items is not None else [])):
        if not isinstance(tensor, Tensor) or tensor.is_floating_point() or tensor.dim() == 0:
            raise Problem(f"resample_groups() gave {describe_value(tensor)}: give a tensor of {form}")
    if groups.shape != (length,):
        raise Problem(f"resample_groups() gave the shape {list(groups.shape)}: give a group for each of the {length} samples")
    numbers, place = np.unique(groups.cpu().numpy(), return_inverse=True)
    members = np.split(np.argsort(place, kind="stable"), np.cumsum(np.bincount(place, minlength=len(numbers)))[:-1])
    return SampleGroups(members, "" if items is None else _digest(numbers, items))


def _digest(numbers: Array, items: Tensor) -> str:
    rows = np.unique(items.cpu().numpy().astype(np.int64), axis=0)
    return hashlib.sha256(numbers.astype(np.int64).tobytes() + rows.tobytes()).hexdigest()


def resample_metrics(
    task: Task, values: dict[str, Tensor], num_resamples: int, groups: SampleGroups | None = None
) -> dict[str, list[float]]:
    """Returns name -> the metric in each resample; NaN where a resample does not give it.

    Metrics that `metrics` returns as (total, count) are left out: their values per sample are not known.
    A row of a table is named `TABLE: ROW`.
    """
    results: list[dict[str, float]] = []
    for number in range(num_resamples if values else 0):
        drawn = torch.from_numpy(_draw(len(next(iter(values.values()))), groups, number))
        chosen = {name: value[drawn] for name, value in values.items()}
        numbers, figures = read_summary(task.summary(chosen)) if overrides(task, "summary") else ({}, {})
        tables = {f"{name}: {row}": value for name, table in figures.items() if isinstance(table, dict) for row, value in table.items()}
        results.append(means_of(chosen) | numbers | tables)
    names = dict.fromkeys(name for result in results for name in result)
    return {name: [result.get(name, math.nan) for result in results] for name in names}


def _draw(num_samples: int, groups: SampleGroups | None, number: int) -> Array:
    """Returns the samples of a resample."""
    length = num_samples if groups is None else len(groups.members)
    drawn: Array = np.random.default_rng([length, number]).integers(0, length, length)
    return drawn if groups is None else np.concatenate([groups.members[group] for group in drawn])
