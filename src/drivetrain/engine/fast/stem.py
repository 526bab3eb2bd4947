"""Replaces a network's first convolution by a matrix product (im2col), in compiled code.

Images have few channels, but library convolutions are built for many channels: they are several times slower on the
first layer than its memory traffic requires. A product of each output pixel's patch with the filters is fast, and the
compiler fuses the gathering of patches with the operations before it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

MAX_PATCH_SIZE = 32  # elements; with larger patches, library convolutions are fast


def replace_first_convolutions(graph: fx.GraphModule) -> fx.GraphModule:
    """Replaces the first convolutions of a graph by matrix products, in place; returns the graph."""
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target is torch.conv2d and _is_worth_replacing(*node.args, **node.kwargs):
            node.target = conv2d_by_product
    graph.recompile()
    return graph


def _is_worth_replacing(
    input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> bool:  # fmt: skip
    """Returns whether channels are few, the input needs no gradient, and patches take no more memory than the output."""
    images, filters = (getattr(node, "meta", {}).get("example_value") for node in (input, weight))
    if not isinstance(images, Tensor) or not isinstance(filters, Tensor) or images.dim() != 4 or images.requires_grad:
        return False
    is_supported = images.is_cuda and groups == 1 and not isinstance(padding, str)
    return is_supported and _padded_patch_size(filters) <= min(MAX_PATCH_SIZE, filters.shape[0])


def _padded_patch_size(filters: Tensor) -> int:
    """Returns the number of elements of a patch, rounded up to a multiple of eight for tensor cores."""
    return math.ceil(math.prod(filters.shape[1:]) / 8) * 8


def conv2d_by_product(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> Tensor:  # fmt: skip
    """Computes `torch.conv2d` as a matrix product; the arguments have the same names."""
    unfold_args = [_pair(value) for value in (weight.shape[2:], dilation, padding, stride)]
    output_size = [
        (side + 2 * pad - dilate * (kernel - 1) - 1) // step + 1
        for side, kernel, dilate, pad, step in zip(input.shape[2:], *unfold_args, strict=True)
    ]
    patches = F.unfold(input, *unfold_args).transpose(1, 2)
    matrix = weight.flatten(1)
    if torch.is_autocast_enabled("cuda"):
        patches, matrix = (t.to(torch.get_autocast_dtype("cuda")) for t in (patches, matrix))
    column_padding = (0, _padded_patch_size(weight) - matrix.shape[1])
    out: Tensor = _Product.apply(F.pad(patches, column_padding), matrix, column_padding)
    if bias is not None:
        out = out + bias.to(out.dtype)
    return out.transpose(1, 2).reshape(len(input), len(weight), *output_size)


class _Product(torch.autograd.Function):
    """Multiplies patches by filters. Backward multiplies image by image, then sums: one product would sum many terms for few outputs, slowly."""

    @staticmethod
    def forward(ctx: Any, patches: Tensor, matrix: Tensor, column_padding: tuple[int, int]) -> Tensor:
        ctx.save_for_backward(patches)
        ctx.patch_size = matrix.shape[1]
        out = patches.flatten(0, 1) @ F.pad(matrix, column_padding).t()
        return out.view(*patches.shape[:2], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        (patches,) = ctx.saved_tensors
        return None, torch.bmm(gradient.transpose(1, 2), patches).sum(0)[:, : ctx.patch_size].contiguous(), None


def _pair(value: Any) -> tuple[int, ...]:
    """Returns two numbers for a single number, a sequence of one, or a sequence of two."""
    return (value, value) if isinstance(value, int) else tuple(value) * (2 // len(value))
