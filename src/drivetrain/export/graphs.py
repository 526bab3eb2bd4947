"""ONNX graphs: written by torch.export, then run by onnxruntime and refused where they differ from torch."""

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

from drivetrain.export.calls import SAY, Graph
from drivetrain.outcomes import Problem
from drivetrain.project import is_users

if TYPE_CHECKING:
    from torch import Tensor, nn

ABSOLUTE, RELATIVE = 1e-4, 1e-3  # by which a graph's numbers may differ from torch's


@dataclass(frozen=True)
class Put:
    """A tensor that goes in or comes out."""

    name: str
    dtype: str
    shape: list[int | str]
    """Sizes; those that are free have names."""


@dataclass(frozen=True)
class Written:
    """A graph that was written, and how far its numbers are from torch's."""

    file: str
    bytes: int
    inputs: list[Put]
    outputs: list[Put]
    difference: float


def write(name: str, graph: Graph, folder: Path) -> Written:
    """Write one graph, and refuse it where its numbers are not torch's."""
    import torch

    graph.module.eval()
    _check_repeats(name, graph)
    results = [run(graph.module, batch) for batch in graph.batches]
    expected = results[0]
    for key, value in [*zip(graph.names, graph.batches[0], strict=True), *expected.items()]:
        if value.dtype == torch.bfloat16 or value.is_complex():
            way = "torch.view_as_real" if value.is_complex() else ".float()"
            raise Problem(f"{name} cannot be exported: {key!r} is {_dtype(value)}, which ONNX or NumPy lacks; convert it with {way}")
    path = folder / f"{name}.onnx"
    try:
        with _quiet():
            program = torch.onnx.export(
                graph.module, tuple(graph.batches[0]), dynamo=True, input_names=graph.names, output_names=list(expected),
                dynamic_shapes=(_dynamic_shapes(graph),),
            )  # fmt: skip
            assert program is not None
            _forget_origin(program)
            _free_outputs(program, results)
            program.save(str(path))
    except OSError:
        raise
    except Exception as error:
        raise Problem(f"{name} cannot be exported: {_why(error)}") from error
    difference = _difference(name, path, graph, results)
    sides = (program.model.graph.inputs, zip(graph.names, graph.batches[0], strict=True)), (program.model.graph.outputs, expected.items())
    puts = [[_put(key, value, shapes) for key, value in tensors] for shapes, tensors in sides]
    return Written(path.name, path.stat().st_size, puts[0], puts[1], difference)


def run(module: nn.Module, inputs: list[Tensor]) -> dict[str, Tensor]:
    import torch

    with torch.no_grad():
        outputs: dict[str, Tensor] = module(*inputs)
    return outputs


def _put(name: str, tensor: Tensor, values: Iterable[Any]) -> Put:
    """A tensor with its shape as the graph has it."""
    shape = next((value.shape for value in values if value.name == name), None)
    sizes = tensor.shape if shape is None else [size if isinstance(size, int) else str(size.value) for size in shape]
    return Put(name, _dtype(tensor), list(sizes))


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _free_outputs(program: Any, results: list[dict[str, Tensor]]) -> None:
    """Name the sizes of outputs that differ between batches: the exporter notes some of them as they were in the first."""
    from onnxscript import ir

    for value in program.model.graph.outputs:
        shapes = [result[value.name].shape for result in results]
        if value.shape is None or {len(shape) for shape in shapes} != {len(value.shape)}:
            continue
        differs = [len({shape[i] for shape in shapes}) > 1 for i in range(len(value.shape))]
        sizes = [f"{value.name}_{i}" if differs[i] and isinstance(size, int) else size for i, size in enumerate(value.shape)]
        value.shape = ir.Shape(sizes)


def _dynamic_shapes(graph: Graph) -> tuple[dict[int, Any], ...]:
    """The number of samples must stay free; other sizes that differ are as free as the model lets them be."""
    import torch

    rows, auto = torch.export.Dim("rows", min=1), torch.export.Dim.AUTO
    pairs = zip(graph.rows, graph.free, strict=True)
    return tuple(dict.fromkeys(sorted(counted), rows) | dict.fromkeys(sorted(other), auto) for counted, other in pairs)


# --- random numbers -----------------------------------------------------------------------------


def _check_repeats(name: str, graph: Graph) -> None:
    """Refuse a module whose outputs differ from run to run."""
    from drivetrain.engine.data.keyed_random import seed_everything

    found = []
    for seed in (1, 2):
        seed_everything(seed)
        found.append(run(graph.module, graph.batches[0]))
    if not all(_same(value, found[1].get(key)) for key, value in found[0].items()):
        line = _random_line(graph)
        why = f"with random numbers of {line}" if line else "by random numbers, or by state that it changes"
        raise Problem(
            f"{name} cannot be exported: it gives other numbers each time, {why}"
            "\nLeave that out of evaluation (if self.training), or hand the numbers in as an input, in exports(model)"
        )


def _same(one: Tensor, two: Tensor | None) -> bool:
    import torch

    if two is None or one.shape != two.shape:
        return False
    return torch.allclose(one, two, RELATIVE, ABSOLUTE, equal_nan=True) if one.is_floating_point() else torch.equal(one, two)


