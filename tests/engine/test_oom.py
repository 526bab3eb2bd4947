"""When memory runs out in a step, all ranks repeat the step with half the micro-batch, and nothing else changes."""

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


class PlansAndNotices(Observer):
    def __init__(self) -> None:
        self.notices: list[str] = []
        self.plans: list[dict[str, Any]] = []

    def notice(self, text: str) -> None:
        self.notices.append(text)

    def planned(self, facts: dict[str, Any]) -> None:
        self.plans.append(facts)


def prepare(
    name: str,
    folder: str,
    settings: dict[str, Any],
    pins: dict[str, Any],
    faults: str,
    group: Group,
    observer: PlansAndNotices | None = None,
) -> Training:
    task = TASKS[name](**settings)
    plan = choose(task.settings(), HARDWARE, device="cpu", world_size=group.size, local_procs=group.size, pins=PINS | pins)
    run = Run(folder)
    members: list[Observer] = [observer or PlansAndNotices(), MetricsFile(run)] if group.is_main else []
    injectors = [read_fault(fault, group.rank) for fault in faults.split(",") if fault]
    return Training(task, plan, run, group, Observers([*members, *(i for i in injectors if i is not None)]), False)


def record_samples(job: Training) -> dict[tuple[int, int], list[int]]:
    """Returns a dict that is filled during training: the sample ids of each (epoch, step), those of the last attempt."""
    ids_by_step: dict[tuple[int, int], list[int]] = {}
    micro_batches = job.setup.feed.micro_batches

    def record(epoch: int, index: int) -> Any:
        ids = ids_by_step[epoch, index] = []
        for micro in micro_batches(epoch, index):
            loaded_ids = micro.loaded["id"] if isinstance(micro.loaded, dict) else micro.ids
            assert torch.equal(loaded_ids, micro.ids)
            ids += loaded_ids[: micro.num_real].tolist()
            yield micro

    job.setup.feed.micro_batches = record  # type: ignore[method-assign]
    return ids_by_step


def train_with_faults(name: str, folder: str, settings: dict[str, Any], pins: dict[str, Any], faults: str, group: Group) -> dict[str, Any]:
    """Trains with faults; returns the last plan, and the samples of every epoch over all ranks."""
    observer = PlansAndNotices()
    job = prepare(name, folder, settings, pins, faults, group, observer)
    ids_by_step = record_samples(job)
    result = job.run_to_end()
    job.setup.observer.close()
    assert result.outcome is Outcome.OK
    epochs: dict[int, list[int]] = {}
    for rank in group.gather_objects(ids_by_step):
        for (epoch, _index), ids in rank.items():
            epochs.setdefault(epoch, []).extend(ids)
    return {
        "micro_batch": job.execution.plan.micro_batch, "eval_micro_batch": job.execution.plan.eval_micro_batch, "accumulation": job.execution.plan.accumulation,
        "reasons": job.execution.plan.reasons, "epochs": {e: sorted(ids) for e, ids in epochs.items()}, "length": job.setup.feed.length,
        "notices": observer.notices, "sentences": [facts["sentence"] for facts in observer.plans if facts["sentence"]],
    }  # fmt: skip


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    all_events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [{k: v for k, v in event.items() if k not in ("time", "event")} for event in all_events if event["event"] == kind]


