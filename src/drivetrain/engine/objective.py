"""Turns the return value of a task's loss into a micro-batch's share of the global mean, and into the metrics of the step.

Every term of the loss is divided by its count over the *global* batch, so micro-batches, ranks and the last
partial batch all give the gradient of the same mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from drivetrain.engine.data.feed import Feed
from drivetrain.engine.group import Group
from drivetrain.engine.log.slots import NORM, SCALE, SKIPPED, MetricSlots
from drivetrain.engine.numerics.losses import LossPart, read_counts, read_limits, read_loss
from drivetrain.engine.numerics.precision import LossScale
from drivetrain.outcomes import Problem
from drivetrain.task import Task, overrides


class Objective:
    """Computes the objective of one training from its parts and counts, and writes the metrics of each step."""

    def __init__(self, task: Task, feed: Feed, loss_scale: LossScale | None, group: Group, before_collective: Callable[[], None]) -> None:
        """`before_collective` is called before ranks communicate: it raises where one of them ran out of memory."""
        self.task, self.loss_scale, self.group, self._before_collective = task, loss_scale, group, before_collective
        self.has_counts = overrides(task, "counts")
        self.limits = read_limits(feed.limits)
        self.slots: MetricSlots | None = None
        """The names of the metrics; None before the first loss."""
        self.row: tuple[Tensor, ...] = ()
        """A view of each float of the present step's row."""
        self.on_new_slots: Callable[[MetricSlots], None] = lambda slots: None
        """Called when the first loss has shown which metrics there are."""
        self._scalar_loss_slot: int | None = None  # set if the loss is only a scalar mean over samples
        self._limit_passed = torch.zeros((), device=group.device)  # 1.0 once a limit was passed in the present epoch

    # --- the share of a micro-batch ---

    def share(self, value: Any, num_real: int, global_size: int, counts: dict[str, Tensor]) -> Tensor:
        """Returns the part of the global mean that this micro-batch contributes, and adds its metrics to the row."""
        if self._scalar_loss_slot is not None and isinstance(value, Tensor) and value.dim() == 0:  # a fast path for the common case
            self.row[self._scalar_loss_slot].add_(value.detach(), alpha=num_real)
            objective = value if num_real == global_size else value * (num_real / global_size)
        else:
            objective = self._share_of_parts(value, num_real, global_size, counts)
        if not objective.requires_grad:
            raise Problem(
                "loss() gave a value without a gradient: it must depend on parameters that require one"
                " (no .item(), .detach() or torch.no_grad() on the way)"
            )
        return objective if self.loss_scale is None else objective * self.loss_scale.scale

    def _share_of_parts(self, value: Any, num_real: int, global_size: int, counts: dict[str, Tensor]) -> Tensor:
        parts, logged = read_loss(value)
        slots = self.slots or self._agree_on_slots(parts, logged, counts)
        self._check_names(slots, [*parts, *logged])
        if self.has_counts:
            self._check_counts(slots, counts)
        total: Tensor | None = None
        for part in parts:
            weight = self._add_to_row(slots, part, num_real, global_size)
            if part.name in counts:
                term = part.value / counts[part.name] if num_real else part.value * 0.0
            else:
                term = part.value if weight == 1.0 else part.value * weight
            total = term if total is None else total + term
        for part in logged:
            self._add_to_row(slots, part, num_real, global_size)
        assert total is not None
        return total

    def _add_to_row(self, slots: MetricSlots, part: LossPart, num_real: int, global_size: int) -> float:
        """Adds a part's total (and count) to the row; returns the factor of its value in the objective."""
        total = part.value.detach()
        if part.count is None:
            self.row[slots.total_slots[part.name]].add_(total, alpha=num_real)
            return num_real / global_size
        factor = 1 if num_real else 0
        self.row[slots.total_slots[part.name]].add_(total, alpha=factor)
        self.row[slots.count_slots[part.name]].add_(part.count, alpha=factor)
        return factor / global_size

    @staticmethod
    def _check_names(slots: MetricSlots, parts: list[LossPart]) -> None:
        names = [part.name for part in parts]
        has_count = [part.count is not None for part in parts]
        if names != slots.names or has_count != [name in slots.count_slots for name in slots.names]:
            raise Problem(f"loss() gave {names}, but {slots.names} in the first batch: names must stay the same")

    @staticmethod
    def _check_counts(slots: MetricSlots, counts: dict[str, Tensor]) -> None:
        counted = [name for name in slots.parts if name in slots.count_slots]
        if sorted(counts) != sorted(counted):
            raise Problem(f"counts() gave {list(counts)}, but the parts of the loss with a count of their own are {counted}")

    def _agree_on_slots(self, parts: list[LossPart], logged: list[LossPart], counts: dict[str, Tensor]) -> MetricSlots:
        slots = MetricSlots(parts, logged)
        counted = [p.name for p in parts if p.count is not None]
        if counted and len(parts) > 1 and not self.has_counts:
            raise Problem(
                f"the loss has {len(parts)} parts and {', '.join(counted)} has a count of its own: define counts(batch) ->"
                f" {{{', '.join(f'{n!r}: ...' for n in counted)}}}, so that each is divided by its global count"
            )
        if self.has_counts:
            self._check_counts(slots, counts)
        self._before_collective()
        all_names = self.group.gather_objects((slots.names, sorted(slots.count_slots)))
        if any(names != all_names[0] for names in all_names):
            raise Problem(f"loss() gave other names on other processes: {all_names}; they must be the same in every batch")
        self.use(slots)
        return slots

    def use(self, slots: MetricSlots) -> None:
        """Sets the metrics of every step."""
        self.slots = slots
        if slots.names == ["loss"] and not slots.count_slots:
            self._scalar_loss_slot = slots.total_slots["loss"]
        self.on_new_slots(slots)

    # --- counts, limits and the update ---

    def counts(self, batches: list[tuple[Any, int]], over_ranks: bool = True) -> dict[str, Tensor]:
        """Returns what each part of the loss is divided by: its count over these (batch, real samples) and over all ranks."""
        totals: dict[str, Tensor] = {}
        for batch, num_real in batches:
            for name, count in read_counts(self.task.counts(batch)).items():
                value = count.float() if isinstance(count, Tensor) else torch.full((), float(count), device=self.group.device)
                value = value.to(self.group.device) * (1.0 if num_real else 0.0)
                totals[name] = totals[name] + value if name in totals else value
        if totals and over_ranks and self.group.size > 1:
            totals = dict(sorted(totals.items()))  # the same order on every rank
            packed = torch.stack(list(totals.values()))
            self._before_collective()
            self.group.all_reduce(packed)
            totals = dict(zip(totals, packed.unbind(0), strict=True))
        return {name: torch.where(total == 0, 1.0, total) for name, total in totals.items()}

    def begin_epoch(self) -> None:
        if self.limits:
            self._limit_passed.zero_()

    def limit_passed(self, global_size: int) -> Tensor | None:
        """Returns 1.0 where this step, or one before it in the epoch, passed a limit: equal on all ranks, without a host sync."""
        if not self.limits:
            return None
        slots = self.slots
        assert slots is not None
        for name, limit in self.limits.items():
            if name not in slots.names:
                raise Problem(f"the source's limits name {name!r}, which loss() does not give ({', '.join(slots.names)})")
            count = self.row[slots.count_slots[name]] if name in slots.count_slots else global_size
            self._limit_passed.copy_(torch.maximum(self._limit_passed, (self.row[slots.total_slots[name]] > limit * count).float()))
        return self._limit_passed

    def gradient_factor(self, global_size: int, has_counts: bool) -> Tensor | None:
        """Returns what gradients are multiplied by before the update; None for 1."""
        slots = self.slots
        assert slots is not None
        factor: Tensor | None = None
        if slots.count_slots and not has_counts and slots.parts[0] in slots.count_slots:
            count = self.row[slots.count_slots[slots.parts[0]]]
            factor = torch.where(count == 0, 0.0, global_size / count)
        if self.loss_scale is not None:
            factor = 1.0 / self.loss_scale.scale if factor is None else factor / self.loss_scale.scale
        return factor

    def finish_row(self, norm: Tensor | None) -> None:
        """Writes the gradient norm into the row; for fp16, adapts the loss scale to it and writes that, too."""
        if norm is None:
            return
        self.row[NORM].copy_(norm)
        if self.loss_scale is not None:
            self.loss_scale.update((~torch.isfinite(norm)).float())
            self.row[SCALE].copy_(self.loss_scale.scale)
            self.row[SKIPPED].copy_(self.loss_scale.skipped)
