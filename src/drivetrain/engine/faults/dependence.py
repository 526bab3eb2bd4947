"""Checks on a few samples, before the first step, whether a task's result depends on the plan; reports it once.

The loss of a few samples must be the same as one batch and as two, weighted by their counts, and computing it must
change nothing else. Afterwards model, task and generators are restored.
"""

from __future__ import annotations

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

MAX_SAMPLES, MIN_SAMPLES = 16, 4  # to check with; fewer than the minimum only if the batch has no more
MAX_STEP_SECONDS = 2.0  # predicted; a slower task is not checked
MAX_LOSS_SECONDS = 1.0  # of the first loss on any rank; after a slower one the check ends
NUM_DRAWS = 8  # times that a loss with randomness is computed
MAX_PARAMETERS_TO_DRAW = 5_000_000  # of a model for which that is cheap
MIN_STANDARD_ERRORS = 10.0  # by which two means of random losses must differ

MakeBatch = Callable[[slice], Any]
"""Returns some of the samples as a batch."""
Losses = dict[str, tuple[float, float | None]]
"""Part of the loss -> its value, and its count if it has one."""


class Cause(StrEnum):
    """Why the result depends on the plan; the values stand in events.jsonl."""

    COUNT = "count"
    SUM = "sum"
    COUPLED = "coupled"
    STATE = "state"


class Finding(NamedTuple):
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
        budget = _Budget(setup.group)
        findings = find_dependence(self.step, seed, inputs, form, budget)
        budget.agree()
        setup.observer.reached("fetched")  # the check may have taken long: this shows that it was no hang
        for finding in findings:
            if setup.group.is_main:
                setup.run.log_event("depends-on-plan", cause=finding.cause, text=finding.text)
                setup.observer.notice(finding.text)


def check_dependence(setup: Setup, execution: Execution, always: bool = False) -> None:
    """Lets the first step check whether the result depends on the plan: where this plan splits batches, or always.

    All ranks compute the loss equally often, because some losses use collectives.
    """
    plan = execution.plan
    is_cheap = plan.predicted.get("step_seconds", 0.0) <= MAX_STEP_SECONDS
    if (always or plan.micro_batch < plan.global_batch) and is_cheap and can_undo_steps(plan, setup.model):
        execution.step.micro_batch_hooks.insert(0, DependenceCheck(setup, execution.step))


class _Budget:
    """The agreement of all ranks whether the loss is fast enough to be computed more than once; each rank takes part once."""

    def __init__(self, group: Group) -> None:
        self.group, self._has_agreed = group, False

    def agree(self, seconds: float = 0.0) -> bool:
        """Returns whether the first loss was fast on every rank; a rank that computed none takes part with 0 seconds."""
        if self._has_agreed:
            return True
        self._has_agreed = True
        return self.group.sum_on_hosts([float(seconds > MAX_LOSS_SECONDS)]) == [0.0]


def find_dependence(step: Step, seed: int, inputs: Inputs, form: Form, budget: _Budget) -> list[Finding]:
    """Returns what depends on the plan; nothing where that cannot be found without side effects."""
    try:
        num_samples, make_batch = _samples(step, inputs, form)
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
            return _Comparison(step, before, make_batch, num_samples, seed).findings(budget)
        except Exception:
            return []  # a loss that fails does so again in the step, which reports it
        finally:
            before.restore()
            for set_state, state in generators:
                set_state(state)


