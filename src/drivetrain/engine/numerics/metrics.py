"""Sums the metrics of an evaluation over batches and ranks, and checks the return values of `metrics`, `summary` and `remarks`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from drivetrain.data import Picture
from drivetrain.engine.group import Group
from drivetrain.engine.numerics.losses import describe_value, real_number
from drivetrain.outcomes import Problem
from drivetrain.task import Task, overrides


class EvaluationMetrics:
    """Collects the metrics of each batch of an evaluation: per-sample values, and totals with their counts."""

    def __init__(self) -> None:
        self.values: dict[str, list[Tensor]] = {}
        self.sums: dict[str, Tensor] = {}
        self._forms: dict[str, str] | None = None
        """In the first batch: name -> form of its values. The first name is the main metric."""
        self.all_values: dict[str, Tensor] = {}
        """After `finish`: the per-sample values of all ranks."""

    def add(self, metrics: Any, num_real: int, num_samples: int) -> None:
        """Adds a batch's metrics; only the first `num_real` of its samples count."""
        if not isinstance(metrics, dict) or not metrics:
            raise Problem(f"metrics() gave {type(metrics).__name__}: return a dict of name -> per-sample values or (total, count)")
        forms = {name: self._add_value(name, value, num_real, num_samples) for name, value in metrics.items()}
        if self._forms is None:
            self._forms = forms
        if forms.keys() != self._forms.keys():
            raise Problem(f"metrics() gave {list(forms)}, but {list(self._forms)} in the first batch: names must stay the same")
        for name, form in forms.items():
            if form != self._forms[name]:
                raise Problem(
                    f"metrics() gave {form} for {name!r}, but {self._forms[name]} in the first batch: it must stay the same;"
                    f" pad rows to one width, or give (total, count)"
                )

    def _add_value(self, name: str, value: Any, num_real: int, num_samples: int) -> str:
        """Adds one metric of a batch; returns the form of its values."""
        if isinstance(value, tuple):
            pair = [real_number(part) for part in value]
            if len(pair) != 2 or pair[0] is None or pair[1] is None:
                raise Problem(f"metrics() gave ({', '.join(map(describe_value, value))}) for {name!r}: (total, count) are two real numbers")
            device = next((part.device for part in pair if isinstance(part, Tensor)), torch.device("cpu"))
            total_and_count = torch.stack([torch.as_tensor(part, dtype=torch.float64, device=device) for part in pair])
            self.sums[name] = self.sums.get(name, 0.0) + total_and_count * (1 if num_real else 0)
            return "(total, count)"
        if not isinstance(value, Tensor) or value.is_complex() or value.is_meta or value.layout is not torch.strided:
            raise Problem(
                f"metrics() gave {describe_value(value)} for {name!r}: a dense tensor of per-sample values or (total, count) is needed"
            )
        if value.dim() == 0:  # a mean over the batch's samples, as a loss gives it
            mean = value.detach().double()
            self.sums[name] = self.sums.get(name, 0.0) + torch.stack([mean, torch.ones_like(mean)]) * num_real
            return "one mean"
        if len(value) != num_samples:
            raise Problem(f"metrics() gave {len(value)} values of {name!r} for {num_samples} samples: give one a sample, or (total, count)")
        self.values.setdefault(name, []).append(value[:num_real].detach())
        return "one value a sample" if value.dim() == 1 else f"rows of shape {list(value.shape[1:])}"

    def finish(self, task: Task, group: Group) -> tuple[dict[str, float], dict[str, Any]]:
        """Returns (means over all samples of all ranks, the tensors and tables that `summary` returned). A collective call."""
        local = {name: torch.cat(parts).cpu() for name, parts in self.values.items()}
        gathered = group.gather_objects((self._forms, local, {name: pair.cpu() for name, pair in self.sums.items()}))
        if any(forms != self._forms for forms, _, _ in gathered):
            raise Problem(f"metrics() gave other names or shapes on other processes: {[forms for forms, _, _ in gathered]}")
        values = self.all_values = {name: torch.cat([v[name] for _, v, _ in gathered]) for name in local}
        metrics = means_of(values)
        for name in self.sums:
            total, count = torch.stack([sums[name] for _, _, sums in gathered]).sum(0).tolist()
            if count < 0:
                raise Problem(f"metrics() gave the count {count:g} for {name!r}: give how many things the total is over")
            metrics[name] = total / count if count else 0.0
        numbers, figures = read_summary(task.summary(values)) if overrides(task, "summary") else ({}, {})
        metrics |= numbers
        names_in_order = [name for name in self._forms or {} if name in metrics]
        names_in_order += [name for name in metrics if name not in names_in_order]  # those that only `summary` returned
        return {name: metrics[name] for name in names_in_order}, figures


def means_of(values: dict[str, Tensor]) -> dict[str, float]:
    """Returns the mean of each name with one fraction or boolean per sample."""
    is_averaged = {name: value.dim() == 1 and (value.is_floating_point() or value.dtype == torch.bool) for name, value in values.items()}
    return {name: float(value.double().mean()) for name, value in values.items() if is_averaged[name]}


def read_summary(summary: Any) -> tuple[dict[str, float], dict[str, Any]]:
    """Splits the return value of `summary` into (numbers, figures): figures are tensors, and tables of numbers by name."""
    if not isinstance(summary, dict):
        raise Problem(f"summary() gave {describe_value(summary)}: return a dict of name -> number, tensor or table")
    numbers: dict[str, float] = {}
    figures: dict[str, Any] = {}
    for name, value in summary.items():
        if isinstance(value, Tensor) and value.dim() > 0:
            figures[name] = value
        elif isinstance(value, dict):
            figures[name] = {str(row): _summary_number(f"{name}: {row}", number) for row, number in value.items()}
        else:
            numbers[name] = _summary_number(name, value)
    return numbers, figures


def _summary_number(name: str, value: Any) -> float:
    number = real_number(value)
    if number is None:
        raise Problem(f"summary() gave {describe_value(value)} for {name!r}: real numbers, tensors, and dicts of numbers can be kept")
    return float(number)


def read_remarks(remarks: Any) -> tuple[list[str], list[Picture]]:
    """Splits the return value of `remarks` into (lines of text, pictures)."""
    values = [remarks] if isinstance(remarks, (str, Picture)) else remarks
    if not isinstance(values, (list, tuple)) or not all(isinstance(value, (str, Picture)) for value in values):
        raise Problem(f"remarks() gave {describe_value(remarks)}: return a list of lines of text and Pictures")
    return [value for value in values if isinstance(value, str)], [value for value in values if isinstance(value, Picture)]
