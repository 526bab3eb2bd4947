"""Feeds: which samples a step takes, in which order, and how they reach the device.

The order is a pure function of (seed, epoch, position). No loader state exists, so none can be lost:
opening a feed at any step gives what an uninterrupted run would have seen there.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate

from drivetrain.engine.group import Group
from drivetrain.engine.rand import Draws, KeyedRand, key, permutation, seed_everything, seed_model
from drivetrain.outcomes import Problem
from drivetrain.plan import Plan
from drivetrain.runs import die_with_parent
from drivetrain.task import Source, Task, Tensors, overrides

TRAIN, EVAL, ORDER, GROUP = 1, 2, 3, 4  # streams of keyed randomness


@dataclass(frozen=True, slots=True)
class Micro:
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

    def close(self) -> None:
        """End workers, if any."""


class OrderedFeed(Feed):
    """Samples of a data set of known length, shuffled anew each epoch (or, for evaluation, in order)."""

    def __init__(self, length: int, batch: int, micro: int, group: Group, seed: int | None) -> None:
        self.length, self.batch, self.micro, self.group, self.seed = length, batch, micro, group, seed
        self.steps_per_epoch = -(-length // batch)
        self._order: tuple[int, Tensor] | None = None
        self._device = torch.device("cpu")

    def order(self, epoch: int) -> Tensor:
        if self._order is None or self._order[0] != epoch:
            rows = torch.arange(self.length) if self.seed is None else permutation(self.length, self.seed, epoch, ORDER)
            self._order = epoch, self._placed(rows)
        return self._order[1]

    def _placed(self, rows: Tensor) -> Tensor:
        return _to(rows, self._device)

    def size(self, index: int) -> int:
        return min(self.batch, self.length - index * self.batch)

    def spans(self, epoch: int, index: int) -> Iterator[tuple[Tensor, int, int]]:
        """(sample numbers, weight, position) of each micro-step of this rank."""
        order, start = self.order(epoch), index * self.batch
        for low, high in shares(self.size(index), self.group.size, self.group.rank, self.micro):
            if low == high:
                yield order[start : start + 1], 0, start
            else:
                yield order[start + low : start + high], high - low, start + low


class TensorFeed(OrderedFeed):
    """Tensors, on the device where they fit there, gathered by index."""

    def __init__(self, data: Tensors, on_device: bool, *order: Any) -> None:
        super().__init__(len(data), *order)
        self.data = data
        device = self.group.device
        self._device = device if on_device else torch.device("cpu")
        self._move = self._device != device
        self.columns = [_as_tensor(c).to(self._device) for c in data.columns]
        self._table: Tensor | None = None
        """On a GPU: the order as rows of a global batch each, always at the same place."""
        if self._device.type == "cuda":
            self._table = torch.zeros(self.steps_per_epoch, self.batch, dtype=torch.int64, device=self._device)

    def _placed(self, rows: Tensor) -> Tensor:
        if self._table is None:
            return super()._placed(rows)
        return self._table.view(-1)[: self.length].copy_(_to(rows, self._device))

    def follow(self, step: Tensor, samples: int) -> Tensor | None:
        if self._table is None or self.group.size > 1 or self.micro < self.batch:
            return None
        return self._table.index_select(0, torch.remainder(step, self.steps_per_epoch))[0, :samples]

    def micro_batches(self, epoch: int, index: int) -> Iterator[Micro]:
        for ids, weight, position in self.spans(epoch, index):
            given = None
            if self._move:
                rows = [_to(column.index_select(0, ids), self.group.device) for column in self.columns]
                given, ids = self.data.batch(rows), _to(ids, self.group.device)
            yield Micro(given, ids, weight, position)

    def assemble(self, given: Any, ids: Tensor) -> Any:
        return given if self._move else self.data.batch([column.index_select(0, ids) for column in self.columns])


class LoaderFeed(OrderedFeed):
    """A map-style data set, read by loader workers ahead of the step."""

    def __init__(self, data: Any, collate: Callable[[list[Any]], Any] | None, plan: Plan, stream: int, *order: Any, seed: int) -> None:
        super().__init__(len(data), *order)
        self.plan, self.workers = plan, plan.workers
        self._samples = _KeyedSamples(data, key(seed, stream))
        self._collate = _Collate(collate or default_collate)
        self._batches: Iterator[Any] | None = None
        self._next = 0
        self._reopen = False
        self._side = torch.cuda.Stream(self.group.device) if self.group.device.type == "cuda" else None

    def open(self, step: int) -> None:
        self.close()
        self._next, self._reopen = step, False
        workers = self.workers
        loader: DataLoader[Any] = DataLoader(
            self._samples,  # type: ignore[arg-type]
            batch_sampler=_Schedule(self, step),
            num_workers=workers,
            collate_fn=self._collate,
            pin_memory=self.plan.pin_memory,
            prefetch_factor=self.plan.prefetch if workers else None,
            worker_init_fn=_begin_worker if workers else None,
            multiprocessing_context="fork" if workers else None,  # the data set need not be picklable
            generator=torch.Generator(),
        )
        self._batches = iter(loader)

    def micro_batches(self, epoch: int, index: int) -> Iterator[Micro]:
        step = epoch * self.steps_per_epoch + index
        if self._batches is None or step != self._next or self._reopen:
            self.open(step)
        assert self._batches is not None
        self._next = step + 1
        for ids, weight, position in self.spans(epoch, index):
            yield Micro(self._arrive(next(self._batches)), _to(ids, self.group.device), weight, position)

    def _arrive(self, batch: Any) -> Any:
        """The batch on the device, copied beside the step that is still running there."""
        if self._side is None:
            return to_device(batch, self.group.device)
        now = torch.cuda.current_stream()
        with torch.cuda.stream(self._side):
            moved = to_device(batch, self.group.device)
        now.wait_stream(self._side)
        for tensor in tensors_in(moved):
            tensor.record_stream(now)
        return moved

    def loading_seconds(self, limit: float = 0.25) -> float:
        """How long one process takes to make a micro-batch, measured on a few of its samples."""
        wanted = min(self.micro, self.length)
        samples: list[Any] = []
        begun = time.perf_counter()
        while len(samples) < wanted and (not samples or time.perf_counter() - begun < limit):
            samples.append(self._samples[0, len(samples)])
        self._collate(samples)
        return (time.perf_counter() - begun) / len(samples) * wanted

    def use(self, workers: int) -> None:
        """Go on with another number of workers from the next step on; what they load stays the same."""
        self.workers, self._reopen = workers, workers != self.workers

    def close(self) -> None:
        self._batches = None


class _Schedule:
    """The sampler of a loader: (epoch, sample) pairs of every micro-batch from a step on, without end."""

    def __init__(self, feed: LoaderFeed, step: int) -> None:
        self.feed, self.step = feed, step

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        step = self.step
        while True:
            epoch, index = divmod(step, self.feed.steps_per_epoch)
            for ids, _, _ in self.feed.spans(epoch, index):
                yield [(epoch, i) for i in ids.tolist()]
            step += 1


class SampleError(Exception):
    """A data set could not give a sample, or collate a batch; the text holds the user's frames."""


