"""A process that dies or hangs is restarted, and the run gives the same result as an uninterrupted one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from drivetrain.engine.log.observe import Observers
from drivetrain.processes.procfs import process_state
from drivetrain.runs import Run
from drivetrain.supervise import RestartPolicy
from drivetrain.supervise.hang_detector import UNKNOWN_LIMIT_SECONDS, HangDetector, WatchedRank
from drivetrain.supervise.stacks import parse_stack
from drivetrain.supervise.verdicts import find_hang
from drivetrain.watch.heartbeat import PHASE_INDEX, HeartbeatReader, HeartbeatWriter, WorkerHeartbeat, open_heartbeat_page
from tests.command import COMMAND, environment, run_drivetrain, run_ok, write_task
from tests.killing import processes_of_run
from tests.sample_tasks import rows, weights
from tests.waiting import Stopwatch, wait_until

TORCH = Path(torch.__file__).parent
WORDS = ["train", "small.py", "epochs=4", "save_every=9", "clip=1", "--procs", "2", "--hang-after", "2s"]


def events(name: str, kind: str) -> list[dict[str, Any]]:
    return [event for event in Run(f"runs/{name}").events() if event["event"] == kind]


def test_dead_and_hung_processes_change_nothing(folder: Path) -> None:
    write_task()
    run_ok(*WORDS, "--name", "uninterrupted")
    faults = "die@step:12:rank=1,hang@step:20:rank=0,torn@step:30:rank=0,stop@step:36:rank=1,die@update:50:rank=0,slow@step:53:rank=1"
    output = run_ok(*WORDS, "--name", "interrupted", DRIVETRAIN_FAULTS=faults)
    assert rows("runs/interrupted") == rows("runs/uninterrupted") and weights("runs/interrupted") == weights("runs/uninterrupted")
    assert [event["why"] for event in events("interrupted", "restarted")] == ["infra", "hang", "infra", "hang", "infra"]
    assert [event["ranks"] for event in events("interrupted", "hang")] == [[0], [1]]
    assert "restart worker 1 was killed by SIGKILL; restarting from step 9" in output
    assert "rank 1 waits in all_reduce" in output and "rank 1 is stopped (state T)" in output
    assert "is damaged and not used" in output, "the damaged checkpoint"
    assert not processes_of_run("interrupted")
    assert not list(Path("runs/interrupted/checkpoints").glob(".*"))


def test_a_run_without_progress_is_given_up(folder: Path) -> None:
    dies = ("return F.cross", "import os; os.kill(os.getpid(), 9) if model.training and y[0] >= 0 else None\n        return F.cross")
    write_task(change=dies)
    process = run_drivetrain("train", "small.py", "--name", "no-progress", "--restarts", "2")
    assert process.returncode == 201, process.stderr
    assert len(events("no-progress", "restarted")) == 2
    assert "2 restarts brought no new checkpoint" in process.stdout and "drivetrain resume no-progress" in process.stderr


def test_a_killed_command_leaves_no_process(folder: Path) -> None:
    write_task(change=("return F.cross", "import time; time.sleep(0.05)\n        return F.cross"))
    command = subprocess.Popen([*COMMAND, *WORDS, "--name", "killed", "-q"], env=environment())
    wait_until(Path("runs/killed/metrics.jsonl").exists, "steps", process=command)
    children = psutil.Process(command.pid).children(recursive=True)
    assert len(children) >= 3, "the fork server and two workers"
    os.kill(command.pid, signal.SIGKILL)
    command.wait()
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive


CHILDREN = {"child": "", "group": ", process_group=0", "session": ", start_new_session=True"}


@pytest.mark.parametrize("victim", ["command", "worker"])
def test_processes_that_a_task_started_end_with_it(victim: str, folder: Path) -> None:
    """Except those with a session of their own."""
    starts = "".join(
        f"open('{name}', 'w').write(str(subprocess.Popen(['sleep', '1000']{options}).pid))\n                "
        for name, options in CHILDREN.items()
    )
    first = f"import os, subprocess, time; time.sleep(0.05)\n        if os.environ['RANK'] == '1' and not os.path.exists('all'):\n                {starts}open('all', 'w')\n        "
    write_task(change=("return F.cross", first + "return F.cross"))
    command = subprocess.Popen(
        [*COMMAND, *WORDS, "--restarts", "0", "--name", "parent", "-q"], env=environment(), stderr=subprocess.DEVNULL
    )
    wait_until(Path("all").exists, "children", process=command)
    children = {name: psutil.Process(int(Path(name).read_text())) for name in CHILDREN}
    try:
        os.kill(command.pid if victim == "command" else children["child"].ppid(), signal.SIGKILL)
        command.wait()
        _, alive = psutil.wait_procs([children["child"], children["group"]], timeout=10)
        assert not alive
        assert children["session"].is_running()
    finally:
        for child in children.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    wait_until(lambda: not processes_of_run("parent"), "the end of all workers", 20)


def test_a_time_limit_leaves_a_run_that_can_be_resumed(folder: Path) -> None:
    write_task(change=("return F.cross", "import time; time.sleep(0.02)\n        return F.cross"))
    stopwatch = Stopwatch()
    process = run_drivetrain("train", "small.py", "epochs=1000", "plan.compile=off", "--time-limit", "12s", "--name", "limited")
    assert process.returncode == 200 and stopwatch.seconds < 30, process.stderr
    saved = Run("runs/limited").checkpoint_steps()
    assert saved and f"after step {saved[-1]:,}, saved" in process.stdout
    assert "write a time" in run_drivetrain("train", "small.py", "--time-limit", "12").stderr


def test_a_heartbeat_costs_less_than_50_microseconds_a_step() -> None:
    page = open_heartbeat_page()
    reader, writer = HeartbeatReader(page), HeartbeatWriter(page)
    assert HeartbeatWriter.reached is not None and Observers([writer]).watches
    start = time.perf_counter()
    for _ in range(10_000):
        for name in ("step", "take", "backward", "update"):
            writer.reached(name)
    cost = (time.perf_counter() - start) / 10_000
    assert cost < 50e-6, f"{1e6 * cost:.1f} us a step"
    assert reader.read().step == 10_000 and reader.read().phase == PHASE_INDEX["update"]


def test_a_hang_in_the_second_step_is_found(folder: Path) -> None:
    write_task()
    faults = "hang@step:2:rank=1,stop@step:3:rank=0"
    output = run_ok(*WORDS, "--name", "early", DRIVETRAIN_FAULTS=faults)
    reasons = [event["why"] for event in events("early", "restarted")]
    assert "rank 1 hangs in step 2" in output and "rank 0 is stopped (state T) in step 3" in output, output
    assert reasons == ["hang", "hang"]


@pytest.mark.system
def test_a_hang_in_the_first_step_of_a_later_start_is_found(folder: Path) -> None:
    """The duration of earlier first steps is known to the same command and to a resume."""
    write_task()
    assert run_drivetrain(*WORDS, "--name", "again", DRIVETRAIN_FAULTS="preempt@step:12:rank=0").returncode == 200
    step, stopwatch = Run("runs/again").last_checkpoint_step + 1, Stopwatch()
    output = run_ok("resume", "again", "--hang-after", "2s", DRIVETRAIN_FAULTS=f"hang@step:{step}:rank=1")
    assert f"rank 1 hangs in step {step}" in output, output
    assert stopwatch.seconds < 120, "not after an hour, the limit for an unknown phase, nor after the ten minutes of a collective"


def test_a_stopped_process_is_not_woken_before_its_limit(tmp_path: Path) -> None:
    """To ask for its stack, the supervisor must let it run for a moment, which would look like progress."""
    sleepers = [subprocess.Popen(["sleep", "100"]) for _ in range(2)]
    try:
        sleepers[0].send_signal(signal.SIGSTOP)
        wait_until(lambda: process_state(sleepers[0].pid) == "T", "a stopped process")
        hang_detector, now = HangDetector(min_limit=10), time.monotonic()
        heartbeats = [WorkerHeartbeat(3, PHASE_INDEX["step"], now - ago, 0.1) for ago in (9.5, 10.5)]
        ranks = [
            WatchedRank(i, p.pid, b, tmp_path / "stacks", lambda b=b: b) for i, (p, b) in enumerate(zip(sleepers, heartbeats, strict=True))
        ]  # type: ignore[misc]
        assert hang_detector.check(ranks) is None and process_state(sleepers[0].pid) == "T"
        verdict = wait_until(lambda: find_hang(hang_detector.check(ranks) or [], all_ranks=True), "a verdict")
        assert verdict.ranks == [0] and "rank 0 is stopped (state T) in step 3" in verdict.message
    finally:
        for sleeper in sleepers:
            sleeper.kill()
            sleeper.wait()


def test_a_heartbeat_is_never_read_half_written() -> None:
    page = open_heartbeat_page()
    reader, writer = HeartbeatReader(page), HeartbeatWriter(page)
    start = time.monotonic()
    child = os.fork()
    while child == 0:
        writer.reached("take")
    try:
        time.sleep(0.05)
        heartbeats = [reader.read() for _ in range(100_000)]
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert len({seen.since for seen in heartbeats}) > 10 and all(seen.since >= start - 1 for seen in heartbeats)


def test_hang_limits_follow_from_measured_durations() -> None:
    hang_detector = HangDetector(min_limit=30)
    assert hang_detector.limit(WorkerHeartbeat(1, PHASE_INDEX["take"], 0.0, 0.0)) == UNKNOWN_LIMIT_SECONDS, "no duration is known yet"
    assert hang_detector.limit(WorkerHeartbeat(5, PHASE_INDEX["take"], 0.0, 0.1)) == 30
    assert hang_detector.limit(WorkerHeartbeat(5, PHASE_INDEX["take"], 0.0, 9.0)) == 90
    next_start = HangDetector(30, first_step={"take": 1.0, "fetched": 20.0})
    assert (
        next_start.limit(WorkerHeartbeat(1, PHASE_INDEX["take"], 0.0, 0.0)) == 120
        and next_start.limit(WorkerHeartbeat(1, PHASE_INDEX["fetched"], 0.0, 0.0)) == 200
    )
    assert next_start.limit(WorkerHeartbeat(1, PHASE_INDEX["compile"], 0.0, 0.0)) == UNKNOWN_LIMIT_SECONDS, (
        "the next compilation may take longer"
    )
    assert next_start.limit(WorkerHeartbeat(2, PHASE_INDEX["take"], 0.0, 0.1)) == 30


def test_the_duration_of_the_first_step_counts_only_until_the_second() -> None:
    page = open_heartbeat_page()
    reader, writer = HeartbeatReader(page), HeartbeatWriter(page)
    for name in ("start", "step", "take"):
        writer.reached(name)
    assert reader.first_step_seconds() == {}
    time.sleep(0.05)  # as if the first step compiled
    for name in ("backward", "update", "step", "take"):
        writer.reached(name)
    assert reader.read().longest > 0.04, "only the first step is known"
    assert (
        reader.first_step_seconds().keys() == {"step", "take", "backward", "update"} and 0.04 < reader.first_step_seconds()["take"] < 1
    ), "the next start will know them"
    for name in ("backward", "update", "step", "take"):
        writer.reached(name)
    assert 0 < reader.read().longest < 0.04


@pytest.mark.system  # takes a minute
@pytest.mark.timeout(1200)
def test_slow_phases_are_no_hang(folder: Path) -> None:
    """The start, the evaluation, the save and the compilation each take longer than the minimum hang limit."""
    slow = {
        "return nn.Sequential(": "import time; time.sleep(4)\n        return nn.Sequential(",
        'return {"accuracy"': 'import time; time.sleep(3)\n        return {"accuracy"',
    }
    file = write_task()
    for old, new in slow.items():
        file.write_text(file.read_text().replace(old, new))
    faults = ",".join(["slow@save:5"] * 4)  # four faults at one save: the writer sleeps four seconds
    words = ["train", "small.py", "epochs=2", "save_every=5", "eval_every=14", "plan.compile=on", "--procs", "2", "--hang-after", "2s"]
    run_ok(*words, "--name", "slow", DRIVETRAIN_FAULTS=faults)
    assert not events("slow", "hang") and not events("slow", "restarted")


def test_pauses_between_restarts_grow() -> None:
    assert [RestartPolicy(9).pause_seconds(n) for n in range(1, 9)] == [0, 0.5, 1, 2, 4, 8, 16, 30]


def test_stacks_are_parsed() -> None:
    text = (
        'Thread 0x1 (most recent call first):\n  File "/usr/lib/python3.11/threading.py", line 324 in wait\n\n'
        f'Current thread 0x2 (most recent call first):\n  File "{TORCH}/distributed/distributed_c10d.py", line 9 in all_reduce\n'
        '  File "/home/me/task.py", line 12 in loss\n'
    )
    stack = parse_stack(text)
    assert stack.is_waiting and stack.operation == "all_reduce" and str(stack.users_line) == "task.py:12 in loss"
    assert not parse_stack("").frames and parse_stack("").text == "no answer"


@pytest.mark.parametrize("procs", [pytest.param(1, marks=pytest.mark.system), 2])
def test_sigusr1_stops_a_run_that_resumes_exactly(procs: int, folder: Path) -> None:
    write_task(change=("return F.cross", "import time; time.sleep(0.05 * model.training)\n        return F.cross"))
    # Evaluated at the end only, because a stop within an evaluation leaves no row of that step.
    words = ["train", "small.py", "epochs=4", "eval_every=56", "plan.compile=off", "--procs", str(procs)]
    run_ok(*words, "--name", "uninterrupted")
    command = subprocess.Popen([*COMMAND, *words, "--name", "stopped"], env=environment(), stdout=subprocess.PIPE, text=True)
    wait_until(lambda: Path("runs/stopped/metrics.jsonl").exists() and len(rows("runs/stopped")) > 5, "steps", process=command)
    command.send_signal(signal.SIGUSR1)
    output, _ = command.communicate(timeout=240)
    step = Run("runs/stopped").checkpoint_steps()[-1]
    assert command.returncode == 200 and f"after step {step:,}, saved; continue with: drivetrain resume stopped" in output, output
    assert json.loads(Path("runs/stopped/run.json").read_text())["outcome"] == "preempted" and 5 < step < 56
    assert rows("runs/stopped")[-1]["step"] == step
    run_ok("resume", "stopped")
    assert rows("runs/stopped") == rows("runs/uninterrupted") and weights("runs/stopped") == weights("runs/uninterrupted")


def test_a_stop_in_the_pause_before_a_restart_ends_as_preempted(folder: Path) -> None:
    write_task(change=("return F.cross", "import os; os._exit(0)\n        return F.cross"))
    command = subprocess.Popen(
        [*COMMAND, "train", "small.py", "--restarts", "9", "--name", "dying"], stdout=subprocess.PIPE, text=True, env=environment()
    )
    assert command.stdout is not None
    restart_lines = (line for line in command.stdout if line.startswith("restart "))
    for _ in range(3):
        next(restart_lines)
    time.sleep(1.5)  # the worker dies at once, and the pause before the next restart takes two seconds
    command.terminate()
    assert command.wait(60) == 200
    assert json.loads(Path("runs/dying/run.json").read_text())["outcome"] == "preempted"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_has_not_begun_its_first_step_stops_at_once(number: int, folder: Path) -> None:
    """While torch is still being imported, or while the task loads its data for an hour."""
    loads = "import os, time; open('loading', 'w'); time.sleep(float(os.environ.get('SLEEP', 0)))"
    write_task(change=("def train_data(self):", f"def train_data(self):\n        {loads}"))
    for seconds, sign in (("0", "runs/early/logs/rank-0.log"), ("3600", "loading")):
        command = subprocess.Popen([*COMMAND, *WORDS, "--name", "early"], env=environment(SLEEP=seconds), stdout=subprocess.PIPE, text=True)
        wait_until(Path(sign).exists, sign, process=command)
        stopwatch = Stopwatch()
        command.send_signal(number)
        output, _ = command.communicate(timeout=240)
        assert stopwatch.seconds < 10, f"{stopwatch.seconds:.1f} s"
        assert command.returncode == (200 if number == signal.SIGTERM else 130), output
        assert "before its first step; continue with: drivetrain resume early" in output
        assert json.loads(Path("runs/early/run.json").read_text())["outcome"] == "preempted" and not processes_of_run("early")
    assert "done    56 steps" in run_ok(*WORDS, "--name", "early")


def test_a_time_limit_stops_a_task_that_still_loads(folder: Path) -> None:
    write_task(change=("def train_data(self):", "def train_data(self):\n        import time; time.sleep(3600)"))
    stopwatch = Stopwatch()
    process = run_drivetrain(*WORDS, "--name", "early", "--time-limit", "3s")
    assert process.returncode == 200, process.stdout + process.stderr
    assert stopwatch.seconds < 20
    assert "before its first step; continue with: drivetrain resume early" in process.stdout


@pytest.mark.parametrize("procs", [pytest.param(1, marks=pytest.mark.system), 2])
def test_a_stop_interrupts_a_long_evaluation(procs: int, folder: Path) -> None:
    """The training is saved at once; the resumed run repeats the evaluation, and the results are the same."""
    write_task(change=("return {", "import os, time; time.sleep(float(os.environ.get('SLEEP', 0)))\n        return {"))
    words = ["train", "small.py", "best=accuracy", "plan.micro_batch=5", "--procs", str(procs)]
    run_ok(*words, "--name", "uninterrupted")
    faults = "preempt@evaluation:14,preempt@evaluation:28"
    for evaluation_sleep, code in (("1", 200), ("0", 200), ("0", 0)):
        process = run_drivetrain(*words, "--name", "interrupted", DRIVETRAIN_FAULTS=faults, SLEEP=evaluation_sleep)
        assert process.returncode == code, process.stdout + process.stderr
    assert len(events("interrupted", "injected")) == 2
    seconds_to_stop = events("interrupted", "stopped")[0]["time"] - events("interrupted", "injected")[0]["time"]
    assert seconds_to_stop < 20, f"{seconds_to_stop:.1f} s; the evaluation takes {90 / procs:.0f} s"
    assert rows("runs/interrupted") == rows("runs/uninterrupted") and weights("runs/interrupted") == weights("runs/uninterrupted")
    assert [row["step"] for row in rows("runs/interrupted") if "eval/accuracy" in row] == [14, 28]


def test_half_written_files_of_a_killed_command_are_removed(folder: Path) -> None:
    write_task()
    run_ok(*WORDS, "steps=9", "--name", "swept")
    dead_process = subprocess.Popen(["true"])
    dead_process.wait()
    host = socket.gethostname()
    half_written = [
        Path(f"runs/swept/.run.json-{host}-{dead_process.pid}-x1"),
        Path(f"runs/swept/logs/.first-{host}.json-{host}-{dead_process.pid}-x2"),
    ]
    of_live_processes = [
        Path(f"runs/swept/.run.json-{host}-{os.getpid()}-x3"),
        Path("runs/swept/.run.json-elsewhere-1-x4"),
    ]  # may still be written
    for file in half_written + of_live_processes:
        file.write_text("{")
    run_ok("resume", "swept", "steps=12")
    assert not any(file.exists() for file in half_written) and all(file.exists() for file in of_live_processes)
