"""Starts the worker processes of this machine, passes on what they say, and maps how they end."""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

from drivetrain.outcomes import Outcome, Problem, outcome_of_code
from drivetrain.plan import Plan
from drivetrain.runs import Run, record_plan
from drivetrain.watch.screen import Screen, replay

RECORDED = ("train", "verify")  # jobs that keep the plan in run.json true
WIRE = "_DRIVETRAIN_WIRE"  # tells a worker the handle of its wire, and who its parent is
GRACE = 5.0  # seconds the others get to say how they ended, once one has failed
SHORT_GRACE = 1.0  # where one ran out of memory: what the others will say is known


@dataclass(frozen=True)
class Place:
    """Where this machine's workers stand among all."""

    first_rank: int
    local_procs: int
    world_size: int
    master: tuple[str, int]


@dataclass
class Ended:
    outcome: Outcome
    message: str = ""
    result: dict[str, Any] = field(default_factory=dict)
    interrupted: bool = False
    stopped: bool = False
    """Whether this process was asked to stop, by whatever signal."""


@dataclass
class _Worker:
    rank: int
    process: subprocess.Popen[bytes]
    log: BinaryIO | None
    said: dict[str, Any] | None = None
    half: dict[str, bytes] = field(default_factory=lambda: {"wire": b"", "out": b""})


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def local_place(procs: int) -> Place:
    return Place(0, procs, procs, ("127.0.0.1", free_port()))


def run_workers(
    job: dict[str, Any], plan: Plan, place: Place, screen: Screen, gpus: list[str], verbose: bool = False,
    replan: Callable[[], Plan] | None = None,
) -> Ended:  # fmt: skip
    """Run a job on this machine's processes until all have ended; where memory ran out, from the last checkpoint on
    with the plan that `replan` makes, once, or with the smaller one that the worker asks for."""
    while True:
        ended = _run_once(job, plan, place, screen, gpus, verbose)
        if ended.outcome is not Outcome.OOM or job["mode"] not in RECORDED:
            return ended
        run, smaller, better = Run(job["run"]), ended.result.get("smaller"), None
        if replan is not None and not ended.stopped:
            try:
                better, replan = replan(), None
            except Problem as problem:
                return replace(ended, message=str(problem))
        if better is not None and better.sentence() != plan.sentence():
            plan, sentence = better, f"out of memory: {better.sentence()}"
            run.event("oom", step=(run.steps() or [0])[-1])
            run.update(plan=plan.to_json())
            run.event("replanned", why="the task is known by now", strategy=plan.strategy, micro_batch=plan.micro_batch)
        elif smaller:
            record_shortage(run, smaller)
            if ended.stopped or place.local_procs < place.world_size:
                return ended  # the other machines' processes are not ours to start
            plan, sentence = Plan.from_json(plan.to_json() | smaller["plan"]), smaller["sentence"]
        else:
            return ended
        job, place = job | {"plan": plan.to_json()}, local_place(place.local_procs)
        steps = run.steps()
        screen.line("plan", f"{sentence}; starting anew from {f'step {steps[-1]:,}' if steps else 'the beginning'}")
        run.event("restarted", step=steps[-1] if steps else 0, why="oom")


def record_shortage(run: Run, smaller: dict[str, Any]) -> None:
    """Note, once, that memory ran out, and the plan with which the run goes on."""
    with contextlib.suppress(Problem):  # another machine's disk may have the run
        if any(run.read()["plan"][key] != size for key, size in smaller["sizes"].items()):
            run.event("oom", **smaller["oom"])
            record_plan(run, smaller["plan"])
            run.event("replanned", step=smaller["oom"]["step"], **smaller["sizes"])


def _run_once(job: dict[str, Any], plan: Plan, place: Place, screen: Screen, gpus: list[str], verbose: bool) -> Ended:
    with tempfile.TemporaryDirectory(prefix="drivetrain-") as folder:
        file = Path(folder) / "job.json"
        file.write_text(json.dumps(job))
        return _Supervisor(file, job, plan, place, screen, gpus, verbose).run()


