"""One attempt at a job: this machine's workers, from their start until all have ended."""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from drivetrain.outcomes import Outcome
from drivetrain.processes.job import Job, TrainJob, VerifyJob
from drivetrain.processes.stack_dumps import stacks_path
from drivetrain.runs import Run, record_plan
from drivetrain.supervise.judges import Judge
from drivetrain.supervise.nursery import Child, Nursery
from drivetrain.supervise.verdict import Rank, Verdict, Watchman
from drivetrain.watch.deadline import LEAST
from drivetrain.watch.pulse import Pulse, open_page
from drivetrain.watch.screen import Screen, replay
from drivetrain.watch.spent import Spent

RECORDED = (TrainJob, VerifyJob)  # jobs that update the plan in run.json
GRACE = 5.0  # seconds the others get to say how they ended, once one has failed
SHORT_GRACE = 1.0  # where one ran out of memory: what the others will say is known
DYING = 10.0  # seconds a process that was killed may take to die
NO_GRACE = 0.1  # where one was killed: the others can only have lost it
SEVERITY = [Outcome.USER_ERROR, Outcome.USAGE, Outcome.DATA, Outcome.NAN, Outcome.OOM, Outcome.HANG, Outcome.INFRA, Outcome.PREEMPTED]


@dataclass(frozen=True)
class Place:
    """Where this machine's workers stand among all."""

    first_rank: int
    local_procs: int
    world_size: int
    master: tuple[str, int]
    interface: str = ""
    """The network interface on which processes meet; empty: torch chooses."""

    def environment(self, local: int) -> dict[str, str]:
        """What tells a worker its place: torchrun's own variables; and where gloo listens, unless the user has said where."""
        gloo = {"GLOO_SOCKET_IFNAME": self.interface} if self.interface and "GLOO_SOCKET_IFNAME" not in os.environ else {}
        return gloo | {
            "RANK": str(self.first_rank + local), "LOCAL_RANK": str(local), "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_procs), "MASTER_ADDR": self.master[0], "MASTER_PORT": str(self.master[1]),
        }  # fmt: skip


@dataclass
class Ended:
    outcome: Outcome
    message: str = ""
    result: dict[str, Any] = field(default_factory=dict)
    interrupted: bool = False
    stopped: bool = False
    """Whether this process was asked to stop, by whatever signal."""
    spent: Spent | None = None
    """Where the time went."""
    lost: bool = False
    """Whether a process was lost, or hung: nothing that another start would only repeat."""


@dataclass
class _Worker:
    rank: int
    child: Child
    pulse: Pulse
    log: BinaryIO | None
    wire: int
    said: dict[str, Any] | None = None
    """Its result; None as long as it has sent none."""
    num_ended_before: int | None = None
    """Workers that ended before it; None while it lives."""
    killed_here: bool = False
    """Whether it was ended from here, for what another one did."""
    half: dict[str, bytes] = field(default_factory=lambda: {"wire": b"", "out": b""})


