"""Captured and compiled steps on a real GPU equal eager ones and resume exactly; a task that cannot be captured still trains.

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
from tests.gpu.hard_tasks import train
from tests.sample_tasks import rows, weights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def largest_difference(first_run: Path, second_run: Path, metric: str = "train/loss") -> float:
    """Returns the largest relative difference of a metric between two runs."""
    pairs = [(a[metric], b[metric]) for a, b in zip(rows(first_run), rows(second_run), strict=True)]
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
    assert largest_difference(tmp_path / "captured", tmp_path / "eager") <= 1e-5
    assert largest_difference(tmp_path / "captured", tmp_path / "eager", "grad_norm") <= 1e-4


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("micro_batch", [16, 5])
@pytest.mark.parametrize("name", ["Images", "TokenMean", "LossParts", "AugmentsInPlace", "LoaderTask", "RandomWalkTask", "OwnOptimizer"])
def test_captured_tasks_of_many_kinds_equal_eager_ones(name: str, micro_batch: int, precision: str, tmp_path: Path) -> None:
    """With partial last batches, accumulation, counts, loaders, sources, fp16's loss scale and custom optimizers."""
    options: dict[str, Any] = {"precision": precision, "clip": 0.5, "epochs": 8, "deterministic": name == "Images"}
    pins = {"micro_batch": micro_batch} | ({"workers": 2} if name == "LoaderTask" else {})
    train(name, tmp_path / "eager", pins=pins | {"capture": "off"}, **options)
    facts = train(name, tmp_path / "captured", pins=pins, **options)
    assert facts.plan["capture"] == "on", facts.plan
    assert rows(tmp_path / "captured") == rows(tmp_path / "eager")
    assert weights(tmp_path / "captured") == weights(tmp_path / "eager")


@pytest.mark.parametrize("name", ["Images", "Sequences", "Attention", "FrozenBackbone"])
def test_captured_models_resume_exactly(name: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"epochs": 8, "clip": 1.0, "deterministic": True}
    facts = train(name, tmp_path / "uninterrupted", **options)
    assert facts.plan["capture"] == "on", facts.plan
    for stop in (5, 23, None):
        train(name, tmp_path / "resumed", stop, **options)
    assert rows(tmp_path / "resumed") == rows(tmp_path / "uninterrupted")
    assert weights(tmp_path / "resumed") == weights(tmp_path / "uninterrupted")


@pytest.mark.parametrize("name", ["Images", "Sequences", "Attention"])
def test_compiled_models_learn_and_resume_exactly(name: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"epochs": 8, "clip": 1.0, "deterministic": True}
    facts = train(name, tmp_path / "uninterrupted", pins={"compile": "on"}, **options)
    assert facts.plan["compile"] == "on" and facts.plan["capture"] == "on", facts.plan
    assert ("Block blocks" in facts.plan["reasons"]["compile"]) == (name == "Attention")
    for stop in (23, None):
        train(name, tmp_path / "resumed", stop, pins={"compile": "on"}, **options)
    assert rows(tmp_path / "resumed") == rows(tmp_path / "uninterrupted")
    assert weights(tmp_path / "resumed") == weights(tmp_path / "uninterrupted")
    assert rows(tmp_path / "uninterrupted")[-1]["train/loss"] < 0.9 * rows(tmp_path / "uninterrupted")[0]["train/loss"]


@pytest.mark.parametrize(
    ("name", "line"),
    [("HostSync", "x.abs().max().item()"), ("DataBranch", "if x.mean() > 0"), ("DynamicShape", "x[selected]"), ("PythonCounter", "calls of the task"),
     ("HostRandomness", "the host's random generators"), ("UnusualModel", "batches hold a CustomBatch")],
)  # fmt: skip
def test_a_model_that_cannot_be_captured_trains_and_the_reason_is_given(name: str, line: str, tmp_path: Path) -> None:
    train(name, tmp_path / "eager", pins={"capture": "off", "compile": "off"}, epochs=8)
    facts = train(name, tmp_path / "auto", epochs=8)
    assert facts.plan["capture"] == "off"
    assert line in facts.plan["sentence"], facts.plan["sentence"]
    assert largest_difference(tmp_path / "auto", tmp_path / "eager") <= 1e-4


