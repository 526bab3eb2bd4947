"""Every process holds a part of each parameter, of its gradient and of its optimizer state (torch's fully_shard).

The unit that gathers the parameters outside of blocks is the call of the loss itself, not the model's forward: so the
task may use its module as it likes, its methods and attributes included.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from drivetrain.engine.fast.blocks import repeated_blocks
from drivetrain.engine.group import Group
from drivetrain.engine.maths.optim import is_torchs, takes_factor
from drivetrain.engine.maths.precision import HALF
from drivetrain.engine.state import tensors as state
from drivetrain.engine.strategies.base import Strategy
from drivetrain.engine.strategies.root import Root, dense_gradients, share_weights
from drivetrain.plan import Plan

# torch's optimizers in which no number of a parameter's state depends on another
BY_NUMBER = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")


class Sharded(Strategy):
    obstacle = "parameters come and go under fsdp"
    tail: Tensor

    def __init__(self, model: nn.Module, plan: Plan, group: Group, tail: int, folder: Path) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        group.open(plan.backend)
        if group.reach(folder):
            self.files = dist.new_group(backend="gloo")
        dense_gradients(model)
        share_weights(model, group)
        half = HALF.get(plan.precision)
        self.blocks: list[Any] = _own_blocks(model)
        whole = _unshardable(model) | (_norms(self.blocks) if half else set())
        for parameter in whole:
            parameter.data = parameter.data.to(group.device)
        self.root: Any = Root(model)
        self._reshards = plan.zero_stage == 3
        mesh = init_device_mesh(group.device.type, (group.size,))
        options: dict[str, Any] = {"mesh": mesh, "ignored_params": whole}
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=group.runs_ahead) if plan.offload == "all" else OffloadPolicy()
        # Blocks' matrices are gathered in the format that autocast multiplies them in; norms stay whole, in full precision.
        # Outside of blocks all is gathered in full: an embedding would else hand on, and blocks add up, in half precision.
        policy = MixedPrecisionPolicy(half, torch.float32, cast_forward_inputs=False) if half else MixedPrecisionPolicy()
        for block in self.blocks:
            fully_shard(block, reshard_after_forward=self._reshards, mp_policy=policy, **options)
        fully_shard(self.root, reshard_after_forward=False, **options)
        modules: list[Any] = [*self.blocks, self.root]
        for module in modules:
            module.set_gradient_divide_factor(1.0)  # the objective is divided by global counts: gradients are summed
            module.set_force_sum_reduction_for_comms(True)
            if hasattr(module, "set_reduce_scatter_unused_params"):
                module.set_reduce_scatter_unused_params(True, recurse=False)  # one rank's samples may use others than another's
        super().__init__(model, group)
        self.replicated = [p for p in self.parameters if not state.is_sharded(p)]
        self.sharded = [p for p in self.parameters if state.is_sharded(p)]
        # What all ranks sum in one message: figures and requests, and the squares of this rank's gradients.
        self._message = torch.zeros(tail + 1, device=group.device)
        self._parts: dict[nn.Parameter, nn.Parameter] = {}
        self.tail = self._message[:-1]

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Optimizers that treat each number by itself get this rank's parts as plain tensors, which all their kernels
        know; others see the sharded parameters."""
        self.optimizer = optimizer
        if not (is_torchs(optimizer) and type(optimizer).__name__ in BY_NUMBER):
            return
        self._parts = {p: nn.Parameter(state.local(p), p.requires_grad) for p in self.model.parameters() if state.is_sharded(p)}
        for group in optimizer.param_groups:
            group["params"] = [self._parts.get(p, p) for p in group["params"]]
        for parameter, part in self._parts.items():
            kept = optimizer.state.pop(parameter, None)
            if kept:
                optimizer.state[part] = {k: state.local(v) if isinstance(v, Tensor) else v for k, v in kept.items()}
        # A kernel on the host would read a factor of the device before it has come.
        apart = any(p.device != self.group.device for p in self.parameters)
        self._takes_factor = takes_factor(optimizer) and not apart

    # --- the model's forward and backward passes ---

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        result = self.root(function, *args)
        if not torch.is_grad_enabled():
            self.root.reshard()  # no backward pass will
        return result

    def collect(self, function: Callable[..., Any], *args: Any) -> Any:
        """All of the model is gathered once, for ranks may call it unequally often."""
        return self.run(self._with_blocks, function, *args)

    def _with_blocks(self, function: Callable[..., Any], *args: Any) -> Any:
        for block in self.blocks:
            block.set_reshard_after_forward(False, recurse=False)
            block.unshard()
        try:
            return function(*args)
        finally:
            for block in self.blocks:
                block.reshard()
                block.set_reshard_after_forward(self._reshards, recurse=False)

    # --- gradients ---

    def zero(self) -> None:
        self._message.zero_()
        for parameter in self.parameters:
            parameter.grad = None

    def reduce(self) -> None:
        """Each backward pass has summed the shards; what is left are parameters without a shard, figures and the norm."""
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._message[-1:].copy_(self._squares(self.sharded))
        self.group.all_reduce(self._message)
        if self.group.size > 1:
            for dtype in {p.dtype for p in self.replicated}:
                gradients = [p.grad for p in self.replicated if p.dtype == dtype and p.grad is not None]
                summed = _flatten_dense_tensors(gradients)
                self.group.all_reduce(summed)
                torch._foreach_copy_(gradients, list(_unflatten_dense_tensors(summed, gradients)))

    def _squares(self, parameters: list[nn.Parameter]) -> Tensor:
        """The sum of the squares of this rank's gradients."""
        if not parameters:
            return torch.zeros((), device=self.group.device)
        norms = torch._foreach_norm([state.local(p.grad) for p in parameters])
        return torch.stack([n.float() for n in norms]).square().sum().to(self.group.device)

    def norm(self) -> Tensor:
        return (self._message[-1] + self._squares(self.replicated)).sqrt()

    def scale(self, factor: Tensor) -> None:
        for place in {p.device for p in self.parameters}:
            gradients = [state.local(p.grad) for p in self.parameters if p.device == place]
            torch._foreach_mul_(gradients, factor.to(place))

    def update(self, factor: Tensor | None, clip: float, with_norm: bool, guarded: bool, enough: Tensor | None = None) -> Tensor | None:
        for parameter, part in self._parts.items():
            if parameter.grad is not None:
                part.data, part.grad = state.local(parameter), state.local(parameter.grad)
        return super().update(factor, clip, with_norm, guarded, enough)

    # --- state ---

    def begin(self) -> None:
        """Weights were shared before they were sharded."""

    def finite(self) -> bool:
        return all(self.group.gather(state.all_finite(self.parameters)))

    def model_tensors(self, parts: bool = False) -> tuple[dict[str, Any], dict[str, str]]:
        return state.model_tensors(self.model, _part if parts else self._whole)

    def optimizer_tensors(self, parts: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
        owners = self._owners()
        give = _part if parts else self._whole

        def take(value: Tensor, owner: Tensor) -> Any:
            sharded = owners.get(owner)
            return give(value if sharded is None or value.shape != owner.shape else _rejoined(value, sharded))

        return state.optimizer_tensors(self._held(), self.optimizer, take)

    def load_optimizer(self, stored: state.Stored, plain: dict[str, Any]) -> None:
        owners = self._owners()

        def take(name: str, owner: Tensor) -> Tensor:
            sharded, (shape, _) = owners.get(owner), stored.layout[name]
            if not shape or (sharded is not None and shape != sharded.shape):
                return stored.take(name)
            return stored.take_like(name, owner) if sharded is None else state.local(stored.take_like(name, sharded))

        state.load_optimizer(self._held(), self.optimizer, stored, plain, take)

    def _held(self) -> dict[str, Tensor]:
        """By name, what the optimizer holds of each parameter."""
        return {name: self._parts.get(p, p) for name, p in self.model.named_parameters()}

    def _owners(self) -> dict[Tensor, nn.Parameter]:
        return {part: parameter for parameter, part in self._parts.items()}

    def _whole(self, tensor: Tensor) -> Tensor:
        """On rank 0 the whole tensor, in the host's memory; gathered by all, one at a time."""
        tensor = tensor.detach()
        if not state.is_sharded(tensor):
            return tensor
        whole: Tensor = tensor.to(self.group.device).full_tensor()  # type: ignore[attr-defined]
        return whole.cpu() if self.group.main else torch.empty(0)


def _part(tensor: Tensor) -> Any:
    """What this rank writes of a tensor."""
    tensor = tensor.detach()
    return state.part_of(tensor) if state.is_sharded(tensor) else tensor


def _rejoined(part: Tensor, like: Any) -> Tensor:
    """This rank's part as the sharded tensor it is of."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())


# --- before sharding ---------------------------------------------------------------------------


def _unshardable(model: nn.Module) -> set[nn.Parameter]:
    """Single numbers, and trained parameters in another format than most: they stay whole everywhere."""
    formats = [p.dtype for p in model.parameters() if p.requires_grad]
    usual = max(set(formats), key=lambda dtype: sum(p.numel() for p in model.parameters() if p.requires_grad and p.dtype == dtype))
    return {p for p in model.parameters() if p.dim() == 0 or (p.requires_grad and p.dtype != usual)}


def _own_blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks, unless they share parameters with each other or the rest: then only the whole can be gathered."""
    blocks = repeated_blocks(model)
    owners: dict[nn.Parameter, set[int]] = {}
    for number, block in enumerate(blocks):
        for module in block.modules():
            for parameter in module.parameters(recurse=False):
                owners.setdefault(parameter, set()).add(number)
    inside = {module for block in blocks for module in block.modules()}
    for module in model.modules():
        if module not in inside:
            for parameter in module.parameters(recurse=False):
                owners.get(parameter, set()).add(-1)
    return blocks if all(len(users) == 1 for users in owners.values()) else []


def _norms(blocks: list[Any]) -> set[nn.Parameter]:
    """The parameters of blocks' normalisations: small, and autocast computes with them in full precision."""
    kinds = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)
    return {p for block in blocks for m in block.modules() if isinstance(m, kinds) for p in m.parameters(recurse=False)}