def _failed(what: str, error: Exception) -> SampleError:
    frames = traceback.extract_tb(error.__traceback__)[1:]
    own = [f for f in frames if not f.filename.startswith(os.path.dirname(torch.__file__))]
    text = "".join(traceback.format_list(own)) + "".join(traceback.format_exception_only(error))
    return SampleError(f"{what} failed:\n{text.rstrip()}")


class _Collate:
    def __init__(self, function: Callable[[list[Any]], Any]) -> None:
        self.function = function

    def __call__(self, samples: list[Any]) -> Any:
        try:
            return self.function(samples)
        except Exception as error:
            raise _failed("collating the data set's samples to a batch", error) from None


class _KeyedSamples:
    """A data set whose every read first seeds the usual generators from (seed, epoch, sample)."""

    def __init__(self, data: Any, base: int) -> None:
        self.data, self.base = data, base

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, place: tuple[int, int]) -> Any:
        epoch, index = place
        seed_everything(key(self.base, epoch, index))
        try:
            return self.data[index]
        except Problem:
            raise
        except Exception as error:
            raise _failed(f"sample {index} of the data set", error) from None


def _begin_worker(_: int) -> None:
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        die_with_parent(parent.pid)  # forked from the rank itself
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # the rank decides when to stop


class SourceFeed(Feed):
    """What a `Source` collects: each global batch takes equally from every group, so ranks exchange nothing."""

    def __init__(self, source: Source, plan: Plan, group: Group, seed: int) -> None:
        self.source, self.plan, self.group, self.seed = source, plan, group, seed
        total, groups = len(source), source.groups
        self.length = total
        if groups < 1 or total % groups:
            raise Problem(f"the source's {total} samples do not divide into {groups} groups")
        if plan.global_batch % groups or plan.global_batch > total:
            raise Problem(f"global_batch={plan.global_batch} must be a multiple of the source's {groups} groups, at most {total}")
        if groups < group.size:
            raise Problem(f"the source has {groups} groups for {group.size} processes: lower --procs to at most {groups}")
        self.per_group, self.take = total // groups, plan.global_batch // groups
        self.steps_per_pass = -(-self.per_group // self.take)
        self.steps_per_epoch = self.steps_per_pass * source.passes
        self.low, self.high = groups * group.rank // group.size, groups * (group.rank + 1) // group.size
        self.group_ids = torch.arange(self.low, self.high, device=group.device)
        self._data: Tensors | None = None
        self._orders: dict[int, Tensor] = {}
        self._epoch = -1

    def begin_epoch(self, epoch: int, model: torch.nn.Module) -> None:
        rand = KeyedRand(self.group_ids, self.seed, epoch, GROUP)
        seed = key(self.seed, epoch, GROUP, self.low)  # for code that does not draw from rand
        seed_everything(seed)
        seed_model(self.group.device, seed)
        model.eval()
        with torch.no_grad():
            data = self.source.collect(model, rand, self._total)
        model.train()
        expected = (self.high - self.low) * self.per_group
        if len(data) != expected:
            raise Problem(f"collect() gave {len(data)} samples; this rank's {self.high - self.low} groups make {expected}")
        columns = [_as_tensor(c).to(self.group.device) for c in data.columns]
        if self._data is not None and [_form(c) for c in columns] == [_form(c) for c in self._data.columns]:
            for kept, new in zip(self._data.columns, columns, strict=True):
                kept.copy_(new)  # a captured step reads them there
        else:
            self._data = Tensors.__new__(Tensors)
            self._data.names, self._data.columns = data.names, [c.clone() for c in columns]
        self._orders, self._epoch = {}, epoch

    def _total(self, value: Tensor) -> Tensor:
        result = value.clone()
        self.group.all_reduce(result)
        return result

    def _order(self, turn: int) -> Tensor:
        """Row numbers [groups, samples] of this rank, each group shuffled on its own."""
        if turn not in self._orders:
            draws = KeyedRand(self.group_ids, self.seed, self._epoch, turn, ORDER).uniform(self.per_group)
            rows = torch.argsort(draws, dim=1, stable=True)
            first = torch.arange(self.high - self.low, device=self.group.device)[:, None] * self.per_group
            self._orders = {turn: rows + first}
        return self._orders[turn]

    def _columns(self, index: int) -> range:
        place = index % self.steps_per_pass
        return range(place * self.take, min(self.per_group, (place + 1) * self.take))

    def size(self, index: int) -> int:
        part = self._columns(index)
        return self.source.groups * len(part)

    def micro_batches(self, epoch: int, index: int) -> Iterator[Micro]:
        assert self._data is not None and epoch == self._epoch
        part = self._columns(index)
        rows = self._order(index // self.steps_per_pass)[:, part.start : part.stop].reshape(-1)
        width, turn = len(part), index // self.steps_per_pass
        largest = -(-self.source.groups // self.group.size) * width  # of any rank: all take the same number of micro-steps
        count = -(-largest // self.plan.micro_batch)
        base = turn * len(self.source) + part.start * self.source.groups + self.low * width
        for i in range(count):
            low, high = len(rows) * i // count, len(rows) * (i + 1) // count
            chosen, weight = (rows[low:high], high - low) if high > low else (rows[:1], 0)
            yield Micro(None, chosen + self.low * self.per_group, weight, base + low)

    def assemble(self, given: Any, ids: Tensor) -> Any:
        assert self._data is not None
        rows = ids - self.low * self.per_group
        return self._data.batch([column.index_select(0, rows) for column in self._data.columns])


def train_feed(task: Task, data: Any, plan: Plan, group: Group) -> Feed:
    seed = int(task.seed)
    if isinstance(data, Source):
        return SourceFeed(data, plan, group, seed)
    check_data(data, "train_data()")
    order = (plan.global_batch, plan.micro_batch, group, seed)
    return _feed(task, data, plan, TRAIN, order)


def eval_feed(task: Task, data: Any, plan: Plan, group: Group) -> OrderedFeed:
    """One "step" that is the whole data set, in its own order."""
    check_data(data, "eval_data()")
    return _feed(task, data, plan, EVAL, (len(data), plan.eval_micro_batch, group, None))


def _feed(task: Task, data: Any, plan: Plan, stream: int, order: tuple[Any, ...]) -> OrderedFeed:
    collate = getattr(task, "collate", None)
    if isinstance(data, Tensors) and collate is None:
        return TensorFeed(data, plan.data != "loader" and _fits(data, order[2].device), *order)
    if plan.data == "device":
        raise Problem("plan.data=device needs Tensors from train_data(), without a collate()")
    return LoaderFeed(data, collate, plan, stream, *order, seed=int(task.seed))


def check_data(data: Any, hook: str) -> None:
    if isinstance(data, IterableDataset):
        raise Problem(
            f"{hook} gave an IterableDataset: it has no sample numbers, so order and resume could not be exact."
            f" Give a map-style Dataset (__len__ and __getitem__), for example a list or an index of files"
        )
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise Problem(f"{hook} gave a {type(data).__name__}: return Tensors(...) or a map-style Dataset (__len__ and __getitem__)")
    if len(data) == 0:
        raise Problem(f"{hook} gave an empty data set: check the path or the filter that made it")


def _fits(data: Tensors, device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    size = sum(_as_tensor(c).nbytes for c in data.columns)
    return size < torch.cuda.mem_get_info(device)[0] // 2


def _form(column: Tensor) -> tuple[Any, ...]:
    return column.shape, column.dtype


def _to(tensor: Tensor, device: torch.device) -> Tensor:
    """On the device; the host does not wait for the copy."""
    if device.type != "cuda" or tensor.device == device:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def _as_tensor(column: Any) -> Tensor:
    if isinstance(column, Tensor):
        return column
    return torch.from_numpy(np.ascontiguousarray(column)) if isinstance(column, np.ndarray) else torch.as_tensor(column)


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


def draws_of(task: Task, feed: Feed, device: torch.device) -> Draws | None:
    """The random numbers of the task's augmentation, or None where it has none."""
    return Draws(feed.length, device, int(task.seed), TRAIN) if overrides(task, "augment") else None
