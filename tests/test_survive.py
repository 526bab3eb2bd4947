"""A process that dies or hangs is started anew, and the run comes out as if nothing had been."""

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
from tests.command import COMMAND, drivetrain, environment, good, write_task
from tests.killing import left_over
from tests.patience import Stopwatch, until
from tests.samples import rows, weights

TORCH = Path(torch.__file__).parent
WORDS = ["train", "small.py", "epochs=4", "save_every=9", "clip=1", "--procs", "2", "--hang-after", "2s"]


def events(name: str, kind: str) -> list[dict[str, Any]]:
    return [event for event in Run(f"runs/{name}").events() if event["event"] == kind]


def test_dead_and_hung_processes_change_nothing(folder: Path) -> None:
    write_task()
    good(*WORDS, "--name", "whole")
    faults = "die@step:12:rank=1,hang@step:20:rank=0,torn@step:30:rank=0,stop@step:36:rank=1,die@update:50:rank=0,slow@step:53:rank=1"
    output = good(*WORDS, "--name", "broken", DRIVETRAIN_FAULTS=faults)
    assert rows("runs/broken") == rows("runs/whole") and weights("runs/broken") == weights("runs/whole")
    assert [event["why"] for event in events("broken", "restarted")] == ["infra", "hang", "infra", "hang", "infra"]
    assert [event["ranks"] for event in events("broken", "hang")] == [[0], [1]]
    assert "restart worker 1 was killed by SIGKILL; restarting from step 9" in output
    assert "rank 1 waits in all_reduce" in output and "rank 1 is stopped (state T)" in output
    assert "is damaged and not used" in output, "the torn checkpoint"
    assert not left_over("broken")
    assert not list(Path("runs/broken/checkpoints").glob(".*"))


def test_what_never_gets_further_is_given_up(folder: Path) -> None:
    dies = ("return F.cross", "import os; os.kill(os.getpid(), 9) if model.training and y[0] >= 0 else None\n        return F.cross")
    write_task(change=dies)
    done = drivetrain("train", "small.py", "--name", "hopeless", "--restarts", "2")
    assert done.returncode == 201, done.stderr
    assert len(events("hopeless", "restarted")) == 2
    assert "2 restarts brought no new checkpoint" in done.stdout and "drivetrain resume hopeless" in done.stderr


def test_nothing_is_left_of_a_front_end_that_is_killed(folder: Path) -> None:
    write_task(change=("return F.cross", "import time; time.sleep(0.05)\n        return F.cross"))
    front = subprocess.Popen([*COMMAND, *WORDS, "--name", "killed", "-q"], env=environment())
    until(Path("runs/killed/metrics.jsonl").exists, "steps", of=front)
    family = psutil.Process(front.pid).children(recursive=True)
    assert len(family) >= 3, "where workers come from, and two of them"
    os.kill(front.pid, signal.SIGKILL)
    front.wait()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive


CHILDREN = {"child": "", "group": ", process_group=0", "session": ", start_new_session=True"}


@pytest.mark.parametrize("victim", ["command", "worker"])
def test_what_a_task_started_ends_with_it(victim: str, folder: Path) -> None:
    """Unless it was given a session of its own."""
    starts = "".join(
        f"open('{name}', 'w').write(str(subprocess.Popen(['sleep', '1000']{options}).pid))\n                "
        for name, options in CHILDREN.items()
    )
    first = f"import os, subprocess, time; time.sleep(0.05)\n        if os.environ['RANK'] == '1' and not os.path.exists('all'):\n                {starts}open('all', 'w')\n        "
    write_task(change=("return F.cross", first + "return F.cross"))
    front = subprocess.Popen([*COMMAND, *WORDS, "--restarts", "0", "--name", "parent", "-q"], env=environment(), stderr=subprocess.DEVNULL)
    until(Path("all").exists, "children", of=front)
    children = {name: psutil.Process(int(Path(name).read_text())) for name in CHILDREN}
    try:
        os.kill(front.pid if victim == "command" else children["child"].ppid(), signal.SIGKILL)
        front.wait()
        _, alive = psutil.wait_procs([children["child"], children["group"]], timeout=10)
        assert not alive
        assert children["session"].is_running()
    finally:
        for child in children.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    until(lambda: not left_over("parent"), "the end of all workers", 20)


