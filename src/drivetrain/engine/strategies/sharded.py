"""FSDP: every process holds a shard of each parameter, its gradient and its optimizer state (torch's fully_shard).

Parameters outside of blocks are gathered for the call of the loss, not only for the model's forward. So the loss may use
all methods and attributes of the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from drivetrain.engine.fast.blocks import repeated_blocks
from drivetrain.engine.group import Group
from drivetrain.engine.numerics.optim import is_plain_torch_optimizer, supports_fused_scaling
from drivetrain.engine.numerics.precision import AUTOCAST_DTYPES
from drivetrain.engine.state import tensors as state
from drivetrain.engine.strategies.base import Strategy
from drivetrain.engine.strategies.root import Root, broadcast_model, use_dense_gradients
from drivetrain.plan import Plan

ELEMENTWISE_OPTIMIZERS = (
    "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
)  # fmt: skip
"""torch's optimizers in which no element of a parameter's state depends on another."""


class Sharded(Strategy):
    """torch's FSDP2. "Sharded" parameters are DTensors; "replicated" ones are those that FSDP2 leaves out."""

    capture_obstacle = "parameters come and go under fsdp"
    piggyback: Tensor

    def __init__(self, model: nn.Module, plan: Plan, group: Group, piggyback_size: int, folder: Path) -> None:
        group.ensure_initialized(plan.backend)
        if group.shares_folder(folder):
            self.checkpoint_group = dist.new_group(backend="gloo")
        use_dense_gradients(model)
        broadcast_model(model, group)
        self._reshards = plan.zero_stage == 3
        self._blocks: list[Any] = _unshared_blocks(model)
        self._root: Any = Root(model)
        self._shard(plan, group)
        super().__init__(model, group)
        self._replicated = [p for p in self.parameters if not state.is_sharded(p)]
        self._sharded = [p for p in self.parameters if state.is_sharded(p)]
        # One all-reduce sums the piggyback and, in the last element, the sum of squares of this rank's gradients.
        self._reduce_buffer = torch.zeros(piggyback_size + 1, device=group.device)
        self.piggyback = self._reduce_buffer[:-1]
        self._local_parameters: dict[nn.Parameter, nn.Parameter] = {}
        """Sharded parameter -> this rank's shard, if the optimizer holds shards."""

    def _shard(self, plan: Plan, group: Group) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        half = AUTOCAST_DTYPES.get(plan.precision)
        replicated = _unshardable(self._root.model) | (_norm_parameters(self._blocks) if half else set())
        for parameter in replicated:
            parameter.data = parameter.data.to(group.device)
        mesh = init_device_mesh(group.device.type, (group.size,))
        options: dict[str, Any] = {"mesh": mesh, "ignored_params": replicated}
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=group.device_counters) if plan.offload == "all" else OffloadPolicy()
        # Matrices of blocks are gathered in the number format in which autocast multiplies them; norms are replicated in full precision.
        # Other parameters are gathered in full precision: from a half-precision embedding, blocks would add their outputs in half precision.
        policy = MixedPrecisionPolicy(half, torch.float32, cast_forward_inputs=False) if half else MixedPrecisionPolicy()
        for block in self._blocks:
            fully_shard(block, reshard_after_forward=self._reshards, mp_policy=policy, **options)
        fully_shard(self._root, reshard_after_forward=False, **options)
        for module in (*self._blocks, self._root):
            module.set_gradient_divide_factor(1.0)  # gradients are summed: the objective is already divided by global counts
            module.set_force_sum_reduction_for_comms(True)
            if hasattr(module, "set_reduce_scatter_unused_params"):
                module.set_reduce_scatter_unused_params(True, recurse=False)  # ranks' samples may use different parameters

    def set_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Gives elementwise optimizers this rank's shards as plain tensors, which all their kernels accept; others keep the DTensors."""
        self.optimizer = optimizer
        if not (is_plain_torch_optimizer(optimizer) and type(optimizer).__name__ in ELEMENTWISE_OPTIMIZERS):
            return
        self._local_parameters = {
            p: nn.Parameter(state.local_tensor(p), p.requires_grad) for p in self.model.parameters() if state.is_sharded(p)
        }
        for group in optimizer.param_groups:
            group["params"] = [self._local_parameters.get(p, p) for p in group["params"]]
        for parameter, local in self._local_parameters.items():
            values = optimizer.state.pop(parameter, None)
            if values:
                optimizer.state[local] = {k: state.local_tensor(v) if isinstance(v, Tensor) else v for k, v in values.items()}
        # With offloading, a kernel on the host could read the factor before its copy from the device has arrived.
        is_offloaded = any(p.device != self.group.device for p in self.parameters)
        self._kernel_scales_gradients = supports_fused_scaling(optimizer) and not is_offloaded

    # --- forward and backward ---

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        result = self._root(function, *args)
        if not torch.is_grad_enabled():
            self._root.reshard()  # otherwise the backward pass does it
        return result

    def call_unevenly(self, function: Callable[..., Any], *args: Any) -> Any:
        """Gathers the full model once, because ranks may call it a different number of times."""
        return self.call(self._with_gathered_blocks, function, *args)

    def _with_gathered_blocks(self, function: Callable[..., Any], *args: Any) -> Any:
        for block in self._blocks:
            block.set_reshard_after_forward(False, recurse=False)
            block.unshard()
        try:
            return function(*args)
        finally:
            for block in self._blocks:
                block.reshard()
                block.set_reshard_after_forward(self._reshards, recurse=False)

    # --- gradients ---

    def zero_gradients(self) -> None:
        self._reduce_buffer.zero_()
        for parameter in self.parameters:
            parameter.grad = None

    def reduce_gradients(self) -> None:
        """Sums the gradients of replicated parameters, the piggyback and the squared norm. FSDP sums the shards' gradients in backward."""
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._reduce_buffer[-1:].copy_(self._sum_of_squares(self._sharded))
        self.group.all_reduce(self._reduce_buffer)
        if self.group.size > 1:
            for dtype in {p.dtype for p in self._replicated}:
                gradients = [p.grad for p in self._replicated if p.dtype == dtype and p.grad is not None]
                flat = _flatten_dense_tensors(gradients)
                self.group.all_reduce(flat)
                torch._foreach_copy_(gradients, list(_unflatten_dense_tensors(flat, gradients)))

    def _sum_of_squares(self, parameters: list[nn.Parameter]) -> Tensor:
        """Returns the sum of the squares of this rank's gradients."""
        if not parameters:
            return torch.zeros((), device=self.group.device)
        norms = torch._foreach_norm(_local_gradients(parameters))
        return torch.stack([n.float() for n in norms]).square().sum().to(self.group.device)

    def gradient_norm(self) -> Tensor:
        return (self._reduce_buffer[-1] + self._sum_of_squares(self._replicated)).sqrt()

    def scale_gradients(self, factor: Tensor) -> None:
        for device in {p.device for p in self.parameters}:
            gradients = _local_gradients([p for p in self.parameters if p.device == device])
            torch._foreach_mul_(gradients, factor.to(device))

    def update(
        self, factor: Tensor | None, clip: float, with_norm: bool, skip_nonfinite: bool, skip: Tensor | None = None
    ) -> Tensor | None:
        for parameter, local in self._local_parameters.items():
            if parameter.grad is not None:
                local.data, local.grad = state.local_tensor(parameter), state.local_tensor(parameter.grad)
        return super().update(factor, clip, with_norm, skip_nonfinite, skip)

    # --- state ---

    def broadcast_weights(self) -> None:
        """Does nothing: weights were broadcast before they were sharded."""

    def weights_are_finite(self) -> bool:
        return all(self.group.gather_objects(state.all_finite(self.parameters)))

    def model_tensors(self, sharded: bool = False) -> tuple[dict[str, Tensor], dict[str, str]]:
        return state.model_tensors(self.model, Tensor.detach if sharded else self._full)

    def optimizer_tensors(self, sharded: bool = False) -> tuple[dict[str, Tensor], dict[str, Any]]:
        owners = self._sharded_parameters()

        def read(value: Tensor, parameter: Tensor) -> Tensor:
            owner = owners.get(parameter)
            if owner is not None and value.shape == parameter.shape:
                value = _as_dtensor(value, owner)
            return value.detach() if sharded else self._full(value)

        return state.optimizer_tensors(self._optimizer_parameters(), self.optimizer, read)

    def load_optimizer(self, stored: state.StoredTensors, values: dict[str, Any]) -> None:
        owners = self._sharded_parameters()

        def load(name: str, parameter: Tensor) -> Tensor:
            owner, (shape, _) = owners.get(parameter), stored.layout[name]
            if not shape or (owner is not None and shape != owner.shape):
                return stored.load(name)
            if owner is None:
                return stored.load_like(name, parameter)
            return state.local_tensor(stored.load_like(name, owner))

        state.load_optimizer(self._optimizer_parameters(), self.optimizer, stored, values, load)

    def _optimizer_parameters(self) -> dict[str, Tensor]:
        """Returns the tensor that the optimizer holds for each parameter, by the parameter's name."""
        return {name: self._local_parameters.get(p, p) for name, p in self.model.named_parameters()}

    def _sharded_parameters(self) -> dict[Tensor, nn.Parameter]:
        """Returns the sharded parameter for each shard that the optimizer holds."""
        return {local: parameter for parameter, local in self._local_parameters.items()}

    def _full(self, tensor: Tensor) -> Tensor:
        """Returns the full tensor in the host's memory on rank 0, an empty one on other ranks; a collective call."""
        tensor = tensor.detach()
        if not state.is_sharded(tensor):
            return tensor
        full: Tensor = tensor.to(self.group.device).full_tensor()  # type: ignore[attr-defined]
        return full.cpu() if self.group.is_main else torch.empty(0)


