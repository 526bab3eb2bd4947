"""Makes optimizers and learning-rate schedules, from the settings or by the task's own hooks."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from drivetrain.engine.group import Group
from drivetrain.engine.numerics.losses import describe_value, real_number
from drivetrain.outcomes import Problem
from drivetrain.settings import Length
from drivetrain.task import Task, overrides


def make_optimizer(task: Task, model: torch.nn.Module, device: torch.device, captured: bool = True) -> torch.optim.Optimizer:
    """Returns the optimizer of a task's model; with `captured`, one whose step a CUDA graph can capture, where possible."""
    optimizer = _make_uncaptured(task, model)
    if captured and device.type == "cuda" and is_plain_torch_optimizer(optimizer):
        for group in optimizer.param_groups:
            if "capturable" in group:
                group["capturable"] = True  # its step counts live on the device, where a CUDA graph reads them
    return optimizer


def _make_uncaptured(task: Task, model: torch.nn.Module) -> torch.optim.Optimizer:
    if overrides(task, "optimizer"):
        optimizer = task.optimizer(model)
        if optimizer is not None:
            _check_is_usable(optimizer, task, model)
            return optimizer
    parameters = [p for p in model.parameters() if p.requires_grad]
    options: dict[str, Any] = {"lr": task.learning_rate, "weight_decay": task.weight_decay}
    options["fused"] = all(p.is_floating_point() and p.device.type in ("cpu", "cuda", "mps") for p in parameters)
    if task.optim == "sgd":
        return torch.optim.SGD(parameters, momentum=task.momentum, **options)
    adam = torch.optim.AdamW if task.optim == "adamw" else torch.optim.Adam
    return adam(parameters, **options)


def _check_is_usable(optimizer: Any, task: Task, model: torch.nn.Module) -> None:
    """Raises Problem for an optimizer of the task that the engine cannot use."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise Problem(f"optimizer() gave a {type(optimizer).__name__}: return a torch.optim.Optimizer, or None for {task.optim}")
    model_parameters = set(model.parameters())
    if any(p not in model_parameters for group in optimizer.param_groups for p in group["params"]):
        raise Problem("optimizer() has a parameter that the model does not: make it a part of the module that model() gives")
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise Problem(
            f"optimizer() gave {name}: gradients are summed as dense tensors, so use Adam or AdamW (nn.Embedding(sparse=True) works)"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise Problem(f"optimizer() gave {name}, whose step(closure) computes the loss by itself: give one with a step() of its own")
    has_scheduler = any(isinstance(value, torch.optim.lr_scheduler.LRScheduler) for value in vars(task).values())
    if has_scheduler or any("initial_lr" in group for group in optimizer.param_groups):  # torch's schedulers write it there
        raise Problem(
            "optimizer() made a learning-rate scheduler of torch.optim, which nobody would step: define schedule(step, steps),"
            " which returns the factor of the peak rate, or use warmup and decay"
        )


def is_plain_torch_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether the optimizer is one of torch's own classes, not derived or wrapped, without hooks around its step."""
    has_hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return type(optimizer).__module__.startswith("torch.optim.") and not has_hooks


def supports_fused_scaling(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether the optimizer's fused kernel divides gradients by a factor and skips overflowed steps."""
    supports = getattr(optimizer, "_step_supports_amp_scaling", False)
    return is_plain_torch_optimizer(optimizer) and supports and all(group.get("fused") for group in optimizer.param_groups)


def prepare_for_skipped_steps(optimizer: torch.optim.Optimizer) -> None:
    """Creates the momentum buffers of fused SGD before a first step that may be skipped.

    SGD creates them in its first step, and leaves them uninitialized if that step is skipped. Zeros give the same first update.
    """
    if isinstance(optimizer, torch.optim.SGD) and supports_fused_scaling(optimizer):
        for group in optimizer.param_groups:
            for parameter in group["params"] if group["momentum"] else ():
                optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))


def is_capturable(optimizer: torch.optim.Optimizer, has_loss_scale: bool) -> bool:
    """Returns whether a CUDA graph can capture the optimizer's step. With a loss scale, its kernel must be able to skip steps."""
    if supports_fused_scaling(optimizer):
        return True
    if has_loss_scale or not is_plain_torch_optimizer(optimizer):
        return False
    return all(group.get("capturable") and group.get("foreach") is not False for group in optimizer.param_groups)


_FUSED_KERNELS: dict[type, Callable[..., None]] = {torch.optim.Adam: torch._fused_adam_, torch.optim.AdamW: torch._fused_adamw_}


