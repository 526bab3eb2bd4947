"""The machine: cores, memory and GPUs, detected on this machine or read from a description. Nothing in this package imports torch.

- `hardware`: the facts (`Hardware`, `Gpu`)          - `detection`, `cpu`, `nvml`: finding them on this machine
- `described`: a machine given as text               - `cards`: published rates and memory of GPU models
- `torch_support`: which GPUs a run may use          - `activity`: how busy GPUs are now
- `report`: what `drivetrain hardware` prints        - `units`: bytes as text
"""

from drivetrain.hardware.cpu import cpu_cores, memory_bytes
from drivetrain.hardware.detection import detect
from drivetrain.hardware.hardware import ASSUMED_NETWORK_GBPS, UNKNOWN_CAPABILITY, Gpu, Hardware
from drivetrain.hardware.torch_support import TorchBuild, check_torch_can_use, restrict_to_gpus, torch_build, visible_gpus
from drivetrain.hardware.units import format_bytes, format_gib, format_need

__all__ = [
    "ASSUMED_NETWORK_GBPS", "UNKNOWN_CAPABILITY", "Gpu", "Hardware", "TorchBuild", "check_torch_can_use", "cpu_cores", "detect",
    "format_bytes", "format_gib", "format_need", "memory_bytes", "restrict_to_gpus", "torch_build", "visible_gpus",
]  # fmt: skip
