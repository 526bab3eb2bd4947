"""One optimizer step over a global batch: exact whatever the plan, and without a host sync.

Every term of the loss is divided by its count over the *global* batch, so micro-batches, ranks and the
last partial batch all give the gradient of the same mean.

A step is made of pieces of device work that depend on the step's number only through tensors: one piece for
all of it where one process takes the batch at once, else one a micro-batch and one for the update, with
the sum over ranks between them. `Graphs` replays a piece; without it, the piece is simply called.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from drivetrain.engine.cadence import SupportsBool
from drivetrain.engine.data.feed import Feed, MicroBatch
from drivetrain.engine.data.keyed_random import HostRandom, key, model_generator
from drivetrain.engine.data.make_feed import augment_batch, augment_rand
from drivetrain.engine.fast.compiled import Compiled
from drivetrain.engine.fast.graphs import Graphs, form_of
from drivetrain.engine.faults.out_of_memory import Before, Short
from drivetrain.engine.group import Group
from drivetrain.engine.log.figures import FIGURES, NORM, SCALE, SKIPPED, STOP, Figures
from drivetrain.engine.log.ledger import Ledger
from drivetrain.engine.measure.memory import allocation_errors_as_oom
from drivetrain.engine.numerics.losses import LossPart, read_counts, read_limits, read_loss, sum_logged_values
from drivetrain.engine.numerics.optim import LearningRates, is_capturable, prepare_for_skipped_steps
from drivetrain.engine.numerics.precision import LossScale, Precision
from drivetrain.engine.strategies import Strategy
from drivetrain.outcomes import Problem
from drivetrain.task import Task, overrides

LOOK_EVERY = 1000  # steps between looks at whether a task draws from Python's or numpy's generators

Inputs = tuple[Any, Any]  # what a loader gave, and the samples' numbers


class Form(NamedTuple):
    """What is fixed about a micro-batch: between two of one form only the values of tensors differ."""

    num_real: int
    """How many samples are real; 0: a dummy micro-batch that keeps collectives aligned."""
    size: int
    """Samples of the global batch."""
    ready: bool
    """Whether what is given is the batch itself, made and augmented."""
    given: Hashable
    """The layout of what a loader gave."""
    version: int
    """Of the samples that live on the device."""


class Step:
    def __init__(
        self, task: Task, model: nn.Module, feed: Feed, strategy: Strategy,
        rates: LearningRates, precision: Precision, group: Group,
    ) -> None:  # fmt: skip
        self.task, self.model, self.feed, self.strategy = task, model, feed, strategy
        self.optimizer, self.rates, self.precision, self.group = strategy.optimizer, rates, precision, group
        self.loss_scale = LossScale(group.device) if precision.name == "fp16" else None
        self._limits = read_limits(feed.limits)
        if self.loss_scale is not None or self._limits:
            prepare_for_skipped_steps(strategy.optimizer)
        self.figures: Figures | None = None
        self.requests = [False, False, False]
        self.stop: SupportsBool = False
        """Looked at once more before the requests travel."""
        self.graphs: Graphs | None = None
        """Replays pieces of the step; None calls them."""
        self.compiled: Compiled | None = None
        self.pace: Callable[[int, Inputs, Form], None] | None = None
        """Looks on while the first steps are measured."""
        self.moment: Callable[[str], None] | None = None
        """Where somebody waits for them: the named points within a step."""
        self.undoable = True
        """Whether a step that runs out of memory can be taken back, on all ranks together."""
        self._before = Before(model)
        self._updating = False
        self.host_random = HostRandom(group.device)
        self.ledger: Ledger | None = None
        self._seed, self._generator = key(int(task.seed)), model_generator(group.device)
        self._clip = float(task.clip)
        self._draws = augment_rand(task, feed, group.device)
        self.has_counts = overrides(task, "counts")
        self._enough = torch.zeros((), device=group.device)
        """Whether a limit was passed in this epoch."""
        self.number = 0
        self._at = torch.zeros(1, dtype=torch.int64, device=group.device) if group.device_counters else None
        """The step's number on the device, where captured work reads it."""
        self._device_number = 0
        self._plain: int | None = None
        """The slot of the loss, where it is all there is: a scalar mean over samples."""
        self._slots: tuple[Tensor, ...] = ()
        self.renew(strategy)

    def renew(self, strategy: Strategy) -> None:
        """Begin with a strategy and the feed as it is cut now: what was captured or compiled for others is forgotten."""
        self.rest()
        self.graphs = self.compiled = None
        self.strategy, self._tail = strategy, strategy.piggyback
        self._slots = () if self._tail is None else self._tail.unbind(0)
        self._follows = self._at is not None and strategy.is_one_piece and self.feed.sample_ids_on_device(self._at, 1) is not None

    def __call__(self, step: int, with_norm: bool = True) -> None:
        """Take step number `step` (from 0); its figures go to the ledger."""
        epoch, index = divmod(step, self.feed.steps_per_epoch)
        self.number = step
        self.rates.set(step)
        if self._at is not None and self._device_number != step:
            self._at.fill_(step)
        if self._draws is not None:
            self._draws.begin_epoch(epoch)
        if self._limits and index == 0:
            self._enough.zero_()
        if self._tail is None and self.ledger is not None:
            self._slots = self.ledger.slots(step)
        size = self.feed.batch_size(index)
        kind, plain = (size, with_norm, self.feed.data_version), 0 if self.graphs is None else self.graphs.num_eager
        if self.graphs is not None and self.graphs.only_replayed(kind):
            self._before.skip()
        else:
            self._before.take()
        self._updating = False
        if self.moment is not None:
            self.moment("take")
        micros = self.feed.micro_batches(epoch, index)
        if self.moment is not None and self.feed.is_resident:
            self.moment("fetched")  # what is on the device already is not waited for
        elif self.moment is not None:
            micros = _told(micros, self.moment)
        if self.strategy.is_one_piece:
            self._take_at_once(micros, size, with_norm)
        else:
            self._take_in_pieces(micros, size, with_norm)
        if self.graphs is not None:
            self.graphs.note_step(kind, plain)
        assert self.ledger is not None and self.figures is not None
        self._device_number = step + 1
        if self.moment is not None:
            self.moment("taken")
        self.ledger.note(step, None if self._tail is None or self._at is not None else self._tail[: self.figures.used])

    # --- pieces ---

    def _take_at_once(self, micros: Iterator[MicroBatch], size: int, with_norm: bool) -> None:
        """One process, one micro-batch: all of the step is one piece."""
        try:
            [micro] = micros
            self._take_whole(micro, size, with_norm)
            return
        except torch.OutOfMemoryError:
            if self._updating or not self.undoable:
                raise
        self.agree(short=True)  # out of the except clause, whose traceback holds the memory

    def _take_whole(self, micro: MicroBatch, size: int, with_norm: bool) -> None:
        inputs, form = (micro.loaded, micro.ids), Form(micro.num_real, size, False, form_of(micro.loaded), self.feed.data_version)
        self._begin(micro.position, inputs, form)
        if self.graphs is not None:
            handed = (None, None) if self._follows else inputs
            self.graphs(("step", form, with_norm), self._whole_step, handed, form, with_norm)
        else:
            self._whole_step(inputs, form, with_norm)
        self.host_random.end()

    def _whole_step(self, inputs: Inputs, form: Form, with_norm: bool) -> None:
        if self._follows and self._at is not None:  # which samples they are, the device knows by itself
            inputs = inputs[0], self.feed.sample_ids_on_device(self._at, form.num_real)
        self.strategy.zero_gradients()
        counts: dict[str, Tensor] = {}
        if self.has_counts:
            batch = self.make_batch(*inputs)
            counts = self._counts([(batch, form.num_real)])
            inputs, form = (batch, inputs[1]), form._replace(ready=True)
        self.backward(inputs, form, counts)
        self.strategy.reduce_gradients()
        self._begin_update()
        self._update(form.size, bool(counts), with_norm)

    def _take_in_pieces(self, micros: Iterator[MicroBatch], size: int, with_norm: bool) -> None:
        counts: dict[str, Tensor] = {}
        short = False
        try:
            counts = self._take_micros(micros, size)
        except torch.OutOfMemoryError:
            if not self.undoable:
                raise
            short = True
        if self.moment is not None:
            self.moment("reduce")
        self.agree(short)
        self.requests[0] |= bool(self.stop)
        for slot, asked in enumerate(self.requests, STOP):
            if asked:
                self._slots[slot].fill_(1.0)
        self.strategy.reduce_gradients()
        self._begin_update()
        if self.graphs is not None and is_capturable(self.optimizer, self.loss_scale is not None):
            self.graphs(("update", size, bool(counts), with_norm), self._update_step, (), size, bool(counts), with_norm)
        else:
            self._update(size, bool(counts), with_norm)

    def _take_micros(self, micros: Iterator[MicroBatch], size: int) -> dict[str, Tensor]:
        """Forward and backward of all micro-batches; gives the counts that losses were divided by."""
        self.strategy.zero_gradients()
        counts: dict[str, Tensor] = {}
        if self.has_counts:  # all batches must be seen before the first backward
            ready = [(m._replace(loaded=self.make_batch(m.loaded, m.ids)), m.num_real) for m in micros]
            counts = self._counts([(m.loaded, num_real) for m, num_real in ready])
            micros = iter([m for m, _ in ready])
        for micro in micros:
            inputs, form = (
                (micro.loaded, micro.ids),
                Form(micro.num_real, size, self.has_counts, form_of(micro.loaded), self.feed.data_version),
            )
            self._begin(micro.position, inputs, form)
            if self.graphs is not None:
                self.graphs(("micro", form), self._micro_step, (*inputs, counts), form)
            else:
                self.backward(inputs, form, counts)
        self.host_random.end()
        return counts

    def _micro_step(self, inputs: tuple[Any, Tensor, dict[str, Tensor]], form: Form) -> None:
        given, ids, counts = inputs
        self.backward((given, ids), form, counts)

    def _update_step(self, _: Any, size: int, counted: bool, with_norm: bool) -> None:
        self._update(size, counted, with_norm)

    def _begin(self, position: int, inputs: Inputs, form: Form) -> None:
        """Seed the model's own randomness for a micro-batch."""
        seed = key(self.number, position, after=self._seed)
        if self.pace is not None:
            self.pace(seed, inputs, form)
        self._generator.manual_seed(seed)
        if self.graphs is None:  # a task that uses the host's generators is never captured
            self.host_random.begin(seed, check=self.number % LOOK_EVERY == 0)

    def _begin_update(self) -> None:
        self._updating = True  # from here on a step cannot be taken back
        if self.moment is not None:
            self.moment("update")

    # --- out of memory ---

    def agree(self, short: bool = False) -> None:
        """Before ranks meet within a step: if memory ran out on any of them, all leave this attempt at it."""
        if not self.undoable or (self.group.size == 1 and not short):
            return
        mine = [float(short and rank == self.group.rank) for rank in range(self.group.size)]
        *told, unknown = self.group.sum_on_hosts([*mine, float(not self._before.known)])
        ranks = [rank for rank, one in enumerate(told) if one]
        if ranks:
            raise Short(ranks, undoable=not unknown)

    def undo(self) -> None:
        """As if the step under way had not begun."""
        self._before.restore()
        self.clear()

    # --- trying out ---

    def rehearse(self, inputs: Inputs, form: Form) -> None:
        """Forward and backward of a micro-batch by itself, without an update."""
        moment, self.moment = self.moment, None
        try:
            self._rehearse(inputs, form)
        finally:
            self.moment = moment

    def _rehearse(self, inputs: Inputs, form: Form) -> None:
        self.clear()
        counts: dict[str, Tensor] = {}
        if self.has_counts:
            batch = inputs[0] if form.ready else self.make_batch(*inputs)
            counts = self._counts([(batch, form.num_real)], over_ranks=False)
            inputs, form = (batch, inputs[1]), form._replace(ready=True)
        self.backward(inputs, form, counts)
        if self.strategy.is_one_piece:
            self.strategy.reduce_gradients()  # which then is only to make them whole

    def rehearsed(self) -> list[float]:
        """What it left behind: all figures, and the norm of each parameter's gradient."""
        assert self.figures is not None
        figures = [slot.detach() for slot in self._slots[FIGURES : self.figures.used]]
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        return [float(value) for value in (*figures, *torch._foreach_norm(gradients))]

    def rest(self) -> None:
        """Before anything else uses the model: its blocks run as they were written."""
        if self.compiled is not None:
            self.compiled.set_enabled(False)

    def clear(self) -> None:
        """Gradients and figures of nothing."""
        self.strategy.zero_gradients()
        if self._tail is None:
            for slot in self._slots:
                slot.zero_()

    # --- forward and backward ---

    def make_batch(self, given: Any, ids: Tensor) -> Any:
        batch = self.feed.assemble(given, ids)
        return batch if self._draws is None else augment_batch(self.task, batch, self._draws.for_samples(ids))

    def loss_value(self, given: Any, ids: Tensor, ready: bool) -> Any:
        """What the task's loss gives for a micro-batch; this is what gets compiled."""
        batch = given if ready else self.make_batch(given, ids)
        with self.precision.forward():
            return sum_logged_values(self.task.loss(self.model, batch))

    def backward(self, inputs: Inputs, form: Form, counts: dict[str, Tensor]) -> None:
        """Add a micro-batch's gradients, and its figures to the tail."""
        with allocation_errors_as_oom:
            if self.compiled is None:
                value = self.strategy.call(self.loss_value, *inputs, form.ready)
            else:
                value = self.compiled(form, *inputs, form.ready)
            if self.moment is not None:
                self.moment("backward")
            self.strategy.backward(self._objective(value, form.num_real, form.size, counts))

    def _objective(self, value: Any, num_real: int, size: int, counts: dict[str, Tensor]) -> Tensor:
        """This micro-batch's share of the objective; its figures go to the tail."""
        if self._plain is not None and isinstance(value, Tensor) and value.dim() == 0:  # the common case, by the shortest way
            self._slots[self._plain].add_(value.detach(), alpha=num_real)
            objective = value if num_real == size else value * (num_real / size)
        else:
            objective = self._objective_of_parts(value, num_real, size, counts)
        if not objective.requires_grad:
            raise Problem(
                "loss() gave a value without a gradient: it must depend on parameters that require one"
                " (no .item(), .detach() or torch.no_grad() on the way)"
            )
        return objective if self.loss_scale is None else objective * self.loss_scale.scale

    def _objective_of_parts(self, value: Any, num_real: int, size: int, counts: dict[str, Tensor]) -> Tensor:
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
                self._slots[figures.total[part.name]].add_(total, alpha=num_real)
                share = num_real / size
            else:
                counted = 1 if num_real else 0
                self._slots[figures.total[part.name]].add_(total, alpha=counted)
                self._slots[figures.count[part.name]].add_(part.count, alpha=counted)
                share = counted / size
            if place < len(parts):
                if part.name in counts:
                    term = part.value / counts[part.name] if num_real else part.value * 0.0
                else:
                    term = part.value if share == 1.0 else part.value * share
                objective = term if objective is None else objective + term
        assert objective is not None
        return objective

    def _agree_on_figures(self, parts: list[LossPart], logged: list[LossPart], counts: dict[str, Tensor]) -> Figures:
        figures = Figures(parts, logged)
        own = [p.name for p in parts if p.count is not None]
        if own and len(parts) > 1 and not self.has_counts:
            raise Problem(
                f"the loss has {len(parts)} parts and {', '.join(own)} has a count of its own: define counts(batch) ->"
                f" {{{', '.join(f'{n!r}: ...' for n in own)}}}, so that each is divided by its global count"
            )
        missing = [name for name in own if self.has_counts and name not in counts]
        unknown = [name for name in counts if name not in own]
        if missing or unknown:
            raise Problem(f"counts() gave {list(counts)}, but the parts of the loss with a count of their own are {own}")
        self.agree()
        everyone = self.group.gather_objects((figures.names, sorted(figures.count)))
        if any(other != everyone[0] for other in everyone):
            raise Problem(f"loss() gave other names on other processes: {everyone}; they must be the same in every batch")
        self.know(figures, Ledger(figures.used, self.group.device))
        return figures

    def know(self, figures: Figures, ledger: Ledger) -> None:
        """These are the figures of every step, and there they go."""
        self.figures = figures
        if figures.names == ["loss"] and not figures.count:
            self._plain = figures.total["loss"]
        self.ledger = ledger
        if self._tail is None:
            self._slots = self.ledger.slots(self.number)

    def _counts(self, batches: list[tuple[Any, int]], over_ranks: bool = True) -> dict[str, Tensor]:
        """What each part of the loss is divided by, over these micro-batches."""
        totals: dict[str, Tensor] = {}
        for batch, num_real in batches:
            for name, count in read_counts(self.task.counts(batch)).items():
                value = count.float() if isinstance(count, Tensor) else torch.full((), float(count), device=self.group.device)
                value = value.to(self.group.device) * (1.0 if num_real else 0.0)
                totals[name] = totals[name] + value if name in totals else value
        if totals and over_ranks and self.group.size > 1:
            packed = torch.stack(list(totals.values()))
            self.agree()
            self.group.all_reduce(packed)
            totals = dict(zip(totals, packed.unbind(0), strict=True))
        return {name: torch.where(total == 0, 1.0, total) for name, total in totals.items()}

    def _look_at_limits(self, size: int) -> Tensor:
        """Whether this step, or one before it in the epoch, passed a limit: the same on all ranks, and nothing waits for it."""
        figures = self.figures
        assert figures is not None
        for name, limit in self._limits.items():
            if name not in figures.names:
                raise Problem(f"the source's limits name {name!r}, which loss() does not give ({', '.join(figures.names)})")
            count = self._slots[figures.count[name]] if name in figures.count else size
            self._enough.copy_(torch.maximum(self._enough, (self._slots[figures.total[name]] > limit * count).float()))
        return self._enough

    def _update(self, size: int, counted: bool, with_norm: bool) -> None:
        """What gradients are multiplied by, then the update."""
        assert self.figures is not None
        if self._at is not None:
            self.rates.set_on_device(self._at)
        factor: Tensor | None = None
        if self.figures.count and not counted and self.figures.parts[0] in self.figures.count:
            count = self._slots[self.figures.count[self.figures.parts[0]]]
            factor = torch.where(count == 0, 0.0, size / count)
        if self.loss_scale is not None:
            factor = 1.0 / self.loss_scale.scale if factor is None else factor / self.loss_scale.scale
        enough = self._look_at_limits(size) if self._limits else None
        norm = self.strategy.update(factor, self._clip, with_norm, self.loss_scale is not None, enough)
        if norm is not None:
            self._slots[NORM].copy_(norm)
        if self.loss_scale is not None and norm is not None:
            self.loss_scale.update((~torch.isfinite(norm)).float())
            self._slots[SCALE].copy_(self.loss_scale.scale)
            self._slots[SKIPPED].copy_(self.loss_scale.skipped)
        if self._at is not None and self._tail is not None and self.ledger is not None:
            self.ledger.write(self._at, self._tail[: self.figures.used])
            self._at.add_(1)


def _told(micros: Iterator[MicroBatch], moment: Callable[[str], None]) -> Iterator[MicroBatch]:
    """The same, with a word before and after each wait for data."""
    while True:
        moment("fetch")
        micro = next(micros, None)
        moment("fetched")
        if micro is None:
            return
        yield micro
