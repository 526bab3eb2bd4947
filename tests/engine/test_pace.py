"""How steps run is chosen by measuring, and what fails on the way never stops a training."""

from __future__ import annotations

import random
import re
import time
from collections import deque
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from drivetrain.engine import execution
from drivetrain.engine.data.keyed_random import EpochRand, HostRandom, KeyedRand
from drivetrain.engine.data.loader_feed import LoaderFeed
from drivetrain.engine.data.make_feed import train_feed
from drivetrain.engine.fast import tuner
from drivetrain.engine.fast.blocks import repeated_blocks
from drivetrain.engine.fast.graphs import explain_failure, form_of, uncapturable_kind
from drivetrain.engine.fast.python_state import first_change, read_python_state
from drivetrain.engine.fast.trial import ExecutionTrial
from drivetrain.engine.group import Group
from drivetrain.engine.log.observe import Observer
from drivetrain.engine.step import Step
from drivetrain.plan import Plan
from tests import samples
from tests.processes import on_ranks
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
    job.setup.observer.members.append(facts)
    job.run_to_end()
    job.setup.observer.close()
    return facts.plan


def test_a_short_run_is_not_compiled(tmp_path: Path) -> None:
    plan = train("Plain", tmp_path, epochs=4)
    assert plan["compile"] == "off" and "not tried" in plan["reasons"]["compile"]
    assert plan["measured"]["step_seconds"]["eager"] > 0
    assert plan["sentence"] == "", "there is nothing to tell"


