"""A process that ends without a result is named, all workers restart, and no process or file is left behind."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from drivetrain.engine.state import checkpoint
from drivetrain.engine.state.checkpoint import CheckpointWriter
from drivetrain.outcomes import Outcome
from drivetrain.plan import Plan
from drivetrain.processes import forkserver
from drivetrain.processes.job import TrainJob
from drivetrain.runs import Run
from drivetrain.supervise import RestartPolicy, Supervisor, WorkerPlacement, local_placement, supervised, usage
from drivetrain.supervise.attempt import Attempt
from drivetrain.supervise.ending import JobEnd, Worker
from drivetrain.supervise.fork_server import ForkServer, WorkerProcess
from drivetrain.supervise.hang_detector import HangDetector, WatchedRank
from drivetrain.supervise.restarts import RestartCount
from drivetrain.supervise.scratch import Scratch, sweep
from drivetrain.supervise.verdicts import LocalVerdicts, find_hang
from drivetrain.task_ref import find_task
from drivetrain.watch.heartbeat import PHASE_INDEX, HeartbeatReader, HeartbeatWriter, WorkerHeartbeat, open_heartbeat_page
from drivetrain.watch.screen import Screen
from tests.command import run_ok
from tests.sample_tasks import rows, weights
from tests.waiting import wait_until

TASK = """\
import os, sys, torch
from torch import nn
from torch.nn import functional as F
from drivetrain import Task, Tensors

SAMPLES = {16: lambda: os._exit(0), 48: lambda: os.kill(os.getpid(), 9), 80: lambda: os.kill(os.getpid(), 11)}
NO_FAULT = 9
FAULT = sum(os.path.exists(f"fault {number}") for number in range(4)) if os.environ.get("FAULTS") else NO_FAULT  # a different fault at each start


def strikes(number):
    if number == FAULT:
        open(f"fault {number}", "w").close()
    return number == FAULT


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, i):
        if i in SAMPLES and strikes(list(SAMPLES).index(i)):
            SAMPLES[i]()
        return torch.randn(4) + i / 96, i % 2


class Dying(Task):
    epochs: int = 5
    global_batch: int = 8
    log_every: int = 1
    save_every: int = 3

    def model(self):
        return nn.Linear(4, 2)

    def train_data(self):
        return Rows()

    def eval_data(self):
        return Tensors(torch.ones(16, 4), torch.arange(16) % 2)

    def loss(self, model, batch):
        if os.environ["RANK"] == "1" and strikes(3):
            os._exit(0)
        return F.cross_entropy(model(batch[0]), batch[1])
