"""The watcher of one worker: it forwards signals, watches the heartbeat, copies the output, and ends with the worker's exit code."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import selectors
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from drivetrain import strict
from drivetrain.launch.ending import raise_failure, record_stop
from drivetrain.launch.rendezvous.messages import HangReport, HangVerdict, Message, ReportNow
from drivetrain.launch.watcher.links import LeaderLinks, MemberLinks
from drivetrain.launch.watcher.output import Output
from drivetrain.launch.watcher.worker_side import LeaderPort, TrainingStart
from drivetrain.outcomes import Outcome, Problem, outcome_of_code
from drivetrain.processes.procfs import descendants
from drivetrain.processes.stack_dumps import DUMP_SIGNAL, stacks_path
from drivetrain.processes.worker import REPEATED_SECONDS
from drivetrain.runs import Run
from drivetrain.supervise import JobEnd, handling_signals
from drivetrain.supervise.hang_detector import HangDetector, WatchedRank
from drivetrain.supervise.records import FirstSteps, record_hang
from drivetrain.supervise.verdicts import LeaderVerdicts, LocalVerdicts, MemberVerdicts, Verdict, find_hang
from drivetrain.watch.heartbeat import HeartbeatReader
from drivetrain.watch.screen import Screen

POLL_SECONDS = 0.5
ANSWER_SECONDS = 30.0  # the ranks' watchers may take this long, and --hang-after, to report
VERDICT_SECONDS = 2.0  # after the worker lost another rank: the leader may be about to send a verdict
MEMBERS_END_SECONDS = 5.0  # the other ranks may take this long to end after a verdict
KILL_SECONDS = 10.0  # a killed process may take this long to end


@dataclass(frozen=True)
class WatchedProcess:
    """The worker, as its watcher sees it."""

    pid: int
    rank: int
    events: int
    output: Output
    heartbeat: HeartbeatReader
    folder: Path
    """The folder for its stacks."""

    def watched_rank(self) -> WatchedRank:
        return WatchedRank(self.rank, self.pid, self.heartbeat.read(), stacks_path(self.folder, self.rank), self.heartbeat.read)

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kills the worker and the processes that it started."""
        for pid in (self.pid, *descendants(self.pid)):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


@dataclass
class _WatchedTraining:
    """What is watched between the begin and the end of a training."""

    run: Run
    detector: HangDetector
    verdicts: LocalVerdicts
    first_steps: FirstSteps


