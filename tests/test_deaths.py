"""Every end without a result is a death: the one that died is named, all start anew, and nothing is left behind."""

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
from tests.command import good
from tests.patience import until
from tests.samples import rows, weights

TASK = """\
import os, sys, torch
from torch import nn
from torch.nn import functional as F
from drivetrain import Task, Tensors

SAMPLES = {16: lambda: os._exit(0), 48: lambda: os.kill(os.getpid(), 9), 80: lambda: os.kill(os.getpid(), 11)}
COUNT = sum(os.path.exists(f"fault {number}") for number in range(4)) if os.environ.get("FAULTS") else 9  # one a start


def strikes(number):
    if number == COUNT:
        open(f"fault {number}", "w").close()
    return number == COUNT


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


def test_whatever_ends_without_a_result_is_started_anew(folder: Path) -> None:
    """Loader workers that exit, are killed and fault, and a rank that exits with code 0."""
    Path("dying.py").write_text(TASK)
    words = ["train", "dying.py", "plan.workers=2", "--procs", "2", "--restarts", "9"]
    before = set(Path(tempfile.gettempdir()).glob("pymp-*"))
    good(*words, "--name", "whole")
    output = good(*words, "--name", "broken", FAULTS="1")
    assert rows("runs/broken") == rows("runs/whole") and weights("runs/broken") == weights("runs/whole")
    told = [line for line in output.splitlines() if line.startswith("restart ")]
    assert len(told) == 4 and "Traceback" not in output, output
    for how, sample in (("ended with code 0", 16), ("was killed by SIGKILL", 48), ("was killed by SIGSEGV", 80)):
        [line] = [line for line in told if f"{how} while it read sample {sample} of the data set; starting anew from" in line]
        assert line.startswith("restart loader worker ") and " of rank " in line
    assert any(line.startswith("restart worker 1 ended with code 0 and without a result; starting anew") for line in told)
    info = json.loads(Path("runs/broken/run.json").read_text())
    assert (info["status"], info["outcome"]) == ("finished", "ok")
    mine = {path for path in set(Path(tempfile.gettempdir()).glob("pymp-*")) - before if any(path.glob("listener-*"))}
    assert not [path for path in mine if path.stat().st_mtime < time.time() - 60], "sockets of killed loader workers"


# --- which worker caused the end ---


def attempt(tmp_path: Path, *ends: tuple[int, dict[str, Any] | None]) -> Attempt:
    """Workers that ended in this order, each with its code and its result."""
    place = WorkerPlacement(0, len(ends), len(ends), ("", 0))
    made = Attempt(
        TrainJob(run=str(tmp_path), task=find_task("digits"), settings={}, plan=Plan(), folder="."),
        tmp_path / "job.json",
        place,
        Screen(quiet=True),
        HangDetector(),
        LocalVerdicts(),
        False,
    )
    for rank in range(len(ends)):
        page = open_heartbeat_page()
        made.workers.append(Worker(rank, WorkerProcess(), HeartbeatReader(page), None, -1))
    return made


def end(made: Attempt, rank: int, code: int, said: dict[str, Any] | None = None) -> None:
    made.workers[rank].process.code, made.workers[rank].result = code, said
    made._note_ends(ForkServer.__new__(_Quiet))


class _Quiet(ForkServer):
    end_message = ""


GLOO = {"outcome": "infra", "message": "another process of this run was lost: Connection closed by peer", "lost_peer": True, "final": False}
LOADER = {"outcome": "infra", "message": "loader worker 1 of rank 2 (pid 7) was killed by SIGKILL", "lost_peer": False, "final": False}
ERROR = {"outcome": "user-error", "message": "RuntimeError: in the user's line", "lost_peer": False, "final": False}
FINE = {"outcome": "ok", "step": 9}


def test_the_rank_that_died_first_is_named(tmp_path: Path) -> None:
    slow = attempt(tmp_path, *[(0, None)] * 3)
    end(slow, 2, -9)
    slow.kill()  # ranks 0 and 1 are in a long step, and say nothing
    end(slow, 0, -9)
    end(slow, 1, -9)
    assert slow.end().message.startswith("worker 2 was killed by SIGKILL (see ") and slow.end().lost

    two = attempt(tmp_path, *[(0, None)] * 3)
    end(two, 1, -signal.SIGSEGV)
    end(two, 0, -signal.SIGABRT)  # at the loss of its peer
    end(two, 2, 201, GLOO)
    assert "worker 1 was killed by SIGSEGV" in two.end().message


def test_the_cause_is_named_and_not_what_the_others_say_of_it(tmp_path: Path) -> None:
    made = attempt(tmp_path, *[(0, None)] * 3)
    end(made, 2, 201, LOADER)
    end(made, 0, 201, GLOO)
    end(made, 1, 201, GLOO)
    assert made.end().message == LOADER["message"] and made.end().lost

    made = attempt(tmp_path, *[(0, None)] * 2)
    end(made, 1, -9)
    end(made, 0, 1, ERROR)  # raised in the user's lines, when a peer was gone
    assert made.end().outcome is Outcome.INFRA and "worker 1 was killed" in made.end().message

    made = attempt(tmp_path, *[(0, None)] * 2)
    end(made, 0, 1, ERROR)
    end(made, 1, -signal.SIGABRT)
    assert made.end().outcome is Outcome.USER_ERROR and made.end().message == ERROR["message"]


@pytest.mark.parametrize("code", [0, 1, 2, 200, 130])
def test_an_end_without_a_result_is_a_death_whatever_its_code(code: int, tmp_path: Path) -> None:
    made = attempt(tmp_path, *[(0, None)] * 2)
    end(made, 0, 0, FINE)
    end(made, 1, code)
    made._watch()
    assert made._kill_at < time.monotonic() + 1, "the others are not waited for"
    ended = made.end()
    assert ended.outcome is Outcome.INFRA and ended.lost and f"worker 1 ended with code {code} and without a result" in ended.message


# --- starts that fail ---


def test_a_worker_that_cannot_be_forked_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> int:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with monkeypatch.context() as patch:
        patch.setattr(forkserver.os, "fork", fails)
        forkserver._fork({}, [], [], theirs)
    fork_server = ForkServer.__new__(ForkServer)
    fork_server._socket, fork_server.handle, fork_server.end_message = ours, ours.fileno(), ""
    made = attempt(tmp_path, (0, None))
    fork_server._children = [made.workers[0].process]
    fork_server.read_events(lambda handle: None)
    made._note_ends(fork_server)
    ended = made.end()
    assert ended.lost and ended.message == f"worker 0 could not be started: {os.strerror(errno.EAGAIN)}"
    ours.close()
    theirs.close()


def test_a_start_that_fails_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path / "run")
    run.path.mkdir()
    plan = Plan()
    identity = {"task": "small", "code": "", "settings": {}}
    recipe = {"task": {"path": "small.py", "label": "small"}, "identity": identity, "settings": {}, "pins": {}}
    words = dict.fromkeys(("status", "outcome", "message", "folder", "created"), "")
    run.write({"recipe": recipe, "plan": plan.to_json(), **words})
    said: list[str] = []
    monkeypatch.setattr(Screen, "line", lambda self, label, text: said.append(f"{label} {text}"))
    tries = iter([OSError(errno.EAGAIN, "Resource temporarily unavailable"), OSError(errno.EMFILE, "Too many open files"), None])

    def start(self: Supervisor) -> ForkServer:
        if (error := next(tries)) is not None:
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
    assert said == [
        "restart the workers could not be started: Resource temporarily unavailable; starting anew from the beginning",
        "restart the workers could not be started: Too many open files; starting anew from the beginning",
    ]


def test_the_fork_server_is_named_when_it_dies(tmp_path: Path) -> None:
    fork_server = ForkServer(dict(os.environ), tmp_path / "log")
    fork_server._process.kill()
    fork_server.read_events(lambda handle: None)
    assert fork_server.end_message.startswith("the process that forks the workers was killed by SIGKILL") and not fork_server.is_alive


# --- what is left behind ---


def test_only_scratch_folders_of_dead_processes_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    maker = "import sys, tempfile; tempfile.tempdir = sys.argv[1]\nfrom drivetrain.supervise.scratch import Scratch\n"
    killed = subprocess.run([sys.executable, "-c", maker + "Scratch(); import os; os.kill(os.getpid(), 9)", str(tmp_path)])
    assert killed.returncode == -9
    [dead] = tmp_path.iterdir()
    (dead / "listener-x").touch()
    mine, unmade, foreign = Scratch(), tmp_path / ".drivetrain-scratch-new", tmp_path / "pymp-x"
    for folder in (unmade, foreign):
        folder.mkdir()
    (tmp_path / "drivetrain-scratch-link").symlink_to(foreign)
    sweep()
    assert not dead.exists() and mine.path.is_dir() and unmade.is_dir() and foreign.is_dir()
    mine.remove()
    assert not mine.path.exists()


def test_half_written_checkpoints_go_when_the_disk_can_be_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, said = Run(tmp_path / "run"), list[str]()
    run.path.mkdir()
    writer = CheckpointWriter(run, 2, lambda name: None, said.append)

    def read_only(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.CheckpointWriter, "_publish", read_only)
        patch.setattr(checkpoint.shutil, "rmtree", lambda path, ignore_errors: None)
        writer.save(1, {}, {}, None)
        writer.wait()
    assert "Read-only file system" in said[0] and list(run.checkpoints.glob(".step-*"))
    writer.save(2, {}, {}, None)
    writer.wait()
    assert run.checkpoint_steps() == [2] and not list(run.checkpoints.glob(".*"))


def test_an_attempt_leaves_nothing_and_what_the_dead_left_goes_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary, run = tmp_path / "tmp", tmp_path / "run"
    temporary.mkdir()
    run.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    seen = list[int]()
    monkeypatch.setattr(Attempt, "run", lambda self, fork_server: seen.append(len(list(temporary.glob("*/attempt/job.json")))))
    monkeypatch.setattr(Attempt, "end", lambda self: JobEnd(Outcome.OK))
    monkeypatch.setattr(Supervisor, "_get_fork_server", lambda self: None)
    job = TrainJob(run=str(run), task=find_task("digits"), settings={}, plan=Plan(), folder=".")
    with supervised(job, Plan(), local_placement(1), Screen(quiet=True), []) as supervisor:
        supervisor.run_attempt()
        supervisor.run_attempt()
        (temporary / "drivetrain-scratch-of-a-killed-one").mkdir()
    assert seen == [1, 1] and not list(temporary.iterdir()) and not list(run.iterdir())


# --- hangs in phases not seen yet, and ranks that only seem to hang ---

WAYS = {
    "sleeps": "import time; time.sleep(1000)",
    "imports": "import sys; sys.path.insert(0, {folder!r}); import endless",
    "waits for a child": "import subprocess; subprocess.run([sys.executable, '-c', 'while True: pass'])",
    "spins": "while True: pass",
}


@pytest.fixture
def stuck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., WatchedRank]]:
    """Starts a process that does something for good, and answers as a rank does that is silent since long ago."""
    monkeypatch.setattr(usage, "WINDOW_SECONDS", 0.5)
    (tmp_path / "endless.py").write_text("while True: pass\n")
    started: list[subprocess.Popen[bytes]] = []

    def start(way: str, place: str, longest: float = 0.0, silent: float = 30.0) -> WatchedRank:
        answers = tmp_path / f"stacks-{len(started)}"
        begin = f"import sys; from drivetrain.processes.stack_dumps import dump_stacks_on_signal; dump_stacks_on_signal(open({str(answers)!r}, 'a')); print(1, flush=True)\n"
        code = begin + WAYS[way].format(folder=str(tmp_path))
        started.append(subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True))
        stdout = started[-1].stdout
        assert stdout is not None and stdout.readline()
        beat = WorkerHeartbeat(1, PHASE_INDEX[place], time.monotonic() - silent, longest, 0.2)
        return WatchedRank(len(started) - 1, started[-1].pid, beat, answers, lambda: beat)

    yield start
    for process in started:
        for one in (*psutil.Process(process.pid).children(recursive=True), process):
            one.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.parametrize("place", ["fetch", "metrics"])
def test_a_hang_in_a_phase_not_seen_yet_has_a_verdict(place: str, stuck: Callable[..., WatchedRank]) -> None:
    rank, hang_detector = stuck("sleeps", place), HangDetector(min_limit=0.2)
    assert hang_detector.limit(rank.heartbeat) == 3600 and hang_detector.idle_limit(rank.heartbeat) == 2.0, "with 30 s: five minutes"
    assert HangDetector(30).idle_limit(rank.heartbeat._replace(slowest=200.0)) == 600, "scaled by what was seen"
    begun = time.monotonic()
    verdict = until(lambda: find_hang(hang_detector.check([rank]) or [], all_ranks=True), "a verdict", 60)
    assert verdict.ranks == [0] and "rank 0 hangs in step 1" in verdict.message and time.monotonic() - begun > 2


def test_a_rank_that_computes_in_a_phase_not_seen_yet_is_not_hung(stuck: Callable[..., WatchedRank]) -> None:
    ranks = [stuck("spins", "metrics"), stuck("waits for a child", "fetch"), stuck("sleeps", "begin")]
    hang_detector, deadline = HangDetector(min_limit=0.2), time.monotonic() + 6
    while time.monotonic() < deadline:
        assert not hang_detector.check(ranks), "one computes, another's child does, the third has not begun its first step"
        time.sleep(0.2)


def test_what_imports_is_not_hung_while_it_gets_on(stuck: Callable[..., WatchedRank], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drivetrain.supervise.hang_detector.STACKS_SECONDS", 0.5)
    importing, spinning = stuck("imports", "take", longest=0.1), stuck("spins", "take", longest=0.1)
    hang_detector, deadline = HangDetector(min_limit=0.5), time.monotonic() + 6
    while time.monotonic() < deadline:
        assert find_hang(hang_detector.check([importing]) or [], all_ranks=True) is None
        time.sleep(0.2)
    assert until(lambda: find_hang(hang_detector.check([spinning]) or [], all_ranks=True), "a verdict", 60).ranks == [1], (
        "a loop at one line"
    )
    os.kill(importing.pid, signal.SIGSTOP)
    assert until(lambda: find_hang(hang_detector.check([importing]) or [], all_ranks=True), "a verdict", 60).ranks == [0]


def test_time_in_which_the_supervisor_was_suspended_is_not_held_against_a_rank(stuck: Callable[..., WatchedRank]) -> None:
    rank = stuck("sleeps", "take", longest=0.1, silent=40.0)
    suspended = HangDetector(min_limit=30, _checked_at=time.monotonic() - 35)
    assert suspended.check([rank]) == [], "a laptop that was closed for 35 s"
    [report] = HangDetector(min_limit=30).check([rank]) or []
    assert report.over


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


def test_sockets_of_loader_workers_have_a_folder_of_ours() -> None:
    """What the worker sets is what multiprocessing uses, in its children too."""
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
