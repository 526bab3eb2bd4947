"""The state of a training as named tensors and JSON, and back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from drivetrain.engine.group import Group
from drivetrain.outcomes import Problem

_OF_THE_DEVICE = ("fused", "foreach", "capturable")  # how an optimizer computes, not what


class Part(NamedTuple):
    """What this rank holds of a tensor, and which box of it that is."""

    plain: Tensor
    offsets: torch.Size
    size: torch.Size


class Stored:
    """Named tensors that rank 0 has, handed to every rank one at a time: they need not all fit a device at once.

    Taking one is a collective call, so all ranks take the same ones in the same order."""

    def __init__(self, tensors: Mapping[str, Tensor] | None, group: Group | None = None) -> None:
        self._tensors = tensors
        self._group = group if group is not None and group.size > 1 else None
        own = None if tensors is None else {n: (t.shape, t.dtype) for n, t in tensors.items()}
        self.layout: dict[str, tuple[torch.Size, torch.dtype]] = (own if self._group is None else self._group.share(own)) or {}

    def take(self, name: str) -> Tensor:
        if self._group is None:
            assert self._tensors is not None
            return self._tensors[name]
        shape, dtype = self.layout[name]
        place = torch.empty(shape, dtype=dtype, device=self._group.device)
        if self._tensors is not None:
            place.copy_(self._tensors[name])
        self._group.broadcast([place])
        return place

    def take_like(self, name: str, place: Tensor) -> Tensor:
        """The tensor, sharded as another one is."""
        return shard_like(place, self.take(name))

    def part(self, part: str) -> Stored:
        """Those whose names begin with `part/`, without that."""
        chosen = Stored(None)
        chosen._tensors = None if self._tensors is None else unpack(self._tensors, part)
        chosen._group = self._group
        chosen.layout = {n[len(part) + 1 :]: form for n, form in self.layout.items() if n.startswith(f"{part}/")}
        return chosen


class StoredFiles(Stored):
    """A checkpoint that every rank can read: each takes only what it keeps."""

    def __init__(self, path: Path, prefix: str = "", index: Any = None) -> None:
        from drivetrain.engine.state import shards

        self._path, self._prefix = path, prefix
        self._index = index or shards.read_index(path)
        self.layout = {n[len(prefix) :]: form for n, form in shards.layout_of(self._index).items() if n.startswith(prefix)}

    def take(self, name: str) -> Tensor:
        shape, _ = self.layout[name]
        return self._read(name, Part(torch.empty(shape, device="meta"), torch.Size([0] * len(shape)), shape))

    def take_like(self, name: str, place: Tensor) -> Tensor:
        if not is_sharded(place) or place.shape != self.layout[name][0]:
            return super().take_like(name, place)
        sharded = torch.empty_like(place, dtype=self.layout[name][1], requires_grad=False)
        local(sharded).copy_(self._read(name, part_of(sharded)))
        return sharded

    def part(self, part: str) -> Stored:
        return StoredFiles(self._path, f"{part}/", self._index)

    def _read(self, name: str, part: Part) -> Tensor:
        from drivetrain.engine.state import shards

        return shards.read_part(self._path, self._index, self._prefix + name, part)


def model_tensors(model: nn.Module, take: Callable[[Tensor], Any] = Tensor.detach) -> tuple[dict[str, Any], dict[str, str]]:
    """The model's tensors by name, each stored once, and which other names share them (tied weights)."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            raise Problem(f"the model's state {name!r} is a {type(value).__name__}: drivetrain saves tensors; keep it as a buffer")
        if odd := odd_form(value):
            raise Problem(
                f"model() has a {odd} tensor {name!r}, which cannot be saved: make it with register_buffer(..., persistent=False),"
                f" or keep what it is made of as dense buffers"
            )
        parted = is_sharded(value) or hasattr(value, "ds_id")  # of which this rank may hold nothing: it is known by the object
        identity = (id(value),) if parted else (value.data_ptr(), value.shape, value.stride(), value.dtype)
        if (parted or value.numel()) and identity in seen:
            aliases[name] = seen[identity]
        else:
            seen[identity], tensors[name] = name, take(value)
    return tensors, aliases


