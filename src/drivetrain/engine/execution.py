"""How steps run under the present plan: the strategy, the step and its tuner; after an out-of-memory error, under a smaller plan."""

from __future__ import annotations

import gc
import math
from contextlib import nullcontext
from enum import Enum

import torch

from drivetrain.engine.data.feed import Feed, OrderedFeed
from drivetrain.engine.fast.graphs import Graphs
from drivetrain.engine.fast.threads import Threads
from drivetrain.engine.fast.tuner import ExecutionTuner
from drivetrain.engine.faults.out_of_memory import WAYS_OUT, OutOfMemory, OutOfMemoryOnRanks, can_undo_steps
from drivetrain.engine.log.slots import PIGGYBACK_FLOATS
from drivetrain.engine.model import batchnorm_notice, has_batchnorm
from drivetrain.engine.setup import Setup, make_strategy
from drivetrain.engine.step import Step
from drivetrain.engine.strategies import Strategy
from drivetrain.engine.strategies.replicate import Replicated
from drivetrain.plan import Plan, PlanChange, halve, halved_size


class TrainingActivity(Enum):
    """What runs when memory runs out: the remedy depends on it. COLLECTION: a Source makes samples."""

    STEPS = "step"
    EVALUATION = "evaluation"
    COLLECTION = "collection"


