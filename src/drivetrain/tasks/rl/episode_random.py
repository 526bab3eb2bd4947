"""Random numbers of evaluation episodes: a pure function of (episode, step), so every evaluation plays the same episodes."""

from __future__ import annotations

import torch
from torch import Tensor


def episode_uniform(episodes: Tensor, step: int, count: int) -> Tensor:
    """Returns [episodes, count] numbers in [0, 1), the same on every device."""
    index = torch.arange(count, device=episodes.device) + step * count
    mixed = _mix(_mix(episodes.long()[:, None] + 0x9E3779B9) + index + 1)
    return (mixed >> 8).float() * 2.0**-24


def _mix(x: Tensor) -> Tensor:
    """Maps 32-bit numbers one to one to numbers that look random. They are held in 64 bits, which the products need."""
    x = x & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x46CA68B5) & 0xFFFFFFFF  # a factor of 31 bits, so that no product exceeds 63
    return x ^ (x >> 16)
