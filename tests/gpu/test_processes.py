"""Two processes that share one GPU over gloo: captured pieces around a real all-reduce."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.engine.group import Group
from tests.gpu.kinds import train
from tests.processes import on_ranks
from tests.samples import rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def _train(folder: str, pins: dict[str, Any], group: Group) -> str:
    torch.cuda.set_device(0)
    group = Group(group.rank, group.size, torch.device("cuda", 0))
    options: dict[str, Any] = {"precision": "fp32", "optim": "sgd", "clip": 0.5, "learning_rate": 0.1, "epochs": 8}
    return str(train("Tokens", Path(folder), pins=pins, group=group, **options).plan.get("capture"))


def test_captured_ranks_give_the_curve_of_one_process(tmp_path: Path) -> None:
    one = _train(str(tmp_path / "one"), {"capture": "off"}, Group(0, 1, torch.device("cuda", 0)))
    assert one == "off"
    assert on_ranks(2, _train, str(tmp_path / "two"), {})[0] == "on"
    for a, b in zip(rows(tmp_path / "one"), rows(tmp_path / "two"), strict=True):
        assert a["train/loss"] == pytest.approx(b["train/loss"], rel=2e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=2e-5)
