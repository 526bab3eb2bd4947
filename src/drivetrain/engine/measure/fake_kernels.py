"""Fake versions of GPU kernels, for a trace on a CPU. Only shapes matter: nothing is computed.

On a GPU, attention, recurrent layers, norms, dropout and autocast save other tensors for the backward pass than on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


def _empty_attention_output(like: Tensor, width: int) -> Tensor:
    """Returns [batch, heads, length, width] in the layout [batch, length, heads, width], so that joining the heads copies nothing."""
    *batch, heads, length, _ = like.shape if like.dim() > 2 else (1, *like.shape)
    output = like.new_empty((*batch, length, heads, width)).transpose(-2, -3)
    return output if like.dim() > 2 else output[0]


RecordWork = Callable[..., None]
"""Called with (kind of work, flops, tensors that are read or written, number of sequential steps)."""


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, flops: float, record: RecordWork) -> Tensor:
        out, sums = _empty_attention_output(q, v.shape[-1]), q.new_empty(q.shape[:-1], dtype=torch.float32)
        ctx.flops, ctx.record = flops, record
        ctx.save_for_backward(q, k, v, out, sums)
        record("attention", flops, [q, k, v, out])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, out, _ = ctx.saved_tensors
        grads = [_empty_attention_output(t, t.shape[-1]) for t in (q, k, v)]
        ctx.record("attention", 2.5 * ctx.flops, [q, k, v, out, grad, *grads])
        return (*grads, None, None)


class _Recurrent(torch.autograd.Function):
    """A recurrent layer that saves `num_saved` numbers for the backward pass and needs a workspace of `num_workspace` numbers."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, num_saved: int, num_workspace: int, width: int, steps: int, flops: float, record: RecordWork, *weights: Tensor
    ) -> Tensor:
        out = x.new_empty((*x.shape[:-1], width))
        ctx.flops, ctx.record, ctx.steps = flops, record, steps
        ctx.save_for_backward(x, out, x.new_empty(num_saved), *weights)
        ctx.num_workspace = num_workspace
        workspace = x.new_empty(num_workspace)
        record("recurrent", flops, [x, out, *weights], steps)
        del workspace
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, out, saved, *weights = ctx.saved_tensors
        grads = [torch.empty_like(t) for t in (x, *weights)]
        workspace = x.new_empty(ctx.num_workspace)
        ctx.record("recurrent", 2.0 * ctx.flops, [x, out, saved, grad, *weights], ctx.steps)
        del workspace
        return grads[0], None, None, None, None, None, None, *grads[1:]


