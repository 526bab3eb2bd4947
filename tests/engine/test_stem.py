"""The first convolution as a matrix product: the same numbers, and no other convolution is replaced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from drivetrain.engine.fast import stem
from drivetrain.engine.fast.stem import conv2d_by_product, replace_first_convolutions


@pytest.mark.parametrize(
    ("channels", "filters", "taps", "stride", "padding", "dilation", "size"),
    [(1, 32, (5, 5), 1, 2, 1, (28, 28)), (3, 64, (3, 3), (2, 1), (1, 0), 1, (17, 23)),
     (1, 16, (3, 3), 1, 0, 2, (12, 9)), (2, 8, (2, 3), (2,), (1,), (1, 2), (10, 11))],
)  # fmt: skip
def test_a_product_equals_the_convolution(
    channels: int, filters: int, taps: tuple[int, int], stride: Any, padding: Any, dilation: Any, size: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    images = torch.randn(5, channels, *size, dtype=torch.float64)
    weight = torch.randn(filters, channels, *taps, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(filters, dtype=torch.float64, requires_grad=True)
    expected = F.conv2d(images, weight, bias, stride, padding, dilation)
    got = conv2d_by_product(images, weight, bias, stride, padding, dilation)
    assert torch.allclose(got, expected, rtol=1e-12)
    given = torch.randn_like(expected)
    for mine, theirs in zip(
        torch.autograd.grad(got, (weight, bias), given), torch.autograd.grad(expected, (weight, bias), given), strict=True
    ):
        assert torch.allclose(mine, theirs, rtol=1e-10)


def of(images: Tensor, weight: Tensor, **options: Any) -> Any:
    """Returns the function that replaces a convolution of these tensors."""
    graph = fx.Graph()
    nodes = [graph.placeholder(name) for name in ("images", "weight")]
    for node, value in zip(nodes, (images, weight), strict=True):
        node.meta["example_value"] = value
    graph.output(graph.call_function(torch.conv2d, tuple(nodes), options))
    return next(n for n in replace_first_convolutions(fx.GraphModule({}, graph)).graph.nodes if n.op == "call_function").target


def test_only_a_first_convolution_of_few_channels_is_replaced() -> None:
    with FakeTensorMode():

        def tensor(*shape: int, device: str = "cuda", trained: bool = False) -> Tensor:
            return torch.empty(*shape, device=device, requires_grad=trained)

        assert of(tensor(8, 1, 28, 28), tensor(32, 1, 5, 5)) is conv2d_by_product
        assert of(tensor(8, 3, 32, 32), tensor(64, 3, 3, 3), padding=1) is conv2d_by_product
        for kept in (
            of(tensor(8, 1, 28, 28, device="cpu"), tensor(32, 1, 5, 5, device="cpu")),  # a CPU's convolutions are quick
            of(tensor(8, 1, 28, 28, trained=True), tensor(32, 1, 5, 5)),  # something before it is trained
            of(tensor(8, 3, 224, 224), tensor(64, 3, 7, 7)),  # surroundings of 147 numbers
            of(tensor(8, 1, 28, 28), tensor(16, 1, 5, 5)),  # they would take more room than what comes out
            of(tensor(8, 2, 28, 28), tensor(32, 1, 3, 3), groups=2),
            of(tensor(8, 1, 28, 28), tensor(32, 1, 5, 5), padding="same"),
            of(tensor(1, 28, 28), tensor(32, 1, 5, 5)),
        ):
            assert kept is torch.conv2d


def test_a_traced_net_trains_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through dynamo and autograd's tracing, up to the compiler proper."""
    from torch._dynamo.backends.debugging import aot_eager

    monkeypatch.setattr(stem, "_is_worth_replacing", lambda input, weight, *_, **__: weight.meta["example_value"].shape[1] == 1)
    found: list[Any] = []

    def backend(graph: fx.GraphModule, inputs: Any) -> Any:
        found.extend(n.target for n in replace_first_convolutions(graph).graph.nodes)
        return aot_eager(graph, inputs)

    torch.manual_seed(0)

    class First(torch.nn.Conv2d):
        def forward(self, input: Tensor) -> Tensor:
            return F.conv2d(input, weight=self.weight, bias=self.bias, padding=1)  # named, as some write it

    net = torch.nn.Sequential(First(1, 16, 3), torch.nn.BatchNorm2d(16), torch.nn.ReLU(), torch.nn.Conv2d(16, 4, 3))
    images = torch.randn(6, 1, 9, 9)
    gradients = []
    for forward in (net, torch.compile(net, backend=backend, dynamic=False)):
        net.zero_grad()
        forward(images).square().mean().backward()
        gradients.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
    assert conv2d_by_product in found and torch.conv2d in found
    for mine, expected in zip(*gradients, strict=True):
        assert torch.allclose(mine, expected, rtol=1e-4, atol=1e-6) and mine.stride() == expected.stride()