def test_a_time_limit_leaves_a_run_that_can_go_on(folder: Path) -> None:
    write_task(change=("return F.cross", "import time; time.sleep(0.02)\n        return F.cross"))
    watch = Stopwatch()
    done = drivetrain("train", "small.py", "epochs=1000", "plan.compile=off", "--time-limit", "12s", "--name", "limited")
    assert done.returncode == 200 and watch.seconds < 30, done.stderr
    saved = Run("runs/limited").checkpoint_steps()
    assert saved and f"after step {saved[-1]:,}, saved" in done.stdout
    assert "write a time" in drivetrain("train", "small.py", "--time-limit", "12").stderr


def test_a_heartbeat_costs_less_than_50_microseconds_a_step() -> None:
    page = open_heartbeat_page()
    reader, writer = HeartbeatReader(page), HeartbeatWriter(page)
    assert HeartbeatWriter.reached is not None and Observers([writer]).watches
    begun = time.perf_counter()
    for _ in range(10_000):
        for name in ("step", "take", "backward", "update"):
            writer.reached(name)
    cost = (time.perf_counter() - begun) / 10_000
    assert cost < 50e-6, f"{1e6 * cost:.1f} us a step"
    assert reader.read().step == 10_000 and reader.read().phase == PHASE_INDEX["update"]


def test_a_hang_in_the_second_step_is_found(folder: Path) -> None:
    write_task()
    faults = "hang@step:2:rank=1,stop@step:3:rank=0"
    output = good(*WORDS, "--name", "early", DRIVETRAIN_FAULTS=faults)
    found = [event["why"] for event in events("early", "restarted")]
    assert "rank 1 hangs in step 2" in output and "rank 0 is stopped (state T) in step 3" in output, output
    assert found == ["hang", "hang"]


def test_a_hang_in_the_first_step_of_a_later_start_is_found(folder: Path) -> None:
    """What first steps took before is known then, to the same command and to the next."""
    write_task()
    assert drivetrain(*WORDS, "--name", "again", DRIVETRAIN_FAULTS="preempt@step:12:rank=0").returncode == 200
    step, watch = Run("runs/again").last_checkpoint_step + 1, Stopwatch()
    output = good("resume", "again", "--hang-after", "2s", DRIVETRAIN_FAULTS=f"hang@step:{step}:rank=1")
    assert f"rank 1 hangs in step {step}" in output, output
    assert watch.seconds < 120, "not the hour of what is unknown, nor the ten minutes of a collective"


def test_who_is_stopped_is_not_asked_before_its_time(tmp_path: Path) -> None:
    """To be asked it must go on for a moment: that would be another step, if it were not settled yet that it hangs."""
    sleepers = [subprocess.Popen(["sleep", "100"]) for _ in range(2)]
    try:
        sleepers[0].send_signal(signal.SIGSTOP)
        until(lambda: process_state(sleepers[0].pid) == "T", "a stopped process")
        hang_detector, now = HangDetector(min_limit=10), time.monotonic()
        heartbeats = [WorkerHeartbeat(3, PHASE_INDEX["step"], now - ago, 0.1) for ago in (9.5, 10.5)]
        ranks = [
            WatchedRank(i, p.pid, b, tmp_path / "stacks", lambda b=b: b) for i, (p, b) in enumerate(zip(sleepers, heartbeats, strict=True))
        ]  # type: ignore[misc]
        assert hang_detector.check(ranks) is None and process_state(sleepers[0].pid) == "T"
        verdict = until(lambda: find_hang(hang_detector.check(ranks) or [], all_ranks=True), "a verdict")
        assert verdict.ranks == [0] and "rank 0 is stopped (state T) in step 3" in verdict.message
    finally:
        for sleeper in sleepers:
            sleeper.kill()
            sleeper.wait()


