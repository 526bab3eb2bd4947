"""How steps run (eager, compiled, loader workers) is chosen by measuring; a failed trial never stops a training."""

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
from tests import sample_tasks
from tests.processes import on_ranks
from tests.sample_tasks import CustomBatch, DictDataset, LoaderTask, Plain, rows, weights

ALONE = Group(0, 1, torch.device("cpu"))


class PlanFacts(Observer):
    def __init__(self) -> None:
        self.plan: dict[str, Any] = {}

    def planned(self, facts: dict[str, Any]) -> None:
        self.plan = facts


def train(name: str, folder: Path, pins: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    job = sample_tasks.training(name, str(folder), ALONE, settings, pins)
    facts = PlanFacts()
    job.setup.observer.members.append(facts)
    job.run_to_end()
    job.setup.observer.close()
    return facts.plan


def test_a_short_run_is_not_compiled(tmp_path: Path) -> None:
    plan = train("Plain", tmp_path, epochs=4)
    assert plan["compile"] == "off" and "not tried" in plan["reasons"]["compile"]
    assert plan["measured"]["step_seconds"]["eager"] > 0
    assert plan["sentence"] == "", "no message: the plan has not changed"


def test_the_time_of_a_step_excludes_evaluations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An epoch has seven steps, so the measured steps span the end of an epoch."""
    original = Plain.metrics

    def slow(self: Plain, model: nn.Module, batch: Any) -> Any:
        time.sleep(1.0)
        return original(self, model, batch)

    monkeypatch.setattr(Plain, "metrics", slow)
    assert train("Plain", tmp_path, epochs=2)["measured"]["step_seconds"]["eager"] < 0.15


def test_a_compiler_that_fails_does_not_stop_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert rows(tmp_path / "tried") == rows(tmp_path / "plain"), "the failed trial changed the training"
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
def test_if_custom_passes_fail_the_model_is_compiled_without_them(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "MIN_SECONDS_TO_COMPILE", 0.0)
    monkeypatch.setattr(ExecutionTrial, "_may_use_custom_passes", lambda self: True)
    original, step_seconds = Plain.loss, [0.02]

    def loss(self: Plain, model: nn.Module, batch: Any) -> Any:
        time.sleep(step_seconds[0])
        return original(self, model, batch)

    def compiler(function: Any, backend: Any, **_: Any) -> Any:
        has_custom_passes = callable(backend)

        def call(*args: Any) -> Any:
            step_seconds[0] = 0.04 if has_custom_passes and fault == "is slow" else 0.0
            try:
                if has_custom_passes and fault == "fails":
                    raise RuntimeError("not this one")
                return function(*args) * (1.5 if has_custom_passes and fault == "differs" else 1.0)
            finally:
                step_seconds[0] = 0.02

        return call

    monkeypatch.setattr(Plain, "loss", loss)
    monkeypatch.setattr(torch, "compile", compiler)
    plan = train("Plain", tmp_path, epochs=4)
    reason = {"fails": "not this one", "differs": "gradients differ", "is slow": "it was 0.", "": ""}[fault]
    assert plan["compile"] == "on" and reason in plan["reasons"]["compile"], plan["reasons"]
    assert ("without custom passes" in plan["reasons"]["compile"]) == bool(fault)


def test_the_number_of_loader_workers_follows_from_the_loading_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(DictDataset):
        def __getitem__(self, i: int) -> Any:
            time.sleep(0.01)  # far above what a step takes, even on busy cores
            return super().__getitem__(i)

    train("LoaderTask", tmp_path / "quick", {"workers": 0}, epochs=4)
    monkeypatch.setattr(LoaderTask, "train_data", lambda self: Slow(self.samples, self.noise))
    plan = train("LoaderTask", tmp_path / "slow", {"threads": 4}, epochs=4)
    assert plan["workers"] == 2, plan["reasons"]["workers"]
    load, work = (float(ms) for ms in re.findall(r"([\d.]+) ms", plan["reasons"]["workers"]))
    assert work < load / 2, "the time that steps wait for data does not count as work"
    assert rows(tmp_path / "slow") == rows(tmp_path / "quick")
    assert train("LoaderTask", tmp_path / "pinned", {"threads": 4, "workers": 1}, epochs=4)["workers"] == 1


def test_two_forms_differ_where_a_graph_cannot_be_reused() -> None:
    x = torch.zeros(3, 2)
    assert form_of({"x": x, "n": 1}) == form_of({"x": x + 1, "n": 1})
    assert form_of({"x": x, "n": 1}) != form_of({"x": x, "n": 2})
    assert form_of({"x": x}) != form_of({"x": x[:2]}) != form_of([x[:2]])
    batch = CustomBatch(x, x)
    assert form_of([batch]) != form_of([batch]), "an object of an unknown class never has an equal form"
    assert uncapturable_kind({"x": x, "batch": batch}) == "CustomBatch" and not uncapturable_kind((None, x, ["text", 1]))


class LazyMapping(dict[str, Any]):
    """A mapping that imports something when it is read; the module and the proxy below do so too, as in some libraries."""

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


def test_lazy_objects_are_not_read() -> None:
    net, task = nn.Linear(2, 2), Plain()
    lazy = LazyMapping(a=1)
    task.holder, task.module, task.proxy = lazy, LazyModule("late"), Proxy()  # type: ignore[attr-defined]
    before = read_python_state(task, net, None)
    assert not first_change(before, read_python_state(task, net, None))
    dict.__setitem__(lazy, "a", 2)
    assert first_change(before, read_python_state(task, net, None)) == "holder of the task"


def test_replaced_memory_is_detected_even_if_an_address_is_used_again() -> None:
    net, task = nn.Linear(64, 64), Plain()
    before = read_python_state(task, net, None)
    for _ in range(100):  # copies take turns in two places, one of which would be the first
        net.weight.data = net.weight.data.clone()
        assert first_change(before, read_python_state(task, net, None)) == "weight of module Linear"


def test_changes_of_python_state_are_detected() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.BatchNorm1d(4)
            self.register_buffer("mean", torch.zeros(4))
            self.calls, self.history, self.hidden = 0, [1], torch.zeros(1)
            self.deep = {"a": {"b": {"c": {"d": [1]}}}}
            self.options, self.recent, self.rng = SimpleNamespace(temperature=1.0), deque([0]), np.random.default_rng(0)

    net, task = Net(), Plain()
    optimizer = torch.optim.AdamW(net.parameters())

    def read_state() -> dict[str, object]:
        return read_python_state(task, net, optimizer)

    def take_step() -> None:
        net.inner(torch.randn(3, 4)).pow(2).sum().backward()
        optimizer.step()

    take_step()
    before = read_state()
    take_step()
    assert not first_change(before, read_state()), "a graph may change the values of parameters, buffers and optimizer state"
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
        (lambda: net.rng.random(), "rng of module Net"),
        (lambda: setattr(task, "seen", 3), "seen of the task"),
        (lambda: delattr(task, "seen"), "seen of the task"),
        (lambda: setattr(optimizer, "slow_steps", 2), "slow_steps of the optimizer"),
    ):
        before = read_state()
        change()
        assert first_change(before, read_state()) == name


def test_the_explanation_of_a_failed_capture_names_the_users_line() -> None:
    def user_code() -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError) as caught:
        user_code()
    text = explain_failure(caught.value)
    assert text.startswith("test_tuner.py:") and "`raise RuntimeError(" in text and "cannot be done while" in text


def test_deep_models_are_compiled_by_block() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    deep = nn.Sequential(nn.Embedding(5, 8), nn.TransformerEncoder(layer, 5, enable_nested_tensor=False), nn.Linear(8, 5))
    assert len(repeated_blocks(deep)) == 5
    different_blocks = nn.Sequential(*(nn.Sequential(nn.Linear(n, n + 1), nn.ReLU()) for n in range(3, 9)))
    assert not repeated_blocks(different_blocks), "blocks of different sizes would each be compiled separately"


@pytest.mark.parametrize("name", ["Augmented", "TokenMean", "LossParts", "LoaderTask", "RandomWalkTask", "Plain", "OwnOptimizer"])
@pytest.mark.parametrize("micro_batch", [16, 5])
def test_a_step_with_device_counters_gives_the_same_metrics(
    name: str, micro_batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a captured step, but on the CPU: learning rate, samples and metrics follow from a counter in a tensor,
    and the step gets no input from the host."""
    options: dict[str, Any] = {"epochs": 4, "clip": 0.5, "warmup": 5, "log_every": 3}
    pins = {"micro_batch": micro_batch, "workers": 0, "compile": "off"}
    train(name, tmp_path / "usual", pins, **options)
    monkeypatch.setattr(Group, "device_counters", True)
    inputs_of_steps: list[Any] = []

    class CallsDirectly:
        """Replaces Graphs: calls the function instead of replaying a graph."""

        disabled_reason = ""
        num_eager = 0

        def __call__(self, key: Any, work: Any, inputs: Any, *constants: Any) -> Any:
            inputs_of_steps.append(inputs)
            return work(inputs, *constants)

        def has_graph_of(self, kind: str) -> bool:
            return True

        def clear(self) -> None:
            pass

        def only_replayed(self, kind: Any) -> bool:
            return False

        def note_step(self, kind: Any, num_eager: int) -> None:
            pass

    monkeypatch.setattr(Step, "graphs", property(lambda self: CallsDirectly(), lambda self, value: None), raising=False)
    monkeypatch.setattr(execution, "Graphs", lambda *_: CallsDirectly())
    for stop in (10, None):
        job = sample_tasks.training(name, str(tmp_path / "device counters"), ALONE, options, pins)
        job.run_to_end(stop)
        job.setup.observer.close()
    if name in ("Augmented", "Plain") and micro_batch == 16:
        assert inputs_of_steps[0] == (None, None)
    for a, b in zip(rows(tmp_path / "usual"), rows(tmp_path / "device counters"), strict=True):
        assert a["step"] == b["step"] and a["learning_rate"] == b["learning_rate"]
        assert a["train/loss"] == pytest.approx(b["train/loss"], rel=2e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=2e-4)


# --- unusual tasks --------------------------------------------------------------------


def make_compiled_losses_larger(monkeypatch: pytest.MonkeyPatch, factor: float = 1.0002) -> None:
    """Replaces the compiler by one that scales the loss, so that the metrics show which steps ran compiled."""

    def scale(value: Any) -> Any:
        return value * factor if isinstance(value, torch.Tensor) else (scale(value[0]), *value[1:])

    monkeypatch.setattr(torch, "compile", lambda function, **_: lambda *args: scale(function(*args)))


@pytest.mark.parametrize("name", ["MovingAverageTeacher", "UnusualModel", "LossParts"])
def test_a_trial_of_compiled_steps_leaves_no_trace(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A moving average in the forward pass, sparse gradients, counts."""
    monkeypatch.setattr(tuner, "MIN_SECONDS_TO_COMPILE", 0.0)
    make_compiled_losses_larger(monkeypatch, 1.5)
    train(name, tmp_path / "plain", {"compile": "off"}, epochs=4)
    plan = train(name, tmp_path / "tried", epochs=4)
    assert plan["compile"] == "off", plan["reasons"]
    assert rows(tmp_path / "tried") == rows(tmp_path / "plain")
    assert weights(tmp_path / "tried") == weights(tmp_path / "plain")


@pytest.mark.parametrize("stop", [6, 7, 13])
@pytest.mark.parametrize("micro_batch", [16, 5])
def test_after_a_resume_at_any_step_the_same_batches_run_compiled(
    stop: int, micro_batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An epoch has seven steps; the last batch has only five samples and never runs compiled."""
    make_compiled_losses_larger(monkeypatch)
    pins = {"compile": "on", "micro_batch": micro_batch}
    train("Plain", tmp_path / "uninterrupted", pins, epochs=4)
    train("Plain", tmp_path / "plain", pins | {"compile": "off"}, epochs=4)
    assert rows(tmp_path / "uninterrupted") != rows(tmp_path / "plain")
    for end in (stop, None):
        job = sample_tasks.training("Plain", str(tmp_path / "resumed"), ALONE, {"epochs": 4}, pins)
        job.run_to_end(end)
        job.setup.observer.close()
    assert rows(tmp_path / "resumed") == rows(tmp_path / "uninterrupted")
    assert weights(tmp_path / "resumed") == weights(tmp_path / "uninterrupted")


def test_a_pinned_compile_holds_on_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_compiled_losses_larger(monkeypatch)

    def train_and_resume(folder: str, first: str, second: str) -> list[dict[str, Any]]:
        for choice, stop in ((first, 10), (second, None)):
            job = sample_tasks.training("Plain", str(tmp_path / folder), ALONE, {"epochs": 4}, {"compile": choice})
            job.run_to_end(stop)
            job.setup.observer.close()
        return rows(tmp_path / folder)

    plain, on, off = train_and_resume("plain", "off", "off"), train_and_resume("on", "off", "on"), train_and_resume("off", "on", "off")
    assert on[:10] == plain[:10] and on[10]["train/loss"] == pytest.approx(plain[10]["train/loss"] * 1.0002, rel=1e-6)
    assert off[0] != plain[0] and off[27]["train/loss"] == pytest.approx(plain[27]["train/loss"], rel=0.05)


def _train_and_always_compile(folder: str, group: Group) -> int:
    tuner.MIN_SECONDS_TO_COMPILE = 0.0  # no monkeypatch: this process runs only this function
    return len(sample_tasks.train("CountsOnRank0", folder, {"epochs": 4}, None, None, group))


def test_ranks_agree_not_to_compile(tmp_path: Path) -> None:
    """Only rank 0 cannot compile; if rank 1 compiled, the ranks would wait for each other forever."""
    assert on_ranks(2, _train_and_always_compile, str(tmp_path), seconds=300)[0] == 28


def test_a_subclassed_optimizer_gets_scaled_gradients(tmp_path: Path) -> None:
    """It does not get a scale as an attribute, which its kernel might ignore."""
    for derived in (True, False):
        train("SubclassedOptimizer", tmp_path / str(derived), clip=0.05, derived=derived)
    for a, b in zip(rows(tmp_path / "True"), rows(tmp_path / "False"), strict=True):
        assert a["train/loss"] == pytest.approx(b["train/loss"], rel=1e-5)


def test_changed_columns_have_a_new_data_version(tmp_path: Path) -> None:
    job = sample_tasks.training("ChangingColumnsTask", str(tmp_path), ALONE, {"epochs": 6}, None)
    versions = []
    begin_epoch = job.setup.feed.begin_epoch

    def begin(epoch: int, model: nn.Module) -> None:
        begin_epoch(epoch, model)
        versions.append(job.setup.feed.data_version)

    job.setup.feed.begin_epoch = begin  # type: ignore[method-assign]
    job.run_to_end()
    job.setup.observer.close()
    assert len(set(versions)) == 6, "each epoch has new column tensors"


def test_random_numbers_of_the_host_are_noticed_on_a_gpu() -> None:
    for draw in (lambda: torch.rand(1), lambda: np.random.rand(), lambda: random.random()):
        watch = HostRandom(torch.device("cuda", 0))
        watch.begin(7, check=False)
        first = draw()
        watch.end()
        assert watch.is_used
        watch.begin(7, check=False)
        assert draw() == first, "the generators are seeded again for each micro-batch"
    watch = HostRandom(torch.device("cuda", 0))
    watch.begin(7, check=False)
    watch.end()
    assert not watch.is_used


def test_tables_of_random_numbers_stay_within_their_limit() -> None:
    draws = EpochRand(100, torch.device("cpu"), 1, 2, max_table_numbers=1000)
    draws.begin_epoch(0)
    ids = torch.tensor([3, 50])
    for k in range(1, 30):
        from_table = draws.for_samples(ids).uniform(k)
        assert torch.equal(from_table, KeyedRand(ids, 1, 0, 2).uniform(k))
    assert sum(t.numel() for t in draws._tables.values()) <= 1000


def test_measuring_the_loading_time_reads_no_sample_in_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class RecordsReads(DictDataset):
        was_read = False

        def __getitem__(self, i: int) -> Any:
            RecordsReads.was_read = True
            time.sleep(0.001)
            return super().__getitem__(i)

    feed = train_feed(LoaderTask(), RecordsReads(101, 0.0), Plan(global_batch=16, micro_batch=16), ALONE)
    assert isinstance(feed, LoaderFeed)
    seconds = feed.measure_loading_seconds()
    assert seconds is not None and 0.016 < seconds < 1.0 and not RecordsReads.was_read
