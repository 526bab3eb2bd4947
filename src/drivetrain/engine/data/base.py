"""What the loop asks of its data: which samples a step takes, in which order.

The order is a pure function of (seed, epoch, position). No loader state exists, so none can be lost:
opening a feed at any step gives what an uninterrupted run would have seen there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from drivetrain.engine.data import signature
from drivetrain.engine.data.rand import permutation
from drivetrain.engine.group import Group
from drivetrain.outcomes import Problem

TRAIN, EVAL, ORDER, GROUP = 1, 2, 3, 4  # streams of keyed randomness


class Micro(NamedTuple):
    """One micro-batch of this rank: what came from the data set, on the device; `Feed.assemble` makes the batch of it."""

    given: Any
    """What a loader gave; None where the samples are on the device and their numbers suffice."""
    ids: Tensor
    """Sample numbers, to gather and for keyed randomness."""
    weight: int
    """Samples that count: all, or 0 where this rank had none left and runs one for company."""
    position: int
    """Place of the first sample in the epoch, for the model's own randomness."""


@lru_cache(maxsize=64)
def shares(length: int, world: int, rank: int, micro: int) -> tuple[tuple[int, int], ...]:
    """This rank's spans of a batch of `length` samples, one a micro-step.

    Ranks get equal shares (to one sample), cut into equal micro-batches of at most `micro`; every rank
    gets the same number of spans, some possibly empty.
    """
    low, high = length * rank // world, length * (rank + 1) // world
    largest = -(-length // world)
    count = -(-largest // micro)
    return tuple((low + (high - low) * i // count, low + (high - low) * (i + 1) // count) for i in range(count))


class Feed:
    """What the loop asks of its data."""

    steps_per_epoch: int
    length: int
    """Samples in an epoch."""
    resident: bool = True
    """Whether the samples are where the step runs."""
    largest: int
    """Samples of a full global batch that a rank takes at most."""
    speeds: Mapping[str, float] = MappingProxyType({})
    """What else rows tell a speed of: name -> how many of it a sample stands for."""
    limits: Mapping[str, float] = MappingProxyType({})
    """Metric of the loss -> limit, above which the rest of an epoch changes nothing."""
    notice: Callable[[str], None] = staticmethod(lambda text: None)
    """Tells the user something."""
    moment: Callable[[str], None] = staticmethod(lambda name: None)
    """Tells whoever watches that a batch is here, and is now copied to the device."""
    version: int = 0
    """Changes whenever the samples on the device have moved to another place."""
    signs: bool = False
    """Whether this rank keeps a signature of the data."""
    expected: Mapping[str, Any] | None = None
    """The signature that the checkpoint has."""
    changed: Callable[[str], None] = staticmethod(lambda what: None)
    """Told which samples are not those that the checkpoint's run has seen."""

    def signature(self) -> dict[str, Any]:
        """What is known of the data by now, to be kept with a checkpoint."""
        return {"length": self.length}

    def compare(self) -> None:
        """Tell where the data is not the checkpoint's, as far as that is known by now."""
        if self.signs and self.expected is not None and (what := signature.changed(self.expected, self.signature())):
            self.changed(what)

    def open(self, step: int) -> None:
        """Get ready to give the batches from this step on."""

    def begin_epoch(self, epoch: int, model: torch.nn.Module) -> None:
        """Called before an epoch's first step, and on resume at an epoch's start."""

    def size(self, index: int) -> int:
        """Samples in the global batch at this place of the epoch."""
        raise NotImplementedError

    def micro_batches(self, epoch: int, index: int) -> Iterator[Micro]:
        raise NotImplementedError

    def follow(self, step: Tensor, samples: int) -> Tensor | None:
        """The sample numbers of the step whose number the device holds, if this feed can tell them there."""
        return None

    def assemble(self, given: Any, ids: Tensor) -> Any:
        """The batch of a micro-batch's parts: device work alone, so that it can be captured with the step."""
        return given

    def cut(self, micro: int) -> None:
        """Give micro-batches of at most this many samples from now on; a step that was begun is given anew."""
        raise NotImplementedError

    def close(self) -> None:
        """End workers, if any."""


class OrderedFeed(Feed):
    """Samples of a data set of known length, shuffled anew each epoch (or, for evaluation, in order)."""

    def __init__(self, length: int, batch: int, micro: int, group: Group, seed: int | None) -> None:
        self.length, self.batch, self.micro, self.group, self.seed = length, batch, micro, group, seed
        self.steps_per_epoch = -(-length // batch)
        self.largest = -(-batch // group.size)
        self._order: tuple[int, Tensor] | None = None
        self._device = torch.device("cpu")

    def order(self, epoch: int) -> Tensor:
        if self._order is None or self._order[0] != epoch:
            rows = torch.arange(self.length) if self.seed is None else permutation(self.length, self.seed, epoch, ORDER)
            self._order = epoch, self._placed(rows)
        return self._order[1]

    def _placed(self, rows: Tensor) -> Tensor:
        return placed(rows, self._device)

    def cut(self, micro: int) -> None:
        self.micro = micro

    def size(self, index: int) -> int:
        return min(self.batch, self.length - index * self.batch)

    def spans(self, epoch: int, index: int) -> list[tuple[Tensor, int, int]]:
        """(sample numbers, weight, position) of each micro-step of this rank."""
        order, start = self.order(epoch), index * self.batch
        return [
            (order[start + low : start + high], high - low, start + low) if low < high else (order[start : start + 1], 0, start)
            for low, high in shares(self.size(index), self.group.size, self.group.rank, self.micro)
        ]


# --- tensors and devices -------------------------------------------------------------------------


def placed(tensor: Tensor, device: torch.device) -> Tensor:
    """On the device; the host does not wait for the copy."""
    if device.type != "cuda" or tensor.device == device:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def as_tensor(column: Any) -> Tensor:
    if isinstance(column, Tensor):
        return column
    try:
        return torch.from_numpy(np.ascontiguousarray(column)) if isinstance(column, np.ndarray) else torch.as_tensor(column)
    except (TypeError, ValueError, RuntimeError) as error:
        raise Problem(f"a column of Tensors holds what is no number ({error}): turn it into numbers, or give a map-style Dataset") from None


def to_device(batch: Any, device: torch.device) -> Any:
    """A batch of any nesting, its tensors on the device."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {k: to_device(v, device) for k, v in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(v, device) for v in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(to_device(v, device) for v in batch)
    return batch.to(device) if hasattr(batch, "to") else batch  # tokenizers', graphs' and other libraries' batches


def tensors_in(batch: Any) -> Sequence[Tensor]:
    """All tensors of a nested batch, in order."""
    if isinstance(batch, Tensor):
        return [batch]
    if isinstance(batch, dict):
        return [t for v in batch.values() for t in tensors_in(v)]
    if isinstance(batch, (list, tuple)):
        return [t for v in batch for t in tensors_in(v)]
    return []