def test_a_heartbeat_is_never_read_half_written() -> None:
    page = open_heartbeat_page()
    reader, writer = HeartbeatReader(page), HeartbeatWriter(page)
    begun = time.monotonic()
    child = os.fork()
    while child == 0:
        writer.reached("take")
    try:
        time.sleep(0.05)
        heartbeats = [reader.read() for _ in range(100_000)]
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert len({seen.since for seen in heartbeats}) > 10 and all(seen.since >= begun - 1 for seen in heartbeats)


def test_limits_are_learnt() -> None:
    hang_detector = HangDetector(min_limit=30)
    assert hang_detector.limit(WorkerHeartbeat(1, PHASE_INDEX["take"], 0.0, 0.0)) == UNKNOWN_LIMIT_SECONDS, "what was not seen yet"
    assert hang_detector.limit(WorkerHeartbeat(5, PHASE_INDEX["take"], 0.0, 0.1)) == 30
    assert hang_detector.limit(WorkerHeartbeat(5, PHASE_INDEX["take"], 0.0, 9.0)) == 90
    again = HangDetector(30, first_step={"take": 1.0, "fetched": 20.0})
    assert (
        again.limit(WorkerHeartbeat(1, PHASE_INDEX["take"], 0.0, 0.0)) == 120
        and again.limit(WorkerHeartbeat(1, PHASE_INDEX["fetched"], 0.0, 0.0)) == 200
    )
    assert again.limit(WorkerHeartbeat(1, PHASE_INDEX["compile"], 0.0, 0.0)) == UNKNOWN_LIMIT_SECONDS, "a compiler may have to begin anew"
    assert again.limit(WorkerHeartbeat(2, PHASE_INDEX["take"], 0.0, 0.1)) == 30


def test_the_first_step_is_no_measure() -> None:
    page = open_heartbeat_page()
    reader, writer = HeartbeatReader(page), HeartbeatWriter(page)
    for name in ("start", "step", "take"):
        writer.reached(name)
    assert reader.first_step_seconds() == {}
    time.sleep(0.05)  # compiles
    for name in ("backward", "update", "step", "take"):
        writer.reached(name)
    assert reader.read().longest > 0.04, "all that is known of what comes"
    assert (
        reader.first_step_seconds().keys() == {"step", "take", "backward", "update"} and 0.04 < reader.first_step_seconds()["take"] < 1
    ), "for the next start to know"
    for name in ("backward", "update", "step", "take"):
        writer.reached(name)
    assert 0 < reader.read().longest < 0.04


@pytest.mark.system  # a minute, most of it the compiler's
@pytest.mark.timeout(1200)
def test_what_takes_its_time_is_no_hang(folder: Path) -> None:
    """A slow start, a slow evaluation, a slow save and a slow compiler: each longer than the shortest hang."""
    slow = {
        "return nn.Sequential(": "import time; time.sleep(4)\n        return nn.Sequential(",
        'return {"accuracy"': 'import time; time.sleep(3)\n        return {"accuracy"',
    }
    file = write_task()
    for old, new in slow.items():
        file.write_text(file.read_text().replace(old, new))
    faults = ",".join(["slow@save:5"] * 4)  # all at once: the writer sleeps four seconds
    words = ["train", "small.py", "epochs=2", "save_every=5", "eval_every=14", "plan.compile=on", "--procs", "2", "--hang-after", "2s"]
    good(*words, "--name", "slow", DRIVETRAIN_FAULTS=faults)
    assert not events("slow", "hang") and not events("slow", "restarted")


