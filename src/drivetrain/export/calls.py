"""What is exported: the modules that a task names, or its model with what `metrics` hands it on real samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from drivetrain.data import Source, Tensors
from drivetrain.outcomes import Problem
from drivetrain.task import Task, overrides

if TYPE_CHECKING:
    from torch import Tensor, nn

SIZES = (8, 3, 1)  # samples of the batches: the first makes a graph, all check it
SAY = "say in exports(model) what is exported, with inputs"


@dataclass(frozen=True)
class Graph:
    """A module of tensors alone, and the batches it is made with and checked on."""

    module: nn.Module
    """Gives named tensors."""
    names: list[str]
    """Of its inputs."""
    batches: list[list[Tensor]]
    """Inputs; the first batch makes the graph."""
    rows: list[set[int]]
    """For each input, the dimensions that count samples."""
    free: list[set[int]]
    """For each input, dimensions that differ between batches otherwise, such as the longest sequence's length."""


def graphs_of(task: Task, model: nn.Module) -> dict[str, Graph]:
    """The graphs of a task by name."""
    named = task.exports(model)
    if not named:
        return {"model": as_called(task, model)}
    if not isinstance(named, Mapping):
        raise Problem(f"exports(model) gave a {type(named).__name__}: return a dict of name -> (module, inputs by name)")
    return {name: as_named(name, graph) for name, graph in named.items()}


def as_named(name: Any, graph: Any) -> Graph:
    """A module and its inputs, as the task's `exports` gives them: every first dimension counts samples."""
    import torch
    from torch import Tensor, nn

    if not isinstance(name, str) or not name or any(c in name for c in "/\\\0") or name.startswith("."):
        raise Problem(f"exports(model) names a graph {name!r}: a name that a file can have is needed")
    if not (isinstance(graph, Sequence) and len(graph) == 2 and isinstance(graph[0], nn.Module) and isinstance(graph[1], Mapping)):
        raise Problem(f"exports(model) gave for {name!r} something else than (module, inputs by name)")
    module, inputs = graph
    if not inputs or not all(isinstance(v, Tensor) and v.dim() for v in inputs.values()):
        raise Problem(f"exports(model): the inputs of {name!r} must be tensors by name, whose first dimension counts samples")
    sizes = {key: len(value) for key, value in inputs.items()}
    if len(set(sizes.values())) > 1 or not min(sizes.values()):
        raise Problem(f"exports(model): the inputs of {name!r} have different numbers of rows: {sizes}")
    made = [torch.cat([v, v]) if len(v) == 1 else v for v in inputs.values()]  # a single row would fix their number
    counts = sorted({len(made[0]), *(n for n in SIZES if n < len(made[0]))}, reverse=True)
    batches = [[v[:count] for v in made] for count in counts]
    return Graph(_named_outputs(module, list(inputs)), list(inputs), batches, [{0} for _ in made], [set() for _ in made])


# --- the model as it is called ------------------------------------------------------------------


def as_called(task: Task, model: nn.Module) -> Graph:
    """The model with what the task's own `metrics` hands it, on real batches of several sizes."""
    from torch import Tensor

    data = _data(task)
    calls = [_first_call(task, model, _batch(task, data, size)) for size in SIZES]
    (args, _), leaves, paths, spec = calls[0]
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    for size, (_, others, _, other_spec) in zip(SIZES, calls, strict=True):
        if other_spec != spec or any(isinstance(a, Tensor) is not isinstance(b, Tensor) for a, b in zip(leaves, others, strict=True)):
            raise Problem(f"the model is called in another form with {size} samples than with {SIZES[0]}: {SAY}")
    for i, leaf in enumerate(leaves):
        if i not in places:
            _check_fixed(leaf, [other[i] for _, other, _, _ in calls])
    if not places:
        raise Problem(f"the model is called without a tensor: {SAY}")
    batches = [[call[1][i] for i in places] for call in calls]
    rows, free = zip(*(_free_dimensions([batch[k] for batch in batches]) for k in range(len(places))), strict=True)
    names = _unique([_input_name(paths[i], len(args)) for i in places])
    module = _tensors_only(model, leaves, spec, places)
    return Graph(_named_outputs(module, names), names, batches, list(rows), list(free))


def _data(task: Task) -> Any:
    from drivetrain.engine.data.make_feed import check_data

    data, hook = task.eval_data(), "eval_data()"
    if data is None:
        data, hook = task.train_data(), "train_data()"
    if isinstance(data, Source):
        raise Problem(f"{type(task).__name__} makes its data by itself: {SAY}")
    check_data(data, hook)
    return data


def _batch(task: Task, data: Any, size: int) -> Any:
    """A batch of the first samples, made as an evaluation makes it; few samples are repeated."""
    import numpy as np
    import torch
    from torch.utils._pytree import tree_map
    from torch.utils.data import default_collate

    from drivetrain.engine.data.batches import as_tensor

    collate = task.collate if overrides(task, "collate") else None
    ids = [i % len(data) for i in range(size)]
    if isinstance(data, Tensors) and collate is None:
        return data.batch([as_tensor(column[: max(SIZES)])[torch.tensor(ids)] for column in data.columns])
    batch = (collate or default_collate)([data[i] for i in ids])
    return tree_map(lambda x: torch.from_numpy(x) if isinstance(x, np.ndarray) and x.dtype.kind in "biufc" else x, batch)