"""


def test_processes_that_end_without_a_result_are_restarted(folder: Path) -> None:
    """Loader workers exit, are killed or crash, and a rank exits with code 0."""
    Path("dying.py").write_text(TASK)
    words = ["train", "dying.py", "plan.workers=2", "--procs", "2", "--restarts", "9"]
    folders_before = set(Path(tempfile.gettempdir()).glob("pymp-*"))
    run_ok(*words, "--name", "uninterrupted")
    output = run_ok(*words, "--name", "restarted", FAULTS="1")
    assert rows("runs/restarted") == rows("runs/uninterrupted") and weights("runs/restarted") == weights("runs/uninterrupted")
    restart_lines = [line for line in output.splitlines() if line.startswith("restart ")]
    assert len(restart_lines) == 4 and "Traceback" not in output, output
    for ending, sample in (("ended with code 0", 16), ("was killed by SIGKILL", 48), ("was killed by SIGSEGV", 80)):
        [line] = [line for line in restart_lines if f"{ending} while it read sample {sample} of the data set; restarting from" in line]
        assert line.startswith("restart loader worker ") and " of rank " in line
    assert any(line.startswith("restart worker 1 ended with code 0 and without a result; restarting") for line in restart_lines)
    info = json.loads(Path("runs/restarted/run.json").read_text())
    assert (info["status"], info["outcome"]) == ("finished", "ok")
    new_folders = {path for path in set(Path(tempfile.gettempdir()).glob("pymp-*")) - folders_before if any(path.glob("listener-*"))}
    assert not [path for path in new_folders if path.stat().st_mtime < time.time() - 60], "sockets of killed loader workers"


# --- which worker is named as the cause ---


def make_attempt(tmp_path: Path, *ends: tuple[int, dict[str, Any] | None]) -> Attempt:
    """Makes an attempt with a worker for each of `ends`."""
    placement = WorkerPlacement(0, len(ends), len(ends), ("", 0))
    attempt = Attempt(
        TrainJob(run=str(tmp_path), task=find_task("digits"), settings={}, plan=Plan(), folder="."),
        tmp_path / "job.json",
        placement,
        Screen(quiet=True),
        HangDetector(),
        LocalVerdicts(),
        False,
    )
    for rank in range(len(ends)):
        page = open_heartbeat_page()
        attempt.workers.append(Worker(rank, WorkerProcess(), HeartbeatReader(page), None, -1))
    return attempt


def end_worker(attempt: Attempt, rank: int, code: int, result: dict[str, Any] | None = None) -> None:
    """Reports to the attempt that a worker has ended, with its exit code and its result."""
    attempt.workers[rank].process.code, attempt.workers[rank].result = code, result
    attempt._record_ends(ForkServer.__new__(_FakeForkServer))


class _FakeForkServer(ForkServer):
    end_message = ""


GLOO = {"outcome": "infra", "message": "another process of this run was lost: Connection closed by peer", "lost_peer": True, "final": False}
LOADER = {"outcome": "infra", "message": "loader worker 1 of rank 2 (pid 7) was killed by SIGKILL", "lost_peer": False, "final": False}
ERROR = {"outcome": "user-error", "message": "RuntimeError: in the user's line", "lost_peer": False, "final": False}
FINE = {"outcome": "ok", "step": 9}


def test_the_rank_that_died_first_is_named(tmp_path: Path) -> None:
    killed = make_attempt(tmp_path, *[(0, None)] * 3)
    end_worker(killed, 2, -9)
    killed.kill()  # ranks 0 and 1 are in a long step and report nothing
    end_worker(killed, 0, -9)
    end_worker(killed, 1, -9)
    assert killed.end().message.startswith("worker 2 was killed by SIGKILL (see ") and killed.end().lost

    crashed = make_attempt(tmp_path, *[(0, None)] * 3)
    end_worker(crashed, 1, -signal.SIGSEGV)
    end_worker(crashed, 0, -signal.SIGABRT)  # gloo aborts because the peer is lost
    end_worker(crashed, 2, 201, GLOO)
    assert "worker 1 was killed by SIGSEGV" in crashed.end().message


def test_the_cause_is_named_not_the_errors_that_follow_from_it(tmp_path: Path) -> None:
    attempt = make_attempt(tmp_path, *[(0, None)] * 3)
    end_worker(attempt, 2, 201, LOADER)
    end_worker(attempt, 0, 201, GLOO)
    end_worker(attempt, 1, 201, GLOO)
    assert attempt.end().message == LOADER["message"] and attempt.end().lost

    attempt = make_attempt(tmp_path, *[(0, None)] * 2)
    end_worker(attempt, 1, -9)
    end_worker(attempt, 0, 1, ERROR)  # raised in the user's code after a peer had died
    assert attempt.end().outcome is Outcome.INFRA and "worker 1 was killed" in attempt.end().message

    attempt = make_attempt(tmp_path, *[(0, None)] * 2)
    end_worker(attempt, 0, 1, ERROR)
    end_worker(attempt, 1, -signal.SIGABRT)
    assert attempt.end().outcome is Outcome.USER_ERROR and attempt.end().message == ERROR["message"]


@pytest.mark.parametrize("code", [0, 1, 2, 200, 130])
def test_an_end_without_a_result_is_reported_with_any_exit_code(code: int, tmp_path: Path) -> None:
    attempt = make_attempt(tmp_path, *[(0, None)] * 2)
    end_worker(attempt, 0, 0, FINE)
    end_worker(attempt, 1, code)
    attempt._watch()
    assert attempt._kill_at < time.monotonic() + 1, "the other workers are killed soon"
    ended = attempt.end()
    assert ended.outcome is Outcome.INFRA and ended.lost and f"worker 1 ended with code {code} and without a result" in ended.message


# --- starts that fail ---


def test_a_worker_that_cannot_be_forked_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> int:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    our_socket, their_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with monkeypatch.context() as patch:
        patch.setattr(forkserver.os, "fork", fails)
        forkserver._fork({}, [], [], their_socket)
    fork_server = ForkServer.__new__(ForkServer)
    fork_server._socket, fork_server.handle, fork_server.end_message = our_socket, our_socket.fileno(), ""
    attempt = make_attempt(tmp_path, (0, None))
    fork_server._children = [attempt.workers[0].process]
    fork_server.read_events(lambda handle: None)
    attempt._record_ends(fork_server)
    ended = attempt.end()
    assert ended.lost and ended.message == f"worker 0 could not be started: {os.strerror(errno.EAGAIN)}"
    our_socket.close()
    their_socket.close()


def test_a_start_that_fails_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path / "run")
    run.path.mkdir()
    plan = Plan()
    identity = {"task": "small", "code": "", "settings": {}}
    recipe = {"task": {"path": "small.py", "label": "small"}, "identity": identity, "settings": {}, "pins": {}}
    texts = dict.fromkeys(("status", "outcome", "message", "folder", "created"), "")
    run.write({"recipe": recipe, "plan": plan.to_json(), **texts})
    lines: list[str] = []
    monkeypatch.setattr(Screen, "line", lambda self, label, text: lines.append(f"{label} {text}"))
    start_errors = iter([OSError(errno.EAGAIN, "Resource temporarily unavailable"), OSError(errno.EMFILE, "Too many open files"), None])

    def start(self: Supervisor) -> ForkServer:
        if (error := next(start_errors)) is not None:
            raise error
        raise _Started

    class _Started(Exception):
        pass

    monkeypatch.setattr(Supervisor, "_get_fork_server", start)
    job = TrainJob(run=str(run.path), task=find_task("digits"), settings={}, plan=plan, folder=".")
    with (
        supervised(job, plan, local_placement(1), Screen(quiet=True), [], policy=RestartPolicy(restarts=3)) as supervisor,
        pytest.raises(_Started),
    ):
        supervisor.run()
    assert lines == [
        "restart the workers could not be started: Resource temporarily unavailable; restarting from the beginning",
        "restart the workers could not be started: Too many open files; restarting from the beginning",
    ]


def test_the_fork_server_is_named_when_it_dies(tmp_path: Path) -> None:
    fork_server = ForkServer(dict(os.environ), tmp_path / "log")
    fork_server._process.kill()
    fork_server.read_events(lambda handle: None)
    assert fork_server.end_message.startswith("the process that forks the workers was killed by SIGKILL") and not fork_server.is_alive


# --- files that remain ---


def test_only_scratch_folders_of_dead_processes_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    program = "import sys, tempfile; tempfile.tempdir = sys.argv[1]\nfrom drivetrain.supervise.scratch import Scratch\n"
    killed = subprocess.run([sys.executable, "-c", program + "Scratch(); import os; os.kill(os.getpid(), 9)", str(tmp_path)])
    assert killed.returncode == -9
    [of_dead_process] = tmp_path.iterdir()
    (of_dead_process / "listener-x").touch()
    of_this_process, unfinished, foreign = Scratch(), tmp_path / ".drivetrain-scratch-new", tmp_path / "pymp-x"
    for folder in (unfinished, foreign):
        folder.mkdir()
    (tmp_path / "drivetrain-scratch-link").symlink_to(foreign)
    sweep()
    assert not of_dead_process.exists() and of_this_process.path.is_dir() and unfinished.is_dir() and foreign.is_dir()
    of_this_process.remove()
    assert not of_this_process.path.exists()


def test_half_written_checkpoints_are_removed_once_the_disk_is_writable_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, notices = Run(tmp_path / "run"), list[str]()
    run.path.mkdir()
    writer = CheckpointWriter(run, 2, lambda name: None, notices.append)

    def read_only(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.CheckpointWriter, "_publish", read_only)
        patch.setattr(checkpoint.shutil, "rmtree", lambda path, ignore_errors: None)
        writer.save(1, {}, {}, None)
        writer.wait()
    assert "Read-only file system" in notices[0] and list(run.checkpoints.glob(".step-*"))
    writer.save(2, {}, {}, None)
    writer.wait()
    assert run.checkpoint_steps() == [2] and not list(run.checkpoints.glob(".*"))


def test_an_attempt_leaves_no_files_and_those_of_dead_processes_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary, run = tmp_path / "tmp", tmp_path / "run"
    temporary.mkdir()
    run.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    num_job_files = list[int]()
    monkeypatch.setattr(Attempt, "run", lambda self, fork_server: num_job_files.append(len(list(temporary.glob("*/attempt/job.json")))))
    monkeypatch.setattr(Attempt, "end", lambda self: JobEnd(Outcome.OK))
    monkeypatch.setattr(Supervisor, "_get_fork_server", lambda self: None)
    job = TrainJob(run=str(run), task=find_task("digits"), settings={}, plan=Plan(), folder=".")
    with supervised(job, Plan(), local_placement(1), Screen(quiet=True), []) as supervisor:
        supervisor.run_attempt()
        supervisor.run_attempt()
        (temporary / "drivetrain-scratch-of-a-killed-one").mkdir()
    assert num_job_files == [1, 1] and not list(temporary.iterdir()) and not list(run.iterdir())


# --- hangs in a phase that has not been timed yet, and ranks that only seem to hang ---

ACTIVITIES = {
    "sleeps": "import time; time.sleep(1000)",
    "imports": "import sys; sys.path.insert(0, {folder!r}); import endless",
    "waits for a child": "import subprocess; subprocess.run([sys.executable, '-c', 'while True: pass'])",
    "spins": "while True: pass",
}


@pytest.fixture
def stuck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., WatchedRank]]:
    """Returns a function that starts a process with an endless activity, and makes it a rank whose heartbeat is long ago."""
    monkeypatch.setattr(usage, "WINDOW_SECONDS", 0.5)
    (tmp_path / "endless.py").write_text("while True: pass\n")
    started: list[subprocess.Popen[bytes]] = []

    def start(activity: str, phase: str, longest: float = 0.0, silent: float = 30.0) -> WatchedRank:
        answers = tmp_path / f"stacks-{len(started)}"
        begin = f"import sys; from drivetrain.processes.stack_dumps import dump_stacks_on_signal; dump_stacks_on_signal(open({str(answers)!r}, 'a')); print(1, flush=True)\n"
        code = begin + ACTIVITIES[activity].format(folder=str(tmp_path))
        started.append(subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True))
        stdout = started[-1].stdout
        assert stdout is not None and stdout.readline()
        beat = WorkerHeartbeat(1, PHASE_INDEX[phase], time.monotonic() - silent, longest, 0.2)
        return WatchedRank(len(started) - 1, started[-1].pid, beat, answers, lambda: beat)

    yield start
    for process in started:
        for running in (*psutil.Process(process.pid).children(recursive=True), process):
            running.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.parametrize("phase", ["fetch", "metrics"])
def test_a_hang_in_a_phase_without_a_known_duration_has_a_verdict(phase: str, stuck: Callable[..., WatchedRank]) -> None:
    rank, hang_detector = stuck("sleeps", phase), HangDetector(min_limit=0.2)
    assert hang_detector.limit(rank.heartbeat) == 3600 and hang_detector.idle_limit(rank.heartbeat) == 2.0, "ten times the minimum limit"
    assert HangDetector(30).idle_limit(rank.heartbeat._replace(slowest=200.0)) == 600, "three times the slowest phase so far"
    begun = time.monotonic()
    verdict = wait_until(lambda: find_hang(hang_detector.check([rank]) or [], all_ranks=True), "a verdict", 60)
    assert verdict.ranks == [0] and "rank 0 hangs in step 1" in verdict.message and time.monotonic() - begun > 2


def test_a_rank_that_computes_in_a_phase_without_a_known_duration_is_not_hung(stuck: Callable[..., WatchedRank]) -> None:
    ranks = [stuck("spins", "metrics"), stuck("waits for a child", "fetch"), stuck("sleeps", "begin")]
    hang_detector, deadline = HangDetector(min_limit=0.2), time.monotonic() + 6
    while time.monotonic() < deadline:
        assert not hang_detector.check(ranks), (
            "the first computes, the child of the second computes, the third has not begun its first step"
        )
        time.sleep(0.2)


def test_a_rank_that_imports_modules_is_not_hung(stuck: Callable[..., WatchedRank], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drivetrain.supervise.hang_detector.STACKS_SECONDS", 0.5)
    importing, spinning = stuck("imports", "take", longest=0.1), stuck("spins", "take", longest=0.1)
    hang_detector, deadline = HangDetector(min_limit=0.5), time.monotonic() + 6
    while time.monotonic() < deadline:
        assert find_hang(hang_detector.check([importing]) or [], all_ranks=True) is None
        time.sleep(0.2)
    assert wait_until(lambda: find_hang(hang_detector.check([spinning]) or [], all_ranks=True), "a verdict", 60).ranks == [1], (
        "a loop at one line"
    )
    os.kill(importing.pid, signal.SIGSTOP)
    assert wait_until(lambda: find_hang(hang_detector.check([importing]) or [], all_ranks=True), "a verdict", 60).ranks == [0]


def test_time_in_which_the_supervisor_was_suspended_is_not_held_against_a_rank(stuck: Callable[..., WatchedRank]) -> None:
    rank = stuck("sleeps", "take", longest=0.1, silent=40.0)
    suspended = HangDetector(min_limit=30, _checked_at=time.monotonic() - 35)
    assert suspended.check([rank]) == [], "a laptop that was closed for 35 s"
    [report] = HangDetector(min_limit=30).check([rank]) or []
    assert report.is_over_limit


def test_only_restarts_without_a_new_checkpoint_are_counted(tmp_path: Path) -> None:
    run = Run(tmp_path)
    count = RestartCount(run)
    assert [count.add(), count.add()] == [1, 2]
    (run.checkpoints / "step-00000005").mkdir(parents=True)
    assert [count.add(), count.add()] == [1, 2]


def test_a_heartbeat_has_the_longest_duration_of_all_phases() -> None:
    page = open_heartbeat_page()
    reader, writer = HeartbeatReader(page), HeartbeatWriter(page)
    writer.reached("start")
    time.sleep(0.05)
    writer.reached("step")
    writer.reached("fetch")
    assert reader.read().longest == 0 and reader.read().slowest >= 0.05


def test_multiprocessing_uses_the_folder_that_a_worker_sets() -> None:
    """So the sockets of loader workers are in the scratch folder; the children of a worker use it, too."""
    from multiprocessing import util

    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    old = config.get("tempdir")
    try:
        config["tempdir"] = "/somewhere"
        assert util.get_temp_dir() == "/somewhere"
        child: Any = multiprocessing.get_context("fork").Process(target=print)
        assert child._config["tempdir"] == "/somewhere"
    finally:
        config["tempdir"] = old
