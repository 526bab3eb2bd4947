"""The next-token loss, computed in chunks: the logits of all tokens never exist at the same time."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

IGNORED = -100
MAX_LOGITS = 1 << 27
"""Largest number of logits in a chunk; it limits memory."""


class _Losses(torch.autograd.Function):
    """(sum of the losses, each token's loss) of a frozen linear head. Forward also computes the gradient, so logits are computed once."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> tuple[Tensor, Tensor]:
        needs_grad = hidden.requires_grad
        gradient = torch.empty_like(hidden) if needs_grad else None
        losses = torch.empty(len(hidden), device=hidden.device)
        chunk_size = max(1, min(len(hidden), MAX_LOGITS // len(weight)))
        losses_and_grad = _losses_and_grad if isinstance(hidden, FakeTensor) else _kernel(hidden.device.type)
        for start in range(0, len(hidden), chunk_size):
            chunk = slice(start, start + chunk_size)
            logits = torch.nn.functional.linear(hidden[chunk], weight, bias)
            losses[chunk], logits_grad = losses_and_grad(logits, targets[chunk], IGNORED, needs_grad)
            if gradient is not None:
                torch.mm(logits_grad, weight, out=gradient[chunk])
        if gradient is not None:
            ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(losses)
        return losses.sum(), losses

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream.to(gradient.dtype), None, None, None


def _losses_and_grad(logits: Tensor, targets: Tensor, ignored: int, needs_grad: bool) -> tuple[Tensor, Tensor]:
    """Returns (the cross-entropy of each row, the gradient of the logits if `needs_grad`); used where there is no kernel."""
    full = logits.float()
    index, is_counted = targets.clamp(min=0)[:, None], targets != ignored
    log_sum = torch.logsumexp(full, 1, keepdim=True)
    losses = torch.where(is_counted, (log_sum - full.gather(1, index))[:, 0], 0.0)
    if not needs_grad:
        return losses, logits
    gradient = full.sub_(log_sum).exp_()
    gradient.scatter_add_(1, index, torch.full_like(gradient[:, :1], -1.0))
    return losses, gradient.mul_(is_counted[:, None]).to(logits.dtype)


@functools.cache
def _kernel(device: str) -> Any:
    """Returns the Triton kernel, or the torch version where Triton is not installed (it comes with torch's GPU builds)."""
    if device != "cuda" or importlib.util.find_spec("triton") is None:
        return _losses_and_grad
    from drivetrain.tasks.lora.loss_kernel import losses_and_grad

    return losses_and_grad


def losses(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the summed cross-entropy of hidden states [n, width] with a frozen head, and each token's (without a gradient).

    Tokens whose target is IGNORED have a loss of 0.
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    with torch.autocast(device, enabled=False):
        result: tuple[Tensor, Tensor] = _Losses.apply(hidden.to(weight.dtype), weight, bias, targets)
    return result


def losses_of_logits(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the same for logits [n, vocabulary]: for heads that are trained, or that do more than multiply."""
    losses = torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none", ignore_index=IGNORED)
    return losses.sum(), losses.detach()
