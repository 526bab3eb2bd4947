"""Runs a job on this machine's worker processes, whatever becomes of them: a lost or hung one is started anew from
the last good checkpoint, one that ran out of memory with a smaller plan, and how it all ended is one word."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from drivetrain.outcomes import Outcome, Problem
from drivetrain.plan import Plan
from drivetrain.processes.job import Diagnostics, Job, TrainJob, write
from drivetrain.runs import Run, is_alive, record_plan, remove_half_written_files, write_atomic
from drivetrain.supervise.attempt import RECORDED, Attempt, Ended, Place
from drivetrain.supervise.judges import Judge
from drivetrain.supervise.nursery import Nursery
from drivetrain.supervise.scratch import Scratch
from drivetrain.supervise.verdict import FLOOR, Verdict, Watchman
from drivetrain.watch.screen import Screen
from drivetrain.watch.spent import Spent

__all__ = [
    "Ended",
    "Place",
    "Policy",
    "Supervisor",
    "free_port",
    "handled",
    "local_place",
    "record_shortage",
    "run_workers",
    "supervised",
]

LOOPBACK = "127.0.0.1"
SECRETS = {"DRIVETRAIN_TOKEN", "DRIVETRAIN_TOKEN_FILE"}  # for the command itself; a task's code needs none
LONGEST_PAUSE = 30.0
NOTE_SECONDS = 5.0
OF_THE_MACHINE = {
    errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO,
}  # fmt: skip
"""Errors of a start that passes when the machine has room again: processes, memory, handles, disk."""


@dataclass(frozen=True)
class Policy:
    """What is done about a process that is lost."""

    restarts: int = 0
    """Fresh starts without progress, that is, without a new checkpoint in between, after which the run is given up."""
    hang_after: float = FLOOR
    """Seconds without a sign of life that are never called a hang."""

    def pause(self, fruitless: int) -> float:
        """Seconds before the next start: none after progress, then ever longer."""
        return 0.0 if fruitless <= 1 else min(LONGEST_PAUSE, 2.0 ** (fruitless - 3))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def local_place(procs: int) -> Place:
    """On this machine alone: its processes meet where no other machine can reach them."""
    return Place(0, procs, procs, (LOOPBACK, free_port()), loopback_interface() if procs > 1 else "")


def loopback_interface() -> str:
    import psutil

    return next((name for name, entries in psutil.net_if_addrs().items() if any(e.address == LOOPBACK for e in entries)), "")


def run_workers(
    job: Job, plan: Plan, place: Place, screen: Screen, gpus: list[str], verbose: bool = False,
    replan: Callable[[], Plan] | None = None, policy: Policy | None = None,
) -> Ended:  # fmt: skip
    """Run a job on this machine's processes until all have ended for good."""
    with supervised(job, plan, place, screen, gpus, verbose, replan, policy) as supervisor:
        return supervisor.run()


@contextlib.contextmanager
def supervised(
    job: Job, plan: Plan, place: Place, screen: Screen, gpus: list[str], verbose: bool = False,
    replan: Callable[[], Plan] | None = None, policy: Policy | None = None,
) -> Iterator[Supervisor]:  # fmt: skip
    """A supervisor that gets this process's signals meanwhile."""
    supervisor = Supervisor(job, plan, place, screen, gpus, verbose, replan, policy or Policy())
    with handled(supervisor.on_signal):
        try:
            yield supervisor
        finally:
            supervisor.close()


def record_shortage(run: Run, smaller: dict[str, Any]) -> None:
    """Note, once, that memory ran out, and the plan with which the run goes on."""
    with contextlib.suppress(Problem):  # another machine's disk may have the run
        if any(run.read()["plan"][key] != size for key, size in smaller["sizes"].items()):
            run.log_event("oom", **smaller["oom"])
            record_plan(run, smaller["plan"])
            run.log_event("replanned", step=smaller["oom"]["step"], **smaller["sizes"])


