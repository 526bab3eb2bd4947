"""Checks on a few samples, before the first step, whether a task's result depends on the plan; reports it once.

The loss of a few samples must be the same as one batch and as two, weighted by their counts, and computing it must
change nothing else. Afterwards model, task and generators are restored.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from drivetrain.engine.data.keyed_random import model_generator, seed_host, seed_model
from drivetrain.engine.execution import Execution
from drivetrain.engine.fast.python_state import PLAIN_TYPES
from drivetrain.engine.faults.out_of_memory import can_undo_steps
from drivetrain.engine.faults.snapshot import Snapshot
from drivetrain.engine.group import Group
from drivetrain.engine.numerics.losses import read_loss
from drivetrain.engine.setup import Setup
from drivetrain.engine.step import Form, Inputs, Step

MAX_SAMPLES = 16  # samples that are checked
MIN_SAMPLES = 4  # samples that are checked, unless the batch has fewer
MAX_STEP_SECONDS = 2.0  # predicted; a task with slower steps is not checked
MAX_LOSS_SECONDS = 1.0  # if the first loss takes longer on any rank, the check ends
NUM_DRAWS = 8  # seeds with which a random loss is computed
MAX_PARAMETERS_TO_DRAW = 5_000_000  # of a model whose random loss is computed so often
MIN_STANDARD_ERRORS = 10.0  # between the means of random losses that count as different

MakeBatch = Callable[[slice], Any]
"""Returns a batch of the samples in the slice."""
Losses = dict[str, tuple[float, float | None]]
"""Name of a loss's part -> (value, count); the count is None for a mean over samples."""


class Cause(StrEnum):
    """Why the result depends on the plan; the values stand in events.jsonl."""

    COUNT = "count"
    SUM = "sum"
    COUPLED = "coupled"
    STATE = "state"


class Finding(NamedTuple):
    """One way in which the result depends on the plan, with a text for the user."""

    cause: Cause
    text: str


class _NotSeparable(Exception):
    """A batch cannot be split into its samples."""


class DependenceCheck:
    """Runs before the first micro-batch of a run: a hook of the step that removes itself."""

    def __init__(self, setup: Setup, step: Step) -> None:
        self.setup, self.step = setup, step

    def __call__(self, seed: int, inputs: Inputs, form: Form) -> None:
        setup = self.setup
        self.step.micro_batch_hooks.remove(self)
        agreement = _SpeedAgreement(setup.group)
        findings = find_dependence(self.step, seed, inputs, form, agreement)
        agreement.is_fast_everywhere()
        setup.observer.reached("fetched")  # a sign of life, because the check may have taken long
        for finding in findings:
            if setup.group.is_main:
                setup.run.log_event("depends-on-plan", cause=finding.cause, text=finding.text)
                setup.observer.notice(finding.text)


def check_dependence(setup: Setup, execution: Execution, always: bool = False) -> None:
    """Makes the first step check whether the result depends on the plan, if this plan splits batches or with `always`.

    All ranks compute the loss the same number of times, because some losses use collectives.
    """
    plan = execution.plan
    is_cheap = plan.predicted.get("step_seconds", 0.0) <= MAX_STEP_SECONDS
    if (always or plan.micro_batch < plan.global_batch) and is_cheap and can_undo_steps(plan, setup.model):
        execution.step.micro_batch_hooks.insert(0, DependenceCheck(setup, execution.step))


class _SpeedAgreement:
    """Lets all ranks agree once, by an all-reduce, whether the loss is fast enough to be computed more than once."""

    def __init__(self, group: Group) -> None:
        self.group, self._has_agreed = group, False

    def is_fast_everywhere(self, seconds: float = 0.0) -> bool:
        """Returns whether the first loss was fast on every rank: a collective call the first time. A rank without a loss passes 0 seconds."""
        if self._has_agreed:
            return True
        self._has_agreed = True
        num_slow_ranks = self.group.sum_on_hosts([float(seconds > MAX_LOSS_SECONDS)])
        return num_slow_ranks == [0.0]