def test_a_steps_time_has_no_evaluation_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven steps are an epoch here, so the clock runs on over its end."""
    plain = Plain.metrics

    def slow(self: Plain, model: nn.Module, batch: Any) -> Any:
        time.sleep(1.0)
        return plain(self, model, batch)

    monkeypatch.setattr(Plain, "metrics", slow)
    assert train("Plain", tmp_path, epochs=2)["measured"]["step_seconds"]["eager"] < 0.15


def test_a_compiler_that_fails_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "MIN_SECONDS_TO_COMPILE", 0.0)

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
    monkeypatch.setattr(tuner, "MIN_SECONDS_TO_COMPILE", 0.0)
    monkeypatch.setattr(torch, "compile", lambda function, **_: lambda *args: function(*args) * 1.5)
    train("Plain", tmp_path / "plain", {"compile": "off"}, epochs=4)
    plan = train("Plain", tmp_path / "tried", epochs=4)
    assert "gradients differ" in plan["reasons"]["compile"]
    assert rows(tmp_path / "tried") == rows(tmp_path / "plain")


def test_compiled_code_must_be_faster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "MIN_SECONDS_TO_COMPILE", 0.0)

    def slow(function: Any, **_: Any) -> Any:
        def call(*args: Any) -> Any:
            time.sleep(0.02)
            return function(*args)

        return call

    monkeypatch.setattr(torch, "compile", slow)
    plan = train("Plain", tmp_path, epochs=4)
    assert plan["compile"] == "off" and "times as fast" in plan["reasons"]["compile"]
    assert plan["measured"]["work_seconds"]["compiled"] > plan["measured"]["work_seconds"]["eager"]


@pytest.mark.parametrize("fault", ["fails", "differs", "is slow", ""])
def test_what_does_not_compile_cunningly_is_compiled_simply(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "MIN_SECONDS_TO_COMPILE", 0.0)
    monkeypatch.setattr(ExecutionTrial, "_may_use_custom_passes", lambda self: True)
    plain, wait = Plain.loss, [0.02]

    def loss(self: Plain, model: nn.Module, batch: Any) -> Any:
        time.sleep(wait[0])
        return plain(self, model, batch)

    def compiler(function: Any, backend: Any, **_: Any) -> Any:
        def call(*args: Any) -> Any:
            wait[0] = 0.04 if callable(backend) and fault == "is slow" else 0.0
            try:
                if callable(backend) and fault == "fails":
                    raise RuntimeError("not this one")
                return function(*args) * (1.5 if callable(backend) and fault == "differs" else 1.0)
            finally:
                wait[0] = 0.02

        return call

    monkeypatch.setattr(Plain, "loss", loss)
    monkeypatch.setattr(torch, "compile", compiler)
    plan = train("Plain", tmp_path, epochs=4)
    told = {"fails": "not this one", "differs": "gradients differ", "is slow": "it was 0.", "": ""}[fault]
    assert plan["compile"] == "on" and told in plan["reasons"]["compile"], plan["reasons"]
    assert ("without custom passes" in plan["reasons"]["compile"]) == bool(fault)


def test_loader_workers_follow_from_what_loading_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Listed):
        def __getitem__(self, i: int) -> Any:
            time.sleep(0.01)  # far above what a step takes, even on busy cores
            return super().__getitem__(i)

    train("Loaded", tmp_path / "quick", {"workers": 0}, epochs=4)
    monkeypatch.setattr(Loaded, "train_data", lambda self: Slow(self.samples, self.noise))
    plan = train("Loaded", tmp_path / "slow", {"threads": 4}, epochs=4)
    assert plan["workers"] == 2, plan["reasons"]["workers"]
    load, work = (float(ms) for ms in re.findall(r"([\d.]+) ms", plan["reasons"]["workers"]))
    assert work < load / 2, "what steps wait for data is no work of theirs"
    assert rows(tmp_path / "slow") == rows(tmp_path / "quick")
    assert train("Loaded", tmp_path / "pinned", {"threads": 4, "workers": 1}, epochs=4)["workers"] == 1


def test_forms_tell_apart_what_a_graph_cannot_change() -> None:
    x = torch.zeros(3, 2)
    assert form_of({"x": x, "n": 1}) == form_of({"x": x + 1, "n": 1})
    assert form_of({"x": x, "n": 1}) != form_of({"x": x, "n": 2})
    assert form_of({"x": x}) != form_of({"x": x[:2]}) != form_of([x[:2]])
    bag = Bag(x, x)
    assert form_of([bag]) != form_of([bag]), "what cannot be looked into is never the same"
    assert uncapturable_kind({"x": x, "bag": bag}) == "Bag" and not uncapturable_kind((None, x, ["text", 1]))


class Lazy(dict[str, Any]):
    """A mapping, a module and a proxy that import something when they are looked at, as libraries have them."""

    def items(self) -> Any:
        raise AssertionError("it was imported")

    __iter__ = keys = values = __getitem__ = items  # type: ignore[assignment]


class LazyModule(ModuleType):
    def __getattribute__(self, name: str) -> Any:
        raise AssertionError("it was imported")


class Proxy:
    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise AssertionError("it was imported")

    __class__ = __dict__  # type: ignore[assignment]


def test_what_imports_when_it_is_looked_at_is_left_alone() -> None:
    net, task = nn.Linear(2, 2), Plain()
    lazy = Lazy(a=1)
    task.holder, task.module, task.proxy = lazy, LazyModule("late"), Proxy()  # type: ignore[attr-defined]
    before = read_python_state(task, net, None)
    assert not first_change(before, read_python_state(task, net, None))
    dict.__setitem__(lazy, "a", 2)
    assert first_change(before, read_python_state(task, net, None)) == "holder of the task"


def test_state_kept_in_python_is_seen() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.BatchNorm1d(4)
            self.register_buffer("mean", torch.zeros(4))
            self.calls, self.history, self.hidden = 0, [1], torch.zeros(1)
            self.deep = {"a": {"b": {"c": {"d": [1]}}}}
            self.options, self.recent, self.dice = SimpleNamespace(temperature=1.0), deque([0]), np.random.default_rng(0)

    net, task = Net(), Plain()
    optimizer = torch.optim.AdamW(net.parameters())

    def look() -> dict[str, object]:
        return read_python_state(task, net, optimizer)

    def train() -> None:
        net.inner(torch.randn(3, 4)).pow(2).sum().backward()
        optimizer.step()

    train()
    before = look()
    train()
    assert not first_change(before, look()), "values of parameters, buffers and optimizer state are a graph's to change"
    for change, name in (
        (lambda: setattr(net, "calls", 1), "calls of module Net"),
        (lambda: net.history.append(2), "history of module Net"),
        (lambda: setattr(net, "hidden", torch.ones(1)), "hidden of module Net"),
        (lambda: setattr(net, "hidden", net.hidden * 2), "hidden of module Net"),
        (lambda: setattr(net, "mean", net.mean * 0.9), "mean of module Net"),
        (lambda: net.inner.eval(), "training of module inner"),
        (lambda: setattr(net.inner.weight, "data", net.inner.weight.data.clamp(-1, 1)), "weight of module inner"),
        (lambda: net.inner.bias.requires_grad_(False), "bias of module inner"),
        (lambda: setattr(net.options, "temperature", 0.5), "options of module Net"),
        (lambda: net.recent.append(1), "recent of module Net"),
        (lambda: net.dice.random(), "dice of module Net"),
        (lambda: setattr(task, "seen", 3), "seen of the task"),
        (lambda: delattr(task, "seen"), "seen of the task"),
        (lambda: setattr(optimizer, "slow_steps", 2), "slow_steps of the optimizer"),
    ):
        before = look()
        change()
        assert first_change(before, look()) == name


def test_blame_names_the_users_line() -> None:
    def user_code() -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError) as caught:
        user_code()
    text = explain_failure(caught.value)
    assert text.startswith("test_pace.py:") and "`raise RuntimeError(" in text and "cannot be done while" in text


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
    monkeypatch.setattr(Group, "device_counters", True)
    handed: list[Any] = []

    class Calls:
        """Stands where graphs stand, and calls."""

        disabled_reason = ""
        num_eager = 0

        def __call__(self, key: Any, work: Any, inputs: Any, *constants: Any) -> Any:
            handed.append(inputs)
            return work(inputs, *constants)

        def has_graph_of(self, kind: str) -> bool:
            return True

        def clear(self) -> None:
            pass

        def only_replayed(self, kind: Any) -> bool:
            return False

        def note_step(self, kind: Any, num_eager: int) -> None:
            pass

    monkeypatch.setattr(Step, "graphs", property(lambda self: Calls(), lambda self, value: None), raising=False)
    monkeypatch.setattr(execution, "Graphs", lambda *_: Calls())
    for stop in (10, None):
        job = samples.training(name, str(tmp_path / "ahead"), ALONE, options, pins)
        job.run_to_end(stop)
        job.setup.observer.close()
    if name in ("Augmented", "Plain") and micro_batch == 16:
        assert handed[0] == (None, None)
    for a, b in zip(rows(tmp_path / "usual"), rows(tmp_path / "ahead"), strict=True):
        assert a["step"] == b["step"] and a["learning_rate"] == b["learning_rate"]
        assert a["train/loss"] == pytest.approx(b["train/loss"], rel=2e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=2e-4)


# --- what a hostile task does --------------------------------------------------------------------


def scaled(monkeypatch: pytest.MonkeyPatch, factor: float = 1.0002) -> None:
    """A compiler whose code rounds a little otherwise, so that one sees where it ran."""

    def scale(value: Any) -> Any:
        return value * factor if isinstance(value, torch.Tensor) else (scale(value[0]), *value[1:])

    monkeypatch.setattr(torch, "compile", lambda function, **_: lambda *args: scale(function(*args)))


@pytest.mark.parametrize("name", ["Taught", "Odd", "Parts"])
def test_trying_out_leaves_no_trace(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A moving average in the forward pass, sparse gradients, counts."""
    monkeypatch.setattr(tuner, "MIN_SECONDS_TO_COMPILE", 0.0)
    scaled(monkeypatch, 1.5)
    train(name, tmp_path / "plain", {"compile": "off"}, epochs=4)
    plan = train(name, tmp_path / "tried", epochs=4)
    assert plan["compile"] == "off", plan["reasons"]
    assert rows(tmp_path / "tried") == rows(tmp_path / "plain")
    assert weights(tmp_path / "tried") == weights(tmp_path / "plain")


