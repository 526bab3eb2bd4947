"""What a checkpoint holds of a training, and how a training goes on from one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from drivetrain.data import Source
from drivetrain.engine.data.feed import Feed
from drivetrain.engine.data.source_feed import SourceFeed
from drivetrain.engine.state import tensors as state
from drivetrain.engine.state.checkpoint import Checkpoint, folder_name, newest_good
from drivetrain.outcomes import Problem

if TYPE_CHECKING:
    from drivetrain.engine.loop import Training


def gather(training: Training) -> tuple[dict[str, Any], dict[str, Any]]:
    """All that a resume needs; a collective call, for rank 0's buffers and everybody's groups."""
    strategy, step, rows = training.strategy, training.step, training.rows
    strategy.broadcast_buffers()
    parted = strategy.checkpoint_group is not None
    model, aliases = strategy.model_tensors(parted)
    optimizer, plain = strategy.optimizer_tensors(parted)
    parts = {"model": model, "optimizer": optimizer}
    if step.loss_scale is not None:
        parts["scale"] = step.loss_scale.tensors()
    if training.source is not None:
        everyone = training.group.gather_objects(_source_state(training.source))
        parts["source"] = {k: torch.cat([one[k] for one in everyone]) for k in everyone[0]}
    extra = {
        "aliases": aliases,
        "optimizer": plain,
        "time": training.elapsed(),
        "metrics": training.metrics,
        "compiled_from": training.pace.compiled_from,
        "threads": training.threads.num_useful,
        "figures": step.figures.to_json() if step.figures else None,
        "best": training.best.to_json(),
        "epoch_sums": rows.epoch_sums,
        "train": rows.means(),
        "held": rows.held(training.done),
        "world_size": training.group.size,
        "data": {hook: feed.signature() for hook, feed in _feeds(training)},
    }
    return state.add_prefixes(parts), extra


def _feeds(training: Training) -> list[tuple[str, Feed]]:
    feeds = (("train_data()", training.feed), ("eval_data()", training.test))
    return [(hook, feed) for hook, feed in feeds if feed is not None]


def _check_data(training: Training, before: dict[str, Any]) -> None:
    """Refuse data of another length, of which the order of samples is another. Other values are only told: what a
    few samples show may also be another version of a library, and no run shall stop at night for that."""
    run = training.run
    for hook, feed in _feeds(training):
        known = before.get(hook)
        if known is None:
            continue
        if known["length"] != feed.length:
            raise Problem(
                f"{hook} gives {feed.length:,} samples now, and gave {known['length']:,} when {run.name} was saved: such a run cannot go on exactly."
                f"\nBring the old data back, or begin a new run from its weights: start={run.name} --name NEW"
            )

        def tell(what: str, hook: str = hook) -> None:
            run.log_event("data-changed", step=training.done, data=hook, what=what)
            training.observer.notice(
                f"{hook} is not what it was when {run.name} was saved ({what} differ): the run goes on, but not exactly"
            )

        feed.expected_signature, feed.on_data_changed = known, tell
        feed.check_signature()


def _source_state(source: Source) -> dict[str, Tensor]:
    """This rank's groups, on the CPU."""
    kept = source.state()
    if not isinstance(kept, dict) or not all(isinstance(value, Tensor) for value in kept.values()):
        raise Problem("state() of the source gave something else than a dict of tensors, whose rows are this rank's groups")
    for name, value in kept.items():
        state.check_savable(value, "the source's", name)
    return {name: value.cpu() for name, value in kept.items()}


def restore(training: Training) -> None:
    """Go on from the newest checkpoint that proves whole, if there is one."""
    group, strategy, run = training.group, training.strategy, training.run
    training.observer.moment("restore")
    found: Checkpoint | None = None
    if group.is_main:
        found = newest_good(run, training.damage)
    facts = group.broadcast_object(None if found is None else (found.step, found.extra))
    training.observer.resumed(0 if facts is None else facts[0])
    if facts is None:
        strategy.broadcast_weights()
        return
    step, extra = facts
    if step > training.total:
        raise Problem(f"the run is at step {step:,} already; {training.total:,} steps were asked for (epochs or steps)")
    if strategy.checkpoint_group is not None:
        from drivetrain.engine.state.shards import StoredShards

        stored: state.StoredTensors = StoredShards(run.checkpoints / folder_name(step))
    else:
        stored = state.StoredTensors(found.tensors() if found else None, group)
    strategy.load_model(stored.subset("model"), extra["aliases"], f"checkpoint {step}")
    strategy.load_optimizer(stored.subset("optimizer"), extra["optimizer"])
    if training.step.loss_scale is not None:
        scale = stored.subset("scale")
        for name in scale.layout:
            training.step.loss_scale.tensors()[name].copy_(scale.load(name))
    if training.source is not None:
        assert isinstance(training.feed, SourceFeed)
        rows = slice(training.feed.first_group, training.feed.end_group)
        kept = stored.subset("source")
        training.source.load({name: kept.load(name)[rows].to(group.device) for name in kept.layout})
    training.done, training.before, training.metrics = step, extra["time"], extra["metrics"]
    training.best.load(extra["best"])
    training.compiled_from = training.plan.first_compiled_step(step, extra.get("compiled_from"))
    training.threads.set_useful(extra.get("threads"))
    training.rows.load(step, extra["epoch_sums"], extra["train"], extra.get("held"))
    training.figures = extra.get("figures")
    _check_data(training, extra.get("data") or {})
    if group.is_main:
        run.log_event("resumed", step=step, world_size=group.size, was=extra["world_size"])
