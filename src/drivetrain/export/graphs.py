"""Writes ONNX graphs with torch.export, runs them with onnxruntime, and refuses those that differ from torch."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import traceback
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.export.calls import ADVICE, ExportGraph
from drivetrain.outcomes import Problem
from drivetrain.project import is_users

if TYPE_CHECKING:
    from torch import Tensor, nn

ABSOLUTE_TOLERANCE, RELATIVE_TOLERANCE = 1e-4, 1e-3  # between a graph's numbers and torch's


@dataclass(frozen=True)
class TensorSpec:
    """Name, type and shape of an input or output."""

    name: str
    dtype: str
    shape: list[int | str]
    """Sizes; a free size is a name."""


@dataclass(frozen=True)
class WrittenGraph:
    """A graph's file, inputs and outputs, and the largest difference between its numbers and torch's."""

    file: str
    bytes: int
    inputs: list[TensorSpec]
    outputs: list[TensorSpec]
    difference: float


def write_graph(name: str, graph: ExportGraph, folder: Path) -> WrittenGraph:
    """Writes one graph; raises Problem if its outputs differ from torch's."""
    import torch

    graph.module.eval()
    _check_repeats(name, graph)
    results = [run(graph.module, batch) for batch in graph.batches]
    expected = results[0]
    _check_dtypes(name, dict(zip(graph.names, graph.batches[0], strict=True)) | expected)
    path = folder / f"{name}.onnx"
    try:
        with _quiet():
            program = torch.onnx.export(
                graph.module, tuple(graph.batches[0]), dynamo=True, input_names=graph.names, output_names=list(expected),
                dynamic_shapes=(_dynamic_shapes(graph),),
            )  # fmt: skip
            assert program is not None
            _remove_source_lines(program)
            _name_variable_output_sizes(program, results)
            program.save(str(path))
    except OSError:
        raise
    except Exception as error:
        raise Problem(f"{name} cannot be exported: {_explain(error)}") from error
    difference = _check_against_torch(name, path, graph, results)
    inputs = [_tensor_spec(key, value, program.model.graph.inputs) for key, value in zip(graph.names, graph.batches[0], strict=True)]
    outputs = [_tensor_spec(key, value, program.model.graph.outputs) for key, value in expected.items()]
    return WrittenGraph(path.name, path.stat().st_size, inputs, outputs, difference)


def _check_dtypes(name: str, tensors: dict[str, Tensor]) -> None:
    import torch

    for key, value in tensors.items():
        if value.dtype == torch.bfloat16 or value.is_complex():
            function = "torch.view_as_real" if value.is_complex() else ".float()"
            raise Problem(
                f"{name} cannot be exported: {key!r} is {_dtype(value)}, which ONNX or NumPy does not have; convert it with {function}"
            )


def run(module: nn.Module, inputs: list[Tensor]) -> dict[str, Tensor]:
    import torch

    with torch.no_grad():
        outputs: dict[str, Tensor] = module(*inputs)
    return outputs


def _tensor_spec(name: str, tensor: Tensor, values: Iterable[Any]) -> TensorSpec:
    """Returns a tensor's specification, with the shape that the graph's values have."""
    shape = next((value.shape for value in values if value.name == name), None)
    sizes = tensor.shape if shape is None else [size if isinstance(size, int) else str(size.value) for size in shape]
    return TensorSpec(name, _dtype(tensor), list(sizes))


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _name_variable_output_sizes(program: Any, results: list[dict[str, Tensor]]) -> None:
    """Gives names to output sizes that differ between batches. The exporter writes some of them as constants of the first batch."""
    from onnxscript import ir

    for value in program.model.graph.outputs:
        shapes = [result[value.name].shape for result in results]
        if value.shape is None or {len(shape) for shape in shapes} != {len(value.shape)}:
            continue
        differs = [len({shape[i] for shape in shapes}) > 1 for i in range(len(value.shape))]
        sizes = [f"{value.name}_{i}" if differs[i] and isinstance(size, int) else size for i, size in enumerate(value.shape)]
        value.shape = ir.Shape(sizes)


def _dynamic_shapes(graph: ExportGraph) -> tuple[dict[int, Any], ...]:
    """Returns torch.export's dynamic shapes: batch dimensions must be free, the other ones may be."""
    import torch

    rows, auto = torch.export.Dim("rows", min=1), torch.export.Dim.AUTO
    pairs = zip(graph.batch_dims, graph.other_free_dims, strict=True)
    return tuple(dict.fromkeys(sorted(batch_dims), rows) | dict.fromkeys(sorted(others), auto) for batch_dims, others in pairs)


# --- random numbers -----------------------------------------------------------------------------


def _check_repeats(name: str, graph: ExportGraph) -> None:
    """Raises Problem if the module's outputs change from call to call."""
    from drivetrain.engine.data.keyed_random import seed_everything

    results = []
    for seed in (1, 2):
        seed_everything(seed)
        results.append(run(graph.module, graph.batches[0]))
    if not all(_is_same(value, results[1].get(key)) for key, value in results[0].items()):
        line = _random_line(graph)
        reason = f"because of random numbers in {line}" if line else "because of random numbers, or of state that it changes"
        raise Problem(
            f"{name} cannot be exported: its outputs change from call to call, {reason}"
            "\nSkip that in evaluation (if self.training), or make the numbers an input, in exports(model)"
        )


def _is_same(first: Tensor, second: Tensor | None) -> bool:
    import torch

    if second is None or first.shape != second.shape:
        return False
    if first.is_floating_point():
        return torch.allclose(first, second, RELATIVE_TOLERANCE, ABSOLUTE_TOLERANCE, equal_nan=True)
    return torch.equal(first, second)