def _first_call(task: Task, model: nn.Module, batch: Any) -> tuple[Any, list[Any], list[Any], Any]:
    """What `metrics` hands the model first: the arguments, their leaves, the leaves' paths and their structure."""
    import torch
    from torch.utils._pytree import tree_flatten, tree_flatten_with_path

    seen: list[Any] = []
    hook = model.register_forward_pre_hook(lambda _, args, kwargs: seen.append((args, kwargs)), with_kwargs=True)
    with hook, torch.no_grad():
        task.metrics(model, batch)
    if not seen:
        raise Problem(f"{type(task).__name__}.metrics never calls the model itself: {SAY}")
    leaves, spec = tree_flatten(seen[0])
    return seen[0], leaves, [path for path, _ in tree_flatten_with_path(seen[0])[0]], spec


def _check_fixed(value: Any, others: list[Any]) -> None:
    """Refuse an argument that is no tensor, where a graph that has it fixed would be wrong."""
    from torch import Tensor

    if isinstance(value, Mapping) or any(isinstance(part, Tensor) for part in getattr(value, "__dict__", {}).values()):
        raise Problem(f"the model is called with a {type(value).__name__}, whose tensors have no names for an export: {SAY}")
    if isinstance(value, int | float | str) and any(other != value for other in others):
        told = ", ".join(map(str, others))
        raise Problem(f"the model is called with a number that differs between batches ({told}), and would be fixed: {SAY}")


def _free_dimensions(values: list[Tensor]) -> tuple[set[int], set[int]]:
    """The dimensions whose sizes are the batches' numbers of samples, and those that differ otherwise."""
    if len({value.dim() for value in values}) > 1:
        shapes = ", ".join("x".join(map(str, value.shape)) or "one number" for value in values)
        raise Problem(f"the model's input has other dimensions with other numbers of samples ({shapes}): {SAY}")
    rows, free = set(), set()
    for dim in range(values[0].dim()):
        sizes = tuple(value.shape[dim] for value in values)
        if sizes == SIZES:
            rows.add(dim)
        elif len(set(sizes)) > 1:
            free.add(dim)
    return rows, free


def _tensors_only(model: nn.Module, leaves: list[Any], spec: Any, places: list[int]) -> nn.Module:
    """The model as a module of tensors alone: what else it was called with is fixed."""
    from torch import nn
    from torch.utils._pytree import tree_unflatten

    class Called(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *tensors: Tensor) -> Any:
            given = dict(zip(places, tensors, strict=True))
            args, kwargs = tree_unflatten([given.get(i, leaf) for i, leaf in enumerate(leaves)], spec)
            return self.model(*args, **kwargs)

    return Called()


# --- names --------------------------------------------------------------------------------------


def _named_outputs(module: nn.Module, taken: list[str]) -> nn.Module:
    """The module with its outputs as named tensors; a graph needs other names for them than for its inputs."""
    from torch import nn

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, *tensors: Tensor) -> dict[str, Tensor]:
            found = outputs_of(self.module(*tensors))
            return {f"output_{name}" if name in taken else name: value for name, value in found.items()}

    return Named()


def outputs_of(result: Any) -> dict[str, Tensor]:
    """A model's result as named tensors: tuples, dicts and dataclasses, one within the other."""
    from torch import Tensor
    from torch.utils._pytree import tree_flatten_with_path

    if isinstance(result, Tensor):
        return {"output": result}
    pairs = [(path, leaf) for path, leaf in tree_flatten_with_path(_opened(result))[0] if isinstance(leaf, Tensor)]
    if not pairs:
        raise Problem(f"the model gives a {type(result).__name__} without tensors: {SAY}")
    return dict(zip(_unique([_joined("output", _keys(path)) for path, _ in pairs]), [leaf for _, leaf in pairs], strict=True))


def _opened(result: Any) -> Any:
    """Dataclasses as dicts, at any depth of tuples, lists and dicts."""
    if isinstance(result, dict):
        return {key: _opened(value) for key, value in result.items()}
    if dataclasses.is_dataclass(result) and not isinstance(result, type):
        return {field.name: _opened(getattr(result, field.name)) for field in dataclasses.fields(result)}
    if isinstance(result, list | tuple) and not hasattr(result, "_fields"):
        return [_opened(value) for value in result]
    return result


def _input_name(path: tuple[Any, ...], num_args: int) -> str:
    """`input` or `input_1` by position, a dict's key, or the keyword."""
    side, *keys = _keys(path)
    if side == "1":
        return "_".join(keys)
    position, *inner = keys
    if any(not key.isdigit() for key in inner):
        return _joined("input", inner)
    return "_".join(["input", *([position] if num_args > 1 else []), *inner])


def _keys(path: tuple[Any, ...]) -> list[str]:
    """The keys, indices and attributes on the way to a leaf."""
    return [str(next(getattr(key, name) for name in ("key", "idx", "name") if hasattr(key, name))) for key in path]


def _joined(first: str, keys: list[str]) -> str:
    return "_".join([first, *keys] if keys[0].isdigit() else keys)


def _unique(names: list[str]) -> list[str]:
    """Names with a number after those that stand twice."""
    found: list[str] = []
    for name in names:
        number = 2
        other = name
        while other in found:
            other, number = f"{name}_{number}", number + 1
        found.append(other)
    return found
