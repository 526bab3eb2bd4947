"""Chooses the number of CPU threads. It depends only on the sizes of a step's matrix products, so that runs repeat bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from drivetrain.engine.group import Group
from drivetrain.plan import Plan

FLOPS_PER_THREAD = 16e6  # of one matrix product or convolution: with fewer, threads wait for each other longer than they work


class Products(TorchDispatchMode):
    """A context that records the FLOPs of each matrix product and convolution inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.flops: list[float] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        formula = flop_registry.get(function._overloadpacket)
        if formula is not None:
            with contextlib.suppress(Exception):  # the formula does not know these arguments
                self.flops.append(float(formula(*args, **(kwargs or {}), out_val=output)))
        return output

    def typical(self) -> float:
        """Returns the mean FLOPs of a product, weighted by FLOPs, because large products take most of the time; 0 without products."""
        total = sum(self.flops)
        return sum(flops * flops for flops in self.flops) / total if total else 0.0


class Threads:
    """Sets the CPU threads of this process: the plan's number in the first step, then as many as the step's products can use."""

    def __init__(self, plan: Plan, group: Group) -> None:
        self.plan, self.group = plan, group
        self.num_useful: int | None = None
        """The number of threads that the products of a step keep busy; None until the first step."""
        self.reason = ""
        """Why fewer threads are used than planned; empty if the plan's number is used."""
        is_pinned = plan.reasons.get("threads") == "pinned"
        self._may_choose = plan.threads > 1 and group.device.type == "cpu" and not plan.is_sharded and not is_pinned

    @contextlib.contextmanager
    def measure_products(self) -> Iterator[None]:
        """Measures the products of the run's first step, which runs inside, and sets the threads. A compiled step is not measured."""
        if not self._may_choose or (self.plan.compile == "on" and self.plan.reasons.get("compile") == "pinned"):
            yield
            return
        with Products() as products:
            yield
        typical = self.group.broadcast_object(products.typical())  # ranks may have micro-batches of other sizes
        if typical:
            self.set_useful(max(1, int(typical / FLOPS_PER_THREAD)))
            self.reason = (
                f"{torch.get_num_threads()} of {self.plan.threads} used after the first step: its matrix products have"
                f" {typical / 1e6:,.1f} million operations, and a thread is useful from {FLOPS_PER_THREAD / 1e6:.0f} million on"
            )

    def set_useful(self, num_useful: int | None) -> None:
        """Sets the threads to the number that the first step has shown or a checkpoint holds."""
        if self._may_choose and num_useful is not None:
            self.num_useful = num_useful
            torch.set_num_threads(min(self.plan.threads, num_useful))
