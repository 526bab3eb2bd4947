"""Tensors to and from torch.distributed.checkpoint's files, without trusting them.

Apart from `checkpoint` because importing DCP takes most of a second, which a run should not wait for
before its first step.
"""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from drivetrain.engine.state.tensors import Part

INDEX = ".metadata"
_ALLOWED = {
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
    """The index asks for something that no checkpoint needs, or is none."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise Refused(f"its index asks for {module}.{name}, which no checkpoint needs: it was refused, not run")


def read_index(path: Path) -> Metadata:
    try:
        with open(path / INDEX, "rb") as file:
            metadata = _Unpickler(file).load()
    except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError, ValueError, TypeError, KeyError) as error:
        raise Refused(f"its index cannot be read ({error})") from None
    if not isinstance(metadata, Metadata):
        raise Refused("its index is not one")
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise Refused(f"{name} in it is no tensor")
    for place in (metadata.storage_data or {}).values():
        if os.sep in place.relative_path:
            raise Refused(f"its index points outside of it, to {place.relative_path}")
    return metadata


class _Reader(FileSystemReader):
    def __init__(self, path: Path, index: Metadata) -> None:
        super().__init__(path)
        self._index = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._index


def layout_of(index: Metadata) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """The shape and format of each tensor."""
    entries: dict[str, Any] = index.state_dict_metadata
    return {name: (entry.size, entry.properties.dtype) for name, entry in entries.items()}


def read(path: Path) -> dict[str, Tensor]:
    """All tensors, on the CPU."""
    index = read_index(path)
    state = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in layout_of(index).items()}
    _load(path, index, state)
    return state


def read_part(path: Path, index: Metadata, name: str, part: Part) -> Tensor:
    """A box of one tensor, on the CPU: of the files, what overlaps with it is read."""
    entry: Any = index.state_dict_metadata[name]
    place = _Boxed.of(torch.empty(part.plain.shape, dtype=entry.properties.dtype), part)
    if place.numel():
        _load(path, index, {name: place})
    return place.plain


def _load(path: Path, index: Metadata, state: Mapping[str, Tensor]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it wonders aloud whether one process was meant: it was
        load(dict(state), storage_reader=_Reader(path, index), no_dist=True)


def write(path: Path, tensors: Mapping[str, Tensor | Part], group: Any = None) -> None:
    """Write tensors by one process, or by each of a group its parts: then a collective call, which fails on all or none."""
    state = {name: _Boxed.of(t.plain, t) if isinstance(t, Part) else t for name, t in tensors.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = FileSystemWriter(path, sync_files=True)
        save(state, storage_writer=writer, process_group=group, no_dist=group is None)


class _Boxed(Tensor):
    """A part of a tensor, as DCP asks such things what they are."""

    plain: Tensor
    part: Part

    @staticmethod
    def of(plain: Tensor, part: Part) -> _Boxed:
        boxed: _Boxed = Tensor._make_subclass(_Boxed, plain)
        boxed.plain, boxed.part = plain, part
        return boxed

    def size(self, *_: Any) -> torch.Size:  # type: ignore[override]
        return self.part.size

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        if not self.plain.numel():
            return []
        properties = TensorProperties.create_from_tensor(self.plain)
        data = TensorWriteData(chunk=self._chunk(), properties=properties, size=self.part.size)
        return [WriteItem(index=MetadataIndex(name, self.part.offsets), type=WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.plain

    def _chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(offsets=self.part.offsets, sizes=self.plain.shape)
