"""The table of guide 004, row by row."""

from __future__ import annotations

from pathlib import Path

import pytest

from drivetrain.hardware import Gpu, Hardware
from drivetrain.hardware.described import parse
from drivetrain.outcomes import Problem
from drivetrain.plan import Plan
from drivetrain.plan.table import table
from drivetrain.task import Task


@pytest.fixture(autouse=True)
def _fake_deepspeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes an empty package `deepspeed`: planning only checks whether it exists."""
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))


def plan(
    words: str | Hardware, procs: int | None = None, deepspeed: bool = True, settings: dict[str, object] | None = None, **pins: object
) -> Plan:
    machine = parse(words) if isinstance(words, str) else words
    procs = procs or max(1, len(machine.gpus))
    return table(
        Task().settings() | (settings or {}), machine, device="cuda" if machine.gpus else "cpu", world_size=procs * machine.nodes,
        local_procs=procs, nodes=machine.nodes, pins=pins, deepspeed_installed=deepspeed,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("machine", "micro", "accumulation", "batch"),
    [
        ("4xL4-24GB", 16, 4, 256),
        ("4xA10-24GB", 16, 4, 256),
        ("4x20GB", 16, 4, 256),
        ("4xT4-16GB", 12, 5, 240),
        ("4x14GB", 12, 5, 240),
        ("4x12GB", 8, 8, 256),
        ("4x10GB", 8, 8, 256),
        ("4x8GB", 4, 16, 256),
        ("4x6GB", 4, 16, 256),
        ("4x5GB", 2, 32, 256),
        ("4x4GB", 2, 32, 256),
    ],
)
def test_the_guides_rows_at_four_gpus(machine: str, micro: int, accumulation: int, batch: int) -> None:
    chosen_plan = plan(machine)
    assert (chosen_plan.micro_batch, chosen_plan.accumulation, chosen_plan.global_batch) == (micro, accumulation, batch)
    assert f"{micro} x {accumulation} x 4 = {batch}" in chosen_plan.reasons["global_batch"]
    assert chosen_plan.eval_micro_batch == micro


@pytest.mark.parametrize(
    ("listed_mib", "micro"),
    [(23034, 16), (22731, 16), (15360, 12), (15109, 12), (16384, 12), (11264, 8), (10240, 8), (9856, 8), (8192, 4), (5934, 4), (4864, 2), (81559, 16)],
    ids=["L4", "A10G", "T4", "T4 in a VM", "V100", "2080Ti", "3080", "MIG 1g.10gb", "8 GB", "A2000", "MIG 1g.5gb", "H100"],
)  # fmt: skip
def test_the_memory_that_a_driver_lists_belongs_to_the_row_of_the_cards_name(listed_mib: int, micro: int) -> None:
    gpu = Gpu(0, "a GPU", listed_mib * 2**20, (8, 0))
    assert plan(Hardware(8, 2**36, (gpu,))).micro_batch == micro


def test_the_smallest_gpu_decides() -> None:
    unequal = Hardware(32, 2**36, (Gpu(0, "NVIDIA L4", 24 * 2**30, (8, 9)), Gpu(1, "Tesla T4", 15 * 2**30, (7, 5))))
    chosen_plan = plan(unequal)
    assert (chosen_plan.micro_batch, chosen_plan.accumulation, chosen_plan.global_batch) == (12, 10, 240)
    assert "14-20 GB: the smallest GPU has 16.1 GB" in chosen_plan.reasons["micro_batch"]


@pytest.mark.parametrize(
    ("machine", "accumulation", "batch"), [("1xL4", 16, 256), ("8xH100-80GB", 2, 256), ("4 nodes x 8xH100-80GB", 1, 512)]
)
def test_accumulation_falls_with_more_gpus_to_one(machine: str, accumulation: int, batch: int) -> None:
    chosen_plan = plan(machine)
    assert (chosen_plan.micro_batch, chosen_plan.accumulation, chosen_plan.global_batch) == (16, accumulation, batch)


def test_the_report_the_guide_prints_for_four_l4() -> None:
    chosen_plan = plan("4xL4-24GB, 48 cores, 192GB RAM")
    assert (chosen_plan.strategy, chosen_plan.zero_stage, chosen_plan.offload) == ("deepspeed", 2, "optimizer")
    assert (chosen_plan.precision, chosen_plan.activation_checkpointing, chosen_plan.pin_memory) == ("fp16", True, True)
    assert chosen_plan.workers * 4 == 12, "3 a GPU"
    assert chosen_plan.prefetch == 4


@pytest.mark.parametrize(
    ("machine", "deepspeed", "strategy", "stage"),
    [
        ("1xL4", True, "single", 0),
        ("1x4GB", True, "single", 0),
        ("2xL4", True, "deepspeed", 2),
        ("2xL4", False, "ddp", 0),
        ("2x6GB", True, "deepspeed", 2),
        ("2x5GB", True, "deepspeed", 3),
        ("2x5GB", False, "ddp", 0),
    ],
)
def test_strategy(machine: str, deepspeed: bool, strategy: str, stage: int) -> None:
    chosen_plan = plan(machine, deepspeed=deepspeed)
    assert (chosen_plan.strategy, chosen_plan.zero_stage) == (strategy, stage)
    assert chosen_plan.reasons["strategy"].startswith("the guide's table")


@pytest.mark.parametrize(("cores", "workers"), [(64, 3), (14, 3), (13, 2), (8, 1), (5, 0), (2, 0)])
def test_workers_are_capped_by_the_cores(cores: int, workers: int) -> None:
    assert plan(f"4xL4, {cores} cores").workers == workers


@pytest.mark.parametrize(("ram", "prefetch"), [(128, 4), (65, 4), (64, 3), (33, 3), (32, 2), (8, 2)])
def test_prefetch_by_ram(ram: int, prefetch: int) -> None:
    assert plan(f"4xL4, {ram}GB RAM").prefetch == prefetch


def test_precision_is_fp16_on_cards_that_have_it_and_the_recipe_wins() -> None:
    assert plan("2xH100-80GB").precision == "fp16", "the table knows no bf16"
    assert plan("2xT4").precision == "fp16"
    assert plan("2xP100").precision == "fp32"
    chosen = plan("2xH100-80GB", settings={"precision": "bf16"})
    assert (chosen.precision, chosen.reasons["precision"]) == ("bf16", "asked for")


def test_without_a_gpu_the_guides_code_decides_and_the_reason_says_so() -> None:
    chosen_plan = plan("cpu, 16 cores, 64GB RAM")
    assert (chosen_plan.micro_batch, chosen_plan.accumulation, chosen_plan.global_batch, chosen_plan.precision) == (4, 8, 32, "fp32")
    assert (chosen_plan.strategy, chosen_plan.workers, chosen_plan.activation_checkpointing) == ("single", 0, False)
    assert "no row without a GPU" in chosen_plan.reasons["micro_batch"]
    two_processes = plan("cpu, 16 cores, 64GB RAM", procs=2)
    assert (two_processes.strategy, two_processes.backend, two_processes.global_batch) == ("ddp", "gloo", 64)


def test_pins_win_and_other_choices_follow_from_them() -> None:
    chosen_plan = plan("4xL4", micro_batch="8", workers=7, offload="none", prefetch=9)
    assert (chosen_plan.micro_batch, chosen_plan.accumulation, chosen_plan.global_batch) == (8, 8, 256)
    assert (chosen_plan.workers, chosen_plan.offload, chosen_plan.prefetch, chosen_plan.zero_stage) == (7, "none", 9, 2)
    assert chosen_plan.reasons["micro_batch"] == chosen_plan.reasons["workers"] == "pinned"
    pinned = plan("4xL4", micro_batch=8, accumulation=3)
    assert (pinned.accumulation, pinned.global_batch) == (3, 96)
    sharded = plan("4xL4", strategy="fsdp")
    assert (sharded.strategy, sharded.zero_stage, sharded.offload) == ("fsdp", 3, "none")
    with pytest.raises(Problem, match=r"plan.zero_stage does not go with plan.strategy=ddp"):
        plan("4xL4", deepspeed=False, zero_stage=3)


def test_the_reason_says_when_the_recipes_global_batch_is_replaced() -> None:
    assert "the recipe's 64 does not hold" in plan("4xT4").reasons["global_batch"]
    assert "as the recipe has it" in plan("4xT4", settings={"global_batch": 240}).reasons["global_batch"]


def test_the_plan_is_the_same_after_writing_and_reading_json() -> None:
    chosen_plan = plan("4xT4")
    assert Plan.from_json(chosen_plan.to_json()) == chosen_plan
