"""Optimizers and learning-rate schedules, as settings name them or as the task makes them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from drivetrain.engine.group import Group
from drivetrain.engine.numerics.losses import real_number, shown
from drivetrain.outcomes import Problem
from drivetrain.settings import Length
from drivetrain.task import Task, overrides


def make_optimizer(task: Task, model: torch.nn.Module, device: torch.device, captured: bool = True) -> torch.optim.Optimizer:
    optimizer = _make(task, model)
    if captured and device.type == "cuda" and is_plain_torch_optimizer(optimizer):
        for group in optimizer.param_groups:
            if "capturable" in group:
                group["capturable"] = True  # its counts of steps live on the device, where a graph finds them
    return optimizer


def _make(task: Task, model: torch.nn.Module) -> torch.optim.Optimizer:
    if overrides(task, "optimizer"):
        own = task.optimizer(model)
        if own is not None:
            _check(own, task, model)
            return own
    parameters = [p for p in model.parameters() if p.requires_grad]
    options: dict[str, Any] = {"lr": task.learning_rate, "weight_decay": task.weight_decay}
    options["fused"] = all(p.is_floating_point() and p.device.type in ("cpu", "cuda", "mps") for p in parameters)
    if task.optim == "sgd":
        return torch.optim.SGD(parameters, momentum=task.momentum, **options)
    kind = torch.optim.AdamW if task.optim == "adamw" else torch.optim.Adam
    return kind(parameters, **options)


def _check(own: Any, task: Task, model: torch.nn.Module) -> None:
    """Refuse what `optimizer` gave where the engine could not use it as it is meant."""
    if not isinstance(own, torch.optim.Optimizer):
        raise Problem(f"optimizer() gave a {type(own).__name__}: return a torch.optim.Optimizer, or None for {task.optim}")
    known = set(model.parameters())
    if any(p not in known for group in own.param_groups for p in group["params"]):
        raise Problem("optimizer() has a parameter that the model does not: make it a part of the module that model() gives")
    name = type(own).__name__
    if isinstance(own, torch.optim.SparseAdam):
        raise Problem(
            f"optimizer() gave {name}: gradients are summed as dense tensors, so use Adam or AdamW (nn.Embedding(sparse=True) works)"
        )
    closure = inspect.signature(own.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise Problem(f"optimizer() gave {name}, whose step(closure) computes the loss by itself: give one with a step() of its own")
    kept = any(isinstance(value, torch.optim.lr_scheduler.LRScheduler) for value in vars(task).values())
    if kept or any("initial_lr" in group for group in own.param_groups):  # which torch's schedulers write there
        raise Problem(
            "optimizer() made a learning-rate scheduler of torch.optim, which nobody would step: define schedule(step, steps),"
            " which returns the factor of the peak rate, or use warmup and decay"
        )


def is_plain_torch_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is one of torch's own, with nothing derived, wrapped or hooked around its step."""
    hooked = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return type(optimizer).__module__.startswith("torch.optim.") and not hooked


def supports_fused_scaling(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's own kernel divides gradients and skips overflowed steps."""
    supports = getattr(optimizer, "_step_supports_amp_scaling", False)
    return is_plain_torch_optimizer(optimizer) and supports and all(group.get("fused") for group in optimizer.param_groups)


def prepare_for_skipped_steps(optimizer: torch.optim.Optimizer) -> None:
    """Before fp16's first steps, which may overflow: fused SGD makes its momentum in the first step it sees, skipped or not,
    and leaves it without values then. From zeros the first step that counts gives the same."""
    if isinstance(optimizer, torch.optim.SGD) and supports_fused_scaling(optimizer):
        for group in optimizer.param_groups:
            for parameter in group["params"] if group["momentum"] else ():
                optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))


def capturable(optimizer: torch.optim.Optimizer, scaled: bool) -> bool:
    """Whether the optimizer's step can be part of a graph; with fp16's scale it must skip steps by itself."""
    able = (
        not scaled
        and is_plain_torch_optimizer(optimizer)
        and all(group.get("capturable") and group.get("foreach") is not False for group in optimizer.param_groups)
    )
    return supports_fused_scaling(optimizer) or able


_ADAMS: dict[type, Callable[..., None]] = {torch.optim.Adam: torch._fused_adam_, torch.optim.AdamW: torch._fused_adamw_}