class _Softmax(torch.autograd.Function):
    """Softmax of half-precision numbers in full precision, without a full-precision copy of its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, record: RecordWork) -> Tensor:
        out = torch.empty_like(x, dtype=torch.float32)
        ctx.record, ctx.dtype = record, x.dtype
        ctx.save_for_backward(out)
        record("other", 0.0, [x, out])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        [out] = ctx.saved_tensors
        grad_input = torch.empty_like(out, dtype=ctx.dtype)
        ctx.record("other", 0.0, [grad, out, grad_input])
        return grad_input, None


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, record: RecordWork) -> Tensor:
        out = torch.empty_like(x)
        ctx.record = record
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        record("other", 0.0, [x, out])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, _ = ctx.saved_tensors
        grad_input = torch.empty_like(x)
        ctx.record("other", 0.0, [grad, x, grad_input])
        return grad_input, torch.empty_like(weight), None


_CUDNN_SAVED_PER_UNIT = {"lstm": 5, "gru": 6, "rnn_tanh": 1, "rnn_relu": 1}  # numbers that cuDNN saves for each unit and step
_SOFTMAX_FUNCTIONS = {F.softmax, F.log_softmax, torch.softmax, torch.log_softmax, Tensor.softmax, Tensor.log_softmax}
_INPUT_FORMAT_ON_GPU = ("pool", "pad", "interpolate", "upsample")  # autocast computes these in fp32 on a CPU only
_FP32_ON_GPU = {  # autocast computes these in fp32 on a GPU and in the input's format on a CPU
    F.layer_norm, F.group_norm, F.softmax, F.log_softmax, F.cross_entropy, F.nll_loss, F.mse_loss, F.l1_loss, F.smooth_l1_loss,
    F.binary_cross_entropy_with_logits, F.kl_div, F.normalize, F.softplus, torch.softmax, torch.log_softmax, torch.exp, torch.log,
    torch.pow, torch.rsqrt, torch.norm, torch.cumsum, torch.prod, torch.sum, torch.layer_norm, torch.group_norm,
    Tensor.softmax, Tensor.log_softmax, Tensor.exp, Tensor.log, Tensor.pow, Tensor.rsqrt, Tensor.norm, Tensor.cumsum,
    Tensor.prod, Tensor.sum, Tensor.__pow__,
}  # fmt: skip


class FakeGpuKernels(TorchFunctionMode):
    """A context in which attention, dropout, recurrent layers, norms and autocast behave as on a GPU."""

    def __init__(self, half: torch.dtype | None, record: RecordWork) -> None:
        super().__init__()
        self.half, self.record = half, record

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        name = getattr(function, "__name__", "")
        # By name, because torch.lstm and the function that nn.LSTM calls are different objects; args[2] holds the hidden states.
        if name in _CUDNN_SAVED_PER_UNIT and len(args) > 6 and isinstance(args[2], (list, tuple)):
            return self._recurrent(name, *args)
        if function in (F.dropout, torch.dropout):
            return _dropout(*args, **kwargs)
        if function in (F.rms_norm, torch.rms_norm):
            return self._rms_norm(*args, **kwargs)
        if function is F.multi_head_attention_forward:  # the mode does not see the calls inside
            originals = F.scaled_dot_product_attention, F.dropout
            F.scaled_dot_product_attention, F.dropout = self._attention, _dropout
            try:
                return function(*args, **kwargs)
            finally:
                F.scaled_dot_product_attention, F.dropout = originals
        if self._is_half(args) and function is F.cross_entropy and not args[1].is_floating_point():
            kwargs.pop("label_smoothing", None)
            return F.nll_loss(_Softmax.apply(args[0], self.record), *args[1:], **kwargs)
        if self._is_half(args) and function in _SOFTMAX_FUNCTIONS:
            return _Softmax.apply(args[0], self.record)
        if self._is_half(args) and any(word in name for word in _INPUT_FORMAT_ON_GPU):
            with torch.autocast("cpu", enabled=False):
                return function(*args, **kwargs)
        if self.half is not None and function in _FP32_ON_GPU and torch.is_autocast_enabled("cpu"):
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
        num_pairs = float(np.prod(query.shape[:-1])) * key.shape[-2]  # of a query and a key
        flops = 2.0 * num_pairs * (query.shape[-1] + value.shape[-1]) * (0.5 if is_causal else 1.0)
        return _Attention.apply(query, key, value, flops, self.record)  # type: ignore[no-any-return]

    def _recurrent(self, name: str, x: Tensor, *args: Any) -> Any:
        if not isinstance(args[1], (list, tuple)):  # packed sequences: (data, sizes, hidden, weights, ...)
            return getattr(torch._VF, name)(x, *args)
        hidden, weights, _bias, layers, _dropout, training, bidirectional, batch_first = args[:8]
        first_hidden = hidden[0] if isinstance(hidden, (list, tuple)) else hidden
        num_directions = 2 if bidirectional else 1
        steps, width = x.numel() // x.shape[-1], first_hidden.shape[-1] * num_directions
        if self.half is not None and torch.is_autocast_enabled("cpu"):
            x, weights = x.to(self.half), [w.to(self.half) for w in weights]
        flops = 2.0 * steps * sum(w.numel() for w in weights if w.dim() > 1)
        num_saved = steps * width * (_CUDNN_SAVED_PER_UNIT[name] * layers + layers - 1) if training else 0
        num_workspace = int(1.5 * num_directions * sum(w.numel() for w in weights) + 6.5 * steps * width)
        length = x.shape[1 if batch_first and x.dim() > 2 else 0]
        sequential_steps = int(length * layers * (1.6 if bidirectional else 1))  # two directions run partly in parallel
        out = _Recurrent.apply(x, num_saved, num_workspace, width, sequential_steps, flops, self.record, *weights)
        last_hidden = first_hidden.to(out.dtype).expand_as(first_hidden) + out.sum() * 0  # depends on `out`, as autograd expects
        return (out, last_hidden, last_hidden) if name == "lstm" else (out, last_hidden)

    def _rms_norm(self, input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
        weight = input.new_ones(list(normalized_shape)) if weight is None else weight
        return _Norm.apply(input, weight, self.record)  # type: ignore[no-any-return]


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(input, p, True)[0] if training and p > 0 else input
