"""How a model is spread over processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from drivetrain.engine.group import Group
from drivetrain.engine.maths.optim import capturable
from drivetrain.engine.strategies.base import Strategy
from drivetrain.engine.strategies.replicate import Replicated
from drivetrain.engine.strategies.single import Single
from drivetrain.plan import Plan
from drivetrain.task import Task

__all__ = ["Replicated", "Single", "Strategy", "spread"]


def spread(
    model: nn.Module, make: Callable[[], torch.optim.Optimizer], task: Task, plan: Plan, group: Group, tail: int, folder: Path
) -> Strategy:
    """Spread a model as the plan says, and make its optimizer: after sharding, which gives it other parameters."""
    if plan.strategy == "fsdp":
        from drivetrain.engine.strategies.sharded import Sharded

        strategy: Strategy = Sharded(model, plan, group, tail, folder)
        optimizer = make()
    elif plan.strategy == "deepspeed":  # shards the parameters of an optimizer that it is given
        from drivetrain.engine.strategies.zero import Zero

        optimizer = make()
        strategy = Zero(model, optimizer, task, plan, group, tail, folder)
    else:
        optimizer = make()
        # One piece of work where nothing comes between backward and update: no further micro-batch, rank, or host.
        ready = not group.runs_ahead or capturable(optimizer, plan.precision == "fp16")
        at_once = group.size == plan.accumulation == 1 and ready
        strategy = Single(model, group, tail) if at_once else Replicated(model, group, tail)
    strategy.adopt(optimizer)
    return strategy