class Execution:
    """Takes steps. Where memory runs out on any rank, all ranks halve the micro-batch and take the same step again."""

    def __init__(self, setup: Setup, plan: Plan) -> None:
        self.setup, self.plan, self.group, self.observer = setup, plan, setup.group, setup.observer
        self.strategy: Strategy = make_strategy(setup, plan)
        self.optimizer = self.strategy.optimizer
        rates = setup.learning_rates(self.optimizer, plan)
        self.step = Step(setup.task, setup.model, setup.feed, self.strategy, rates, setup.precision, self.group)
        self.step.can_undo, self.step.stop = can_undo_steps(plan, setup.model), setup.stop
        self.step.reached = self.observer.reached if self.observer.watches else None
        self.threads = Threads(plan, self.group)
        self.activity = TrainingActivity.STEPS
        self.graph_version = 0
        """Increases when all CUDA graphs that use the model become invalid."""
        self.tuner = ExecutionTuner(self.step, plan, self.group, setup.total_steps, self.observer, plan.first_compiled_step(0, None))

    def tune(self, compiled_from: int | None) -> None:
        """Measures the next steps to choose how steps run; from step `compiled_from` on they run compiled."""
        self.tuner = ExecutionTuner(self.step, self.plan, self.group, self.setup.total_steps, self.observer, compiled_from)
        self.tuner.attach()

    # --- steps ---

    def take(self, step: int, with_norm: bool) -> None:
        """Takes step number `step` (from 0), under a smaller plan where memory runs out."""
        with self.threads.measure_products() if step == 0 else nullcontext():
            while (error := self._try(step, with_norm)) is not None:
                self._shrink(step, error)  # after the except clause, whose traceback holds the memory
        if step == 0 and self.threads.reason and self.group.is_main:
            self.observer.planned({"reasons": {"threads": self.threads.reason}, "sentence": ""})

    def _try(self, step: int, with_norm: bool) -> OutOfMemoryOnRanks | None:
        try:
            self.step(step, with_norm)
            return None
        except OutOfMemoryOnRanks as error:
            return OutOfMemoryOnRanks(error.ranks, error.can_undo)

    def pause(self) -> None:
        """Call before evaluating or collecting: switches compiled blocks off and pauses the timer."""
        self.step.restore_eager_blocks()
        self.tuner.pause_timer()

    def resume(self) -> None:
        """Call after other code has run: drops graphs that assume values which that code has changed."""
        if self.tuner.drop_invalid_graphs():
            self.graph_version += 1

    def drop_graphs(self) -> None:
        """Drops all graphs of the model. Call it after the model's tensors have moved to other memory."""
        if self.step.graphs is not None:
            self.step.graphs.clear()
        self.graph_version += 1

    def new_graphs(self) -> Graphs | None:
        """Returns separate graphs for other work on the model, so that their failure does not disable the steps' graphs; None without those."""
        return None if self.step.graphs is None else Graphs(self.group.device, self.observer.notice)

    # --- out of memory, in place ---

    def _shrink(self, step: int, error: OutOfMemoryOnRanks) -> None:
        """Undoes the present step on every rank, and uses smaller micro-batches in it and all later steps."""
        setup, number = self.setup, step + 1
        smaller = self._smaller_plan(step, setup.feed, is_evaluation=False)
        where = f"at step {number:,} on rank {', '.join(map(str, error.ranks))}"
        if smaller is None:
            raise self._unsolvable_error(where, setup.feed, is_evaluation=False)
        if not error.can_undo:
            raise OutOfMemory(
                f"out of memory {where}, in a step that cannot be undone here", smaller.restart_facts(number, error.ranks[0], "step")
            )
        self.step.undo()
        self.graph_version += 1
        if self.strategy.is_one_piece:
            self._switch_to_accumulation()
        self.plan = Plan.from_json(self.plan.to_json() | smaller.changes)
        setup.feed.set_micro_batch(self.plan.micro_batch)
        self.step.use_strategy(self.strategy)
        self.tuner.detach()
        is_pinned = self.plan.reasons.get("compile") == "pinned"
        self.tune(self.tuner.compiled_from if is_pinned else None)
        self.free_memory()
        self._report(smaller, number, error.ranks, "step", f"out of memory {where}: {smaller.sentence()}; the step is taken again")
        if self.group.is_main and (notice := batchnorm_notice(setup.model, setup.task, self.plan)):
            self.observer.notice(notice)

    def _switch_to_accumulation(self) -> None:
        """Replaces the strategy for one process and one micro-batch by the strategy that accumulates gradients."""
        for parameter in self.setup.model.parameters():
            parameter.grad = None
        self.free_memory()
        self.strategy = Replicated(self.setup.model, self.group, PIGGYBACK_FLOATS)
        self.strategy.set_optimizer(self.optimizer)

    def shrink_evaluation(self, step: int, feed: OrderedFeed, error: OutOfMemoryOnRanks) -> None:
        """Uses smaller micro-batches in the present evaluation and all later ones."""
        smaller = self._smaller_plan(step, feed, is_evaluation=True)
        where = f"in the evaluation at step {step:,} on rank {', '.join(map(str, error.ranks))}"
        if smaller is None:
            raise self._unsolvable_error(where, feed, is_evaluation=True)
        self.graph_version += 1
        self.plan = Plan.from_json(self.plan.to_json() | smaller.changes)
        feed.set_micro_batch(self.plan.eval_micro_batch)
        self.free_memory()
        self._report(smaller, step, error.ranks, "evaluation", f"out of memory {where}: {smaller.sentence()}; it is done again")

    def _report(self, smaller: PlanChange, step: int, ranks: list[int], during: str, sentence: str) -> None:
        if not self.group.is_main:
            return
        for rank in ranks:
            self.setup.run.log_event("oom", step=step, rank=rank, was=smaller.old_size, now=smaller.new_size, during=during)
        self.setup.run.log_event("replanned", step=step, **smaller.sizes())
        self.observer.planned(smaller.changes | {"sentence": sentence})

    def free_memory(self) -> None:
        gc.collect()  # tensors of an exception's frames may be in reference cycles
        if self.group.device.type == "cuda":
            torch.cuda.synchronize(self.group.device)
            torch.cuda.empty_cache()

    # --- out of memory, by a restart ---

    def restart_error(self, error: torch.OutOfMemoryError, step: int) -> OutOfMemory:
        """Returns the error that ends this process: it says with which plan all processes restart from the last good checkpoint."""
        first_line = str(error).partition("\n")[0]
        if self.activity is TrainingActivity.COLLECTION:
            where = f"while the source collected samples for step {step + 1:,} ({first_line})"
            advice = "A smaller micro-batch does not help: let collect() make fewer samples at once (PPO: envs, horizon), or take more GPUs"
            return OutOfMemory(f"out of memory {where}\n{advice}", None)
        is_evaluation = self.activity is TrainingActivity.EVALUATION
        feed = self.setup.evaluation if is_evaluation and self.setup.evaluation else self.setup.feed
        number = step if is_evaluation else step + 1  # in messages, steps count from 1
        smaller = self._smaller_plan(step, feed, is_evaluation)
        if smaller is None:
            return self._unsolvable_error(f"at step {number:,} ({first_line})", feed, is_evaluation)
        facts = smaller.restart_facts(number, self.group.rank, self.activity.value)
        return OutOfMemory(f"out of memory at step {number:,} ({first_line}): {smaller.sentence()} from here on", facts)

    def _smaller_plan(self, step: int, feed: Feed, is_evaluation: bool) -> PlanChange | None:
        """Returns the change to half as many samples at a time; None where that is impossible."""
        number = step if is_evaluation else step + 1
        smaller = halve(self.plan, number, feed.max_rank_samples, is_evaluation)
        if smaller is None or is_evaluation or not has_batchnorm(self.setup.model):
            return smaller
        # BatchNorm cannot train on a micro-batch of one sample.
        batch_sizes = {feed.batch_size(0), feed.batch_size(feed.steps_per_epoch - 1)}
        smallest = min(_smallest_micro_batch(size, self.group.size, smaller.new_size) for size in batch_sizes)
        return smaller if smallest > 1 else None

    def _unsolvable_error(self, where: str, feed: Feed, is_evaluation: bool) -> OutOfMemory:
        micro_batch = self.plan.eval_micro_batch if is_evaluation else self.plan.micro_batch
        present_size, _ = halved_size(feed.max_rank_samples, micro_batch)
        samples = "one sample" if present_size == 1 else f"{present_size} samples"
        why = "" if present_size == 1 else ", and BatchNorm needs more than one in every micro-batch"
        ways = f"Ways out: {WAYS_OUT} (drivetrain resume {self.setup.run.name} plan.KEY=VALUE)"
        return OutOfMemory(f"out of memory {where} with {samples} at a time{why}\n{ways}", None)


def _smallest_micro_batch(batch: int, world_size: int, micro_batch: int) -> int:
    """Returns the samples in the smallest micro-batch of a global batch of this size."""
    largest_share = math.ceil(batch / world_size)
    num_micro_batches = math.ceil(largest_share / micro_batch)
    return batch // world_size // num_micro_batches
