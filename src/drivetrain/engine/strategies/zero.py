"""DeepSpeed's ZeRO: optimizer state (stage 1), gradients (2) and parameters (3) in flat partitions, one a process.

DeepSpeed's engine reduces, clips and steps. The gradient is that of the global mean because what it has to be multiplied by
(the number of processes, by which DeepSpeed divides; a count that is known only after the forward pass; fp16's scale) is
handed to DeepSpeed as the loss scale to divide out at the step.
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
from drivetrain.engine.maths.optim import is_torchs
from drivetrain.engine.state import tensors as state
from drivetrain.engine.strategies.base import Strategy
from drivetrain.engine.strategies.root import Root, dense_gradients, share_weights
from drivetrain.outcomes import Problem
from drivetrain.plan import Plan
from drivetrain.plan.deepspeed import configuration
from drivetrain.task import Task

WHOLE_MATRICES = ("Adafactor", "LBFGS", "Muon")  # torch's optimizers that need more than a flat part of a parameter


class Piece(NamedTuple):
    """Where a part of a parameter lies in this rank's flat partition."""

    name: str
    shape: torch.Size
    begin: int
    """In the parameter."""
    place: int
    """In the partition."""
    length: int


class Zero(Strategy):
    obstacle = "parameters come and go under deepspeed"
    tail: Tensor

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, task: Task, plan: Plan, group: Group, tail: int, folder: Path
    ) -> None:
        super().__init__(model, group)
        formats = {str(p.dtype).removeprefix("torch.") for p in self.parameters} - {"float32"}
        if formats:
            raise Problem(f"plan.strategy=deepspeed trains float32 parameters, and this model has {', '.join(sorted(formats))}: use fsdp")
        single = [name for name, p in model.named_parameters() if p.dim() == 0]
        if single:
            raise Problem(f"DeepSpeed cannot hold a parameter of a single number ({single[0]}): give it the shape [1], or use fsdp")
        if type(optimizer).__name__ in WHOLE_MATRICES:
            raise Problem(f"{type(optimizer).__name__} needs whole matrices, and DeepSpeed hands out flat parts: use plan.strategy=fsdp")
        group.open(plan.backend)
        dense_gradients(model)
        share_weights(model, group)
        self.stage = plan.zero_stage
        self.tail = torch.zeros(tail, device=group.device)
        self.config = configuration(plan, float(task.clip))
        if group.main:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "deepspeed.json").write_text(json.dumps(self.config, indent=1) + "\n")
        if not is_torchs(optimizer):
            _hide_empty_groups(optimizer)
        self.engine = _start(Root(model), optimizer, self.config, group)
        self.zero_optimizer: Any = self.engine.optimizer
        self._names = {id(p): name for name, p in model.named_parameters()}

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = self.zero_optimizer.optimizer  # the same, or what DeepSpeed made of it

    # --- the model's forward and backward passes ---

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        return (self.engine if torch.is_grad_enabled() else self.engine.module)(function, *args)

    def collect(self, function: Callable[..., Any], *args: Any) -> Any:
        if self.stage == 3:
            raise Problem("a Source uses the model on its own, which plan.zero_stage=3 cannot give it: use stage 1 or 2, or fsdp")
        return function(*args)

    def backward(self, objective: Tensor) -> None:
        self.engine.backward(objective, scale_wrt_gas=False)

    # --- gradients ---

    def zero(self) -> None:
        self.tail.zero_()  # gradients are cleared by each step

    def reduce(self) -> None:
        """Gradients are DeepSpeed's to sum."""
        self.group.all_reduce(self.tail)

    def update(self, factor: Tensor | None, clip: float, with_norm: bool, guarded: bool, enough: Tensor | None = None) -> Tensor | None:
        """DeepSpeed waits for the device here anyway, so the factor may pass through the host."""
        if enough is not None:
            raise Problem("DeepSpeed takes every step, so a source's limits cannot end an epoch: plan.strategy=fsdp or ddp")
        value = self.group.size * (1.0 if factor is None else float(factor))
        self.zero_optimizer.loss_scale = 1.0 / value if value else math.inf
        self.engine.step()
        self.zero_optimizer.loss_scale = 1.0
        norm = math.inf if self.zero_optimizer.overflow else float(self.zero_optimizer._global_grad_norm)
        return torch.tensor(norm, device=self.group.device)

    # --- state ---

    def begin(self) -> None:
        """Weights were shared before they were sharded."""

    def finite(self) -> bool:
        parts = [
            flat[p.place : p.place + p.length] for flat, pieces in self._partitions() for p in pieces
        ]  # what pads them may be anything
        return all(self.group.gather(state.all_finite(parts)))

    def model_tensors(self, parts: bool = False) -> tuple[dict[str, Any], dict[str, str]]:
        def take(tensor: Tensor) -> Tensor:
            with self._gathered(tensor):
                return tensor.detach().cpu() if self.group.main else torch.empty(0)

        return state.model_tensors(self.model, take)

    def load_model(self, stored: state.Stored, aliases: dict[str, str], where: str) -> None:
        own = self.model.state_dict(keep_vars=True)
        state.check_model({n: getattr(t, "ds_shape", t.shape) for n, t in own.items()}, stored, aliases, where)
        for name in stored.layout:
            value = stored.take(name)
            with self._gathered(own[name], changed=True), torch.no_grad():
                own[name].copy_(value)
        self.zero_optimizer.refresh_fp32_params()

    def _gathered(self, tensor: Tensor, changed: bool = False) -> Any:
        from deepspeed import zero

        parted = [tensor] if hasattr(tensor, "ds_id") else []
        return zero.GatheredParameters(parted, modifier_rank=0 if changed else None, enabled=bool(parted))

    def optimizer_tensors(self, parts: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
        tensors, plain = state.group_tensors(self.optimizer)
        for flat, pieces in self._partitions():
            for entry, value in self.optimizer.state.get(flat, {}).items():
                for piece in pieces:
                    name = f"{piece.name}/{entry}"
                    if not isinstance(value, Tensor):
                        plain.setdefault("values", {})[name] = state.as_plain(name, value)
                    elif value.shape == flat.shape:
                        tensors[name] = self._whole(value, piece)
                    else:
                        tensors[name] = value
                        if value.device != flat.device:
                            plain.setdefault("on_cpu", []).append(name)
        return tensors, plain

    def _whole(self, partition: Tensor, piece: Piece) -> Tensor:
        """On rank 0 the whole of a parameter's entry, in the host's memory; put together by all."""
        whole = torch.zeros(piece.shape.numel(), dtype=partition.dtype, device=self.group.device)
        whole[piece.begin : piece.begin + piece.length].copy_(partition[piece.place : piece.place + piece.length])
        self.group.all_reduce(whole)
        return whole.view(piece.shape).cpu() if self.group.main else torch.empty(0)

    def load_optimizer(self, stored: state.Stored, plain: dict[str, Any]) -> None:
        for group, kept in zip(self.optimizer.param_groups, plain["groups"], strict=True):
            group |= kept
        self.optimizer.state.clear()
        homes: dict[str, tuple[Tensor, Piece]] = {piece.name: (flat, piece) for flat, pieces in self._partitions() for piece in pieces}
        groups = {id(flat): self.optimizer.param_groups[number] for number, flat in self._numbered()}
        by_number = {n.rpartition("/")[2] for n, (shape, _) in stored.layout.items() if len(shape)}
        for name in (*stored.layout, *plain.get("values", {})):
            owner, _, entry = name.rpartition("/")
            value = stored.take(name) if name in stored.layout else plain["values"][name]
            if owner.startswith("#"):
                self.optimizer.param_groups[int(owner[1:])][entry] = value
                continue
            if owner not in homes:
                raise Problem(f"the checkpoint's optimizer knows a parameter {owner!r} that this model does not train")
            flat, piece = homes[owner]
            kept = self.optimizer.state[flat]
            if not isinstance(value, Tensor):
                kept[entry] = value
            elif entry in by_number:
                place = kept.setdefault(entry, torch.zeros_like(flat, dtype=value.dtype, requires_grad=False))
                part = value.flatten()[piece.begin : piece.begin + piece.length]
                place[piece.place : piece.place + piece.length].copy_(part)
            else:
                host = state.on_host(value, groups[id(flat)], name in set(plain.get("on_cpu", ())))
                kept[entry] = value.to("cpu" if host else flat.device).clone()

    # --- where things lie ---

    def _numbered(self) -> Iterator[tuple[int, Tensor]]:
        """This rank's flat partitions, each with the number of its parameter group."""
        zero = self.zero_optimizer
        if self.stage < 3:
            yield from enumerate(zero.single_partition_of_fp32_groups)
        else:
            yield from ((zero.sub_group_to_group_id[i], flat) for i, flat in enumerate(zero.fp32_partitioned_groups_flat))

    def _partitions(self) -> Iterator[tuple[Tensor, list[Piece]]]:
        """This rank's flat partitions, and the pieces of parameters in each."""
        zero = self.zero_optimizer
        members = zero.bit16_groups if self.stage < 3 else zero.fp16_groups
        for (_, flat), parameters in zip(self._numbered(), members, strict=True):
            yield flat, [self._piece(p) for p in parameters]

    def _piece(self, parameter: Any) -> Piece:
        name = self._names[id(parameter)]
        if self.stage < 3:
            mapping = parameter._hp_mapping
            if mapping is None:
                return Piece(name, parameter.shape, 0, 0, 0)
            begin, place = mapping.lp_fragment_address, mapping.hp_fragment_address
            return Piece(name, parameter.shape, begin.start, place.start, begin.numel)
        zero = self.zero_optimizer
        _, place, count = zero.grad_position[zero.get_param_id(parameter)]
        begin = min(parameter.ds_numel, self.group.rank * parameter.partition_numel())
        return Piece(name, parameter.ds_shape, begin, int(place), min(int(count), parameter.ds_numel - begin))


def _start(root: nn.Module, optimizer: torch.optim.Optimizer, config: dict[str, Any], group: Group) -> Any:
    os.environ["DS_ACCELERATOR"] = group.device.type  # it would take a GPU where there is one
    import deepspeed

    deepspeed.utils.logger.setLevel(logging.ERROR)  # it warns of every optimizer that is not its own
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # CPU processes have gloo: no compiler is needed
    warnings.filterwarnings("ignore", r".*(all_gather_into|reduce_scatter)_tensor.* is deprecated", FutureWarning)  # not the user's
    engine, *_ = deepspeed.initialize(model=root, optimizer=optimizer, config=config, dist_init_required=False)
    return engine


def _hide_empty_groups(optimizer: Any) -> None:
    """At stage 3 DeepSpeed steps one group at a time and leaves the others empty: an optimizer that keeps something in its
    groups shall not count those."""
    plain = optimizer.step

    def step(closure: Any = None) -> Any:
        groups = optimizer.param_groups
        optimizer.param_groups = [group for group in groups if group["params"]]
        try:
            return plain(closure)
        finally:
            optimizer.param_groups = groups

    optimizer.step = step
