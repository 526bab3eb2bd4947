"""Signature of a data set: digests of a few of its values. Checkpoints hold it, so that a resume detects changed data."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

MAX_ROWS = 64
"""Rows of a column that are hashed, at most."""
MAX_BYTES = 1 << 23
"""Bytes of a column that are hashed, at most."""
MAX_LEAVES = 64
"""Values of a sample that are hashed, at most."""
READ_SECONDS = 2.0
"""Time limit for reading samples; those not read by then are not compared."""
NUM_READS = 2
"""Reads of a sample, to find the values that are random."""
NUM_READS_IF_DIFFERENT = 8
"""Reads of a sample that differs from the checkpoint's."""


def positions(length: int) -> list[int]:
    """Returns the samples that are read: the first, the last and two between."""
    return sorted({0, length // 3, 2 * length // 3, length - 1})


def of_columns(columns: Sequence[Tensor]) -> list[str | None]:
    """Returns a digest of each column: of its type, its shape and rows at equal distances."""
    return [_of_rows(column) for column in columns]


def _of_rows(column: Tensor) -> str | None:
    if column.layout is not torch.strided:
        return None
    length = len(column)
    count = min(length, MAX_ROWS, max(4, MAX_BYTES // max(1, column.nbytes // length)))
    rows = torch.linspace(0, length - 1, count, dtype=torch.float64).round().long()
    return f"{tuple(column.shape)} {_digest(column.index_select(0, rows.to(column.device)))}"


def of_samples(read: Callable[[int], Any], length: int, expected: Mapping[str, list[str | None]] | None = None) -> dict[str, Any]:
    """Returns the digests of a few samples' values, by sample number; None for a value that differs between reads."""
    deadline, samples = time.monotonic() + READ_SECONDS, dict[str, list[str | None]]()
    for index in positions(length):
        digests = _of_sample(partial(read, index), (expected or {}).get(str(index)), deadline)
        if digests is None:
            break
        samples[str(index)] = digests
    return samples


def _of_sample(read: Callable[[], Any], expected: list[str | None] | None, deadline: float) -> list[str | None] | None:
    """Returns the digests of one sample's values; None if the time limit is over."""
    digests: list[str | None] | None = None
    num_reads = 0
    while num_reads < NUM_READS or (num_reads < NUM_READS_IF_DIFFERENT and expected is not None and _differ(expected, digests)):
        if time.monotonic() > deadline:
            return None
        new = [_digest(leaf) for leaf in _leaves(read())][:MAX_LEAVES]
        same_form = digests is None or len(digests) == len(new)
        digests = new if digests is None else [a if same_form and a == b else None for a, b in zip(digests, new, strict=False)]
        num_reads += 1
    return digests or []


def describe_difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Names the values that differ between two signatures, of those in both; empty where none does."""
    if _differ(before.get("columns"), now.get("columns")):
        return "values of its tensors"
    old, new = before.get("samples") or {}, now.get("samples") or {}
    different = [index for index in old if index in new and _differ(old[index], new[index])]
    return f"sample{'s' if len(different) > 1 else ''} {', '.join(different)}" if different else ""


def _differ(before: Sequence[str | None] | None, now: Sequence[str | None] | None) -> bool:
    if before is None or now is None:
        return False
    if len(before) != len(now):
        return all(value is not None for value in (*before, *now))  # where a value is random, the number of values may be, too
    return any(a is not None and b is not None and a != b for a, b in zip(before, now, strict=True))


def _leaves(sample: Any) -> Iterator[Any]:
    """Yields the values of a nested sample, in order."""
    if isinstance(sample, Mapping):
        for name in sorted(sample, key=str):
            yield from _leaves(sample[name])
    elif isinstance(sample, (list, tuple)):
        for part in sample:
            yield from _leaves(part)
    else:
        yield sample


def _digest(value: Any) -> str | None:
    """Returns the digest of a value; None for objects whose bytes are not known."""
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            return None
        flat = value.detach().cpu().contiguous().reshape(-1)
        kind, data = f"{value.dtype} {tuple(value.shape)}", flat.view(torch.uint8).numpy().tobytes()
    elif isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
        kind, data = f"{value.dtype} {value.shape}", value.tobytes()
    elif isinstance(value, (str, bytes, bool, int, float, complex, type(None))):
        kind, data = type(value).__name__, value if isinstance(value, bytes) else repr(value).encode()
    elif hasattr(value, "mode") and hasattr(value, "size") and hasattr(value, "tobytes"):  # a Pillow image
        kind, data = f"{value.mode} {value.size}", value.tobytes()
    else:
        return None
    return hashlib.blake2b(data, digest_size=8, key=kind.encode()[:64]).hexdigest()
