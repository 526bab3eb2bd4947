"""Distributes a model over processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from drivetrain.engine.group import Group
from drivetrain.engine.numerics.optim import is_capturable
from drivetrain.engine.strategies.base import Strategy
from drivetrain.engine.strategies.replicate import Replicated
from drivetrain.engine.strategies.single import Single
from drivetrain.plan import Plan
from drivetrain.task import Task

__all__ = ["Replicated", "Single", "Strategy", "make_strategy"]


def make_strategy(
    model: nn.Module,
    make_optimizer: Callable[[], torch.optim.Optimizer],
    task: Task,
    plan: Plan,
    group: Group,
    piggyback_size: int,
    folder: Path,
) -> Strategy:
    """Distributes a model as the plan says, and makes its optimizer. FSDP replaces parameters, so the optimizer is made after it."""
    if plan.strategy == "fsdp":
        from drivetrain.engine.strategies.sharded import Sharded

        strategy: Strategy = Sharded(model, plan, group, piggyback_size, folder)
        optimizer = make_optimizer()
    elif plan.strategy == "deepspeed":  # takes an existing optimizer and shards its parameters
        from drivetrain.engine.strategies.zero import Zero

        optimizer = make_optimizer()
        strategy = Zero(model, optimizer, task, plan, group, piggyback_size, folder)
    else:
        optimizer = make_optimizer()
        # A step is one piece of work if the update directly follows the only backward pass, without an all-reduce or the host between.
        update_needs_host = group.device_counters and not is_capturable(optimizer, plan.precision == "fp16")
        is_one_piece = group.size == 1 and plan.accumulation == 1 and not update_needs_host
        strategy = (Single if is_one_piece else Replicated)(model, group, piggyback_size)
    strategy.set_optimizer(optimizer)
    return strategy
