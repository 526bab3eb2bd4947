"""Memory really runs out on a GPU: a limit for this process makes the card small."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drivetrain.engine.group import Group
from drivetrain.engine.log.observe import Observer, Observers
from drivetrain.engine.loop import Training
from drivetrain.hardware import detect
from drivetrain.plan.choose import choose
from drivetrain.runs import Run
from drivetrain.watch.files import MetricsFile
from tests.sample_tasks import Plain, rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

MEGABYTE = 1 << 20
WIDTH = 1 << 20  # values per sample and layer: 4 MB of activations


class Wide(nn.Module):
    """Has few weights, large activations (4 MB per sample and layer, needed in backward), and BatchNorm buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.head = nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.inner(x))
        wide = hidden.mean(1, keepdim=True).expand(-1, WIDTH).contiguous()
        for _ in range(4):
            wide = wide.sin()  # saves its input for backward
        return self.head(hidden) + wide.mean(1, keepdim=True)


class LargeActivations(Plain):
    def model(self) -> nn.Module:
        return Wide()

    def eval_data(self) -> Any:
        return None


class PlanRecorder(Observer):
    def __init__(self) -> None:
        self.plans: list[dict[str, Any]] = []

    def planned(self, facts: dict[str, Any]) -> None:
        self.plans.append(facts)


@pytest.fixture
def small_card() -> Iterator[None]:
    """260 MB for this process: 16 samples keep 5 x 64 MB for the backward pass, 8 keep 5 x 32 MB."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(0) + 260 * MEGABYTE) / total, 0)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0, 0)
    torch.cuda.empty_cache()


def prepare(folder: Path, recorder: PlanRecorder, samples: int) -> Training:
    task = LargeActivations(epochs=12, samples=samples, precision="fp32")
    plan = choose(task.settings(), detect(), device="cuda", world_size=1, local_procs=1, pins={"compile": "off"})
    return Training(task, plan, Run(folder), Group(0, 1, torch.device("cuda", 0)), Observers([recorder, MetricsFile(Run(folder))]), False)


def event_names(folder: Path) -> list[str]:
    return [json.loads(line)["event"] for line in (folder / "events.jsonl").read_text().splitlines()]


def test_a_batch_that_does_not_fit_is_halved_until_it_does(tmp_path: Path, small_card: None) -> None:
    recorder = PlanRecorder()
    job = prepare(tmp_path, recorder, samples=96)
    job.run_to_end()
    job.setup.observer.close()
    assert job.execution.plan.micro_batch in (2, 4, 8)
    assert job.execution.plan.accumulation == 16 // job.execution.plan.micro_batch
    assert [r["step"] for r in rows(tmp_path)] == list(range(1, 73))
    assert "out of memory at step 1 on rank 0: micro-batch 16 -> 8" in recorder.plans[0]["sentence"]
    assert recorder.plans[-1]["capture"] in ("on", "off"), "the tuner has chosen again how steps run"
    assert event_names(tmp_path).count("oom") == event_names(tmp_path).count("replanned") >= 1


def test_captured_steps_are_captured_again_with_the_smaller_micro_batch(tmp_path: Path) -> None:
    """The last batch of an epoch is partial; it runs eager, and here memory runs out in it."""
    recorder = PlanRecorder()
    job = prepare(tmp_path, recorder, samples=100)
    captured: list[bool] = []

    def run_out_of_memory(_: Any) -> None:
        if job.execution.step.number == 20 and not captured:
            captured.append(job.execution.step.graphs is not None and job.execution.step.graphs.has_graph_of("step"))
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")  # more than any card has

    job.execution.step.observe_loss(lambda batch: None, run_out_of_memory)
    job.run_to_end()
    job.setup.observer.close()
    assert captured == [True]
    assert (job.execution.plan.micro_batch, job.execution.plan.accumulation) == (8, 2)
    assert event_names(tmp_path).count("oom") == 1
    assert "out of memory at step 21 on rank 0: micro-batch 16 -> 8" in recorder.plans[0]["sentence"]
    assert recorder.plans[-1]["capture"] == "on"
    assert (
        job.execution.step.graphs is not None
        and job.execution.step.graphs.has_graph_of("micro")
        and not job.execution.step.graphs.has_graph_of("step")
    )
    assert [r["step"] for r in rows(tmp_path)] == list(range(1, 85))
