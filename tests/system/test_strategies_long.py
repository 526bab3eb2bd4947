"""More combinations of strategies, ZeRO stages, tasks and world sizes, and SIGKILL through the command line.

One in three pairs of a task and a strategy is tested; DRIVETRAIN_EVERY=1 takes all pairs.
"""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.command import COMMAND, environment, run_ok, write_task
from tests.engine.test_invariance import assert_same_metrics
from tests.engine.test_strategies import ADAM, FSDP, FSDP2, RECOMPUTE, SGD, ZERO1, ZERO2, ZERO3, label, run
from tests.killing import SETTINGS, SLOW, kill_with_children
from tests.sample_tasks import rows, weights

EVERY = "DRIVETRAIN_EVERY" in os.environ
ALL = [FSDP, FSDP2, ZERO1, ZERO2, ZERO3]
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("UnusualModel", {}),
    ("LossParts", {}),
    ("TokenMean", {}),
    ("TwoPartLoss", {}),
    ("OwnOptimizer", {"kind": "rmsprop"}),
    ("OwnOptimizer", {"kind": "count"}),
]


def pairs(first: list[Any], second: list[Any]) -> list[tuple[Any, Any]]:
    return [(a, b) for i, a in enumerate(first) for j, b in enumerate(second) if EVERY or (i + j) % 3 == 0]


@pytest.mark.parametrize(("precision", "pins"), pairs(["fp32", "bf16"], [{}, *ALL]), ids=label)
def test_every_strategy_on_four_processes(pins: dict[str, Any], precision: str, tmp_path: Path) -> None:
    reference = run("Transformer", tmp_path / "one", 1, {}, precision=precision)
    sharded = run("Transformer", tmp_path / "four", 4, pins | {"micro_batch": 2}, precision=precision)
    assert_same_metrics(reference, sharded, 1e-5 if precision == "fp32" else 8e-3)


@pytest.mark.parametrize(("kind", "pins"), pairs(KINDS, ALL), ids=label)
def test_every_kind_on_three_processes(kind: tuple[str, dict[str, Any]], pins: dict[str, Any], tmp_path: Path) -> None:
    name, settings = kind
    reference = run(name, tmp_path / "one", 1, {}, **SGD, **settings)
    assert_same_metrics(reference, run(name, tmp_path / "three", 3, pins | {"micro_batch": 3}, **SGD, **settings), 1e-4)


@pytest.mark.parametrize("pins", ALL, ids=label)
def test_batchnorm_and_activation_checkpointing(pins: dict[str, Any], tmp_path: Path) -> None:
    assert_same_metrics(
        run("BatchNormBlocks", tmp_path / "ddp", 2, {}, **SGD),
        run("BatchNormBlocks", tmp_path / "sharded", 2, pins | RECOMPUTE, **SGD),
        1e-4,
    )


@pytest.mark.parametrize(
    "pins", [FSDP2 | {"offload": "all"}, ZERO1, ZERO2 | {"offload": "optimizer"}, ZERO3, ZERO3 | {"offload": "all"}], ids=label
)
def test_stopped_twice_and_resumed(pins: dict[str, Any], tmp_path: Path) -> None:
    settings = ADAM | {"dropout": 0.2, "eval_every": 3}
    run("Transformer", tmp_path / "uninterrupted", 2, pins | {"micro_batch": 3}, **settings)
    for stop in (2, 5, None):
        run("Transformer", tmp_path / "resumed", 2, pins | {"micro_batch": 3}, stop, **settings)
    assert rows(tmp_path / "resumed") == rows(tmp_path / "uninterrupted")
    assert weights(tmp_path / "resumed") == weights(tmp_path / "uninterrupted")


@pytest.mark.parametrize(("kind", "pins"), pairs(["rmsprop", "count"], ALL), ids=label)
def test_a_users_own_optimizer_is_resumed(kind: str, pins: dict[str, Any], tmp_path: Path) -> None:
    run("OwnOptimizer", tmp_path / "uninterrupted", 2, pins, kind=kind, clip=0.5)
    for stop in (3, 9, None):
        run("OwnOptimizer", tmp_path / "resumed", 2, pins, stop, kind=kind, clip=0.5)
    assert rows(tmp_path / "resumed") == rows(tmp_path / "uninterrupted")
    assert weights(tmp_path / "resumed") == weights(tmp_path / "uninterrupted")


@pytest.mark.parametrize("pins", [FSDP2, ZERO1, ZERO2, ZERO3], ids=label)
def test_another_world_size(pins: dict[str, Any], tmp_path: Path) -> None:
    reference = run("Transformer", tmp_path / "one", 1, {}, **ADAM)
    for world, stop in ((2, 2), (1, 5), (3, None)):
        run("Transformer", tmp_path / "changing", world, pins, stop, **ADAM)
    assert_same_metrics(reference, rows(tmp_path / "changing"), 5e-5)


KILLED = [["plan.strategy=fsdp"], ["plan.strategy=fsdp", "plan.zero_stage=2"]]
KILLED += [["plan.strategy=deepspeed", f"plan.zero_stage={stage}"] for stage in (1, 2, 3)]


@pytest.mark.parametrize("words", KILLED if EVERY else KILLED[:1], ids=label)
def test_killed_and_run_again(words: list[str], folder: Path) -> None:
    """All processes are killed while a checkpoint is written, before it is published, and at another time."""
    write_task(change=SLOW)
    command = ["train", "small.py", *SETTINGS, "epochs=8", *words, "--procs", "2"]
    run_ok(*command, "--name", "uninterrupted")
    for fault in ("save:2", "written:3", "rename:4", ""):
        variables = environment(DRIVETRAIN_FAULTS=f"kill@{fault}") if fault else environment()
        process = subprocess.Popen([*COMMAND, *command, "--name", "resumed", "-q"], env=variables, stdin=subprocess.DEVNULL)
        try:
            process.wait(timeout=None if fault else 12)
            assert not fault or process.returncode != 0, f"the fault {fault} did not come"
        except subprocess.TimeoutExpired:
            kill_with_children(process)
        time.sleep(1)
    run_ok(*command, "--name", "resumed")
    assert rows("runs/resumed") == rows("runs/uninterrupted")
    assert weights("runs/resumed") == weights("runs/uninterrupted")
    assert not [name for name in os.listdir("runs/resumed/checkpoints") if name.startswith(".")]


def test_any_strategy_resumes_from_any_other(tmp_path: Path) -> None:
    reference = run("Transformer", tmp_path / "one", 1, {}, **ADAM)
    for pins, stop in (({}, 1), (FSDP, 2), (ZERO3, 3), (FSDP2, 4), (ZERO1, 5), ({}, 6), (ZERO2, 7), (FSDP, None)):
        run("Transformer", tmp_path / "changing", 2, pins, stop, **ADAM)
    assert_same_metrics(reference, rows(tmp_path / "changing"), 5e-5)