class _Supervisor:
    def __init__(self, file: Path, job: dict[str, Any], plan: Plan, place: Place, screen: Screen, gpus: list[str], verbose: bool) -> None:
        self.file, self.plan, self.place, self.screen, self.gpus, self.verbose = file, plan, place, screen, gpus, verbose
        self.run_dir = Run(job["run"])
        self.records = job["mode"] in RECORDED
        self.workers: list[_Worker] = []
        self.signals = 0
        self.stopped = False
        self.end_by: float | None = None
        self.selector = selectors.DefaultSelector()

    def run(self) -> Ended:
        with handled(self._on_signal):
            try:
                for local in range(self.place.local_procs):
                    self._start(local)
                self.screen.busy("loading torch and the task ...")
                while any(w.process.poll() is None for w in self.workers) or self.selector.get_map():
                    self._listen(0.2)
                    self._watch()
            finally:
                self._kill()
                for worker in self.workers:
                    worker.process.wait()
                    if worker.log:
                        worker.log.close()
        self.screen.close()
        return self._verdict()

    # --- processes ---

    def _start(self, local: int) -> None:
        rank = self.place.first_rank + local
        receive, send = os.pipe()
        environment = (
            self.plan.env
            | os.environ
            | {  # what the user has set wins
                "RANK": str(rank),
                "LOCAL_RANK": str(local),
                "WORLD_SIZE": str(self.place.world_size),
                "LOCAL_WORLD_SIZE": str(self.place.local_procs),
                "MASTER_ADDR": self.place.master[0],
                "MASTER_PORT": str(self.place.master[1]),
                "PYTHONUNBUFFERED": "1",
                WIRE: f"{send} {os.getpid()}",
            }
        )
        if self.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus)
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "drivetrain.cli.worker", str(self.file)],  # -P: no module of this folder shadows torch's
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(send,),
            start_new_session=True,  # the terminal's Ctrl-C comes here, not to them
        )
        os.close(send)
        worker = _Worker(rank, process, _open_log(self.run_dir.log_path(rank)))
        self.workers.append(worker)
        assert process.stdout is not None
        for handle, kind in ((receive, "wire"), (process.stdout.fileno(), "out")):
            os.set_blocking(handle, False)
            self.selector.register(handle, selectors.EVENT_READ, (worker, kind))

    def _watch(self) -> None:
        """Once one has failed, the others can only wait in vain: end them after a moment."""
        codes = [w.process.poll() for w in self.workers]
        if any(code not in (None, 0, Outcome.PREEMPTED.code) for code in codes):
            grace = SHORT_GRACE if Outcome.OOM.code in codes else GRACE
            self.end_by = min(self.end_by or math.inf, time.monotonic() + grace)
        if self.end_by is not None and time.monotonic() > self.end_by:
            self._kill()
        if all(code is not None for code in codes):
            # A loader worker that outlives its rank may hold the pipes open: do not wait for it.
            for _ in range(100):
                if not self._listen(0.0):
                    break
            self._kill()
            for key in list(self.selector.get_map().values()):
                self._drop(int(key.fd))

    def _kill(self) -> None:
        for worker in self.workers:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(worker.process.pid, signal.SIGKILL)

    # --- what they say ---

    def _listen(self, seconds: float) -> bool:
        ready = self.selector.select(seconds)
        for key, _ in ready:
            worker, kind = key.data
            try:
                data = os.read(int(key.fd), 1 << 16)
            except BlockingIOError:
                continue
            if not data:
                self._drop(int(key.fd))
            *lines, worker.half[kind] = (worker.half[kind] + data).split(b"\n")
            if not data and worker.half[kind]:
                lines.append(worker.half[kind])
                worker.half[kind] = b""
            for line in lines:
                self._hear(worker, kind, line)
        return bool(ready)

    def _drop(self, handle: int) -> None:
        _, kind = self.selector.unregister(handle).data
        if kind == "wire":
            os.close(handle)

    def _hear(self, worker: _Worker, kind: str, line: bytes) -> None:
        if kind == "out":
            if worker.log:
                with contextlib.suppress(OSError):
                    worker.log.write(line + b"\n")
            text = line.decode(errors="replace")
            if worker.rank == self.place.first_rank:
                self.screen.passed_on(text)
            elif self.verbose:
                self.screen.passed_on(f"[rank {worker.rank}] {text}")
            return
        what, value = json.loads(line)
        if what == "result":
            worker.said = value
        elif worker.rank == 0:
            if what == "planned" and self.records:
                record_plan(self.run_dir, value)
            replay(self.screen, what, value)

    # --- the end ---

    def _verdict(self) -> Ended:
        """One outcome of all: a cause before its consequences in the other ranks."""
        ends = []
        for worker in self.workers:
            code = worker.process.returncode
            said = worker.said or {}
            outcome = Outcome(said["outcome"]) if said else outcome_of_code(code)
            message = said.get("message", "")
            if not said and outcome is not Outcome.OK:
                log = self.run_dir.log_path(worker.rank)
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
                message = f"worker {worker.rank} {how} (see {log})"
            ends.append((outcome, worker.rank, message, said))
        severity = [Outcome.USER_ERROR, Outcome.USAGE, Outcome.DATA, Outcome.NAN, Outcome.OOM, Outcome.HANG, Outcome.INFRA]
        ranking = {o: i for i, o in enumerate([*severity, Outcome.PREEMPTED, Outcome.OK])}
        outcome, _, message, said = min(ends, key=lambda e: (ranking[e[0]], e[1]))
        return Ended(outcome, message, said, interrupted=self.signals > 0, stopped=self.stopped)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.stopped = True
        if number == signal.SIGINT:
            self.signals += 1
            if self.signals > 1:
                self._kill()
                return
            self.screen.notice("stopping after this step and saving (Ctrl-C again ends at once)")
        for worker in self.workers:
            if worker.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    worker.process.send_signal(signal.SIGTERM)


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


def _open_log(path: Path) -> BinaryIO | None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return open(path, "ab", buffering=0)
    except OSError:
        return None  # a full disk must not stop the training
