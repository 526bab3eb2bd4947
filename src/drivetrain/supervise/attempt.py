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
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from drivetrain.outcomes import Outcome
from drivetrain.processes.job import Job, TrainJob, VerifyJob
from drivetrain.processes.stack_dumps import stacks_path
from drivetrain.runs import Run, record_plan
from drivetrain.supervise.ending import JobEnd, Worker, end_of_workers
from drivetrain.supervise.fork_server import ForkServer, WorkerProcess
from drivetrain.supervise.hang_detector import HangDetector, WatchedRank
from drivetrain.supervise.verdicts import LocalVerdicts, Verdict
from drivetrain.watch.deadline import MIN_SECONDS
from drivetrain.watch.heartbeat import HeartbeatReader, open_heartbeat_page
from drivetrain.watch.screen import Screen, show_event
from drivetrain.watch.time_breakdown import TimeBreakdown

PLAN_RECORDING_JOBS = (TrainJob, VerifyJob)
"""Jobs whose plan in run.json follows what their first steps decide."""
POLL_SECONDS = 0.2
FAILURE_GRACE_SECONDS = 5.0  # for the others to report how they ended, once one has failed
OOM_GRACE_SECONDS = 1.0  # where one ran out of memory: what the others will report is known
DEATH_GRACE_SECONDS = 0.1  # where one died without a result: the others can only have lost it
KILL_SECONDS = 10.0  # a killed process may take this long to end


@dataclass(frozen=True)
class WorkerPlacement:
    """The ranks of this machine's workers, and where all workers meet."""

    first_rank: int
    local_procs: int
    world_size: int
    master: tuple[str, int]
    interface: str = ""
    """The network interface on which processes meet; empty: torch chooses."""

    def environment(self, local_rank: int) -> dict[str, str]:
        """Returns torchrun's variables for a worker; and the interface for gloo, unless the user has set it."""
        gloo = {"GLOO_SOCKET_IFNAME": self.interface} if self.interface and "GLOO_SOCKET_IFNAME" not in os.environ else {}
        return gloo | {
            "RANK": str(self.first_rank + local_rank), "LOCAL_RANK": str(local_rank), "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_procs), "MASTER_ADDR": self.master[0], "MASTER_PORT": str(self.master[1]),
        }  # fmt: skip


