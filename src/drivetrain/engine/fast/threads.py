"""The number of threads that a CPU's steps can use: it follows from the sizes of their matrix products alone, so that runs repeat bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from drivetrain.engine.group import Group
from drivetrain.plan import Plan

FLOPS_PER_THREAD = 16e6  # of a matrix product or a convolution: with less to do, threads wait for each other longer than they work


class Products(TorchDispatchMode):
    """Inside, collects the floating-point operations of every matrix product and convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.flops: list[float] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        formula = flop_registry.get(function._overloadpacket)
        if formula is not None:
            with contextlib.suppress(Exception):  # a form of it that the formula does not know
                self.flops.append(float(formula(*args, **(kwargs or {}), out_val=output)))
        return output

    def typical(self) -> float:
        """Returns the size of the product in which the average operation is done: large ones take the time. 0 without products."""
        total = sum(self.flops)
        return sum(f * f for f in self.flops) / total if total else 0.0


class Threads:
    """The threads of this process: all that the plan grants for the first step, then as many as its products can use."""

    def __init__(self, plan: Plan, group: Group) -> None:
        self.plan, self.group = plan, group
        self.num_useful: int | None = None
        """Threads that the products of a step keep busy; None until the first step."""
        self.reason = ""
        self._chooses = plan.threads > 1 and group.device.type == "cpu" and not plan.is_sharded and plan.reasons.get("threads") != "pinned"

    @contextlib.contextmanager
    def measure_products(self) -> Iterator[None]:
        """Around the first step of a run: measures its products and sets the threads. A step that is compiled already is not measured."""
        if not self._chooses or (self.plan.compile == "on" and self.plan.reasons.get("compile") == "pinned"):
            yield
            return
        with Products() as products:
            yield
        typical = self.group.broadcast_object(products.typical())  # ranks may have micro-batches of other sizes
        if typical:
            self.set_useful(max(1, int(typical / FLOPS_PER_THREAD)))
            self.reason = (
                f"{torch.get_num_threads()} of {self.plan.threads} used after the first step: its matrix products have"
                f" {typical / 1e6:,.1f} million operations, and less than {FLOPS_PER_THREAD / 1e6:.0f} million are no work for a thread"
            )

    def set_useful(self, num_useful: int | None) -> None:
        """Uses as many threads as the first step showed, or a checkpoint holds."""
        if self._chooses and num_useful is not None:
            self.num_useful = num_useful
            torch.set_num_threads(min(self.plan.threads, num_useful))
