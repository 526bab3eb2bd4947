"""Sends objects between processes as JSON and raw tensors. torch sends pickles, with which a stranger on the network could run code.

`replace_pickles` replaces the two functions that all object collectives of torch call, whether the engine, torch's
checkpoint writer, DeepSpeed or the user's own code uses them.
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
ALIGNMENT = 16  # bytes; a tensor of any type may begin at a multiple of it
MAX_DEPTH = 200  # levels of nested objects
PLAIN_JSON = (type(None), bool, int, float, str)
COLLECTIONS: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
TORCH_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)
CHECKPOINT_CLASSES = {
    f"torch.distributed.checkpoint.{name}"
    for name in (
        "planner.SavePlan", "planner.WriteItem", "planner.WriteItemType", "planner.TensorWriteData", "planner.BytesIOWriteData",
        "metadata.Metadata", "metadata.MetadataIndex", "metadata.TensorProperties", "metadata.TensorStorageMetadata",
        "metadata.BytesStorageMetadata", "metadata.ChunkStorageMetadata", "metadata.StorageMeta", "metadata._MEM_FORMAT_ENCODING",
        "storage.WriteResult", "filesystem._StoragePrefix", "filesystem._StorageInfo",
    )
}  # fmt: skip
"""Dataclasses and enums that torch's checkpoint writer sends: they hold values, and creating them runs no code."""


class NotSendable(TypeError):
    """An object cannot be sent between processes, or received bytes cannot be read."""


def replace_pickles() -> None:
    """From now on every object collective of this process sends JSON and tensors, and reads nothing else."""
    for name in ("_object_to_tensor", "_tensor_to_object"):
        if not callable(getattr(c10d, name, None)):
            raise RuntimeError(f"torch {torch.__version__} sends objects in another way than drivetrain knows: use torch 2.11 to 2.13")
    c10d._object_to_tensor = _object_to_tensor
    c10d._tensor_to_object = _tensor_to_object


def _object_to_tensor(value: Any, device: torch.device, *_: Any) -> tuple[Tensor, Tensor]:
    try:
        data = encode(value).to(device)
    except NotSendable as error:  # other ranks already wait in the collective: they receive this reason and raise it
        data = _text_bytes(json.dumps({"refused": str(error)})).to(device)
    return data, torch.tensor([data.numel()], dtype=torch.long, device=device)


def _tensor_to_object(data: Tensor, size: Any, *_: Any) -> Any:
    return decode(data.cpu()[: int(size)])


# --- writing -----------------------------------------------------------------------------------


def encode(value: Any) -> Tensor:
    """Returns the value as bytes: the length of a JSON text, the text, and the raw bytes of its tensors."""
    tensors: list[Tensor] = []
    pieces = [_text_bytes(json.dumps(_to_json(value, tensors, 0)))]
    for tensor in tensors:
        raw = tensor.reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
        gap = -sum(piece.numel() for piece in pieces) % ALIGNMENT
        pieces += [torch.zeros(gap, dtype=torch.uint8), raw]
    return torch.cat(pieces)


def _text_bytes(text: str) -> Tensor:
    data = text.encode()
    return torch.frombuffer(bytearray(LENGTH.pack(len(data)) + data), dtype=torch.uint8)


def _to_json(value: Any, tensors: list[Tensor], depth: int) -> Any:
    """Returns plain values unchanged and all others as {kind: content}; appends tensors to the list."""
    if depth > MAX_DEPTH:
        raise NotSendable("an object to be sent to other processes is nested too deeply")
    if type(value) in PLAIN_JSON:
        return value
    if isinstance(value, (Tensor, np.ndarray)):
        return _array_to_json(value, tensors)
    leaf = _leaf_to_json(value)
    if leaf is not None:
        return leaf

    def inner(item: Any) -> Any:
        return _to_json(item, tensors, depth + 1)

    if isinstance(value, np.generic):
        return inner(value.item())
    if isinstance(value, (str, int, float)) and isinstance(value, Enum) and type(value).__module__.startswith("drivetrain"):
        return inner(value.value)
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if name in CHECKPOINT_CLASSES:
        return {"object": [name, value.name if isinstance(value, Enum) else {f.name: inner(getattr(value, f.name)) for f in fields(value)}]}
    return _collection_to_json(value, inner)


def _leaf_to_json(value: Any) -> dict[str, Any] | None:
    """Returns the JSON of an object that holds no other objects; None for all others."""
    if isinstance(value, torch.Size):
        return {"size": list(value)}
    if isinstance(value, PurePath):
        return {"path": str(value)}
    if isinstance(value, TORCH_CONSTANTS):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, BaseException):
        return {"error": [type(value).__name__, [a if type(a) in PLAIN_JSON else str(a) for a in value.args]]}
    if isinstance(value, traceback.StackSummary):  # of such an error; its lines mean nothing on another machine
        return {"stack": None}
    return None


