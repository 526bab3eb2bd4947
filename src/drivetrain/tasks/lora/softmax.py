"""A kernel: from logits to losses and, in the logits' own place, to their gradients, in one pass to read and one to write."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(logits, targets, losses, width, IGNORED: tl.constexpr, LEARNING: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * width
    target = tl.load(targets + row)
    counted = target != IGNORED
    most, total, chosen = -float("inf"), 0.0, 0.0
    for at in range(0, width, BLOCK):
        place = at + tl.arange(0, BLOCK)
        x = tl.load(start + place, mask=place < width, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(most, tl.max(x, 0))
        total = total * tl.exp(most - higher) + tl.sum(tl.exp(x - higher), 0)
        chosen += tl.sum(tl.where(place == target, x, 0.0), 0)
        most = higher
    level = most + tl.log(total)
    tl.store(losses + row, tl.where(counted, level - chosen, 0.0))
    if LEARNING:
        for at in range(0, width, BLOCK):
            place = at + tl.arange(0, BLOCK)
            x = tl.load(start + place, mask=place < width, other=-float("inf")).to(tl.float32)
            share = tl.exp(x - level) - tl.where(place == target, 1.0, 0.0)
            tl.store(start + place, tl.where(counted, share, 0.0).to(logits.dtype.element_ty), mask=place < width)


def losses_of(logits: Tensor, targets: Tensor, ignored: int, learning: bool) -> tuple[Tensor, Tensor]:
    """(the cross-entropy of each row of [n, vocabulary], the logits); learning, these become their own gradients."""
    losses = torch.empty(len(logits), device=logits.device)
    _kernel[(len(logits),)](logits, targets, losses, logits.shape[1], ignored, learning, BLOCK, num_warps=16)
    return losses, logits
