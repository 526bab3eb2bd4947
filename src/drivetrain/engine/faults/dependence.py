"""Whether the result of a task depends on the plan: found on a few samples before the first step, told once.

The loss of a few samples must be the same whether they are one batch or two, weighted by their counts, and computing
it must leave nothing behind but the result. What is tried is put back: model, task, generators are as they were.
"""

from __future__ import annotations

import os
import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from drivetrain.engine.data.keyed_random import model_generator, seed_host, seed_model
from drivetrain.engine.fast.python_state import PLAIN_TYPES
from drivetrain.engine.faults.out_of_memory import undoable
from drivetrain.engine.faults.snapshot import Snapshot
from drivetrain.engine.numerics.losses import read_loss
from drivetrain.engine.step import Form, Inputs, Step

if TYPE_CHECKING:
    from drivetrain.engine.group import Group
    from drivetrain.engine.loop import Training

MANY, FEW = 16, 4  # samples it is tried on: at most, and at least where a batch has them
SLOW = 2.0  # seconds of a step, as the plan predicts it, from which on nothing is tried
SLOW_LOSS = 1.0  # seconds that the first loss took on some rank, from which on nothing more is tried
DRAWS, SMALL = 8, 5_000_000  # times that a loss with randomness is computed, and the parameters of a model for which that is cheap
SURE = 10.0  # standard errors that two means of random losses must be apart

Batch = Callable[[slice], Any]  # some of the samples as a batch
Means = dict[str, tuple[float, float | None]]  # part of the loss -> its mean over the samples, and its count if it has one


class Finding(NamedTuple):
    cause: str
    """count, sum, coupled or state."""
    text: str


class _Uncut(Exception):
    """A batch that cannot be parted by its samples."""


class Look:
    """Takes the place of a step's `pace` for the first micro-batch of a run."""

    def __init__(self, training: Training) -> None:
        self.training, self.pace = training, training.step.pace

    def __call__(self, seed: int, inputs: Inputs, form: Form) -> None:
        training = self.training
        training.step.pace = self.pace
        budget = _Budget(training.group)
        findings = find(training.step, seed, inputs, form, budget)
        budget.agree()
        training.observer.moment("fetched")  # a sign of life: what was tried may have taken its time
        for finding in findings:
            if training.group.is_main:
                training.run.log_event("depends-on-plan", cause=finding.cause, text=finding.text)
                training.observer.notice(finding.text)
        if self.pace is not None:
            self.pace(seed, inputs, form)


def check_dependence(training: Training, always: bool = False) -> None:
    """Have the first step look whether the result depends on the plan: where this plan cuts its batches, or always.

    All ranks compute the loss equally often, for some losses talk to each other.
    """
    plan = training.plan
    cheap = plan.predicted.get("step_seconds", 0.0) <= SLOW
    if (always or plan.micro_batch < plan.global_batch) and cheap and undoable(plan, training.model):
        training.step.pace = Look(training)


class _Budget:
    """Whether the loss is cheap enough to be tried more than once: agreed on by all ranks, each of which asks once."""

    def __init__(self, group: Group) -> None:
        self.group, self.agreed = group, False

    def agree(self, seconds: float = 0.0) -> bool:
        """Whether the first loss was fast on every rank; a rank that tried none takes part all the same."""
        if self.agreed:
            return True
        self.agreed = True
        return self.group.sum_on_hosts([float(seconds > SLOW_LOSS)]) == [0.0]


def find(step: Step, seed: int, inputs: Inputs, form: Form, budget: _Budget) -> list[Finding]:
    """What depends on the plan; nothing where that cannot be found out without a trace."""
    try:
        samples, batch = _samples(step, inputs, form)
    except _Uncut:
        return []
    if samples < 2:
        return []
    generators = _generators(step.group.device)
    with _undisturbed(step.model), _unheard():
        before = Snapshot(step.task, step.model)
        if not before.complete:
            return []
        try:
            return _Trial(step, before, batch, samples, seed).findings(budget)
        except Exception:
            return []  # a loss that fails will do so again in the step, where it is told
        finally:
            before.restore()
            for put_back, state in generators:
                put_back(state)


