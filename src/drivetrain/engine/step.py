"""One optimizer step over a global batch: exact whatever the plan, and without a host sync.

Every term of the loss is divided by its count over the *global* batch, so micro-batches, ranks and the
last partial batch all give the gradient of the same mean.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.engine.data import Feed, Micro, augmenter
from drivetrain.engine.group import Group
from drivetrain.engine.ledger import Ledger
from drivetrain.engine.losses import Part, read_loss
from drivetrain.engine.optim import Rates, takes_factor
from drivetrain.engine.precision import LossScale, Precision
from drivetrain.engine.rand import HostRandom, key, seed_model
from drivetrain.engine.strategies import Strategy
from drivetrain.outcomes import Problem
from drivetrain.task import Task, overrides

# The tail of the gradient buffer: the norm, three requests any rank may make, fp16's scale and skipped
# steps, then the figures.
TAIL = 64
NORM, STOP, SAVE, EVALUATE, SCALE, SKIPPED, FIGURES = range(7)
LOOK_EVERY = 1000  # steps between looks at whether a task draws from Python's or numpy's generators


class Figures:
    """The named figures of a step and their slots in the tail, fixed by the first loss."""

    def __init__(self, parts: list[Part], logged: list[Part]) -> None:
        self.parts = [p.name for p in parts]
        self.names = [p.name for p in (*parts, *logged)]
        if len(set(self.names)) != len(self.names):
            raise Problem(f"loss() uses a name twice: {self.names}")
        if len(self.parts) > 1 and "loss" in self.names:
            raise Problem("loss() names one of several figures 'loss', which is the name of the parts' sum: choose another")
        own = [p.count is not None for p in (*parts, *logged)]
        self.total = {name: FIGURES + i for i, name in enumerate(self.names)}
        first = FIGURES + len(self.names)
        self.count = {name: first + i for i, name in enumerate(n for n, o in zip(self.names, own, strict=True) if o)}
        self.used = first + len(self.count)
        if self.used > TAIL:
            raise Problem(f"loss() logs {len(self.names)} figures; at most {(TAIL - FIGURES) // 2} fit")

    def guarded(self) -> list[int]:
        """The slots that must be numbers: the norm and the parts, not what is only logged."""
        return [NORM, *(self.total[name] for name in self.parts)]

    def read(self, row: list[float], size: int) -> dict[str, float]:
        """The global means, from a row of the ledger."""
        values = {}
        for name in self.names:
            count = row[self.count[name]] if name in self.count else size
            values[name] = row[self.total[name]] / count if count else 0.0
        if len(self.parts) > 1 or self.parts[0] != "loss":
            values["loss"] = sum(values[name] for name in self.parts)
        return values


class Step:
    def __init__(
        self, task: Task, model: nn.Module, feed: Feed, strategy: Strategy, optimizer: torch.optim.Optimizer,
        rates: Rates, precision: Precision, group: Group,
    ) -> None:  # fmt: skip
        self.task, self.model, self.feed, self.strategy = task, model, feed, strategy
        self.optimizer, self.rates, self.precision, self.group = optimizer, rates, precision, group
        self.loss_scale = LossScale(group.device) if precision.name == "fp16" else None
        self.figures: Figures | None = None
        self.requests = [False, False, False]
        self._seed, self._clip = int(task.seed), float(task.clip)
        self._fused = takes_factor(optimizer)
        self._augment = augmenter(task)
        self._has_counts = overrides(task, "counts")
        self._host_random = HostRandom()
        self.ledger: Ledger | None = None
        self._tail = strategy.tail
        self._slots: tuple[Tensor, ...] = () if self._tail is None else self._tail.unbind(0)
        self._step = 0
        self._plain: int | None = None
        """The slot of the loss, where it is all there is: a scalar mean over samples."""

    def __call__(self, step: int, with_norm: bool = True) -> None:
        """Take step number `step` (from 0); its figures go to the ledger."""
        epoch, index = divmod(step, self.feed.steps_per_epoch)
        self.rates.set(step)
        self.strategy.zero()
        self._step = step
        if self._tail is None and self.ledger is not None:
            self._slots = self.ledger.slots(step)
        size = self.feed.size(index)
        batches: Iterable[tuple[Any, int, int]] = (
            (self._batch(m, epoch), m.weight, m.position) for m in self.feed.micro_batches(epoch, index)
        )
        counts: dict[str, Tensor] = {}
        if self._has_counts:
            ready = list(batches)
            counts = self._global_counts([(batch, weight) for batch, weight, _ in ready])
            batches = ready
        for batch, weight, position in batches:
            seed = key(self._seed, step, position)
            seed_model(self.group.device, seed)
            self._host_random.begin(seed, check=step % LOOK_EVERY == 0)
            objective = self._forward(batch, weight, size, counts)
            objective.backward()
        self._host_random.end()
        for slot, asked in enumerate(self.requests, STOP):
            if asked:
                self._slots[slot].fill_(1.0)
        self.strategy.reduce()
        self._update(size, bool(counts), with_norm)
        assert self.ledger is not None and self.figures is not None
        self.ledger.note(step, None if self._tail is None else self._tail[: self.figures.used])

    def _batch(self, micro: Micro, epoch: int) -> Any:
        return micro.batch if self._augment is None else self._augment(micro, epoch)

    def _forward(self, batch: Any, weight: int, size: int, counts: dict[str, Tensor]) -> Tensor:
        """This micro-batch's share of the objective; its figures go to the tail."""
        with self.precision.forward():
            value = self.task.loss(self.model, batch)
        if self._plain is not None and isinstance(value, Tensor) and value.dim() == 0:  # the common case, by the shortest way
            self._slots[self._plain].add_(value.detach(), alpha=weight)
            objective = value if weight == size else value * (weight / size)
        else:
            objective = self._forward_parts(value, weight, size, counts)
        if not objective.requires_grad:
            raise Problem(
                "loss() gave a value without a gradient: it must depend on parameters that require one"
                " (no .item(), .detach() or torch.no_grad() on the way)"
            )
        return objective if self.loss_scale is None else objective * self.loss_scale.scale

    def _forward_parts(self, value: Any, weight: int, size: int, counts: dict[str, Tensor]) -> Tensor:
        parts, logged = read_loss(value)
        figures = self.figures or self._agree_on_figures(parts, logged, counts)
        objective: Tensor | None = None
        names = figures.names
        if len(parts) + len(logged) != len(names):
            raise Problem(f"loss() gave {[p.name for p in (*parts, *logged)]}, but {names} in the first batch: names must stay the same")
        for place, part in enumerate((*parts, *logged)):
            if part.name != names[place] or (part.count is None) == (part.name in figures.count):
                raise Problem(
                    f"loss() gave {[p.name for p in (*parts, *logged)]}, but {names} in the first batch: names must stay the same"
                )
            total = part.value.detach()
            if part.count is None:
                self._slots[figures.total[part.name]].add_(total, alpha=weight)
                share = weight / size
            else:
                counted = 1 if weight else 0
                self._slots[figures.total[part.name]].add_(total, alpha=counted)
                self._slots[figures.count[part.name]].add_(part.count, alpha=counted)
                share = counted / size
            if place < len(parts):
                if part.name in counts:
                    term = part.value / counts[part.name] if weight else part.value * 0.0
                else:
                    term = part.value if share == 1.0 else part.value * share
                objective = term if objective is None else objective + term
        assert objective is not None
        return objective

    def _agree_on_figures(self, parts: list[Part], logged: list[Part], counts: dict[str, Tensor]) -> Figures:
        figures = Figures(parts, logged)
        own = [p.name for p in parts if p.count is not None]
        if own and len(parts) > 1 and not self._has_counts:
            raise Problem(
                f"the loss has {len(parts)} parts and {', '.join(own)} has a count of its own: define counts(batch) ->"
                f" {{{', '.join(f'{n!r}: ...' for n in own)}}}, so that each is divided by its global count"
            )
        missing = [name for name in own if self._has_counts and name not in counts]
        unknown = [name for name in counts if name not in own]
        if missing or unknown:
            raise Problem(f"counts() gave {list(counts)}, but the parts of the loss with a count of their own are {own}")
        everyone = self.group.gather((figures.names, sorted(figures.count)))
        if any(other != everyone[0] for other in everyone):
            raise Problem(f"loss() gave other names on other processes: {everyone}; they must be the same in every batch")
        self.figures = figures
        if figures.names == ["loss"] and not figures.count:
            self._plain = figures.total["loss"]
        self.ledger = Ledger(figures.used, self.group.device)
        if self._tail is None:
            self._slots = self.ledger.slots(self._step)
        return figures

    def _global_counts(self, batches: list[tuple[Any, int]]) -> dict[str, Tensor]:
        totals: dict[str, Tensor] = {}
        for batch, weight in batches:
            for name, count in (self.task.counts(batch) or {}).items():
                value = torch.as_tensor(count, dtype=torch.float32, device=self.group.device) * (1.0 if weight else 0.0)
                totals[name] = totals[name] + value if name in totals else value
        if totals and self.group.size > 1:
            packed = torch.stack(list(totals.values()))
            self.group.all_reduce(packed)
            totals = dict(zip(totals, packed.unbind(0), strict=True))
        return {name: torch.where(total == 0, 1.0, total) for name, total in totals.items()}

    def _update(self, size: int, counted: bool, with_norm: bool) -> None:
        """Norm, clip, unscale and the optimizer's step."""
        assert self.figures is not None
        factor: Tensor | None = None
        overflow: Tensor | None = None
        if self.figures.count and not counted and self.figures.parts[0] in self.figures.count:
            count = self._slots[self.figures.count[self.figures.parts[0]]]
            factor = torch.where(count == 0, 0.0, size / count)
        if self.loss_scale is not None:
            factor = 1.0 / self.loss_scale.scale if factor is None else factor / self.loss_scale.scale
        if with_norm or self._clip or self.loss_scale is not None:
            norm = self.strategy.norm() if factor is None else self.strategy.norm() * factor
            self._slots[NORM].copy_(norm)
            if self._clip:
                clip = (self._clip / (norm + 1e-6)).clamp_(max=1.0)
                factor = clip if factor is None else factor * clip
            if self.loss_scale is not None:
                overflow = (~torch.isfinite(norm)).float()
        self._apply(factor, overflow)
        if self.loss_scale is not None and overflow is not None:
            self.loss_scale.update(overflow)
            self._slots[SCALE].copy_(self.loss_scale.scale)
            self._slots[SKIPPED].copy_(self.loss_scale.skipped)

    def _apply(self, factor: Tensor | None, overflow: Tensor | None) -> None:
        optimizer: Any = self.optimizer
        if self._fused:
            if factor is not None:
                optimizer.grad_scale = 1.0 / factor
            if overflow is not None:
                optimizer.found_inf = overflow
        else:
            if overflow is not None and overflow.item():
                return  # an optimizer of the user's own cannot skip by itself: this costs a host sync
            if factor is not None:
                self.strategy.scale(factor)
        optimizer.step()