def _random_line(graph: Graph) -> str:
    """The user's line that draws random numbers, if one does."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    lines: list[str] = []

    class Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
        supports_higher_order_operators = True

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
                lines.append(_users_line(traceback.extract_stack()))
            return func(*args, **(kwargs or {}))

    with contextlib.suppress(Exception), Draws():  # type: ignore[no-untyped-call]  # it only explains: compiled code, for one, may not run under it
        run(graph.module, graph.batches[0])
    return next((line for line in lines if line), "")


# --- checking -----------------------------------------------------------------------------------


def _difference(name: str, path: Path, graph: Graph, results: list[dict[str, Tensor]]) -> float:
    """The largest difference from torch over all batches; too large a one is refused."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    largest, hint = 0.0, ""
    for number, (batch, expected) in enumerate(zip(graph.batches, results, strict=True)):
        if number and any(graph.free):
            sizes = ", ".join(f"{key} {'x'.join(map(str, t.shape))}" for key, t in zip(graph.names, graph.batches[0], strict=True))
            hint = f"\nIt holds for the sizes it was made with ({sizes}): give batches of one size (in collate), or {SAY}"
        rows = next((t.shape[min(dims)] for t, dims in zip(batch, graph.rows, strict=True) if dims), 1)
        try:
            session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
            wanted = {put.name for put in session.get_inputs()}
            given = {key: value.numpy() for key, value in zip(graph.names, batch, strict=True) if key in wanted}
            found = session.run(list(expected), given)
        except Exception as error:
            raise Problem(f"{name}.onnx does not run with {rows} rows: {_reason(error)}{hint}") from error
        for (output, torchs), theirs in zip(expected.items(), found, strict=True):
            apart = _apart(torchs.numpy(), theirs)
            if apart is None:
                if line := _random_line(graph):
                    hint = f"; {line} draws random numbers: hand them in as an input, in exports(model)"
                raise Problem(f"{name}.onnx was refused: with {rows} rows its {output!r} differs from torch's{hint}")
            largest = max(largest, apart)
    return largest


def _apart(ours: Any, theirs: Any) -> float | None:
    """The largest difference, or None where it is too large."""
    import numpy as np

    if ours.shape != theirs.shape:
        return None
    if ours.dtype.kind != "f":
        return 0.0 if np.array_equal(theirs, ours) else None
    if not np.allclose(theirs, ours, RELATIVE, ABSOLUTE, equal_nan=True):
        return None
    return float(np.nanmax(np.abs(theirs - ours), initial=0.0)) if ours.size else 0.0


def _forget_origin(program: Any) -> None:
    """Leave out which line of whose file each node came from: it is nobody's business, and most of a small graph's bytes."""
    for graph in program.model.graphs():
        graph.metadata_props.clear()
        for node in graph:
            for part in (node, *node.outputs):
                part.metadata_props.clear()
                part.doc_string = None
        for value in (*graph.inputs, *graph.initializers.values()):
            value.metadata_props.clear()


# --- reasons ------------------------------------------------------------------------------------


def _why(error: BaseException) -> str:
    """The user's line that cannot be exported, what is wrong with it, and what to do."""
    causes = _causes(error)
    frames = [frame for cause in causes for frame in traceback.extract_tb(cause.__traceback__)]
    line = _users_line(frames) or _line_in(_traces(causes))
    if any(type(cause).__name__ in ("GuardOnDataDependentSymNode", "UserError") for cause in causes):
        return f"{line or 'its code'} goes by the values of a tensor\nUse torch.where there, or {SAY}"
    return f"{f'{line}: ' if line else ''}{_reason(error)}\nChange that part, or {SAY}"


def _causes(error: BaseException) -> list[BaseException]:
    found, cause = [error], error.__cause__
    while cause is not None and cause not in found:
        found.append(cause)
        cause = cause.__cause__
    return found


def _traces(causes: list[BaseException]) -> str:
    """Where the nodes came from that the exporter was at when it failed."""
    nodes = [frame.f_locals.get("node") for cause in causes for frame, _ in traceback.walk_tb(cause.__traceback__)]
    return "\n".join(str(getattr(node, "stack_trace", "")) for node in nodes)


def _users_line(frames: Iterable[traceback.FrameSummary]) -> str:
    """The innermost line that is the user's own, as `file.py:12 (the line)`."""
    theirs = [frame for frame in frames if is_users(frame.filename)]
    return f"{Path(theirs[-1].filename).name}:{theirs[-1].lineno} ({theirs[-1].line})" if theirs else ""


def _line_in(text: str) -> str:
    """The last line of the user's own that a text tells as Python's tracebacks do."""
    found = re.findall(r'File "([^"]+)", line (\d+)[^\n]*\n *([^\n]+)', text)
    return next((f"{Path(file).name}:{number} ({line})" for file, number, line in reversed(found) if is_users(file)), "")


def _reason(error: BaseException) -> str:
    """The first line that says something, of the innermost error."""
    lines = [line.strip() for line in str(_causes(error)[-1]).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter tells its progress on the screen and its doubts in warnings."""
    before = logging.root.manager.disable
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(before)
