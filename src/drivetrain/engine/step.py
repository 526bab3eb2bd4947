"""One optimizer step over a global batch: the same result with every plan, without a host sync (unless an optimizer needs one).

A step consists of pieces of device work that depend on the step's number only through tensors. If one process takes the
batch as one micro-batch, all of the step is one piece. Otherwise each micro-batch is a piece, and so is the update, with
the all-reduce before it. `Graphs` replays a piece as a CUDA graph; without graphs, the piece is called as a function.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from drivetrain.engine.data.feed import Feed, MicroBatch
from drivetrain.engine.data.keyed_random import HostRandom, key, model_generator
from drivetrain.engine.data.make_feed import augment_batch, augment_rand
from drivetrain.engine.fast.compiled import Compiled
from drivetrain.engine.fast.graphs import Graphs, form_of
from drivetrain.engine.faults.out_of_memory import BufferBackup, OutOfMemoryOnRanks
from drivetrain.engine.group import Group
from drivetrain.engine.group.requests import Requests, SupportsBool
from drivetrain.engine.log.observe import observe_fetches
from drivetrain.engine.log.ring import MetricRing
from drivetrain.engine.log.slots import FIRST_METRIC, FIRST_REQUEST, MetricSlots
from drivetrain.engine.measure.memory import allocation_errors_as_oom
from drivetrain.engine.numerics.losses import sum_logged_values
from drivetrain.engine.numerics.optim import LearningRates, is_capturable, prepare_for_skipped_steps
from drivetrain.engine.numerics.precision import LossScale, Precision
from drivetrain.engine.objective import Objective
from drivetrain.engine.strategies import Strategy
from drivetrain.task import Task

CHECK_HOST_RANDOM_EVERY = 1000  # steps between checks whether a task draws from Python's or numpy's generators

Inputs = tuple[Any, Any]  # (what the data set returned, sample ids)


class Form(NamedTuple):
    """What is fixed about a micro-batch: two of one form differ in the values of tensors only."""

    num_real: int
    """Samples of the micro-batch; 0 for a dummy one that keeps collectives aligned."""
    size: int
    """Samples of the global batch."""
    is_assembled: bool
    """Whether the inputs are the batch itself, assembled and augmented."""
    layout: Hashable
    """The form of what the data set returned (`graphs.form_of`)."""
    version: int
    """Changes when the samples on the device move to other memory."""


MicroBatchHook = Callable[[int, Inputs, Form], None]


class Step:
    """Takes optimizer steps: forward and backward of the micro-batches, all-reduce, update."""

    def __init__(
        self, task: Task, model: nn.Module, feed: Feed, strategy: Strategy,
        rates: LearningRates, precision: Precision, group: Group,
    ) -> None:  # fmt: skip
        self.task, self.model, self.feed, self.strategy = task, model, feed, strategy
        self.optimizer, self.rates, self.precision, self.group = strategy.optimizer, rates, precision, group
        self.loss_scale = LossScale(group.device) if precision.name == "fp16" else None
        self.loss: Callable[[Any, Any], Any] = task.loss
        self.objective = Objective(task, feed, self.loss_scale, group, self.raise_if_any_rank_is_out_of_memory)
        self.objective.on_new_slots = self._make_ring
        if self.loss_scale is not None or self.objective.limits:
            prepare_for_skipped_steps(strategy.optimizer)
        self.ring: MetricRing | None = None
        """Where the metrics of steps are written; None before the first loss."""
        self.requests = Requests()
        """What this rank requests of all ranks with the gradients of the next step."""
        self.stop: SupportsBool = False
        """Read once more just before the requests are all-reduced."""
        self.graphs: Graphs | None = None
        """Replays pieces of the step; None calls them."""
        self.compiled: Compiled | None = None
        self.micro_batch_hooks: list[MicroBatchHook] = []
        """Called before each micro-batch with its seed, inputs and form."""
        self.sample_hooks: list[Callable[[int, list[int]], None]] = []
        """Called with the step's number and this rank's sample ids, after its last micro-batch was fetched."""
        self.update_hooks: list[Callable[[], None]] = []
        """Called before each update, when gradients are complete; not where a CUDA graph replays the update."""
        self.reached: Callable[[str], None] | None = None
        """Called with each observation point within a step; None if no observer needs them."""
        self.can_undo = True
        """Whether a step that runs out of memory can be undone, on all ranks together."""
        self.host_random = HostRandom(group.device)
        self.number = 0
        """The present step, from 0."""
        self._buffers = BufferBackup(model)
        self._is_updating = False
        self._seed, self._generator = key(int(task.seed)), model_generator(group.device)
        self._clip = float(task.clip)
        self._augment_rand = augment_rand(task, feed, group.device)
        self._device_number = torch.zeros(1, dtype=torch.int64, device=group.device) if group.device_counters else None
        """The step's number on the device, where captured work reads it."""
        self._next_device_number = 0
        self.use_strategy(strategy)

    @property
    def slots(self) -> MetricSlots | None:
        return self.objective.slots

    def use_strategy(self, strategy: Strategy) -> None:
        """Sets the strategy, and drops graphs and compiled code of the strategy and micro-batches before."""
        self.restore_eager_blocks()
        self.graphs = self.compiled = None
        self.strategy, self._piggyback = strategy, strategy.piggyback
        self.objective.row = () if self._piggyback is None else self._piggyback.unbind(0)
        self._finds_ids_on_device = (
            self._device_number is not None and strategy.is_one_piece and self.feed.sample_ids_on_device(self._device_number, 1) is not None
        )

    def use_metrics(self, slots: MetricSlots, ring: MetricRing) -> None:
        """Sets the metrics of every step and the ring to which they are written."""
        self.objective.on_new_slots = lambda slots: None
        self.objective.use(slots)
        self._use_ring(ring)

    def _make_ring(self, slots: MetricSlots) -> None:
        self._use_ring(MetricRing(slots.num_used, self.group.device))

    def _use_ring(self, ring: MetricRing) -> None:
        self.ring = ring
        if self._piggyback is None:
            self.objective.row = ring.slots(self.number)

    def observe_loss(self, before: Callable[[Any], None], after: Callable[[Any], None]) -> None:
        """Calls `before(batch)` and `after(value)` around each loss of the training."""
        loss = self.loss

        def observed(model: nn.Module, batch: Any) -> Any:
            before(batch)
            value = loss(model, batch)
            after(value)
            return value

        self.loss = observed

    # --- a step ---

    def __call__(self, step: int, with_norm: bool = True) -> None:
        """Takes step number `step` (from 0); its metrics are written into the ring."""
        epoch, index = divmod(step, self.feed.steps_per_epoch)
        self._begin_step(step, epoch, index)
        size = self.feed.batch_size(index)
        step_kind = size, with_norm, self.feed.data_version
        num_eager_before = 0 if self.graphs is None else self.graphs.num_eager
        if self.graphs is not None and self.graphs.only_replayed(step_kind):
            self._buffers.skip()
        else:
            self._buffers.take()
        if self.reached is not None:
            self.reached("take")
        micros = self._micro_batches(epoch, index)
        if self.strategy.is_one_piece:
            self._run_as_one_piece(micros, size, with_norm)
        else:
            self._run_by_micro_batch(micros, size, with_norm)
        if self.graphs is not None:
            self.graphs.note_step(step_kind, num_eager_before)
        self._next_device_number = step + 1
        if self.reached is not None:
            self.reached("taken")
        assert self.ring is not None and self.slots is not None
        self.ring.commit(
            step, None if self._piggyback is None or self._device_number is not None else self._piggyback[: self.slots.num_used]
        )

    def _begin_step(self, step: int, epoch: int, index: int) -> None:
        self.number = step
        self._is_updating = False
        self.rates.set(step)
        if self._device_number is not None and self._next_device_number != step:
            self._device_number.fill_(step)
        if self._augment_rand is not None:
            self._augment_rand.begin_epoch(epoch)
        if index == 0:
            self.objective.begin_epoch()
        if self._piggyback is None and self.ring is not None:
            self.objective.row = self.ring.slots(step)

    def _micro_batches(self, epoch: int, index: int) -> Iterator[MicroBatch]:
        micros = self.feed.micro_batches(epoch, index)
        if self.sample_hooks:
            micros = self._report_samples(micros)
        if self.reached is None:
            return micros
        if self.feed.is_resident:
            self.reached("fetched")  # data on the device needs no wait
            return micros
        return observe_fetches(micros, self.reached)

    def _report_samples(self, micros: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        sample_ids: list[int] = []
        for micro in micros:
            sample_ids += micro.ids[: micro.num_real].tolist()
            yield micro
        for hook in self.sample_hooks:
            hook(self.number, sample_ids)

    def _run_as_one_piece(self, micros: Iterator[MicroBatch], size: int, with_norm: bool) -> None:
        """One process, one micro-batch: all of the step is one piece."""
        try:
            [micro] = micros
            inputs, form = (micro.loaded, micro.ids), Form(micro.num_real, size, False, form_of(micro.loaded), self.feed.data_version)
            self._begin_micro_batch(micro.position, inputs, form)
            if self.graphs is not None:
                graph_inputs = (None, None) if self._finds_ids_on_device else inputs
                self.graphs(("step", form, with_norm), self._whole_step, graph_inputs, form, with_norm)
            else:
                self._whole_step(inputs, form, with_norm)
            self.host_random.end()
            return
        except torch.OutOfMemoryError:
            if self._is_updating or not self.can_undo:
                raise
        self.raise_if_any_rank_is_out_of_memory(is_out_of_memory=True)  # after the except clause, whose traceback holds the memory

    def _whole_step(self, inputs: Inputs, form: Form, with_norm: bool) -> None:
        if self._finds_ids_on_device and self._device_number is not None:
            inputs = inputs[0], self.feed.sample_ids_on_device(self._device_number, form.num_real)
        self.strategy.zero_gradients()
        counts: dict[str, Tensor] = {}
        if self.objective.has_counts:
            batch = self.make_batch(*inputs)
            counts = self.objective.counts([(batch, form.num_real)])
            inputs, form = (batch, inputs[1]), form._replace(is_assembled=True)
        self.backward(inputs, form, counts)
        self.strategy.reduce_gradients()
        self._begin_update()
        self._update(form.size, bool(counts), with_norm)

    def _run_by_micro_batch(self, micros: Iterator[MicroBatch], size: int, with_norm: bool) -> None:
        counts: dict[str, Tensor] = {}
        is_out_of_memory = False
        try:
            counts = self._take_micro_batches(micros, size)
        except torch.OutOfMemoryError:
            if not self.can_undo:
                raise
            is_out_of_memory = True
        if self.reached is not None:
            self.reached("reduce")
        self.raise_if_any_rank_is_out_of_memory(is_out_of_memory)
        self.requests.stop |= bool(self.stop)
        for slot, is_requested in enumerate(self.requests, FIRST_REQUEST):
            if is_requested:
                self.objective.row[slot].fill_(1.0)
        self.strategy.reduce_gradients()
        self._begin_update()
        if self.graphs is not None and is_capturable(self.optimizer, self.loss_scale is not None):
            self.graphs(("update", size, bool(counts), with_norm), self._captured_update, (), size, bool(counts), with_norm)
        else:
            self._update(size, bool(counts), with_norm)

    def _take_micro_batches(self, micros: Iterator[MicroBatch], size: int) -> dict[str, Tensor]:
        """Runs forward and backward of all micro-batches; returns the counts that losses were divided by."""
        self.strategy.zero_gradients()
        has_counts, counts = self.objective.has_counts, dict[str, Tensor]()
        if has_counts:  # the counts of all batches are needed before the first backward
            assembled = [(m._replace(loaded=self.make_batch(m.loaded, m.ids)), m.num_real) for m in micros]
            counts = self.objective.counts([(m.loaded, num_real) for m, num_real in assembled])
            micros = iter([m for m, _ in assembled])
        for micro in micros:
            inputs, form = (micro.loaded, micro.ids), Form(micro.num_real, size, has_counts, form_of(micro.loaded), self.feed.data_version)
            self._begin_micro_batch(micro.position, inputs, form)
            if self.graphs is not None:
                self.graphs(("micro", form), self._captured_micro_batch, (*inputs, counts), form)
            else:
                self.backward(inputs, form, counts)
        self.host_random.end()
        return counts

    def _captured_micro_batch(self, inputs: tuple[Any, Tensor, dict[str, Tensor]], form: Form) -> None:
        loaded, ids, counts = inputs
        self.backward((loaded, ids), form, counts)

    def _captured_update(self, _: Any, size: int, has_counts: bool, with_norm: bool) -> None:
        self._update(size, has_counts, with_norm)

    def _begin_micro_batch(self, position: int, inputs: Inputs, form: Form) -> None:
        """Seeds the model's own randomness for a micro-batch."""
        seed = key(self.number, position, after=self._seed)
        for hook in tuple(self.micro_batch_hooks):
            hook(seed, inputs, form)
        self._generator.manual_seed(seed)
        if self.graphs is None:  # a task that draws on the host is never captured
            self.host_random.begin(seed, check=self.number % CHECK_HOST_RANDOM_EVERY == 0)

    def _begin_update(self) -> None:
        self._is_updating = True  # from here on a step cannot be undone
        if self.reached is not None:
            self.reached("update")
        for hook in self.update_hooks:
            hook()

    def _update(self, size: int, has_counts: bool, with_norm: bool) -> None:
        """Scales and clips the gradients and takes the optimizer's step."""
        assert self.slots is not None
        if self._device_number is not None:
            self.rates.set_on_device(self._device_number)
        factor, limit_passed = self.objective.gradient_factor(size, has_counts), self.objective.limit_passed(size)
        norm = self.strategy.update(factor, self._clip, with_norm, self.loss_scale is not None, limit_passed)
        self.objective.finish_row(norm)
        if self._device_number is not None and self._piggyback is not None and self.ring is not None:
            self.ring.write(self._device_number, self._piggyback[: self.slots.num_used])
            self._device_number.add_(1)

    # --- forward and backward ---

    def make_batch(self, loaded: Any, ids: Tensor) -> Any:
        """Assembles a batch on the device and augments it."""
        batch = self.feed.assemble(loaded, ids)
        return batch if self._augment_rand is None else augment_batch(self.task, batch, self._augment_rand.for_samples(ids))

    def loss_value(self, loaded: Any, ids: Tensor, is_assembled: bool) -> Any:
        """Returns the value of the task's loss for a micro-batch; torch.compile compiles this function."""
        batch = loaded if is_assembled else self.make_batch(loaded, ids)
        with self.precision.forward():
            return sum_logged_values(self.loss(self.model, batch))

    def backward(self, inputs: Inputs, form: Form, counts: dict[str, Tensor]) -> None:
        """Adds a micro-batch's gradients, and its metrics to the row."""
        with allocation_errors_as_oom:
            if self.compiled is None:
                value = self.strategy.call(self.loss_value, *inputs, form.is_assembled)
            else:
                value = self.compiled(form, *inputs, form.is_assembled)
            if self.reached is not None:
                self.reached("backward")
            self.strategy.backward(self.objective.share(value, form.num_real, form.size, counts))

    # --- out of memory ---

    def raise_if_any_rank_is_out_of_memory(self, is_out_of_memory: bool = False) -> None:
        """Call before ranks communicate within a step: raises on all ranks if memory ran out on any of them."""
        if not self.can_undo or (self.group.size == 1 and not is_out_of_memory):
            return
        own = [float(is_out_of_memory and rank == self.group.rank) for rank in range(self.group.size)]
        *flags, num_unknown = self.group.sum_on_hosts([*own, float(not self._buffers.is_current)])
        ranks = [rank for rank, flag in enumerate(flags) if flag]
        if ranks:
            raise OutOfMemoryOnRanks(ranks, can_undo=not num_unknown)

    def undo(self) -> None:
        """Restores everything to the state before the present step."""
        self._buffers.restore()
        self.clear()

    # --- rehearsal: forward and backward without an update ---

    def rehearse(self, inputs: Inputs, form: Form) -> None:
        """Runs forward and backward of one micro-batch, without an update."""
        reached, self.reached = self.reached, None
        try:
            self._rehearse(inputs, form)
        finally:
            self.reached = reached

    def _rehearse(self, inputs: Inputs, form: Form) -> None:
        self.clear()
        counts: dict[str, Tensor] = {}
        if self.objective.has_counts:
            batch = inputs[0] if form.is_assembled else self.make_batch(*inputs)
            counts = self.objective.counts([(batch, form.num_real)], over_ranks=False)
            inputs, form = (batch, inputs[1]), form._replace(is_assembled=True)
        self.backward(inputs, form, counts)
        if self.strategy.is_one_piece:
            self.strategy.reduce_gradients()  # with one process, it only makes missing gradients

    def rehearsal_result(self) -> list[float]:
        """Returns the results of a rehearsal: all metrics, and the norm of each parameter's gradient."""
        assert self.slots is not None
        metrics = [slot.detach() for slot in self.objective.row[FIRST_METRIC : self.slots.num_used]]
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        return [float(value) for value in (*metrics, *torch._foreach_norm(gradients))]

    def restore_eager_blocks(self) -> None:
        """Call before other code uses the model: switches its blocks to eager code."""
        if self.compiled is not None:
            self.compiled.set_enabled(False)

    def clear(self) -> None:
        """Sets gradients and metrics to zero."""
        self.strategy.zero_gradients()
        if self._piggyback is None:
            for slot in self.objective.row:
                slot.zero_()
