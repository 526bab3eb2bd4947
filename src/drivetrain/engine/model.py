"""Builds the model, loads its first weights, and moves it to the device."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from drivetrain.engine.data.keyed_random import seed_everything
from drivetrain.engine.group import Group
from drivetrain.engine.log.observe import Observer
from drivetrain.engine.state import tensors as state
from drivetrain.engine.state.checkpoint import newest_good, require_checkpoint
from drivetrain.engine.strategies.recompute import recompute_blocks
from drivetrain.outcomes import Problem
from drivetrain.plan import Plan
from drivetrain.runs import Run, check_exported, find
from drivetrain.task import Task


def build_model(task: Task, plan: Plan, run: Run, group: Group, observer: Observer) -> nn.Module:
    """Returns the task's model with its first weights, on the device unless it is to be sharded."""
    seed_everything(int(task.seed))
    if group.device.type == "cuda":
        torch.cuda.manual_seed(int(task.seed))
    task.precision = plan.precision
    model = task.model()
    _check_model(model)
    _copy_expanded_buffers(model)
    if task.start and not group.broadcast_object(bool(run.checkpoint_steps())):  # a resumed run loads its checkpoint instead
        tensors, own_aliases = weights_of(task.start) if group.is_main else (None, None)  # another machine may not have the file
        aliases = group.broadcast_object(own_aliases)
        state.load_model(model, state.StoredTensors(tensors, group), aliases, task.start)
    if not plan.is_sharded:  # a sharded model is moved part by part, because it may not fit on one device
        model = model.to(group.device)
    if plan.channels_last:
        _use_channels_last(model)
    model = _batchnorm(model, task, plan, group, observer)
    if plan.activation_checkpointing:
        recompute_blocks(model, observer, group.is_main)
    return model


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise Problem(f"model() gave a {type(model).__name__}: return an nn.Module")
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in model.parameters()):
        raise Problem("model() has lazy layers whose sizes are not known yet: give the sizes, or run a batch through it in model()")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise Problem(f"model() has no values for {name!r} (device meta): make the module where it gets its weights")
    if not any(p.requires_grad for p in model.parameters()):
        raise Problem("model() has no parameter that requires a gradient: there is nothing to train")


def _use_channels_last(model: nn.Module) -> None:
    if any(isinstance(m, nn.Conv2d) for m in model.modules()):
        for parameter in model.parameters():
            if parameter.dim() == 4:
                # empty_like sets the strides. Module.to() would not: with one channel a tensor already counts as both formats.
                parameter.data = torch.empty_like(parameter, memory_format=torch.channels_last).copy_(parameter)


def _copy_expanded_buffers(model: nn.Module) -> None:
    """Gives every element of an expanded buffer its own memory, because loading and broadcasting write into it."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is None or state.unsavable_form(buffer):
                continue
            if any(size > 1 and stride == 0 for size, stride in zip(buffer.shape, buffer.stride(), strict=True)):
                module._buffers[name] = buffer.contiguous()


def weights_of(start: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Returns the weights of a run (final, else of its last good checkpoint) or of a .safetensors file, with their aliases."""
    if start.endswith(".safetensors"):
        if not Path(start).is_file():
            raise Problem(f"start={start}: there is no such file")
        check_exported(Path(start))
        return state.read_weights(Path(start))
    weights = run_weights(find(start))
    return weights.tensors, weights.aliases


class Weights(NamedTuple):
    tensors: dict[str, torch.Tensor]
    aliases: dict[str, str]
    step: int | None
    """The step after which they were saved, where that is known."""


def run_weights(run: Run) -> Weights:
    """Returns the final weights of a finished run, else those of its last good checkpoint."""
    if run.is_finished and run.model_path.is_file():
        card = run.final_weights()
        return Weights(*state.read_weights(run.model_path), card["step"] if card else None)
    checkpoint = require_checkpoint(newest_good(run, lambda text: None), run)
    return Weights(state.without_prefix(checkpoint.tensors(), "model"), checkpoint.extra["aliases"], checkpoint.step)


def _batchnorm(model: nn.Module, task: Task, plan: Plan, group: Group, observer: Observer) -> nn.Module:
    notice = batchnorm_notice(model, task, plan)
    if notice and task.sync_batchnorm and group.device.type == "cuda" and group.size > 1:
        return nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-any-return]
    if notice and group.is_main:
        observer.notice(notice)
    return model


def has_batchnorm(model: nn.Module) -> bool:
    return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())


def batchnorm_notice(model: nn.Module, task: Task, plan: Plan) -> str:
    """Returns a notice if BatchNorm makes the result depend on the plan; else an empty string."""
    if not has_batchnorm(model) or plan.micro_batch >= plan.global_batch:
        return ""
    why = "sync_batchnorm=true shares them between GPUs" if not task.sync_batchnorm else "SyncBatchNorm needs several GPUs"
    return (
        f"this model has BatchNorm: its statistics come from {plan.micro_batch} samples at a time, not from the global"
        f" batch of {plan.global_batch}, so the result depends on the plan ({why})"
    )
