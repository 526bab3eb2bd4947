"""DeepSpeed's ZeRO: optimizer state (stage 1), gradients (2) and parameters (3) in flat partitions, one per rank.

DeepSpeed's engine reduces and clips gradients and takes the step. For the gradients of the global mean, three factors are
still missing: the number of ranks, by which DeepSpeed divides; a count that is known only after the forward pass; and the
scale of fp16. They are passed to DeepSpeed as its loss scale, by which it divides gradients in the step.
"""

from __future__ import annotations

import json
import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from drivetrain.engine.group import Group
from drivetrain.engine.numerics.optim import is_plain_torch_optimizer
from drivetrain.engine.state import tensors as state
from drivetrain.engine.strategies.base import Strategy
from drivetrain.engine.strategies.root import Root, broadcast_model, use_dense_gradients
from drivetrain.outcomes import Problem
from drivetrain.plan import Plan
from drivetrain.plan.deepspeed import configuration
from drivetrain.task import Task

MATRIX_OPTIMIZERS = ("Adafactor", "LBFGS", "Muon")  # torch's optimizers that need full parameters, not flat parts of them


class Fragment(NamedTuple):
    """The part of a parameter that is stored in this rank's flat partition."""

    name: str
    shape: torch.Size
    begin: int
    """Offset in the flattened parameter."""
    flat_begin: int
    """Offset in the partition."""
    length: int

    def in_parameter(self, parameter: Tensor) -> Tensor:
        return parameter.flatten()[self.begin : self.begin + self.length]

    def in_partition(self, flat: Tensor) -> Tensor:
        return flat[self.flat_begin : self.flat_begin + self.length]