def odd_form(tensor: Tensor) -> str:
    """What keeps a tensor out of a checkpoint: a form that is not one dense block of plain numbers; nothing for those that are."""
    if tensor.is_nested:
        return "nested"
    if tensor.layout is not torch.strided:
        return str(tensor.layout).removeprefix("torch.").replace("_", " ").replace("sparse coo", "sparse")
    return "quantized" if tensor.is_quantized else ""


def load_model(model: nn.Module, tensors: Stored | Mapping[str, Tensor], aliases: dict[str, str], where: str) -> None:
    stored = tensors if isinstance(tensors, Stored) else Stored(tensors)
    own = model.state_dict()
    check_model({n: t.shape for n, t in own.items()}, stored, aliases, where)
    values = {kept: stored.take_like(kept, own[kept]) for kept in stored.layout}
    model.load_state_dict(values | {name: values[kept] for name, kept in aliases.items() if kept in values})


def check_model(own: Mapping[str, torch.Size], stored: Stored, aliases: dict[str, str], where: str) -> None:
    """Whether what is stored is this model's, name by name and shape by shape."""
    layout = stored.layout | {name: stored.layout[kept] for name, kept in aliases.items() if kept in stored.layout}
    missing, extra = sorted(own.keys() - layout.keys()), sorted(layout.keys() - own.keys())
    shapes = [n for n in own.keys() & layout.keys() if own[n] != layout[n][0]]
    if missing or extra or shapes:
        detail = "; ".join(
            f"{what} {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}"
            for what, names in (("it lacks", missing), ("it also has", extra), ("other shapes:", sorted(shapes)))
            if names
        )
        raise Problem(f"{where} does not fit this model: {detail}")


