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
from drivetrain.runs import Run, record_plan, record_total_steps
from drivetrain.supervise.ending import JobEnd, Worker, end_of_workers
from drivetrain.supervise.fork_server import ForkServer, WorkerProcess
from drivetrain.supervise.hang_detector import HangDetector, WatchedRank
from drivetrain.supervise.verdicts import LocalVerdicts, Verdict
from drivetrain.watch.deadline import MIN_SECONDS
from drivetrain.watch.heartbeat import HeartbeatReader, open_heartbeat_page
from drivetrain.watch.screen import Screen, show_event
from drivetrain.watch.time_breakdown import TimeBreakdown

PLAN_RECORDING_JOBS = (TrainJob, VerifyJob)
"""Jobs whose first steps may change the plan in run.json."""
POLL_SECONDS = 0.2
# How long the other workers may take to report how they ended, after one worker ...
FAILURE_GRACE_SECONDS = 5.0  # ... reported a failure
OOM_GRACE_SECONDS = 1.0  # ... ran out of memory
DEATH_GRACE_SECONDS = 0.1  # ... died without a result: the others can only report a lost connection
KILL_SECONDS = 10.0  # a killed process may take this long to end


@dataclass(frozen=True)
class WorkerPlacement:
    """The ranks of this machine's workers, and the address of torch's process group."""

    first_rank: int
    local_procs: int
    world_size: int
    master: tuple[str, int]
    interface: str = ""
    """The network interface for gloo; "": torch chooses."""

    def environment(self, local_rank: int) -> dict[str, str]:
        """Returns a worker's environment variables: torchrun's, and the interface for gloo unless the user has set it."""
        gloo = {}
        if self.interface and "GLOO_SOCKET_IFNAME" not in os.environ:
            gloo = {"GLOO_SOCKET_IFNAME": self.interface}
        return gloo | {
            "RANK": str(self.first_rank + local_rank), "LOCAL_RANK": str(local_rank), "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_procs), "MASTER_ADDR": self.master[0], "MASTER_PORT": str(self.master[1]),
        }  # fmt: skip


