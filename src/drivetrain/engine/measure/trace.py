"""Traces the memory and work of a task with fake tensors, which have shapes but no values, so that no GPU is needed.

A pass is traced for two micro-batch sizes. Tensors grow linearly with the number of samples, so the memory after each
operation is a line over that number, and the peak for any number is the highest of a few lines.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

from drivetrain.engine.measure.fake_kernels import FakeGpuKernels
from drivetrain.plan.profile import Line, Pass, Work, reduction_buffer_bytes

ALLOCATION_BYTES = 512
"""torch's GPU allocator rounds sizes up to a multiple of this."""
TILE = 128
"""Rows and columns of a matrix product that one multiprocessor of a GPU computes at once."""
PEAK_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 65536)
"""Numbers of samples for which the operation with the highest memory is determined."""
_NO_KERNEL = ("empty", "empty_like", "empty_strided", "new_empty", "detach", "lift_fresh", "_unsafe_view")
_FACTORS = {  # name of a matrix product -> index of the argument that is its first factor
    "mm": 0, "bmm": 0, "mv": 0, "dot": 0, "vdot": 0, "_int_mm": 0, "_scaled_mm": 0, "_grouped_mm": 0, "_scaled_grouped_mm": 0, "_sparse_mm": 0,
    "addmm": 1, "baddbmm": 1, "addbmm": 1, "addmv": 1, "_addmm_activation": 1, "_sparse_addmm": 1, "sspaddmm": 1,
}  # fmt: skip
_SCATTERED = (
    "max_pool",
    "avg_pool",
    "adaptive",
    "_adaptive",
    "index",
    "gather",
    "scatter",
    "embedding",
    "native_batch_norm",
    "native_group_norm",
    "upsample",
    "grid_sampler",
    "sort",
    "cat",
)
_CONV = ("convolution", "convolution_backward", "_convolution")


class Operation(NamedTuple):
    """The work of one operation."""

    kind: str
    """Which speed the plan assumes for it (`Work.kind`)."""
    dtype: str
    flops: float
    bytes: float
    """Read and written."""
    tiles: float
    """Tiles of a matrix product's output; rows of a sum over rows."""
    depth: float
    """Length of each sum in a matrix product; for other kinds another length (`_shape_of_work`)."""


class ShapesOnly(FakeTensorMode):
    """Makes tensors that have shapes and no values."""

    def __deepcopy__(self, memo: dict[int, Any]) -> ShapesOnly:
        """Returns itself. A copied mode would hold the same raw pointers to storages, and both would free them. nn.TransformerEncoder
        copies fake tensors, and a copy of a fake tensor copies its mode."""
        return self


