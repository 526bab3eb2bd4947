"""The first convolution is computed as a matrix product with the same numbers; no other convolution is replaced."""

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
    product = conv2d_by_product(images, weight, bias, stride, padding, dilation)
    assert torch.allclose(product, expected, rtol=1e-12)
    output_gradient = torch.randn_like(expected)
    gradients = torch.autograd.grad(product, (weight, bias), output_gradient)
    expected_gradients = torch.autograd.grad(expected, (weight, bias), output_gradient)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        assert torch.allclose(gradient, expected_gradient, rtol=1e-10)


def function_for(images: Tensor, weight: Tensor, **options: Any) -> Any:
    """Returns the function that computes a convolution of these tensors after the replacement."""
    graph = fx.Graph()
    nodes = [graph.placeholder(name) for name in ("images", "weight")]
    for node, value in zip(nodes, (images, weight), strict=True):
        node.meta["example_value"] = value
    graph.output(graph.call_function(torch.conv2d, tuple(nodes), options))
    replaced = replace_first_convolutions(fx.GraphModule({}, graph)).graph
    return next(node for node in replaced.nodes if node.op == "call_function").target


def test_only_a_first_convolution_of_few_channels_is_replaced() -> None:
    with FakeTensorMode():

        def tensor(*shape: int, device: str = "cuda", trained: bool = False) -> Tensor:
            return torch.empty(*shape, device=device, requires_grad=trained)

        assert function_for(tensor(8, 1, 28, 28), tensor(32, 1, 5, 5)) is conv2d_by_product
        assert function_for(tensor(8, 3, 32, 32), tensor(64, 3, 3, 3), padding=1) is conv2d_by_product
        for function in (
            function_for(tensor(8, 1, 28, 28, device="cpu"), tensor(32, 1, 5, 5, device="cpu")),  # a CPU's own convolutions are fast
            function_for(tensor(8, 1, 28, 28, trained=True), tensor(32, 1, 5, 5)),  # a module before it is trained
            function_for(tensor(8, 3, 224, 224), tensor(64, 3, 7, 7)),  # each output needs 147 inputs: too many
            function_for(tensor(8, 1, 28, 28), tensor(16, 1, 5, 5)),  # the matrix would need more memory than the output
            function_for(tensor(8, 2, 28, 28), tensor(32, 1, 3, 3), groups=2),
            function_for(tensor(8, 1, 28, 28), tensor(32, 1, 5, 5), padding="same"),
            function_for(tensor(1, 28, 28), tensor(32, 1, 5, 5)),
        ):
            assert function is torch.conv2d


def test_a_traced_net_trains_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The net runs through dynamo and AOT autograd, without the inductor compiler."""
    from torch._dynamo.backends.debugging import aot_eager

    monkeypatch.setattr(stem, "_is_worth_replacing", lambda input, weight, *_, **__: weight.meta["example_value"].shape[1] == 1)
    functions: list[Any] = []

    def backend(graph: fx.GraphModule, inputs: Any) -> Any:
        functions.extend(n.target for n in replace_first_convolutions(graph).graph.nodes)
        return aot_eager(graph, inputs)

    torch.manual_seed(0)

    class FirstConvolution(torch.nn.Conv2d):
        def forward(self, input: Tensor) -> Tensor:
            return F.conv2d(input, weight=self.weight, bias=self.bias, padding=1)  # with keyword arguments, as some users write it

    net = torch.nn.Sequential(FirstConvolution(1, 16, 3), torch.nn.BatchNorm2d(16), torch.nn.ReLU(), torch.nn.Conv2d(16, 4, 3))
    images = torch.randn(6, 1, 9, 9)
    gradients = []
    for forward in (net, torch.compile(net, backend=backend, dynamic=False)):
        net.zero_grad()
        forward(images).square().mean().backward()
        gradients.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
    assert conv2d_by_product in functions and torch.conv2d in functions
    for gradient, expected in zip(*gradients, strict=True):
        assert torch.allclose(gradient, expected, rtol=1e-4, atol=1e-6) and gradient.stride() == expected.stride()
