"""Out of memory in a run of the command: run.json gets a smaller plan, and the run and later resumes continue with it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drivetrain.launch.job import make_job
from drivetrain.launch.machine import cluster_of, detect_machine
from drivetrain.launch.opening import open_run, record_start
from drivetrain.launch.planning import plan_run
from drivetrain.launch.request import Request
from drivetrain.outcomes import Outcome
from drivetrain.plan import Plan
from drivetrain.processes.job import TrainJob
from drivetrain.recipe import load
from drivetrain.supervise import local_placement, run_workers
from drivetrain.watch.screen import Screen
from tests.command import TASK, expect_error, run_drivetrain, run_ok, write_task
from tests.launching import free_port, start
from tests.sample_tasks import rows, weights
from tests.waiting import Stopwatch

HALF = "halved from 50: out of memory at step {}"


def plan(name: str) -> dict[str, Any]:
    return dict(json.loads(Path(f"runs/{name}/run.json").read_text())["plan"])


def events(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(f"runs/{name}/events.jsonl").read_text().splitlines()]


def kinds(name: str) -> list[str]:
    return [e["event"] for e in events(name) if e["event"] in ("oom", "replanned", "restarted", "resumed", "finished", "stopped")]


def test_the_step_is_redone_in_place_and_a_resume_uses_the_smaller_plan(folder: Path) -> None:
    write_task()
    words = ("train", "small.py", "--procs", "2")
    output = run_ok(*words, "--name", "uninterrupted", DRIVETRAIN_FAULTS="oom@step:7:rank=1")
    assert output.count("out of memory at step 7 on rank 1: micro-batch 50 -> 25; the step is taken again") == 1
    assert kinds("uninterrupted") == ["oom", "replanned", "finished"]
    smaller = plan("uninterrupted")
    assert (smaller["micro_batch"], smaller["accumulation"], smaller["eval_micro_batch"]) == (25, 2, 50)
    assert smaller["reasons"]["micro_batch"] == HALF.format(7)

    killed = run_drivetrain(*words, "--name", "interrupted", DRIVETRAIN_FAULTS="oom@step:7:rank=1,kill@published:1")
    assert killed.returncode == -9
    assert plan("interrupted")["micro_batch"] == 25
    assert "accumulation 2" in run_ok("resume", "interrupted")
    assert rows("runs/interrupted") == rows("runs/uninterrupted")
    assert weights("runs/interrupted") == weights("runs/uninterrupted")


def test_a_plan_without_a_profile_is_made_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan without a profile may be far too large: it is made again once, before micro-batches are halved."""
    write_task()
    monkeypatch.setenv("DRIVETRAIN_FAULTS", "oom@update:5,oom@update:6")
    request = Request(procs=1, name="unprofiled")
    recipe, machine = load("small.py", [])[0], detect_machine(request)
    opened = open_run(recipe, request)
    first_plan = plan_run(recipe, request, cluster_of(machine), None)
    record_start(opened, recipe, first_plan, machine)
    better_plan = replace(first_plan, micro_batch=20, accumulation=5)
    replans = []

    def replan() -> Plan:
        replans.append(1)
        return better_plan

    job = make_job(TrainJob, recipe, opened.run, first_plan)
    ended = run_workers(job, first_plan, local_placement(1), Screen(quiet=True), [], replan=replan)
    assert ended.outcome is Outcome.OK and replans == [1]
    assert kinds("unprofiled") == ["oom", "replanned", "restarted"] * 2
    assert plan("unprofiled")["micro_batch"] == 10, "the second time, the micro-batch of the better plan is halved"


def test_in_the_optimizers_update_the_run_restarts_from_its_checkpoint(folder: Path) -> None:
    write_task()
    words = ("train", "small.py", "--procs", "2", "save_every=8")
    output = run_ok(*words, "--name", "short", DRIVETRAIN_FAULTS="oom@update:20:rank=0")  # the restart waits for the last save
    assert "out of memory at step 20 on rank 0: micro-batch 50 -> 25; restarting from step 16" in output
    assert kinds("short") == ["oom", "replanned", "restarted", "resumed", "finished"]
    assert [e["rank"] for e in events("short") if e["event"] == "oom"] == [0]
    assert (plan("short")["micro_batch"], plan("short")["accumulation"]) == (25, 2)
    assert plan("short")["reasons"]["micro_batch"] == HALF.format(20)

    assert run_drivetrain(*words, "--name", "killed", DRIVETRAIN_FAULTS="kill@published:2").returncode == -9
    run_ok("resume", "killed", "plan.micro_batch=25", "plan.eval_micro_batch=50")
    assert [r["step"] for r in rows("runs/short")] == list(range(1, 29)), "each step is logged once"
    assert rows("runs/short") == rows("runs/killed")
    assert weights("runs/short") == weights("runs/killed")


