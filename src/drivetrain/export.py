"""A trained model as files for other programs: ONNX, checked against torch, and safetensors."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain import runs
from drivetrain.outcomes import Problem
from drivetrain.runs import Run
from drivetrain.task import Source, Task, Tensors

if TYPE_CHECKING:
    from torch import Tensor, nn

SAMPLES = 8  # that a graph is made with and checked on
ABSOLUTE, RELATIVE = 1e-4, 1e-3  # by which its numbers may differ from torch's
CARD = "export.json"
LARGEST = 2_000_000_000  # bytes


@dataclass(frozen=True)
class Put:
    """A tensor that goes in or comes out; its first dimension is free."""

    name: str
    dtype: str
    shape: list[int]
    """Without the first dimension."""


@dataclass(frozen=True)
class Written:
    """A graph that was written, and how far its numbers are from torch's."""

    file: str
    bytes: int
    inputs: list[Put]
    outputs: list[Put]
    difference: float


def export(task: Task, model: nn.Module, run: Run, folder: Path) -> dict[str, Written]:
    """Write everything into a folder: `NAME.onnx` for each graph, model.safetensors, and export.json that describes them."""
    _need()
    graphs = task.exports(model) or {"model": as_called(task, model)}
    if sum(t.nbytes for t in model.state_dict().values()) > LARGEST:
        raise Problem(f"the model is larger than a file of ONNX can be (2 GiB): {run.name}'s model.safetensors has its weights")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".export-", dir=folder.parent) as place:
        written = {name: _write(name, *graph, Path(place)) for name, graph in graphs.items()}
        folder.mkdir(exist_ok=True)
        for graph in written.values():  # all appear, once the numbers of all are torch's
            (Path(place) / graph.file).replace(folder / graph.file)
    _weights(model, run, folder)
    runs.write_atomic(folder / CARD, json.dumps(_card(run, written), indent=1) + "\n")
    return written


def _need() -> None:
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as missing:
        raise Problem(f"export needs {missing.name}: pip install 'drivetrain[export]'") from None


def _weights(model: nn.Module, run: Run, folder: Path) -> None:
    from safetensors.torch import save_model

    if run.finished and run.model_path.resolve() != (folder / "model.safetensors").resolve():
        shutil.copyfile(run.model_path, folder / "model.safetensors")
    elif not run.finished:
        save_model(model, str(folder / "model.safetensors"))


def _card(run: Run, written: dict[str, Written]) -> dict[str, Any]:
    info, last, evaluated = run.read(), run.last_row(), run.evaluated()
    hardware = info.get("hardware") or {}
    gpus = [gpu["name"] for gpu in hardware.get("gpus", [])]
    return {
        "format": runs.FORMAT, "run": run.name, "task": info["recipe"]["task"]["label"], "settings": info["recipe"]["settings"],
        "graphs": {name: asdict(graph) for name, graph in written.items()},
        "training": {
            "date": info["created"][:10], "step": last.get("step", 0), "seconds": last.get("time", 0.0),
            "hardware": gpus[0] if gpus else f"{hardware.get('cpu_cores', '?')} CPU cores", "versions": info["versions"],
            "metrics": {k: v for k, v in evaluated.items() if k.startswith("eval/")}, "metrics_step": evaluated.get("step"),
        },
    }  # fmt: skip


# --- what is exported ---------------------------------------------------------------------------


def samples(task: Task) -> Any:
    """A few real samples as a batch."""
    from torch.utils.data import default_collate

    data = task.eval_data()
    data = task.train_data() if data is None else data
    if isinstance(data, Source):
        raise Problem(f"{type(task).__name__} makes its data by itself: say in exports(model) what is exported, with inputs")
    if not len(data):
        raise Problem(f"{type(task).__name__} has no data to check an export on")
    count = min(SAMPLES, len(data))
    return data[:count] if isinstance(data, Tensors) else default_collate([data[i] for i in range(count)])


