"""Fused optimizers give the same weights on split tensors and by a direct kernel call."""

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


class SplitTensors(TorchDispatchMode):
    """Splits the tensors that fused optimizers get, as a captured step does."""

    longest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in FUSED_OPTIMIZERS:
            args = split_tensors(args, PROCESSORS)
            self.longest = max(p.numel() for p in args[0])
        return func(*args, **(kwargs or {}))


def parameters() -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    shapes = [(300, 200), (10,), (64, 32, 3, 3), (20_001,)]
    tensors = [torch.nn.Parameter(torch.randn(s)) for s in shapes]
    tensors[2].data = tensors[2].data.contiguous(memory_format=torch.channels_last)
    return tensors


@pytest.mark.parametrize("kind", ["adam", "adamw", "amsgrad", "sgd", "momentum"])
def test_split_tensors_give_the_same_weights(kind: str) -> None:
    make_optimizer = {
        "adam": lambda p: torch.optim.Adam(p, fused=True), "adamw": lambda p: torch.optim.AdamW(p, fused=True),
        "amsgrad": lambda p: torch.optim.AdamW(p, fused=True, amsgrad=True), "sgd": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
        "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    }[kind]  # fmt: skip
    whole, split = parameters(), parameters()
    optimizer_of_whole, optimizer_of_split = make_optimizer(whole), make_optimizer(split)
    mode = SplitTensors()
    for step in range(3):
        for a, b in zip(whole, split, strict=True):
            a.grad = torch.randn(a.shape, generator=torch.Generator().manual_seed(step)).to(memory_format=torch.preserve_format)
            if a.dim() == 4:
                a.grad = a.grad.contiguous(memory_format=torch.channels_last)
            b.grad = a.grad.clone()
        optimizer_of_whole.step()
        with mode:
            optimizer_of_split.step()
    assert 0 < mode.longest < 60_000 // 2
    for a, b in zip(whole, split, strict=True):
        assert torch.equal(a, b)


def test_tensors_with_different_strides_are_not_split() -> None:
    contiguous, transposed = torch.randn(200, 300), torch.randn(300, 200).t()
    [[parameter], [gradient]] = split_tensors([[contiguous], [transposed]], PROCESSORS)
    assert parameter is contiguous and gradient is transposed


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_a_direct_kernel_call_gives_the_same_weights(kind: type[torch.optim.Optimizer]) -> None:
    """With two groups, a parameter that sometimes has no gradient, a changing learning rate, scaled gradients and skipped steps."""
    values = [torch.randn(n, generator=torch.Generator().manual_seed(n)) for n in (700, 3, 40)]
    optimizers = []
    for _ in range(2):
        first, second, third = (torch.nn.Parameter(v.clone()) for v in values)
        groups = [{"params": [first, second], "weight_decay": 0.1}, {"params": [third], "betas": (0.5, 0.9), "maximize": True}]
        optimizers.append(kind(groups, lr=1e-2, fused=True))  # type: ignore[call-arg]
    for step in range(12):
        for optimizer in optimizers:
            generator = torch.Generator().manual_seed(step)
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 / (1 + step)
                for p in group["params"]:
                    gradient = torch.randn(p.shape, generator=generator)
                    p.grad = None if step % 3 == 1 and len(p) == 3 else gradient
            if step > 5:
                optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0 + step), torch.tensor(float(step == 8))  # type: ignore[attr-defined]
        usual, direct = optimizers
        usual.step()
        assert can_call_kernel_directly(direct)
        step_by_direct_kernel_call(direct)
        for a, b in zip(usual.param_groups, direct.param_groups, strict=True):
            for p, q in zip(a["params"], b["params"], strict=True):
                assert torch.equal(p, q)
                assert usual.state[p].keys() == direct.state[q].keys()
                assert all(torch.equal(usual.state[p][k], direct.state[q][k]) for k in usual.state[p])


def test_only_some_optimizers_can_call_their_kernel_directly() -> None:
    fp32, bf16 = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    assert can_call_kernel_directly(torch.optim.AdamW([fp32], fused=True))
    assert not can_call_kernel_directly(torch.optim.AdamW([fp32]))
    assert not can_call_kernel_directly(torch.optim.AdamW([fp32], fused=True, amsgrad=True))
    assert not can_call_kernel_directly(torch.optim.AdamW([fp32, bf16], fused=True))
    assert not can_call_kernel_directly(torch.optim.AdamW([fp32], lr=torch.tensor(1e-3), fused=True))
    assert not can_call_kernel_directly(torch.optim.SGD([fp32], fused=True))
    hooked = torch.optim.AdamW([fp32], fused=True)
    hooked.register_step_post_hook(lambda *_: None)
    assert not can_call_kernel_directly(hooked)
    assert not can_call_kernel_directly(type("Own", (torch.optim.AdamW,), {})([fp32], fused=True))


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
        optimizer = make_optimizer(Task(optim="sgd", **settings), torch.nn.Linear(2, 2), torch.device("cpu"))
        return float(optimizer.param_groups[0]["momentum"])

    assert (momentum(), momentum(momentum=0.5), momentum(momentum=0)) == (0.9, 0.5, 0.0)
    assert "momentum" in settings_of_class(Task)["optim"].doc and "sgd" in settings_of_class(Task)["momentum"].doc
