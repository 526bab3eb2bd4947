"""The loss of next tokens without their logits: a vocabulary times all tokens never exists at once."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

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
        losses_of = _losses_of if isinstance(hidden, FakeTensor) else _kernel(hidden.device.type)
        for start in range(0, len(hidden), each):
            part = slice(start, start + each)
            logits = torch.nn.functional.linear(hidden[part], weight, bias)
            losses[part], share = losses_of(logits, targets[part], IGNORED, learning)
            if gradient is not None:
                torch.mm(share, weight, out=gradient[part])
        if gradient is not None:
            ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(losses)
        return losses.sum(), losses

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream.to(gradient.dtype), None, None, None


def _losses_of(logits: Tensor, targets: Tensor, ignored: int, learning: bool) -> tuple[Tensor, Tensor]:
    """(the cross-entropy of each row, and if learning the gradients of the logits): where no kernel does it."""
    full = logits.float()
    wanted, counted = targets.clamp(min=0)[:, None], targets != ignored
    level = torch.logsumexp(full, 1, keepdim=True)
    each = torch.where(counted, (level - full.gather(1, wanted))[:, 0], 0.0)
    if not learning:
        return each, logits
    share = full.sub_(level).exp_()
    share.scatter_add_(1, wanted, torch.full_like(share[:, :1], -1.0))
    return each, share.mul_(counted[:, None]).to(logits.dtype)


@functools.cache
def _kernel(device: str) -> Any:
    """A kernel that does the same in two passes, where Triton is: it comes with torch for NVIDIA's and AMD's GPUs."""
    if device != "cuda" or importlib.util.find_spec("triton") is None:
        return _losses_of
    from drivetrain.tasks.lora.softmax import losses_of

    return losses_of


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
