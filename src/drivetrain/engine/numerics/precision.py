"""Number formats: autocast, and the loss scale of fp16, which is stored on the device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

GROWTH, GROWTH_INTERVAL = 2.0, 2000  # the factor of the loss scale after so many steps without overflow
BACKOFF = 0.5  # the factor of the loss scale after an overflow
FIRST_SCALE = 2.0**16
MIN_SCALE = 2.0**-14  # with a smaller loss scale, training ends with an error
AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """The number format of forward passes. Weights, gradients and optimizer state keep the model's own format."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.name, self.device = name, device
        self.dtype = AUTOCAST_DTYPES.get(name)
        torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
        if device.type == "cuda":
            torch.backends.cudnn.allow_tf32 = name == "tf32"
        self._no_autocast: AbstractContextManager[None] = nullcontext()

    def forward(self) -> AbstractContextManager[object]:
        """Returns the context of a forward pass: autocast, or one that does nothing."""
        if self.dtype is None:
            return self._no_autocast
        return torch.autocast(self.device.type, dtype=self.dtype)


class LossScale:
    """The factor of an fp16 loss before the backward pass. It halves on overflow and doubles after 2,000 good steps."""

    def __init__(self, device: torch.device) -> None:
        self.scale = torch.tensor(FIRST_SCALE, device=device)
        self.good_steps = torch.tensor(0.0, device=device)
        self.skipped = torch.tensor(0.0, device=device)

    def update(self, overflow: Tensor) -> None:
        """Adapts the scale to whether this step overflowed (0 or 1), without a host sync."""
        self.skipped += overflow
        self.good_steps.add_(1.0).mul_(1.0 - overflow)
        grow = (self.good_steps >= GROWTH_INTERVAL).float()
        self.good_steps.mul_(1.0 - grow)
        self.scale.mul_(1.0 + overflow * (BACKOFF - 1.0)).mul_(1.0 + grow * (GROWTH - 1.0))

    def tensors(self) -> dict[str, Tensor]:
        """Returns the state, as a checkpoint holds it."""
        return {"scale": self.scale, "good_steps": self.good_steps, "skipped": self.skipped}
