"""Out-of-memory errors: they are made known to all ranks, and the failed step is undone.

An allocation fails on the host, while it enqueues device work. So the hosts of all ranks exchange whether memory ran out
before ranks next communicate on the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.engine.state.tensors import unsavable_form
from drivetrain.outcomes import Outcome, Problem
from drivetrain.plan import Plan

MAX_BUFFER_BYTES = 256 << 20  # a larger buffer holds weights or a table, which no forward pass changes
# Shown to the user where no smaller micro-batch is possible.
WAYS_OUT = "plan.activation_checkpointing=on, plan.strategy=fsdp, or more GPUs"


class OutOfMemoryOnRanks(Exception):
    """Memory ran out on these ranks in the forward or backward pass. Every rank raises this before it communicates again."""

    def __init__(self, ranks: list[int], can_undo: bool = True) -> None:
        super().__init__(f"out of memory on rank {', '.join(map(str, ranks))}")
        self.ranks, self.can_undo = ranks, can_undo


class OutOfMemory(Problem):
    """Ends this process. `smaller` describes the smaller plan with which the run restarts; None if there is none."""

    def __init__(self, text: str, smaller: dict[str, Any] | None) -> None:
        super().__init__(text, Outcome.OOM)
        self.smaller = smaller


class BufferBackup:
    """A copy of a model's buffers (such as BatchNorm's statistics) from before a step; it costs nothing without buffers."""

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
        """Whether the copy is from the start of the present step."""

    def take(self) -> None:
        """Copies the buffers."""
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
        """Call instead of `take` for a step that only replays CUDA graphs: it cannot run out of memory."""
        self.is_current = not self._owners

    def restore(self) -> None:
        with torch.no_grad():
            for (owner, name), original, copy in zip(self._owners, self._originals, self._copies, strict=True):
                owner[name] = original  # a forward pass may have replaced the tensor
                original.copy_(copy)


def can_undo_steps(plan: Plan, model: nn.Module) -> bool:
    """Returns whether ranks do not communicate within a forward or backward pass."""
    return plan.strategy in ("single", "ddp") and not any(isinstance(m, nn.SyncBatchNorm) for m in model.modules())
