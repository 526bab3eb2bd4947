"""The strategies once more: every stage at every size, and kill -9 through the command line.

Each kind of task meets every third strategy, and each strategy every third kind; DRIVETRAIN_EVERY=1 takes all pairs.
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


def pairs(one: list[Any], other: list[Any]) -> list[tuple[Any, Any]]:
    return [(a, b) for i, a in enumerate(one) for j, b in enumerate(other) if EVERY or (i + j) % 3 == 0]


@pytest.mark.parametrize(("precision", "pins"), pairs(["fp32", "bf16"], [{}, *ALL]), ids=label)
def test_every_strategy_on_four_processes(pins: dict[str, Any], precision: str, tmp_path: Path) -> None:
    reference = run("Transformer", tmp_path / "one", 1, {}, precision=precision)
    found = run("Transformer", tmp_path / "four", 4, pins | {"micro_batch": 2}, precision=precision)
    assert_same_metrics(reference, found, 1e-5 if precision == "fp32" else 8e-3)


@pytest.mark.parametrize(("kind", "pins"), pairs(KINDS, ALL), ids=label)
def test_every_kind_on_three_processes(kind: tuple[str, dict[str, Any]], pins: dict[str, Any], tmp_path: Path) -> None:
    name, settings = kind
    reference = run(name, tmp_path / "one", 1, {}, **SGD, **settings)
    assert_same_metrics(reference, run(name, tmp_path / "three", 3, pins | {"micro_batch": 3}, **SGD, **settings), 1e-4)


@pytest.mark.parametrize("pins", ALL, ids=label)
def test_batchnorm_and_activation_checkpointing(pins: dict[str, Any], tmp_path: Path) -> None:
    assert_same_metrics(
        run("BatchNormBlocks", tmp_path / "ddp", 2, {}, **SGD), run("BatchNormBlocks", tmp_path / "found", 2, pins | RECOMPUTE, **SGD), 1e-4
    )


@pytest.mark.parametrize(
    "pins", [FSDP2 | {"offload": "all"}, ZERO1, ZERO2 | {"offload": "optimizer"}, ZERO3, ZERO3 | {"offload": "all"}], ids=label
)
def test_stopped_twice_and_resumed(pins: dict[str, Any], tmp_path: Path) -> None:
    settings = ADAM | {"dropout": 0.2, "eval_every": 3}
    run("Transformer", tmp_path / "whole", 2, pins | {"micro_batch": 3}, **settings)
    for stop in (2, 5, None):
        run("Transformer", tmp_path / "broken", 2, pins | {"micro_batch": 3}, stop, **settings)
    assert rows(tmp_path / "broken") == rows(tmp_path / "whole")
    assert weights(tmp_path / "broken") == weights(tmp_path / "whole")


@pytest.mark.parametrize(("kind", "pins"), pairs(["rmsprop", "count"], ALL), ids=label)
def test_a_users_own_optimizer_is_resumed(kind: str, pins: dict[str, Any], tmp_path: Path) -> None:
    run("OwnOptimizer", tmp_path / "whole", 2, pins, kind=kind, clip=0.5)
    for stop in (3, 9, None):
        run("OwnOptimizer", tmp_path / "broken", 2, pins, stop, kind=kind, clip=0.5)
    assert rows(tmp_path / "broken") == rows(tmp_path / "whole")
    assert weights(tmp_path / "broken") == weights(tmp_path / "whole")


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
    """kill -9 of everything, while it writes, between a file and its publication, and at any time."""
    write_task(change=SLOW)
    command = ["train", "small.py", *SETTINGS, "epochs=8", *words, "--procs", "2"]
    run_ok(*command, "--name", "whole")
    for fault in ("save:2", "written:3", "rename:4", ""):
        variables = environment(DRIVETRAIN_FAULTS=f"kill@{fault}") if fault else environment()
        front = subprocess.Popen([*COMMAND, *command, "--name", "broken", "-q"], env=variables, stdin=subprocess.DEVNULL)
        try:
            front.wait(timeout=None if fault else 12)
            assert not fault or front.returncode != 0, f"the fault {fault} did not come"
        except subprocess.TimeoutExpired:
            kill_with_children(front)
        time.sleep(1)
    run_ok(*command, "--name", "broken")
    assert rows("runs/broken") == rows("runs/whole")
    assert weights("runs/broken") == weights("runs/whole")
    assert not [name for name in os.listdir("runs/broken/checkpoints") if name.startswith(".")]


def test_any_strategy_resumes_from_any_other(tmp_path: Path) -> None:
    reference = run("Transformer", tmp_path / "one", 1, {}, **ADAM)
    for pins, stop in (({}, 1), (FSDP, 2), (ZERO3, 3), (FSDP2, 4), (ZERO1, 5), ({}, 6), (ZERO2, 7), (FSDP, None)):
        run("Transformer", tmp_path / "changing", 2, pins, stop, **ADAM)
    assert_same_metrics(reference, rows(tmp_path / "changing"), 5e-5)
