"""Out of memory: what a step leaves behind is undone, and the plan's micro-batch halves.

An allocation fails on the host, while work is enqueued, so ranks agree from host to host before they next meet
on the device. Where a step cannot be undone (sharded models, the optimizer's update), the error says with which
smaller plan the run is to start anew.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from drivetrain.engine.data.feed import Feed
from drivetrain.engine.setup import batchnorm_notice, has_batchnorm
from drivetrain.engine.state.tensors import unsavable_form
from drivetrain.engine.strategies.replicate import Replicated
from drivetrain.outcomes import Outcome, Problem
from drivetrain.plan import Plan, SmallerPlan, halve, halved_size

if TYPE_CHECKING:
    from drivetrain.engine.loop import Training

LARGEST = 256 << 20  # bytes of a buffer: beyond that it is weights or a table, which no forward pass changes
WAYS_OUT = "plan.activation_checkpointing=on, plan.strategy=fsdp, or more GPUs"


class Short(Exception):
    """Memory ran out on these ranks in the forward or backward pass; every rank is told, and nobody has gone further."""

    def __init__(self, ranks: list[int], undoable: bool = True) -> None:
        super().__init__(f"out of memory on rank {', '.join(map(str, ranks))}")
        self.ranks, self.undoable = ranks, undoable


class OutOfMemory(Problem):
    """The end of this process for want of memory; `smaller`, where there is one, is the plan to start anew with."""

    def __init__(self, text: str, smaller: dict[str, Any] | None) -> None:
        super().__init__(text, Outcome.OOM)
        self.smaller = smaller


class Before:
    """A model's buffers (BatchNorm's statistics, queues) as they were before a step; free where there are none."""

    def __init__(self, model: nn.Module) -> None:
        self._places = [
            (module._buffers, name)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and not unsavable_form(buffer) and buffer.nbytes <= LARGEST
        ]
        self._then: list[Tensor] = []
        self._kept: list[Tensor] = []
        self._forms: list[torch.Size] = []
        self.known = True
        """Whether the present step's beginning is known."""

    def take(self) -> None:
        self.known = True
        if not self._places:
            return
        self._then = [buffer for owner, name in self._places if (buffer := owner[name]) is not None]
        forms = [buffer.shape for buffer in self._then]
        if forms != self._forms:
            self._forms, self._kept = forms, [buffer.clone() for buffer in self._then]
        else:
            torch._foreach_copy_(self._kept, self._then)

    def skip(self) -> None:
        """A step that only replays graphs cannot run out of memory."""
        self.known = not self._places

    def restore(self) -> None:
        with torch.no_grad():
            for (owner, name), then, kept in zip(self._places, self._then, self._kept, strict=True):
                owner[name] = then  # a forward pass may have put another in its place
                then.copy_(kept)


def undoable(plan: Plan, model: nn.Module) -> bool:
    """Whether ranks do not talk to each other within a forward or backward pass."""
    return plan.strategy in ("single", "ddp") and not any(isinstance(m, nn.SyncBatchNorm) for m in model.modules())


# --- in place ----------------------------------------------------------------------------------


def shrink(training: Training, ranks: list[int], possible: bool) -> None:
    """Undo the step that is under way on every rank, and cut it, and all that follow, into smaller micro-batches."""
    at = training.done + 1
    smaller = _smaller(training, evaluation=False)
    where = f"at step {at:,} on rank {', '.join(map(str, ranks))}"
    if smaller is None:
        raise _the_end(training, where, evaluation=False)
    if not possible:
        raise OutOfMemory(f"out of memory {where}, in a step that cannot be undone here", smaller.restart_facts(at, ranks[0], "step"))
    training.step.undo()
    training._replay = None
    if training.step.strategy.is_one_piece:
        for parameter in training.model.parameters():
            parameter.grad = None
        _free(training)
        training.strategy = Replicated(training.model, training.group, training.tail)
        training.strategy.set_optimizer(training.optimizer)
    training.plan = Plan.from_json(training.plan.to_json() | smaller.changes)
    training.feed.set_micro_batch(training.plan.micro_batch)
    training.step.renew(training.strategy)
    training.pace.rest()  # it may have convolutions tried out, and another takes its place
    training.compiled_from = training.pace.compiled_from if training.plan.reasons.get("compile") == "pinned" else None
    training.set_pace()
    _free(training)
    _tell(training, smaller, at, ranks, "step", f"out of memory {where}: {smaller.sentence()}; the step is taken again")
    if training.group.is_main and (notice := batchnorm_notice(training.model, training.task, training.plan)):
        training.observer.notice(notice)


