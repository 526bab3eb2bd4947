"""The state of a training as named tensors and JSON: read from a model and its optimizer, and loaded into them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from drivetrain.engine.group import Group
from drivetrain.outcomes import Problem

_DEVICE_OPTIONS = ("fused", "foreach", "capturable")  # how an optimizer computes, not what

Layout = dict[str, tuple[torch.Size, torch.dtype]]
"""Shape and type of each tensor, by name."""
T = TypeVar("T")


class StoredTensors:
    """Named tensors that rank 0 holds and broadcasts one at a time: together they may not fit on a device.

    Loading one is a collective call: all ranks load the same tensors in the same order."""

    def __init__(self, tensors: Mapping[str, Tensor] | None, group: Group | None = None) -> None:
        self._tensors = tensors
        self._group = group if group is not None and group.size > 1 else None
        layout = None if tensors is None else {n: (t.shape, t.dtype) for n, t in tensors.items()}
        self.layout: Layout = (layout if self._group is None else self._group.broadcast_object(layout)) or {}

    def load(self, name: str) -> Tensor:
        """Returns the full tensor."""
        if self._group is None:
            assert self._tensors is not None
            return self._tensors[name]
        shape, dtype = self.layout[name]
        target = torch.empty(shape, dtype=dtype, device=self._group.device)
        if self._tensors is not None:
            target.copy_(self._tensors[name])
        self._group.broadcast([target])
        return target

    def load_like(self, name: str, like: Tensor) -> Tensor:
        """Returns the tensor, sharded as `like` is."""
        return shard_like(like, self.load(name))

    def subset(self, prefix: str) -> StoredTensors:
        """Returns the tensors whose names begin with `prefix/`, under their names without it."""
        subset = StoredTensors(None)
        subset._tensors = None if self._tensors is None else with_prefix(self._tensors, prefix)
        subset._group = self._group
        subset.layout = with_prefix(self.layout, prefix)
        return subset


# --- the model ---------------------------------------------------------------------------------


def model_tensors(model: nn.Module, read: Callable[[Tensor], Tensor] = Tensor.detach) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns the model's tensors by name, each once, and its aliases: other name of a tied tensor -> name it is stored under."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    names: dict[tuple[Any, ...], str] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            raise Problem(f"the model's state {name!r} is a {type(value).__name__}: drivetrain saves tensors; keep it as a buffer")
        if form := unsavable_form(value):
            raise Problem(
                f"model() has a {form} tensor {name!r}, which cannot be saved: make it with register_buffer(..., persistent=False),"
                f" or keep what it is made of as dense buffers"
            )
        sharded = is_sharded(value) or hasattr(value, "ds_id")  # this rank's shard may be empty: only the object identifies the tensor
        identity = (id(value),) if sharded else (value.data_ptr(), value.shape, value.stride(), value.dtype)
        if (sharded or value.numel()) and identity in names:
            aliases[name] = names[identity]
        else:
            names[identity], tensors[name] = name, read(value)
    return tensors, aliases


def unsavable_form(tensor: Tensor) -> str:
    """Returns "nested", "sparse" or "quantized" for a tensor that a checkpoint cannot hold; empty for a dense one."""
    if tensor.is_nested:
        return "nested"
    if tensor.layout is not torch.strided:
        return str(tensor.layout).removeprefix("torch.").replace("_", " ").replace("sparse coo", "sparse")
    return "quantized" if tensor.is_quantized else ""


def load_model(model: nn.Module, tensors: StoredTensors | Mapping[str, Tensor], aliases: dict[str, str], origin: str) -> None:
    """Loads stored tensors into a model. `origin` says in errors where they come from."""
    stored = tensors if isinstance(tensors, StoredTensors) else StoredTensors(tensors)
    own = model.state_dict()
    check_model_fits({n: t.shape for n, t in own.items()}, stored, aliases, origin)
    values = {name: stored.load_like(name, own[name]) for name in stored.layout}
    model.load_state_dict(values | {alias: values[name] for alias, name in aliases.items() if name in values})


def check_model_fits(shapes: Mapping[str, torch.Size], stored: StoredTensors, aliases: dict[str, str], origin: str) -> None:
    """Raises Problem unless the stored tensors have the names and shapes of the model's."""
    layout = stored.layout | {alias: stored.layout[name] for alias, name in aliases.items() if name in stored.layout}
    missing, extra = sorted(shapes.keys() - layout.keys()), sorted(layout.keys() - shapes.keys())
    other_shapes = sorted(n for n in shapes.keys() & layout.keys() if shapes[n] != layout[n][0])
    if missing or extra or other_shapes:
        detail = "; ".join(
            f"{difference} {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}"
            for difference, names in (("it lacks", missing), ("it also has", extra), ("other shapes:", other_shapes))
            if names
        )
        raise Problem(f"{origin} does not fit this model: {detail}")


