"""Pieces of parameters, as a captured step hands them to a fused optimizer, change no number."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from drivetrain.engine.fast.parallel_kernels import FUSED_OPTIMIZERS, split_tensors
from drivetrain.engine.numerics.optim import can_call_kernel_directly, make_optimizer, make_schedule, step_by_direct_kernel_call
from drivetrain.task import Task

PROCESSORS = 4


class Cut(TorchDispatchMode):
    longest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in FUSED_OPTIMIZERS:
            args = split_tensors(args, PROCESSORS)
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
    [[parameter], [gradient]] = split_tensors([[wide], [turned]], PROCESSORS)
    assert parameter is wide and gradient is turned


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_the_short_way_changes_no_number(kind: type[torch.optim.Optimizer]) -> None:
    """Two groups, a parameter that sometimes has no gradient, a rate that moves, scaled gradients and skipped steps."""
    values = [torch.randn(n, generator=torch.Generator().manual_seed(n)) for n in (700, 3, 40)]
    optimizers = []
    for _ in range(2):
        first, second, third = (torch.nn.Parameter(v.clone()) for v in values)
        groups = [{"params": [first, second], "weight_decay": 0.1}, {"params": [third], "betas": (0.5, 0.9), "maximize": True}]
        optimizers.append(kind(groups, lr=1e-2, fused=True))  # type: ignore[call-arg]
    for number in range(12):
        for optimizer in optimizers:
            drawn = torch.Generator().manual_seed(number)
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 / (1 + number)
                for p in group["params"]:
                    gradient = torch.randn(p.shape, generator=drawn)
                    p.grad = None if number % 3 == 1 and len(p) == 3 else gradient
            if number > 5:
                optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0 + number), torch.tensor(float(number == 8))  # type: ignore[attr-defined]
        plain, short = optimizers
        plain.step()
        assert can_call_kernel_directly(short)
        step_by_direct_kernel_call(short)
        for a, b in zip(plain.param_groups, short.param_groups, strict=True):
            for p, q in zip(a["params"], b["params"], strict=True):
                assert torch.equal(p, q)
                assert plain.state[p].keys() == short.state[q].keys()
                assert all(torch.equal(plain.state[p][k], short.state[q][k]) for k in plain.state[p])


def test_only_what_has_a_short_way_takes_it() -> None:
    one, half = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    assert can_call_kernel_directly(torch.optim.AdamW([one], fused=True))
    assert not can_call_kernel_directly(torch.optim.AdamW([one]))
    assert not can_call_kernel_directly(torch.optim.AdamW([one], fused=True, amsgrad=True))
    assert not can_call_kernel_directly(torch.optim.AdamW([one, half], fused=True))
    assert not can_call_kernel_directly(torch.optim.AdamW([one], lr=torch.tensor(1e-3), fused=True))
    assert not can_call_kernel_directly(torch.optim.SGD([one], fused=True))
    hooked = torch.optim.AdamW([one], fused=True)
    hooked.register_step_post_hook(lambda *_: None)
    assert not can_call_kernel_directly(hooked)
    assert not can_call_kernel_directly(type("Own", (torch.optim.AdamW,), {})([one], fused=True))


@pytest.mark.parametrize("optim", ["adamw", "adam", "sgd"])
def test_weight_decay_is_a_setting_of_every_optimizer(optim: str) -> None:
    task = Task(optim=optim, weight_decay=0.3)
    assert make_optimizer(task, torch.nn.Linear(2, 2), torch.device("cpu")).param_groups[0]["weight_decay"] == 0.3


@pytest.mark.parametrize(
    ("decay", "half_way", "last"),
    [("cosine", 0.5, 0.5 * (1 - math.cos(math.pi / 8))), ("linear", 0.5, 1 / 8), ("constant", 1, 1)],
    ids=["cosine", "linear", "constant"],
)
def test_a_schedule_warms_up_to_its_peak_then_decays_to_zero(decay: str, half_way: float, last: float) -> None:
    factor = make_schedule(Task(warmup=3, decay=decay), steps=11, steps_per_epoch=5)
    assert [factor(step) for step in range(4)] == pytest.approx([1 / 3, 2 / 3, 1, 1])
    assert (factor(7), factor(10)) == pytest.approx((half_way, last))


def test_momentum_is_a_setting_of_sgd() -> None:
    from drivetrain.settings_reader.live import settings_of_class

    def momentum(**settings: Any) -> float:
        made = make_optimizer(Task(optim="sgd", **settings), torch.nn.Linear(2, 2), torch.device("cpu"))
        return float(made.param_groups[0]["momentum"])

    assert (momentum(), momentum(momentum=0.5), momentum(momentum=0)) == (0.9, 0.5, 0.0)
    assert "momentum" in settings_of_class(Task)["optim"].doc and "sgd" in settings_of_class(Task)["momentum"].doc
