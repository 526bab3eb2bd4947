"""Parallel kernels in a graph give bit-equal results to sequential ones in every replay.

python -m pytest -m gpu tests/gpu/test_parallel_kernels.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain.engine.fast import compiled
from drivetrain.engine.fast.graphs import capture_graph
from drivetrain.engine.fast.parallel_kernels import parallel_optimizer_kernels
from drivetrain.engine.fast.stem import conv2d_by_product
from tests.gpu.hard_tasks import train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.fixture(autouse=True)
def own_stream() -> Iterator[None]:
    """Exact convolutions, on a stream that can be captured."""
    torch.backends.cudnn.deterministic = True
    with torch.cuda.stream(torch.cuda.Stream()):
        yield
    torch.cuda.synchronize()
    torch.backends.cudnn.deterministic = False


def streams_of(replay: Any) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        replay()
        torch.cuda.synchronize()
    return len({e.device_resource_id for e in profiler.profiler.kineto_results.events() if "Memcpy" not in e.name()})


def test_a_parallel_update_is_exact() -> None:
    """The inputs change between replays: a kernel that started too early would read the old ones."""
    torch.manual_seed(0)
    device = torch.device("cuda", 0)

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        net = nn.Sequential(
            nn.Conv2d(8, 64, 3), nn.Tanh(), nn.Conv2d(64, 96, 3), nn.Tanh(), nn.Conv2d(96, 32, 3), nn.Flatten(), nn.Linear(3200, 50)
        )
        net = net.to(device)
        return net, torch.optim.AdamW(net.parameters(), lr=torch.tensor(1e-3, device=device), fused=True, capturable=True)

    inputs = torch.zeros(32, 8, 16, 16, device=device)

    def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for parameter in net.parameters():
            parameter.grad = None
        loss = net(inputs).square().mean()
        loss.backward()
        with parallel_optimizer_kernels(device):
            optimizer.step()

    sequential, parallel = make(), make()
    for net_and_optimizer in (sequential, parallel):
        for _ in range(3):
            step(*net_and_optimizer)
    replay = capture_graph(lambda: step(*parallel))
    assert streams_of(replay) >= 2, "no kernels ran in parallel"
    step(*sequential)
    for seed in range(200):
        inputs.copy_(torch.randn(inputs.shape, generator=torch.Generator().manual_seed(seed)))
        step(*sequential)
        replay()
    for parameter, expected in zip(parallel[0].parameters(), sequential[0].parameters(), strict=True):
        assert torch.equal(parameter, expected)


def test_a_convolution_as_a_product_is_as_exact_as_the_librarys() -> None:
    """Both run in bf16 and are compared with float64."""
    torch.manual_seed(0)
    images = torch.randn(64, 1, 28, 28, device="cuda")
    weight, bias = torch.randn(32, 1, 5, 5, device="cuda") / 5, torch.randn(32, device="cuda")
    output_gradient = torch.randn(64, 32, 28, 28, device="cuda")

    def relative_errors(convolve: Any) -> list[float]:
        def run(images: Tensor, weight: Tensor, bias: Tensor, output_gradient: Tensor) -> tuple[Tensor, ...]:
            weight, bias = weight.clone().requires_grad_(), bias.clone().requires_grad_()
            output = convolve(images, weight, bias, 1, 2)
            return output, *torch.autograd.grad(output, (weight, bias), output_gradient.to(output.dtype))

        exact = run(*(t.double() for t in (images, weight, bias, output_gradient)))
        with torch.autocast("cuda", torch.bfloat16):
            computed = run(images, weight, bias, output_gradient)
        return [float((g.double() - e).norm() / e.norm()) for g, e in zip(computed, exact, strict=True)]

    for error, library_error in zip(relative_errors(conv2d_by_product), relative_errors(F.conv2d), strict=True):
        assert error < 1.5 * library_error + 1e-3


def test_code_that_fails_with_custom_passes_is_compiled_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(graph: Any) -> Any:
        raise RuntimeError("not this one")

    monkeypatch.setattr(compiled, "replace_first_convolutions", broken)
    facts = train("Images", tmp_path, pins={"compile": "on"}, epochs=8)
    assert facts.plan["compile"] == "on" and "not this one" in facts.plan["reasons"]["compile"], facts.plan["reasons"]
