"""Adapters beside frozen linear layers, in as few passes over memory as there are products.

peft turns what a layer is given to fp32, multiplies, scales and adds, each of them a pass of its own. Here the product with the
adapter is added inside of the matrix product, forward and backward, and nothing wider than the layer's own precision exists.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import Linear
from torch import Tensor, nn


class _Beside(torch.autograd.Function):
    """x W' + b + scale * x down' up', where only down and up learn."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scale: float) -> Tensor:
        rows = x.flatten(0, -2)
        inner = (rows @ down.T) * scale
        out = _both(inner, up.T, rows, weight.T)
        if bias is not None:
            out += bias
        ctx.save_for_backward(rows, weight, down, up, inner)
        ctx.scale = scale
        return out.view(*x.shape[:-1], out.shape[1])

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor | None, None, None, Tensor, Tensor, None]:
        rows, weight, down, up, inner = ctx.saved_tensors
        wide = given.flatten(0, -2)
        thin = (wide @ up) * ctx.scale
        before = None
        if ctx.needs_input_grad[0]:
            before = _both(thin, down, wide, weight)
            before = before.view(*given.shape[:-1], before.shape[1])
        return before, None, None, thin.T @ rows, wide.T @ inner, None


def _added(small: Tensor, up: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    """small up + rows weight: the small product is written first, and the large one reads it where it would have written anyway."""
    return torch.mm(small, up).addmm_(rows, weight)


# A compiler makes a product of its own and a copy of addmm_: it is not shown what is inside.
_unseen = torch.library.custom_op("drivetrain::added_products", _added, mutates_args=())


@_unseen.register_fake
def _(small: Tensor, up: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[1])


def _both(small: Tensor, up: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    return _unseen(small, up, rows, weight) if torch.compiler.is_compiling() else _added(small, up, rows, weight)


class Beside(Linear):  # type: ignore[misc]
    """peft's layer with another way to multiply; all else of it is peft's."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.disable_adapters or self.merged or args or kwargs or (self.training and self._drops()):
            return super().forward(x, *args, **kwargs)  # type: ignore[no-any-return]
        (name,) = self.active_adapters
        base, down, up = self.base_layer, self.lora_A[name].weight, self.lora_B[name].weight
        kind = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else base.weight.dtype
        bias = None if base.bias is None else base.bias.to(kind)
        return _Beside.apply(x.to(kind), base.weight.to(kind), bias, down.to(kind), up.to(kind), self.scaling[name])  # type: ignore[no-any-return]

    def _drops(self) -> bool:
        return any(isinstance(layer, nn.Dropout) and layer.p > 0 for layer in self.lora_dropout.values())


def set_beside(net: nn.Module) -> None:
    """From now on, plain adapters of plain linear layers multiply this way."""
    for module in net.modules():
        if type(module) is Linear and type(module.base_layer) is nn.Linear and _plain(module):
            module.__class__ = Beside


def _plain(layer: LoraLayer) -> bool:
    """One adapter, which is two matrices and nothing else (no DoRA, no biases), of a frozen layer."""
    matrices = [*layer.lora_A.values(), *layer.lora_B.values()]
    frozen = not any(p.requires_grad for p in layer.base_layer.parameters())
    return len(matrices) == 2 and frozen and not layer.lora_variant and all(m.bias is None for m in matrices)
