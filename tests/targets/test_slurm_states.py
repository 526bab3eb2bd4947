"""What sacct prints of jobs that Slurm's controller has forgotten (in `outputs/`, from a real slurmdbd), and how the run has ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from drivetrain.targets.slurm.states import state_of_accounting

OUTPUTS = Path(__file__).with_name("outputs")
EXPECTED = {
    "completed": ("ended", 0, ""),
    "failed": ("ended", 7, "it ended with code 7 (infra)"),
    "preempted": ("ended", 200, "it ended with code 200 (preempted)"),
    "out-of-memory": ("ended", 203, "it ended with code 203 (oom)"),
    "requeued-completed": ("ended", 0, ""),
    "requeued-failed": ("ended", 5, "it ended with code 5 (infra)"),
    "element": ("ended", 203, "it ended with code 203 (oom)"),
    "element-requeued": ("ended", 11, "it ended with code 11 (infra)"),
    "killed": ("ended", 201, "it ended as failed"),
    "cancelled": ("ended", 201, "it was cancelled"),
    "time-limit": ("ended", 201, "its time limit passed"),
    "no-end": ("lost", None, "Slurm's controller has forgotten the job, and its accounting has not seen the end of it"),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_forgotten_job_has_ended_as_its_script_did(name: str) -> None:
    assert tuple(state_of_accounting((OUTPUTS / f"sacct-{name}.txt").read_text())) == EXPECTED[name]


def test_every_output_is_expected() -> None:
    assert {path.stem.removeprefix("sacct-") for path in OUTPUTS.glob("sacct-*")} == set(EXPECTED)