def optimizer_tensors(
    parameters: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    take: Callable[[Tensor, Tensor], Tensor] = lambda value, owner: value,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The optimizer's state by parameter name; what is no tensor goes to JSON. `take` gives what is saved of a value."""
    names = {p: n for n, p in parameters.items()}
    tensors, plain = group_tensors(optimizer)
    for parameter, state in optimizer.state.items():
        for entry, value in state.items():
            name = f"{names[parameter]}/{entry}"
            if isinstance(value, Tensor):
                check_state(value, "the optimizer's", name)
                tensors[name] = take(value, parameter)
                if value.device != parameter.device:
                    plain.setdefault("on_cpu", []).append(name)
            else:
                plain.setdefault("values", {})[name] = as_plain(name, value)
    return tensors, plain


def group_tensors(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What an optimizer keeps beside its parameters' state; rates follow from the schedule."""
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Any] = {"groups": []}
    for number, group in enumerate(optimizer.param_groups):
        kept = {k: v for k, v in group.items() if k not in ("params", "lr", *_OF_THE_DEVICE)}
        for key, value in kept.items():
            if isinstance(value, Tensor):
                check_state(value, "the optimizer's", key)
                tensors[f"#{number}/{key}"] = value
        plain["groups"].append({k: as_plain(k, v) for k, v in kept.items() if not isinstance(v, Tensor)})
    return tensors, plain


def check_state(value: Tensor, whose: str, name: str) -> None:
    """Refuse a tensor that a checkpoint could not hold."""
    if odd := odd_form(value):
        raise Problem(f"{whose} state {name!r} is a {odd} tensor, which cannot be saved: keep it dense")


def as_plain(name: str, value: Any) -> Any:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        raise Problem(f"the optimizer's state {name!r} is a {type(value).__name__}: only tensors and plain values can be saved") from None
    return value


def load_optimizer(
    parameters: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    stored: Stored,
    plain: dict[str, Any],
    take: Callable[[str, Tensor], Tensor] | None = None,
) -> None:
    """The other way; `take` gives what is kept of a stored tensor beside a parameter."""
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    on_cpu = set(plain.get("on_cpu", ()))
    optimizer.state.clear()
    for group, kept in zip(optimizer.param_groups, plain["groups"], strict=True):
        group |= kept
    for name in (*stored.layout, *plain.get("values", {})):
        owner, _, entry = name.rpartition("/")
        if owner.startswith("#"):
            optimizer.param_groups[int(owner[1:])][entry] = stored.take(name)
            continue
        if owner not in parameters:
            raise Problem(f"the checkpoint's optimizer knows a parameter {owner!r} that this model does not have")
        parameter = parameters[owner]
        if name not in stored.layout:
            value = plain["values"][name]
        else:
            value = stored.take(name) if take is None else take(name, parameter)
            host = on_host(value, groups.get(parameter, {}), name in on_cpu)
            value = value.to("cpu" if host else parameter.device)
            if value.shape == parameter.shape and not host:
                value = torch.empty_like(parameter, dtype=value.dtype).copy_(value)  # in the parameter's memory format
        optimizer.state[parameter][entry] = value


def on_host(value: Tensor, group: dict[str, Any], was: bool) -> bool:
    """Whether a value belongs into the host's memory: of counts of steps torch's own optimizers say it, else as it was."""
    return not (group.get("fused") or group["capturable"]) if value.dim() == 0 and "capturable" in group else was


def all_finite(parameters: Iterable[Tensor]) -> bool:
    """Whether every parameter (of a sharded one, this rank's part) is a number; one wait for the device."""
    found = [torch.isfinite(local(p)).all() for p in parameters if p.is_floating_point()]
    return not found or bool(torch.stack([f.to(found[0].device) for f in found]).all())


def pack(parts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {f"{part}/{name}": tensor for part, tensors in parts.items() for name, tensor in tensors.items()}


def unpack(tensors: Mapping[str, Tensor], part: str) -> dict[str, Tensor]:
    return {name[len(part) + 1 :]: tensor for name, tensor in tensors.items() if name.startswith(f"{part}/")}


# --- tensors of which every rank holds a part ---------------------------------------------------


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is one of torch's DTensors (whose class takes long to import)."""
    return hasattr(tensor, "placements")


def local(tensor: Any) -> Tensor:
    """What this rank holds of a tensor."""
    found: Tensor = tensor.detach()
    return found.to_local() if is_sharded(found) else found  # type: ignore[attr-defined]


def part_of(tensor: Any) -> Part:
    """This rank's part of a sharded tensor."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Part(local(tensor), torch.Size(offsets), tensor.shape)


def shard_like(place: Any, value: Tensor) -> Tensor:
    """A whole tensor, sharded as another one is."""
    if not is_sharded(place) or is_sharded(value):
        return value
    from torch.distributed.tensor import DTensor, Replicate

    if value.shape != place.shape:
        return DTensor.from_local(value.to(place.device), place.device_mesh, [Replicate()], run_check=False)
    box = part_of(place)
    part = value[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.plain.shape, strict=True))]
    sharded = torch.empty_like(place, dtype=value.dtype, requires_grad=False)
    local(sharded).copy_(part)
    return sharded


# --- weights as a file -------------------------------------------------------------------------


def write_weights(path: Path, tensors: dict[str, Tensor], aliases: dict[str, str]) -> None:
    """Final weights as safetensors; tied names are kept as metadata, as safetensors' own loader has them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    hidden = path.with_name(f".{path.name}")
    save_file({n: t.detach().cpu().contiguous().clone() for n, t in tensors.items()}, hidden, {"format": "pt"} | aliases)
    _order_header(hidden)
    hidden.replace(path)


def _order_header(path: Path) -> None:
    """safetensors writes metadata in an order that changes from run to run: equal weights shall be equal files."""
    with open(path, "r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(length)
        if len(text) == length:
            file.seek(8)
            file.write(text)


def read_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(path, "pt") as file:
            names = list(file.keys())
            aliases = {k: v for k, v in (file.metadata() or {}).items() if v in names}
            return {name: file.get_tensor(name) for name in names}, aliases
    except Exception as error:  # safetensors raises its own class for a file that is none
        raise Problem(f"{path} is no safetensors file: {error}") from None


def count_parameters(parameters: Iterable[nn.Parameter], which: Callable[[nn.Parameter], bool] = lambda p: True) -> int:
    return sum(p.numel() for p in parameters if which(p))