def test_a_restart_does_not_wait_for_ranks_that_hang(folder: Path) -> None:
    """One rank runs out of memory while the other is in a long call, such as a collective of a sharded model."""
    condition = 'if os.environ["RANK"] == "0" and model.training and self.calls == 6 and not os.path.exists("slept"):'
    loss = f"""\
        self.calls = getattr(self, "calls", 0) + 1
        {condition}
            open("slept", "w").close()
            time.sleep(400)
        x, y = batch
        return F.cross"""
    write_task(text="import os, time\n" + TASK.replace("        x, y = batch\n        return F.cross", loss))
    stopwatch = Stopwatch()
    run_ok("train", "small.py", "--procs", "2", "--name", "short", DRIVETRAIN_FAULTS="oom@update:5:rank=1")
    assert Path("slept").exists() and stopwatch.seconds < 200
    fault_time, restart_time = (next(e["time"] for e in events("short") if e["event"] == kind) for kind in ("injected", "restarted"))
    assert (restart_time - fault_time) * stopwatch.cpu_share < 4, "the other ranks are killed after a second, not after five"
    assert kinds("short") == ["oom", "replanned", "restarted", "finished"], "without a checkpoint, it starts from the beginning"


def test_halving_ends_where_one_sample_does_not_fit(folder: Path) -> None:
    write_task()
    faults = ",".join(f"oom@update:{step}" for step in (2, 2, 3))
    message = expect_error(
        "train", "small.py", "global_batch=4", "steps=8", "--name", "n", "--procs", "1", code=203, DRIVETRAIN_FAULTS=faults
    )
    assert "out of memory at step 3 (" in message and ") with one sample at a time" in message
    assert "Ways out: plan.activation_checkpointing=on, plan.strategy=fsdp, or more GPUs" in message
    assert kinds("n") == ["oom", "replanned", "restarted"] * 2 + ["stopped"]
    assert plan("n")["micro_batch"] == 1


def test_a_model_that_does_not_fit_is_not_restarted(folder: Path) -> None:
    """Smaller micro-batches would not help."""
    write_task(change=("return nn.Sequential", 'raise torch.OutOfMemoryError("CUDA out of memory.")\n        return nn.Sequential'))
    message = expect_error("train", "small.py", "--name", "n", "--procs", "1", code=203, max_lines=3)
    assert "out of memory before the first step: CUDA out of memory." in message
    assert kinds("n") == ["stopped"]
    assert plan("n")["micro_batch"] == 100


@pytest.mark.system  # slow
def test_under_torchrun_the_next_start_uses_the_smaller_plan(folder: Path) -> None:
    write_task()
    words = ("torchrun", "--nproc-per-node", 2, "--master-port", free_port(), "-m", "drivetrain", "train", "small.py", "save_every=8")
    for _ in range(2):  # the fault strikes only at the first start, although both starts request it
        with start(*words, folder=folder, DRIVETRAIN_FAULTS="oom@update:20:rank=1") as torchrun:
            if torchrun.wait() == 0:
                break
            assert "exitcode  : 203" in torchrun.output
            assert (plan("small-001")["micro_batch"], plan("small-001")["accumulation"]) == (25, 2)
            assert plan("small-001")["reasons"]["micro_batch"] == HALF.format(20)
            assert kinds("small-001") == ["oom", "replanned", "stopped"]
    assert kinds("small-001") == ["oom", "replanned", "stopped", "resumed", "finished"]
    assert plan("small-001")["micro_batch"] == 25
    assert [r["step"] for r in rows("runs/small-001")] == list(range(1, 29))


@pytest.mark.parametrize("words", ["oom@step", "oom@forward:3", "kill@start:1,oom"])
def test_an_unknown_fault_is_refused(words: str, folder: Path) -> None:
    write_task()
    assert "FAULT@PHASE:STEP[:micro=M][:rank=R]" in expect_error("train", "small.py", "--procs", "1", DRIVETRAIN_FAULTS=words)


HUGE_TENSOR = "torch.empty(1 << 50, dtype=torch.uint8)"
"""Larger than any host's memory. The CPU allocator raises another error than the GPU's, as do cuBLAS and cuDNN."""


def test_the_hosts_memory_really_runs_out(folder: Path) -> None:
    write_task(
        change=("x, y = batch\n        return F.cross", f"x, y = batch\n        len(x) > 30 and {HUGE_TENSOR}\n        return F.cross")
    )
    run_ok("train", "small.py", "plan.micro_batch=25", "--name", "small")
    output = run_ok("train", "small.py", "plan.micro_batch=100", "--name", "large")
    assert "out of memory" in output
    assert [e["micro_batch"] for e in events("large") if e["event"] == "replanned"] == [50, 25]
    assert rows("runs/large") == rows("runs/small")


def test_the_hosts_memory_really_runs_out_in_an_evaluation(folder: Path) -> None:
    write_task(change=("x, y = batch\n        return {", f"x, y = batch\n        len(x) > 30 and {HUGE_TENSOR}\n        return {{"))
    output = run_ok("train", "small.py", "plan.eval_micro_batch=100", "--name", "large")
    assert "out of memory" in output
    assert kinds("large")[-1] == "finished"
