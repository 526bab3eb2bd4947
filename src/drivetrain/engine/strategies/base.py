"""The interface of a strategy, with the code for strategies in which every process holds the full model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from drivetrain.engine.fast.parallel_kernels import parallel_optimizer_kernels
from drivetrain.engine.group import Group
from drivetrain.engine.numerics.optim import can_call_kernel_directly, step_by_direct_kernel_call, supports_fused_scaling
from drivetrain.engine.state import tensors as state


class Strategy:
    """Distributes a model over processes. Step and loop use only this interface."""

    is_one_piece = False
    """Whether a step's update directly follows its only backward pass, so that one CUDA graph can hold the step."""
    capture_obstacle = ""
    """Why steps can be neither captured nor compiled; empty if they can."""
    piggyback: Tensor | None
    """The floats that are all-reduced with the gradients (a step's metrics and requests); None if they need no all-reduce."""
    optimizer: torch.optim.Optimizer
    checkpoint_group: dist.ProcessGroup | None = None
    """The group in which each rank writes its own shards of a checkpoint; None where rank 0 writes all of it."""
    _kernel_scales_gradients = False
    """Whether the optimizer's own kernel divides the gradients by a factor and skips overflowed steps."""
    _calls_kernel_directly = False

    def __init__(self, model: nn.Module, group: Group) -> None:
        self.model, self.group = model, group
        self.parameters = [p for p in model.parameters() if p.requires_grad]

    def set_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Sets the optimizer, which was made after the model was distributed."""
        self.optimizer = optimizer
        self._kernel_scales_gradients = supports_fused_scaling(optimizer)
        self._calls_kernel_directly = can_call_kernel_directly(optimizer)

    # --- forward and backward ---

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls a function that uses the model."""
        return function(*args)

    def call_unevenly(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls a function that may use the model a different number of times on each rank."""
        return function(*args)

    def backward(self, objective: Tensor) -> None:
        """Adds this micro-batch's gradients to the parameters' gradients."""
        objective.backward()

    # --- gradients ---

    def zero_gradients(self) -> None:
        raise NotImplementedError

    def reduce_gradients(self) -> None:
        """Sums gradients and piggyback over all ranks; parameters without a gradient get one of zeros."""
        raise NotImplementedError

    def gradient_norm(self) -> Tensor:
        """Returns the norm of all gradients."""
        return norm_of(self.parameters)

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiplies all gradients."""
        raise NotImplementedError

    def update(
        self, factor: Tensor | None, clip: float, with_norm: bool, skip_nonfinite: bool, skip: Tensor | None = None
    ) -> Tensor | None:
        """Multiplies gradients by a factor, clips them and takes the optimizer's step.

        The step is skipped where `skip` is 1, and with `skip_nonfinite` where the norm is not finite.
        Returns the gradients' norm if it was computed."""
        norm: Tensor | None = None
        if with_norm or clip or skip_nonfinite:
            norm = self.gradient_norm() if factor is None else self.gradient_norm() * factor
            if clip:
                clip_factor = (clip / (norm + 1e-6)).clamp_(max=1.0)
                factor = clip_factor if factor is None else factor * clip_factor
            if skip_nonfinite:
                nonfinite = (~torch.isfinite(norm)).float()
                skip = nonfinite if skip is None else torch.maximum(nonfinite, skip)
        if self._kernel_scales_gradients:
            self._hand_to_optimizer(factor, skip)
        else:
            if skip is not None and skip.item():
                return norm  # this optimizer's kernel cannot skip a step, so the host reads `skip`, which costs a sync
            if factor is not None:
                self.scale_gradients(factor)
        self._optimizer_step()
        return norm

    def _hand_to_optimizer(self, factor: Tensor | None, skip: Tensor | None) -> None:
        """Tells the optimizer's kernel the factor of the gradients and whether to skip the step."""
        optimizer: Any = self.optimizer
        if factor is not None:
            optimizer.grad_scale = 1.0 / factor
        if skip is not None:
            optimizer.found_inf = skip

    def _optimizer_step(self) -> None:
        if self._calls_kernel_directly:
            step_by_direct_kernel_call(self.optimizer)
        else:
            with parallel_optimizer_kernels(self.group.device):
                self.optimizer.step()

    # --- state ---

    def broadcast_weights(self) -> None:
        """Copies the weights of rank 0 to every rank, before the first step of a new run."""
        self.group.broadcast([*self.model.parameters(), *self.dense_buffers()])

    def broadcast_buffers(self) -> None:
        """Copies the buffers of rank 0 (BatchNorm statistics) to every rank, before an evaluation or a save."""
        self.group.broadcast(self.dense_buffers())

    def dense_buffers(self) -> list[Tensor]:
        """Returns the dense buffers. Others (sparse ones) are neither saved nor broadcast: every rank makes its own."""
        return [b for b in self.model.buffers() if not state.unsavable_form(b)]

    def weights_are_finite(self) -> bool:
        """Returns whether all trained parameters are finite; waits for the device once."""
        return state.all_finite(self.parameters)

    def model_tensors(self, sharded: bool = False) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Returns the model's tensors by name, full on rank 0 or `sharded`, and its aliases; a collective call."""
        return state.model_tensors(self.model)

    def optimizer_tensors(self, sharded: bool = False) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Returns the optimizer's tensors by name, full on rank 0 or `sharded`, and its other values; a collective call."""
        return state.optimizer_tensors(dict(self.model.named_parameters()), self.optimizer)

    def load_model(self, stored: state.StoredTensors, aliases: dict[str, str], origin: str) -> None:
        state.load_model(self.model, stored, aliases, origin)

    def load_optimizer(self, stored: state.StoredTensors, values: dict[str, Any]) -> None:
        state.load_optimizer(dict(self.model.named_parameters()), self.optimizer, stored, values)


def norm_of(parameters: list[nn.Parameter]) -> Tensor:
    """Returns the norm of all gradients. It is computed from each tensor's norm, so that it is the same in every strategy.

    torch.nn.utils.get_total_norm would stay in half precision, and grouping tensors by type costs host time in each step."""
    norms = torch._foreach_norm([p.grad for p in parameters if p.grad is not None])
    total: Tensor = torch.linalg.vector_norm(torch.stack([n.float() for n in norms]))
    return total
