"""Out-of-memory errors: what a step changed before it failed is undone, and all ranks learn of it.

An allocation fails on the host, while work is enqueued, so ranks agree from host to host before they next
communicate on the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.engine.state.tensors import unsavable_form
from drivetrain.outcomes import Outcome, Problem
from drivetrain.plan import Plan

MAX_BUFFER_BYTES = 256 << 20  # a larger buffer holds weights or a table, which no forward pass changes
WAYS_OUT = "plan.activation_checkpointing=on, plan.strategy=fsdp, or more GPUs"


class OutOfMemoryOnRanks(Exception):
    """Memory ran out on these ranks in the forward or backward pass; every rank is told before it communicates again."""

    def __init__(self, ranks: list[int], can_undo: bool = True) -> None:
        super().__init__(f"out of memory on rank {', '.join(map(str, ranks))}")
        self.ranks, self.can_undo = ranks, can_undo


class OutOfMemory(Problem):
    """Ends this process; `smaller`, where there is one, is the plan with which the run restarts."""

    def __init__(self, text: str, smaller: dict[str, Any] | None) -> None:
        super().__init__(text, Outcome.OOM)
        self.smaller = smaller


class BufferBackup:
    """A copy of a model's buffers (BatchNorm's statistics, queues) from before a step; free where there are none."""

    def __init__(self, model: nn.Module) -> None:
        self._owners = [
            (module._buffers, name)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and not unsavable_form(buffer) and buffer.nbytes <= MAX_BUFFER_BYTES
        ]
        self._originals: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._shapes: list[torch.Size] = []
        self.is_current = True
        """Whether the copy is of the present step's beginning."""

    def take(self) -> None:
        self.is_current = True
        if not self._owners:
            return
        self._originals = [buffer for owner, name in self._owners if (buffer := owner[name]) is not None]
        shapes = [buffer.shape for buffer in self._originals]
        if shapes != self._shapes:
            self._shapes, self._copies = shapes, [buffer.clone() for buffer in self._originals]
        else:
            torch._foreach_copy_(self._copies, self._originals)

    def skip(self) -> None:
        """For a step that only replays CUDA graphs, which cannot run out of memory."""
        self.is_current = not self._owners

    def restore(self) -> None:
        with torch.no_grad():
            for (owner, name), original, copy in zip(self._owners, self._originals, self._copies, strict=True):
                owner[name] = original  # a forward pass may have put another tensor in its place
                original.copy_(copy)


def can_undo_steps(plan: Plan, model: nn.Module) -> bool:
    """Returns whether ranks do not communicate within a forward or backward pass."""
    return plan.strategy in ("single", "ddp") and not any(isinstance(m, nn.SyncBatchNorm) for m in model.modules())
