"""Two processes share one GPU and use gloo: parts of the step before and after the all-reduce are captured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.engine.group import Group
from tests.gpu.hard_tasks import train
from tests.processes import on_ranks
from tests.sample_tasks import rows, weights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def _train(folder: str, pins: dict[str, Any], precision: str, stop: int | None, group: Group) -> str:
    torch.cuda.set_device(0)
    group = Group(group.rank, group.size, torch.device("cuda", 0))
    options: dict[str, Any] = {"precision": precision, "optim": "sgd", "clip": 0.5, "learning_rate": 0.1, "epochs": 8}
    return str(train("TokenMean", Path(folder), stop, pins=pins, group=group, **options).plan.get("capture"))


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 2e-5), ("bf16", 2e-2)])
def test_captured_ranks_give_the_curve_of_one_process(precision: str, tolerance: float, tmp_path: Path) -> None:
    capture = _train(str(tmp_path / "one"), {"capture": "off"}, precision, None, Group(0, 1, torch.device("cuda", 0)))
    assert capture == "off"
    assert on_ranks(2, _train, str(tmp_path / "two"), {}, precision, None)[0] == "on"
    for a, b in zip(rows(tmp_path / "one"), rows(tmp_path / "two"), strict=True):
        assert a["train/loss"] == pytest.approx(b["train/loss"], rel=tolerance)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=tolerance if precision == "fp32" else 0.1)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("micro_batch", [8, 3])
def test_captured_ranks_equal_eager_ones_and_resume_exactly(precision: str, micro_batch: int, tmp_path: Path) -> None:
    pins = {"micro_batch": micro_batch}
    assert on_ranks(2, _train, str(tmp_path / "eager"), pins | {"capture": "off"}, precision, None)[0] == "off"
    assert on_ranks(2, _train, str(tmp_path / "captured"), pins, precision, None)[0] == "on"
    assert rows(tmp_path / "captured") == rows(tmp_path / "eager")
    for stop in (21, None):
        on_ranks(2, _train, str(tmp_path / "resumed"), pins, precision, stop)
    assert rows(tmp_path / "resumed") == rows(tmp_path / "captured")
    assert weights(tmp_path / "resumed") == weights(tmp_path / "captured")
