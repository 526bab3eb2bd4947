"""Captured and compiled steps on a real GPU: equal to eager ones, resumed exactly, and never an obstacle to a user.

python -m pytest -m gpu tests/gpu/test_capture.py
"""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.engine.fast import tuner
from drivetrain.engine.fast.graphs import capture_graph, watch_host_syncs
from drivetrain.engine.group import Group
from drivetrain.plan import HOST_SYNC_REASON
from tests.gpu.kinds import train
from tests.samples import rows, weights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def apart(one: Path, two: Path, name: str = "train/loss") -> float:
    """The largest relative difference of a figure over two runs."""
    pairs = [(a[name], b[name]) for a, b in zip(rows(one), rows(two), strict=True)]
    return max(abs(a - b) / max(abs(a), 1e-12) for a, b in pairs)


@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("decay", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("optim", ["adamw", "adam", "sgd"])
def test_200_captured_steps_equal_eager_ones(optim: str, decay: str, clip: float, tmp_path: Path) -> None:
    options: dict[str, Any] = {"optim": optim, "decay": decay, "clip": clip, "warmup": 20, "steps": 200, "precision": "fp32"}
    options |= {"learning_rate": 0.01, "save_every": 1000}
    train("Augmented", tmp_path / "eager", pins={"capture": "off"}, **options)
    facts = train("Augmented", tmp_path / "captured", **options)
    assert facts.plan["capture"] == "on", facts.plan
    assert apart(tmp_path / "captured", tmp_path / "eager") <= 1e-5
    assert apart(tmp_path / "captured", tmp_path / "eager", "grad_norm") <= 1e-4


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("micro_batch", [16, 5])
@pytest.mark.parametrize("name", ["Images", "Tokens", "Parts", "InPlace", "Loaded", "Walk", "OwnOptimizer"])
def test_kinds_of_tasks_are_captured_exactly(name: str, micro_batch: int, precision: str, tmp_path: Path) -> None:
    """Partial last batches, accumulation, counts, loaders, sources, fp16's scale, optimizers of the user's own."""
    options: dict[str, Any] = {"precision": precision, "clip": 0.5, "epochs": 8, "deterministic": name == "Images"}
    pins = {"micro_batch": micro_batch} | ({"workers": 2} if name == "Loaded" else {})
    train(name, tmp_path / "eager", pins=pins | {"capture": "off"}, **options)
    facts = train(name, tmp_path / "captured", pins=pins, **options)
    assert facts.plan["capture"] == "on", facts.plan
    assert rows(tmp_path / "captured") == rows(tmp_path / "eager")
    assert weights(tmp_path / "captured") == weights(tmp_path / "eager")


@pytest.mark.parametrize("name", ["Images", "Sequences", "Attention", "Frozen"])
def test_captured_models_resume_exactly(name: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"epochs": 8, "clip": 1.0, "deterministic": True}
    facts = train(name, tmp_path / "whole", **options)
    assert facts.plan["capture"] == "on", facts.plan
    for stop in (5, 23, None):
        train(name, tmp_path / "broken", stop, **options)
    assert rows(tmp_path / "broken") == rows(tmp_path / "whole")
    assert weights(tmp_path / "broken") == weights(tmp_path / "whole")


@pytest.mark.parametrize("name", ["Images", "Sequences", "Attention"])
def test_compiled_models_learn_and_resume_exactly(name: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"epochs": 8, "clip": 1.0, "deterministic": True}
    facts = train(name, tmp_path / "whole", pins={"compile": "on"}, **options)
    assert facts.plan["compile"] == "on" and facts.plan["capture"] == "on", facts.plan
    assert ("Block blocks" in facts.plan["reasons"]["compile"]) == (name == "Attention")
    for stop in (23, None):
        train(name, tmp_path / "broken", stop, pins={"compile": "on"}, **options)
    assert rows(tmp_path / "broken") == rows(tmp_path / "whole")
    assert weights(tmp_path / "broken") == weights(tmp_path / "whole")
    assert rows(tmp_path / "whole")[-1]["train/loss"] < 0.9 * rows(tmp_path / "whole")[0]["train/loss"]


@pytest.mark.parametrize(
    ("name", "line"),
    [("Waits", "x.abs().max().item()"), ("Branches", "if x.mean() > 0"), ("Selects", "x[kept]"), ("Counts", "calls of the task"),
     ("HostDice", "the host's random generators"), ("Odd", "batches hold a Bag")],
)  # fmt: skip
def test_a_model_that_cannot_be_captured_trains_and_the_reason_is_given(name: str, line: str, tmp_path: Path) -> None:
    train(name, tmp_path / "eager", pins={"capture": "off", "compile": "off"}, epochs=8)
    facts = train(name, tmp_path / "auto", epochs=8)
    assert facts.plan["capture"] == "off"
    assert line in facts.plan["sentence"], facts.plan["sentence"]
    assert apart(tmp_path / "auto", tmp_path / "eager") <= 1e-4


@pytest.mark.parametrize("micro_batch", [16, 5])
def test_an_optimizer_that_cannot_be_captured_runs_after_a_captured_backward(micro_batch: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"kind": "counting", "epochs": 8, "clip": 0.5}
    train("OwnOptimizer", tmp_path / "eager", pins={"micro_batch": micro_batch, "capture": "off"}, **options)
    facts = train("OwnOptimizer", tmp_path / "captured", pins={"micro_batch": micro_batch}, **options)
    assert facts.plan["capture"] == "on", facts.plan
    assert rows(tmp_path / "captured") == rows(tmp_path / "eager")
    assert weights(tmp_path / "captured") == weights(tmp_path / "eager")


def test_convolutions_are_timed_in_a_long_run_that_need_not_repeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def look(*_: Any) -> None:
        seen.append(torch.backends.cudnn.benchmark)

    monkeypatch.setattr(tuner, "MIN_STEPS_TO_TIME_CONVOLUTIONS", 10)
    hook = torch.nn.modules.module.register_module_forward_pre_hook(look)
    try:
        for options, tried in (({}, True), ({"deterministic": True}, False)):
            seen.clear()
            facts = train("Images", tmp_path / str(tried), epochs=8, **options)
            assert seen[0] == tried and not any(seen[20:]), "not in the first step, or in others too"
            assert ("convolutions" in facts.plan["reasons"]) == tried and facts.plan["capture"] == "on", facts.plan
    finally:
        hook.remove()
    assert not torch.backends.cudnn.benchmark


def test_pinned_off_is_off(tmp_path: Path) -> None:
    facts = train("Augmented", tmp_path, pins={"capture": "off", "compile": "off"}, epochs=8)
    assert (facts.plan["capture"], facts.plan["compile"]) == ("off", "off")
    assert facts.plan["reasons"]["capture"] == "pinned"


def test_bf16_stays_within_its_own_seed_spread(tmp_path: Path) -> None:
    options: dict[str, Any] = {"steps": 200, "precision": "bf16", "save_every": 1000}
    train("Images", tmp_path / "eager", pins={"capture": "off"}, **options)
    train("Images", tmp_path / "captured", **options)
    train("Images", tmp_path / "compiled", pins={"compile": "on"}, **options)
    ends = []
    for seed in (1, 2, 3, 4):
        train("Images", tmp_path / f"seed{seed}", pins={"capture": "off"}, seed=seed, **options)
        ends.append(_end(tmp_path / f"seed{seed}"))
    for name in ("captured", "compiled"):
        assert abs(_end(tmp_path / name) - _end(tmp_path / "eager")) <= max(ends) - min(ends)


def _end(folder: Path) -> float:
    last = [r["train/loss"] for r in rows(folder)][-30:]
    return sum(last) / len(last)


def test_no_host_sync_in_the_step(tmp_path: Path) -> None:
    """After the first steps, an operation that waits for the device is an error."""
    from drivetrain.engine.log.observe import Observer, Observers
    from drivetrain.engine.loop import Training
    from drivetrain.hardware import detect
    from drivetrain.plan.choose import choose
    from drivetrain.runs import Run
    from tests.gpu.kinds import Images

    class Strict(Observer):
        steps = 0

        def reached(self, name: str) -> None:
            if name in ("take", "backward", "update"):  # within the step
                return
            self.steps += name == "step"
            torch.cuda.set_sync_debug_mode("error" if name == "step" and self.steps > 60 else "default")

    task = Images(steps=200, log_every=10, save_every=1000, eval_every=1000, samples=1000)
    plan = choose(task.settings(), detect(), device="cuda", world_size=1, local_procs=1)
    strict = Strict()
    try:
        Training(task, plan, Run(tmp_path), Group(0, 1, torch.device("cuda", 0)), Observers([strict]), False).run_to_end()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert strict.steps == 200


def test_a_dead_graph_among_the_garbage_does_not_end_a_capture() -> None:
    """A training before this one left graphs in cycles, which Python frees when it likes: here, while the next is captured."""
    torch.cuda.set_stream(torch.cuda.Stream())
    place, before = torch.zeros(8, device="cuda"), gc.get_threshold()

    def work() -> None:
        place.add_(1)
        gc.set_threshold(100)
        _ = [[] for _ in range(10_000)]  # enough for many a collection
        place.mul_(2)

    gc.set_threshold(10**9)
    try:
        dead: list[object] = [capture_graph(lambda: place.add_(1))]
        dead.append(dead)
        del dead
        replay = capture_graph(work)
    finally:
        gc.set_threshold(*before)
    place.zero_()
    replay()
    assert gc.isenabled() and place.tolist() == [2.0] * 8


def test_a_host_sync_of_another_thread_is_ignored() -> None:
    """A checkpoint is written during training, by code that waits for the device."""

    def wait() -> None:
        torch.cuda.Stream().synchronize()

    with watch_host_syncs() as waits:
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join()
    assert not waits
    with watch_host_syncs() as waits:
        wait()
    assert len(waits) == 1 and HOST_SYNC_REASON in waits[0]