def _random_line(graph: ExportGraph) -> str:
    """Returns the user's line that draws random numbers, or an empty string."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    lines: list[str] = []

    class RecordRandomOps(TorchDispatchMode):  # type: ignore[no-untyped-call]
        supports_higher_order_operators = True

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
                lines.append(_users_line(traceback.extract_stack()))
            return func(*args, **(kwargs or {}))

    with contextlib.suppress(Exception), RecordRandomOps():  # type: ignore[no-untyped-call]  # the line is only a hint, and compiled code may fail under this mode
        run(graph.module, graph.batches[0])
    return next((line for line in lines if line), "")


# --- checking -----------------------------------------------------------------------------------


def _check_against_torch(name: str, path: Path, graph: ExportGraph, results: list[dict[str, Tensor]]) -> float:
    """Returns the largest difference from torch over all batches; raises Problem if it is too large."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    largest, hint = 0.0, ""
    for number, (batch, expected) in enumerate(zip(graph.batches, results, strict=True)):
        if number and any(graph.other_free_dims):
            sizes = ", ".join(f"{key} {'x'.join(map(str, t.shape))}" for key, t in zip(graph.names, graph.batches[0], strict=True))
            hint = f"\nIt works for the sizes it was made with ({sizes}): make all batches of one size (in collate), or {ADVICE}"
        rows = next((t.shape[min(dims)] for t, dims in zip(batch, graph.batch_dims, strict=True) if dims), 1)
        try:
            session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
            used = {spec.name for spec in session.get_inputs()}
            inputs = {key: value.numpy() for key, value in zip(graph.names, batch, strict=True) if key in used}
            outputs = session.run(list(expected), inputs)
        except Exception as error:
            raise Problem(f"{name}.onnx does not run with {rows} rows: {_innermost_message(error)}{hint}") from error
        for (output, from_torch), from_onnx in zip(expected.items(), outputs, strict=True):
            difference = _difference(from_torch.numpy(), from_onnx)
            if difference is None:
                if line := _random_line(graph):
                    hint = f"; {line} draws random numbers: make them an input, in exports(model)"
                raise Problem(f"{name}.onnx is wrong: with {rows} rows its {output!r} differs from torch's{hint}")
            largest = max(largest, difference)
    return largest


def _difference(from_torch: Any, from_onnx: Any) -> float | None:
    """Returns the largest difference, or None if it is too large."""
    import numpy as np

    if from_torch.shape != from_onnx.shape:
        return None
    if from_torch.dtype.kind != "f":
        return 0.0 if np.array_equal(from_onnx, from_torch) else None
    if not np.allclose(from_onnx, from_torch, RELATIVE_TOLERANCE, ABSOLUTE_TOLERANCE, equal_nan=True):
        return None
    return float(np.nanmax(np.abs(from_onnx - from_torch), initial=0.0)) if from_torch.size else 0.0


def _remove_source_lines(program: Any) -> None:
    """Removes the source line of each node: it shows paths of this machine, and is most of a small graph's bytes."""
    for graph in program.model.graphs():
        graph.metadata_props.clear()
        for node in graph:
            for part in (node, *node.outputs):
                part.metadata_props.clear()
                part.doc_string = None
        for value in (*graph.inputs, *graph.initializers.values()):
            value.metadata_props.clear()


# --- why an export failed ------------------------------------------------------------------------


def _explain(error: BaseException) -> str:
    """Returns the user's line that cannot be exported, the reason, and the fix."""
    causes = _causes(error)
    frames = [frame for cause in causes for frame in traceback.extract_tb(cause.__traceback__)]
    line = _users_line(frames) or _users_line_in_text(_node_stack_traces(causes))
    if any(type(cause).__name__ in ("GuardOnDataDependentSymNode", "UserError") for cause in causes):
        return f"{line or 'its code'} branches on the values of a tensor\nUse torch.where there, or {ADVICE}"
    return f"{f'{line}: ' if line else ''}{_innermost_message(error)}\nChange that part, or {ADVICE}"


def _causes(error: BaseException) -> list[BaseException]:
    causes, cause = [error], error.__cause__
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__
    return causes


def _node_stack_traces(causes: list[BaseException]) -> str:
    """Returns the stack traces of the graph nodes that the exporter was processing when it failed."""
    nodes = [frame.f_locals.get("node") for cause in causes for frame, _ in traceback.walk_tb(cause.__traceback__)]
    return "\n".join(str(getattr(node, "stack_trace", "")) for node in nodes)


def _users_line(frames: Iterable[traceback.FrameSummary]) -> str:
    """Returns the innermost line of the user's own code, as `file.py:12 (the line)`, or an empty string."""
    own = [frame for frame in frames if is_users(frame.filename)]
    return f"{Path(own[-1].filename).name}:{own[-1].lineno} ({own[-1].line})" if own else ""


def _users_line_in_text(text: str) -> str:
    """Returns the last line of the user's own code in the text of a traceback, or an empty string."""
    lines = re.findall(r'File "([^"]+)", line (\d+)[^\n]*\n *([^\n]+)', text)
    return next((f"{Path(file).name}:{number} ({line})" for file, number, line in reversed(lines) if is_users(file)), "")


def _innermost_message(error: BaseException) -> str:
    """Returns the first non-empty line of the innermost error's message."""
    lines = [line.strip() for line in str(_causes(error)[-1]).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses the exporter's progress lines, log messages and warnings."""
    previous_level = logging.root.manager.disable
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(previous_level)