def as_called(task: Task, model: nn.Module) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model with what the task's own `metrics` hands it, on real samples."""
    import torch
    from torch import Tensor
    from torch.utils._pytree import tree_flatten, tree_map

    seen: list[Any] = []
    hook = model.register_forward_pre_hook(lambda _, args, kwargs: seen.append((args, kwargs)), with_kwargs=True)
    batch = tree_map(lambda x: torch.as_tensor(x) if hasattr(x, "__array__") else x, samples(task))
    with hook, torch.no_grad():
        task.metrics(model, batch)
    if not seen:
        raise Problem(f"{type(task).__name__}.metrics never calls the model itself: say in exports(model) what is exported, with inputs")
    args, kwargs = seen[0]
    leaves, _ = tree_flatten((args, kwargs))
    if not any(isinstance(leaf, Tensor) for leaf in leaves):
        raise Problem("the model is called without a tensor: say in exports(model) what is exported, with inputs")
    names = [f"input_{i}" if len(args) > 1 else "input" for i in range(len(args))] + list(kwargs)
    return _called(model, args, kwargs), {n: v for n, v in zip(names, [*args, *kwargs.values()], strict=True) if isinstance(v, Tensor)}


def _called(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> nn.Module:
    """The model as a module of tensors alone: what else it was called with is fixed."""
    from torch import Tensor, nn

    class Called(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *given: Tensor) -> dict[str, Tensor]:
            tensors = iter(given)
            told = [next(tensors) if isinstance(a, Tensor) else a for a in args]
            named = {k: next(tensors) if isinstance(a, Tensor) else a for k, a in kwargs.items()}
            return outputs_of(self.model(*told, **named))

    return Called()


def outputs_of(result: Any) -> dict[str, Tensor]:
    """A model's result as named tensors."""
    from torch import Tensor

    if isinstance(result, Tensor):
        return {"output": result}
    parts = result.items() if isinstance(result, dict) else enumerate(result)
    found = {k if isinstance(k, str) else f"output_{k}": v for k, v in parts if isinstance(v, Tensor)}
    if not found:
        raise Problem(f"the model gives a {type(result).__name__} without tensors: say in exports(model) what is exported")
    return found


# --- writing and checking -----------------------------------------------------------------------


def _write(name: str, module: nn.Module, inputs: dict[str, Tensor], folder: Path) -> Written:
    """Write one graph, and refuse it where its numbers are not torch's."""
    import torch

    module = module.eval()
    with torch.no_grad():
        expected: dict[str, Tensor] = module(*inputs.values())
    path = folder / f"{name}.onnx"
    rows = torch.export.Dim("rows", min=1)
    try:
        with _quiet():
            program = torch.onnx.export(
                module, tuple(inputs.values()), dynamo=True, input_names=list(inputs), output_names=list(expected),
                dynamic_shapes=(tuple({0: rows} for _ in inputs),) if _variadic(module) else tuple({0: rows} for _ in inputs),
            )  # fmt: skip
            _forget_origin(program)
            program.save(str(path))  # type: ignore[union-attr]
    except Exception as error:
        raise Problem(f"{name} cannot be exported: {_reason(error)}") from error
    difference = max(_difference(name, path, module, inputs, rows) for rows in {len(next(iter(inputs.values()))), 1, 3})
    puts = [[Put(k, str(v.dtype).removeprefix("torch."), list(v.shape[1:])) for k, v in some.items()] for some in (inputs, expected)]
    return Written(path.name, path.stat().st_size, puts[0], puts[1], difference)


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


def _variadic(module: nn.Module) -> bool:
    import inspect

    return any(p.kind is p.VAR_POSITIONAL for p in inspect.signature(module.forward).parameters.values())


def _difference(name: str, path: Path, module: nn.Module, inputs: dict[str, Tensor], rows: int) -> float:
    """The largest difference from torch, on so many rows; too large a one is refused."""
    import numpy as np
    import onnxruntime
    import torch

    few = {k: v[:rows] for k, v in inputs.items()}
    with torch.no_grad():
        expected: dict[str, Tensor] = module(*few.values())
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        wanted = {put.name for put in session.get_inputs()}
        found = session.run(list(expected), {k: v.numpy() for k, v in few.items() if k in wanted})
    except Exception as error:
        raise Problem(f"{name}.onnx does not run with {rows} rows: {_reason(error)}") from error
    largest = 0.0
    for (output, torchs), theirs in zip(expected.items(), found, strict=True):
        ours = torchs.numpy()
        same = ours.shape == theirs.shape and (
            np.allclose(theirs, ours, RELATIVE, ABSOLUTE, equal_nan=True) if ours.dtype.kind == "f" else np.array_equal(theirs, ours)
        )
        if not same:
            raise Problem(f"{name}.onnx was refused: with {rows} rows its {output!r} differs from torch's")
        if ours.dtype.kind == "f" and ours.size:
            largest = max(largest, float(np.nanmax(np.abs(theirs - ours))))
    return largest


def _reason(error: BaseException) -> str:
    """The first line that says something, of the innermost error."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
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
