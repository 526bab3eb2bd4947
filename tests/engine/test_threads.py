"""The number of CPU threads follows from the size of a step's matrix products, is the same after a resume, and threads wait without spinning."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.engine.fast.threads import Products
from drivetrain.engine.group import Group
from drivetrain.engine.log.observe import Observer, Observers
from drivetrain.engine.loop import Training
from drivetrain.plan.choose import choose
from drivetrain.runs import Run
from drivetrain.tasks.rl.worlds import CartPole
from drivetrain.watch.files import MetricsFile
from tests.sample_tasks import HARDWARE, rows, weights

ALONE = Group(0, 1, torch.device("cpu"))


@pytest.fixture(autouse=True)
def restore_num_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


class PlanReasons(Observer):
    """Records the plan's reasons, which the first steps change."""

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}

    def planned(self, facts: dict[str, Any]) -> None:
        self.reasons |= facts["reasons"]


def training(task: Any, folder: Path, plans: PlanReasons, **pins: Any) -> Training:
    plan = choose(task.settings(), HARDWARE, device="cpu", world_size=1, local_procs=1, pins=pins)
    assert plan.threads == 2 and plan.env["OMP_WAIT_POLICY"] == "PASSIVE"
    run = Run(folder)
    return Training(task, plan, run, ALONE, Observers([MetricsFile(run), plans]), False)


SMALL = {"epochs": 4, "envs": 64, "horizon": 8, "global_batch": 256, "passes": 2, "eval_episodes": 4, "log_every": 1, "save_every": "1ep"}


def test_small_steps_use_one_thread_and_a_resumed_run_repeats_them(tmp_path: Path) -> None:
    uninterrupted, stopped = PlanReasons(), PlanReasons()
    training(CartPole(**SMALL), tmp_path / "uninterrupted", uninterrupted).run_to_end()
    assert torch.get_num_threads() == 1
    assert uninterrupted.reasons["threads"].startswith("1 of 2 used after the first step: its matrix products have 0.")
    training(CartPole(**SMALL), tmp_path / "resumed", stopped).run_to_end(stop_after=4)
    resumed = training(CartPole(**SMALL), tmp_path / "resumed", stopped)
    assert torch.get_num_threads() == 2, "as in the plan, until the checkpoint is loaded"
    resumed.run_to_end()
    assert torch.get_num_threads() == 1
    assert rows(tmp_path / "uninterrupted") == rows(tmp_path / "resumed") and weights(tmp_path / "uninterrupted") == weights(
        tmp_path / "resumed"
    )


def test_pinned_threads_are_unchanged(tmp_path: Path) -> None:
    training(CartPole(**SMALL | {"epochs": 1}), tmp_path / "run", plans := PlanReasons(), threads=2).run_to_end()
    assert torch.get_num_threads() == 2 and "threads" not in plans.reasons


def test_large_products_use_all_threads(tmp_path: Path) -> None:
    large_net = CartPole(**SMALL | {"epochs": 1, "width": 512, "envs": 32, "global_batch": 256})
    training(large_net, tmp_path / "run", plans := PlanReasons()).run_to_end()
    assert torch.get_num_threads() == 2 and plans.reasons["threads"].startswith("2 of 2 used")


def test_the_typical_matrix_product_is_one_of_the_large_ones() -> None:
    small, large = torch.ones(4, 4), torch.ones(256, 256, requires_grad=True)
    with Products() as products:
        for _ in range(100):
            small @ small
        (large @ large).sum().backward()
    assert len(products.flops) == 103, "100 small products, and a large one with its two gradients"
    assert products.typical() == pytest.approx(2 * 256**3, rel=0.01)


def test_threads_wait_without_spinning_unless_the_user_chose_otherwise() -> None:
    program = "import atexit, os; atexit.register(lambda: print(os.environ['OMP_WAIT_POLICY'])); from drivetrain.cli import main; main(['--version'])"

    def wait_policy(**variables: str) -> str:
        clean = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
        process = subprocess.run([sys.executable, "-c", program], env=clean | variables, capture_output=True, text=True, check=True)
        return process.stdout.split()[-1]

    assert (wait_policy(), wait_policy(OMP_WAIT_POLICY="ACTIVE")) == ("PASSIVE", "ACTIVE")


@pytest.mark.world_size(2)
def test_processes_choose_the_same_number(tmp_path: Path, group: Group) -> None:
    task = CartPole(**SMALL | {"epochs": 1})
    plan = choose(task.settings(), replace(HARDWARE, cpu_cores=4), device="cpu", world_size=2, local_procs=2)
    run = Run(tmp_path / "run")
    training = Training(task, plan, run, group, Observers([MetricsFile(run)] if group.is_main else []), False)
    assert torch.get_num_threads() == plan.threads == 2
    training.run_to_end()
    assert group.gather_objects(torch.get_num_threads()) == [1, 1]