class _Trial:
    def __init__(self, step: Step, before: Snapshot, batch: Batch, samples: int, seed: int) -> None:
        self.step, self.before, self.batch, self.samples, self.seed = step, before, batch, samples, seed
        self.sums: dict[str, list[float]] = {}
        """Of each part without a count: the two batches' values, added up each time."""
        self.first = max(1, samples * 3 // 8)  # uneven, so that parts which are weighted wrongly show
        floats = [p.dtype for p in step.model.parameters() if p.is_floating_point()]
        self.exact = all(dtype in (torch.float32, torch.float64) for dtype in floats)
        self.tolerance = 5e-2 if not self.exact else 2e-3 if step.group.device.type == "cpu" else 1e-2

    def findings(self, budget: _Budget) -> list[Finding]:
        began = time.monotonic()
        whole = self._compute(self.seed, slice(None))
        if not budget.agree(time.monotonic() - began):
            return []
        changed = self.before.changed()
        again = self._compute(self.seed, slice(None)) if changed else whole
        self.before.restore()
        found = self._state(changed, matters=not _alike(whole, again, 1e-4))
        other = self._whole(self.seed ^ 1)
        pieces = self._parts(self.seed)
        judged = self._counts(whole, other, pieces)
        if not judged and _alike(whole, other, 1e-6):
            judged = self._means([whole], [pieces])
        elif not judged and sum(p.numel() for p in self.step.model.parameters()) <= SMALL:
            seeds = [self.seed ^ number for number in range(2, DRAWS)]
            judged = self._means([whole, other, *map(self._whole, seeds)], [pieces, *map(self._parts, [self.seed ^ 1, *seeds])])
        return judged + found

    # --- computing ---

    def _compute(self, seed: int, part: slice) -> Means:
        """The loss of some samples; what it changes stays changed."""
        device = self.step.group.device
        seed_model(device, seed)
        seed_host(seed)
        if device.type != "cpu":
            torch.default_generator.manual_seed(seed)
        batch = self.batch(part)
        if self.exact:  # in the weights' own format, where rounding is no excuse
            value = self.step.strategy.call(self.step.task.loss, self.step.model, batch)
        else:
            with self.step.precision.forward():
                value = self.step.strategy.call(self.step.task.loss, self.step.model, batch)
        parts, _ = read_loss(value)
        return {p.name: (float(p.value.detach()), None if p.count is None else float(p.count)) for p in parts}

    def _whole(self, seed: int) -> Means:
        try:
            return self._compute(seed, slice(None))
        finally:
            self.before.restore()

    def _parts(self, seed: int) -> Means:
        """The same samples as two batches, put together as the engine puts micro-batches together."""
        means: list[Means] = []
        for part in (slice(None, self.first), slice(self.first, None)):
            try:
                means.append(self._compute(seed, part))
            finally:
                self.before.restore()
        one, two = means
        joined: Means = {}
        for name, (value, count) in one.items():
            other, others = two[name]
            if count is None or others is None:
                joined[name] = (value * self.first + other * (self.samples - self.first)) / self.samples, None
                self.sums.setdefault(name, []).append(value + other)
            else:
                joined[name] = value + other, count + others
        return joined

    # --- judging ---

    def _counts(self, whole: Means, other: Means, pieces: Means) -> list[Finding]:
        for name, (_, count) in whole.items():
            parted, again = pieces[name][1], other[name][1]
            if count is None or parted is None or count != again or abs(count - parted) <= 1e-3 * abs(count):
                continue
            which = "" if name == "loss" else f" of {name!r}"
            return [Finding("count", (
                f"loss() gives the count{which} {count:g} for {self.samples} samples as one batch, {parted:g} as two: a count must be the"
                f" batch's own (its samples or tokens), or the loss is divided by the number of micro-batches and processes"
            ))]  # fmt: skip
        return []

    def _means(self, wholes: list[Means], pieces: list[Means]) -> list[Finding]:
        """Compare means: one of each where there is no randomness, else many, with room for chance."""
        scale = max(abs(_mean(*value)) for means in (*wholes, *pieces) for value in means.values())
        for name in wholes[0]:
            ones, twos = ([_mean(*means[name]) for means in many] for many in (wholes, pieces))
            one, two = statistics.fmean(ones), statistics.fmean(twos)
            room = self.tolerance * max(abs(one), abs(two), scale / 100)
            if len(ones) > 1:
                apart = statistics.stdev([a - b for a, b in zip(ones, twos, strict=True)])
                room = max(room, 0.1 * max(abs(one), abs(two)), SURE * apart / len(ones) ** 0.5)
            if abs(one - two) > room:
                return [self._apart(name, one, two)]
        return []

    def _apart(self, name: str, whole: float, parted: float) -> Finding:
        which = "the loss" if name == "loss" else f"the loss's part {name!r}"
        seen = f"{which} of {self.samples} samples is {whole:.4g} as one batch, {parted:.4g} as two"
        if name in self.sums and abs(statistics.fmean(self.sums[name]) - whole) <= self.tolerance * abs(whole):
            return Finding("sum", f"{seen}: it looks like a sum; return the mean over the samples, or (total, count)")
        return Finding("coupled", (
            f"{seen}: it couples the samples of a batch (in-batch negatives, a statistic of the batch), or is a mean over something else"
            f" than samples (tokens: return (total, count)); so the result depends on the plan's micro-batch"
        ))  # fmt: skip

    def _state(self, changed: set[str], matters: bool) -> list[Finding]:
        """What the loss writes: into the model's own tensors, or elsewhere, if its next value depends on that."""
        names = sorted(changed & self.before.state) or (sorted(changed) if matters else [])
        if not names:
            return []
        told = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        return [Finding("state", (
            f"loss() changes {told} each time it is called: that is once a micro-batch and on each process by itself, not once a step,"
            f" so the result depends on the plan"
        ))]  # fmt: skip


def _mean(value: float, count: float | None) -> float:
    return value if count is None else value / count if count else 0.0


def _alike(one: Means, two: Means, tolerance: float) -> bool:
    pairs = [(_mean(*one[name]), _mean(*two[name])) for name in one]
    scale = max((abs(a) for a, _ in pairs), default=0.0)
    return all(abs(a - b) <= tolerance * max(abs(a), scale / 100) or a != a for a, b in pairs)


# --- a few samples, as batches -----------------------------------------------------------------


def _samples(step: Step, inputs: Inputs, form: Form) -> tuple[int, Batch]:
    """How many samples it is tried on, and what makes a batch of some of them."""
    given, ids = inputs
    share = form.size // step.group.size
    if step.feed.is_resident:  # any rows can be a batch
        epoch, index = divmod(step.number, step.feed.steps_per_epoch)
        mine = [micro.ids for micro in step.feed.micro_batches(epoch, index) if micro.num_real]
        count = min(share, MANY, max(FEW, share // 4))
        rows = torch.cat(mine)[:count] if mine else ids[:0]
        return len(rows), lambda part: step.make_batch(None, rows[part])
    count = min(len(ids), MANY, max(FEW, share // 4))
    _rows(given, slice(0, 1), len(ids))

    def batch(part: slice) -> Any:
        rows = _rows(_rows(given, slice(0, count), len(ids)), part, count)
        return rows if form.ready else step.make_batch(rows, ids[:count][part])

    return count if len(ids) >= FEW else 0, batch


def _rows(batch: Any, part: slice, samples: int) -> Any:
    """Some samples of a batch that a loader made; raises where it does not say what belongs to which sample."""
    if isinstance(batch, Tensor):
        if batch.dim() == 0 or len(batch) != samples or batch.layout is not torch.strided:
            raise _Uncut
        return batch[part].clone()
    if isinstance(batch, dict):
        return {key: _rows(value, part, samples) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        if len(batch) == samples and all(isinstance(item, PLAIN_TYPES) for item in batch):
            return batch[part]
        items = [_rows(item, part, samples) for item in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    if batch is None or isinstance(batch, str):
        return batch
    raise _Uncut


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Layers of torch's own draw no dropout, and BatchNorm, of which users are told anyway, uses what it has learned."""
    calm = [
        m for m in model.modules()
        if m.training and (type(m).__module__.startswith("torch.nn.") or isinstance(m, nn.modules.batchnorm._BatchNorm))
    ]  # fmt: skip
    for module in calm:
        module.training = False
    try:
        yield
    finally:
        for module in calm:
            module.training = True


@contextmanager
def _unheard() -> Iterator[None]:
    """What the loss prints, or is warned of, is for the steps that count."""
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _generators(device: torch.device) -> list[tuple[Callable[[Any], object], Any]]:
    """What puts each generator back, and its state."""
    chosen = [torch.default_generator] if device.type == "cpu" else [torch.default_generator, model_generator(device)]
    states: list[tuple[Callable[[Any], object], Any]] = [(random.setstate, random.getstate()), (np.random.set_state, np.random.get_state())]
    return states + [(generator.set_state, generator.get_state()) for generator in chosen]
