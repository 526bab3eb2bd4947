"""Objects between processes as JSON and raw tensors. torch sends them as pickles, by which a stranger on the network runs code.

`use_plain_objects` replaces the two functions of torch that all its object collectives go through: those of the
engine, of torch's checkpoint writer, of DeepSpeed and of the user's own code.
"""

from __future__ import annotations

import builtins
import importlib
import json
import math
import struct
import traceback
from collections.abc import Callable
from dataclasses import fields
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

LENGTH = struct.Struct("<Q")
ALIGNMENT = 16  # bytes: a tensor begins where any of its types may
MAX_DEPTH = 200
PLAIN = (type(None), bool, int, float, str)
TORCH_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)
EXCHANGED = {
    f"torch.distributed.checkpoint.{name}"
    for name in (
        "planner.SavePlan", "planner.WriteItem", "planner.WriteItemType", "planner.TensorWriteData", "planner.BytesIOWriteData",
        "metadata.Metadata", "metadata.MetadataIndex", "metadata.TensorProperties", "metadata.TensorStorageMetadata",
        "metadata.BytesStorageMetadata", "metadata.ChunkStorageMetadata", "metadata.StorageMeta", "metadata._MEM_FORMAT_ENCODING",
        "storage.WriteResult", "filesystem._StoragePrefix", "filesystem._StorageInfo",
    )
}  # fmt: skip
"""Dataclasses and enums that torch's checkpoint writer sends: they hold values and do nothing when they are made."""


class NotPlain(TypeError):
    """An object that is not sent between processes, or bytes that hold none."""


def use_plain_objects() -> None:
    """From now on every object collective of this process sends JSON and tensors, and reads nothing else."""
    for name in ("_object_to_tensor", "_tensor_to_object"):
        if not callable(getattr(c10d, name, None)):
            raise RuntimeError(f"torch {torch.__version__} sends objects in another way than drivetrain knows: use torch 2.11 to 2.13")
    c10d._object_to_tensor = _object_to_tensor
    c10d._tensor_to_object = _tensor_to_object


def _object_to_tensor(value: Any, device: torch.device, *_: Any) -> tuple[Tensor, Tensor]:
    try:
        data = pack(value).to(device)
    except NotPlain as refused:  # the others wait for it in a collective: they get the reason, and raise it
        data = _bytes(json.dumps({"refused": str(refused)})).to(device)
    return data, torch.tensor([data.numel()], dtype=torch.long, device=device)


def _tensor_to_object(data: Tensor, size: Any, *_: Any) -> Any:
    return unpack(data.cpu()[: int(size)])


def pack(value: Any) -> Tensor:
    """The value as bytes: the length of a JSON text, the text, and the raw bytes of the tensors it points to."""
    tensors: list[Tensor] = []
    pieces = [_bytes(json.dumps(_encode(value, tensors, 0)))]
    for tensor in tensors:
        raw = tensor.reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
        gap = -sum(piece.numel() for piece in pieces) % ALIGNMENT
        pieces += [torch.zeros(gap, dtype=torch.uint8), raw]
    return torch.cat(pieces)


def _bytes(text: str) -> Tensor:
    data = text.encode()
    return torch.frombuffer(bytearray(LENGTH.pack(len(data)) + data), dtype=torch.uint8)


def unpack(data: Tensor) -> Any:
    """The value that `pack` made these bytes of."""
    raw = data.contiguous()
    size = raw.numel()
    if size < LENGTH.size:
        raise NotPlain("another process sent an object that cannot be read: it is too short")
    length = LENGTH.unpack(raw[: LENGTH.size].numpy().tobytes())[0]
    if length > size - LENGTH.size:
        raise NotPlain("another process sent an object that cannot be read: it is cut off")
    position = LENGTH.size + length
    try:
        tree = json.loads(raw[LENGTH.size : position].numpy().tobytes())
        return _decode(tree, _Reader(raw, position).next)
    except NotPlain:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, RuntimeError) as error:
        raise NotPlain(f"another process sent an object that cannot be read ({type(error).__name__}: {error})") from None


class _Reader:
    """Takes tensors from the bytes, one after the other."""

    def __init__(self, raw: Tensor, position: int) -> None:
        self.raw, self.position = raw, position

    def next(self, dtype: torch.dtype, shape: list[int]) -> Tensor:
        begin = self.position + -self.position % ALIGNMENT
        count = math.prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        end = begin + count * dtype.itemsize
        if min(shape, default=0) < 0 or end > self.raw.numel():
            raise ValueError("a tensor is cut off")
        self.position = end
        return self.raw[begin:end].clone().view(dtype).reshape(shape)


