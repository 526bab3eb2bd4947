"""The loss of next tokens without their logits: a vocabulary times all tokens never exists at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

IGNORED = -100
ROOM = 1 << 27  # logits that exist at a time


class _Losses(torch.autograd.Function):
    """(sum of the losses, each token's loss) of a frozen linear head. The gradient is known with the loss, so the logits are made once."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> tuple[Tensor, Tensor]:
        learning = hidden.requires_grad
        gradient = torch.empty_like(hidden) if learning else None
        losses = torch.empty(len(hidden), device=hidden.device)
        each = max(1, min(len(hidden), ROOM // len(weight)))
        for start in range(0, len(hidden), each):
            part = slice(start, start + each)
            logits = torch.nn.functional.linear(hidden[part], weight, bias).float()
            wanted, counted = targets[part].clamp(min=0)[:, None], targets[part] != IGNORED
            level = torch.logsumexp(logits, 1, keepdim=True)
            losses[part] = torch.where(counted, (level - logits.gather(1, wanted))[:, 0], 0.0)
            if gradient is not None:
                share = logits.sub_(level).exp_()
                share.scatter_add_(1, wanted, torch.full_like(share[:, :1], -1.0))
                share.mul_(counted[:, None])
                gradient[part] = share.to(hidden.dtype) @ weight
        if gradient is not None:
            ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(losses)
        return losses.sum(), losses

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream.to(gradient.dtype), None, None, None


def losses(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The summed cross-entropy of [n, width] states through a frozen head, and that of each token (without a gradient).
    Targets that are IGNORED count nothing."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        kind = torch.get_autocast_dtype(device)
        hidden, weight, bias = hidden.to(kind), weight.to(kind), None if bias is None else bias.to(kind)
    with torch.autocast(device, enabled=False):
        found: tuple[Tensor, Tensor] = _Losses.apply(hidden.to(weight.dtype), weight, bias, targets)
    return found


def plain_losses(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The same from logits [n, vocabulary]: for heads that learn, or do more than multiply."""
    each = torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none", ignore_index=IGNORED)
    return each.sum(), each.detach()