class OperationRecorder(TorchDispatchMode):
    """Records the lifetime of every storage and the work of every operation."""

    def __init__(self, existing: list[Tensor]) -> None:
        super().__init__()
        self.clock = 0
        self.lifetimes: list[list[int]] = []
        """[birth, death, bytes] of each storage; death is -1 while it lives."""
        self.index_of: dict[int, int] = {}
        """Storage -> its index in `lifetimes`."""
        self.operations: list[Operation] = []
        self.copies: set[int] = set()
        """Indices of storages that hold a parameter in another number format (made by autocast)."""
        self.has_matrix_product = False
        self.sums: dict[int, tuple[int, int]] = {}
        """(columns, rows) of each sum over rows, by the clock of the operation."""
        self._existing = {t.untyped_storage()._cdata for t in existing}
        self._watchers: list[Any] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # A fast path: two of three calls are autograd's question for the device.
        if function is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        if torch.is_inference_mode_enabled():  # composite operators arrive here: record the operators they consist of
            with self:
                result = function.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = function(*args, **kwargs)
        self.clock += 1
        outputs = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        new_tensors = [t for t in outputs if self._add_storage(t)]
        name = _name(function)
        if name == "_to_copy" and new_tensors and args[0].untyped_storage()._cdata in self._existing:
            self.copies.add(self.index_of[new_tensors[0].untyped_storage()._cdata])
        if name in ("sum", "prod") and not args[0].is_floating_point() and result.dtype != args[0].dtype:
            cast = result.new_empty(args[0].shape)  # a GPU first copies the input to the format of the result
            self._add_storage(cast)
            self.operations.append(Operation("other", "float32", 0.0, float(args[0].nbytes + cast.nbytes), 0.0, 0.0))
            outputs.append(cast)
        if (new_tensors or function._schema.is_mutable) and name not in _NO_KERNEL:
            self._record_operation(function, name, args, kwargs, result, outputs)
        return result

    def _add_storage(self, tensor: Tensor) -> bool:
        """Adds the storage of a tensor; returns whether it is new and not empty."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.index_of or key in self._existing:
            return False
        size = -(-storage.nbytes() // ALLOCATION_BYTES) * ALLOCATION_BYTES
        index = len(self.lifetimes)
        self.lifetimes.append([self.clock, -1, size])
        self.index_of[key] = index
        self._watchers.append(weakref.ref(storage, lambda _: self._end_lifetime(key, index)))
        return size > 0

    def _end_lifetime(self, key: int, index: int) -> None:
        self.lifetimes[index][1] = self.clock
        self.index_of.pop(key, None)

    def _record_operation(self, function: Any, name: str, args: Any, kwargs: Any, result: Any, outputs: list[Tensor]) -> None:
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        distinct_tensors = {id(t): t for t in (*inputs, *outputs)}.values()
        num_bytes = float(sum(t.numel() * t.element_size() for t in distinct_tensors))
        flops = _flops(function, name, args, kwargs, result)
        kind = _kind_of_operation(name, args, inputs, flops)
        self.has_matrix_product |= name in _FACTORS
        tiles, depth = _shape_of_work(name, args, outputs)
        if (row_sum := _row_sum(name, args, inputs)) is not None:
            self.sums[self.clock] = row_sum
            if name not in _CONV:
                columns, rows = row_sum
                kind, tiles, depth = "summed", float(rows), float(columns)
        if name.startswith("native_batch_norm") and inputs[0].dim() in (3, 5) and inputs[0].element_size() == 2:
            kind, depth = "channels", float(inputs[0].shape[1])
        dtype = next((str(t.dtype).removeprefix("torch.") for t in inputs if t.is_floating_point()), "float32")
        self.operations.append(Operation(kind, dtype, flops, num_bytes, tiles, depth))

    def record_work(self, kind: str, flops: float, tensors: list[Tensor], steps: int = 0) -> None:
        """Records the work of a fake kernel."""
        num_bytes = float(sum(t.nbytes for t in tensors))
        self.operations.append(Operation(kind, str(tensors[0].dtype).removeprefix("torch."), flops, num_bytes, 0.0, float(steps)))

    def copied_bytes(self) -> float:
        """Returns the peak bytes of parameters' copies in another number format."""
        others = set(range(len(self.lifetimes))) - self.copies
        return float((self.curve(others) - self.curve(others | self.copies)).max())

    def curve(self, without: set[int]) -> np.ndarray:
        """Returns the live bytes after each operation, without the storages at some indices."""
        change = np.zeros(self.clock + 2)
        for index, (birth, death, size) in enumerate(self.lifetimes):
            if index not in without:
                change[birth] += size
                change[death + 1 if death >= 0 else self.clock + 1] -= size  # it is alive until its last operation ends
        return np.cumsum(change)[: self.clock + 1]


def _kind_of_operation(name: str, args: Any, inputs: list[Tensor], flops: float) -> str:
    """Returns the kind of an operation, which decides at what speed the plan expects it to run."""
    if name.startswith("index"):
        return "added" if name == "index_add" else "picked"
    if name == "embedding_dense_backward":
        return "embedding"
    if flops and "attention" in name:
        return "attention"
    if name in _FACTORS:
        return "gemm"
    if name in _CONV:
        if _groups(name, args) == 1:
            return "conv"
        is_channels_last = inputs[0].dim() == 4 and inputs[0].element_size() == 2  # half-precision images, as the engine stores them
        return "grouped" if is_channels_last else "grouped_channels_first"
    is_strided_copy = name in ("clone", "copy_", "_to_copy") and any(not t.is_contiguous() for t in inputs)
    return "scattered" if is_strided_copy or name.startswith(_SCATTERED) else "other"


def _groups(name: str, args: Any) -> int:
    """Returns the number of groups of a convolution."""
    return int(args[9] if name == "convolution_backward" else args[8])


def _name(function: Any) -> str:
    """Returns the operator's name; for a matrix product without the underscore of its in-place form."""
    name = str(function._schema.name).removeprefix("aten::")
    return name.removesuffix("_") if name.removesuffix("_") in _FACTORS else name