class Watcher:
    def __init__(self, process: WatchedProcess, hang_after: float, leader: LeaderLinks | None, screen: Screen) -> None:
        """`leader`: the connections to the other ranks' watchers, if this is rank 0's."""
        self.process, self.hang_after, self.screen = process, hang_after, screen
        self.verdict: Verdict | None = None
        self._leader, self._member = leader, None if leader is not None else MemberLinks(0, b"", process.rank)
        self._training: _WatchedTraining | None = None
        self._num_trainings = 0
        self._code: int | None = None
        """The worker's exit code, or minus the number of the signal that ended it; None while it runs."""
        self._interrupted_at = 0.0
        self._event_text = b""
        self._selector = selectors.DefaultSelector()

    # --- signals ---

    @contextlib.contextmanager
    def forwarding_signals(self, mask: Iterable[int]) -> Iterator[None]:
        """Sends the worker the signals that this process gets. `mask` is the signal mask while it does."""
        reader, writer = os.pipe()  # a signal wakes the selector
        for handle in (reader, writer):
            os.set_blocking(handle, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        previous = signal.signal(signal.SIGCHLD, lambda *_: None)
        if DUMP_SIGNAL is not None:
            signal.signal(DUMP_SIGNAL, signal.SIG_IGN)  # it is for the worker; a launcher may send it to both
        self._selector.register(reader, selectors.EVENT_READ, None)
        with handling_signals(self._forward):
            signal.pthread_sigmask(signal.SIG_SETMASK, set(mask))
            yield
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, previous)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        if self._code is not None or self.verdict is not None:
            return
        if number == signal.SIGINT and self._interrupted_at:
            if time.monotonic() - self._interrupted_at > REPEATED_SECONDS:
                self.process.kill()
            return
        if number == signal.SIGINT:
            self._interrupted_at = time.monotonic()
        self.process.signal(number)

    # --- the loop ---

    def run(self) -> int:
        """Watches the worker until it has ended; returns its exit code, or 128 and the number of the signal that ended it. On rank 0,
        raises Problem after a hang."""
        for handle in (self.process.events, *self.process.output.targets):
            os.set_blocking(handle, False)
            self._selector.register(handle, selectors.EVENT_READ, handle)
        try:
            while self._poll() is None and self.verdict is None:
                self._read(POLL_SECONDS)
                self._watch()
            self._read(0.0)  # the run, if the worker ended at once
            self._wait_for_verdict()
            if self.verdict is not None:
                return self._end_hung(self.verdict)
            code = self._code or 0
            return code if code >= 0 else 128 - code
        finally:
            self.process.output.drain()
            self._close_links()

    def end_like_worker(self) -> None:
        """If a signal ended the worker, ends this process by the same signal, so that the launcher reports it."""
        if self.verdict is None and self._code is not None and self._code < 0:
            resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))  # the worker has left the useful one
            if -self._code not in (signal.SIGKILL, signal.SIGSTOP):
                signal.signal(-self._code, signal.SIG_DFL)
            os.kill(os.getpid(), -self._code)

    def _poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.process.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def _read(self, seconds: float) -> None:
        for key, _ in self._selector.select(seconds):
            if key.data == self.process.events:
                is_open = self._read_events()
            elif key.data is None:
                is_open = bool(os.read(int(key.fd), 1 << 10))
            else:
                is_open = self.process.output.copy(key.data)
            if not is_open:
                self._selector.unregister(key.fd)

    def _read_events(self) -> bool:
        data = os.read(self.process.events, 1 << 16)
        *lines, self._event_text = (self._event_text + data).split(b"\n")
        for line in lines:
            kind, value = json.loads(line)
            self._training = self._begin(strict.read(TrainingStart, value)) if kind == "begin" else None
        return bool(data)

    def _begin(self, start: TrainingStart) -> _WatchedTraining:
        run = Run(start.run)
        self._num_trainings += 1
        self.process.output.open_log(run.log_path(self.process.rank))
        first_steps = FirstSteps(run)
        detector = HangDetector(self.hang_after, first_steps.seconds)
        return _WatchedTraining(run, detector, self._make_verdicts(start.leader), first_steps)

    def _make_verdicts(self, leader: LeaderPort) -> LocalVerdicts:
        if self._leader is not None:
            links, number = self._leader, self._num_trainings
            return LeaderVerdicts(
                links.running_ranks,
                lambda: links.send(ReportNow(number)),
                self._broadcast,
                lambda rank: None,
                ANSWER_SECONDS + self.hang_after,
            )
        if self._num_trainings == 1:
            self._member = MemberLinks(leader.port, bytes.fromhex(leader.token), self.process.rank)
        member, number = self._member, self._num_trainings
        assert member is not None
        return MemberVerdicts(lambda reports: member.send(HangReport(number, reports)))

    # --- hangs ---

    def _watch(self) -> None:
        self._take_messages()
        if self._training is not None and self.verdict is None:
            try:
                self._check(self._training)
            except OSError as error:  # a fault of the watcher must not end the training
                self._training = None
                print(f"drivetrain: rank {self.process.rank} is no longer watched for hangs: {error}", file=sys.stderr)

    def _check(self, training: _WatchedTraining) -> None:
        """Reports this rank if its heartbeat has stopped, and takes the verdict if there is one."""
        if training.run.path.is_dir():  # not on a machine that does not share rank 0's disk
            training.first_steps.update(self.process.heartbeat.first_step_seconds())
        reports = training.detector.check([self.process.watched_rank()], training.verdicts.wants_reports)
        self.verdict = training.verdicts(reports)
        if self.verdict is None and self._member is not None and not self._member.is_connected:
            self.verdict = find_hang(reports or [], all_ranks=False)  # without the leader: if this rank hangs by itself
            if self.verdict is not None:
                self.screen.put(f"hang    {self.verdict.message}")

    def _take_messages(self) -> None:
        if self._leader is not None:
            for rank, report in self._leader.receive():
                self._take_report(rank, report)
        elif self._member is not None:
            while (message := self._member.receive()) is not None:
                if isinstance(message, HangVerdict):
                    self.verdict = message.verdict
                elif isinstance(message, ReportNow) and self._training is not None:
                    self._training.verdicts.wants_reports = True

    def _take_report(self, rank: int, message: Message) -> None:
        verdicts = None if self._training is None else self._training.verdicts
        if isinstance(message, HangReport) and message.attempt == self._num_trainings and isinstance(verdicts, LeaderVerdicts):
            verdicts.receive(rank, [report for report in message.reports if report.rank == rank])

    def _broadcast(self, verdict: Verdict) -> None:
        """Records a verdict and sends it to all ranks. The own worker is stopped first: if it saw the others end, it would record that."""
        assert self._leader is not None and self._training is not None
        self.process.signal(signal.SIGSTOP)
        run = self._training.run
        path = record_hang(run, verdict)
        if self.screen.live:
            self.screen.put("")  # the worker's last line has no newline
        self.screen.line("hang", f"{verdict.message} (stacks: {path})")
        with contextlib.suppress(OSError, Problem):  # a full disk must not keep the ranks from ending
            record_stop(run, Outcome.HANG, verdict.message)
        self._leader.send(HangVerdict(self._num_trainings, replace(verdict, evidence="")))

    def _wait_for_verdict(self) -> None:
        """If the worker lost another rank, waits a moment: perhaps that rank was ended because of a verdict."""
        deadline = time.monotonic() + VERDICT_SECONDS
        if self._member is None or outcome_of_code(self._code or 0) is not Outcome.INFRA:
            return
        while self.verdict is None and self._member.is_connected and time.monotonic() < deadline:
            self._take_messages()
            time.sleep(0.02)

    def _end_hung(self, verdict: Verdict) -> int:
        """Kills the worker. Returns the exit code of a hang; on rank 0, raises it with the message."""
        if self._leader is not None:
            self._leader.wait_for_ends(MEMBERS_END_SECONDS)
        self.process.kill()
        deadline = time.monotonic() + KILL_SECONDS
        while self._poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        if self._leader is not None and self._training is not None:
            raise_failure(JobEnd(Outcome.HANG, verdict.message), self._training.run)
        return Outcome.HANG.code

    def _close_links(self) -> None:
        outcome = Outcome.HANG if self.verdict is not None else outcome_of_code(self._code or 0)
        if self._leader is not None:
            self._leader.close()
        if self._member is not None:
            self._member.close(outcome)
