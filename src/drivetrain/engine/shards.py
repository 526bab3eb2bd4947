"""Tensors to and from torch.distributed.checkpoint's files, without trusting them.

Apart from `checkpoint` because importing DCP takes most of a second, which a run should not wait for
before its first step.
"""

from __future__ import annotations

import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

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
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return read_index(Path(self.path))


def read(path: Path) -> dict[str, Tensor]:
    """All tensors, on the CPU."""
    state: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)  # type: ignore[union-attr]
        for name, entry in read_index(path).state_dict_metadata.items()
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it wonders aloud whether one process was meant: it was
        load(state, storage_reader=_Reader(path), no_dist=True)
    return state


def write(path: Path, tensors: dict[str, Tensor]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(dict(tensors), storage_writer=FileSystemWriter(path, sync_files=True), no_dist=True)