def same_curve(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> None:
    assert [r["step"] for r in a] == [r["step"] for r in b]
    for x, y in zip(a, b, strict=True):
        for key in x:
            assert math.isclose(x[key], y[key], rel_tol=2e-5, abs_tol=1e-6), f"step {x['step']}: {key} {x[key]} against {y[key]}"


# (task, step at which memory runs out, pins)
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
def test_after_the_step_the_run_equals_one_resumed_with_half_the_micro_batch(
    name: str, step: int, pins: dict[str, Any], world: int, tmp_path: Path
) -> None:
    """It equals, bit for bit, a run that stopped before the step and resumed with the smaller micro-batch."""
    batch = 12 if name == "RandomWalkTask" else 16
    full, samples_per_rank = batch // world, batch // world
    if name == "RandomWalkTask" and world == 4:  # a rank takes two groups of two samples, in micro-batches of at most 3
        full, samples_per_rank = 2, 4
    half = full // 2
    results = on_ranks(world, train_with_faults_and_resumed, name, str(tmp_path), step, pins, half)
    assert {result["micro_batch"] for result in results} == {half}
    assert results[0]["accumulation"] == samples_per_rank // half
    assert results[0]["reasons"]["micro_batch"] == f"halved from {full}: out of memory at step {step}"
    assert results[0]["sentences"][0] == (
        f"out of memory at step {step} on rank {world - 1}: micro-batch {full} -> {half}; the step is taken again"
    )
    assert events(tmp_path / "short", "oom") == [{"step": step, "rank": world - 1, "was": full, "now": half, "during": "step"}]
    assert events(tmp_path / "short", "replanned") == [
        {"rank": 0, "step": step, "micro_batch": half, "accumulation": samples_per_rank // half}
    ]
    assert rows(tmp_path / "short") == rows(tmp_path / "resumed")
    assert weights(tmp_path / "short") == weights(tmp_path / "resumed")
    if name != "RandomWalkTask":
        assert results[0]["epochs"] == {e: list(range(results[0]["length"])) for e in range(2)}


def train_with_faults_and_resumed(name: str, folder: str, step: int, pins: dict[str, Any], half: int, group: Group) -> dict[str, Any]:
    settings = {"clip": 0.5}
    train(name, f"{folder}/resumed", settings, PINS | pins, step - 1, group)
    train(name, f"{folder}/resumed", settings, PINS | pins | {"micro_batch": half}, None, group)
    return train_with_faults(name, f"{folder}/short", settings, pins, f"oom@step:{step}:rank={group.size - 1}", group)


def train_with_faults_and_small(
    name: str, folder: str, settings: dict[str, Any], pins: dict[str, Any], faults: str, group: Group
) -> dict[str, Any]:
    """Trains with faults, and again without faults with the smaller micro-batch from the start."""
    result = train_with_faults(name, f"{folder}/short", settings, pins, faults, group)
    train(name, f"{folder}/small", settings, PINS | pins | {"micro_batch": result["micro_batch"]}, None, group)
    return result


FAULT_CASES = {
    "the first step": ("oom@step:1:rank=2", 2),
    "the last step": ("oom@step:14:rank=1", 2),
    "a partial batch": ("oom@step:7:rank=3", 2),
    "twice in a row": ("oom@step:5:rank=2,oom@step:5:rank=2", 1),
    "two ranks at once": ("oom@step:5:rank=2,oom@step:5:rank=3", 2),
    "every rank": ("oom@step:5", 2),
    "twice": ("oom@step:3:rank=1,oom@step:9:rank=0", 1),
}


QUICK_CASES = ("a partial batch", "twice in a row")


@pytest.mark.parametrize("case", [name if name in QUICK_CASES else pytest.param(name, marks=pytest.mark.system) for name in FAULT_CASES])
def test_the_curve_equals_that_of_the_smaller_micro_batch(case: str, tmp_path: Path) -> None:
    faults, micro = FAULT_CASES[case]
    results = on_ranks(4, train_with_faults_and_small, "LoaderTask", str(tmp_path), SGD, {"workers": 1}, faults)
    assert {result["micro_batch"] for result in results} == {micro}
    assert results[0]["epochs"] == {e: list(range(101)) for e in range(2)}, "no sample is lost or repeated"
    same_curve(rows(tmp_path / "short"), rows(tmp_path / "small"))


@pytest.mark.parametrize(("world", "micro"), [(1, 5), (2, 3)])
def test_with_accumulation_already_and_in_a_later_micro_batch(world: int, micro: int, tmp_path: Path) -> None:
    """What the failed attempt has added to gradients and metrics is undone."""
    faults = f"oom@step:4:micro=2:rank={world - 1}"
    results = on_ranks(world, train_with_faults_and_small, "LossParts", str(tmp_path), SGD, {"micro_batch": micro}, faults)
    halved = {1: 2, 2: 2}[world]
    assert {result["micro_batch"] for result in results} == {halved}
    assert results[0]["epochs"] == {e: list(range(101)) for e in range(2)}
    same_curve(rows(tmp_path / "short"), rows(tmp_path / "small"))


@pytest.mark.parametrize("world", [1, 4])
def test_in_the_middle_of_a_sources_epoch(world: int, tmp_path: Path) -> None:
    results = on_ranks(world, train_with_faults_and_small, "RandomWalkTask", str(tmp_path), SGD, {}, f"oom@step:11:rank={world - 1}")
    assert results[0]["micro_batch"] == {1: 6, 4: 1}[world]
    same_curve(rows(tmp_path / "short"), rows(tmp_path / "small"))


@pytest.mark.parametrize("world", [1, 4])
def test_an_evaluation_is_done_again_with_fewer_samples_at_a_time(world: int, tmp_path: Path) -> None:
    faults = f"oom@evaluation:7:rank={world - 1},oom@evaluation:14:micro=2:rank=0"
    results = on_ranks(world, train_with_faults, "LoaderTask", str(tmp_path / "short"), SGD | {"eval_every": 7}, {"workers": 1}, faults)
    eval_micro_batches = {1: (13, 7, 4), 4: (10, 5, 3)}[world]  # 37 samples, in equal micro-batches of at most 16 per process
    assert {result["eval_micro_batch"] for result in results} == {eval_micro_batches[2]}
    assert {result["micro_batch"] for result in results} == {16 // world}
    oom_events = [(e["step"], e["was"], e["now"], e["during"]) for e in events(tmp_path / "short", "oom")]
    assert oom_events == [
        (7, eval_micro_batches[0], eval_micro_batches[1], "evaluation"),
        (14, eval_micro_batches[1], eval_micro_batches[2], "evaluation"),
    ]
    without_faults = on_ranks(world, train, "LoaderTask", str(tmp_path / "without faults"), SGD | {"eval_every": 7}, PINS, None)[0]
    same_curve(rows(tmp_path / "short"), without_faults)


def test_a_task_that_never_fits_the_large_micro_batch(tmp_path: Path) -> None:
    """As in practice, memory runs out on every rank and from the first step on."""
    micro_batch_and_accumulation = on_ranks(2, _train_with_little_memory, str(tmp_path / "short"))
    assert micro_batch_and_accumulation == [(2, 4)] * 2
    same_curve(rows(tmp_path / "short"), on_ranks(2, train, "Plain", str(tmp_path / "small"), SGD, PINS | {"micro_batch": 2}, None)[0])


def _train_with_little_memory(folder: str, group: Group) -> tuple[int, int]:
    job = prepare("Plain", folder, SGD, {}, "", group)

    def needs_memory(batch: Any) -> None:
        if len(batch[0]) > 3:
            raise torch.OutOfMemoryError("too many samples")

    job.execution.step.observe_loss(needs_memory, lambda value: None)
    job.run_to_end()
    job.setup.observer.close()
    return job.execution.plan.micro_batch, job.execution.plan.accumulation


@pytest.mark.parametrize("world", [1, 3])
def test_a_run_that_has_no_memory_for_one_sample_ends(world: int, tmp_path: Path) -> None:
    for text in on_ranks(world, _train_until_one_sample, str(tmp_path)):
        assert text.startswith("out of memory at step 2 on rank 0 with one sample at a time\n")
        assert "plan.activation_checkpointing=on, plan.strategy=fsdp, or more GPUs" in text


def _train_until_one_sample(folder: str, group: Group) -> str:
    job = prepare("Plain", folder, {}, {"micro_batch": 2}, "oom@step:2:rank=0,oom@step:2:rank=0", group)
    with pytest.raises(OutOfMemory) as caught:
        job.run_to_end()
    assert caught.value.outcome is Outcome.OOM and caught.value.smaller is None
    return str(caught.value)


@pytest.mark.parametrize("error", [MemoryError("the host's"), RuntimeError("another")])
def test_other_errors_are_not_treated_as_out_of_memory(error: Exception, tmp_path: Path) -> None:
    job = prepare("Plain", str(tmp_path), {}, {}, "", Group(0, 1, torch.device("cpu")))

    def fail(batch: Any) -> None:
        raise error

    job.execution.step.observe_loss(fail, lambda value: None)
    with pytest.raises(type(error)):
        job.run_to_end()
    assert job.execution.plan.micro_batch == 16


def test_a_collection_that_does_not_fit_ends_the_run_with_a_message_that_names_the_fix(tmp_path: Path) -> None:
    """Smaller micro-batches do not make the collection smaller, so the run is not restarted."""
    job = prepare("RandomWalkTask", str(tmp_path), {}, {}, "", Group(0, 1, torch.device("cpu")))

    def collect(*_: Any) -> Any:
        raise torch.OutOfMemoryError("too many environments")

    assert job.setup.source is not None
    job.setup.source.collect = collect  # type: ignore[method-assign]
    with pytest.raises(OutOfMemory, match=r"while the source collected samples for step 1 .*\n.*fewer samples at once") as caught:
        job.run_to_end()
    assert caught.value.outcome is Outcome.OOM and caught.value.smaller is None


def test_models_with_batchnorm_are_warned(tmp_path: Path) -> None:
    result = on_ranks(1, train_with_faults, "BatchNormTask", str(tmp_path), {}, {}, "oom@step:2")[0]
    assert len(result["notices"]) == 1
    assert "from 8 samples at a time, not from the global batch of 16" in result["notices"][0]


def test_batchnorm_never_gets_a_single_sample(tmp_path: Path) -> None:
    """Micro-batches of two would leave a single sample of the last batch, which has 13."""
    job = prepare("BatchNormTask", str(tmp_path), {"samples": 93}, {"micro_batch": 4}, "oom@step:2", Group(0, 1, torch.device("cpu")))
    with pytest.raises(OutOfMemory, match="at step 2 on rank 0 with 4 samples at a time, and BatchNorm needs more than one"):
        job.run_to_end()
    job = prepare("BatchNormTask", str(tmp_path), {"samples": 94}, {"micro_batch": 4}, "oom@step:2", Group(0, 1, torch.device("cpu")))
    assert job.run_to_end().outcome is Outcome.OK
    assert job.execution.plan.micro_batch == 2


def test_an_optimizer_update_is_not_undone(tmp_path: Path) -> None:
    """The optimizer may have updated some weights: the process ends with the smaller plan for a restart."""
    job = prepare("Plain", str(tmp_path), {}, {}, "oom@update:3", Group(0, 1, torch.device("cpu")))
    with pytest.raises(OutOfMemory) as caught:
        job.run_to_end()
    smaller = caught.value.smaller
    assert smaller is not None
    assert smaller["sizes"] == {"micro_batch": 8, "accumulation": 2}
    assert smaller["oom"] == {"step": 3, "rank": 0, "was": 16, "now": 8, "during": "step"}
    assert job.execution.plan.micro_batch == 16


def test_buffers_are_restored_after_any_change() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.tensor(3))
            self.register_buffer("queue", torch.arange(4.0))
            self.register_buffer("none", None)

    net = Net()
    backup, queue = BufferBackup(net), net.queue
    for _ in range(2):
        backup.take()
        net.count += 1  # type: ignore[operator]
        net.queue = torch.zeros(7)
        backup.restore()
        assert net.count == 3
        assert net.queue is queue and torch.equal(queue, torch.arange(4.0))  # type: ignore[arg-type]
    net.queue = torch.ones(9)
    backup.take()
    assert isinstance(net.queue, Tensor)
    net.queue.zero_()
    backup.restore()
    assert net.queue.sum() == 9


@pytest.mark.parametrize("text", ["oom@step", "oom@forward:3", "oom@step:3:rank=", "kill@nowhere:1", "oom@step:3:rank=1:micro=2"])
def test_a_malformed_fault_is_refused(text: str) -> None:
    with pytest.raises(Problem, match="write kill@POINT:COUNT"):
        read_fault(text, 0)


def train_with_random_faults(folder: str, seed: int, times: int, group: Group) -> int:
    """Trains several times with random faults on one or two ranks; all in the same processes, which hang if a rank gets out of step."""
    rng = random.Random(seed)
    for number in range(times):
        name = rng.choice(["Augmented", "BatchNormTask", "LossParts", "RandomWalkTask", "LoaderTask"])
        micro = rng.choice([2, 3, 4])
        faults = [f"oom@step:{rng.randint(1, 12)}:micro={rng.choice([1, 1, 2])}:rank={rng.randrange(4)}" for _ in range(rng.choice([1, 2]))]
        if rng.random() < 0.3:
            faults.append(f"oom@evaluation:12:rank={rng.randrange(4)}")
        job = prepare(name, f"{folder}/{number}", {"steps": 12}, {"micro_batch": micro}, ",".join(faults), group)
        ids_by_step = record_samples(job)
        try:
            assert job.run_to_end().step == 12, faults
        except OutOfMemory:
            assert job.execution.plan.micro_batch <= (3 if name == "BatchNormTask" else 1), (
                faults
            )  # two faults in a row, with a small micro-batch
            continue
        samples = []
        for rank in group.gather_objects(ids_by_step):
            for (epoch, _index), ids in rank.items():
                samples += ids if epoch == 0 else []
        assert name == "RandomWalkTask" or sorted(samples) == list(range(job.setup.feed.length)), faults
    return times


@pytest.mark.system
def test_no_rank_is_left_behind(tmp_path: Path) -> None:
    assert on_ranks(4, train_with_random_faults, str(tmp_path), 1, 8) == [8] * 4


@pytest.mark.parametrize(
    ("message", "is_out_of_memory"),
    [
        ("[enforce fail at alloc_cpu.cpp:121] data. DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.", True),
        ("[enforce fail at alloc_cpu.cpp:113] data. DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes.", True),  # Arm
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)", False),
    ],
)
def test_every_wording_of_out_of_memory_is_recognised(message: str, is_out_of_memory: bool) -> None:
    with pytest.raises(torch.OutOfMemoryError if is_out_of_memory else RuntimeError) as raised, allocation_errors_as_oom:
        raise RuntimeError(message)
    assert isinstance(raised.value, torch.OutOfMemoryError) == is_out_of_memory and str(raised.value) == message
