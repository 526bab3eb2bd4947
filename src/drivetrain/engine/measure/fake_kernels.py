"""What a GPU does otherwise than a CPU, for a trace that runs as on a CPU: attention, recurrent layers, norms, dropout
and number formats keep other things for the backward pass there. Only shapes matter: nothing is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


def _heads_inside(like: Tensor, width: int) -> Tensor:
    """Laid out as [batch, length, heads, width], so that joining the heads costs no copy."""
    *batch, heads, length, _ = like.shape if like.dim() > 2 else (1, *like.shape)
    laid = like.new_empty((*batch, length, heads, width)).transpose(-2, -3)
    return laid if like.dim() > 2 else laid[0]


Note = Callable[..., None]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, flops: float, note: Note) -> Tensor:
        out, sums = _heads_inside(q, v.shape[-1]), q.new_empty(q.shape[:-1], dtype=torch.float32)
        ctx.flops, ctx.note = flops, note
        ctx.save_for_backward(q, k, v, out, sums)
        note("attention", flops, [q, k, v, out])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, out, _ = ctx.saved_tensors
        grads = [_heads_inside(t, t.shape[-1]) for t in (q, k, v)]
        ctx.note("attention", 2.5 * ctx.flops, [q, k, v, out, grad, *grads])
        return (*grads, None, None)


class _Recurrent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: int, room: int, width: int, steps: int, flops: float, note: Note, *weights: Tensor) -> Tensor:
        out = x.new_empty((*x.shape[:-1], width))
        ctx.flops, ctx.note, ctx.steps = flops, note, steps
        ctx.save_for_backward(x, out, x.new_empty(kept), *weights)
        ctx.room = room
        taken = x.new_empty(room)
        note("recurrent", flops, [x, out, *weights], steps)
        del taken
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, out, kept, *weights = ctx.saved_tensors
        grads = [torch.empty_like(t) for t in (x, *weights)]
        taken = x.new_empty(ctx.room)
        ctx.note("recurrent", 2.0 * ctx.flops, [x, out, kept, grad, *weights], ctx.steps)
        del taken
        return grads[0], None, None, None, None, None, None, *grads[1:]


class _Softmax(torch.autograd.Function):
    """Of half-precision numbers in full precision, without a full copy of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, note: Note) -> Tensor:
        out = torch.empty_like(x, dtype=torch.float32)
        ctx.note, ctx.dtype = note, x.dtype
        ctx.save_for_backward(out)
        note("other", 0.0, [x, out])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        [out] = ctx.saved_tensors
        back = torch.empty_like(out, dtype=ctx.dtype)
        ctx.note("other", 0.0, [grad, out, back])
        return back, None


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, note: Note) -> Tensor:
        out = torch.empty_like(x)
        ctx.note = note
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        note("other", 0.0, [x, out])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, _ = ctx.saved_tensors
        back = torch.empty_like(x)
        ctx.note("other", 0.0, [grad, x, back])
        return back, torch.empty_like(weight), None


_STATES = {"lstm": 5, "gru": 6, "rnn_tanh": 1, "rnn_relu": 1}  # numbers that cuDNN keeps for each unit and step
_SOFTMAX = {F.softmax, F.log_softmax, torch.softmax, torch.log_softmax, Tensor.softmax, Tensor.log_softmax}
_IN_OWN = ("pool", "pad", "interpolate", "upsample")  # what autocast computes in fp32 on a CPU and in the input's format on a GPU
_IN_FULL = {  # what autocast computes in fp32 on a GPU and in the input's own format on a CPU
    F.layer_norm, F.group_norm, F.softmax, F.log_softmax, F.cross_entropy, F.nll_loss, F.mse_loss, F.l1_loss, F.smooth_l1_loss,
    F.binary_cross_entropy_with_logits, F.kl_div, F.normalize, F.softplus, torch.softmax, torch.log_softmax, torch.exp, torch.log,
    torch.pow, torch.rsqrt, torch.norm, torch.cumsum, torch.prod, torch.sum, torch.layer_norm, torch.group_norm,
    Tensor.softmax, Tensor.log_softmax, Tensor.exp, Tensor.log, Tensor.pow, Tensor.rsqrt, Tensor.norm, Tensor.cumsum,
    Tensor.prod, Tensor.sum, Tensor.__pow__,
}  # fmt: skip


