"""Reads the state of a model and its optimizer as named tensors and JSON, and loads it into them."""

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

_DEVICE_OPTIONS = ("fused", "foreach", "capturable")  # they change an optimizer's kernels, not its results, so they are not saved

Layout = dict[str, tuple[torch.Size, torch.dtype]]
"""Name of a tensor -> its shape and type."""
T = TypeVar("T")


class StoredTensors:
    """Named tensors that rank 0 holds and broadcasts one at a time, because together they may not fit on a device.

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
        return shard_like(self.load(name), like)

    def subset(self, prefix: str) -> StoredTensors:
        """Returns the tensors whose names begin with `prefix/`, under their names without it."""
        subset = StoredTensors(None)
        subset._tensors = None if self._tensors is None else without_prefix(self._tensors, prefix)
        subset._group = self._group
        subset.layout = without_prefix(self.layout, prefix)
        return subset


# --- the model ---------------------------------------------------------------------------------


def model_tensors(model: nn.Module, read: Callable[[Tensor], Tensor] = Tensor.detach) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns the model's tensors by name, each once, and its aliases: further name of a tied tensor -> name under which it is stored."""
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
        has_shards = is_sharded(value) or hasattr(value, "ds_id")  # `ds_id`: sharded by DeepSpeed
        # This rank's shard may be empty, so its memory does not identify a sharded tensor.
        identity = (id(value),) if has_shards else (value.data_ptr(), value.shape, value.stride(), value.dtype)
        if (has_shards or value.numel()) and identity in names:
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
    """Loads stored tensors into a model. `origin` names their file or checkpoint in error messages."""
    stored = tensors if isinstance(tensors, StoredTensors) else StoredTensors(tensors)
    own = model.state_dict()
    check_model_fits({n: t.shape for n, t in own.items()}, stored, aliases, origin)
    values = {name: stored.load_like(name, own[name]) for name in stored.layout}
    model.load_state_dict(values | {alias: values[name] for alias, name in aliases.items() if name in values})


def check_model_fits(shapes: Mapping[str, torch.Size], stored: StoredTensors, aliases: dict[str, str], origin: str) -> None:
    """Raises Problem if the stored tensors do not have the same names and shapes as the model's."""
    layout = stored.layout | {alias: stored.layout[name] for alias, name in aliases.items() if name in stored.layout}
    missing, extra = sorted(shapes.keys() - layout.keys()), sorted(layout.keys() - shapes.keys())
    other_shapes = sorted(n for n in shapes.keys() & layout.keys() if shapes[n] != layout[n][0])
    if missing or extra or other_shapes:
        details = []
        for difference, names in (("it lacks", missing), ("it also has", extra), ("other shapes:", other_shapes)):
            if names:
                details.append(f"{difference} {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}")
        raise Problem(f"{origin} does not fit this model: {'; '.join(details)}")


def all_finite(parameters: Iterable[Tensor]) -> bool:
    """Returns whether all numbers of these parameters are finite (for sharded ones: this rank's numbers). Waits for the device once."""
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

    `read(value, parameter)` converts a tensor of the state to the tensor that is saved."""
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
    """Returns the options of the optimizer's parameter groups: tensors named #GROUP/KEY, and JSON for all other values.

    Learning rates are left out, because they follow from the schedule."""
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
    """Loads what `optimizer_tensors` returned. `load(name, parameter)` returns the optimizer's value for a stored tensor."""
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
            raise Problem(f"the checkpoint's optimizer has a parameter {owner!r} that this model does not have")
        parameter = parameters[owner]
        if name not in stored.layout:
            optimizer.state[parameter][entry] = values["values"][name]
            continue
        value = stored.load(name) if load is None else load(name, parameter)
        on_host = belongs_on_host(value, groups.get(parameter, {}), name in on_cpu)
        optimizer.state[parameter][entry] = _with_format_of(parameter, value, on_host)


def _with_format_of(parameter: Tensor, value: Tensor, on_host: bool) -> Tensor:
    """Returns a value of the optimizer's state on the host or the parameter's device, in the parameter's memory format."""
    value = value.to("cpu" if on_host else parameter.device)
    if value.shape == parameter.shape and not on_host:
        value = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
    return value


def belongs_on_host(value: Tensor, group: dict[str, Any], was_on_host: bool) -> bool:
    """Returns whether a value belongs in host memory: torch's own optimizers decide for step counts; others stay where they were."""
    if value.dim() == 0 and "capturable" in group:
        return not (group.get("fused") or group["capturable"])
    return was_on_host


# --- names -------------------------------------------------------------------------------------


def add_prefixes(parts: dict[str, dict[str, T]]) -> dict[str, T]:
    """Returns the parts as one dictionary, with names PART/NAME."""
    return {f"{part}/{name}": value for part, values in parts.items() for name, value in values.items()}


def without_prefix(values: Mapping[str, T], prefix: str) -> dict[str, T]:
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


def shard_like(value: Tensor, like: Any) -> Tensor:
    """Shards a full tensor, which every rank holds, in the same way as `like`; a tensor of another shape is replicated."""
    if not is_sharded(like) or is_sharded(value):
        return value
    from torch.distributed.tensor import Replicate, distribute_tensor

    placements = like.placements if value.shape == like.shape else [Replicate()]
    return distribute_tensor(value, like.device_mesh, placements, src_data_rank=None)


# --- weights as a file -------------------------------------------------------------------------


def write_weights(path: Path, tensors: dict[str, Tensor], aliases: dict[str, str]) -> None:
    """Writes final weights as safetensors; aliases become metadata, in the form that safetensors' own loader reads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}")
    save_file({n: t.detach().cpu().contiguous().clone() for n, t in tensors.items()}, temporary, {"format": "pt"} | aliases)
    _sort_metadata(temporary)
    temporary.replace(path)


def _sort_metadata(path: Path) -> None:
    """Sorts the metadata of a safetensors file, so that equal weights give equal files: its order changes from run to run."""
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
    except Exception as error:  # safetensors has its own error class for files of another format
        raise Problem(f"{path} is not a safetensors file: {error}") from None
