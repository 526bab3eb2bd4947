"""Finds what to export: the modules in the task's `exports`, or its model with the inputs that `metrics` gives it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from drivetrain.data import Source, Tensors
from drivetrain.outcomes import Problem
from drivetrain.task import Task, overrides

if TYPE_CHECKING:
    from torch import Tensor, nn

BATCH_SIZES = (8, 3, 1)  # the graph is made with the first batch and checked with all
ADVICE = "define exports(model), which returns what is exported, with inputs"


@dataclass(frozen=True)
class ExportGraph:
    """A module whose inputs and outputs are all tensors, and the batches to make and check its graph."""

    module: nn.Module
    """Returns a dict of tensors."""
    names: list[str]
    """Names of the inputs."""
    batches: list[list[Tensor]]
    """The inputs of each batch."""
    batch_dims: list[set[int]]
    """For each input, the dimensions whose size is the number of samples."""
    other_free_dims: list[set[int]]
    """For each input, other dimensions whose size differs between batches, such as the longest sequence's length."""


def graphs_of(task: Task, model: nn.Module) -> dict[str, ExportGraph]:
    """Returns the graphs of a task by name."""
    named = task.exports(model)
    if not named:
        return {"model": as_called(task, model)}
    if not isinstance(named, Mapping):
        raise Problem(f"exports(model) gave a {type(named).__name__}: return a dict of name -> (module, inputs by name)")
    return {name: as_named(name, graph) for name, graph in named.items()}


def as_named(name: Any, graph: Any) -> ExportGraph:
    """Checks a module and its inputs from the task's `exports`. The first dimension of every input is the batch dimension."""
    import torch
    from torch import Tensor, nn

    if not isinstance(name, str) or not name or any(character in name for character in "/\\\0") or name.startswith("."):
        raise Problem(f"exports(model) names a graph {name!r}: use a valid file name")
    if not (isinstance(graph, Sequence) and len(graph) == 2 and isinstance(graph[0], nn.Module) and isinstance(graph[1], Mapping)):
        raise Problem(f"exports(model)[{name!r}] must be (module, inputs by name)")
    module, inputs = graph
    if not inputs or not all(isinstance(value, Tensor) and value.dim() for value in inputs.values()):
        raise Problem(f"exports(model): the inputs of {name!r} must be tensors by name, whose first dimension counts samples")
    sizes = {key: len(value) for key, value in inputs.items()}
    if len(set(sizes.values())) > 1 or not min(sizes.values()):
        raise Problem(f"exports(model): the inputs of {name!r} have different numbers of rows: {sizes}")
    # At least two samples, because torch.export would fix a batch size of 1.
    tensors = [torch.cat([value, value]) if len(value) == 1 else value for value in inputs.values()]
    num_samples = len(tensors[0])
    batch_sizes = sorted({num_samples, *(size for size in BATCH_SIZES if size < num_samples)}, reverse=True)
    batches = [[tensor[:size] for tensor in tensors] for size in batch_sizes]
    return ExportGraph(_named_outputs(module, list(inputs)), list(inputs), batches, [{0} for _ in tensors], [set() for _ in tensors])


# --- the model as `metrics` calls it ------------------------------------------------------------------


def as_called(task: Task, model: nn.Module) -> ExportGraph:
    """Returns the model with the inputs that the task's `metrics` gives it, on real batches of several sizes."""

    data = _find_data(task)
    calls = [_first_call(task, model, _make_batch(task, data, size)) for size in BATCH_SIZES]
    first = calls[0]
    leaves = first.leaves
    tensor_indices = first.tensor_indices()
    for size, call in zip(BATCH_SIZES, calls, strict=True):
        if call.structure != first.structure or call.tensor_indices() != tensor_indices:
            raise Problem(f"the model is called in another form with {size} samples than with {BATCH_SIZES[0]}: {ADVICE}")
    for i, leaf in enumerate(leaves):
        if i not in tensor_indices:
            _check_fixed(leaf, [call.leaves[i] for call in calls])
    if not tensor_indices:
        raise Problem(f"the model is called without a tensor: {ADVICE}")
    batches = [[call.leaves[i] for i in tensor_indices] for call in calls]
    free_dims = [_free_dimensions(list(values)) for values in zip(*batches, strict=True)]
    names = _unique([_input_name(first.paths[i], first.num_args) for i in tensor_indices])
    module = _with_fixed_arguments(model, leaves, first.structure, tensor_indices)
    batch_dims, other_dims = [dims for dims, _ in free_dims], [dims for _, dims in free_dims]
    return ExportGraph(_named_outputs(module, names), names, batches, batch_dims, other_dims)