class Attempt:
    def __init__(self, job: Job, file: Path, place: Place, screen: Screen, watchman: Watchman, judge: Judge, verbose: bool) -> None:
        self.file, self.place, self.screen, self.watchman, self.judge, self.verbose = file, place, screen, watchman, judge, verbose
        self.run_dir = Run(job.run)
        self.records, self.watches = isinstance(job, RECORDED), isinstance(job, TrainJob)
        self.workers: list[_Worker] = []
        self.verdict: Verdict | None = None
        self.aborted = ""
        self.left = False
        """Whether it was to stop before any rank had begun its first step."""
        self.each_look: Callable[[], object] = lambda: None
        self.on_verdict: Callable[[Verdict], object] = lambda verdict: None
        self._end_by = math.inf
        self._leave_at = ((job.end if isinstance(job, TrainJob) else None) or math.inf) - LEAST
        self._told: list[Callable[[Child], None]] = []
        """What was said to all workers, for those that are still to come."""
        self._undead = False
        self._selector = selectors.DefaultSelector()

    def run(self, nursery: Nursery) -> None:
        try:
            if nursery.handle is not None:
                self._selector.register(nursery.handle, selectors.EVENT_READ, None)
            for local in range(self.place.local_procs):
                self._start(nursery, local)
            self.screen.busy("loading torch and the task ...")
            while any(w.child.poll() is None for w in self.workers):
                self._listen(0.2, nursery)
                self._note_ends(nursery)
                self.each_look()
                self._watch()
                if self.left:
                    break
            self._drain(nursery)
        finally:
            self.kill()
            deadline = time.monotonic() + (0.0 if self.left else DYING)
            while any(w.child.poll() is None for w in self.workers):
                self._listen(0.1, nursery)
                self._note_ends(nursery)
                if time.monotonic() > deadline:  # held by a driver or a disk, or not born yet
                    self._undead = True
                    nursery.kill()
                    break
            self._selector.close()
            for worker in self.workers:
                if worker.log:
                    worker.log.close()
        self.screen.close()

    # --- processes ---

    def _start(self, nursery: Nursery, local: int) -> None:
        rank = self.place.first_rank + local
        hear, wire = os.pipe()
        read, out = os.pipe()
        page = open_page()
        pulse = Pulse(page)
        child = nursery.start(self.file, self.place.environment(local), out, wire, page)
        for handle in (wire, out, page):
            os.close(handle)
        for say in self._told:
            say(child)
        worker = _Worker(rank, child, pulse, _open_log(self.run_dir.log_path(rank)), hear)
        self.workers.append(worker)
        for handle, kind in ((hear, "wire"), (read, "out")):
            os.set_blocking(handle, False)
            self._selector.register(handle, selectors.EVENT_READ, (worker, kind))

    def _watch(self) -> None:
        """Once one has failed, the others can only wait in vain: end them after a moment. And see that they live."""
        ended = [w for w in self.workers if w.child.code is not None]
        failed = [w for w in ended if w.said is None or w.said["outcome"] not in (Outcome.OK, Outcome.PREEMPTED)]
        if failed:
            died = any(w.said is None for w in failed)
            short = any(w.said and w.said["outcome"] == Outcome.OOM for w in failed)
            grace = NO_GRACE if died else SHORT_GRACE if short else GRACE
            self._end_by = min(self._end_by, time.monotonic() + grace)
        elif self.watches and self.verdict is None:
            alive = ((w, w.child.pid) for w in self.workers if w.child.code is None)
            ranks = [Rank(w.rank, pid, w.pulse.read(), self._answers(w.rank), w.pulse.read) for w, pid in alive if pid is not None]
            if verdict := self.judge(self.watchman.look(ranks, self.judge.asks)):
                self.convict(verdict)
        if time.time() > self._leave_at:  # which workers see to by themselves once they train
            self._leave()
        if time.monotonic() > self._end_by:
            self.kill()

    def _note_ends(self, nursery: Nursery) -> None:
        """Keep the order in which workers end, and hear the last of each: what it wrote before its end is in its pipe."""
        if nursery.lost:
            self.abort(nursery.lost)
        for worker in self.workers:
            if worker.child.poll() is not None and worker.num_ended_before is None:
                worker.num_ended_before = sum(w.num_ended_before is not None for w in self.workers)
                while worker.wire >= 0 and self._read(worker, "wire", worker.wire):
                    pass

    def _answers(self, rank: int) -> Path:
        return stacks_path(self.file.parent, rank)

    def convict(self, verdict: Verdict) -> None:
        """End at once, for a rank hangs, here or on another machine."""
        if self.verdict is None:
            self.verdict, self._end_by = verdict, 0.0
            self.on_verdict(verdict)

    def abort(self, why: str) -> None:
        """End at once, for a reason that lies elsewhere."""
        if not self.aborted:
            self.aborted, self._end_by = why, 0.0

    def kill(self) -> None:
        for worker in self.workers:
            worker.killed_here |= worker.child.poll() is None
        self._tell(Child.kill)

    def spent(self) -> Spent:
        """Where this machine's ranks spent their time."""
        told = [worker.pulse.spent() for worker in self.workers]
        return Spent([parts for _, parts in told], max((steps for steps, _ in told), default=0))

    def first(self) -> dict[str, float]:
        """The longest that this machine's ranks took for the first step, by place; nothing before all have done it."""
        told = [worker.pulse.first() for worker in self.workers]
        return {place: max(t.get(place, 0.0) for t in told) for place in told[0]} if told and all(told) else {}

    def stop(self) -> None:
        """Ask them to end after their step, or where none has begun one: at once, for there is nothing to save."""
        self._leave()
        self._tell(lambda child: child.signal(signal.SIGTERM))

    def _leave(self) -> None:
        alone = self.place.local_procs == self.place.world_size
        if self.watches and alone and not any(w.pulse.read().begun for w in self.workers):
            self.left, self._end_by = True, 0.0

    def _tell(self, say: Callable[[Child], None]) -> None:
        self._told.append(say)
        for worker in self.workers:
            say(worker.child)

    # --- what they say ---

    def _listen(self, seconds: float, nursery: Nursery) -> bool:
        ready = self._selector.select(seconds)
        for key, _ in ready:
            if key.data is None:
                nursery.listen(self._selector.unregister)
                continue
            worker, kind = key.data
            self._read(worker, kind, int(key.fd))
        return bool(ready)

    def _read(self, worker: _Worker, kind: str, handle: int) -> bool:
        """Hear what is in a pipe; false where that is nothing."""
        try:
            data = os.read(handle, 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            self._drop(handle)
        *lines, worker.half[kind] = (worker.half[kind] + data).split(b"\n")
        if not data and worker.half[kind]:
            lines.append(worker.half[kind])
            worker.half[kind] = b""
        for line in lines:
            self._hear(worker, kind, line)
        return bool(data)

    def _drain(self, nursery: Nursery) -> None:
        """Hear what is left in the pipes; a loader's worker that outlives its rank may hold them open."""
        self.kill()
        for _ in range(100):
            if not self._listen(0.0, nursery):
                break
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                self._drop(int(key.fd))

    def _drop(self, handle: int) -> None:
        self._selector.unregister(handle)
        os.close(handle)
        for worker in self.workers:
            worker.wire = -1 if worker.wire == handle else worker.wire

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

    def ended(self) -> Ended:
        """One outcome of all: a cause before its consequences in the other ranks."""
        if self.verdict is not None:
            return Ended(Outcome.HANG, self.verdict.message, lost=not self._undead)
        if self.left:
            return Ended(Outcome.PREEMPTED, result={"step": self.run_dir.last_checkpoint_step})
        if self.aborted and any(w.said is None or Outcome(w.said["outcome"]) is Outcome.INFRA for w in self.workers):
            return Ended(Outcome.INFRA, self.aborted, lost=True)
        ranking = {o: i for i, o in enumerate([*SEVERITY, Outcome.OK])}
        deaths = [w.num_ended_before or 0 for w in self.workers if w.said is None and not w.killed_here and w.child.code != -signal.SIGABRT]
        ends = []
        for worker in self.workers:
            said, order = worker.said or {}, worker.num_ended_before or 0
            outcome = Outcome(said["outcome"]) if said else Outcome.INFRA  # whatever its code: an end without a result is a death
            follows = bool(said.get("lost_peer")) if said else worker.killed_here
            if outcome is Outcome.USER_ERROR and deaths and min(deaths) < order:  # an exception about another's death
                outcome, follows = Outcome.INFRA, True
            ends.append(((ranking[outcome], follows, order), outcome, said, worker))
        _, outcome, said, worker = min(ends, key=lambda end: end[0])
        message = said["message"] if "message" in said else self._death(worker) if not said else ""
        return Ended(outcome, message, said, lost=outcome is Outcome.INFRA and not said.get("final") and not self._undead)

    def _death(self, worker: _Worker) -> str:
        """How a worker ended that sent no result."""
        if worker.child.failure:
            return f"worker {worker.rank} could not be started: {worker.child.failure}"
        code = worker.child.code or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code} and without a result"
        return f"worker {worker.rank} {how} (see {self.run_dir.log_path(worker.rank)})"


def _open_log(path: Path) -> BinaryIO | None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return open(path, "ab", buffering=0)
    except OSError:
        return None  # a full disk must not stop the training
