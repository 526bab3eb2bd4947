"""The forms a task's loss may take, read into named parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drivetrain.outcomes import Problem


@dataclass(frozen=True, slots=True)
class Part:
    """One term: a mean over the batch's samples, or a total with a count of its own."""

    name: str
    value: Tensor
    count: Any = None


def summed(value: Any) -> Any:
    """What `loss` returned, with logged figures of many values as their totals: where it is compiled, so is their sum."""
    if not (isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], dict)):
        return value
    return value[0], {name: _total(figure) for name, figure in value[1].items()}


def _total(figure: Any) -> Any:
    return (figure.detach().float().sum(), figure.numel()) if isinstance(figure, Tensor) and figure.dim() else figure


def read_loss(value: Any) -> tuple[list[Part], list[Part]]:
    """(parts to minimise, figures only logged) of what `loss` returned."""
    if isinstance(value, Tensor):
        return [_part("loss", value)], []
    logged: list[Part] = []
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], dict):
        value, figures = value
        logged = [read_figure(name, figure) for name, figure in figures.items()]
    if isinstance(value, dict):
        if not value:
            raise Problem("loss() gave an empty dict: return a scalar, (total, count), or a dict of such parts")
        return [_part(name, part) for name, part in value.items()], logged
    return [_part("loss", value)], logged


def _part(name: str, value: Any) -> Part:
    count = None
    if isinstance(value, tuple) and len(value) == 2:
        value, count = value
    if not isinstance(value, Tensor):
        raise Problem(
            f"loss() gave a {type(value).__name__} for {name!r}: return a scalar tensor (the mean over the samples), (total, count),"
            f" or a dict of such parts"
        )
    if value.dim() != 0:
        raise Problem(f"loss() gave {name!r} with shape {list(value.shape)}: it must be a scalar; end it with .mean()")
    return Part(name, value, count)


def read_figure(name: str, value: Any) -> Part:
    """A logged-only figure: per-sample values, a mean, or (total, count)."""
    value = _total(value)
    if isinstance(value, tuple) and len(value) == 2:
        return Part(name, torch.as_tensor(value[0]).detach(), value[1])
    if not isinstance(value, Tensor):
        raise Problem(f"the logged figure {name!r} is a {type(value).__name__}: give a tensor, or (total, count)")
    return Part(name, value.detach().float())