def test_pauses_grow() -> None:
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
def test_sigusr1_leaves_a_run_that_goes_on_exactly(procs: int, folder: Path) -> None:
    write_task(change=("return F.cross", "import time; time.sleep(0.05 * model.training)\n        return F.cross"))
    words = ["train", "small.py", "epochs=4", "plan.compile=off", "--procs", str(procs)]
    good(*words, "--name", "whole")
    front = subprocess.Popen([*COMMAND, *words, "--name", "asked"], env=environment(), stdout=subprocess.PIPE, text=True)
    until(lambda: Path("runs/asked/metrics.jsonl").exists() and len(rows("runs/asked")) > 5, "steps", of=front)
    front.send_signal(signal.SIGUSR1)
    output, _ = front.communicate(timeout=240)
    step = Run("runs/asked").checkpoint_steps()[-1]
    assert front.returncode == 200 and f"after step {step:,}, saved; continue with: drivetrain resume asked" in output, output
    assert json.loads(Path("runs/asked/run.json").read_text())["outcome"] == "preempted" and 5 < step < 56
    assert rows("runs/asked")[-1]["step"] == step
    good("resume", "asked")
    assert rows("runs/asked") == rows("runs/whole") and weights("runs/asked") == weights("runs/whole")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_has_not_begun_its_first_step_stops_at_once(number: int, folder: Path) -> None:
    """While torch is still being imported, or the task loads for an hour."""
    loads = "import os, time; open('loading', 'w'); time.sleep(float(os.environ.get('SLEEP', 0)))"
    write_task(change=("def train_data(self):", f"def train_data(self):\n        {loads}"))
    for seconds, sign in (("0", "runs/early/logs/rank-0.log"), ("3600", "loading")):
        front = subprocess.Popen([*COMMAND, *WORDS, "--name", "early"], env=environment(SLEEP=seconds), stdout=subprocess.PIPE, text=True)
        until(Path(sign).exists, sign, of=front)
        watch = Stopwatch()
        front.send_signal(number)
        output, _ = front.communicate(timeout=240)
        assert watch.seconds < 10, f"{watch.seconds:.1f} s"
        assert front.returncode == (200 if number == signal.SIGTERM else 130), output
        assert "before its first step; continue with: drivetrain resume early" in output
        assert json.loads(Path("runs/early/run.json").read_text())["outcome"] == "preempted" and not left_over("early")
    assert "done    56 steps" in good(*WORDS, "--name", "early")


def test_time_is_up_while_the_task_still_loads(folder: Path) -> None:
    write_task(change=("def train_data(self):", "def train_data(self):\n        import time; time.sleep(3600)"))
    watch = Stopwatch()
    done = drivetrain(*WORDS, "--name", "early", "--time-limit", "3s")
    assert done.returncode == 200, done.stdout + done.stderr
    assert watch.seconds < 20
    assert "before its first step; continue with: drivetrain resume early" in done.stdout


@pytest.mark.parametrize("procs", [pytest.param(1, marks=pytest.mark.system), 2])
def test_a_long_evaluation_is_left_when_asked_to_stop(procs: int, folder: Path) -> None:
    """What was trained is saved at once; the evaluation is done when the run goes on, and all comes out the same."""
    write_task(change=("return {", "import os, time; time.sleep(float(os.environ.get('SLEEP', 0)))\n        return {"))
    words = ["train", "small.py", "best=accuracy", "plan.micro_batch=5", "--procs", str(procs)]
    good(*words, "--name", "whole")
    faults = "preempt@evaluation:14,preempt@evaluation:28"
    for seconds, code in (("1", 200), ("0", 200), ("0", 0)):
        done = drivetrain(*words, "--name", "left", DRIVETRAIN_FAULTS=faults, SLEEP=seconds)
        assert done.returncode == code, done.stdout + done.stderr
    assert len(events("left", "injected")) == 2
    took = events("left", "stopped")[0]["time"] - events("left", "injected")[0]["time"]
    assert took < 20, f"{took:.1f} s; the evaluation takes {90 / procs:.0f} s"
    assert rows("runs/left") == rows("runs/whole") and weights("runs/left") == weights("runs/whole")
    assert [row["step"] for row in rows("runs/left") if "eval/accuracy" in row] == [14, 28]


def test_what_a_killed_front_end_was_writing_is_swept_away(folder: Path) -> None:
    write_task()
    good(*WORDS, "steps=9", "--name", "swept")
    gone = subprocess.Popen(["true"])
    gone.wait()
    host = socket.gethostname()
    half = [Path(f"runs/swept/.run.json-{host}-{gone.pid}-x1"), Path(f"runs/swept/logs/.first-{host}.json-{host}-{gone.pid}-x2")]
    others = [Path(f"runs/swept/.run.json-{host}-{os.getpid()}-x3"), Path("runs/swept/.run.json-elsewhere-1-x4")]  # being written
    for file in half + others:
        file.write_text("{")
    good("resume", "swept", "steps=12")
    assert not any(file.exists() for file in half) and all(file.exists() for file in others)