class Supervisor:
    def __init__(
        self, job: Job, plan: Plan, place: Place, screen: Screen, gpus: list[str], verbose: bool,
        replan: Callable[[], Plan] | None, policy: Policy,
    ) -> None:  # fmt: skip
        self.job, self.plan, self.place, self.screen, self.gpus, self.verbose = job, plan, place, screen, gpus, verbose
        self.replan, self.policy = replan, policy
        self.run_dir = Run(job.run)
        self.leads = place.local_procs == place.world_size
        """Whether it decides what comes after an attempt; on several machines one of them does, for all."""
        self.look: Callable[[], object] = lambda: None
        """Called several times a second while an attempt runs."""
        self.judge = Judge()
        """Of who hangs; another where there are several machines."""
        self.all_time: Callable[[Spent], Spent | None] = lambda spent: spent
        """Where the time of all machines goes, given this one's; None where another machine keeps that."""
        self.attempt: Attempt | None = None
        self.nursery: Nursery | None = None
        self._scratch: Scratch | None = None
        self._attempts = f".attempt-{socket.gethostname()}-"
        """How the folders of this machine's attempts are called, before the number of their process."""
        self.interrupts, self.stopped = 0, False
        self._fruitless, self._reached = 0, self.run_dir.last_checkpoint_step
        self._before, self._noted = Spent([], 0), time.monotonic()
        self._first, self._learnt = self._first_steps(), False

    def run(self) -> Ended:
        while True:
            ended = self.once()
            why = self.again(ended)
            if why is None:
                return ended
            self.announce(why, ended.outcome)
            if isinstance(self.job, TrainJob) and ended.outcome not in (Outcome.OOM, Outcome.NAN):
                self.plan = Plan.from_json(self.run_dir.read()["plan"])  # with what its first steps settled
            self.use(self.plan, local_place(self.place.local_procs))

    @property
    def diagnostics(self) -> Diagnostics:
        return self.job.diagnostics if isinstance(self.job, TrainJob) else Diagnostics()

    def use(self, plan: Plan, place: Place, diagnostics: Diagnostics | None = None) -> None:
        """Sets the plan, the place and, where given, the diagnostics of the next attempt."""
        if diagnostics is not None and isinstance(self.job, TrainJob):
            self.job = replace(self.job, diagnostics=diagnostics)
        if self.diagnostics.nan_step:  # nothing can be looked at inside of a graph
            plan = replace(plan, capture="off", compile="off", reasons=plan.reasons | {"capture": "pinned"})
        self.plan, self.place = plan, place
        self.job = replace(self.job, plan=plan)

    def once(self) -> Ended:
        """One attempt."""
        try:
            return self._attempt()
        except OSError as error:
            if error.errno not in OF_THE_MACHINE:
                raise
            why = f"the workers could not be started: {error.strerror}{f' ({error.filename})' if error.filename else ''}"
            return Ended(Outcome.INFRA, why, interrupted=self.interrupts > 0, stopped=self.stopped, spent=self._before, lost=True)

    def _attempt(self) -> Ended:
        with self._folder() as folder:
            file = folder / "job.json"
            write(replace(self.job, scratch=str(self._scratch.path) if self._scratch else None), file)
            watchman, self._learnt = Watchman(self.policy.hang_after, self._first), False
            self.attempt = Attempt(self.job, file, self.place, self.screen, watchman, self.judge, self.verbose)
            self.attempt.each_look, self.attempt.on_verdict = self._each_look, self._note_hang
            if self.stopped:
                return Ended(
                    Outcome.PREEMPTED, result={"step": self.run_dir.last_checkpoint_step}, interrupted=self.interrupts > 0, stopped=True
                )
            self.attempt.run(self._nursery())
            ended = self.attempt.ended()
        self._before = self._spent()
        return replace(ended, interrupted=self.interrupts > 0, stopped=self.stopped, spent=self._before)

    @contextlib.contextmanager
    def _folder(self) -> Iterator[Path]:
        """Where workers find their job and write their stacks. That of a front end that was killed is removed by the next."""
        folder = self._own_folder() if isinstance(self.job, RECORDED) else None
        if self._scratch is None:
            with contextlib.suppress(OSError):  # no room there: a run's own folder will do
                self._scratch = Scratch()
        if folder is None:
            folder = (self._scratch or Scratch()).path / "job"
            folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _own_folder(self) -> Path | None:
        """One in the run; None where the disk is full."""
        self._sweep()
        folder = self.run_dir.path / f"{self._attempts}{os.getpid()}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "room").write_bytes(bytes(1 << 16))
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            return None
        (folder / "room").unlink()
        return folder

    def _sweep(self) -> None:
        """Remove what this process, or others of this machine that have ended, left in the run's folder."""
        remove_half_written_files(self.run_dir.path)
        remove_half_written_files(self.run_dir.path / "logs")
        for old in self.run_dir.path.glob(f"{self._attempts}*"):
            number = old.name.removeprefix(self._attempts)
            if number.isdigit() and (int(number) == os.getpid() or not is_alive(int(number))):
                shutil.rmtree(old, ignore_errors=True)

    def _spent(self) -> Spent:
        assert self.attempt is not None
        return self._before + self.attempt.spent()

    def _each_look(self) -> None:
        self.look()
        self._note_time()
        self._learn()

    @property
    def steps_taken(self) -> int:
        """In the attempt under way, besides its first."""
        return self.attempt.spent().steps if self.attempt else 0

    def abort(self, why: str) -> None:
        """End the attempt under way at once: what it needs is gone."""
        if self.attempt is not None:
            self.attempt.abort(why)

    def convict(self, verdict: Verdict) -> None:
        """End the attempt under way at once: the machine that leads has found who hangs."""
        if self.attempt is not None:
            self.attempt.convict(verdict)

    def regroup(self) -> None:
        """End the attempt under way after a step, saved."""
        if self.attempt is not None:
            self.attempt.stop()

    def _note_time(self) -> None:
        """Keep where the time goes with the run, for `status`."""
        if isinstance(self.job, TrainJob) and time.monotonic() > self._noted + NOTE_SECONDS:
            self._noted = time.monotonic()
            if (spent := self.all_time(self._spent())) is not None:
                with contextlib.suppress(OSError):
                    write_atomic(self.run_dir.time_breakdown_path, json.dumps(spent.to_json()) + "\n")

    def _first_steps(self) -> dict[str, float]:
        """How long first steps took on this machine, in this run's earlier starts."""
        with contextlib.suppress(OSError, ValueError):
            return {str(place): float(seconds) for place, seconds in json.loads(self.run_dir.first_steps_path.read_text()).items()}
        return {}

    def _learn(self) -> None:
        """Keep how long the first step took: by that the next start's is judged."""
        if self._learnt or not isinstance(self.job, TrainJob) or self.attempt is None or not (took := self.attempt.first()):
            return
        self._learnt = True
        self._first |= {place: max(seconds, self._first.get(place, 0.0)) for place, seconds in took.items()}
        with contextlib.suppress(OSError):
            write_atomic(self.run_dir.first_steps_path, json.dumps(self._first) + "\n")

    def _nursery(self) -> Nursery:
        # What the user has set wins. Asked whether there is a GPU, torch must not initialise the driver where forks come from.
        environment = (
            {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "KINETO_LOG_LEVEL": "5", "TORCH_FR_BUFFER_SIZE": "200"}
            | self.plan.env
            | {name: value for name, value in os.environ.items() if name not in SECRETS}
            | {"PYTHONUNBUFFERED": "1"}
        )
        if self.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus)
        if self.nursery is not None and not (self.nursery.alive and self.nursery.environment == environment):
            self.nursery.close()
            self.nursery = None
        if self.nursery is None:
            self.nursery = Nursery(environment, self.run_dir.log_path(self.place.first_rank))
        return self.nursery

    def close(self) -> None:
        if self.nursery is not None:
            self.nursery.close()
        if self._scratch is not None:
            self._scratch.remove()
            self._scratch = None  # a follower is closed by its rendezvous, and again by its owner
        if isinstance(self.job, RECORDED):
            self._sweep()  # what could not be removed while the disk was read-only

    # --- whether to start anew ---

    def again(self, ended: Ended) -> str | None:
        """Why another attempt is made, with the plan that is then in force; None where this was the end."""
        whole = self.leads  # else the other machines' processes are not ours to start
        if ended.outcome is Outcome.OOM and isinstance(self.job, RECORDED):
            return self._after_shortage(ended, whole)
        looks = self.diagnostics
        if ended.outcome is Outcome.NAN and looks.find_nan and not (looks.nan_step or self.stopped) and whole:
            steps = [event["step"] for event in self.run_dir.events() if event["event"] == "nan"]
            self.use(self.plan, self.place, replace(looks, nan_step=steps[-1] if steps else sys.maxsize))
            return f"{ended.message.splitlines()[0]} Every module is looked at now; "
        if not ended.lost or self.stopped or not whole or not self.policy.restarts:
            return None
        step = self.run_dir.last_checkpoint_step
        self._fruitless = 1 if step > self._reached else self._fruitless + 1
        self._reached = step
        if self._fruitless > self.policy.restarts:
            self.screen.notice(f"given up: {self.policy.restarts} fresh starts brought no new checkpoint (--restarts N)")
            return None
        self._pause(self.policy.pause(self._fruitless))
        why = f"{ended.message.partition(chr(10))[0].partition(' (see ')[0]}; " if ended.outcome is Outcome.INFRA else ""
        return None if self.stopped else why

    def _after_shortage(self, ended: Ended, whole: bool) -> str | None:
        """With the plan that `replan` makes, once, or with the smaller one that the worker asks for."""
        smaller, better = ended.result.get("smaller"), None
        if self.replan is not None and not self.stopped:
            try:
                better, self.replan = self.replan(), None
            except Problem as problem:
                ended.message = str(problem)
                return None
        if better is not None and better.sentence() != self.plan.sentence():
            self.run_dir.log_event("oom", step=self.run_dir.last_checkpoint_step)
            with contextlib.suppress(OSError):  # a full disk
                self.run_dir.update(plan=better.to_json())
            self.run_dir.log_event("replanned", why="the task is known by now", strategy=better.strategy, micro_batch=better.micro_batch)
            plan, sentence = better, f"out of memory: {better.sentence()}"
        elif smaller:
            record_shortage(self.run_dir, smaller)
            if self.stopped or not whole:
                return None
            plan, sentence = Plan.from_json(self.plan.to_json() | smaller["plan"]), smaller["sentence"]
        else:
            return None
        self.plan = plan
        return f"{sentence}; "

    def announce(self, why: str, outcome: Outcome) -> None:
        """Say and note that another attempt begins."""
        steps = self.run_dir.checkpoint_steps()
        label = "plan" if outcome == Outcome.OOM else "restart"
        self.screen.line(label, f"{why}starting anew from {f'step {steps[-1]:,}' if steps else 'the beginning'}")
        self.run_dir.log_event("restarted", step=steps[-1] if steps else 0, why=str(outcome))

    def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self.stopped and time.monotonic() < deadline:
            time.sleep(min(0.1, max(0.0, deadline - time.monotonic())))

    def _note_hang(self, verdict: Verdict) -> None:
        """Say who hangs, and keep what was seen of it with the run, which is the leading machine's."""
        if not self.leads:
            self.screen.line("hang", verdict.message)
            return
        number = sum(event["event"] == "hang" for event in self.run_dir.events()) + 1
        path = self.run_dir.log_path(0).with_name(f"hang-{number}.txt")
        with contextlib.suppress(OSError):
            path.write_text(f"{verdict.message}\n\n{verdict.evidence}")
        self.run_dir.log_event("hang", ranks=verdict.ranks, step=verdict.step, line=verdict.line, detail=verdict.message)
        self.screen.line("hang", f"{verdict.message} (stacks: {path})")

    # --- signals ---

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        self.stopped = True
        if number == signal.SIGINT:
            self.interrupts += 1
            if self.interrupts > 1:
                if self.attempt is not None:
                    self.attempt.kill()
                return
        if self.attempt is not None:
            self.attempt.stop()
        if number == signal.SIGINT and not (self.attempt is not None and self.attempt.left):
            self.screen.notice("stopping after this step and saving (Ctrl-C again ends at once)")


@contextlib.contextmanager
def handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Signals that ask for an end go to a handler meanwhile; only a process's main thread can see to that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old = {n: signal.signal(n, handler) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, before in old.items():
            signal.signal(number, before)