@pytest.mark.parametrize("stop", [6, 7, 13])
@pytest.mark.parametrize("micro_batch", [16, 5])
def test_resumed_at_any_place_the_same_batches_run_compiled(
    stop: int, micro_batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven steps an epoch, the last of five samples: it is never the one that is compiled."""
    scaled(monkeypatch)
    pins = {"compile": "on", "micro_batch": micro_batch}
    train("Plain", tmp_path / "whole", pins, epochs=4)
    train("Plain", tmp_path / "plain", pins | {"compile": "off"}, epochs=4)
    assert rows(tmp_path / "whole") != rows(tmp_path / "plain")
    for end in (stop, None):
        job = samples.training("Plain", str(tmp_path / "broken"), ALONE, {"epochs": 4}, pins)
        job.run_to_end(end)
        job.setup.observer.close()
    assert rows(tmp_path / "broken") == rows(tmp_path / "whole")
    assert weights(tmp_path / "broken") == weights(tmp_path / "whole")


def test_a_pinned_compile_holds_on_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scaled(monkeypatch)

    def go_on(folder: str, first: str, second: str) -> list[dict[str, Any]]:
        for choice, stop in ((first, 10), (second, None)):
            job = samples.training("Plain", str(tmp_path / folder), ALONE, {"epochs": 4}, {"compile": choice})
            job.run_to_end(stop)
            job.setup.observer.close()
        return rows(tmp_path / folder)

    plain, on, off = go_on("plain", "off", "off"), go_on("on", "off", "on"), go_on("off", "on", "off")
    assert on[:10] == plain[:10] and on[10]["train/loss"] == pytest.approx(plain[10]["train/loss"] * 1.0002, rel=1e-6)
    assert off[0] != plain[0] and off[27]["train/loss"] == pytest.approx(plain[27]["train/loss"], rel=0.05)


def _always_worth_it(folder: str, group: Group) -> int:
    tuner.MIN_SECONDS_TO_COMPILE = 0.0  # in a process of its own
    return len(samples.train("RankLogs", folder, {"epochs": 4}, None, None, group))


def test_ranks_that_differ_take_one_way(tmp_path: Path) -> None:
    """Rank 0 sees an obstacle to compiling, rank 1 does not: neither may wait for the other in vain."""
    assert on_ranks(2, _always_worth_it, str(tmp_path), seconds=300)[0] == 28


def test_a_derived_optimizer_is_handed_scaled_gradients(tmp_path: Path) -> None:
    """Not a factor that its kernel might never see."""
    for derived in (True, False):
        train("Derived", tmp_path / str(derived), clip=0.05, derived=derived)
    for a, b in zip(rows(tmp_path / "True"), rows(tmp_path / "False"), strict=True):
        assert a["train/loss"] == pytest.approx(b["train/loss"], rel=1e-5)


def test_columns_that_change_are_another_form(tmp_path: Path) -> None:
    job = samples.training("Stretched", str(tmp_path), ALONE, {"epochs": 6}, None)
    seen = []
    plain = job.setup.feed.begin_epoch

    def begin(epoch: int, model: nn.Module) -> None:
        plain(epoch, model)
        seen.append(job.setup.feed.data_version)

    job.setup.feed.begin_epoch = begin  # type: ignore[method-assign]
    job.run_to_end()
    job.setup.observer.close()
    assert len(set(seen)) == 6, "each epoch's columns lie elsewhere"


def test_generators_of_the_host_are_watched_on_a_gpu() -> None:
    for draw in (lambda: torch.rand(1), lambda: np.random.rand(), lambda: random.random()):
        watch = HostRandom(torch.device("cuda", 0))
        watch.begin(7, check=False)
        first = draw()
        watch.end()
        assert watch.is_used
        watch.begin(7, check=False)
        assert draw() == first, "and seeded for each micro-batch"
    watch = HostRandom(torch.device("cuda", 0))
    watch.begin(7, check=False)
    watch.end()
    assert not watch.is_used


def test_tables_of_random_numbers_have_a_budget() -> None:
    draws = EpochRand(100, torch.device("cpu"), 1, 2, max_table_numbers=1000)
    draws.begin_epoch(0)
    ids = torch.tensor([3, 50])
    for k in range(1, 30):
        found = draws.for_samples(ids).uniform(k)
        assert torch.equal(found, KeyedRand(ids, 1, 0, 2).uniform(k))
    assert sum(t.numel() for t in draws._tables.values()) <= 1000


def test_measuring_the_loader_opens_nothing_in_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Opens(Listed):
        opened = False

        def __getitem__(self, i: int) -> Any:
            Opens.opened = True
            time.sleep(0.001)
            return super().__getitem__(i)

    feed = train_feed(Loaded(), Opens(101, 0.0), Plan(global_batch=16, micro_batch=16), ALONE)
    assert isinstance(feed, LoaderFeed)
    seconds = feed.measure_loading_seconds()
    assert seconds is not None and 0.016 < seconds < 1.0 and not Opens.opened