def _encode(value: Any, tensors: list[Tensor], depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise NotPlain("an object to be sent to other processes is nested too deeply")
    if type(value) in PLAIN:
        return value

    def inner(item: Any) -> Any:
        return _encode(item, tensors, depth + 1)

    if isinstance(value, np.generic):
        return inner(value.item())
    if isinstance(value, (Tensor, np.ndarray)):
        return _encode_array(value, tensors)
    if isinstance(value, torch.Size):
        return {"size": list(value)}
    if isinstance(value, PurePath):
        return {"path": str(value)}
    if isinstance(value, TORCH_CONSTANTS):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, (str, int, float)) and isinstance(value, Enum) and type(value).__module__.startswith("drivetrain"):
        return inner(value.value)
    if isinstance(value, BaseException):
        return {"error": [type(value).__name__, [a if type(a) in PLAIN else str(a) for a in value.args]]}
    if isinstance(value, traceback.StackSummary):  # of such an error; its lines are of another machine
        return {"stack": None}
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if name in EXCHANGED:
        made = value.name if isinstance(value, Enum) else {f.name: inner(getattr(value, f.name)) for f in fields(value)}
        return {"object": [name, made]}
    if isinstance(value, dict):
        return {"dict": [[inner(key), inner(item)] for key, item in value.items()]}
    if isinstance(value, (list, tuple, set, frozenset)):
        kind = next(kind for kind in ("list", "tuple", "set", "frozenset") if isinstance(value, getattr(builtins, kind)))
        return {kind: [inner(item) for item in value]}
    raise NotPlain(
        f"a {type(value).__name__} is not sent to other processes, for that would be a pickle, which runs code: send numbers, text,"
        " lists, dicts and tensors"
    )


def _encode_array(value: Any, tensors: list[Tensor]) -> Any:
    tensor = value.detach() if isinstance(value, Tensor) else torch.from_numpy(np.array(value, order="C"))
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise NotPlain(f"a {tensor.layout} tensor is not sent to other processes as an object: send its dense parts")
    tensors.append(tensor.cpu().contiguous())
    kind = "tensor" if isinstance(value, Tensor) else "array"
    return {kind: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]}


def _decode(tree: Any, take: Callable[[torch.dtype, list[int]], Tensor]) -> Any:
    if not isinstance(tree, dict):
        if type(tree) not in PLAIN:
            raise ValueError("an untagged value")
        return tree
    ((kind, content),) = tree.items()
    if kind == "dict":
        return {_decode(key, take): _decode(item, take) for key, item in content}
    if kind in ("list", "tuple", "set", "frozenset"):
        return getattr(builtins, kind)([_decode(item, take) for item in content])
    if kind in ("tensor", "array"):
        dtype, shape = content
        tensor = take(_torch_constant(dtype, (torch.dtype,)), [int(n) for n in shape])
        return tensor if kind == "tensor" else tensor.numpy()
    if kind == "size":
        return torch.Size([int(n) for n in content])
    if kind == "path":
        return Path(content)
    if kind == "refused":
        raise NotPlain(content)
    if kind == "torch":
        return _torch_constant(content, TORCH_CONSTANTS)
    if kind == "error":
        return _error(*content)
    if kind == "stack":
        return traceback.StackSummary()
    if kind == "object":
        return _exchanged(content[0], content[1], take)
    raise ValueError(f"an unknown kind {kind!r}")


def _torch_constant(name: str, kinds: tuple[type, ...]) -> Any:
    constant = getattr(torch, name) if name.isidentifier() and not name.startswith("__") else None
    if not isinstance(constant, kinds):
        raise ValueError(f"{name!r} is no constant of torch")
    return constant


def _exchanged(name: str, content: Any, take: Callable[[torch.dtype, list[int]], Tensor]) -> Any:
    if name not in EXCHANGED:
        raise ValueError(f"{name!r} is not exchanged")
    module, _, kind = name.rpartition(".")
    made: Any = getattr(importlib.import_module(module), kind)
    if isinstance(made, type) and issubclass(made, Enum):
        return made[content]
    return made(**{str(field): _decode(item, take) for field, item in content.items()})


def _error(name: str, arguments: list[Any]) -> BaseException:
    kind = getattr(builtins, name, None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        return RuntimeError(f"{name}: {' '.join(map(str, arguments))}")
    return kind(*(a for a in arguments if type(a) in PLAIN))
