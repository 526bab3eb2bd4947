"""Under another launcher, a rank that hangs is named with its line, and every process ends with the outcome's exit code."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from tests.foreign_hangs import HOLDS_GIL, LEFT_COLLECTIVE, check_hang_event, check_hung_run, write_hanging_task
from tests.launching import events, free_port, info, only_run, run, start

TRAIN = ("train", "hanging.py", "--hang-after", "2s")


@pytest.mark.system  # slow
def test_torchrun_restarts_a_run_that_hung(tmp_path: Path) -> None:
    line = write_hanging_task(tmp_path, HOLDS_GIL)
    words = ("--nproc-per-node", 2, "--max-restarts", 1, "--master-port", free_port())
    output = run("torchrun", *words, "-m", "drivetrain", *TRAIN, folder=tmp_path)
    assert "failed (exitcode: 202)" in output
    assert f"drivetrain: {check_hang_event(tmp_path, line)}" in output
    assert "continuing hanging-001" in output
    assert [event["step"] for event in events(only_run(tmp_path), "resumed")] == [4]
    assert info(only_run(tmp_path))["status"] == "finished"


@pytest.mark.system  # slow
def test_ranks_that_wait_for_each_other_after_slow_steps(tmp_path: Path) -> None:
    """A long first step and a long first evaluation are no hang; the rank that has left the collective is the one that hangs."""
    line = write_hanging_task(tmp_path, LEFT_COLLECTIVE)
    variables = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "SLOW": 1, "TMPDIR": tmp_path}
    with contextlib.ExitStack() as stack:
        first, second = (
            stack.enter_context(start("drivetrain", *TRAIN, "plan.threads=1", folder=tmp_path, RANK=rank, **variables)) for rank in (0, 1)
        )
        assert (first.wait(), second.wait()) == (202, 202), first.output + second.output
        shown = [first.output, second.output]
    check_hung_run(tmp_path, line)
    assert "Continue with: drivetrain resume hanging-001" in shown[0] and "hang" not in shown[1], "rank 0 gives the verdict"
    for rank in (0, 1):
        assert f"rank {rank} computes" in shown[rank]
        assert f"rank {rank} computes" in (only_run(tmp_path) / "logs" / f"rank-{rank}.log").read_text()
