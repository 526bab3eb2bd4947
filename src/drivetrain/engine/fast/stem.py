"""A net's first convolution as a matrix product, in compiled code.

Grey and colour images have so few channels that libraries' convolutions, made for many, take several times as long for the
first layer as its numbers take to be moved. As a product of every place's surroundings with the filters it is quick; gathering
the surroundings joins what comes before it into one kernel.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

MOST = 32  # numbers of one place's surroundings: beyond that, libraries' convolutions are quick


def replace_first_convolutions(graph: fx.GraphModule) -> fx.GraphModule:
    """The same graph, with products for its first convolutions."""
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target is torch.conv2d and _fits(*node.args, **node.kwargs):
            node.target = conv2d_by_product
    graph.recompile()
    return graph


def _fits(
    input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> bool:  # fmt: skip
    """Few channels, nothing before it to be trained, and the surroundings take no more room than what comes out."""
    images, filters = (getattr(node, "meta", {}).get("example_value") for node in (input, weight))
    if not isinstance(images, Tensor) or not isinstance(filters, Tensor) or images.dim() != 4 or images.requires_grad:
        return False
    return images.is_cuda and groups == 1 and not isinstance(padding, str) and _room(filters) <= min(MOST, filters.shape[0])


def _room(filters: Tensor) -> int:
    """The numbers of a place's surroundings, in multiples of eight, as matrix units take them."""
    return -(-math.prod(filters.shape[1:]) // 8) * 8


def conv2d_by_product(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> Tensor:  # fmt: skip
    """What `torch.conv2d` gives, whose names these are."""
    across = [_both(one) for one in (weight.shape[2:], dilation, padding, stride)]
    size = [
        (side + 2 * around - step * (tap - 1) - 1) // stride + 1
        for side, tap, step, around, stride in zip(input.shape[2:], *across, strict=True)
    ]
    surroundings = F.unfold(input, *across).transpose(1, 2)
    matrix = weight.flatten(1)
    if torch.is_autocast_enabled("cuda"):
        surroundings, matrix = (t.to(torch.get_autocast_dtype("cuda")) for t in (surroundings, matrix))
    spare = (0, _room(weight) - matrix.shape[1])
    out: Tensor = _Product.apply(F.pad(surroundings, spare), matrix, spare)
    if bias is not None:
        out = out + bias.to(out.dtype)
    return out.transpose(1, 2).reshape(len(input), len(weight), *size)


class _Product(torch.autograd.Function):
    """One product forward. Backward one an image, and then their sum: as a single product it would be a long sum for few numbers."""

    @staticmethod
    def forward(ctx: Any, surroundings: Tensor, matrix: Tensor, spare: tuple[int, int]) -> Tensor:
        ctx.save_for_backward(surroundings)
        ctx.taps = matrix.shape[1]
        out = surroundings.flatten(0, 1) @ F.pad(matrix, spare).t()
        return out.view(*surroundings.shape[:2], -1)

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> tuple[None, Tensor, None]:
        (surroundings,) = ctx.saved_tensors
        return None, torch.bmm(given.transpose(1, 2), surroundings).sum(0)[:, : ctx.taps].contiguous(), None


def _both(value: Any) -> tuple[int, ...]:
    return (value, value) if isinstance(value, int) else tuple(value) * (2 // len(value))