class Attempt:
    def __init__(
        self, job: Job, file: Path, placement: WorkerPlacement, screen: Screen, hang_detector: HangDetector, verdicts: LocalVerdicts, verbose: bool
    ) -> None:  # fmt: skip
        self.file, self.placement, self.screen, self.hang_detector, self.verdicts = file, placement, screen, hang_detector, verdicts
        self.verbose = verbose
        self.run_dir = Run(job.run)
        self.records_plan, self.watches_heartbeats = isinstance(job, PLAN_RECORDING_JOBS), isinstance(job, TrainJob)
        self.workers: list[Worker] = []
        self.verdict: Verdict | None = None
        self.abort_reason = ""
        self.left_before_start = False
        """Whether it was stopped before any rank began its first step."""
        self.on_poll: Callable[[], object] = lambda: None
        self.on_verdict: Callable[[Verdict], object] = lambda verdict: None
        self._kill_at = math.inf
        end = job.end if isinstance(job, TrainJob) else None
        self._leave_at = (end or math.inf) - MIN_SECONDS
        """The time limit for an attempt that has not begun its first step, in seconds since the epoch."""
        self._signals_sent: list[Callable[[WorkerProcess], None]] = []
        """The signals sent to all workers so far; a worker that starts later gets them too."""
        self._is_unkillable = False
        """Whether a killed worker did not end in time."""
        self._selector = selectors.DefaultSelector()

    def run(self, fork_server: ForkServer) -> None:
        try:
            if fork_server.handle is not None:
                self._selector.register(fork_server.handle, selectors.EVENT_READ, None)
            for local_rank in range(self.placement.local_procs):
                self._start(fork_server, local_rank)
            self.screen.busy("loading torch and the task ...")
            while self._has_live_workers():
                self._read_pipes(POLL_SECONDS, fork_server)
                self._record_ends(fork_server)
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

    def _has_live_workers(self) -> bool:
        return any(worker.process.poll() is None for worker in self.workers)

    def _start(self, fork_server: ForkServer, local_rank: int) -> None:
        rank = self.placement.first_rank + local_rank
        events, event_writer = os.pipe()
        output, output_writer = os.pipe()
        page = open_heartbeat_page()
        heartbeat = HeartbeatReader(page)
        process = fork_server.start(self.file, self.placement.environment(local_rank), output_writer, event_writer, page)
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
        while self._has_live_workers():
            self._read_pipes(0.1, fork_server)
            self._record_ends(fork_server)
            if time.monotonic() > deadline:  # a worker is blocked in a driver or a disk access, or not forked yet
                self._is_unkillable = True
                fork_server.kill()
                break

    def _watch(self) -> None:
        """If a worker failed, kills the others after a short time; else checks the heartbeats."""
        ended = [worker for worker in self.workers if worker.process.code is not None]
        failed = [worker for worker in ended if worker.result is None or worker.result["outcome"] not in (Outcome.OK, Outcome.PREEMPTED)]
        if failed:
            self._kill_at = min(self._kill_at, time.monotonic() + _grace_seconds(failed))
        elif self.watches_heartbeats and self.verdict is None:
            reports = self.hang_detector.check(self._watched_ranks(), self.verdicts.wants_reports)
            if verdict := self.verdicts(reports):
                self.end_hung(verdict)
        if time.time() > self._leave_at:  # from the first step on, workers obey the time limit themselves
            self._leave()
        if time.monotonic() > self._kill_at:
            self.kill()

    def _watched_ranks(self) -> list[WatchedRank]:
        ranks = []
        for worker in self.workers:
            pid = worker.process.pid
            if pid is not None and worker.process.code is None:
                stacks = stacks_path(self.file.parent, worker.rank)
                ranks.append(WatchedRank(worker.rank, pid, worker.heartbeat.read(), stacks, worker.heartbeat.read))
        return ranks

    def _record_ends(self, fork_server: ForkServer) -> None:
        """Records the order in which workers end, and reads the last events of each."""
        if fork_server.end_message:
            self.abort(fork_server.end_message)
        for worker in self.workers:
            if worker.process.poll() is not None and worker.num_ended_before is None:
                worker.num_ended_before = sum(w.num_ended_before is not None for w in self.workers)
                while worker.event_pipe >= 0 and self._read(worker, "events", worker.event_pipe):
                    pass

    def end_hung(self, verdict: Verdict) -> None:
        """Ends the attempt at once, because a rank hangs, here or on another machine."""
        if self.verdict is None:
            self.verdict, self._kill_at = verdict, 0.0
            self.on_verdict(verdict)

    def abort(self, reason: str) -> None:
        """Ends the attempt at once, for a reason outside of the workers."""
        if not self.abort_reason:
            self.abort_reason, self._kill_at = reason, 0.0

    def kill(self) -> None:
        for worker in self.workers:
            worker.was_killed_here |= worker.process.poll() is None
        self._send(WorkerProcess.kill)

    def time_breakdown(self) -> TimeBreakdown:
        """Returns how this machine's ranks spent their time."""
        times = [worker.heartbeat.time_by_part() for worker in self.workers]
        return TimeBreakdown([parts for _, parts in times], max((steps for steps, _ in times), default=0))

    def first_step_seconds(self) -> dict[str, float]:
        """Returns the longest duration of each phase of the first step, over this machine's ranks; {} until all have taken that step."""
        times = [worker.heartbeat.first_step_seconds() for worker in self.workers]
        if not times or not all(times):
            return {}
        return {phase: max(seconds.get(phase, 0.0) for seconds in times) for phase in times[0]}

    def stop(self) -> None:
        """Asks the workers to end after their current step. Before the first step the attempt ends at once: there is nothing to save."""
        self._leave()
        self._send(lambda process: process.signal(signal.SIGTERM))

    def _leave(self) -> None:
        """Ends the attempt at once if no rank has begun its first step; with several machines that is not known."""
        is_only_machine = self.placement.local_procs == self.placement.world_size
        if self.watches_heartbeats and is_only_machine and not any(worker.heartbeat.read().has_begun for worker in self.workers):
            self.left_before_start, self._kill_at = True, 0.0

    def _send(self, send: Callable[[WorkerProcess], None]) -> None:
        self._signals_sent.append(send)
        for worker in self.workers:
            send(worker.process)

    # --- output and events of workers ---

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
        """Reads from a pipe; returns whether there was data."""
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
        """Reads the rest of the pipes, but does not wait until they close: a loader worker that outlives its rank may hold them open."""
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
            if worker.event_pipe == handle:
                worker.event_pipe = -1

    def _show_output(self, worker: Worker, line: bytes) -> None:
        if worker.log:
            with contextlib.suppress(OSError):
                worker.log.write(line + b"\n")
        text = line.decode(errors="replace")
        if worker.rank == self.placement.first_rank:
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
            elif event == "started" and self.records_plan:
                record_total_steps(self.run_dir, value["steps"])
            show_event(self.screen, event, value)

    # --- the end ---

    def end(self) -> JobEnd:
        """Returns how the attempt ended."""
        can_restart = not self._is_unkillable
        if self.verdict is not None:
            return JobEnd(Outcome.HANG, self.verdict.message, lost=can_restart)
        if self.left_before_start:
            return JobEnd(Outcome.PREEMPTED, result={"step": self.run_dir.last_checkpoint_step})
        results = [worker.result for worker in self.workers]
        if self.abort_reason and any(result is None or Outcome(result["outcome"]) is Outcome.INFRA for result in results):
            return JobEnd(Outcome.INFRA, self.abort_reason, lost=True)
        return end_of_workers(self.workers, self.run_dir, can_restart)


def _grace_seconds(failed: list[Worker]) -> float:
    """Returns how long the other workers may take to report how they ended."""
    if any(worker.result is None for worker in failed):
        return DEATH_GRACE_SECONDS
    ran_out_of_memory = any(worker.result and worker.result["outcome"] == Outcome.OOM for worker in failed)
    return OOM_GRACE_SECONDS if ran_out_of_memory else FAILURE_GRACE_SECONDS


def _open_log(path: Path) -> BinaryIO | None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return open(path, "ab", buffering=0)
    except OSError:
        return None  # a full disk must not stop the training