def shrink_evaluation(training: Training, ranks: list[int]) -> None:
    """Let the evaluation under way, and all that follow, take fewer samples at a time."""
    assert training.test is not None
    smaller = _smaller(training, evaluation=True)
    where = f"in the evaluation at step {training.done:,} on rank {', '.join(map(str, ranks))}"
    if smaller is None:
        raise _the_end(training, where, evaluation=True)
    training._replay = None
    training.plan = Plan.from_json(training.plan.to_json() | smaller.changes)
    training.test.set_micro_batch(training.plan.eval_micro_batch)
    _free(training)
    _tell(training, smaller, training.done, ranks, "evaluation", f"out of memory {where}: {smaller.sentence()}; it is done again")


def _tell(training: Training, smaller: SmallerPlan, step: int, ranks: list[int], during: str, sentence: str) -> None:
    if not training.group.is_main:
        return
    for rank in ranks:
        training.run.log_event("oom", step=step, rank=rank, was=smaller.old_size, now=smaller.new_size, during=during)
    training.run.log_event("replanned", step=step, **smaller.sizes())
    training.observer.planned(smaller.changes | {"sentence": sentence})


def _free(training: Training) -> None:
    gc.collect()  # what an exception's frames held may lie in cycles
    if training.group.device.type == "cuda":
        torch.cuda.synchronize(training.group.device)
        torch.cuda.empty_cache()


# --- by a new start ----------------------------------------------------------------------------


def new_start(training: Training, error: torch.OutOfMemoryError) -> OutOfMemory:
    """What this process says at its end: with which plan all of them are to start anew from the last good checkpoint."""
    during = "evaluation" if training.evaluating else "step"
    at = training.done + (0 if training.evaluating else 1)
    first = str(error).partition("\n")[0]
    smaller = _smaller(training, training.evaluating)
    if smaller is None:
        return _the_end(training, f"at step {at:,} ({first})", training.evaluating)
    facts = smaller.restart_facts(at, training.group.rank, during)
    return OutOfMemory(f"out of memory at step {at:,} ({first}): {smaller.sentence()} from here on", facts)


def _smaller(training: Training, evaluation: bool) -> SmallerPlan | None:
    """Half as many samples at a time; None where that cannot be."""
    smaller = halve(training.plan, training.done + (not evaluation), _feed(training, evaluation).max_rank_samples, evaluation)
    if smaller is None or evaluation or not has_batchnorm(training.model):
        return smaller
    feed, world = training.feed, training.group.size
    sizes = {feed.batch_size(0), feed.batch_size(feed.steps_per_epoch - 1)}
    return smaller if all(_least(size, world, smaller.new_size) > 1 for size in sizes) else None


def _least(size: int, world: int, micro: int) -> int:
    """Samples in the smallest micro-batch of a batch of this size."""
    largest = -(-size // world)
    pieces = -(-largest // micro)
    return size // world // pieces


def _feed(training: Training, evaluation: bool) -> Feed:
    return training.test if evaluation and training.test is not None else training.feed


def _the_end(training: Training, where: str, evaluation: bool) -> OutOfMemory:
    plan = training.plan
    least, _ = halved_size(_feed(training, evaluation).max_rank_samples, plan.eval_micro_batch if evaluation else plan.micro_batch)
    few = "one sample" if least == 1 else f"{least} samples"
    why = "" if least == 1 else ", and BatchNorm needs more than one in every micro-batch"
    ways = f"Ways out: {WAYS_OUT} (drivetrain resume {training.run.name} plan.KEY=VALUE)"
    return OutOfMemory(f"out of memory {where} with {few} at a time{why}\n{ways}", None)
