"""Writes and reads the tensors of a checkpoint with torch.distributed.checkpoint (DCP), without trusting the files.

Import this module inside the function that needs it: importing DCP takes most of a second, which would delay a run's
first step.
"""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from drivetrain.engine.state.tensors import Layout, StoredTensors, is_sharded, local_tensor

INDEX = ".metadata"
_ALLOWED_CLASSES = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in [
        "Metadata",
        "TensorProperties",
        "TensorStorageMetadata",
        "ChunkStorageMetadata",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    ]
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("collections", "OrderedDict"),
}


class Refused(Exception):
    """The file is not a valid index, or names a class that no checkpoint needs."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED_CLASSES or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise Refused(f"its index names {module}.{name}, which no checkpoint needs: it was refused, not run")


def read_index(path: Path) -> Metadata:
    """Returns DCP's pickled index of a checkpoint's files; raises Refused for anything else."""
    try:
        with open(path / INDEX, "rb") as file:
            index = _Unpickler(file).load()
    except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError, ValueError, TypeError, KeyError) as error:
        raise Refused(f"its index cannot be read ({error})") from None
    if not isinstance(index, Metadata):
        raise Refused("its index has another format")
    for name, entry in index.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise Refused(f"{name} in its index is not a tensor")
    for storage in (index.storage_data or {}).values():
        if os.sep in storage.relative_path:
            raise Refused(f"its index points to a file outside of the checkpoint: {storage.relative_path}")
    return index


class _Reader(FileSystemReader):
    """Reads files with an index that `read_index` has read."""

    def __init__(self, path: Path, index: Metadata) -> None:
        super().__init__(path)
        self._index = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._index


def _layout_of(index: Metadata) -> Layout:
    entries: dict[str, Any] = index.state_dict_metadata
    return {name: (entry.size, entry.properties.dtype) for name, entry in entries.items()}


def read(path: Path) -> dict[str, Tensor]:
    """Returns all tensors of a checkpoint, on the CPU."""
    index = read_index(path)
    tensors = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in _layout_of(index).items()}
    _read_into(tensors, path, index)
    return tensors


def _read_into(targets: Mapping[str, Tensor], path: Path, index: Metadata) -> None:
    """Fills tensors from the files; for a sharded tensor, this rank reads its own shard."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP warns that it runs in a single process, as intended
        load(dict(targets), storage_reader=_Reader(path, index), no_dist=True)


def write(path: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Writes tensors from one process, or each rank's shards in a group. A collective call, which fails on all ranks or on none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = FileSystemWriter(path, sync_files=True)
        save(dict(tensors), storage_writer=writer, process_group=group, no_dist=group is None)


class StoredShards(StoredTensors):
    """The tensors of a checkpoint whose files every rank can read: each rank reads only its own shards."""

    def __init__(self, path: Path, prefix: str = "", index: Metadata | None = None) -> None:
        self._path, self._prefix = path, prefix
        self._index = index or read_index(path)
        self.layout = {n[len(prefix) :]: form for n, form in _layout_of(self._index).items() if n.startswith(prefix)}

    def load(self, name: str) -> Tensor:
        shape, dtype = self.layout[name]
        return self._read(name, torch.empty(shape, dtype=dtype))

    def load_like(self, name: str, like: Tensor) -> Tensor:
        shape, dtype = self.layout[name]
        if not is_sharded(like) or like.shape != shape:
            return super().load_like(name, like)
        return self._read(name, torch.empty_like(like, dtype=dtype, requires_grad=False))

    def subset(self, prefix: str) -> StoredTensors:
        return StoredShards(self._path, f"{self._prefix}{prefix}/", self._index)

    def _read(self, name: str, target: Tensor) -> Tensor:
        if local_tensor(target).numel():
            _read_into({self._prefix + name: target}, self._path, self._index)
        return target
