"""Reads the forms that a task's loss and counts may take, and refuses others."""

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
class LossPart:
    """One named term of a loss: a mean over the batch's samples, or a total with its count."""

    name: str
    value: Tensor
    count: Any = None


def sum_logged_values(value: Any) -> Any:
    """Replaces each logged tensor in the return value of `loss` by (total, count). Compiled code includes these sums."""
    if not (isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], dict)):
        return value
    return value[0], {name: _total_and_count(logged) for name, logged in value[1].items()}


def _total_and_count(value: Any) -> Any:
    has_many = isinstance(value, Tensor) and value.dim() and not value.is_complex()
    return (value.detach().float().sum(), value.numel()) if has_many else value


def read_loss(value: Any) -> tuple[list[LossPart], list[LossPart]]:
    """Reads the return value of `loss`; returns (parts to minimise, parts that are only logged)."""
    if isinstance(value, Tensor):
        return [_part("loss", value)], []
    logged: list[LossPart] = []
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], dict):
        value, only_logged = value
        logged = [read_logged_value(name, part) for name, part in only_logged.items()]
    if isinstance(value, dict):
        if not value:
            raise Problem("loss() gave an empty dict: return a scalar, (total, count), or a dict of such parts")
        return [_part(name, part) for name, part in value.items()], logged
    return [_part("loss", value)], logged


def _part(name: str, value: Any) -> LossPart:
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
        advice = "it must be a real number, for example .abs() or .real of it" if value.is_complex() else "compute it on the model's device"
        raise Problem(f"loss() gave {describe_value(value)} for {name!r}: {advice}")
    return LossPart(name, value, None if count is None else read_count(count, f"loss() gave for {name!r}"))


def read_logged_value(name: str, value: Any) -> LossPart:
    """Reads a value that is only logged: per-sample values, a mean, or (total, count)."""
    value = _total_and_count(value)
    if isinstance(value, tuple) and len(value) == 2:
        total = real_number(value[0])
        if total is None:
            raise Problem(f"the logged figure {name!r} of loss() has the total {describe_value(value[0])}: it must be one real number")
        return LossPart(name, torch.as_tensor(total), read_count(value[1], f"loss() gave for the logged figure {name!r}"))
    if not isinstance(value, Tensor) or value.is_complex():
        raise Problem(f"the logged figure {name!r} of loss() is {describe_value(value)}: give a tensor of real numbers, or (total, count)")
    return LossPart(name, value.detach().float())


def read_count(count: Any, origin: str) -> Any:
    """Reads a count: a tensor of one number, or a number of 0 or more."""
    number = real_number(count)
    if number is None or (not isinstance(number, Tensor) and not 0 <= number < math.inf):
        raise Problem(
            f"the count {origin} is {describe_value(count)}: give how many samples, tokens or other things the batch has, as one number"
        )
    return number


def read_counts(counts: Any) -> dict[str, Any]:
    """Reads the return value of `counts` for a batch."""
    if counts is not None and not isinstance(counts, dict):
        raise Problem(f"counts() gave {describe_value(counts)}: return a dict of the part's name -> count")
    return {name: read_count(count, f"counts() gave for {name!r}") for name, count in (counts or {}).items()}


def read_limits(limits: object) -> dict[str, float]:
    """Returns the limits of a `Source` as plain numbers."""
    if not isinstance(limits, Mapping) or any(isinstance(v, Tensor) or real_number(v) is None for v in limits.values()):
        raise Problem(f"the source's limits are {limits!r}: give a dict of a metric's name -> the number it must stay below")
    return {name: float(limit) for name, limit in limits.items()}


def real_number(value: Any) -> Any:
    """Returns a single real number: as a 0-dim tensor without a gradient or a Python number; None for anything else."""
    if isinstance(value, Tensor):
        is_single = value.numel() == 1 and value.layout is torch.strided and not (value.is_complex() or value.is_meta)
        return value.detach().reshape(()) if is_single else None
    if isinstance(value, np.ndarray):
        value = value.item() if value.size == 1 else None
    return value if isinstance(value, numbers.Real) else None


def describe_value(value: Any) -> str:
    """Describes a value of the wrong form, for an error message."""
    if isinstance(value, Tensor):
        form = ""
        if value.is_complex():
            form = "complex "
        elif value.layout is not torch.strided:
            form = str(value.layout).removeprefix("torch.") + " "
        return f"a {form}tensor of shape {list(value.shape)}{' without values (device meta)' if value.is_meta else ''}"
    is_plain = value is None or isinstance(value, (numbers.Number, str))
    return repr(value) if is_plain else f"a {type(value).__name__}"
