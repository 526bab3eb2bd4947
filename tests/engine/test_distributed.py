"""Parts that only several processes show."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from drivetrain.engine.group import Group
from drivetrain.engine.observe import Observer
from drivetrain.engine.setup import _batchnorm
from drivetrain.engine.state import share
from drivetrain.engine.strategies import spread
from drivetrain.engine.strategies.replicate import Replicated
from drivetrain.plan import Plan
from tests.samples import Plain


@pytest.mark.world_size(3)
def test_gradients_are_summed_in_buckets_whatever_took_part(group: Group) -> None:
    """Small buckets, a parameter that took no part on any rank, and two dtypes."""
    from drivetrain.engine.strategies import replicate

    replicate.BUCKET_BYTES = 64
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 4), "unused": nn.Linear(3, 3), "half": nn.Linear(4, 2).bfloat16()})
    strategy = spread(model, group, 8)
    assert isinstance(strategy, Replicated)
    assert len(strategy._buckets) > 3
    x = torch.full((2, 8), float(group.rank + 1))
    for _ in range(2):
        strategy.zero()
        strategy.tail[0] = group.rank
        for number in range(2):  # two micro-batches
            if number == 1:
                strategy.before_last_backward()
            hidden = model["b"](model["a"](x).relu())
            model["half"](hidden.bfloat16()).float().sum().backward()
        strategy.reduce()
    assert strategy.tail[0] == 3
    expected = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 4), "half": nn.Linear(4, 2).bfloat16()})
    expected.load_state_dict({k: v for k, v in model.state_dict().items() if not k.startswith("unused")})
    for rank in range(group.size):
        for _ in range(2):
            hidden = expected["b"](expected["a"](torch.full((2, 8), float(rank + 1))).relu())
            expected["half"](hidden.bfloat16()).float().sum().backward()
    for name, parameter in expected.named_parameters():
        mine = dict(model.named_parameters())[name]
        torch.testing.assert_close(mine.grad, parameter.grad, rtol=2e-2 if parameter.dtype == torch.bfloat16 else 1e-5, atol=1e-4)
    assert (model["unused"].weight.grad == 0).all()


@pytest.mark.world_size(2)
def test_buffers_and_tensors_are_rank_0s(group: Group) -> None:
    model = nn.BatchNorm1d(3)
    model.running_mean.fill_(group.rank)  # type: ignore[union-attr]
    spread(model, group, 8).share_buffers()
    assert (model.running_mean == 0).all()  # type: ignore[union-attr]
    shared = share({"w": torch.arange(4), "s": torch.tensor(2.5)} if group.main else None, group)
    assert torch.equal(shared["w"], torch.arange(4))
    assert shared["s"] == 2.5


def test_batchnorm_is_told_what_differs() -> None:
    said: list[str] = []

    class Notes(Observer):
        def notice(self, text: str) -> None:
            said.append(text)

    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    cpu = Group(0, 1, torch.device("cpu"))
    _batchnorm(model, Plain(), Plan(global_batch=16, micro_batch=16), cpu, Notes())
    assert said == []
    _batchnorm(model, Plain(), Plan(global_batch=16, micro_batch=4), cpu, Notes())
    assert "from 4 samples at a time, not from the global batch of 16" in said[0]


@pytest.mark.world_size(2)
def test_the_marker_runs_the_body_on_every_process(group: Group, tmp_path: Path) -> None:
    (tmp_path / str(group.rank)).touch()
    torch.distributed.barrier()
    assert len(list(tmp_path.iterdir())) == group.size == 2