def _local_gradients(parameters: list[nn.Parameter]) -> list[Tensor]:
    return [state.local_tensor(p.grad) for p in parameters if p.grad is not None]


def _as_dtensor(local: Tensor, like: Any) -> Tensor:
    """Returns the DTensor whose shard on this rank is `local`."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())


# --- before sharding ---------------------------------------------------------------------------


def _unshardable(model: nn.Module) -> set[nn.Parameter]:
    """Returns parameters that cannot be sharded: single numbers, and trained ones whose type is not the most common one."""
    num_trained: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        if parameter.requires_grad:
            num_trained[parameter.dtype] += parameter.numel()
    most_common_dtype = max(num_trained, key=lambda dtype: num_trained[dtype])
    return {p for p in model.parameters() if p.dim() == 0 or (p.requires_grad and p.dtype != most_common_dtype)}


def _unshared_blocks(model: nn.Module) -> list[nn.Module]:
    """Returns the repeated blocks; none if a block shares a parameter with other modules: then only the full model can be gathered."""
    blocks = repeated_blocks(model)
    users: dict[nn.Parameter, set[int]] = {}  # parameter -> numbers of the blocks that use it; -1 for modules outside of blocks
    for number, block in enumerate(blocks):
        for module in block.modules():
            for parameter in module.parameters(recurse=False):
                users.setdefault(parameter, set()).add(number)
    modules_in_blocks = {module for block in blocks for module in block.modules()}
    for module in model.modules():
        if module not in modules_in_blocks:
            for parameter in module.parameters(recurse=False):
                users.get(parameter, set()).add(-1)
    return blocks if all(len(numbers) == 1 for numbers in users.values()) else []


def _norm_parameters(blocks: list[Any]) -> set[nn.Parameter]:
    """Returns the parameters of the blocks' norm layers: they are small, and autocast computes with them in full precision."""
    kinds = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)
    return {p for block in blocks for m in block.modules() if isinstance(m, kinds) for p in m.parameters(recurse=False)}
