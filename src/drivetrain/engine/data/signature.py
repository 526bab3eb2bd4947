"""A short record of what a data set holds, kept with every checkpoint: a resume sees by it that the data changed."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

NUM_ROWS = 64  # of tensors
MAX_BYTES = 1 << 23  # of a column's rows that are hashed
NUM_LEAVES = 64  # of a sample
READ_SECONDS = 2.0  # within which samples are read; those that are not read by then are not compared
READS, READS_IN_DOUBT = 2, 8  # of a sample, to see whether its values stay the same; where they differ from the checkpoint's


def positions(length: int) -> list[int]:
    """The samples that stand for all: the first, the last and two between."""
    return sorted({0, length // 3, 2 * length // 3, length - 1})


def of_columns(columns: Sequence[Tensor]) -> list[str | None]:
    """A digest of each column: of its type, its shape and rows at equal distances."""
    return [_of_rows(column) for column in columns]


def _of_rows(column: Tensor) -> str | None:
    if column.layout is not torch.strided:
        return None
    length = len(column)
    count = min(length, NUM_ROWS, max(4, MAX_BYTES // max(1, column.nbytes // length)))
    rows = torch.linspace(0, length - 1, count, dtype=torch.float64).round().long()
    return f"{tuple(column.shape)} {_digest(column.index_select(0, rows.to(column.device)))}"


def of_samples(read: Callable[[int], Any], length: int, expected: Mapping[str, list[str | None]] | None = None) -> dict[str, Any]:
    """Digests of the values of a few samples, by the sample's number; None for a value that is another at every read."""
    begun, samples = time.monotonic(), dict[str, list[str | None]]()
    for index in positions(length):
        values: list[str | None] | None = None
        before = (expected or {}).get(str(index))
        num_reads = 0
        while num_reads < READS or (num_reads < READS_IN_DOUBT and before is not None and _differ(before, values)):
            if time.monotonic() - begun > READ_SECONDS:
                return samples
            found = [_digest(leaf) for leaf in _leaves(read(index))][:NUM_LEAVES]
            same_form = values is None or len(values) == len(found)
            values = found if values is None else [a if same_form and a == b else None for a, b in zip(values, found, strict=False)]
            num_reads += 1
        samples[str(index)] = values or []
    return samples


def changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Which of the values that both signatures know are not the same; nothing where all are."""
    if _differ(before.get("columns"), now.get("columns")):
        return "values of its tensors"
    old, new = before.get("samples") or {}, now.get("samples") or {}
    other = [index for index in old if index in new and _differ(old[index], new[index])]
    return f"sample{'s' if len(other) > 1 else ''} {', '.join(other)}" if other else ""


def _differ(before: Sequence[str | None] | None, now: Sequence[str | None] | None) -> bool:
    if before is None or now is None:
        return False
    if len(before) != len(now):
        return all(value is not None for value in (*before, *now))  # else its form is random, too
    return any(a is not None and b is not None and a != b for a, b in zip(before, now, strict=True))


def _leaves(sample: Any) -> Iterator[Any]:
    """The values of a nested sample, in order."""
    if isinstance(sample, Mapping):
        for name in sorted(sample, key=str):
            yield from _leaves(sample[name])
    elif isinstance(sample, (list, tuple)):
        for part in sample:
            yield from _leaves(part)
    else:
        yield sample


def _digest(value: Any) -> str | None:
    """None for what has no bytes of its own, such as an object of some class."""
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            return None
        plain = value.detach().cpu().contiguous().reshape(-1)
        kind, data = f"{value.dtype} {tuple(value.shape)}", plain.view(torch.uint8).numpy().tobytes()
    elif isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
        kind, data = f"{value.dtype} {value.shape}", value.tobytes()
    elif isinstance(value, (str, bytes, bool, int, float, complex, type(None))):
        kind, data = type(value).__name__, value if isinstance(value, bytes) else repr(value).encode()
    elif hasattr(value, "mode") and hasattr(value, "size") and hasattr(value, "tobytes"):  # an image of Pillow's
        kind, data = f"{value.mode} {value.size}", value.tobytes()
    else:
        return None
    return hashlib.blake2b(data, digest_size=8, key=kind.encode()[:64]).hexdigest()
