"""Memory that runs out in a step: all ranks take it again with half the micro-batch, and nothing else differs."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drivetrain.engine.faults.injection import read_fault
from drivetrain.engine.faults.out_of_memory import BufferBackup, OutOfMemory
from drivetrain.engine.group import Group
from drivetrain.engine.log.observe import Observer, Observers
from drivetrain.engine.loop import Training
from drivetrain.engine.measure.memory import allocation_errors_as_oom
from drivetrain.outcomes import Outcome, Problem
from drivetrain.plan.choose import choose
from drivetrain.runs import Run
from drivetrain.watch.files import MetricsFile
from tests.processes import on_ranks
from tests.sample_tasks import HARDWARE, TASKS, rows, train, weights

PINS = {"threads": 1, "eval_micro_batch": 16}
SGD = {"optim": "sgd", "clip": 0.5, "learning_rate": 0.2}


class Told(Observer):
    """What rank 0 says."""

    def __init__(self) -> None:
        self.notices: list[str] = []
        self.plans: list[dict[str, Any]] = []

    def notice(self, text: str) -> None:
        self.notices.append(text)

    def planned(self, facts: dict[str, Any]) -> None:
        self.plans.append(facts)


def prepare(
    name: str, folder: str, settings: dict[str, Any], pins: dict[str, Any], faults: str, group: Group, told: Told | None = None
) -> Training:
    task = TASKS[name](**settings)
    plan = choose(task.settings(), HARDWARE, device="cpu", world_size=group.size, local_procs=group.size, pins=PINS | pins)
    run = Run(folder)
    members: list[Observer] = [told or Told(), MetricsFile(run)] if group.is_main else []
    injectors = [read_fault(fault, group.rank) for fault in faults.split(",") if fault]
    return Training(task, plan, run, group, Observers([*members, *(i for i in injectors if i is not None)]), False)


def note_samples(job: Training) -> dict[tuple[int, int], list[int]]:
    """The samples of each step that were trained on: those of its last attempt, as the loader gave them."""
    seen: dict[tuple[int, int], list[int]] = {}
    give = job.setup.feed.micro_batches

    def noting(epoch: int, index: int) -> Any:
        mine = seen[epoch, index] = []
        for micro in give(epoch, index):
            numbers = micro.loaded["id"] if isinstance(micro.loaded, dict) else micro.ids
            assert torch.equal(numbers, micro.ids)
            mine += numbers[: micro.num_real].tolist()
            yield micro

    job.setup.feed.micro_batches = noting  # type: ignore[method-assign]
    return seen


def struck(name: str, folder: str, settings: dict[str, Any], pins: dict[str, Any], faults: str, group: Group) -> dict[str, Any]:
    """Train with faults; what became of the plan, and every sample of every epoch over all ranks."""
    told = Told()
    job = prepare(name, folder, settings, pins, faults, group, told)
    seen = note_samples(job)
    result = job.run_to_end()
    job.setup.observer.close()
    assert result.outcome is Outcome.OK
    epochs: dict[int, list[int]] = {}
    for rank in group.gather_objects(seen):
        for (epoch, _), ids in rank.items():
            epochs.setdefault(epoch, []).extend(ids)
    return {
        "micro_batch": job.execution.plan.micro_batch, "eval_micro_batch": job.execution.plan.eval_micro_batch, "accumulation": job.execution.plan.accumulation,
        "reasons": job.execution.plan.reasons, "epochs": {e: sorted(ids) for e, ids in epochs.items()}, "length": job.setup.feed.length,
        "notices": told.notices, "sentences": [facts["sentence"] for facts in told.plans if facts["sentence"]],
    }  # fmt: skip


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [{k: v for k, v in event.items() if k not in ("time", "event")} for event in found if event["event"] == kind]


def same_curve(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> None:
    assert [r["step"] for r in a] == [r["step"] for r in b]
    for x, y in zip(a, b, strict=True):
        for key in x:
            assert math.isclose(x[key], y[key], rel_tol=2e-5, abs_tol=1e-6), f"step {x['step']}: {key} {x[key]} against {y[key]}"


# (task, step, micro-batch of one process before, pins): dropout, BatchNorm, a loader with workers, counts, a source
CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("Augmented", 4, {}),
    ("BatchNormTask", 4, {}),
    ("LoaderTask", 5, {"workers": 2}),
    ("TokenMean", 3, {}),
    ("LossParts", 6, {}),
    ("AugmentsInPlace", 6, {}),
    ("HostRandomness", 4, {}),
    ("OwnOptimizer", 4, {}),
    ("RandomWalkTask", 9, {}),
]


@pytest.mark.parametrize("world", [1, pytest.param(4, marks=pytest.mark.system)])
@pytest.mark.parametrize(("name", "step", "pins"), CASES, ids=lambda case: case if isinstance(case, str) else "")
def test_from_that_step_on_it_is_the_run_that_goes_on_with_half(
    name: str, step: int, pins: dict[str, Any], world: int, tmp_path: Path
) -> None:
    """Bit for bit: the same run, stopped before the step and resumed with the smaller micro-batch."""
    batch = 12 if name == "RandomWalkTask" else 16
    full = 2 if name == "RandomWalkTask" and world == 4 else batch // world  # two whole groups of two samples, taken at most 3 at a time
    half, share = full // 2, 4 if name == "RandomWalkTask" and world == 4 else full
    found = on_ranks(world, _and_resumed, name, str(tmp_path), step, pins, half)
    assert {f["micro_batch"] for f in found} == {half}
    assert found[0]["accumulation"] == share // half
    assert found[0]["reasons"]["micro_batch"] == f"halved from {full}: out of memory at step {step}"
    assert found[0]["sentences"][0] == (
        f"out of memory at step {step} on rank {world - 1}: micro-batch {full} -> {half}; the step is taken again"
    )
    assert events(tmp_path / "short", "oom") == [{"step": step, "rank": world - 1, "was": full, "now": half, "during": "step"}]
    assert events(tmp_path / "short", "replanned") == [{"rank": 0, "step": step, "micro_batch": half, "accumulation": share // half}]
    assert rows(tmp_path / "short") == rows(tmp_path / "resumed")
    assert weights(tmp_path / "short") == weights(tmp_path / "resumed")
    if name != "RandomWalkTask":
        assert found[0]["epochs"] == {e: list(range(found[0]["length"])) for e in range(2)}


def _and_resumed(name: str, folder: str, step: int, pins: dict[str, Any], half: int, group: Group) -> dict[str, Any]:
    settings = {"clip": 0.5}
    train(name, f"{folder}/resumed", settings, PINS | pins, step - 1, group)
    train(name, f"{folder}/resumed", settings, PINS | pins | {"micro_batch": half}, None, group)
    return struck(name, f"{folder}/short", settings, pins, f"oom@step:{step}:rank={group.size - 1}", group)


def and_small(name: str, folder: str, settings: dict[str, Any], pins: dict[str, Any], faults: str, group: Group) -> dict[str, Any]:
    """With faults, and beside it the run that has the smaller micro-batch from its beginning."""
    found = struck(name, f"{folder}/short", settings, pins, faults, group)
    train(name, f"{folder}/small", settings, PINS | pins | {"micro_batch": found["micro_batch"]}, None, group)
    return found


PLACES = {
    "the first step": ("oom@step:1:rank=2", 2),
    "the last step": ("oom@step:14:rank=1", 2),
    "a partial batch": ("oom@step:7:rank=3", 2),
    "twice in a row": ("oom@step:5:rank=2,oom@step:5:rank=2", 1),
    "two ranks at once": ("oom@step:5:rank=2,oom@step:5:rank=3", 2),
    "every rank": ("oom@step:5", 2),
    "twice": ("oom@step:3:rank=1,oom@step:9:rank=0", 1),
}


QUICK = ("a partial batch", "twice in a row")


@pytest.mark.parametrize("place", [p if p in QUICK else pytest.param(p, marks=pytest.mark.system) for p in PLACES])
def test_the_curve_is_that_of_the_smaller_micro_batch(place: str, tmp_path: Path) -> None:
    faults, micro = PLACES[place]
    found = on_ranks(4, and_small, "LoaderTask", str(tmp_path), SGD, {"workers": 1}, faults)
    assert {f["micro_batch"] for f in found} == {micro}
    assert found[0]["epochs"] == {e: list(range(101)) for e in range(2)}, "no sample is lost or repeated"
    same_curve(rows(tmp_path / "short"), rows(tmp_path / "small"))


@pytest.mark.parametrize(("world", "micro"), [(1, 5), (2, 3)])
def test_with_accumulation_already_and_in_a_later_micro_batch(world: int, micro: int, tmp_path: Path) -> None:
    """What earlier micro-batches of the attempt added to gradients and figures is gone."""
    faults = f"oom@step:4:micro=2:rank={world - 1}"
    found = on_ranks(world, and_small, "LossParts", str(tmp_path), SGD, {"micro_batch": micro}, faults)
    now = {1: 2, 2: 2}[world]
    assert {f["micro_batch"] for f in found} == {now}
    assert found[0]["epochs"] == {e: list(range(101)) for e in range(2)}
    same_curve(rows(tmp_path / "short"), rows(tmp_path / "small"))


@pytest.mark.parametrize("world", [1, 4])
def test_in_the_middle_of_a_sources_epoch(world: int, tmp_path: Path) -> None:
    found = on_ranks(world, and_small, "RandomWalkTask", str(tmp_path), SGD, {}, f"oom@step:11:rank={world - 1}")
    assert found[0]["micro_batch"] == {1: 6, 4: 1}[world]
    same_curve(rows(tmp_path / "short"), rows(tmp_path / "small"))


@pytest.mark.parametrize("world", [1, 4])
def test_an_evaluation_is_done_again_with_fewer_samples_at_a_time(world: int, tmp_path: Path) -> None:
    faults = f"oom@evaluation:7:rank={world - 1},oom@evaluation:14:micro=2:rank=0"
    found = on_ranks(world, struck, "LoaderTask", str(tmp_path / "short"), SGD | {"eval_every": 7}, {"workers": 1}, faults)
    at_once = {1: (13, 7, 4), 4: (10, 5, 3)}[world]  # 37 samples, cut into equal pieces of at most 16 a process
    assert {f["eval_micro_batch"] for f in found} == {at_once[2]}
    assert {f["micro_batch"] for f in found} == {16 // world}
    told = [(e["step"], e["was"], e["now"], e["during"]) for e in events(tmp_path / "short", "oom")]
    assert told == [(7, at_once[0], at_once[1], "evaluation"), (14, at_once[1], at_once[2], "evaluation")]
    whole = on_ranks(world, train, "LoaderTask", str(tmp_path / "whole"), SGD | {"eval_every": 7}, PINS, None)[0]
    same_curve(rows(tmp_path / "short"), whole)


def test_a_task_that_never_fits_the_large_micro_batch(tmp_path: Path) -> None:
    """Real code runs out where samples are too many, on every rank, from the first step on."""
    found = on_ranks(2, _greedy, str(tmp_path / "short"))
    assert found == [(2, 4)] * 2
    same_curve(rows(tmp_path / "short"), on_ranks(2, train, "Plain", str(tmp_path / "small"), SGD, PINS | {"micro_batch": 2}, None)[0])


def _greedy(folder: str, group: Group) -> tuple[int, int]:
    job = prepare("Plain", folder, SGD, {}, "", group)

    def needs_memory(batch: Any) -> None:
        if len(batch[0]) > 3:
            raise torch.OutOfMemoryError("too many samples")

    job.execution.step.observe_loss(needs_memory, lambda value: None)
    job.run_to_end()
    job.setup.observer.close()
    return job.execution.plan.micro_batch, job.execution.plan.accumulation


@pytest.mark.parametrize("world", [1, 3])
def test_one_sample_at_a_time_is_the_end(world: int, tmp_path: Path) -> None:
    for text in on_ranks(world, _hopeless, str(tmp_path)):
        assert text.startswith("out of memory at step 2 on rank 0 with one sample at a time\n")
        assert "plan.activation_checkpointing=on, plan.strategy=fsdp, or more GPUs" in text


def _hopeless(folder: str, group: Group) -> str:
    job = prepare("Plain", folder, {}, {"micro_batch": 2}, "oom@step:2:rank=0,oom@step:2:rank=0", group)
    with pytest.raises(OutOfMemory) as caught:
        job.run_to_end()
    assert caught.value.outcome is Outcome.OOM and caught.value.smaller is None
    return str(caught.value)


@pytest.mark.parametrize("error", [MemoryError("the host's"), RuntimeError("another")])
def test_other_errors_are_not_taken_for_it(error: Exception, tmp_path: Path) -> None:
    job = prepare("Plain", str(tmp_path), {}, {}, "", Group(0, 1, torch.device("cpu")))

    def fail(batch: Any) -> None:
        raise error

    job.execution.step.observe_loss(fail, lambda value: None)
    with pytest.raises(type(error)):
        job.run_to_end()
    assert job.execution.plan.micro_batch == 16


def test_a_collection_that_does_not_fit_ends_the_run_and_says_what_helps(tmp_path: Path) -> None:
    """Smaller micro-batches would not make the collection smaller, so no restart is asked for."""
    job = prepare("RandomWalkTask", str(tmp_path), {}, {}, "", Group(0, 1, torch.device("cpu")))

    def collect(*_: Any) -> Any:
        raise torch.OutOfMemoryError("too many environments")

    assert job.setup.source is not None
    job.setup.source.collect = collect  # type: ignore[method-assign]
    with pytest.raises(OutOfMemory, match=r"while the source collected samples for step 1 .*\n.*fewer samples at once") as caught:
        job.run_to_end()
    assert caught.value.outcome is Outcome.OOM and caught.value.smaller is None


def test_models_with_batchnorm_are_warned(tmp_path: Path) -> None:
    found = on_ranks(1, struck, "BatchNormTask", str(tmp_path), {}, {}, "oom@step:2")[0]
    assert len(found["notices"]) == 1
    assert "from 8 samples at a time, not from the global batch of 16" in found["notices"][0]


def test_batchnorm_never_gets_a_single_sample(tmp_path: Path) -> None:
    """Pieces of two, but the last batch of 13 could then be cut into one of one."""
    job = prepare("BatchNormTask", str(tmp_path), {"samples": 93}, {"micro_batch": 4}, "oom@step:2", Group(0, 1, torch.device("cpu")))
    with pytest.raises(OutOfMemory, match="at step 2 on rank 0 with 4 samples at a time, and BatchNorm needs more than one"):
        job.run_to_end()
    job = prepare("BatchNormTask", str(tmp_path), {"samples": 94}, {"micro_batch": 4}, "oom@step:2", Group(0, 1, torch.device("cpu")))
    assert job.run_to_end().outcome is Outcome.OK
    assert job.execution.plan.micro_batch == 2


def test_an_update_is_not_taken_back(tmp_path: Path) -> None:
    """Half an optimizer's step may be done: the process ends, and says with which plan to start anew."""
    job = prepare("Plain", str(tmp_path), {}, {}, "oom@update:3", Group(0, 1, torch.device("cpu")))
    with pytest.raises(OutOfMemory) as caught:
        job.run_to_end()
    smaller = caught.value.smaller
    assert smaller is not None
    assert smaller["sizes"] == {"micro_batch": 8, "accumulation": 2}
    assert smaller["oom"] == {"step": 3, "rank": 0, "was": 16, "now": 8, "during": "step"}
    assert job.execution.plan.micro_batch == 16