class FakeGpuKernels(TorchFunctionMode):
    """Attention, dropout, recurrent layers and number formats as a GPU has them."""

    def __init__(self, half: torch.dtype | None, note: Note) -> None:
        super().__init__()
        self.half, self.note = half, note

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        name = getattr(function, "__name__", "")
        if name in _STATES and len(args) > 6 and isinstance(args[2], (list, tuple)):
            return self._recurrent(name, *args)
        if function in (F.dropout, torch.dropout):
            return _dropout(*args, **kwargs)
        if function in (F.rms_norm, torch.rms_norm):
            return self._rms_norm(*args, **kwargs)
        if function is F.multi_head_attention_forward:  # its own calls do not come here
            kept = F.scaled_dot_product_attention, F.dropout
            F.scaled_dot_product_attention, F.dropout = self._attention, _dropout
            try:
                return function(*args, **kwargs)
            finally:
                F.scaled_dot_product_attention, F.dropout = kept
        if self._is_half(args) and function is F.cross_entropy and not args[1].is_floating_point():
            kwargs.pop("label_smoothing", None)
            return F.nll_loss(_Softmax.apply(args[0], self.note), *args[1:], **kwargs)
        if self._is_half(args) and function in _SOFTMAX:
            return _Softmax.apply(args[0], self.note)
        if self._is_half(args) and any(word in name for word in _IN_OWN):
            with torch.autocast("cpu", enabled=False):
                return function(*args, **kwargs)
        if self.half is not None and function in _IN_FULL and torch.is_autocast_enabled("cpu"):
            args = tuple(a.float() if isinstance(a, Tensor) and a.dtype == self.half else a for a in args)
        return function(*args, **kwargs)

    def _is_half(self, args: Any) -> bool:
        autocast = self.half is not None and torch.is_autocast_enabled("cpu")
        return autocast and bool(args) and isinstance(args[0], Tensor) and args[0].dtype == self.half

    def _attention(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
        scale: Any = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        if self.half is not None and torch.is_autocast_enabled("cpu"):
            query, key, value = (t.to(self.half) if t.is_floating_point() else t for t in (query, key, value))
        pairs = float(np.prod(query.shape[:-1])) * key.shape[-2]
        flops = 2.0 * pairs * (query.shape[-1] + value.shape[-1]) * (0.5 if is_causal else 1.0)
        return _Attention.apply(query, key, value, flops, self.note)  # type: ignore[no-any-return]

    def _recurrent(self, name: str, x: Tensor, *args: Any) -> Any:
        if not isinstance(args[1], (list, tuple)):  # packed sequences: (data, sizes, hidden, weights, ...)
            return getattr(torch._VF, name)(x, *args)
        hidden, weights, _bias, layers, _dropout, training, both_ways, batch_first = args[:8]
        first = hidden[0] if isinstance(hidden, (list, tuple)) else hidden
        steps, width = x.numel() // x.shape[-1], first.shape[-1] * (2 if both_ways else 1)
        if self.half is not None and torch.is_autocast_enabled("cpu"):
            x, weights = x.to(self.half), [w.to(self.half) for w in weights]
        flops = 2.0 * steps * sum(w.numel() for w in weights if w.dim() > 1)
        kept = steps * width * (_STATES[name] * layers + layers - 1) if training else 0
        room = int(1.5 * (2 if both_ways else 1) * sum(w.numel() for w in weights) + 6.5 * steps * width)
        one_by_one = int(x.shape[1 if batch_first and x.dim() > 2 else 0] * layers * (1.6 if both_ways else 1))
        out = _Recurrent.apply(x, kept, room, width, one_by_one, flops, self.note, *weights)
        last = first.to(out.dtype).expand_as(first) + out.sum() * 0
        return (out, last, last) if name == "lstm" else (out, last)

    def _rms_norm(self, input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
        weight = input.new_ones(list(normalized_shape)) if weight is None else weight
        return _Norm.apply(input, weight, self.note)  # type: ignore[no-any-return]


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(input, p, True)[0] if training and p > 0 else input
