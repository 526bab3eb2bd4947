"""The core on a real GPU: precisions, exact resume, the loader, and the command itself.

python -m pytest -m gpu tests/gpu
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.engine.group import Group
from drivetrain.engine.loop import Training
from drivetrain.engine.observe import Observers
from drivetrain.engine.rand import KeyedRand
from drivetrain.hardware import detect
from drivetrain.plan import choose
from drivetrain.runs import Run
from drivetrain.watch.files import MetricsFile
from tests.command import good, write_task
from tests.samples import TASKS, rows, weights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def train(name: str, folder: Path, stop: int | None = None, pins: dict[str, Any] | None = None, **settings: Any) -> None:
    task = TASKS[name](**settings)
    plan = choose(task.settings(), detect(), device="cuda", world_size=1, local_procs=1, pins=pins)
    observer = Observers([MetricsFile(Run(folder))])
    Training(task, plan, Run(folder), Group(0, 1, torch.device("cuda", 0)), observer, False).run_to_end(stop)
    observer.close()


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
@pytest.mark.parametrize("name", ["Augmented", "Loaded", "Tokens", "Parts", "Walk"])
def test_stopped_and_gone_on_is_bit_equal(name: str, precision: str, tmp_path: Path) -> None:
    pins = {"workers": 2} if name == "Loaded" else {}
    options = {"precision": precision, "clip": 1.0}
    train(name, tmp_path / "whole", pins=pins, **options)
    for stop in (3, 9, None):
        train(name, tmp_path / "broken", stop, pins, **options)
    assert rows(tmp_path / "broken") == rows(tmp_path / "whole")
    assert weights(tmp_path / "broken") == weights(tmp_path / "whole")


def test_micro_batches_give_one_curve(tmp_path: Path) -> None:
    options = {"precision": "fp32", "optim": "sgd", "clip": 0.5, "learning_rate": 0.2}
    train("Tokens", tmp_path / "whole", **options)
    train("Tokens", tmp_path / "parts", pins={"micro_batch": 3}, **options)
    for a, b in zip(rows(tmp_path / "whole"), rows(tmp_path / "parts"), strict=True):
        assert a["train/loss"] == pytest.approx(b["train/loss"], rel=2e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=2e-5)


def test_keyed_numbers_are_those_of_a_cpu() -> None:
    here, there = KeyedRand(torch.arange(1000), 3, 1), KeyedRand(torch.arange(1000, device="cuda"), 3, 1)
    assert torch.equal(here.uniform(7), there.uniform(7).cpu())
    torch.testing.assert_close(here.normal(3), there.normal(3).cpu())


def test_the_command_finds_the_gpu(folder: Path) -> None:
    output = good("train", "digits", "--procs", "1")
    assert "1 process on cuda:0, bf16" in output
    assert "bit-equal" in good("verify-resume", str(write_task()), "--steps", "8", "--procs", "1")