class _Comparison:
    """Computes the loss of the same samples as one batch and as two, and compares."""

    def __init__(self, step: Step, before: Snapshot, make_batch: MakeBatch, num_samples: int, seed: int) -> None:
        self.step, self.before, self.make_batch, self.num_samples, self.seed = step, before, make_batch, num_samples, seed
        self.sums: dict[str, list[float]] = {}
        """Part without a count -> the sum of the two batches' values, for each time it was computed."""
        self.num_first = max(1, num_samples * 3 // 8)  # in the first of two batches: uneven, so that wrong weights show
        dtypes = [p.dtype for p in step.model.parameters() if p.is_floating_point()]
        self.is_full_precision = all(dtype in (torch.float32, torch.float64) for dtype in dtypes)
        self.tolerance = 5e-2 if not self.is_full_precision else 2e-3 if step.group.device.type == "cpu" else 1e-2

    def findings(self, budget: _Budget) -> list[Finding]:
        began = time.monotonic()
        whole = self._compute(self.seed, slice(None))
        if not budget.agree(time.monotonic() - began):
            return []
        changed = self.before.changed()
        again = self._compute(self.seed, slice(None)) if changed else whole
        self.before.restore()
        state_findings = self._judge_state(changed, changes_loss=not _alike(whole, again, 1e-4))
        other_seed = self._as_one_batch(self.seed ^ 1)
        split = self._as_two_batches(self.seed)
        findings = self._judge_counts(whole, other_seed, split)
        if not findings and _alike(whole, other_seed, 1e-6):
            findings = self._judge_means([whole], [split])
        elif not findings and sum(p.numel() for p in self.step.model.parameters()) <= MAX_PARAMETERS_TO_DRAW:
            seeds = [self.seed ^ number for number in range(2, NUM_DRAWS)]
            wholes = [whole, other_seed, *map(self._as_one_batch, seeds)]
            splits = [split, *map(self._as_two_batches, [self.seed ^ 1, *seeds])]
            findings = self._judge_means(wholes, splits)
        return findings + state_findings

    # --- computing ---

    def _compute(self, seed: int, part: slice) -> Losses:
        """Returns the loss of some samples; side effects stay."""
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
        one, two = losses
        joined: Losses = {}
        for name, (value, count) in one.items():
            other_value, other_count = two[name]
            if count is None or other_count is None:
                joined[name] = (value * self.num_first + other_value * (self.num_samples - self.num_first)) / self.num_samples, None
                self.sums.setdefault(name, []).append(value + other_value)
            else:
                joined[name] = value + other_value, count + other_count
        return joined

    # --- judging ---

    def _judge_counts(self, whole: Losses, other_seed: Losses, split: Losses) -> list[Finding]:
        for name, (_, count) in whole.items():
            split_count, again = split[name][1], other_seed[name][1]
            if count is None or split_count is None or count != again or abs(count - split_count) <= 1e-3 * abs(count):
                continue
            part = "" if name == "loss" else f" of {name!r}"
            return [Finding(Cause.COUNT, (
                f"loss() gives the count{part} {count:g} for {self.num_samples} samples as one batch, {split_count:g} as two: a count must be the"
                f" batch's own (its samples or tokens), or the loss is divided by the number of micro-batches and processes"
            ))]  # fmt: skip
        return []

    def _judge_means(self, wholes: list[Losses], splits: list[Losses]) -> list[Finding]:
        """Compares means: one of each without randomness, else several, with a tolerance for chance."""
        scale = max(abs(_mean(*value)) for means in (*wholes, *splits) for value in means.values())
        for name in wholes[0]:
            ones, twos = ([_mean(*means[name]) for means in many] for many in (wholes, splits))
            one, two = statistics.fmean(ones), statistics.fmean(twos)
            tolerance = self.tolerance * max(abs(one), abs(two), scale / 100)
            if len(ones) > 1:
                deviation = statistics.stdev([a - b for a, b in zip(ones, twos, strict=True)])
                tolerance = max(tolerance, 0.1 * max(abs(one), abs(two)), MIN_STANDARD_ERRORS * deviation / len(ones) ** 0.5)
            if abs(one - two) > tolerance:
                return [self._different_means(name, one, two)]
        return []

    def _different_means(self, name: str, whole: float, split: float) -> Finding:
        part = "the loss" if name == "loss" else f"the loss's part {name!r}"
        difference = f"{part} of {self.num_samples} samples is {whole:.4g} as one batch, {split:.4g} as two"
        if name in self.sums and abs(statistics.fmean(self.sums[name]) - whole) <= self.tolerance * abs(whole):
            return Finding(Cause.SUM, f"{difference}: it looks like a sum; return the mean over the samples, or (total, count)")
        return Finding(Cause.COUPLED, (
            f"{difference}: it couples the samples of a batch (in-batch negatives, a statistic of the batch), or is a mean over something else"
            f" than samples (tokens: return (total, count)); so the result depends on the plan's micro-batch"
        ))  # fmt: skip

    def _judge_state(self, changed: set[str], changes_loss: bool) -> list[Finding]:
        """Reports what the loss writes into the model's saved tensors, or elsewhere if its next value depends on that."""
        names = sorted(changed & self.before.saved_names) or (sorted(changed) if changes_loss else [])
        if not names:
            return []
        listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        return [Finding(Cause.STATE, (
            f"loss() changes {listed} each time it is called: that is once a micro-batch and on each process by itself, not once a step,"
            f" so the result depends on the plan"
        ))]  # fmt: skip


def _mean(value: float, count: float | None) -> float:
    return value if count is None else value / count if count else 0.0


def _alike(one: Losses, two: Losses, tolerance: float) -> bool:
    pairs = [(_mean(*one[name]), _mean(*two[name])) for name in one]
    scale = max((abs(a) for a, _ in pairs), default=0.0)
    return all(abs(a - b) <= tolerance * max(abs(a), scale / 100) or a != a for a, b in pairs)


# --- batches of a few samples ------------------------------------------------------------------


def _samples(step: Step, inputs: Inputs, form: Form) -> tuple[int, MakeBatch]:
    """Returns the number of samples to check with, and what makes a batch of some of them."""
    loaded, ids = inputs
    share = form.size // step.group.size
    if step.feed.is_resident:  # any rows can be a batch
        epoch, index = divmod(step.number, step.feed.steps_per_epoch)
        own_ids = [micro.ids for micro in step.feed.micro_batches(epoch, index) if micro.num_real]
        count = min(share, MAX_SAMPLES, max(MIN_SAMPLES, share // 4))
        rows = torch.cat(own_ids)[:count] if own_ids else ids[:0]
        return len(rows), lambda part: step.make_batch(None, rows[part])
    count = min(len(ids), MAX_SAMPLES, max(MIN_SAMPLES, share // 4))
    _rows(loaded, slice(0, 1), len(ids))

    def make_batch(part: slice) -> Any:
        rows = _rows(_rows(loaded, slice(0, count), len(ids)), part, count)
        return rows if form.ready else step.make_batch(rows, ids[:count][part])

    return count if len(ids) >= MIN_SAMPLES else 0, make_batch


def _rows(batch: Any, part: slice, num_samples: int) -> Any:
    """Returns some samples of a batch that a loader made; raises _NotSeparable where it does not show what belongs to which sample."""
    if isinstance(batch, Tensor):
        if batch.dim() == 0 or len(batch) != num_samples or batch.layout is not torch.strided:
            raise _NotSeparable
        return batch[part].clone()
    if isinstance(batch, dict):
        return {key: _rows(value, part, num_samples) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        if len(batch) == num_samples and all(isinstance(item, PLAIN_TYPES) for item in batch):
            return batch[part]
        items = [_rows(item, part, num_samples) for item in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    if batch is None or isinstance(batch, str):
        return batch
    raise _NotSeparable


@contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    """Inside, torch's own layers draw no dropout, and BatchNorm, about which users are warned elsewhere, uses its running statistics."""
    in_eval_mode = [
        m for m in model.modules()
        if m.training and (type(m).__module__.startswith("torch.nn.") or isinstance(m, nn.modules.batchnorm._BatchNorm))
    ]  # fmt: skip
    for module in in_eval_mode:
        module.training = False
    try:
        yield
    finally:
        for module in in_eval_mode:
            module.training = True


@contextmanager
def _without_output() -> Iterator[None]:
    """Inside, prints and warnings of the loss are dropped: its steps print them, too."""
    with open(os.devnull, "w") as null, redirect_stdout(null), redirect_stderr(null), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _generator_states(device: torch.device) -> list[tuple[Callable[[Any], object], Any]]:
    """Returns, for each random generator, the function that sets its state, and the state."""
    generators = [torch.default_generator] if device.type == "cpu" else [torch.default_generator, model_generator(device)]
    states: list[tuple[Callable[[Any], object], Any]] = [(random.setstate, random.getstate()), (np.random.set_state, np.random.get_state())]
    return states + [(generator.set_state, generator.get_state()) for generator in generators]
