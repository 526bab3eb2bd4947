"""With a real Slurm: `srun` starts the ranks, `sbatch` alone does not, and after `scancel` the run can be resumed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.foreign_hangs import HOLDS_GIL, check_hung_run, write_hanging_task
from tests.launching import STEPS, environment, events, info, is_training, losses, only_run, run, start, write_task
from tests.system.slurm import Cluster, cluster
from tests.waiting import wait_until

pytestmark = pytest.mark.system

TRAIN = ("drivetrain", "train", "small.py")
TWO_NODES = ("srun", "--nodes=2", "--ntasks=2", "--kill-on-bad-exit=0", *TRAIN, "plan.threads=1")


@pytest.fixture(scope="module")
def slurm() -> Iterator[Cluster]:
    with cluster() as started:
        yield started


@pytest.fixture(scope="module")
def reference_losses(tmp_path_factory: pytest.TempPathFactory, slurm: Cluster) -> list[float]:
    """Returns the losses of two processes that drivetrain itself has started."""
    folder = write_task(tmp_path_factory.mktemp("own"))
    run(*TRAIN, "--procs", 2, folder=folder)
    return losses(only_run(folder))


@pytest.fixture
def task(tmp_path: Path) -> Path:
    return write_task(tmp_path / "a folder")


def check_same_training(run: Path, reference_losses: list[float]) -> None:
    assert info(run)["status"] == "finished"
    assert losses(run) == pytest.approx(reference_losses, rel=1e-6)
    started = events(run, "started")[-1]
    assert (started["world_size"], started["launcher"]) == (2, "srun")


def test_srun_on_two_nodes(task: Path, reference_losses: list[float], slurm: Cluster) -> None:
    output = run(*TWO_NODES, folder=task, SLURM_CONF=slurm.config)
    assert output.count("2 processes, started by srun") == 1, "only rank 0 prints"
    check_same_training(only_run(task), reference_losses)
    assert info(only_run(task))["plan"]["nodes"] == 2


def test_srun_with_two_tasks_on_one_node(task: Path, reference_losses: list[float], slurm: Cluster) -> None:
    run("srun", "--nodes=1", "--ntasks=2", *TRAIN, folder=task, SLURM_CONF=slurm.config)
    check_same_training(only_run(task), reference_losses)
    assert info(only_run(task))["plan"]["nodes"] == 1


def test_after_scancel_the_same_command_resumes_the_run(task: Path, reference_losses: list[float], slurm: Cluster) -> None:
    with start(*TWO_NODES, folder=task, SLURM_CONF=slurm.config, NAP=0.1) as srun:
        wait_until(lambda: is_training(task), "some steps")
        (step,) = slurm.run("squeue", "-h", "--steps", "-o", "%i").split()
        slurm.run("scancel", "--signal=TERM", step)
        assert srun.wait() == 200, srun.output
    stopped = only_run(task)
    assert info(stopped)["outcome"] == "preempted"
    stopped_at = events(stopped, "checkpoint")[-1]["step"]
    assert 3 <= stopped_at < STEPS

    assert "continuing small-001" in run(*TWO_NODES, folder=task, SLURM_CONF=slurm.config)
    assert [event["step"] for event in events(stopped, "resumed")] == [stopped_at]
    check_same_training(only_run(task), reference_losses)


def test_a_hang_under_srun(tmp_path: Path, slurm: Cluster) -> None:
    line = write_hanging_task(tmp_path, HOLDS_GIL)
    words = ("srun", "--nodes=2", "--ntasks=2", "drivetrain", "train", "hanging.py", "--hang-after", "2s", "plan.threads=1")
    with start(*words, folder=tmp_path, SLURM_CONF=slurm.config, TMPDIR=tmp_path) as srun:
        assert srun.wait() == 202, srun.output
        assert "rank 1 hangs in step 6" in srun.output
    check_hung_run(tmp_path, line)


def test_in_a_batch_script_without_srun_one_process_trains(task: Path, reference_losses: list[float], slurm: Cluster) -> None:
    """The allocation has two tasks on two nodes, but without srun nothing starts the second."""
    script = task / "job.sh"
    script.write_text(f"#!/bin/bash\n{' '.join(TRAIN)}\n")
    flags = ("--parsable", "--nodes=2", "--ntasks=2", "--output=job.log", f"--export=ALL,PATH={environment()['PATH']}")
    job = run("sbatch", *flags, script, folder=task, SLURM_CONF=slurm.config).strip()
    wait_until(lambda: slurm.run("squeue", "-h", "-t", "all", "-j", job, "-o", "%T").strip() == "COMPLETED", "the job's end")
    trained = only_run(task)
    assert info(trained)["plan"]["world_size"] == 1
    assert "srun" not in (task / "job.log").read_text()
    assert losses(trained) == pytest.approx(reference_losses, rel=1e-3)