class _Call(NamedTuple):
    """The arguments of one call of the model, flattened."""

    num_args: int
    """The number of positional arguments."""
    leaves: list[Any]
    """All values that are no tuples, lists or dicts."""
    paths: list[Any]
    """For each leaf: where it is in (args, kwargs)."""
    structure: Any
    """What torch's tree_unflatten needs to rebuild (args, kwargs)."""

    def tensor_indices(self) -> list[int]:
        from torch import Tensor

        return [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)]


def _find_data(task: Task) -> Any:
    """Returns the evaluation data, or the training data if there is none."""
    from drivetrain.engine.data.make_feed import check_data

    data, hook = task.eval_data(), "eval_data()"
    if data is None:
        data, hook = task.train_data(), "train_data()"
    if isinstance(data, Source):
        raise Problem(f"{type(task).__name__} has a Source instead of a data set: {ADVICE}")
    check_data(data, hook)
    return data


def _make_batch(task: Task, data: Any, size: int) -> Any:
    """Returns a batch of the first samples, made as in an evaluation. If there are too few samples, they repeat."""
    import numpy as np
    import torch
    from torch.utils._pytree import tree_map
    from torch.utils.data import default_collate

    from drivetrain.engine.data.batches import as_tensor

    collate = task.collate if overrides(task, "collate") else None
    ids = [i % len(data) for i in range(size)]
    if isinstance(data, Tensors) and collate is None:
        return data.batch([as_tensor(column[: max(BATCH_SIZES)])[torch.tensor(ids)] for column in data.columns])
    batch = (collate or default_collate)([data[i] for i in ids])

    def numbers_as_tensor(value: Any) -> Any:
        is_numbers = isinstance(value, np.ndarray) and value.dtype.kind in "biufc"  # bool, int, unsigned, float, complex
        return torch.from_numpy(value) if is_numbers else value

    return tree_map(numbers_as_tensor, batch)


def _first_call(task: Task, model: nn.Module, batch: Any) -> _Call:
    """Returns the model's first call in `metrics`."""
    import torch
    from torch.utils._pytree import tree_flatten, tree_flatten_with_path

    calls: list[Any] = []
    hook = model.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    with hook, torch.no_grad():
        task.metrics(model, batch)
    if not calls:
        raise Problem(f"{type(task).__name__}.metrics never calls the model itself: {ADVICE}")
    leaves, structure = tree_flatten(calls[0])
    paths = [path for path, _ in tree_flatten_with_path(calls[0])[0]]
    args, _ = calls[0]
    return _Call(len(args), leaves, paths, structure)


def _check_fixed(value: Any, others: list[Any]) -> None:
    """Raises Problem if a graph in which this argument is fixed would be wrong. The argument is not a tensor."""
    from torch import Tensor

    if isinstance(value, Mapping) or any(isinstance(part, Tensor) for part in getattr(value, "__dict__", {}).values()):
        raise Problem(f"the model is called with a {type(value).__name__}, whose tensors have no names for an export: {ADVICE}")
    if isinstance(value, int | float | str) and any(other != value for other in others):
        values = ", ".join(map(str, others))
        raise Problem(f"the model is called with a number that differs between batches ({values}), and would be fixed: {ADVICE}")