class Zero(Strategy):
    """Implements the interface of a strategy with DeepSpeed's engine."""

    capture_obstacle = "parameters come and go under deepspeed"
    piggyback: Tensor

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, task: Task, plan: Plan, group: Group, piggyback_size: int, folder: Path
    ) -> None:
        super().__init__(model, group)
        _check_supported(model, self.parameters, optimizer)
        group.ensure_initialized(plan.backend)
        use_dense_gradients(model)
        broadcast_model(model, group)
        self.stage = plan.zero_stage
        self.piggyback = torch.zeros(piggyback_size, device=group.device)
        config = configuration(plan, float(task.clip))
        if group.is_main:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "deepspeed.json").write_text(json.dumps(config, indent=1) + "\n")
        if not is_plain_torch_optimizer(optimizer):
            _hide_empty_groups(optimizer)
        self.engine = _start(Root(model), optimizer, config, group)
        self.zero_optimizer: Any = self.engine.optimizer
        self._names = {id(p): name for name, p in model.named_parameters()}

    def set_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = self.zero_optimizer.optimizer  # DeepSpeed may have replaced it

    # --- forward and backward ---

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        return (self.engine if torch.is_grad_enabled() else self.engine.module)(function, *args)

    def call_unevenly(self, function: Callable[..., Any], *args: Any) -> Any:
        if self.stage == 3:
            raise Problem("a Source calls the model itself, which plan.zero_stage=3 does not support: use stage 1 or 2, or fsdp")
        return function(*args)

    def backward(self, objective: Tensor) -> None:
        self.engine.backward(objective, scale_wrt_gas=False)

    # --- gradients ---

    def zero_gradients(self) -> None:
        self.piggyback.zero_()  # gradients are already cleared, by DeepSpeed's step

    def reduce_gradients(self) -> None:
        """Sums the piggyback; DeepSpeed sums gradients."""
        self.group.all_reduce(self.piggyback)

    def update(
        self, factor: Tensor | None, clip: float, with_norm: bool, skip_nonfinite: bool, skip: Tensor | None = None
    ) -> Tensor | None:
        """Lets DeepSpeed take the step. DeepSpeed waits for the device here anyway, so reading the factor costs nothing."""
        if skip is not None:
            raise Problem("DeepSpeed takes every step, so a source's limits cannot end an epoch: plan.strategy=fsdp or ddp")
        scale = self.group.size * (1.0 if factor is None else float(factor))
        self.zero_optimizer.loss_scale = 1.0 / scale if scale else math.inf
        self.engine.step()
        self.zero_optimizer.loss_scale = 1.0
        norm = math.inf if self.zero_optimizer.overflow else float(self.zero_optimizer._global_grad_norm)
        return torch.tensor(norm, device=self.group.device)

    # --- state ---

    def broadcast_weights(self) -> None:
        """Does nothing: weights were broadcast before they were partitioned."""

    def weights_are_finite(self) -> bool:
        # Only the fragments are checked, because the padding of a partition may hold any number.
        fragments = [fragment.in_partition(flat) for flat, fragments in self._partitions() for fragment in fragments]
        return all(self.group.gather_objects(state.all_finite(fragments)))

    def model_tensors(self, sharded: bool = False) -> tuple[dict[str, Tensor], dict[str, str]]:
        def read(tensor: Tensor) -> Tensor:
            with self._gathered(tensor):
                return tensor.detach().cpu() if self.group.is_main else torch.empty(0)

        return state.model_tensors(self.model, read)

    def load_model(self, stored: state.StoredTensors, aliases: dict[str, str], origin: str) -> None:
        own = self.model.state_dict(keep_vars=True)
        state.check_model_fits({n: getattr(t, "ds_shape", t.shape) for n, t in own.items()}, stored, aliases, origin)
        for name in stored.layout:
            value = stored.load(name)
            with self._gathered(own[name], changes=True), torch.no_grad():
                own[name].copy_(value)
        self.zero_optimizer.refresh_fp32_params()

    def _gathered(self, tensor: Tensor, changes: bool = False) -> Any:
        """A context in which the tensor is full. With `changes`, the values that rank 0 writes are copied to all ranks."""
        from deepspeed import zero

        partitioned = [tensor] if hasattr(tensor, "ds_id") else []
        return zero.GatheredParameters(partitioned, modifier_rank=0 if changes else None, enabled=bool(partitioned))

    def optimizer_tensors(self, sharded: bool = False) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, values = state.param_group_tensors(self.optimizer)
        for flat, fragments in self._partitions():
            for entry, value in self.optimizer.state.get(flat, {}).items():
                for fragment in fragments:
                    name = f"{fragment.name}/{entry}"
                    if not isinstance(value, Tensor):
                        values.setdefault("values", {})[name] = state.check_json(name, value)
                    elif value.shape == flat.shape:
                        tensors[name] = self._full(value, fragment)
                    else:
                        tensors[name] = value
                        if value.device != flat.device:
                            values.setdefault("on_cpu", []).append(name)
        return tensors, values

    def _full(self, flat: Tensor, fragment: Fragment) -> Tensor:
        """Returns a full tensor of the optimizer's state in the host's memory on rank 0, an empty one elsewhere; a collective call."""
        full = torch.zeros(fragment.shape.numel(), dtype=flat.dtype, device=self.group.device)
        fragment.in_parameter(full).copy_(fragment.in_partition(flat))
        self.group.all_reduce(full)
        return full.view(fragment.shape).cpu() if self.group.is_main else torch.empty(0)

    def load_optimizer(self, stored: state.StoredTensors, values: dict[str, Any]) -> None:
        for group, saved in zip(self.optimizer.param_groups, values["groups"], strict=True):
            group |= saved
        self.optimizer.state.clear()
        locations: dict[str, tuple[Tensor, Fragment]] = {f.name: (flat, f) for flat, fragments in self._partitions() for f in fragments}
        groups = {id(flat): self.optimizer.param_groups[number] for number, flat in self._numbered_partitions()}
        elementwise = {n.rpartition("/")[2] for n, (shape, _) in stored.layout.items() if len(shape)}
        on_cpu = set(values.get("on_cpu", ()))
        for name in (*stored.layout, *values.get("values", {})):
            owner, _, entry = name.rpartition("/")
            value = stored.load(name) if name in stored.layout else values["values"][name]
            if owner.startswith("#"):
                self.optimizer.param_groups[int(owner[1:])][entry] = value
                continue
            if owner not in locations:
                raise Problem(f"the checkpoint's optimizer has a parameter {owner!r} that this model does not train")
            flat, fragment = locations[owner]
            entries = self.optimizer.state[flat]
            if not isinstance(value, Tensor):
                entries[entry] = value
            elif entry in elementwise:
                partition = entries.setdefault(entry, torch.zeros_like(flat, dtype=value.dtype, requires_grad=False))
                fragment.in_partition(partition).copy_(fragment.in_parameter(value))
            else:
                on_host = state.belongs_on_host(value, groups[id(flat)], name in on_cpu)
                entries[entry] = value.to("cpu" if on_host else flat.device).clone()

    # --- flat partitions ---

    def _numbered_partitions(self) -> Iterator[tuple[int, Tensor]]:
        """Yields this rank's flat partitions, each with the number of its parameter group."""
        zero = self.zero_optimizer
        if self.stage < 3:
            yield from enumerate(zero.single_partition_of_fp32_groups)
        else:
            yield from ((zero.sub_group_to_group_id[i], flat) for i, flat in enumerate(zero.fp32_partitioned_groups_flat))

    def _partitions(self) -> Iterator[tuple[Tensor, list[Fragment]]]:
        """Yields this rank's flat partitions, each with the fragments of parameters in it."""
        zero = self.zero_optimizer
        members = zero.bit16_groups if self.stage < 3 else zero.fp16_groups
        for (_, flat), parameters in zip(self._numbered_partitions(), members, strict=True):
            yield flat, [self._fragment(p) for p in parameters]

    def _fragment(self, parameter: Any) -> Fragment:
        name = self._names[id(parameter)]
        if self.stage < 3:
            mapping = parameter._hp_mapping
            if mapping is None:
                return Fragment(name, parameter.shape, 0, 0, 0)
            begin, flat_begin = mapping.lp_fragment_address, mapping.hp_fragment_address
            return Fragment(name, parameter.shape, begin.start, flat_begin.start, begin.numel)
        zero = self.zero_optimizer
        _, flat_begin, count = zero.grad_position[zero.get_param_id(parameter)]
        begin = min(parameter.ds_numel, self.group.rank * parameter.partition_numel())
        return Fragment(name, parameter.ds_shape, begin, int(flat_begin), min(int(count), parameter.ds_numel - begin))


