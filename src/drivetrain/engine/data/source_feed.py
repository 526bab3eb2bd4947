"""Feed of a `Source`: samples that the model itself collects at the start of each epoch (on-policy learning)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from drivetrain.data import Source, Tensors
from drivetrain.engine.data.batches import as_tensor
from drivetrain.engine.data.feed import Feed, MicroBatch
from drivetrain.engine.data.keyed_random import EpochRand, KeyedRand, RandomStream, key, seed_everything, seed_model, to_int64
from drivetrain.engine.fast.graphs import Graphs, form_of
from drivetrain.engine.group import Group
from drivetrain.hardware import format_gib, memory_bytes
from drivetrain.outcomes import Problem
from drivetrain.plan import Plan


class SourceFeed(Feed):
    """The samples that a `Source` collects. Each global batch takes equally from every group, so ranks exchange no samples."""

    def __init__(self, source: Source, plan: Plan, group: Group, seed: int) -> None:
        self.source, self.micro, self.group, self.seed = source, plan.micro_batch, group, seed
        self.length, self.speeds, self.limits = len(source), source.speeds, source.limits
        groups = source.groups
        _check_source(source, plan, group)
        self.samples_per_group, self.batch_per_group = self.length // groups, plan.global_batch // groups
        self.max_rank_samples = -(-groups // group.size) * self.batch_per_group
        self.steps_per_pass = -(-self.samples_per_group // self.batch_per_group)
        self.steps_per_epoch = self.steps_per_pass * source.passes
        self.first_group, self.end_group = groups * group.rank // group.size, groups * (group.rank + 1) // group.size
        self.num_groups = self.end_group - self.first_group
        self.first_sample = self.first_group * self.samples_per_group
        _check_memory(source, self.num_groups, plan, group.device)
        self.group_ids = torch.arange(self.first_group, self.end_group, device=group.device)
        self._data: Tensors | None = None
        self._pass_order: tuple[int, Tensor] | None = None
        self._epoch = -1
        self._rand = EpochRand(groups, group.device, self.seed, RandomStream.GROUP, max_table_numbers=0)
        self._graphs: Graphs | None = None
        if source.pure and group.device.type == "cuda" and group.size == 1 and plan.capture != "off":
            self._graphs = Graphs(group.device, lambda why: self.notice(f"collections: {why}"))

    # --- collections ---

    def begin_epoch(self, epoch: int, model: torch.nn.Module) -> None:
        self._rand.begin_epoch(epoch)
        seed = key(self.seed, epoch, RandomStream.GROUP, self.first_group)  # for code that does not draw from `rand`
        seed_everything(seed)
        seed_model(self.group.device, seed)
        model.eval()
        with torch.no_grad():
            data = self._collect(model)
        model.train()
        self._store(data)
        self._pass_order, self._epoch = None, epoch

    def _collect(self, model: torch.nn.Module) -> Tensors:
        """Collects the epoch's samples: where possible as one CUDA graph, whose input and output are the source's state."""
        source = self.source

        def collect(state: dict[str, Tensor], *_: Any) -> tuple[Tensors, dict[str, Tensor]]:
            source.load(state)
            return source.collect(model, self._rand.for_samples(self.group_ids), self._sum_over_ranks), source.state()

        state = source.state() if self._graphs is not None else {}
        if self._graphs is None or not state:
            return source.collect(model, self._rand.for_samples(self.group_ids), self._sum_over_ranks)
        data: Tensors
        data, next_state = self._graphs(("collect", form_of(state)), collect, state)
        source.load(next_state)
        return data

    def _store(self, data: Tensors) -> None:
        """Copies a collection into the memory of the previous one if their forms are equal, because captured steps read that memory."""
        if not isinstance(data, Tensors):
            raise Problem(f"collect() gave a {type(data).__name__}: return the samples as Tensors(...)")
        expected = self.num_groups * self.samples_per_group
        if len(data) != expected:
            raise Problem(f"collect() gave {len(data)} samples; this rank's {self.num_groups} groups make {expected}")
        columns = [as_tensor(c).to(self.group.device) for c in data.columns]
        old = self._data
        if old is not None and data.names == old.names and [_form(c) for c in columns] == [_form(c) for c in old.columns]:
            for stored, new in zip(old.columns, columns, strict=True):
                stored.copy_(new)
        else:
            self.data_version += 1
            self._data = Tensors.__new__(Tensors)
            self._data.names, self._data.columns = data.names, [c.clone() for c in columns]

    def _sum_over_ranks(self, value: Tensor) -> Tensor:
        result = value.clone()
        self.group.all_reduce(result)
        return result

    # --- for the stepper that takes whole epochs ---

    def random_keys(self, epoch: int) -> list[int]:
        """Returns the keys of an epoch's random numbers: of the collection's first draw, and of the order in each pass."""
        keys = [
            key(self.seed, epoch, RandomStream.GROUP, 1),
            *(key(self.seed, epoch, number, RandomStream.ORDER, 1) for number in range(self.source.passes)),
        ]
        return [to_int64(k) for k in keys]

    def collected_batch(self) -> Any:
        """Returns all samples of the present collection as one batch."""
        assert self._data is not None
        return self._data.batch(self._data.columns)

    def forget_graphs(self) -> None:
        """Drops captured CUDA graphs, because the model's tensors have moved."""
        if self._graphs is not None:
            self._graphs.clear()

    # --- micro-batches ---

    def _order_in_pass(self, number: int) -> Tensor:
        """Returns row numbers [groups, samples] of this rank for one pass; each group is shuffled by itself."""
        if self._pass_order is None or self._pass_order[0] != number:
            rand = KeyedRand(self.group_ids, self.seed, self._epoch, number, RandomStream.ORDER)
            rows = torch.argsort(rand.uniform(self.samples_per_group), dim=1, stable=True)
            first_rows = torch.arange(self.num_groups, device=self.group.device)[:, None] * self.samples_per_group
            self._pass_order = number, rows + first_rows
        return self._pass_order[1]

    def set_micro_batch(self, size: int) -> None:
        self.micro = size

    def _columns(self, index: int) -> range:
        """Returns the columns of the pass's order that a step of the epoch takes."""
        step = index % self.steps_per_pass
        return range(step * self.batch_per_group, min(self.samples_per_group, (step + 1) * self.batch_per_group))

    def batch_size(self, index: int) -> int:
        return self.source.groups * len(self._columns(index))

    def micro_batches(self, epoch: int, index: int) -> Iterator[MicroBatch]:
        assert self._data is not None and epoch == self._epoch
        columns, pass_number = self._columns(index), index // self.steps_per_pass
        rows = self._order_in_pass(pass_number)[:, columns.start : columns.stop].reshape(-1)
        samples_of_group = len(columns)
        largest_share = -(-self.source.groups // self.group.size) * samples_of_group  # of any rank: all take equally many micro-batches
        num_micro_batches = -(-largest_share // self.micro)
        first = pass_number * len(self.source) + columns.start * self.source.groups + self.first_group * samples_of_group
        for i in range(num_micro_batches):
            start, end = len(rows) * i // num_micro_batches, len(rows) * (i + 1) // num_micro_batches
            selected, num_real = (rows[start:end], end - start) if end > start else (rows[:1], 0)
            yield MicroBatch(None, selected + self.first_sample, num_real, first + start)

    def assemble(self, loaded: Any, ids: Tensor) -> Any:
        assert self._data is not None
        rows = ids - self.first_sample
        return self._data.batch([column.index_select(0, rows) for column in self._data.columns])


def _check_source(source: Source, plan: Plan, group: Group) -> None:
    total, groups = len(source), source.groups
    if groups < 1 or total % groups:
        raise Problem(f"the source's {total} samples do not divide into {groups} groups")
    if plan.global_batch % groups or plan.global_batch > total:
        raise Problem(f"global_batch={plan.global_batch} must be a multiple of the source's {groups} groups, at most {total}")
    if groups < group.size:
        raise Problem(f"the source has {groups} groups for {group.size} processes: lower --procs to at most {groups}")


def _check_memory(source: Source, num_groups: int, plan: Plan, device: torch.device) -> None:
    """Refuses a collection that is larger than the memory, before it is allocated."""
    is_cuda = device.type == "cuda"
    local_ranks = 1 if is_cuda else max(1, plan.world_size // plan.nodes)
    available = torch.cuda.get_device_properties(device).total_memory if is_cuda else memory_bytes()
    if (needed := num_groups * local_ranks * source.group_bytes) > available:
        owner = "a GPU" if is_cuda else "this machine"
        raise Problem(
            f"a collection from {num_groups * local_ranks:,} groups (environments) takes at least {format_gib(needed)}, and {owner} has"
            f" {format_gib(available)}: lower their number (`envs`) to at most"
            f" {available // (local_ranks * source.group_bytes) * local_ranks:,}, or how long each is played (`horizon`)"
        )


def _form(column: Tensor) -> tuple[Any, ...]:
    return column.shape, column.dtype