def all_finite(parameters: Iterable[Tensor]) -> bool:
    """Returns whether all numbers of these parameters (of a sharded one, this rank's) are finite; waits for the device once."""
    results = [torch.isfinite(local_tensor(p)).all() for p in parameters if p.is_floating_point()]
    return not results or bool(torch.stack([r.to(results[0].device) for r in results]).all())


def count_parameters(parameters: Iterable[nn.Parameter], condition: Callable[[nn.Parameter], bool] = lambda p: True) -> int:
    return sum(p.numel() for p in parameters if condition(p))


# --- the optimizer -----------------------------------------------------------------------------


def optimizer_tensors(
    parameters: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    read: Callable[[Tensor, Tensor], Tensor] = lambda value, parameter: value,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns the optimizer's state: tensors named PARAMETER/ENTRY, and JSON for all other values.

    `read(value, parameter)` returns the tensor to save for a tensor of the state."""
    names = {p: n for n, p in parameters.items()}
    tensors, values = param_group_tensors(optimizer)
    for parameter, state in optimizer.state.items():
        for entry, value in state.items():
            name = f"{names[parameter]}/{entry}"
            if isinstance(value, Tensor):
                check_savable(value, "the optimizer's", name)
                tensors[name] = read(value, parameter)
                if value.device != parameter.device:
                    values.setdefault("on_cpu", []).append(name)
            else:
                values.setdefault("values", {})[name] = check_json(name, value)
    return tensors, values


def param_group_tensors(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns what the optimizer's parameter groups hold beside parameters: tensors named #GROUP/KEY, and JSON.

    Learning rates are left out: they follow from the schedule."""
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {"groups": []}
    for number, group in enumerate(optimizer.param_groups):
        saved = {k: v for k, v in group.items() if k not in ("params", "lr", *_DEVICE_OPTIONS)}
        for key, value in saved.items():
            if isinstance(value, Tensor):
                check_savable(value, "the optimizer's", key)
                tensors[f"#{number}/{key}"] = value
        values["groups"].append({k: check_json(k, v) for k, v in saved.items() if not isinstance(v, Tensor)})
    return tensors, values


def check_savable(value: Tensor, owner: str, name: str) -> None:
    """Raises Problem for a tensor that a checkpoint cannot hold."""
    if form := unsavable_form(value):
        raise Problem(f"{owner} state {name!r} is a {form} tensor, which cannot be saved: keep it dense")


def check_json(name: str, value: Any) -> Any:
    """Returns the value; raises Problem where JSON cannot hold it."""
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        raise Problem(f"the optimizer's state {name!r} is a {type(value).__name__}: only tensors and plain values can be saved") from None
    return value


def load_optimizer(
    parameters: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    stored: StoredTensors,
    values: dict[str, Any],
    load: Callable[[str, Tensor], Tensor] | None = None,
) -> None:
    """Loads what `optimizer_tensors` returned. `load(name, parameter)` returns the value to keep for a stored tensor."""
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    on_cpu = set(values.get("on_cpu", ()))
    optimizer.state.clear()
    for group, saved in zip(optimizer.param_groups, values["groups"], strict=True):
        group |= saved
    for name in (*stored.layout, *values.get("values", {})):
        owner, _, entry = name.rpartition("/")
        if owner.startswith("#"):
            optimizer.param_groups[int(owner[1:])][entry] = stored.load(name)
            continue
        if owner not in parameters:
            raise Problem(f"the checkpoint's optimizer knows a parameter {owner!r} that this model does not have")
        parameter = parameters[owner]
        if name not in stored.layout:
            optimizer.state[parameter][entry] = values["values"][name]
            continue
        value = stored.load(name) if load is None else load(name, parameter)
        on_host = belongs_on_host(value, groups.get(parameter, {}), name in on_cpu)
        optimizer.state[parameter][entry] = _place_beside(parameter, value, on_host)


def _place_beside(parameter: Tensor, value: Tensor, on_host: bool) -> Tensor:
    """Returns a value of the optimizer's state on the right device, in the parameter's memory format."""
    value = value.to("cpu" if on_host else parameter.device)
    if value.shape == parameter.shape and not on_host:
        value = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
    return value


def belongs_on_host(value: Tensor, group: dict[str, Any], was_on_host: bool) -> bool:
    """Returns whether a value belongs in the host's memory. For step counts torch's own optimizers decide, else it is as it was."""
    if value.dim() == 0 and "capturable" in group:
        return not (group.get("fused") or group["capturable"])
    return was_on_host


# --- names -------------------------------------------------------------------------------------


def add_prefixes(parts: dict[str, dict[str, T]]) -> dict[str, T]:
    """Returns the parts as one dictionary, with names PART/NAME."""
    return {f"{part}/{name}": value for part, values in parts.items() for name, value in values.items()}


def with_prefix(values: Mapping[str, T], prefix: str) -> dict[str, T]:
    """Returns the entries whose names begin with `prefix/`, under their names without it."""
    return {name[len(prefix) + 1 :]: value for name, value in values.items() if name.startswith(f"{prefix}/")}


# --- sharded tensors ---------------------------------------------------------------------------


def is_sharded(tensor: Tensor) -> bool:
    """Returns whether the tensor is a DTensor of torch, without importing that slow class."""
    return hasattr(tensor, "placements")


def local_tensor(tensor: Tensor) -> Tensor:
    """Returns this rank's shard of a sharded tensor, or the tensor itself."""
    detached: Any = tensor.detach()
    local: Tensor = detached.to_local() if is_sharded(detached) else detached
    return local


def shard_like(like: Any, value: Tensor) -> Tensor:
    """Returns a full tensor, which every rank has, sharded as another tensor is; one of another shape is replicated."""
    if not is_sharded(like) or is_sharded(value):
        return value
    from torch.distributed.tensor import Replicate, distribute_tensor

    placements = like.placements if value.shape == like.shape else [Replicate()]
    return distribute_tensor(value, like.device_mesh, placements, src_data_rank=None)


# --- weights as a file -------------------------------------------------------------------------


def write_weights(path: Path, tensors: dict[str, Tensor], aliases: dict[str, str]) -> None:
    """Writes final weights as safetensors; tied names become metadata, as safetensors' own loader has them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    hidden = path.with_name(f".{path.name}")
    save_file({n: t.detach().cpu().contiguous().clone() for n, t in tensors.items()}, hidden, {"format": "pt"} | aliases)
    _sort_metadata(hidden)
    hidden.replace(path)


def _sort_metadata(path: Path) -> None:
    """Sorts the metadata of a safetensors file, whose order changes from run to run: equal weights become equal files."""
    with open(path, "r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(length)
        if len(text) == length:
            file.seek(8)
            file.write(text)


def read_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns the tensors and aliases of a safetensors file."""
    try:
        with safe_open(path, "pt") as file:
            names = list(file.keys())
            aliases = {k: v for k, v in (file.metadata() or {}).items() if v in names}
            return {name: file.get_tensor(name) for name in names}, aliases
    except Exception as error:  # safetensors raises its own class for a file that is none
        raise Problem(f"{path} is no safetensors file: {error}") from None