def _array_to_json(value: Any, tensors: list[Tensor]) -> dict[str, Any]:
    tensor = value.detach() if isinstance(value, Tensor) else torch.from_numpy(np.array(value, order="C"))
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise NotSendable(f"a {tensor.layout} tensor is not sent to other processes as an object: send its dense parts")
    tensors.append(tensor.cpu().contiguous())
    kind = "tensor" if isinstance(value, Tensor) else "array"
    return {kind: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]}


def _collection_to_json(value: Any, inner: Callable[[Any], Any]) -> dict[str, Any]:
    if isinstance(value, dict):
        return {"dict": [[inner(key), inner(item)] for key, item in value.items()]}
    for kind, collection in COLLECTIONS.items():
        if isinstance(value, collection):
            return {kind: [inner(item) for item in value]}
    raise NotSendable(
        f"a {type(value).__name__} is not sent to other processes, for that would be a pickle, which runs code: send numbers, text,"
        " lists, dicts and tensors"
    )


# --- reading -----------------------------------------------------------------------------------


def decode(data: Tensor) -> Any:
    """Returns the value from the bytes that `encode` returned."""
    raw = data.contiguous()
    size = raw.numel()
    if size < LENGTH.size:
        raise NotSendable("another process sent an object that cannot be read: it is too short")
    length = LENGTH.unpack(raw[: LENGTH.size].numpy().tobytes())[0]
    if length > size - LENGTH.size:
        raise NotSendable("another process sent an object that cannot be read: it is cut off")
    text_end = LENGTH.size + length
    try:
        return _Decoder(raw, text_end).value(json.loads(raw[LENGTH.size : text_end].numpy().tobytes()))
    except NotSendable:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, RuntimeError) as error:
        raise NotSendable(f"another process sent an object that cannot be read ({type(error).__name__}: {error})") from None


class _Decoder:
    """Turns JSON into values, and reads their tensors from the bytes one after the other."""

    def __init__(self, raw: Tensor, position: int) -> None:
        self._raw, self._position = raw, position
        self._readers: dict[str, Callable[[Any], Any]] = {
            "dict": lambda items: {self.value(key): self.value(item) for key, item in items},
            "tensor": self._tensor,
            "array": lambda content: self._tensor(content).numpy(),
            "size": lambda sizes: torch.Size([int(n) for n in sizes]),
            "path": Path,
            "refused": _raise_refused,
            "torch": lambda name: _torch_constant(name, TORCH_CONSTANTS),
            "error": lambda content: _error(*content),
            "stack": lambda _: traceback.StackSummary(),
            "object": self._checkpoint_object,
        }

    def value(self, tree: Any) -> Any:
        if not isinstance(tree, dict):
            if type(tree) not in PLAIN_JSON:
                raise ValueError("an untagged value")
            return tree
        ((kind, content),) = tree.items()
        if kind in COLLECTIONS:
            return COLLECTIONS[kind]([self.value(item) for item in content])
        if kind not in self._readers:
            raise ValueError(f"an unknown kind {kind!r}")
        return self._readers[kind](content)

    def _tensor(self, content: Any) -> Tensor:
        dtype_name, sizes = content
        dtype, shape = _torch_constant(dtype_name, (torch.dtype,)), [int(n) for n in sizes]
        begin = self._position + -self._position % ALIGNMENT
        num_elements = math.prod(shape)
        if num_elements == 0:
            return torch.empty(shape, dtype=dtype)
        end = begin + num_elements * dtype.itemsize
        if min(shape, default=0) < 0 or end > self._raw.numel():
            raise ValueError("a tensor is cut off")
        self._position = end
        return self._raw[begin:end].clone().view(dtype).reshape(shape)

    def _checkpoint_object(self, content: Any) -> Any:
        name, values = content[0], content[1]
        if name not in CHECKPOINT_CLASSES:
            raise ValueError(f"{name!r} is not exchanged")
        module, _, class_name = name.rpartition(".")
        checkpoint_class: Any = getattr(importlib.import_module(module), class_name)
        if isinstance(checkpoint_class, type) and issubclass(checkpoint_class, Enum):
            return checkpoint_class[values]
        return checkpoint_class(**{str(field): self.value(item) for field, item in values.items()})


def _raise_refused(reason: Any) -> Any:
    raise NotSendable(reason)


def _torch_constant(name: str, kinds: tuple[type, ...]) -> Any:
    constant = getattr(torch, name) if name.isidentifier() and not name.startswith("__") else None
    if not isinstance(constant, kinds):
        raise ValueError(f"{name!r} is no constant of torch")
    return constant


def _error(name: str, arguments: list[Any]) -> BaseException:
    kind = getattr(builtins, name, None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        return RuntimeError(f"{name}: {' '.join(map(str, arguments))}")
    return kind(*(a for a in arguments if type(a) in PLAIN_JSON))
