"""A result that depends on the plan is reported once, before the first step; the check has no side effects and no false alarms."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from drivetrain.data import Tensors
from drivetrain.engine.group import Group
from drivetrain.engine.log.observe import Observer, Observers
from drivetrain.engine.loop import Training
from drivetrain.plan.choose import choose
from drivetrain.runs import Run
from drivetrain.task import Task
from drivetrain.task_ref import find_task, load_class
from drivetrain.watch.files import MetricsFile
from tests.processes import on_ranks
from tests.sample_tasks import HARDWARE, TASKS, LoaderTask, Plain, rows, weights

GLOBAL_CALLS = 0


class WrongCount(Plain):
    """Returns a count that is not the number of samples."""

    def loss(self, model: Any, batch: Any) -> Any:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), 1


class WrongCountInParts(Plain):
    def counts(self, batch: Any) -> Any:
        return {"b": 7}

    def loss(self, model: Any, batch: Any) -> Any:
        losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return {"a": losses.mean(), "b": (losses.sum(), 7)}


class Summed(Plain):
    def loss(self, model: Any, batch: Any) -> Any:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


class Contrastive(Plain):
    """The other samples of the batch are the negatives."""

    def loss(self, model: Any, batch: Any) -> Any:
        out = F.normalize(model(batch[0]), dim=-1)
        return F.cross_entropy(out @ F.normalize(batch[0], dim=-1).T / 0.2, torch.arange(len(out)))


class NoisyContrastive(Contrastive):
    """A contrastive loss, with dropout in a module of the user's own."""

    def model(self) -> nn.Module:
        class Noise(nn.Module):
            def forward(self, x: Any) -> Any:
                return F.dropout(x, 0.05, self.training)

        return nn.Sequential(nn.Linear(4, 16), Noise(), nn.Linear(16, 4))


class LoaderContrastive(LoaderTask):
    def loss(self, model: Any, batch: Any) -> Any:
        return Contrastive.loss(self, model, (batch["inputs"]["x"], batch["y"]))  # type: ignore[arg-type]


class MeanOfWords(Plain):
    """A mean over words instead of samples."""

    def train_data(self) -> Any:
        return Tensors(x=torch.randn(101, 4), y=torch.arange(101) % 4, words=1 + torch.arange(101) % 9)

    def loss(self, model: Any, batch: Any) -> Any:
        losses = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none") * (1 + batch["words"])
        return (losses * batch["words"]).sum() / batch["words"].sum()

    def eval_data(self) -> Any:
        return None


class InputAverage(nn.Module):
    """Keeps a moving average of its inputs in a buffer."""

    def __init__(self, rebinds: bool) -> None:
        super().__init__()
        self.net, self.rebinds = nn.Linear(4, 4), rebinds
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x: Any) -> Any:
        if self.training and self.rebinds:
            self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        elif self.training:
            self.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.net(x)


class AveragesInputs(Plain):
    rebinds: bool = False  # a new tensor instead of a change in place

    def model(self) -> nn.Module:
        return InputAverage(self.rebinds)


class PythonState(Plain):
    """Python state that the next loss depends on."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._calls, self.mean = 0, torch.zeros(())

    def loss(self, model: Any, batch: Any) -> Any:
        losses = F.cross_entropy(model(batch[0]), batch[1])
        self.mean = 0.9 * self.mean + 0.1 * losses.detach()
        self._calls += 1
        return losses * (1 + 0.1 * self._calls)


class LazyState(Plain):
    """Creates state in the first call of loss(), and prints."""

    def loss(self, model: Any, batch: Any) -> Any:
        self._calls = getattr(self, "_calls", 0) + 1
        print("batch of", len(batch[0]))
        return super().loss(model, (batch[0] * self._calls, batch[1]))


class HarmlessState(Plain):
    """State of many kinds that no result depends on: counters, caches, queues, globals, generators of its own."""

    class_calls: list[int] = [0]
    dropout: float = 0.3

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.log: list[float] = []
        self.table = {"calls": 0, "inner": {"last": None}}
        self.array = np.zeros(3)
        self.python_rng, self.torch_rng, self.numpy_rng = random.Random(1), torch.Generator().manual_seed(1), np.random.default_rng(1)

    def loss(self, model: Any, batch: Any) -> Any:
        global GLOBAL_CALLS
        GLOBAL_CALLS += 1
        value = super().loss(model, batch)
        self.log.append(self.python_rng.random() + float(torch.rand((), generator=self.torch_rng)) + float(self.numpy_rng.random()))
        self.table["calls"] += 1  # type: ignore[operator]
        self.table["inner"]["last"] = value.detach()  # type: ignore[index]
        self.array += 1
        type(self).class_calls[0] += 1
        self.cached = value.detach()
        return value


class NoiseInLoss(Plain):
    """Draws noise in the loss, as diffusion models do."""

    def loss(self, model: Any, batch: Any) -> Any:
        x, y = batch
        strength = torch.rand(len(x), 1)
        return F.cross_entropy(model(x + strength * torch.randn_like(x)), y)


class Streaming(Contrastive):
    """Holds an iterator, whose state cannot be restored."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.numbers = iter(range(10**6))

    def loss(self, model: Any, batch: Any) -> Any:
        self.number = next(self.numbers)
        return super().loss(model, batch)


TASKS_OF_THIS_FILE = {c.__name__: c for c in list(globals().values()) if isinstance(c, type) and issubclass(c, Task)}


class Notices(Observer):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def notice(self, text: str) -> None:
        self.texts.append(text)