def _free_dimensions(values: list[Tensor]) -> tuple[set[int], set[int]]:
    """Returns the dimensions whose sizes are the batch sizes, and the others whose sizes differ between batches."""
    if len({value.dim() for value in values}) > 1:
        shapes = ", ".join("x".join(map(str, value.shape)) or "one number" for value in values)
        raise Problem(f"the model's input has other dimensions with other numbers of samples ({shapes}): {ADVICE}")
    batch_dims, other_dims = set(), set()
    for dim in range(values[0].dim()):
        sizes = tuple(value.shape[dim] for value in values)
        if sizes == BATCH_SIZES:
            batch_dims.add(dim)
        elif len(set(sizes)) > 1:
            other_dims.add(dim)
    return batch_dims, other_dims


def _with_fixed_arguments(model: nn.Module, leaves: list[Any], structure: Any, tensor_indices: list[int]) -> nn.Module:
    """Returns a module that takes only the tensors and calls the model with the other arguments fixed."""
    from torch import nn
    from torch.utils._pytree import tree_unflatten

    class Called(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *tensors: Tensor) -> Any:
            inputs = dict(zip(tensor_indices, tensors, strict=True))
            args, kwargs = tree_unflatten([inputs.get(i, leaf) for i, leaf in enumerate(leaves)], structure)
            return self.model(*args, **kwargs)

    return Called()


# --- names --------------------------------------------------------------------------------------


def _named_outputs(module: nn.Module, input_names: list[str]) -> nn.Module:
    """Returns a module whose outputs are named tensors. No output has the name of an input: ONNX forbids it."""
    from torch import nn

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, *tensors: Tensor) -> dict[str, Tensor]:
            outputs = outputs_of(self.module(*tensors))
            return {f"output_{name}" if name in input_names else name: value for name, value in outputs.items()}

    return Named()


def outputs_of(result: Any) -> dict[str, Tensor]:
    """Returns the tensors in a model's result by name: the result may nest tuples, dicts and dataclasses."""
    from torch import Tensor
    from torch.utils._pytree import tree_flatten_with_path

    if isinstance(result, Tensor):
        return {"output": result}
    paths_and_leaves = tree_flatten_with_path(_dataclasses_as_dicts(result))[0]
    pairs = [(path, leaf) for path, leaf in paths_and_leaves if isinstance(leaf, Tensor)]
    if not pairs:
        raise Problem(f"the model gives a {type(result).__name__} without tensors: {ADVICE}")
    names = _unique([_joined("output", _keys(path)) for path, _ in pairs])
    return {name: tensor for name, (_, tensor) in zip(names, pairs, strict=True)}


def _dataclasses_as_dicts(result: Any) -> Any:
    """Replaces dataclasses by dicts, at any depth of tuples, lists and dicts."""
    if isinstance(result, dict):
        return {key: _dataclasses_as_dicts(value) for key, value in result.items()}
    if dataclasses.is_dataclass(result) and not isinstance(result, type):
        return {field.name: _dataclasses_as_dicts(getattr(result, field.name)) for field in dataclasses.fields(result)}
    if isinstance(result, list | tuple) and not hasattr(result, "_fields"):
        return [_dataclasses_as_dicts(value) for value in result]
    return result


def _input_name(path: tuple[Any, ...], num_args: int) -> str:
    """Returns the name of an input: `input` or `input_1` for a position, else the dict's key or the keyword."""
    args_or_kwargs, *keys = _keys(path)
    if args_or_kwargs == "1":
        return "_".join(keys)
    position, *inner = keys
    if any(not key.isdigit() for key in inner):
        return _joined("input", inner)
    return "_".join(["input", *([position] if num_args > 1 else []), *inner])


def _keys(path: tuple[Any, ...]) -> list[str]:
    """Returns the keys, indices and attributes of a path as text."""

    def text(key: Any) -> str:
        return str(next(getattr(key, name) for name in ("key", "idx", "name") if hasattr(key, name)))

    return [text(key) for key in path]


def _joined(prefix: str, keys: list[str]) -> str:
    """Joins keys to a name, which gets the prefix if it would begin with a digit."""
    return "_".join([prefix, *keys] if keys[0].isdigit() else keys)


def _unique(names: list[str]) -> list[str]:
    """Appends a number to repeated names."""
    unique: list[str] = []
    for name in names:
        number = 2
        candidate = name
        while candidate in unique:
            candidate, number = f"{name}_{number}", number + 1
        unique.append(candidate)
    return unique
