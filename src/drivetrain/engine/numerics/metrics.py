"""The forms that a task's metrics, summary and remarks may take, gathered over batches and ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from drivetrain.engine.group import Group
from drivetrain.engine.numerics.losses import real_number, shown
from drivetrain.outcomes import Problem
from drivetrain.task import Task, overrides


class Metrics:
    """What `metrics` gave for every batch of an evaluation: per-sample values, and sums with their counts."""

    def __init__(self) -> None:
        self.values: dict[str, list[Tensor]] = {}
        self.sums: dict[str, Tensor] = {}
        self._forms: dict[str, str] | None = None
        """Of the first batch: name -> how its values come. The first name is the one people look at."""

    def add(self, metrics: Any, weight: int, samples: int) -> None:
        """Take in a batch's metrics; `weight` of its samples count."""
        if not isinstance(metrics, dict) or not metrics:
            raise Problem(f"metrics() gave {type(metrics).__name__}: return a dict of name -> per-sample values or (total, count)")
        forms = {name: self._add(name, value, weight, samples) for name, value in metrics.items()}
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

    def _add(self, name: str, value: Any, weight: int, samples: int) -> str:
        if isinstance(value, tuple):
            pair = [real_number(part) for part in value]
            if len(pair) != 2 or pair[0] is None or pair[1] is None:
                raise Problem(f"metrics() gave ({', '.join(map(shown, value))}) for {name!r}: (total, count) are two real numbers")
            device = next((part.device for part in pair if isinstance(part, Tensor)), torch.device("cpu"))
            counted = torch.stack([torch.as_tensor(part, dtype=torch.float64, device=device) for part in pair])
            self.sums[name] = self.sums.get(name, 0.0) + counted * (1 if weight else 0)
            return "(total, count)"
        if not isinstance(value, Tensor) or value.is_complex() or value.is_meta or value.layout is not torch.strided:
            raise Problem(f"metrics() gave {shown(value)} for {name!r}: a dense tensor of per-sample values or (total, count) is needed")
        if value.dim() == 0:  # a mean over the batch's samples, as a loss gives it
            mean = value.detach().double()
            self.sums[name] = self.sums.get(name, 0.0) + torch.stack([mean, torch.ones_like(mean)]) * weight
            return "one mean"
        if len(value) != samples:
            raise Problem(f"metrics() gave {len(value)} values of {name!r} for {samples} samples: give one a sample, or (total, count)")
        self.values.setdefault(name, []).append(value[:weight].detach())
        return "one value a sample" if value.dim() == 1 else f"rows of shape {list(value.shape[1:])}"

    def finish(self, task: Task, group: Group) -> tuple[dict[str, float], dict[str, Any]]:
        """(means over all samples of all ranks, what `summary` gave that is no single number); a collective call."""
        mine = {name: torch.cat(parts).cpu() for name, parts in self.values.items()}
        everyone = group.gather_objects((self._forms, mine, {name: pair.cpu() for name, pair in self.sums.items()}))
        if any(forms != self._forms for forms, _, _ in everyone):
            raise Problem(f"metrics() gave other names or shapes on other processes: {[forms for forms, _, _ in everyone]}")
        whole = {name: torch.cat([values[name] for _, values, _ in everyone]) for name in mine}
        metrics = {
            n: float(v.double().mean()) for n, v in whole.items() if v.dim() == 1 and (v.is_floating_point() or v.dtype == torch.bool)
        }
        for name in self.sums:
            total, count = torch.stack([sums[name] for _, _, sums in everyone]).sum(0).tolist()
            if count < 0:
                raise Problem(f"metrics() gave the count {count:g} for {name!r}: give how many things the total is over")
            metrics[name] = total / count if count else 0.0
        numbers, figures = read_summary(task.summary(whole)) if overrides(task, "summary") else ({}, {})
        order = list(self._forms or {})
        metrics |= numbers
        return {n: metrics[n] for n in sorted(metrics, key=lambda n: order.index(n) if n in order else len(order))}, figures


def read_summary(summary: Any) -> tuple[dict[str, float], dict[str, Any]]:
    """(numbers, tensors) of what `summary` gave."""
    if not isinstance(summary, dict):
        raise Problem(f"summary() gave {shown(summary)}: return a dict of name -> number or tensor")
    numbers: dict[str, float] = {}
    figures: dict[str, Any] = {}
    for name, figure in summary.items():
        if isinstance(figure, Tensor) and figure.dim() > 0:
            figures[name] = figure
        elif (number := real_number(figure)) is not None:
            numbers[name] = float(number)
        else:
            raise Problem(f"summary() gave {shown(figure)} for {name!r}: real numbers and tensors can be kept")
    return numbers, figures


def read_remarks(remarks: Any) -> list[str]:
    """The lines that `remarks` gave."""
    lines = [remarks] if isinstance(remarks, str) else list(remarks) if isinstance(remarks, (list, tuple)) else None
    if lines is None or not all(isinstance(line, str) for line in lines):
        raise Problem(f"remarks() gave {shown(remarks)}: return a list of lines of text")
    return lines
