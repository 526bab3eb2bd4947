"""How steps run is chosen by measuring, and what fails on the way never stops a training."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain.engine import pace
from drivetrain.engine.capture import blame, changed, form_of, marks, opaque
from drivetrain.engine.compiled import repeated_blocks
from drivetrain.engine.group import Group
from drivetrain.engine.observe import Observer, Observers
from drivetrain.engine.step import Step
from tests import samples
from tests.samples import Bag, Listed, Loaded, Plain, rows, weights

ALONE = Group(0, 1, torch.device("cpu"))


class Facts(Observer):
    def __init__(self) -> None:
        self.plan: dict[str, Any] = {}

    def planned(self, facts: dict[str, Any]) -> None:
        self.plan = facts


def train(name: str, folder: Path, pins: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    job = samples.training(name, str(folder), ALONE, settings, pins)
    facts = Facts()
    job.observer = Observers([job.observer, facts])
    job.run_to_end()
    job.observer.close()
    return facts.plan


def test_a_short_run_is_not_compiled(tmp_path: Path) -> None:
    plan = train("Plain", tmp_path, epochs=4)
    assert plan["compile"] == "off" and "not tried" in plan["reasons"]["compile"]
    assert plan["measured"]["step_seconds"]["eager"] > 0
    assert plan["sentence"] == "", "there is nothing to tell"


def test_a_compiler_that_fails_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "PAYS", 0.0)

    def broken(*args: Any, **options: Any) -> Any:
        def fail(*_: Any) -> Any:
            raise RuntimeError("no C++ compiler here")

        return fail

    train("Augmented", tmp_path / "plain", {"compile": "off"}, epochs=4)
    monkeypatch.setattr(torch, "compile", broken)
    plan = train("Augmented", tmp_path / "tried", epochs=4)
    assert plan["compile"] == "off" and "no C++ compiler here" in plan["reasons"]["compile"]
    assert plan["rejected"] == [{"choice": "compile=on", "why": plan["reasons"]["compile"]}]
    assert rows(tmp_path / "tried") == rows(tmp_path / "plain"), "what was tried out left a trace"
    assert weights(tmp_path / "tried") == weights(tmp_path / "plain")


def test_compiled_code_that_gives_another_loss_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "PAYS", 0.0)
    monkeypatch.setattr(torch, "compile", lambda function, **_: lambda *args: function(*args) * 1.5)
    train("Plain", tmp_path / "plain", {"compile": "off"}, epochs=4)
    plan = train("Plain", tmp_path / "tried", epochs=4)
    assert "came out as" in plan["reasons"]["compile"]
    assert rows(tmp_path / "tried") == rows(tmp_path / "plain")


def test_compiled_code_must_be_faster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "PAYS", 0.0)

    def slow(function: Any, **_: Any) -> Any:
        def call(*args: Any) -> Any:
            time.sleep(0.02)
            return function(*args)

        return call

    monkeypatch.setattr(torch, "compile", slow)
    plan = train("Plain", tmp_path, epochs=4)
    assert plan["compile"] == "off" and "times as fast" in plan["reasons"]["compile"]
    assert plan["measured"]["work_seconds"]["compiled"] > plan["measured"]["work_seconds"]["eager"]


def test_loader_workers_follow_from_what_loading_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Listed):
        def __getitem__(self, i: int) -> Any:
            time.sleep(0.002)
            return super().__getitem__(i)

    train("Loaded", tmp_path / "quick", {"workers": 0}, epochs=4)
    monkeypatch.setattr(Loaded, "train_data", lambda self: Slow(self.samples, self.noise))
    plan = train("Loaded", tmp_path / "slow", {"threads": 4}, epochs=4)
    assert plan["workers"] == 2, plan["reasons"]["workers"]
    assert rows(tmp_path / "slow") == rows(tmp_path / "quick")
    assert train("Loaded", tmp_path / "pinned", {"threads": 4, "workers": 1}, epochs=4)["workers"] == 1


def test_forms_tell_apart_what_a_graph_cannot_change() -> None:
    x = torch.zeros(3, 2)
    assert form_of({"x": x, "n": 1}) == form_of({"x": x + 1, "n": 1})
    assert form_of({"x": x, "n": 1}) != form_of({"x": x, "n": 2})
    assert form_of({"x": x}) != form_of({"x": x[:2]}) != form_of([x[:2]])
    bag = Bag(x, x)
    assert form_of([bag]) != form_of([bag]), "what cannot be looked into is never the same"
    assert opaque({"x": x, "bag": bag}) == "Bag" and not opaque((None, x, ["text", 1]))


def test_state_kept_in_python_is_seen() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.BatchNorm1d(4)
            self.register_buffer("mean", torch.zeros(4))
            self.calls, self.history, self.hidden = 0, [1], torch.zeros(1)

    net, task = Net(), Plain()
    before = marks(task, net)
    net.inner(torch.randn(3, 4))
    assert not changed(before, marks(task, net)), "values of buffers are a graph's to change"
    for change, name in (
        (lambda: setattr(net, "calls", 1), "calls of module Net"),
        (lambda: net.history.append(2), "history of module Net"),
        (lambda: setattr(net, "hidden", torch.ones(1)), "hidden of module Net"),
        (lambda: setattr(net, "mean", net.mean * 0.9), "mean of module Net"),
        (lambda: setattr(task, "seen", 3), "seen of the task"),
    ):
        before = marks(task, net)
        change()
        assert changed(before, marks(task, net)) == name


def test_blame_names_the_users_line() -> None:
    def user_code() -> None:
        raise RuntimeError("called a synchronizing CUDA operation")

    with pytest.raises(RuntimeError) as caught:
        user_code()
    text = blame(caught.value)
    assert text.startswith("test_pace.py:") and "`raise RuntimeError(" in text and "waits there" in text


def test_deep_models_are_compiled_by_block() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    deep = nn.Sequential(nn.Embedding(5, 8), nn.TransformerEncoder(layer, 5, enable_nested_tensor=False), nn.Linear(8, 5))
    assert len(repeated_blocks(deep)) == 5
    unlike = nn.Sequential(*(nn.Sequential(nn.Linear(n, n + 1), nn.ReLU()) for n in range(3, 9)))
    assert not repeated_blocks(unlike), "blocks of other sizes would each be compiled anew"


@pytest.mark.parametrize("name", ["Augmented", "Tokens", "Parts", "Loaded", "Walk", "Plain", "OwnOptimizer"])
@pytest.mark.parametrize("micro_batch", [16, 5])
def test_a_step_that_finds_its_number_on_the_device_is_the_same_step(
    name: str, micro_batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a captured step relies on, run on the CPU: rates, samples and figures follow from a counter in memory,
    and the work is handed nothing that the host knows."""
    options: dict[str, Any] = {"epochs": 4, "clip": 0.5, "warmup": 5, "log_every": 3}
    pins = {"micro_batch": micro_batch, "workers": 0, "compile": "off"}
    train(name, tmp_path / "usual", pins, **options)
    monkeypatch.setattr(Group, "runs_ahead", True)
    handed: list[Any] = []

    def call(key: Any, work: Any, inputs: Any, *constants: Any) -> Any:
        handed.append(inputs)
        return work(inputs, *constants)

    monkeypatch.setattr(Step, "graphs", property(lambda self: call, lambda self, value: None), raising=False)
    for stop in (10, None):
        job = samples.training(name, str(tmp_path / "ahead"), ALONE, options, pins)
        job.run_to_end(stop)
        job.observer.close()
    if name in ("Augmented", "Plain") and micro_batch == 16:
        assert handed[0] == (None, None)
    for a, b in zip(rows(tmp_path / "usual"), rows(tmp_path / "ahead"), strict=True):
        assert a["step"] == b["step"] and a["learning_rate"] == b["learning_rate"]
        assert a["train/loss"] == pytest.approx(b["train/loss"], rel=2e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=2e-4)