class Attempt:
    def __init__(
        self, job: Job, file: Path, place: WorkerPlacement, screen: Screen, hang_detector: HangDetector, verdicts: LocalVerdicts, verbose: bool
    ) -> None:  # fmt: skip
        self.file, self.place, self.screen, self.hang_detector, self.verdicts = file, place, screen, hang_detector, verdicts
        self.verbose = verbose
        self.run_dir = Run(job.run)
        self.records_plan, self.watches_heartbeats = isinstance(job, PLAN_RECORDING_JOBS), isinstance(job, TrainJob)
        self.workers: list[Worker] = []
        self.verdict: Verdict | None = None
        self.abort_reason = ""
        self.left_before_start = False
        """Whether it was to stop before any rank had begun its first step."""
        self.on_poll: Callable[[], object] = lambda: None
        self.on_verdict: Callable[[Verdict], object] = lambda verdict: None
        self._kill_at = math.inf
        end = job.end if isinstance(job, TrainJob) else None
        self._leave_at = (end or math.inf) - MIN_SECONDS
        self._signals_sent: list[Callable[[WorkerProcess], None]] = []
        """What was sent to all workers, for those that are started later."""
        self._is_unkillable = False
        self._selector = selectors.DefaultSelector()

    def run(self, fork_server: ForkServer) -> None:
        try:
            if fork_server.handle is not None:
                self._selector.register(fork_server.handle, selectors.EVENT_READ, None)
            for local_rank in range(self.place.local_procs):
                self._start(fork_server, local_rank)
            self.screen.busy("loading torch and the task ...")
            while any(w.process.poll() is None for w in self.workers):
                self._read_pipes(POLL_SECONDS, fork_server)
                self._note_ends(fork_server)
                self.on_poll()
                self._watch()
                if self.left_before_start:
                    break
            self._drain(fork_server)
        finally:
            self.kill()
            self._wait_for_ends(fork_server)
            self._selector.close()
            for worker in self.workers:
                if worker.log:
                    worker.log.close()
        self.screen.close()

    # --- processes ---

    def _start(self, fork_server: ForkServer, local_rank: int) -> None:
        rank = self.place.first_rank + local_rank
        events, event_writer = os.pipe()
        output, output_writer = os.pipe()
        page = open_heartbeat_page()
        heartbeat = HeartbeatReader(page)
        process = fork_server.start(self.file, self.place.environment(local_rank), output_writer, event_writer, page)
        for handle in (event_writer, output_writer, page):
            os.close(handle)
        for send in self._signals_sent:
            send(process)
        worker = Worker(rank, process, heartbeat, _open_log(self.run_dir.log_path(rank)), events)
        self.workers.append(worker)
        for handle, kind in ((events, "events"), (output, "output")):
            os.set_blocking(handle, False)
            self._selector.register(handle, selectors.EVENT_READ, (worker, kind))

    def _wait_for_ends(self, fork_server: ForkServer) -> None:
        deadline = time.monotonic() + (0.0 if self.left_before_start else KILL_SECONDS)
        while any(w.process.poll() is None for w in self.workers):
            self._read_pipes(0.1, fork_server)
            self._note_ends(fork_server)
            if time.monotonic() > deadline:  # held by a driver or a disk, or not forked yet
                self._is_unkillable = True
                fork_server.kill()
                break

    def _watch(self) -> None:
        """Ends the other workers, after a moment, once one has failed; and checks the heartbeats."""
        ended = [w for w in self.workers if w.process.code is not None]
        failed = [w for w in ended if w.result is None or w.result["outcome"] not in (Outcome.OK, Outcome.PREEMPTED)]
        if failed:
            self._kill_at = min(self._kill_at, time.monotonic() + _grace_seconds(failed))
        elif self.watches_heartbeats and self.verdict is None:
            alive = ((w, w.process.pid) for w in self.workers if w.process.code is None)
            ranks = [
                WatchedRank(w.rank, pid, w.heartbeat.read(), stacks_path(self.file.parent, w.rank), w.heartbeat.read)
                for w, pid in alive
                if pid is not None
            ]
            if verdict := self.verdicts(self.hang_detector.check(ranks, self.verdicts.wants_reports)):
                self.end_hung(verdict)
        if time.time() > self._leave_at:  # once they train, workers obey the time limit themselves
            self._leave()
        if time.monotonic() > self._kill_at:
            self.kill()

    def _note_ends(self, fork_server: ForkServer) -> None:
        """Notes the order in which workers end, and reads what each wrote before its end."""
        if fork_server.end_message:
            self.abort(fork_server.end_message)
        for worker in self.workers:
            if worker.process.poll() is not None and worker.num_ended_before is None:
                worker.num_ended_before = sum(w.num_ended_before is not None for w in self.workers)
                while worker.event_pipe >= 0 and self._read(worker, "events", worker.event_pipe):
                    pass

    def end_hung(self, verdict: Verdict) -> None:
        """Ends at once, because a rank hangs, here or on another machine."""
        if self.verdict is None:
            self.verdict, self._kill_at = verdict, 0.0
            self.on_verdict(verdict)

    def abort(self, reason: str) -> None:
        """Ends at once, for a reason outside of the workers."""
        if not self.abort_reason:
            self.abort_reason, self._kill_at = reason, 0.0

    def kill(self) -> None:
        for worker in self.workers:
            worker.was_killed_here |= worker.process.poll() is None
        self._send(WorkerProcess.kill)

    def time_breakdown(self) -> TimeBreakdown:
        """Returns where this machine's ranks spent their time."""
        times = [worker.heartbeat.time_by_part() for worker in self.workers]
        return TimeBreakdown([parts for _, parts in times], max((steps for steps, _ in times), default=0))

    def first_step_seconds(self) -> dict[str, float]:
        """Returns the longest that this machine's ranks took for the first step, by phase; nothing before all have taken it."""
        times = [worker.heartbeat.first_step_seconds() for worker in self.workers]
        return {phase: max(t.get(phase, 0.0) for t in times) for phase in times[0]} if times and all(times) else {}

    def stop(self) -> None:
        """Asks the workers to end after their step; at once, where none has begun one: there is nothing to save."""
        self._leave()
        self._send(lambda process: process.signal(signal.SIGTERM))

    def _leave(self) -> None:
        """Ends at once if no rank, of all machines, has begun its first step."""
        is_only_machine = self.place.local_procs == self.place.world_size
        if self.watches_heartbeats and is_only_machine and not any(w.heartbeat.read().has_begun for w in self.workers):
            self.left_before_start, self._kill_at = True, 0.0

    def _send(self, send: Callable[[WorkerProcess], None]) -> None:
        self._signals_sent.append(send)
        for worker in self.workers:
            send(worker.process)

    # --- what workers write ---

    def _read_pipes(self, seconds: float, fork_server: ForkServer) -> bool:
        ready = self._selector.select(seconds)
        for key, _ in ready:
            if key.data is None:
                fork_server.read_events(self._selector.unregister)
            else:
                worker, kind = key.data
                self._read(worker, kind, int(key.fd))
        return bool(ready)

    def _read(self, worker: Worker, kind: str, handle: int) -> bool:
        """Reads from a pipe; returns whether there was anything."""
        try:
            data = os.read(handle, 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            self._close_pipe(handle)
        *lines, worker.unfinished_line[kind] = (worker.unfinished_line[kind] + data).split(b"\n")
        if not data and worker.unfinished_line[kind]:
            lines.append(worker.unfinished_line[kind])
            worker.unfinished_line[kind] = b""
        for line in lines:
            self._take_event(worker, line) if kind == "events" else self._show_output(worker, line)
        return bool(data)

    def _drain(self, fork_server: ForkServer) -> None:
        """Reads what is left in the pipes; a loader worker that outlives its rank may hold them open."""
        self.kill()
        for _ in range(100):
            if not self._read_pipes(0.0, fork_server):
                break
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                self._close_pipe(int(key.fd))

    def _close_pipe(self, handle: int) -> None:
        self._selector.unregister(handle)
        os.close(handle)
        for worker in self.workers:
            worker.event_pipe = -1 if worker.event_pipe == handle else worker.event_pipe

    def _show_output(self, worker: Worker, line: bytes) -> None:
        if worker.log:
            with contextlib.suppress(OSError):
                worker.log.write(line + b"\n")
        text = line.decode(errors="replace")
        if worker.rank == self.place.first_rank:
            self.screen.worker_output(text)
        elif self.verbose:
            self.screen.worker_output(f"[rank {worker.rank}] {text}")

    def _take_event(self, worker: Worker, line: bytes) -> None:
        event, value = json.loads(line)
        if event == "result":
            worker.result = value
        elif worker.rank == 0:
            if event == "planned" and self.records_plan:
                record_plan(self.run_dir, value)
            show_event(self.screen, event, value)

    # --- the end ---

    def end(self) -> JobEnd:
        """Returns how the attempt ended."""
        can_restart = not self._is_unkillable
        if self.verdict is not None:
            return JobEnd(Outcome.HANG, self.verdict.message, lost=can_restart)
        if self.left_before_start:
            return JobEnd(Outcome.PREEMPTED, result={"step": self.run_dir.last_checkpoint_step})
        if self.abort_reason and any(w.result is None or Outcome(w.result["outcome"]) is Outcome.INFRA for w in self.workers):
            return JobEnd(Outcome.INFRA, self.abort_reason, lost=True)
        return end_of_workers(self.workers, self.run_dir, can_restart)


def _grace_seconds(failed: list[Worker]) -> float:
    """Returns how long the other workers may take to report how they ended."""
    if any(w.result is None for w in failed):
        return DEATH_GRACE_SECONDS
    ran_out_of_memory = any(w.result and w.result["outcome"] == Outcome.OOM for w in failed)
    return OOM_GRACE_SECONDS if ran_out_of_memory else FAILURE_GRACE_SECONDS


def _open_log(path: Path) -> BinaryIO | None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return open(path, "ab", buffering=0)
    except OSError:
        return None  # a full disk must not stop the training