@pytest.mark.parametrize("micro_batch", [16, 5])
def test_an_optimizer_that_cannot_be_captured_runs_after_a_captured_backward(micro_batch: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"kind": "counting", "epochs": 8, "clip": 0.5}
    train("OwnOptimizer", tmp_path / "eager", pins={"micro_batch": micro_batch, "capture": "off"}, **options)
    facts = train("OwnOptimizer", tmp_path / "captured", pins={"micro_batch": micro_batch}, **options)
    assert facts.plan["capture"] == "on", facts.plan
    assert rows(tmp_path / "captured") == rows(tmp_path / "eager")
    assert weights(tmp_path / "captured") == weights(tmp_path / "eager")


def test_convolutions_are_timed_in_a_long_run_that_need_not_repeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark_flags: list[bool] = []

    def record_flag(*_: Any) -> None:
        benchmark_flags.append(torch.backends.cudnn.benchmark)

    monkeypatch.setattr(tuner, "MIN_STEPS_TO_TIME_CONVOLUTIONS", 10)
    hook = torch.nn.modules.module.register_module_forward_pre_hook(record_flag)
    try:
        for options, is_tried in (({}, True), ({"deterministic": True}, False)):
            benchmark_flags.clear()
            facts = train("Images", tmp_path / str(is_tried), epochs=8, **options)
            assert benchmark_flags[0] == is_tried and not any(benchmark_flags[20:]), (
                "cuDNN must benchmark in the first step and in no later one"
            )
            assert ("convolutions" in facts.plan["reasons"]) == is_tried and facts.plan["capture"] == "on", facts.plan
    finally:
        hook.remove()
    assert not torch.backends.cudnn.benchmark


def test_capture_and_compile_can_be_pinned_off(tmp_path: Path) -> None:
    facts = train("Augmented", tmp_path, pins={"capture": "off", "compile": "off"}, epochs=8)
    assert (facts.plan["capture"], facts.plan["compile"]) == ("off", "off")
    assert facts.plan["reasons"]["capture"] == "pinned"


def test_captured_bf16_differs_less_than_two_seeds(tmp_path: Path) -> None:
    options: dict[str, Any] = {"steps": 200, "precision": "bf16", "save_every": 1000}
    train("Images", tmp_path / "eager", pins={"capture": "off"}, **options)
    train("Images", tmp_path / "captured", **options)
    train("Images", tmp_path / "compiled", pins={"compile": "on"}, **options)
    final_losses = []
    for seed in (1, 2, 3, 4):
        train("Images", tmp_path / f"seed{seed}", pins={"capture": "off"}, seed=seed, **options)
        final_losses.append(_final_loss(tmp_path / f"seed{seed}"))
    for name in ("captured", "compiled"):
        assert abs(_final_loss(tmp_path / name) - _final_loss(tmp_path / "eager")) <= max(final_losses) - min(final_losses)


def _final_loss(folder: Path) -> float:
    last_losses = [r["train/loss"] for r in rows(folder)][-30:]
    return sum(last_losses) / len(last_losses)


def test_no_host_sync_in_the_step(tmp_path: Path) -> None:
    """After the first steps, an operation that waits for the device is an error."""
    from drivetrain.engine.log.observe import Observer, Observers
    from drivetrain.engine.loop import Training
    from drivetrain.hardware import detect
    from drivetrain.plan.choose import choose
    from drivetrain.runs import Run
    from tests.gpu.hard_tasks import Images

    class Strict(Observer):
        steps = 0

        def reached(self, name: str) -> None:
            if name in ("take", "backward", "update"):  # observation points within the step
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


def test_garbage_collection_of_an_old_graph_does_not_end_a_capture() -> None:
    """An earlier training left graphs in reference cycles; Python frees them here while the next graph is captured."""
    torch.cuda.set_stream(torch.cuda.Stream())
    values, old_threshold = torch.zeros(8, device="cuda"), gc.get_threshold()

    def work() -> None:
        values.add_(1)
        gc.set_threshold(100)
        _ = [[] for _ in range(10_000)]  # enough objects to start the garbage collector several times
        values.mul_(2)

    gc.set_threshold(10**9)
    try:
        old_graph: list[object] = [capture_graph(lambda: values.add_(1))]
        old_graph.append(old_graph)
        del old_graph
        replay = capture_graph(work)
    finally:
        gc.set_threshold(*old_threshold)
    values.zero_()
    replay()
    assert gc.isenabled() and values.tolist() == [2.0] * 8


def test_a_host_sync_of_another_thread_is_ignored() -> None:
    """The thread that writes checkpoints waits for the device during training."""

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
