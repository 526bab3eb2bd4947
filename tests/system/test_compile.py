"""torch.compile for real, on the CPU: it needs a C++ compiler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.engine.group import Group
from tests import sample_tasks
from tests.gpu.hard_tasks import GPU_TASKS
from tests.sample_tasks import rows, weights

pytestmark = pytest.mark.system
ALONE = Group(0, 1, torch.device("cpu"))


def train(name: str, folder: Path, compiled: str, stop: int | None = None, **settings: Any) -> Any:
    sample_tasks.TASKS.setdefault(name, GPU_TASKS[name])
    job = sample_tasks.training(name, str(folder), ALONE, settings, {"compile": compiled, "micro_batch": 8})
    job.run_to_end(stop)
    job.setup.observer.close()
    return job


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ["Augmented", "LossParts", "Attention"])
def test_compiled_training_learns_and_resumes_exactly(name: str, tmp_path: Path) -> None:
    """With dropout, augmentation, counts, accumulation and a partial last batch; the transformer is compiled block by block."""
    eager = train(name, tmp_path / "plain", "off")
    compiled = train(name, tmp_path / "uninterrupted", "on")
    assert eager.execution.step.compiled is None and compiled.execution.step.compiled is not None, compiled.execution.tuner.results
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "nothing was compiled at all"
    for stop in (5, None):
        train(name, tmp_path / "resumed", "on", stop)
    assert rows(tmp_path / "resumed") == rows(tmp_path / "uninterrupted")
    assert weights(tmp_path / "resumed") == weights(tmp_path / "uninterrupted")
    first, last = rows(tmp_path / "uninterrupted")[0], rows(tmp_path / "uninterrupted")[-1]
    assert first["train/loss"] == pytest.approx(rows(tmp_path / "plain")[0]["train/loss"], rel=0.3)
    assert last["train/loss"] < first["train/loss"]


def test_without_dropout_compiled_steps_follow_eager_ones(tmp_path: Path) -> None:
    train("LossParts", tmp_path / "plain", "off")
    train("LossParts", tmp_path / "compiled", "on")
    for a, b in zip(rows(tmp_path / "plain"), rows(tmp_path / "compiled"), strict=True):
        assert a["train/loss"] == pytest.approx(b["train/loss"], rel=1e-4)