def test_buffers_are_put_back_whatever_became_of_them() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.tensor(3))
            self.register_buffer("queue", torch.arange(4.0))
            self.register_buffer("none", None)

    net = Net()
    before, queue = BufferBackup(net), net.queue
    for _ in range(2):
        before.take()
        net.count += 1  # type: ignore[operator]
        net.queue = torch.zeros(7)
        before.restore()
        assert net.count == 3
        assert net.queue is queue and torch.equal(queue, torch.arange(4.0))  # type: ignore[arg-type]
    net.queue = torch.ones(9)
    before.take()
    assert isinstance(net.queue, Tensor)
    net.queue.zero_()
    before.restore()
    assert net.queue.sum() == 9


@pytest.mark.parametrize("text", ["oom@step", "oom@forward:3", "oom@step:3:rank=", "kill@nowhere:1", "oom@step:3:rank=1:micro=2"])
def test_a_fault_that_nobody_understands_is_refused(text: str) -> None:
    with pytest.raises(Problem, match="write kill@POINT:COUNT"):
        read_fault(text, 0)


def repeat(folder: str, seed: int, times: int, group: Group) -> int:
    """Any rank or two, any step, any micro-batch, any size: within one set of processes, which would hang for good."""
    rng = random.Random(seed)
    for number in range(times):
        name = rng.choice(["Augmented", "BatchNormTask", "LossParts", "RandomWalkTask", "LoaderTask"])
        micro = rng.choice([2, 3, 4])
        faults = [f"oom@step:{rng.randint(1, 12)}:micro={rng.choice([1, 1, 2])}:rank={rng.randrange(4)}" for _ in range(rng.choice([1, 2]))]
        if rng.random() < 0.3:
            faults.append(f"oom@evaluation:12:rank={rng.randrange(4)}")
        job = prepare(name, f"{folder}/{number}", {"steps": 12}, {"micro_batch": micro}, ",".join(faults), group)
        seen = note_samples(job)
        try:
            assert job.run_to_end().step == 12, faults
        except OutOfMemory:
            assert job.execution.plan.micro_batch <= (3 if name == "BatchNormTask" else 1), faults  # two in a row, from few on
            continue
        samples = [ids for rank in group.gather_objects(seen) for (epoch, _), ids in rank.items() if epoch == 0 for ids in ids]
        assert name == "RandomWalkTask" or sorted(samples) == list(range(job.setup.feed.length)), faults
    return times


def test_no_rank_is_left_behind(tmp_path: Path) -> None:
    assert on_ranks(4, repeat, str(tmp_path), 1, 8) == [8] * 4


@pytest.mark.parametrize(
    ("said", "short"),
    [
        ("[enforce fail at alloc_cpu.cpp:121] data. DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.", True),
        ("[enforce fail at alloc_cpu.cpp:113] data. DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes.", True),  # Arm
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)", False),
    ],
)
def test_every_wording_of_a_shortage_is_one(said: str, short: bool) -> None:
    with pytest.raises(torch.OutOfMemoryError if short else RuntimeError) as raised, allocation_errors_as_oom:
        raise RuntimeError(said)
    assert isinstance(raised.value, torch.OutOfMemoryError) == short and str(raised.value) == said
