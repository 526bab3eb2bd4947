"""Chooses what a checkpoint holds of a training, and resumes a training from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drivetrain.data import Source
from drivetrain.engine.data.feed import Feed
from drivetrain.engine.data.source_feed import SourceFeed
from drivetrain.engine.execution import Execution
from drivetrain.engine.log.rows import RowState
from drivetrain.engine.setup import Setup
from drivetrain.engine.state import tensors as state
from drivetrain.engine.state.best import Best
from drivetrain.engine.state.checkpoint import Checkpoint, folder_name, newest_good
from drivetrain.outcomes import Problem


@dataclass
class Progress:
    """How far a training has come: the part of a checkpoint that is not tensors."""

    best: Best
    step: int = 0
    """Optimizer steps taken."""
    seconds: float = 0.0
    """Seconds trained in the processes before this one."""
    metrics: dict[str, float] | None = None
    """Metrics of the last evaluation."""
    metric_slots: dict[str, Any] | None = None
    """The names of the metrics of a step; None before the first step."""
    compiled_from: int | None = None
    """The step from which compiled code runs."""
    num_threads: int | None = None
    """The number of threads that the first step has shown to be useful."""
    rows: RowState | None = None
    """State of the metric rows."""


def gather_tensors(setup: Setup, execution: Execution) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns (tensors, JSON) of model, optimizer and source. A collective call: ranks send buffers and the states of their groups."""
    strategy, loss_scale = execution.strategy, execution.step.loss_scale
    strategy.broadcast_buffers()
    sharded = strategy.checkpoint_group is not None
    model, aliases = strategy.model_tensors(sharded)
    optimizer, optimizer_json = strategy.optimizer_tensors(sharded)
    parts = {"model": model, "optimizer": optimizer}
    if loss_scale is not None:
        parts["scale"] = loss_scale.tensors()
    if setup.source is not None:
        states = setup.group.gather_objects(_source_state(setup.source))  # one of each rank
        parts["source"] = {name: torch.cat([rank_state[name] for rank_state in states]) for name in states[0]}
    return state.add_prefixes(parts), {"aliases": aliases, "optimizer": optimizer_json}


def to_json(progress: Progress, setup: Setup) -> dict[str, Any]:
    """Returns the progress and a signature of the data as the JSON of a checkpoint."""
    assert progress.rows is not None
    return {
        "time": progress.seconds,
        "metrics": progress.metrics or {},
        "compiled_from": progress.compiled_from,
        "threads": progress.num_threads,
        "figures": progress.metric_slots,
        "best": progress.best.to_json(),
        "epoch_sums": progress.rows.epoch_sums,
        "train": progress.rows.means,
        "held": progress.rows.waiting_row,
        "world_size": setup.group.size,
        "data": {hook: feed.signature() for hook, feed in _feeds(setup)},
    }


def restore(setup: Setup, execution: Execution, report_damage: Callable[[str], None]) -> Progress:
    """Loads the newest good checkpoint into model, optimizer and source, if there is one; returns the training's progress."""
    group, strategy, run = setup.group, execution.strategy, setup.run
    setup.observer.reached("restore")
    checkpoint: Checkpoint | None = newest_good(run, report_damage) if group.is_main else None
    step_and_extra = group.broadcast_object(None if checkpoint is None else (checkpoint.step, checkpoint.extra))
    setup.observer.resumed(0 if step_and_extra is None else step_and_extra[0])
    best = Best(setup.task.best, setup.task.patience)
    if step_and_extra is None:
        strategy.broadcast_weights()
        return Progress(best, compiled_from=execution.plan.first_compiled_step(0, None))
    step, extra = step_and_extra
    if step > setup.total_steps:
        raise Problem(f"the run is already at step {step:,}, beyond its {setup.total_steps:,} steps: raise epochs or steps")
    if strategy.checkpoint_group is not None:
        from drivetrain.engine.state.shards import StoredShards

        stored: state.StoredTensors = StoredShards(run.checkpoints / folder_name(step))
    else:
        stored = state.StoredTensors(checkpoint.tensors() if checkpoint else None, group)
    _load_tensors(setup, execution, stored, extra, step)
    best.load(extra["best"])
    _check_data(setup, step, extra.get("data") or {})
    if group.is_main:
        run.log_event("resumed", step=step, world_size=group.size, was=extra["world_size"])
    return Progress(
        best, step, extra["time"], extra["metrics"], extra.get("figures"),
        compiled_from=execution.plan.first_compiled_step(step, extra.get("compiled_from")),
        num_threads=extra.get("threads"),
        rows=RowState(extra["epoch_sums"], extra["train"], extra.get("held")),
    )  # fmt: skip


def _load_tensors(setup: Setup, execution: Execution, stored: state.StoredTensors, extra: dict[str, Any], step: int) -> None:
    strategy, loss_scale = execution.strategy, execution.step.loss_scale
    strategy.load_model(stored.subset("model"), extra["aliases"], f"checkpoint {step}")
    strategy.load_optimizer(stored.subset("optimizer"), extra["optimizer"])
    if loss_scale is not None:
        scale = stored.subset("scale")
        for name in scale.layout:
            loss_scale.tensors()[name].copy_(scale.load(name))
    if setup.source is not None:
        assert isinstance(setup.feed, SourceFeed)
        own_groups = slice(setup.feed.first_group, setup.feed.end_group)
        source = stored.subset("source")
        setup.source.load({name: source.load(name)[own_groups].to(setup.group.device) for name in source.layout})


def _feeds(setup: Setup) -> list[tuple[str, Feed]]:
    feeds = (("train_data()", setup.feed), ("eval_data()", setup.evaluation))
    return [(hook, feed) for hook, feed in feeds if feed is not None]


def _check_data(setup: Setup, step: int, saved: dict[str, Any]) -> None:
    """Refuses data of another length, because its order of samples differs. Changed values are only reported: another version
    of a library may have changed them, which is no reason to stop a run."""
    run = setup.run
    for hook, feed in _feeds(setup):
        expected = saved.get(hook)
        if expected is None:
            continue
        if expected["length"] != feed.length:
            raise Problem(
                f"{hook} gives {feed.length:,} samples now, and gave {expected['length']:,} when {run.name} was saved: the run cannot continue exactly."
                f"\nBring the old data back, or begin a new run from its weights: start={run.name} --name NEW"
            )

        def report(difference: str, hook: str = hook) -> None:
            run.log_event("data-changed", step=step, data=hook, what=difference)
            setup.observer.notice(
                f"{hook} is not what it was when {run.name} was saved ({difference} differ): the run continues, but not exactly"
            )

        feed.expected_signature, feed.on_data_changed = expected, report
        feed.check_signature()


def _source_state(source: Source) -> dict[str, Tensor]:
    """Returns the state of this rank's groups, on the CPU."""
    values = source.state()
    if not isinstance(values, dict) or not all(isinstance(value, Tensor) for value in values.values()):
        raise Problem("state() of the source gave something else than a dict of tensors, whose rows are this rank's groups")
    for name, value in values.items():
        state.check_savable(value, "the source's", name)
    return {name: value.cpu() for name, value in values.items()}
