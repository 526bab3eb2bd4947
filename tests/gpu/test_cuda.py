"""The core on a real GPU: precisions, exact resume, the loader, and the command itself.

python -m pytest -m gpu tests/gpu
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.engine.data.keyed_random import KeyedRand
from drivetrain.engine.group import Group
from drivetrain.engine.log.observe import Observers
from drivetrain.engine.loop import Training
from drivetrain.hardware import detect
from drivetrain.plan.choose import choose
from drivetrain.runs import Run
from drivetrain.watch.files import MetricsFile
from tests.command import run_drivetrain, run_ok, write_task
from tests.sample_tasks import TASKS, rows, weights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def train(name: str, folder: Path, stop: int | None = None, pins: dict[str, Any] | None = None, **settings: Any) -> None:
    task = TASKS[name](**settings)
    plan = choose(task.settings(), detect(), device="cuda", world_size=1, local_procs=1, pins=pins)
    observer = Observers([MetricsFile(Run(folder))])
    Training(task, plan, Run(folder), Group(0, 1, torch.device("cuda", 0)), observer, False).run_to_end(stop)
    observer.close()


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
@pytest.mark.parametrize("name", ["Augmented", "LoaderTask", "TokenMean", "LossParts", "RandomWalkTask"])
def test_a_resumed_run_is_bit_equal(name: str, precision: str, tmp_path: Path) -> None:
    pins = {"workers": 2} if name == "LoaderTask" else {}
    options = {"precision": precision, "clip": 1.0}
    train(name, tmp_path / "uninterrupted", pins=pins, **options)
    for stop in (3, 9, None):
        train(name, tmp_path / "resumed", stop, pins, **options)
    assert rows(tmp_path / "resumed") == rows(tmp_path / "uninterrupted")
    assert weights(tmp_path / "resumed") == weights(tmp_path / "uninterrupted")


def test_micro_batches_give_one_curve(tmp_path: Path) -> None:
    options = {"precision": "fp32", "optim": "sgd", "clip": 0.5, "learning_rate": 0.2}
    train("TokenMean", tmp_path / "uninterrupted", **options)
    train("TokenMean", tmp_path / "parts", pins={"micro_batch": 3}, **options)
    for a, b in zip(rows(tmp_path / "uninterrupted"), rows(tmp_path / "parts"), strict=True):
        assert a["train/loss"] == pytest.approx(b["train/loss"], rel=2e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=2e-5)


def test_keyed_random_numbers_equal_the_cpus() -> None:
    here, there = KeyedRand(torch.arange(1000), 3, 1), KeyedRand(torch.arange(1000, device="cuda"), 3, 1)
    assert torch.equal(here.uniform(7), there.uniform(7).cpu())
    torch.testing.assert_close(here.normal(3), there.normal(3).cpu())


def test_the_command_finds_the_gpu(folder: Path) -> None:
    output = run_ok("train", "digits", "--procs", "1")
    assert "1 process on cuda:0, bf16" in output
    assert "bit-equal" in run_ok("verify-resume", str(write_task()), "--steps", "8", "--procs", "1")


CONV = '''
import torch.nn as nn, torch.nn.functional as F
from drivetrain import Task, Tensors, datasets

class Conv(Task):
    """A small convolutional net in fp32, where cuDNN adds in any order."""

    precision: str = "fp32"

    def model(self):
        def block(a, b):
            return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2))

        return nn.Sequential(block(1, 8), block(8, 16), nn.Flatten(), nn.Linear(64, 10))

    def train_data(self):
        return datasets.digits("train")

    def loss(self, model, batch):
        x, y = batch
        return F.cross_entropy(model(x.unsqueeze(1)), y)
'''


def test_verify_resume_names_what_does_not_repeat(folder: Path) -> None:
    Path("conv.py").write_text(CONV)
    output = run_drivetrain("verify-resume", "conv.py", "--procs", "1").stdout
    if "bit-equal" not in output:  # whether cuDNN's choice repeats depends on the GPU
        assert "training itself does not repeat" in output
        assert "Conv2d's backward" in output, output
    assert "bit-equal" in run_ok("verify-resume", "conv.py", "deterministic=true", "--procs", "1")


def test_an_operation_without_a_deterministic_form_is_named(folder: Path) -> None:
    text = CONV.replace("F.cross_entropy(model(x.unsqueeze(1)), y)", "F.cross_entropy(model(x.unsqueeze(1))[:, :, None], y[:, None])")
    Path("conv.py").write_text(text)
    refused = run_drivetrain("train", "conv.py", "deterministic=true", "--procs", "1")
    assert refused.returncode == 2
    assert "nll_loss2d_forward_out_cuda_template has no deterministic form" in refused.stderr


def test_guide_001_on_the_gpu(folder: Path) -> None:
    """The recipe through the command: captured, and its plan is in run.json."""
    from tests.test_datasets import write_mnist

    write_mnist(Path("data"))
    recipe = Path(__file__).parents[2] / "recipes" / "guide-001.yaml"
    output = run_ok("train", str(recipe), "data_dir=data", "global_batch=16", "--name", "g", "--procs", "1")
    assert "steps run captured" in output
    plan = json.loads(Path("runs/g/run.json").read_text())["plan"]
    assert plan["capture"] == "on" and plan["channels_last"] and plan["measured"]["step_seconds"]["captured"] > 0
    assert any(r["choice"] == "compile=on" and "not tried" in r["why"] for r in plan["rejected"])


def test_host_syncs_are_named_at_the_end(folder: Path) -> None:
    write_task(change=("return F.cross_entropy(model(x), y)", "return F.cross_entropy(model(x / max(1.0, x.abs().max().item())), y)"))
    output = run_ok("train", "small.py", "epochs=400", "plan.compile=off", "--procs", "1", "--name", "waits")
    assert "time    small.py:" in output and "keep values on the device there" in output, output
    assert "keep values on the device" in run_ok("status", "waits")