def find_dependence(step: Step, seed: int, inputs: Inputs, form: Form, agreement: _SpeedAgreement) -> list[Finding]:
    """Returns how the result depends on the plan; an empty list also where a check would leave side effects."""
    try:
        num_samples, make_batch = _samples_to_check(step, inputs, form)
    except _NotSeparable:
        return []
    if num_samples < 2:
        return []
    generators = _generator_states(step.group.device)
    with _without_dropout(step.model), _without_output():
        before = Snapshot(step.task, step.model)
        if not before.is_complete:
            return []
        try:
            return _Comparison(step, before, make_batch, num_samples, seed).findings(agreement)
        except Exception:
            return []  # the step will raise the same error and report it
        finally:
            before.restore()
            for set_state, state in generators:
                set_state(state)


class _Comparison:
    """Computes the loss of the same samples as one batch and as two, and compares."""

    def __init__(self, step: Step, before: Snapshot, make_batch: MakeBatch, num_samples: int, seed: int) -> None:
        self.step, self.before, self.make_batch, self.num_samples, self.seed = step, before, make_batch, num_samples, seed
        self.sums: dict[str, list[float]] = {}
        """Part without a count -> the sum of its values in the two batches, once for each seed."""
        self.num_first = max(1, num_samples * 3 // 8)  # samples in the first of two batches; unequal sizes reveal wrong weights
        dtypes = [p.dtype for p in step.model.parameters() if p.is_floating_point()]
        self.is_full_precision = all(dtype in (torch.float32, torch.float64) for dtype in dtypes)
        if not self.is_full_precision:
            self.tolerance = 5e-2
        else:
            self.tolerance = 2e-3 if step.group.device.type == "cpu" else 1e-2

    def findings(self, agreement: _SpeedAgreement) -> list[Finding]:
        start = time.monotonic()
        one_batch = self._compute(self.seed, slice(None))
        if not agreement.is_fast_everywhere(time.monotonic() - start):
            return []
        changed = self.before.changed()
        repeated = self._compute(self.seed, slice(None)) if changed else one_batch
        self.before.restore()
        state_findings = self._check_state(changed, changes_loss=not _are_close(one_batch, repeated, 1e-4))
        other_seed = self._as_one_batch(self.seed ^ 1)
        two_batches = self._as_two_batches(self.seed)
        findings = self._check_counts(one_batch, other_seed, two_batches)
        is_random = not _are_close(one_batch, other_seed, 1e-6)
        if not findings and not is_random:
            findings = self._check_means([one_batch], [two_batches])
        elif not findings and sum(p.numel() for p in self.step.model.parameters()) <= MAX_PARAMETERS_TO_DRAW:
            more_seeds = [self.seed ^ number for number in range(2, NUM_DRAWS)]
            as_one = [one_batch, other_seed, *map(self._as_one_batch, more_seeds)]
            as_two = [two_batches, *map(self._as_two_batches, [self.seed ^ 1, *more_seeds])]
            findings = self._check_means(as_one, as_two)
        return findings + state_findings

    # --- computing ---

    def _compute(self, seed: int, part: slice) -> Losses:
        """Returns the loss of some samples; its side effects are not undone."""
        device = self.step.group.device
        seed_model(device, seed)
        seed_host(seed)
        if device.type != "cpu":
            torch.default_generator.manual_seed(seed)
        batch = self.make_batch(part)
        if self.is_full_precision:  # without autocast, whose rounding could hide a difference
            value = self.step.strategy.call(self.step.loss, self.step.model, batch)
        else:
            with self.step.precision.forward():
                value = self.step.strategy.call(self.step.loss, self.step.model, batch)
        parts, _ = read_loss(value)
        return {p.name: (float(p.value.detach()), None if p.count is None else float(p.count)) for p in parts}

    def _as_one_batch(self, seed: int) -> Losses:
        try:
            return self._compute(seed, slice(None))
        finally:
            self.before.restore()

    def _as_two_batches(self, seed: int) -> Losses:
        """Returns the loss of the same samples as two batches, joined as the engine joins micro-batches."""
        losses: list[Losses] = []
        for part in (slice(None, self.num_first), slice(self.num_first, None)):
            try:
                losses.append(self._compute(seed, part))
            finally:
                self.before.restore()
        first, second = losses
        num_second = self.num_samples - self.num_first
        joined: Losses = {}
        for name, (value, count) in first.items():
            second_value, second_count = second[name]
            if count is None or second_count is None:
                joined[name] = (value * self.num_first + second_value * num_second) / self.num_samples, None
                self.sums.setdefault(name, []).append(value + second_value)
            else:
                joined[name] = value + second_value, count + second_count
        return joined

    # --- comparing ---

    def _check_counts(self, one_batch: Losses, other_seed: Losses, two_batches: Losses) -> list[Finding]:
        """Reports a count that is not the same in total when the batch is split; random counts are not compared."""
        for name, (_, count) in one_batch.items():
            split_count, repeated_count = two_batches[name][1], other_seed[name][1]
            if count is None or split_count is None or count != repeated_count:
                continue
            if abs(count - split_count) <= 1e-3 * abs(count):
                continue
            part = "" if name == "loss" else f" of {name!r}"
            return [Finding(Cause.COUNT, (
                f"loss() gives the count{part} {count:g} for {self.num_samples} samples as one batch, {split_count:g} as two: a count must be the"
                f" batch's own (its samples or tokens), or the loss is divided by the number of micro-batches and processes"
            ))]  # fmt: skip
        return []

    def _check_means(self, as_one: list[Losses], as_two: list[Losses]) -> list[Finding]:
        """Reports a mean that changes when the batch is split. Random losses have one value for each seed, and a wider tolerance."""
        scale = max(abs(_mean(*value)) for losses in (*as_one, *as_two) for value in losses.values())
        for name in as_one[0]:
            one_means = [_mean(*losses[name]) for losses in as_one]
            two_means = [_mean(*losses[name]) for losses in as_two]
            one, two = statistics.fmean(one_means), statistics.fmean(two_means)
            magnitude = max(abs(one), abs(two))
            tolerance = self.tolerance * max(magnitude, scale / 100)
            if len(one_means) > 1:
                deviation = statistics.stdev([a - b for a, b in zip(one_means, two_means, strict=True)])
                standard_error = deviation / len(one_means) ** 0.5
                tolerance = max(tolerance, 0.1 * magnitude, MIN_STANDARD_ERRORS * standard_error)
            if abs(one - two) > tolerance:
                return [self._different_means(name, one, two)]
        return []

    def _different_means(self, name: str, one: float, two: float) -> Finding:
        part = "the loss" if name == "loss" else f"the loss's part {name!r}"
        difference = f"{part} of {self.num_samples} samples is {one:.4g} as one batch, {two:.4g} as two"
        if name in self.sums and abs(statistics.fmean(self.sums[name]) - one) <= self.tolerance * abs(one):
            return Finding(Cause.SUM, f"{difference}: it looks like a sum; return the mean over the samples, or (total, count)")
        return Finding(Cause.COUPLED, (
            f"{difference}: it couples the samples of a batch (in-batch negatives, a statistic of the batch), or is a mean over something else"
            f" than samples (tokens: return (total, count)); so the result depends on the plan's micro-batch"
        ))  # fmt: skip

    def _check_state(self, changed: set[str], changes_loss: bool) -> list[Finding]:
        """Reports state that the loss changes: the model's saved tensors, or any other state that changes the next loss."""
        names = sorted(changed & self.before.saved_names) or (sorted(changed) if changes_loss else [])
        if not names:
            return []
        listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        return [Finding(Cause.STATE, (
            f"loss() changes {listed} each time it is called: that is once a micro-batch and separately on each process, not once a step,"
            f" so the result depends on the plan"
        ))]  # fmt: skip


def _mean(value: float, count: float | None) -> float:
    if count is None:
        return value
    return value / count if count else 0.0


def _are_close(first: Losses, second: Losses, tolerance: float) -> bool:
    pairs = [(_mean(*first[name]), _mean(*second[name])) for name in first]
    scale = max((abs(a) for a, _ in pairs), default=0.0)
    return all(math.isnan(a) or abs(a - b) <= tolerance * max(abs(a), scale / 100) for a, b in pairs)


# --- batches of a few samples ------------------------------------------------------------------


def _samples_to_check(step: Step, inputs: Inputs, form: Form) -> tuple[int, MakeBatch]:
    """Returns the number of samples to check, and a function that makes a batch of a part of them."""
    loaded, ids = inputs
    rank_share = form.size // step.group.size
    num_desired = min(MAX_SAMPLES, max(MIN_SAMPLES, rank_share // 4))
    if step.feed.is_resident:  # any samples can form a batch
        epoch, index = divmod(step.number, step.feed.steps_per_epoch)
        own_ids = [micro.ids for micro in step.feed.micro_batches(epoch, index) if micro.num_real]
        ids_to_check = torch.cat(own_ids)[: min(rank_share, num_desired)] if own_ids else ids[:0]
        return len(ids_to_check), lambda part: step.make_batch(None, ids_to_check[part])
    count = min(len(ids), num_desired)
    _select_samples(loaded, slice(0, 1), len(ids))  # raises _NotSeparable before anything is computed

    def make_batch(part: slice) -> Any:
        checked = _select_samples(loaded, slice(0, count), len(ids))
        selected = _select_samples(checked, part, count)
        return selected if form.is_assembled else step.make_batch(selected, ids[:count][part])

    return count if len(ids) >= MIN_SAMPLES else 0, make_batch


def _select_samples(batch: Any, part: slice, num_samples: int) -> Any:
    """Returns some samples of a batch that a loader made; raises _NotSeparable for values that cannot be split by sample."""
    if isinstance(batch, Tensor):
        if batch.dim() == 0 or len(batch) != num_samples or batch.layout is not torch.strided:
            raise _NotSeparable
        return batch[part].clone()
    if isinstance(batch, dict):
        return {key: _select_samples(value, part, num_samples) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        if len(batch) == num_samples and all(isinstance(item, PLAIN_TYPES) for item in batch):
            return batch[part]
        items = [_select_samples(item, part, num_samples) for item in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    if batch is None or isinstance(batch, str):
        return batch
    raise _NotSeparable


@contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    """A context in which torch's own layers draw no dropout. BatchNorm uses its running statistics: another notice covers it."""
    switched_off = [
        m for m in model.modules()
        if m.training and (type(m).__module__.startswith("torch.nn.") or isinstance(m, nn.modules.batchnorm._BatchNorm))
    ]  # fmt: skip
    for module in switched_off:
        module.training = False
    try:
        yield
    finally:
        for module in switched_off:
            module.training = True


@contextmanager
def _without_output() -> Iterator[None]:
    """A context that drops prints and warnings of the loss; the training's steps show them."""
    with open(os.devnull, "w") as null, redirect_stdout(null), redirect_stderr(null), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _generator_states(device: torch.device) -> list[tuple[Callable[[Any], object], Any]]:
    """Returns, for each random generator, the function that sets its state, and the state."""
    generators = [torch.default_generator] if device.type == "cpu" else [torch.default_generator, model_generator(device)]
    states: list[tuple[Callable[[Any], object], Any]] = [(random.setstate, random.getstate()), (np.random.set_state, np.random.get_state())]
    return states + [(generator.set_state, generator.get_state()) for generator in generators]
