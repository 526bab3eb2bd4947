"""Random numbers that are a function of (episode, step): for episodes that are played to be judged."""

from __future__ import annotations

import torch
from torch import Tensor


def chance(episodes: Tensor, step: int, count: int) -> Tensor:
    """[episodes, count] numbers in [0, 1), the same on every device."""
    place = torch.arange(count, device=episodes.device) + step * count
    mixed = _mix(_mix(episodes.long()[:, None] + 0x9E3779B9) + place + 1)
    return (mixed >> 8).float() * 2.0**-24


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit numbers that looks like chance (held in 64 bits, which products need)."""
    x = x & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x46CA68B5) & 0xFFFFFFFF  # of 31 bits, so that no product leaves 63
    return x ^ (x >> 16)
