"""Pieces of parameters, as a captured step hands them to a fused optimizer, change no number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from drivetrain.engine.optim import FUSED, pieces

PROCESSORS = 4


class Cut(TorchDispatchMode):
    longest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in FUSED:
            args = pieces(args, PROCESSORS)
            self.longest = max(p.numel() for p in args[0])
        return func(*args, **(kwargs or {}))


def parameters() -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    shapes = [(300, 200), (10,), (64, 32, 3, 3), (20_001,)]
    made = [torch.nn.Parameter(torch.randn(s)) for s in shapes]
    made[2].data = made[2].data.contiguous(memory_format=torch.channels_last)
    return made


@pytest.mark.parametrize("kind", ["adam", "adamw", "amsgrad", "sgd", "momentum"])
def test_pieces_change_no_number(kind: str) -> None:
    made = {
        "adam": lambda p: torch.optim.Adam(p, fused=True), "adamw": lambda p: torch.optim.AdamW(p, fused=True),
        "amsgrad": lambda p: torch.optim.AdamW(p, fused=True, amsgrad=True), "sgd": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
        "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    }[kind]  # fmt: skip
    whole, cut = parameters(), parameters()
    optimizers = made(whole), made(cut)
    mode = Cut()
    for step in range(3):
        for a, b in zip(whole, cut, strict=True):
            a.grad = torch.randn(a.shape, generator=torch.Generator().manual_seed(step)).to(memory_format=torch.preserve_format)
            if a.dim() == 4:
                a.grad = a.grad.contiguous(memory_format=torch.channels_last)
            b.grad = a.grad.clone()
        optimizers[0].step()
        with mode:
            optimizers[1].step()
    assert 0 < mode.longest < 60_000 // 2
    for a, b in zip(whole, cut, strict=True):
        assert torch.equal(a, b)


def test_tensors_that_lie_otherwise_stay_whole() -> None:
    wide, turned = torch.randn(200, 300), torch.randn(300, 200).t()
    [[parameter], [gradient]] = pieces([[wide], [turned]], PROCESSORS)
    assert parameter is wide and gradient is turned
