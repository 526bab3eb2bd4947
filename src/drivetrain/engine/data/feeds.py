"""Feeds of tensors and of sources, and which feed a task's data gets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from drivetrain.data import Source, Tensors
from drivetrain.engine.data import signature
from drivetrain.engine.data.base import EVAL, GROUP, ORDER, TRAIN, Feed, Micro, OrderedFeed, as_tensor, placed
from drivetrain.engine.data.loader import LoaderFeed
from drivetrain.engine.data.rand import BatchRand, Draws, KeyedRand, key, seed_everything, seed_model, signed
from drivetrain.engine.fast.graphs import Graphs, form_of
from drivetrain.engine.group import Group
from drivetrain.hardware import format_gib, memory_bytes
from drivetrain.outcomes import Problem
from drivetrain.plan import Plan
from drivetrain.task import Task, overrides


class TensorFeed(OrderedFeed):
    """Tensors, on the device where they fit there, gathered by index."""

    def __init__(self, data: Tensors, on_device: bool, *order: Any) -> None:
        super().__init__(len(data), *order)
        self.data = data
        device = self.group.device
        self._device = device if on_device else torch.device("cpu")
        self._move = self._device != device
        self.resident = not self._move
        self.columns = [as_tensor(c).to(self._device) for c in data.columns]
        self._digests: list[str | None] | None = None
        self._table: Tensor | None = None
        """Where the host runs ahead: the order as rows of a global batch each, always at the same place."""
        if self.group.device_counters and not self._move:
            self._table = torch.zeros(self.steps_per_epoch, self.batch, dtype=torch.int64, device=self._device)

    def signature(self) -> dict[str, Any]:
        if self._digests is None and self.signs:
            self._digests = signature.of_columns(self.columns)
        return super().signature() | {"columns": self._digests}

    def _placed(self, rows: Tensor) -> Tensor:
        if self._table is None:
            return super()._placed(rows)
        return self._table.view(-1)[: self.length].copy_(placed(rows, self._device))

    def follow(self, step: Tensor, samples: int) -> Tensor | None:
        if self._table is None or self.group.size > 1 or self.micro < self.batch:
            return None
        return self._table.index_select(0, torch.remainder(step, self.steps_per_epoch))[0, :samples]

    def micro_batches(self, epoch: int, index: int) -> Iterator[Micro]:
        for ids, weight, position in self.spans(epoch, index):
            given = None
            if self._move:
                chosen = [column.index_select(0, ids) for column in self.columns]
                self.moment("copy")
                rows = [placed(column, self.group.device) for column in chosen]
                given, ids = self.data.batch(rows), placed(ids, self.group.device)
            yield Micro(given, ids, weight, position)

    def assemble(self, given: Any, ids: Tensor) -> Any:
        return given if self._move else self.data.batch([column.index_select(0, ids) for column in self.columns])


class SourceFeed(Feed):
    """What a `Source` collects: each global batch takes equally from every group, so ranks exchange nothing."""

    def __init__(self, source: Source, plan: Plan, group: Group, seed: int) -> None:
        self.source, self.micro, self.group, self.seed = source, plan.micro_batch, group, seed
        total, groups = len(source), source.groups
        self.length, self.speeds, self.limits = total, source.speeds, source.limits
        if groups < 1 or total % groups:
            raise Problem(f"the source's {total} samples do not divide into {groups} groups")
        if plan.global_batch % groups or plan.global_batch > total:
            raise Problem(f"global_batch={plan.global_batch} must be a multiple of the source's {groups} groups, at most {total}")
        if groups < group.size:
            raise Problem(f"the source has {groups} groups for {group.size} processes: lower --procs to at most {groups}")
        self.per_group, self.take = total // groups, plan.global_batch // groups
        self.largest = -(-groups // group.size) * self.take
        self.steps_per_pass = -(-self.per_group // self.take)
        self.steps_per_epoch = self.steps_per_pass * source.passes
        self.low, self.high = groups * group.rank // group.size, groups * (group.rank + 1) // group.size
        _check_room(source, self.high - self.low, plan, group.device)
        self.group_ids = torch.arange(self.low, self.high, device=group.device)
        self._data: Tensors | None = None
        self._orders: dict[int, Tensor] = {}
        self._epoch = -1
        self._draws = Draws(source.groups, group.device, self.seed, GROUP, room=0)
        self._graphs: Graphs | None = None
        if source.pure and group.device.type == "cuda" and group.size == 1 and plan.capture != "off":
            self._graphs = Graphs(group.device, lambda why: self.notice(f"collections: {why}"))

    def begin_epoch(self, epoch: int, model: torch.nn.Module) -> None:
        self._draws.begin(epoch)
        seed = key(self.seed, epoch, GROUP, self.low)  # for code that does not draw from rand
        seed_everything(seed)
        seed_model(self.group.device, seed)
        model.eval()
        with torch.no_grad():
            data = self._collect(model)
        model.train()
        if not isinstance(data, Tensors):
            raise Problem(f"collect() gave a {type(data).__name__}: return the samples as Tensors(...)")
        expected = (self.high - self.low) * self.per_group
        if len(data) != expected:
            raise Problem(f"collect() gave {len(data)} samples; this rank's {self.high - self.low} groups make {expected}")
        columns = [as_tensor(c).to(self.group.device) for c in data.columns]
        old = self._data
        if old is not None and data.names == old.names and [_form(c) for c in columns] == [_form(c) for c in old.columns]:
            for kept, new in zip(old.columns, columns, strict=True):
                kept.copy_(new)  # a captured step reads them there
        else:
            self.version += 1
            self._data = Tensors.__new__(Tensors)
            self._data.names, self._data.columns = data.names, [c.clone() for c in columns]
        self._orders, self._epoch = {}, epoch

    def _collect(self, model: torch.nn.Module) -> Tensors:
        """As one graph, where it can be one: the source's state goes in, samples and the next state come out."""
        source = self.source

        def work(state: dict[str, Tensor], *_: Any) -> tuple[Tensors, dict[str, Tensor]]:
            source.load(state)
            return source.collect(model, self._draws.of(self.group_ids), self._total), source.state()

        before = source.state() if self._graphs is not None else {}
        if self._graphs is None or not before:
            return source.collect(model, self._draws.of(self.group_ids), self._total)
        data: Tensors
        data, after = self._graphs(("collect", form_of(before)), work, before)
        source.load(after)
        return data

    def streams(self, epoch: int) -> list[int]:
        """The keys of an epoch's random numbers: of its collection's first draw, and of the order in each pass."""
        keys = [key(self.seed, epoch, GROUP, 1), *(key(self.seed, epoch, turn, ORDER, 1) for turn in range(self.source.passes))]
        return [signed(k) for k in keys]

    def samples(self) -> Any:
        """All of the present collection, as a batch."""
        assert self._data is not None
        return self._data.batch(self._data.columns)

    def forget(self) -> None:
        """The model's tensors have moved: nothing that was captured holds any more."""
        if self._graphs is not None:
            self._graphs.clear()

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

    def cut(self, micro: int) -> None:
        self.micro = micro

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
        count = -(-largest // self.micro)
        base = turn * len(self.source) + part.start * self.source.groups + self.low * width
        for i in range(count):
            low, high = len(rows) * i // count, len(rows) * (i + 1) // count
            chosen, weight = (rows[low:high], high - low) if high > low else (rows[:1], 0)
            yield Micro(None, chosen + self.low * self.per_group, weight, base + low)

    def assemble(self, given: Any, ids: Tensor) -> Any:
        assert self._data is not None
        rows = ids - self.low * self.per_group
        return self._data.batch([column.index_select(0, rows) for column in self._data.columns])


def _check_room(source: Source, groups: int, plan: Plan, device: torch.device) -> None:
    """Refuses a collection that no memory of this machine holds, before anything of its size is made."""
    cuda = device.type == "cuda"
    local = 1 if cuda else max(1, plan.world_size // plan.nodes)
    room = torch.cuda.get_device_properties(device).total_memory if cuda else memory_bytes()
    if (needed := groups * local * source.group_bytes) > room:
        where = "a GPU" if cuda else "this machine"
        raise Problem(
            f"a collection from {groups * local:,} groups (environments) takes at least {format_gib(needed)}, and {where} has {format_gib(room)}:"
            f" lower their number (`envs`) to at most {room // (local * source.group_bytes) * local:,}, or how long each is played (`horizon`)"
        )


def _form(column: Tensor) -> tuple[Any, ...]:
    return column.shape, column.dtype


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
    collate = task.collate if overrides(task, "collate") else None
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
    if _is_columns(data):
        raise Problem(
            f"{hook} gave a {type(data).__name__} of {len(data)} tensors, which would be {len(data)} samples: return Tensors(x, y)"
        )
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise Problem(f"{hook} gave a {type(data).__name__}: return Tensors(...) or a map-style Dataset (__len__ and __getitem__)")
    if len(data) == 0:
        raise Problem(f"{hook} gave an empty data set: check the path or the filter that made it")


def _is_columns(data: Any) -> bool:
    """Whether a tuple or list holds a data set's columns (x, y), not its samples: samples have one form, columns one length."""
    if not isinstance(data, (tuple, list)) or not 1 <= len(data) <= 16 or not all(isinstance(c, (Tensor, np.ndarray)) for c in data):
        return False
    if isinstance(data, tuple):
        return True
    return len({c.shape[:1] for c in data}) == 1 and len({(c.ndim, c.dtype) for c in data}) == len(data) > 1 and data[0].ndim > 0


def _fits(data: Tensors, device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    size = sum(as_tensor(c).nbytes for c in data.columns)
    return size < torch.cuda.mem_get_info(device)[0] // 2


def draws_of(task: Task, feed: Feed, device: torch.device) -> Draws | None:
    """The random numbers of the task's augmentation, or None where it has none."""
    return Draws(feed.length, device, int(task.seed), TRAIN) if overrides(task, "augment") else None


def augmented(task: Task, batch: Any, rand: BatchRand) -> Any:
    """The task's augmented batch."""
    changed = task.augment(batch, rand)
    if changed is None:
        raise Problem("augment(batch, rand) gave None: return the changed batch")
    return changed
