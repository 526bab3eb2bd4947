"""Triton kernel: computes losses from logits, and overwrites the logits with their gradients."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Logits that the kernel reads at a time."""


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(logits, targets, losses, width, IGNORED: tl.constexpr, NEEDS_GRAD: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * width
    target = tl.load(targets + row)
    is_counted = target != IGNORED
    maximum, total, target_logit = -float("inf"), 0.0, 0.0
    for offset in range(0, width, BLOCK):
        column = offset + tl.arange(0, BLOCK)
        x = tl.load(start + column, mask=column < width, other=-float("inf")).to(tl.float32)
        new_maximum = tl.maximum(maximum, tl.max(x, 0))
        total = total * tl.exp(maximum - new_maximum) + tl.sum(tl.exp(x - new_maximum), 0)
        target_logit += tl.sum(tl.where(column == target, x, 0.0), 0)
        maximum = new_maximum
    log_sum = maximum + tl.log(total)
    tl.store(losses + row, tl.where(is_counted, log_sum - target_logit, 0.0))
    if NEEDS_GRAD:
        for offset in range(0, width, BLOCK):
            column = offset + tl.arange(0, BLOCK)
            x = tl.load(start + column, mask=column < width, other=-float("inf")).to(tl.float32)
            gradient = tl.exp(x - log_sum) - tl.where(column == target, 1.0, 0.0)
            tl.store(start + column, tl.where(is_counted, gradient, 0.0).to(logits.dtype.element_ty), mask=column < width)


def losses_and_grad(logits: Tensor, targets: Tensor, ignored: int, needs_grad: bool) -> tuple[Tensor, Tensor]:
    """Returns (the cross-entropy of each row of [n, vocabulary], the logits, overwritten with their gradients if `needs_grad`)."""
    losses = torch.empty(len(logits), device=logits.device)
    _kernel[(len(logits),)](logits, targets, losses, logits.shape[1], ignored, needs_grad, BLOCK, num_warps=16)
    return losses, logits
