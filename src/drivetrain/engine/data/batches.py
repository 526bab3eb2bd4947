"""Tensors and nested batches: conversion, and copies to a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drivetrain.outcomes import Problem


def as_tensor(column: Any) -> Tensor:
    """Returns a column of `Tensors` as a tensor, without a copy where that is possible."""
    if isinstance(column, Tensor):
        return column
    try:
        return torch.from_numpy(np.ascontiguousarray(column)) if isinstance(column, np.ndarray) else torch.as_tensor(column)
    except (TypeError, ValueError, RuntimeError) as error:
        raise Problem(f"a column of Tensors holds what is no number ({error}): turn it into numbers, or give a map-style Dataset") from None


def tensor_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor to the device; the host does not wait for the copy."""
    if device.type != "cuda" or tensor.device == device:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def batch_to_device(batch: Any, device: torch.device) -> Any:
    """Copies the tensors of a nested batch to the device."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {k: batch_to_device(v, device) for k, v in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(batch_to_device(v, device) for v in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(batch_to_device(v, device) for v in batch)
    return batch.to(device) if hasattr(batch, "to") else batch  # batches of tokenizers, graph libraries and others


def tensors_in(batch: Any) -> Sequence[Tensor]:
    """Returns all tensors of a nested batch, in order."""
    if isinstance(batch, Tensor):
        return [batch]
    if isinstance(batch, dict):
        return [t for v in batch.values() for t in tensors_in(v)]
    if isinstance(batch, (list, tuple)):
        return [t for v in batch for t in tensors_in(v)]
    return []