def can_call_kernel_directly(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `step_by_direct_kernel_call` does what its `step` does: torch's fused Adam or AdamW for plain tensors of one kind on a CPU."""
    if type(optimizer) not in _ADAMS or not supports_fused_scaling(optimizer):
        return False
    groups = optimizer.param_groups
    parameters = [p for group in groups for p in group["params"]]
    usual = all(type(p) in (Tensor, torch.nn.Parameter) and p.device.type == "cpu" for p in parameters)
    special = any(group["amsgrad"] or group["differentiable"] or isinstance(group["lr"], Tensor) for group in groups)
    return usual and not special and len({p.dtype for p in parameters}) == 1


@torch.no_grad()
def step_by_direct_kernel_call(optimizer: Any) -> None:
    """The same kernel on the same tensors, without what `step` does around it, which takes longer than a small model's kernel."""
    kernel, state = _ADAMS[type(optimizer)], optimizer.state
    scale, overflow = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    ready = []
    for group in optimizer.param_groups:
        parameters = [p for p in group["params"] if p.grad is not None]
        if any(not state[p] for p in parameters):  # its first step, which makes the state
            optimizer.step()
            return
        if parameters:
            ready.append((group, parameters))
    for group, parameters in ready:
        first, second = group["betas"]
        steps = [state[p]["step"] for p in parameters]
        torch._foreach_add_(steps, 1)
        kernel(
            parameters, [p.grad for p in parameters], [state[p]["exp_avg"] for p in parameters],
            [state[p]["exp_avg_sq"] for p in parameters], [], steps, lr=group["lr"], beta1=first, beta2=second,
            weight_decay=group["weight_decay"], eps=group["eps"], amsgrad=False, maximize=group["maximize"],
            grad_scale=scale, found_inf=overflow,
        )  # fmt: skip
        if overflow is not None:
            torch._foreach_sub_(steps, [overflow] * len(steps))


def make_schedule(task: Task, steps: int, steps_per_epoch: int) -> Callable[[int], float]:
    """The factor of the peak learning rate at each step of the run."""
    if overrides(task, "schedule") and task.schedule(0, steps) is not None:
        return lambda step: _own_factor(task, step, steps)
    warmup = Length.parse(task.warmup).in_steps(steps_per_epoch)
    if warmup is None:
        raise Problem(f"warmup={task.warmup}: give steps or epochs (1ep), not a time")
    return lambda step: _factor(task.decay, step, steps, warmup)


def _own_factor(task: Task, step: int, steps: int) -> float:
    given = task.schedule(step, steps)
    factor = real_number(given)
    if factor is None or not 0 <= float(factor) < math.inf:
        raise Problem(f"schedule({step}, {steps}) gave {shown(given)}: return the factor of the peak learning rate, a number of 0 or more")
    return float(factor)


def _factor(decay: str, step: int, steps: int, warmup: int) -> float:
    if step < warmup:
        return (step + 1) / warmup
    if decay == "constant":
        return 1.0
    done = (step - warmup) / max(1, steps - warmup)
    return 1.0 - done if decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))


class Rates:
    """Sets each parameter group's learning rate: its own peak times the schedule's factor."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, factor: Callable[[int], float], steps: int, group: Group, on_device: bool = True
    ) -> None:
        self.groups = optimizer.param_groups
        self.peaks = [float(group["lr"]) for group in self.groups]
        self.factor = factor
        self._factors: list[float] = []
        self._tables: list[tuple[Tensor, Tensor]] = []
        """Of each group on a GPU: all its rates, and the place from which the optimizer's kernel reads the present one."""
        if on_device and group.device_counters and capturable(optimizer, False):
            self._factors = [factor(step) for step in range(steps)]
            factors = torch.tensor(self._factors, device=group.device)
            for options, peak in zip(self.groups, self.peaks, strict=True):
                place = torch.full((1,), peak, device=group.device)
                options["lr"] = place.view(())
                self._tables.append((factors * peak, place))

    def device_table(self) -> Tensor | None:
        """The rates of all steps, where the device has them and they are the same for all parameters."""
        return self._tables[0][0] if len(self._tables) == 1 else None

    def set_on_device(self, step: Tensor) -> None:
        """Set the rates of the step whose number the device holds: nothing of it passes through the host."""
        for rates, place in self._tables:
            torch.index_select(rates, 0, step, out=place)

    def set(self, step: int) -> None:
        """Set the rates of a step where optimizers read plain numbers."""
        if self._tables:
            return
        factor = self.factor(step)
        for group, peak in zip(self.groups, self.peaks, strict=True):
            group["lr"] = peak * factor

    def at(self, step: int) -> float:
        return self.peaks[0] * (self._factors[step] if self._factors else self.factor(step))
