"""The interface of a feed, which gives a step the samples of each micro-batch, in an order that needs no saved state.

The order is a pure function of (seed, epoch, position). So a feed that is opened at any step continues with the same
samples as an uninterrupted run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from drivetrain.engine.data import signature
from drivetrain.engine.data.batches import tensor_to_device
from drivetrain.engine.data.keyed_random import RandomStream, permutation
from drivetrain.engine.group import Group


class MicroBatch(NamedTuple):
    """One micro-batch of this rank, on the device. `Feed.assemble` makes the batch from it."""

    loaded: Any
    """What the data set returned; None if the samples are already on the device, where `ids` selects them."""
    ids: Tensor
    """Sample numbers: they select samples and key the random numbers."""
    num_real: int
    """How many samples are real; 0: a dummy micro-batch that keeps collectives aligned."""
    position: int
    """Position of the first sample in the epoch. It seeds the model's random numbers, such as dropout."""


@lru_cache(maxsize=64)
def micro_batch_spans(length: int, world_size: int, rank: int, max_size: int) -> tuple[tuple[int, int], ...]:
    """Returns this rank's (start, end) of each micro-batch, within a global batch of `length` samples.

    The ranks' shares differ by at most one sample. Every rank gets the same number of spans; some may be empty.
    """
    start, end = length * rank // world_size, length * (rank + 1) // world_size
    largest_share = -(-length // world_size)
    count = -(-largest_share // max_size)
    return tuple((start + (end - start) * i // count, start + (end - start) * (i + 1) // count) for i in range(count))


class Feed:
    """Gives the micro-batches of each step."""

    steps_per_epoch: int
    length: int
    """Samples in an epoch."""
    is_resident: bool = True
    """Whether the samples live on the device where the step runs."""
    max_rank_samples: int
    """The most samples of one global batch that a rank gets."""
    speeds: Mapping[str, float] = MappingProxyType({})
    """Further speeds to log, such as tokens: name -> units in one sample."""
    limits: Mapping[str, float] = MappingProxyType({})
    """Metric of the loss -> limit; once it is passed, the rest of the epoch does not update the model."""
    notice: Callable[[str], None] = staticmethod(lambda text: None)
    """Shows a message to the user."""
    reached: Callable[[str], None] = staticmethod(lambda name: None)
    """Observation point: called with "copy" before a batch is copied to the device."""
    data_version: int = 0
    """Changes whenever the samples on the device have moved to other memory."""
    records_signature: bool = False
    """Whether this rank records a signature of the data."""
    expected_signature: Mapping[str, Any] | None = None
    """The signature in the checkpoint."""
    on_data_changed: Callable[[str], None] = staticmethod(lambda samples: None)
    """Called with a text that names the samples which differ from those of the checkpoint's run."""

    def signature(self) -> dict[str, Any]:
        """Returns the part of the data's signature that is known so far; checkpoints hold it."""
        return {"length": self.length}

    def check_signature(self) -> None:
        """Reports data that differs from the checkpoint's, in the part of the signature that is known so far."""
        if self.records_signature and self.expected_signature is not None:
            difference = signature.describe_difference(self.expected_signature, self.signature())
            if difference:
                self.on_data_changed(difference)

    def open(self, step: int) -> None:
        """Prepares to give the batches from this step on."""

    def begin_epoch(self, epoch: int, model: torch.nn.Module) -> None:
        """Called before an epoch's first step, and on resume at an epoch's start."""

    def batch_size(self, index: int) -> int:
        """Returns the samples in the global batch at this step of the epoch."""
        raise NotImplementedError

    def micro_batches(self, epoch: int, index: int) -> Iterator[MicroBatch]:
        """Yields this rank's micro-batches of one step of an epoch."""
        raise NotImplementedError

    def sample_ids_on_device(self, step: Tensor, num_samples: int) -> Tensor | None:
        """Returns the sample numbers of a step whose number is a device tensor; None where this feed cannot find them there."""
        return None

    def assemble(self, loaded: Any, ids: Tensor) -> Any:
        """Returns the batch of a micro-batch. It runs only device work, so that a CUDA graph can capture it with the step."""
        return loaded

    def set_micro_batch(self, size: int) -> None:
        """Limits micro-batches to this size from now on; a step that has begun is repeated from its start."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends loader workers, if there are any."""


class OrderedFeed(Feed):
    """Gives the samples of a data set of known length: shuffled in each epoch or, without a seed (evaluation), in their own order."""

    def __init__(self, length: int, batch: int, micro: int, group: Group, seed: int | None) -> None:
        self.length, self.batch, self.micro, self.group, self.seed = length, batch, micro, group, seed
        self.steps_per_epoch = -(-length // batch)
        self.max_rank_samples = -(-batch // group.size)
        self._order: tuple[int, Tensor] | None = None
        self._device = torch.device("cpu")

    def order(self, epoch: int) -> Tensor:
        """Returns the sample numbers of an epoch, in order."""
        if self._order is None or self._order[0] != epoch:
            ids = torch.arange(self.length) if self.seed is None else permutation(self.length, self.seed, epoch, RandomStream.ORDER)
            self._order = epoch, self._store_order(ids)
        return self._order[1]

    def _store_order(self, ids: Tensor) -> Tensor:
        return tensor_to_device(ids, self._device)

    def set_micro_batch(self, size: int) -> None:
        self.micro = size

    def batch_size(self, index: int) -> int:
        return min(self.batch, self.length - index * self.batch)

    def spans(self, epoch: int, index: int) -> list[tuple[Tensor, int, int]]:
        """Returns (sample numbers, number of real samples, position) of each of this rank's micro-batches of a step."""
        order, first = self.order(epoch), index * self.batch
        spans = []
        for start, end in micro_batch_spans(self.batch_size(index), self.group.size, self.group.rank, self.micro):
            if start < end:
                spans.append((order[first + start : first + end], end - start, first + start))
            else:  # a dummy micro-batch
                spans.append((order[first : first + 1], 0, first))
        return spans