def can_call_kernel_directly(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether `step_by_direct_kernel_call` may replace `step`: for torch's fused Adam or AdamW on plain CPU tensors of one dtype."""
    if type(optimizer) not in _FUSED_KERNELS or not supports_fused_scaling(optimizer):
        return False
    groups = optimizer.param_groups
    parameters = [p for group in groups for p in group["params"]]
    are_plain = all(type(p) in (Tensor, torch.nn.Parameter) and p.device.type == "cpu" for p in parameters)
    has_special_options = any(group["amsgrad"] or group["differentiable"] or isinstance(group["lr"], Tensor) for group in groups)
    return are_plain and not has_special_options and len({p.dtype for p in parameters}) == 1


@torch.no_grad()
def step_by_direct_kernel_call(optimizer: Any) -> None:
    """Takes a step by calling torch's kernel directly, because for a small model the Python code of `step` takes longer than the kernel."""
    kernel, state = _FUSED_KERNELS[type(optimizer)], optimizer.state
    scale, overflow = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    ready = []
    for group in optimizer.param_groups:
        parameters = [p for p in group["params"] if p.grad is not None]
        if any(not state[p] for p in parameters):  # the first step creates the state
            optimizer.step()
            return
        if parameters:
            ready.append((group, parameters))
    for group, parameters in ready:
        beta1, beta2 = group["betas"]
        steps = [state[p]["step"] for p in parameters]
        torch._foreach_add_(steps, 1)
        kernel(
            parameters, [p.grad for p in parameters], [state[p]["exp_avg"] for p in parameters],
            [state[p]["exp_avg_sq"] for p in parameters], [], steps, lr=group["lr"], beta1=beta1, beta2=beta2,
            weight_decay=group["weight_decay"], eps=group["eps"], amsgrad=False, maximize=group["maximize"],
            grad_scale=scale, found_inf=overflow,
        )  # fmt: skip
        if overflow is not None:
            torch._foreach_sub_(steps, [overflow] * len(steps))


def make_schedule(task: Task, steps: int, steps_per_epoch: int) -> Callable[[int], float]:
    """Returns a function from a step of the run to the factor of the peak learning rate."""
    if overrides(task, "schedule") and task.schedule(0, steps) is not None:
        return lambda step: _factor_of_task(task, step, steps)
    warmup = Length.parse(task.warmup).in_steps(steps_per_epoch)
    if warmup is None:
        raise Problem(f"warmup={task.warmup}: give steps or epochs (1ep), not a time")
    return lambda step: _factor_of_settings(task.decay, step, steps, warmup)


def _factor_of_task(task: Task, step: int, steps: int) -> float:
    value = task.schedule(step, steps)
    factor = real_number(value)
    if factor is None or not 0 <= float(factor) < math.inf:
        raise Problem(
            f"schedule({step}, {steps}) gave {describe_value(value)}: return the factor of the peak learning rate, a number of 0 or more"
        )
    return float(factor)


def _factor_of_settings(decay: str, step: int, steps: int, warmup: int) -> float:
    if step < warmup:
        return (step + 1) / warmup
    if decay == "constant":
        return 1.0
    done_share = (step - warmup) / max(1, steps - warmup)
    if decay == "linear":
        return 1.0 - done_share
    assert decay == "cosine", f"decay={decay} has no schedule"
    return 0.5 * (1.0 + math.cos(math.pi * done_share))


class LearningRates:
    """Sets the learning rate of each parameter group: its own peak times the schedule's factor."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, factor: Callable[[int], float], steps: int, group: Group, on_device: bool = True
    ) -> None:
        self.groups = optimizer.param_groups
        self.peaks = [float(group["lr"]) for group in self.groups]
        self.factor = factor
        self._factors: list[float] = []
        self._tables: list[tuple[Tensor, Tensor]] = []
        """With device counters, for each parameter group: (the rates of all steps, the tensor from which the optimizer reads the current rate)."""
        if on_device and group.device_counters and is_capturable(optimizer, False):
            self._factors = [factor(step) for step in range(steps)]
            factors = torch.tensor(self._factors, device=group.device)
            for options, peak in zip(self.groups, self.peaks, strict=True):
                current = torch.full((1,), peak, device=group.device)
                options["lr"] = current.view(())
                self._tables.append((factors * peak, current))

    def device_table(self) -> Tensor | None:
        """Returns the rates of all steps as a device tensor, if they are the same for all parameters; else None."""
        return self._tables[0][0] if len(self._tables) == 1 else None

    def set_on_device(self, step: Tensor) -> None:
        """Sets the rates of a step whose number is a device tensor; only the device works."""
        for rates, current in self._tables:
            torch.index_select(rates, 0, step, out=current)

    def set(self, step: int) -> None:
        """Sets the rates of a step, if the optimizer reads them as Python numbers."""
        if self._tables:
            return
        factor = self.factor(step)
        for group, peak in zip(self.groups, self.peaks, strict=True):
            group["lr"] = peak * factor

    def at(self, step: int) -> float:
        """Returns the learning rate of the first parameter group at a step."""
        return self.peaks[0] * (self._factors[step] if self._factors else self.factor(step))
