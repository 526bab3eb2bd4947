"""Linear layers with adapters that read and write memory only for the matrix products.

peft converts the input to fp32, multiplies, scales and adds in separate passes over memory. Here, the layer's matrix product adds
to the adapter's product in place, forward and backward, in the layer's own precision.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import Linear
from torch import Tensor, nn


class _FusedLora(torch.autograd.Function):
    """x W' + b + scale * x down' up', where only down and up are trained."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scale: float) -> Tensor:
        rows = x.flatten(0, -2)
        inner = (rows @ down.T) * scale
        out = _sum_of_products(inner, up.T, rows, weight.T)
        if bias is not None:
            out += bias
        ctx.save_for_backward(rows, weight, down, up, inner)
        ctx.scale = scale
        return out.view(*x.shape[:-1], out.shape[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, Tensor, Tensor, None]:
        rows, weight, down, up, inner = ctx.saved_tensors
        grad_rows = grad.flatten(0, -2)
        grad_inner = (grad_rows @ up) * ctx.scale
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = _sum_of_products(grad_inner, down, grad_rows, weight)
            grad_x = grad_x.view(*grad.shape[:-1], grad_x.shape[1])
        return grad_x, None, None, grad_inner.T @ rows, grad_rows.T @ inner, None


def _eager_sum_of_products(small: Tensor, up: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    """Returns small up + rows weight: the large product adds to the result of the small one in place."""
    return torch.mm(small, up).addmm_(rows, weight)


# A custom operator hides addmm_ from the compiler, which would turn it into a product and a copy.
_opaque_sum_of_products = torch.library.custom_op("drivetrain::added_products", _eager_sum_of_products, mutates_args=())


@_opaque_sum_of_products.register_fake
def _(small: Tensor, up: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[1])


def _sum_of_products(small: Tensor, up: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    is_compiling = torch.compiler.is_compiling()
    return (_opaque_sum_of_products if is_compiling else _eager_sum_of_products)(small, up, rows, weight)


class FusedLoraLinear(Linear):  # type: ignore[misc]
    """peft's layer with a fused forward pass."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.disable_adapters or self.merged or args or kwargs or (self.training and self._has_dropout()):
            return super().forward(x, *args, **kwargs)  # type: ignore[no-any-return]
        (name,) = self.active_adapters
        base, down, up = self.base_layer, self.lora_A[name].weight, self.lora_B[name].weight
        dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else base.weight.dtype
        bias = None if base.bias is None else base.bias.to(dtype)
        return _FusedLora.apply(x.to(dtype), base.weight.to(dtype), bias, down.to(dtype), up.to(dtype), self.scaling[name])  # type: ignore[no-any-return]

    def _has_dropout(self) -> bool:
        return any(isinstance(layer, nn.Dropout) and layer.p > 0 for layer in self.lora_dropout.values())


def fuse_adapters(net: nn.Module) -> None:
    """Gives plain adapters of plain linear layers the fused forward pass."""
    for module in net.modules():
        if type(module) is Linear and type(module.base_layer) is nn.Linear and _is_plain(module):
            module.__class__ = FusedLoraLinear


def _is_plain(layer: LoraLayer) -> bool:
    """Whether a frozen layer has one adapter of two matrices and nothing else (no DoRA, no biases)."""
    matrices = [*layer.lora_A.values(), *layer.lora_B.values()]
    is_frozen = not any(p.requires_grad for p in layer.base_layer.parameters())
    return len(matrices) == 2 and is_frozen and not layer.lora_variant and all(m.bias is None for m in matrices)