def _flops(function: Any, name: str, args: Any, kwargs: Any, result: Any) -> float:
    if name in _FACTORS:
        first, second = args[_FACTORS[name]], args[_FACTORS[name] + 1]
        terms = first.numel() if first.layout == torch.strided else first._nnz()
        return 2.0 * float(terms) * (second.shape[-1] if second.dim() > 1 else 1)
    if name in ("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"):
        rows = args[0].numel() // args[0].shape[-1]
        return (2.0 if name == "mkldnn_rnn_layer" else 4.0) * float(rows * (args[1].numel() + args[2].numel()))
    if name.startswith("_scaled_dot_product_flash_attention_for_cpu"):  # not counted by torch; arguments: (gradient,) query, key, value
        is_backward = name.endswith("backward")
        query, key, value = args[1:4] if is_backward else args[:3]
        num_pairs = query.numel() // query.shape[-1] * key.shape[-2]
        return (5.0 if is_backward else 2.0) * float(num_pairs * (query.shape[-1] + value.shape[-1]))
    if name == "_trilinear":
        shapes = [_with_ones(t.shape, positions) for t, positions in zip(args[:3], args[3:6], strict=True)]
        return 2.0 * float(np.prod(np.broadcast_shapes(*shapes)))
    formula = flop_registry.get(function._overloadpacket)
    if formula is None:
        return 0.0
    if name == "convolution_backward" and _groups(name, args) > 1:  # torch's formula ignores groups
        gradient, x, weight, transposed, output_mask = args[0], args[1], args[2], args[7], args[-1]
        return float(2 * (x if transposed else gradient).numel() * weight[0].numel() * sum(output_mask[:2]))
    return float(formula(*args, **kwargs, out_val=result))


def _with_ones(shape: Sequence[int], positions: Sequence[int]) -> list[int]:
    """Returns a shape with dimensions of size 1 inserted at these positions."""
    sizes = list(shape)
    for position in sorted(positions):
        sizes.insert(position, 1)
    return sizes


