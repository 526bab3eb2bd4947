"""The forms a task's loss may take, read into named parts."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
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
    several = isinstance(figure, Tensor) and figure.dim() and not figure.is_complex()
    return (figure.detach().float().sum(), figure.numel()) if several else figure


def read_loss(value: Any) -> tuple[list[Part], list[Part]]:
    """(parts to minimise, figures only logged) of what `loss` returned."""
    if isinstance(value, Tensor):
        return [_part("loss", value)], []
    logged: list[Part] = []
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], dict):
        value, figures = value
        logged = [read_logged_value(name, figure) for name, figure in figures.items()]
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
    if value.is_complex() or value.is_meta:
        way = "it must be a real number, for example .abs() or .real of it" if value.is_complex() else "compute it on the model's device"
        raise Problem(f"loss() gave {shown(value)} for {name!r}: {way}")
    return Part(name, value, None if count is None else read_count(count, f"loss() gave for {name!r}"))


def read_logged_value(name: str, value: Any) -> Part:
    """A logged-only figure: per-sample values, a mean, or (total, count)."""
    value = _total(value)
    if isinstance(value, tuple) and len(value) == 2:
        total = real_number(value[0])
        if total is None:
            raise Problem(f"the logged figure {name!r} of loss() has the total {shown(value[0])}: it must be one real number")
        return Part(name, torch.as_tensor(total), read_count(value[1], f"loss() gave for the logged figure {name!r}"))
    if not isinstance(value, Tensor) or value.is_complex():
        raise Problem(f"the logged figure {name!r} of loss() is {shown(value)}: give a tensor of real numbers, or (total, count)")
    return Part(name, value.detach().float())


def read_count(count: Any, whose: str) -> Any:
    """A count that a loss or `counts` gave: a number of 0 or more, where the host can see it, or a tensor of one number."""
    number = real_number(count)
    if number is None or (not isinstance(number, Tensor) and not 0 <= number < math.inf):
        raise Problem(f"the count {whose} is {shown(count)}: give how many samples, tokens or other things the batch has, as one number")
    return number


def read_counts(counts: Any) -> dict[str, Any]:
    """What `counts` gave for a batch."""
    if counts is not None and not isinstance(counts, dict):
        raise Problem(f"counts() gave {shown(counts)}: return a dict of the part's name -> count")
    return {name: read_count(count, f"counts() gave for {name!r}") for name, count in (counts or {}).items()}


def read_limits(limits: object) -> dict[str, float]:
    """Returns the limits of a `Source` as plain numbers."""
    if not isinstance(limits, Mapping) or any(isinstance(v, Tensor) or real_number(v) is None for v in limits.values()):
        raise Problem(f"the source's limits are {limits!r}: give a dict of a metric's name -> the number it must stay below")
    return {name: float(limit) for name, limit in limits.items()}


def real_number(value: Any) -> Any:
    """A single real number, as a tensor without a gradient and without dimensions or as Python's own; None for anything else."""
    if isinstance(value, Tensor):
        single = value.numel() == 1 and value.layout is torch.strided and not (value.is_complex() or value.is_meta)
        return value.detach().reshape(()) if single else None
    if isinstance(value, np.ndarray):
        value = value.item() if value.size == 1 else None
    return value if isinstance(value, numbers.Real) else None


def shown(value: Any) -> str:
    """A value of the wrong form, for a message."""
    if isinstance(value, Tensor):
        form = "complex" if value.is_complex() else str(value.layout).removeprefix("torch.") if value.layout is not torch.strided else ""
        return (
            f"a {form + ' ' if form else ''}tensor of shape {list(value.shape)}{' without values (device meta)' if value.is_meta else ''}"
        )
    plain = value is None or isinstance(value, (numbers.Number, str))
    return repr(value) if plain else f"a {type(value).__name__}"
