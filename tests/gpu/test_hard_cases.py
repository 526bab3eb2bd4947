"""Tasks that a captured step could compute wrongly without an error: each must equal eager steps, or not be captured.

python -m pytest -m gpu tests/gpu/test_hard_cases.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain.data import Tensors
from tests.gpu.hard_tasks import GPU_TASKS, train
from tests.sample_tasks import Plain, blobs, rows, weights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


class HostBranch(Plain):
    """Branches on a random number of torch's CPU generator, as some libraries do, without a host sync that could be detected."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        return F.cross_entropy(model(x if torch.rand(1) < 0.5 else x * 0.5), y)


class GrowingCache(Plain):
    """The model has a cache, which the longer batches of an evaluation replace."""

    def model(self) -> nn.Module:
        return Cached()

    def eval_data(self) -> Any:
        return Tensors(*blobs(137, seed=1))


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4))
        self.offsets: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.offsets is None or len(self.offsets) < len(x) or not self.training:
            self.offsets = torch.linspace(0, 0.1, max(64, len(x)), device=x.device)[:, None]
        return self.net(x + self.offsets[: len(x)])


class Remembers(Plain):
    """Uses a tensor of the previous step."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        logits = model(x)
        before = getattr(self, "before", None)
        self.before = logits.detach().mean(0)
        return F.cross_entropy(logits, y) + (0.0 if before is None else 0.1 * (logits.mean(0) - before).pow(2).sum())


class Clamped(Plain):
    """Replaces the data of its weights in the forward pass."""

    def loss(self, model: Any, batch: Any) -> Any:
        model[0].weight.data = model[0].weight.data.clamp(-0.4, 0.4)
        return super().loss(model, batch)


class Lookahead(torch.optim.AdamW):
    """Goes halfway back in every fifth step, which Python code counts."""

    def step(self, closure: Any = None) -> Any:
        self.num_steps = getattr(self, "num_steps", 0) + 1
        if self.num_steps % 5 == 1:
            self.slow = [p.detach().clone() for g in self.param_groups for p in g["params"]]
        super().step(closure)
        if self.num_steps % 5 == 0:
            for p, slow in zip([p for g in self.param_groups for p in g["params"]], self.slow, strict=True):
                p.data.lerp_(slow, 0.5)


class LooksAhead(Plain):
    def optimizer(self, model: Any) -> Any:
        return Lookahead(model.parameters(), lr=0.02, fused=True)


class Hooked(Plain):
    """An optimizer of torch's own, with a hook that counts in Python."""

    def optimizer(self, model: Any) -> Any:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, fused=True)
        count = [0]

        def after(*_: Any) -> None:
            count[0] += 1
            if count[0] % 3 == 0:
                with torch.no_grad():
                    model[0].weight.mul_(0.99)

        optimizer.register_step_post_hook(after)
        return optimizer


class Syncs(Plain):
    """Waits for the device in a way that torch's sync debug mode does not detect: only the capture itself fails."""

    dropout: float = 0.3

    def loss(self, model: nn.Module, batch: Any) -> Any:
        value = super().loss(model, batch)
        torch.cuda.current_stream().synchronize()
        return value


class SyncingMetrics(Plain):
    """Dropout in training; an evaluation that cannot be captured."""

    dropout: float = 0.3

    def eval_data(self) -> Any:
        return Tensors(*blobs(400, seed=1))

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        x, y = batch
        right = model(x).argmax(-1) == y
        return {"accuracy": right.float(), "all": (float(right.sum().item()), len(y))}


class CollectsMetrics(SyncingMetrics):
    """Collects the batch sizes in a list for summary()."""

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        x, y = batch
        self.seen = [*getattr(self, "seen", []), len(y)]
        return {"accuracy": (model(x).argmax(-1) == y).float()}

    def summary(self, values: dict[str, Tensor]) -> dict[str, Any]:
        seen, self.seen = sum(self.seen), []
        return {"seen": float(seen)}


CAPTURED = {"GrowingCache": "on", "LooksAhead": "on", "Hooked": "on", "SyncingMetrics": "on", "MovingAverageTeacher": "on", "SubclassedOptimizer": "on",
            "ChangingColumnsTask": "on", "HostBranch": "off", "Remembers": "off", "Clamped": "off", "Syncs": "off"}  # fmt: skip
GPU_TASKS |= {
    k.__name__: k for k in (HostBranch, GrowingCache, Remembers, Clamped, LooksAhead, Hooked, Syncs, SyncingMetrics, CollectsMetrics)
}


@pytest.mark.parametrize("micro_batch", [16, 5])
@pytest.mark.parametrize("name", CAPTURED)
def test_a_hard_task_equals_eager_steps_or_is_not_captured(name: str, micro_batch: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"epochs": 10, "clip": 0.5}
    if name == "ChangingColumnsTask":
        micro_batch = min(micro_batch, 12)
    train(name, tmp_path / "eager", pins={"capture": "off", "micro_batch": micro_batch}, **options)
    facts = train(name, tmp_path / "auto", pins={"micro_batch": micro_batch}, **options)
    assert facts.plan["capture"] == CAPTURED[name], facts.plan
    assert rows(tmp_path / "auto") == rows(tmp_path / "eager")
    assert weights(tmp_path / "auto") == weights(tmp_path / "eager")


def test_after_a_capture_that_failed_another_training_is_captured(tmp_path: Path) -> None:
    """In one process: a failed capture does not affect the next one."""
    train("Syncs", tmp_path / "failed", epochs=8)
    facts = train("Augmented", tmp_path / "after", epochs=8)
    train("Augmented", tmp_path / "eager", pins={"capture": "off"}, epochs=8)
    assert facts.plan["capture"] == "on", facts.plan
    assert rows(tmp_path / "after") == rows(tmp_path / "eager")


def test_metrics_with_python_state_see_every_batch(tmp_path: Path) -> None:
    train("CollectsMetrics", tmp_path, epochs=8)
    assert {r["eval/seen"] for r in rows(tmp_path) if "eval/seen" in r} == {400.0}


def test_resumed_before_a_partial_batch_the_same_steps_are_compiled(tmp_path: Path) -> None:
    options: dict[str, Any] = {"epochs": 6, "deterministic": True}
    train("Augmented", tmp_path / "uninterrupted", pins={"compile": "on"}, **options)
    for stop in (6, 20, None):
        train("Augmented", tmp_path / "resumed", stop, pins={"compile": "on"}, **options)
    assert rows(tmp_path / "resumed") == rows(tmp_path / "uninterrupted")
    assert weights(tmp_path / "resumed") == weights(tmp_path / "uninterrupted")


def test_tight_memory_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With little free memory, each form is captured at its first call, without eager steps before."""
    monkeypatch.setattr("drivetrain.engine.fast.trial.TIGHT_MEMORY_SHARE", 0.0)
    train("Images", tmp_path / "eager", pins={"capture": "off"}, epochs=8, deterministic=True, log_every=4)
    facts = train("Images", tmp_path / "tight", epochs=8, deterministic=True, log_every=4)
    assert facts.plan["capture"] == "on"
    assert rows(tmp_path / "tight") == rows(tmp_path / "eager")