def _shape_of_work(name: str, args: Any, outputs: list[Tensor]) -> tuple[float, float]:
    """Returns `tiles` and `depth` of an operation.

    For a matrix product: tiles of the output, length of each sum; for an embedding's backward: 0, number of indices;
    for a convolution: 0, input channels; for others: 0, 0.
    """
    if name in _FACTORS:
        first, out = args[_FACTORS[name]], outputs[0]
        rows, columns = (out.shape[-2], out.shape[-1]) if out.dim() > 1 else (out.numel(), 1)
        batch = out.numel() // max(1, rows * columns)
        return float(batch * -(-rows // TILE) * -(-columns // TILE)), float(first.shape[-1])
    if name == "embedding_dense_backward":
        return 0.0, float(args[1].numel())
    if name in _CONV:
        return 0.0, float(args[2 if name == "convolution_backward" else 1].shape[1])
    return 0.0, 0.0


def _row_sum(name: str, args: Any, inputs: list[Tensor]) -> tuple[int, int] | None:
    """Returns (columns, rows) of an operation that sums all rows of a tensor, as the gradient of a bias does; else None."""
    if name == "convolution_backward" and args[-1][2]:
        channels = inputs[0].shape[1]
        return channels, inputs[0].numel() // channels  # channels are innermost on a GPU
    if name == "sum" and len(args) > 1 and args[1] and inputs[0].is_contiguous():
        x = inputs[0]
        remaining = sorted(set(range(x.dim())) - {d % x.dim() for d in args[1]})
        if remaining and remaining == list(range(x.dim() - len(remaining), x.dim())):
            width = int(np.prod([x.shape[d] for d in remaining]))
            return width, x.numel() // width
    return None


def replace_with_fake_tensors(model: nn.Module, mode: FakeTensorMode) -> None:
    """Replaces the tensors of a real model by fake ones, in place; tied parameters stay tied."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        tables: list[dict[str, Any]] = [module._parameters, module._buffers]
        for table in tables:
            for name, value in table.items():
                if value is None:
                    continue
                if id(value) not in memo:
                    fake = mode.from_tensor(value.detach(), static_shapes=True)
                    memo[id(value)] = nn.Parameter(fake, value.requires_grad) if isinstance(value, nn.Parameter) else fake
                table[name] = memo[id(value)]
        if isinstance(module, nn.RNNBase):
            module._init_flat_weights()


# --- passes -------------------------------------------------------------------------------------


def trace(
    loss: Callable[[int], Tensor], model: nn.Module, half: torch.dtype | None, sizes: tuple[int, int], recomputed: list[nn.Module]
) -> Pass:
    """Traces forward and backward at two sizes. `loss(num_samples)` returns the objective of a micro-batch.

    The modules of `recomputed` save only their inputs (activation checkpointing).
    """
    first, second = (_one_pass(loss, model, half, size, recomputed) for size in sizes)
    if first.clock != second.clock or len(first.operations) != len(second.operations):
        return _line_through_peaks(first, second, model, sizes)
    sums = {clock: (columns, rows / sizes[0]) for clock, (columns, rows) in first.sums.items()}
    with_gradients = _peak_lines(first.curve(set()), second.curve(set()), sizes, sums)
    without_gradients = _peak_lines(first.curve(first.gradients), second.curve(second.gradients), sizes, sums)
    return Pass(
        with_gradients,
        without_gradients,
        second.copied_bytes(),
        second.has_matrix_product,
        _count_equal_operations(first.operations, second.operations, sizes),
    )


def trace_evaluation(loss: Callable[[int], Tensor], model: nn.Module, half: torch.dtype | None, sizes: tuple[int, int]) -> tuple[Line, ...]:
    """Returns the memory of a forward pass without gradients."""
    peaks = []
    for size in sizes:
        recorder = OperationRecorder([*model.parameters(), *model.buffers()])
        with torch.no_grad(), FakeGpuKernels(half, recorder.record_work), recorder:
            loss(size)
        peaks.append(float(recorder.curve(set()).max()))
    return (_line(peaks[0], peaks[1], sizes),)


class _Traced(OperationRecorder):
    gradients: set[int]
    """Indices of the storages that hold parameters' gradients."""


def _one_pass(loss: Callable[[int], Tensor], model: nn.Module, half: torch.dtype | None, size: int, recomputed: list[nn.Module]) -> _Traced:
    recorder = _Traced([*model.parameters(), *model.buffers()])
    mode = FakeGpuKernels(half, recorder.record_work)
    model.zero_grad(set_to_none=True)
    for module in recomputed:
        module.forward = _checkpointed(module.forward, mode)
    try:
        with mode, recorder:
            loss(size).backward()
    finally:
        for module in recomputed:
            del module.forward
    gradient_storages = {p.grad.untyped_storage()._cdata for p in model.parameters() if p.grad is not None}
    recorder.gradients = {recorder.index_of[key] for key in gradient_storages if key in recorder.index_of}
    model.zero_grad(set_to_none=True)
    return recorder


def _checkpointed(forward: Callable[..., Any], mode: FakeGpuKernels) -> Callable[..., Any]:
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    # The mode is off during a backward pass, so the recomputed forward turns it on again.
    return lambda *args, **kwargs: checkpoint(forward, *args, context_fn=lambda: (nullcontext(), mode), **options, **kwargs)


def _line_through_peaks(first: _Traced, second: _Traced, model: nn.Module, sizes: tuple[int, int]) -> Pass:
    """Returns a line through the two peaks, for a pass whose operations differ between the two sizes."""
    with_gradients = _line(float(first.curve(set()).max()), float(second.curve(set()).max()), sizes)
    without_gradients = _line(float(first.curve(first.gradients).max()), float(second.curve(second.gradients).max()), sizes)
    work = _count_equal_operations(second.operations, second.operations, sizes)
    per_sample = tuple(w._replace(flops=(0.0, w.flops[0] / sizes[1]), bytes=(0.0, w.bytes[0] / sizes[1])) for w in work)
    return Pass((with_gradients,), (without_gradients,), second.copied_bytes(), second.has_matrix_product, per_sample)


def _line(first: float, second: float, sizes: tuple[int, int]) -> Line:
    """Returns the line through the values at two sizes."""
    slope = (second - first) / (sizes[1] - sizes[0])
    return Line(float(first - slope * sizes[0]), float(slope))


def _peak_lines(first: np.ndarray, second: np.ndarray, sizes: tuple[int, int], sums: dict[int, tuple[int, float]]) -> tuple[Line, ...]:
    """Returns the lines that are the highest for some number of samples, from the memory curves at two sizes."""
    slopes = (second - first) / (sizes[1] - sizes[0])
    fixed = first - slopes * sizes[0]
    highest: list[Line] = []
    for samples in PEAK_SIZES:
        heights = fixed + slopes * samples
        for clock, (columns, rows_per_sample) in sums.items():
            heights[clock] += reduction_buffer_bytes(columns, rows_per_sample * samples)
        top = int(np.argmax(heights))
        line = Line(float(fixed[top]), float(slopes[top]), *sums.get(top, (0, 0.0)))
        if line not in highest:
            highest.append(line)
    return tuple(highest)


def _count_equal_operations(first: list[Operation], second: list[Operation], sizes: tuple[int, int]) -> tuple[Work, ...]:
    """Returns the work of each distinct operation as lines over the samples, with the number of times it runs."""

    def line(at_first: float, at_second: float) -> tuple[float, float]:
        fitted = _line(at_first, at_second, sizes)
        return fitted.fixed, fitted.per_sample

    works = []
    for (a, b), count in Counter(zip(first, second, strict=True)).items():
        flops, num_bytes = line(a.flops, b.flops), line(a.bytes, b.bytes)
        works.append(Work(count, a.kind, a.dtype, flops, num_bytes, line(a.tiles, b.tiles), line(a.depth, b.depth)))
    return tuple(works)
