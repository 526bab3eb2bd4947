"""The allowed values of a plan's choices, as Literal types."""

from __future__ import annotations

from typing import Literal

Strategy = Literal["single", "ddp", "fsdp", "deepspeed"]
ZeroStage = Literal[0, 1, 2, 3]
Offload = Literal["none", "optimizer", "all"]
Precision = Literal["fp32", "tf32", "bf16", "fp16"]
Switch = Literal["auto", "on", "off"]
DataLocation = Literal["auto", "device", "loader"]
Device = Literal["cuda", "cpu", "mps"]
Backend = Literal["none", "nccl", "gloo"]


def is_sharding(strategy: str) -> bool:
    """Returns whether processes hold parts of the model's state instead of replicas."""
    return strategy in ("fsdp", "deepspeed")
