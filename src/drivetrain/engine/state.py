"""The state of a training as named tensors and JSON, and back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from drivetrain.engine.group import Group
from drivetrain.outcomes import Problem

_OF_THE_DEVICE = ("fused", "foreach", "capturable")  # how an optimizer computes, not what


def model_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The model's tensors by name, each stored once, and which other names share them (tied weights)."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise Problem(f"the model's state {name!r} is a {type(value).__name__}: drivetrain saves tensors; keep it as a buffer")
        identity = (value.data_ptr(), value.shape, value.stride(), value.dtype)
        if value.numel() and identity in seen:
            aliases[name] = seen[identity]
        else:
            seen[identity], tensors[name] = name, value
    return tensors, aliases


def load_model(model: nn.Module, tensors: dict[str, Tensor], aliases: dict[str, str], where: str) -> None:
    state = tensors | {name: tensors[kept] for name, kept in aliases.items() if kept in tensors}
    own = model.state_dict()
    missing, extra = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    shapes = [n for n in own.keys() & state.keys() if own[n].shape != state[n].shape]
    if missing or extra or shapes:
        detail = "; ".join(
            f"{what} {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}"
            for what, names in (("it lacks", missing), ("it also has", extra), ("other shapes:", sorted(shapes)))
            if names
        )
        raise Problem(f"{where} does not fit this model: {detail}")
    model.load_state_dict(state)


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The optimizer's state by parameter name; what is no tensor goes to JSON."""
    names: dict[Tensor, str] = {p: n for n, p in model.named_parameters()}
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Any] = {}
    plain["groups"] = []
    for number, group in enumerate(optimizer.param_groups):
        # What an optimizer keeps beside its parameters' state; rates follow from the schedule.
        kept = {k: v for k, v in group.items() if k not in ("params", "lr", *_OF_THE_DEVICE)}
        tensors |= {f"#{number}/{k}": v for k, v in kept.items() if isinstance(v, Tensor)}
        plain["groups"].append({k: _plain(k, v) for k, v in kept.items() if not isinstance(v, Tensor)})
    for parameter, state in optimizer.state.items():
        for entry, value in state.items():
            name = f"{names[parameter]}/{entry}"
            if isinstance(value, Tensor):
                tensors[name] = value
                if value.device != parameter.device:
                    plain.setdefault("on_cpu", []).append(name)
            else:
                plain.setdefault("values", {})[name] = _plain(name, value)
    return tensors, plain


def _plain(name: str, value: Any) -> Any:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        raise Problem(f"the optimizer's state {name!r} is a {type(value).__name__}: only tensors and plain values can be saved") from None
    return value


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor], plain: dict[str, Any]) -> None:
    parameters = dict(model.named_parameters())
    on_cpu = set(plain.get("on_cpu", ()))
    optimizer.state.clear()
    for group, kept in zip(optimizer.param_groups, plain["groups"], strict=True):
        group |= kept
    for name, value in (*tensors.items(), *plain.get("values", {}).items()):
        owner, _, entry = name.rpartition("/")
        if owner.startswith("#"):
            optimizer.param_groups[int(owner[1:])][entry] = value
            continue
        if owner not in parameters:
            raise Problem(f"the checkpoint's optimizer knows a parameter {owner!r} that this model does not have")
        parameter = parameters[owner]
        if isinstance(value, Tensor):
            value = value.to("cpu" if name in on_cpu else parameter.device)
            if value.shape == parameter.shape:
                value = torch.empty_like(parameter, dtype=value.dtype).copy_(value)  # in the parameter's memory format
        optimizer.state[parameter][entry] = value


def all_finite(model: nn.Module) -> bool:
    """Whether every trained parameter is a number; one wait for the device."""
    found = [torch.isfinite(p).all() for p in model.parameters() if p.requires_grad and p.is_floating_point()]
    return not found or bool(torch.stack(found).all())


def pack(parts: dict[str, dict[str, Tensor]]) -> dict[str, Tensor]:
    return {f"{part}/{name}": tensor for part, tensors in parts.items() for name, tensor in tensors.items()}


def unpack(tensors: dict[str, Tensor], part: str) -> dict[str, Tensor]:
    return {name[len(part) + 1 :]: tensor for name, tensor in tensors.items() if name.startswith(f"{part}/")}


def share(tensors: dict[str, Tensor] | None, group: Group) -> dict[str, Tensor]:
    """Rank 0's tensors on every rank."""
    if group.size == 1:
        return tensors or {}
    layout = group.share({n: (t.shape, t.dtype) for n, t in tensors.items()} if tensors is not None else None)
    shared = {}
    for name, (shape, dtype) in layout.items():
        place = torch.empty(shape, dtype=dtype, device=group.device)
        if tensors is not None:
            place.copy_(tensors[name])
        group.broadcast([place])
        shared[name] = place
    return shared


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