def _check_supported(model: nn.Module, trained: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """Raises Problem for a model or an optimizer that DeepSpeed cannot train."""
    dtypes = {str(p.dtype).removeprefix("torch.") for p in trained} - {"float32"}
    if dtypes:
        raise Problem(f"plan.strategy=deepspeed trains float32 parameters, and this model has {', '.join(sorted(dtypes))}: use fsdp")
    scalars = [name for name, p in model.named_parameters() if p.dim() == 0]
    if scalars:
        raise Problem(f"DeepSpeed cannot hold a parameter of a single number ({scalars[0]}): give it the shape [1], or use fsdp")
    if type(optimizer).__name__ in MATRIX_OPTIMIZERS:
        raise Problem(f"{type(optimizer).__name__} needs full matrices, but DeepSpeed splits them into flat parts: use plan.strategy=fsdp")


def _start(root: nn.Module, optimizer: torch.optim.Optimizer, config: dict[str, Any], group: Group) -> Any:
    os.environ["DS_ACCELERATOR"] = group.device.type  # by default DeepSpeed takes a GPU if there is one
    import deepspeed

    deepspeed.utils.logger.setLevel(logging.ERROR)  # it warns of every optimizer that is not DeepSpeed's
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # CPU processes use gloo; this op would need a compiler
    # Users cannot act on this warning about DeepSpeed's code.
    warnings.filterwarnings("ignore", r".*(all_gather_into|reduce_scatter)_tensor.* is deprecated", FutureWarning)
    engine, *_ = deepspeed.initialize(model=root, optimizer=optimizer, config=config, dist_init_required=False)
    return engine


def _hide_empty_groups(optimizer: Any) -> None:
    """Makes an optimizer's step skip empty parameter groups.

    At stage 3, DeepSpeed steps one group at a time and leaves the others empty. An optimizer that counts steps in its
    groups must not count those."""
    original_step = optimizer.step

    def step(closure: Any = None) -> Any:
        groups = optimizer.param_groups
        optimizer.param_groups = [group for group in groups if group["params"]]
        try:
            return original_step(closure)
        finally:
            optimizer.param_groups = groups

    optimizer.step = step