def notices_of_training(
    name: str, folder: str, settings: dict[str, Any], pins: dict[str, Any], always_checks: bool, group: Group
) -> list[str]:
    task = (TASKS_OF_THIS_FILE | TASKS)[name](**settings)
    pins = {"threads": 1, "workers": 0} | pins
    plan = choose(task.settings(), HARDWARE, device="cpu", world_size=group.size, local_procs=group.size, pins=pins)
    observer, run = Notices(), Run(folder)
    job = Training(task, plan, run, group, Observers([MetricsFile(run), observer] if group.is_main else []), False)
    job.always_checks_dependence = always_checks
    job.run_to_end()
    job.setup.observer.close()
    notices = [text for text in observer.texts if "BatchNorm" not in text]
    assert [e["text"] for e in run.events() if e["event"] == "depends-on-plan"] == notices or not group.is_main
    return notices


def notices_on_one_rank(name: str, folder: Path, micro: int = 5, always_checks: bool = False, **settings: Any) -> list[str]:
    return notices_of_training(name, str(folder), settings, {"micro_batch": micro}, always_checks, Group(0, 1, torch.device("cpu")))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("WrongCount", "gives the count 1 for 4 samples as one batch, 2 as two"),
        ("WrongCountInParts", "gives the count of 'b' 7 for 4 samples as one batch, 14 as two"),
        ("Summed", "it looks like a sum; return the mean over the samples, or (total, count)"),
        ("Contrastive", "it couples the samples of a batch (in-batch negatives"),
        ("NoisyContrastive", "it couples the samples of a batch"),
        ("LoaderContrastive", "it couples the samples of a batch"),
        ("MeanOfWords", "(tokens: return (total, count))"),
        ("AveragesInputs", "loss() changes average each time it is called"),
        ("PythonState", "loss() changes self._calls, self.mean each time"),
        ("LazyState", "loss() changes self._calls each time"),
        ("MovingAverageTeacher", "loss() changes teacher.0.bias, teacher.0.weight, teacher.3.bias and 1 more each time"),
    ],
)
def test_dependence_on_the_plan_is_reported(name: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [notice] = notices_on_one_rank(name, tmp_path, epochs=1)
    assert message in notice
    if name == "LazyState":
        assert len(capsys.readouterr().out.splitlines()) == 6 * 4 + 1, "one line per micro-batch: nothing is printed during the check"
    if name == "AveragesInputs":
        assert notices_on_one_rank(name, tmp_path / "rebinds", epochs=1, rebinds=True) == [notice]


@pytest.mark.parametrize(
    "name",
    ["Plain", "Augmented", "BatchNormTask", "LoaderTask", "TokenMean", "LossParts", "RandomWalkTask", "AugmentsInPlace", "Float64", "UnusualModel", "HostRandomness", "Exploding",
     "HarmlessState", "NoiseInLoss", "Streaming"],
)  # fmt: skip
def test_nothing_else_is_reported(name: str, tmp_path: Path) -> None:
    assert notices_on_one_rank(name, tmp_path, epochs=1) == []


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("cartpole", {"envs": 8, "horizon": 8, "global_batch": 32, "eval_episodes": 2}),
        ("snake", {"envs": 4, "horizon": 8, "global_batch": 16, "eval_episodes": 0}),
        ("digits", {}),
    ],
)
def test_built_in_tasks_do_not_depend_on_the_plan(
    kind: str, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TASKS_OF_THIS_FILE, kind, load_class(find_task(kind)))
    assert notices_on_one_rank(kind, tmp_path, micro=8, steps=2, **settings) == []


def test_half_precision_is_not_reported_as_coupling(tmp_path: Path) -> None:
    assert notices_on_one_rank("Plain", tmp_path, precision="bf16") == []


def test_a_plan_without_micro_batches_is_checked_only_if_asked(tmp_path: Path) -> None:
    assert notices_on_one_rank("Contrastive", tmp_path / "a", micro=16, epochs=1) == []
    [notice] = notices_on_one_rank("Contrastive", tmp_path / "b", micro=16, always_checks=True, epochs=1)
    assert "as one batch" in notice


@pytest.mark.parametrize(
    "name",
    [
        "Augmented",
        "BatchNormTask",
        "LoaderTask",
        "LossParts",
        "RandomWalkTask",
        "HostRandomness",
        "MovingAverageTeacher",
        "Exploding",
        "HarmlessState",
        "PythonState",
        "AveragesInputs",
        "Contrastive",
    ],
)
def test_the_check_has_no_side_effects(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run equals one without the check bit for bit, and Python's state is the same."""
    from drivetrain.engine import loop

    def train(folder: Path) -> tuple[Any, ...]:
        global GLOBAL_CALLS
        GLOBAL_CALLS, HarmlessState.class_calls[0] = 0, 0
        notices_on_one_rank(name, folder, dropout=0.3)
        return rows(folder), weights(folder), GLOBAL_CALLS, HarmlessState.class_calls[0]

    with_check = train(tmp_path / "with check")
    monkeypatch.setattr(loop, "check_dependence", lambda *_: None)
    assert with_check == train(tmp_path / "without check")


def test_two_processes_report_once(tmp_path: Path) -> None:
    first, second = on_ranks(2, notices_of_training, "WrongCount", str(tmp_path), {"epochs": 1}, {}, False)
    assert len(first) == 1 and "gives the count 1 for 4 samples as one batch, 2 as two" in first[0]
    assert second == []


def test_a_slow_loss_is_computed_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drivetrain.engine.faults.dependence.MAX_LOSS_SECONDS", 0.0)
    assert not notices_on_one_rank("Contrastive", tmp_path)
