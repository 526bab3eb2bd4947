"""Tests of the engine that need several processes."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from drivetrain.engine.group import Group
from drivetrain.engine.log.observe import Observer
from drivetrain.engine.model import _batchnorm
from drivetrain.engine.state.tensors import StoredTensors
from drivetrain.engine.strategies import Replicated
from drivetrain.engine.strategies.base import norm_of
from drivetrain.plan import Plan
from tests.sample_tasks import Plain


@pytest.mark.world_size(3)
def test_gradients_of_used_and_unused_parameters_are_summed(group: Group) -> None:
    """The parameters have three dtypes, and one module is unused."""
    torch.manual_seed(0)
    layers = {
        "a": nn.Linear(8, 8),
        "b": nn.Linear(8, 4),
        "unused": nn.Linear(3, 3),
        "short": nn.Linear(4, 2).bfloat16(),
        "long": nn.Linear(4, 2).double(),
    }
    model = nn.ModuleDict(layers)
    strategy = Replicated(model, group, 8)

    def backward(net: nn.ModuleDict, rank: int) -> None:
        hidden = net["b"](net["a"](torch.full((2, 8), float(rank + 1))).relu())
        (net["short"](hidden.bfloat16()).double() + net["long"](hidden.double())).sum().backward()

    for _ in range(2):
        strategy.zero_gradients()
        strategy.piggyback[0] = group.rank
        backward(model, group.rank)
        backward(model, group.rank)
        strategy.reduce_gradients()
    strategy.scale_gradients(torch.tensor(0.5))
    assert strategy.piggyback[0] == 3, "the piggyback is summed, but not scaled like gradients"
    expected = copy.deepcopy(model)
    for parameter in expected.parameters():
        parameter.grad = None
    for rank in range(group.size):
        backward(expected, rank)  # once: the strategy's gradients come from two passes, and are halved
    for (name, parameter), expected_parameter in zip(model.named_parameters(), expected.parameters(), strict=True):
        if name.startswith("unused"):
            assert parameter.grad is not None
            assert (parameter.grad == 0).all()
        else:
            torch.testing.assert_close(
                parameter.grad, expected_parameter.grad, rtol=3e-2 if parameter.dtype == torch.bfloat16 else 1e-5, atol=1e-4
            )
    for parameter in expected.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    expected_norm = norm_of(list(expected.parameters()))
    torch.testing.assert_close(strategy.gradient_norm(), expected_norm, rtol=1e-2, atol=0)


@pytest.mark.world_size(2)
def test_every_rank_gets_rank_0s_buffers_and_tensors(group: Group) -> None:
    model = nn.BatchNorm1d(3)
    model.running_mean.fill_(group.rank)  # type: ignore[union-attr]
    Replicated(model, group, 8).broadcast_buffers()
    assert (model.running_mean == 0).all()  # type: ignore[union-attr]
    stored = StoredTensors({"a/w": torch.arange(4), "b/s": torch.tensor(2.5)} if group.is_main else None, group)
    assert list(stored.layout) == ["a/w", "b/s"]
    assert torch.equal(stored.subset("a").load("w"), torch.arange(4))
    assert stored.subset("b").load("s") == 2.5


def test_users_are_warned_how_batchnorm_differs() -> None:
    notices: list[str] = []

    class Notices(Observer):
        def notice(self, text: str) -> None:
            notices.append(text)

    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    cpu = Group(0, 1, torch.device("cpu"))
    _batchnorm(model, Plain(), Plan(global_batch=16, micro_batch=16), cpu, Notices())
    assert notices == []
    _batchnorm(model, Plain(), Plan(global_batch=16, micro_batch=4), cpu, Notices())
    assert "from 4 samples at a time, not from the global batch of 16" in notices[0]


@pytest.mark.world_size(2)
def test_the_marker_runs_the_body_in_every_process(group: Group, tmp_path: Path) -> None:
    (tmp_path / str(group.rank)).touch()
    torch.distributed.barrier()
    assert len(list(tmp_path.iterdir())) == group.size == 2
