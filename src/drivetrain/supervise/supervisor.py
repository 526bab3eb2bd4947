"""The supervisor of a job: makes attempts until the job has ended."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from types import FrameType

from drivetrain.outcomes import Outcome, Problem
from drivetrain.plan import Plan
from drivetrain.processes.job import Diagnostics, Job, TrainJob, write
from drivetrain.runs import Run, remove_half_written_files, write_atomic
from drivetrain.supervise.attempt import PLAN_RECORDING_JOBS, Attempt, WorkerPlacement
from drivetrain.supervise.ending import JobEnd
from drivetrain.supervise.fork_server import ForkServer
from drivetrain.supervise.hang_detector import HangDetector
from drivetrain.supervise.placement import local_placement
from drivetrain.supervise.records import FirstSteps, record_hang
from drivetrain.supervise.restarts import RestartCount, RestartPolicy, plan_after_oom
from drivetrain.supervise.scratch import Scratch, sweep
from drivetrain.supervise.verdicts import LocalVerdicts, Verdict
from drivetrain.watch.screen import Screen
from drivetrain.watch.time_breakdown import TimeBreakdown

SECRETS = {"DRIVETRAIN_TOKEN", "DRIVETRAIN_TOKEN_FILE"}  # workers do not get these environment variables
TIME_BREAKDOWN_SECONDS = 5.0  # between two writes of the time breakdown
# Environment variables of workers, unless the user sets them. With NVML, torch finds GPUs without initialising the driver in the
# fork server, whose forks could not use a GPU then.
WORKER_DEFAULTS = {
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1", "KINETO_LOG_LEVEL": "5", "TORCH_FR_BUFFER_SIZE": "200",
}  # fmt: skip
TEMPORARY_ERRORS = {
    errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO,
}  # fmt: skip
"""With these errors a later start may succeed: processes, memory, handles or disk space were used up."""


class Supervisor:
    def __init__(
        self, job: Job, plan: Plan, placement: WorkerPlacement, screen: Screen, gpus: list[str], verbose: bool,
        replan: Callable[[], Plan] | None, policy: RestartPolicy,
    ) -> None:  # fmt: skip
        self.job, self.plan, self.placement, self.screen, self.gpus, self.verbose = job, plan, placement, screen, gpus, verbose
        self.replan, self.policy = replan, policy
        self.run_dir = Run(job.run)
        self.is_leader = placement.local_procs == placement.world_size
        """Whether it decides about restarts; of several machines only one does."""
        self.on_poll: Callable[[], object] = lambda: None
        """Called several times a second while an attempt runs."""
        self.verdicts = LocalVerdicts()
        """Decides which ranks hang; replaced if there are several machines."""
        self.merge_time_breakdown: Callable[[TimeBreakdown], TimeBreakdown | None] = lambda own: own
        """Returns the time breakdown of all machines, given this one's; None if another machine records it."""
        self.attempt: Attempt | None = None
        self.fork_server: ForkServer | None = None
        self.num_interrupts, self.stopped = 0, False
        self._scratch: Scratch | None = None
        self._restarts = RestartCount(self.run_dir)
        self._earlier_time, self._time_written_at = TimeBreakdown([], 0), time.monotonic()
        self._first_steps = FirstSteps(self.run_dir)

    def run(self) -> JobEnd:
        while True:
            end = self.run_attempt()
            was_stopped = self.stopped
            reason = self.restart_reason(end)
            if reason is None:
                is_stopped_in_pause = self.stopped and not was_stopped
                return self.run_attempt() if is_stopped_in_pause else end  # which ends at once, as preempted
            self.report_restart(reason, end.outcome)
            if isinstance(self.job, TrainJob) and end.outcome not in (Outcome.OOM, Outcome.NAN):
                self.plan = Plan.from_json(self.run_dir.read()["plan"])  # the first steps may have changed the plan
            self.prepare_attempt(self.plan, local_placement(self.placement.local_procs))

    @property
    def diagnostics(self) -> Diagnostics:
        return self.job.diagnostics if isinstance(self.job, TrainJob) else Diagnostics()

    def prepare_attempt(self, plan: Plan, placement: WorkerPlacement, diagnostics: Diagnostics | None = None) -> None:
        """Sets the plan, the placement and, if given, the diagnostics of the next attempt."""
        if diagnostics is not None and isinstance(self.job, TrainJob):
            self.job = replace(self.job, diagnostics=diagnostics)
        if self.diagnostics.nan_step:  # modules inside a CUDA graph cannot be checked
            plan = replace(plan, capture="off", compile="off", reasons=plan.reasons | {"capture": "pinned"})
        self.plan, self.placement = plan, placement
        self.job = replace(self.job, plan=plan)

    def run_attempt(self) -> JobEnd:
        try:
            end = self._attempt()
        except OSError as error:
            if error.errno not in TEMPORARY_ERRORS:
                raise
            why = f"the workers could not be started: {error.strerror}{f' ({error.filename})' if error.filename else ''}"
            end = JobEnd(Outcome.INFRA, why, spent=self._earlier_time, lost=True)
        return replace(end, interrupted=self.num_interrupts > 0, stopped=self.stopped)

    def _attempt(self) -> JobEnd:
        self._remove_half_written_files()
        if self._scratch is None:
            self._scratch = Scratch()
        with self._scratch.subfolder("attempt") as folder:
            file = folder / "job.json"
            write(replace(self.job, scratch=str(self._scratch.path)), file)
            self._first_steps.begin_attempt()
            hang_detector = HangDetector(self.policy.hang_after, self._first_steps.seconds)
            self.attempt = Attempt(self.job, file, self.placement, self.screen, hang_detector, self.verdicts, self.verbose)
            self.attempt.on_poll, self.attempt.on_verdict = self._on_poll, self._record_hang
            if self.stopped:
                return JobEnd(Outcome.PREEMPTED, result={"step": self.run_dir.last_checkpoint_step})
            self.attempt.run(self._get_fork_server())
            end = self.attempt.end()
        self._earlier_time = self._time_breakdown()
        return replace(end, spent=self._earlier_time)

    # --- while an attempt runs ---

    def _on_poll(self) -> None:
        self.on_poll()
        self._write_time_breakdown()
        if isinstance(self.job, TrainJob) and self.attempt is not None:
            self._first_steps.update(self.attempt.first_step_seconds())

    @property
    def steps_taken(self) -> int:
        """Completed steps of the current attempt, without its first step."""
        return self.attempt.time_breakdown().steps if self.attempt else 0

    def abort(self, reason: str) -> None:
        """Ends the current attempt at once, for a reason outside of this machine's workers."""
        if self.attempt is not None:
            self.attempt.abort(reason)

    def end_hung(self, verdict: Verdict) -> None:
        """Ends the current attempt at once, because the leader found ranks that hang."""
        if self.attempt is not None:
            self.attempt.end_hung(verdict)

    def stop_after_step(self) -> None:
        """Ends the current attempt after its current step, with a checkpoint."""
        if self.attempt is not None:
            self.attempt.stop()

    def _time_breakdown(self) -> TimeBreakdown:
        assert self.attempt is not None
        return self._earlier_time + self.attempt.time_breakdown()

    def _write_time_breakdown(self) -> None:
        """Writes the time breakdown into the run, for `drivetrain status`."""
        if isinstance(self.job, TrainJob) and time.monotonic() > self._time_written_at + TIME_BREAKDOWN_SECONDS:
            self._time_written_at = time.monotonic()
            if (breakdown := self.merge_time_breakdown(self._time_breakdown())) is not None:
                with contextlib.suppress(OSError):
                    write_atomic(self.run_dir.time_breakdown_path, json.dumps(breakdown.to_json()) + "\n")

    def _record_hang(self, verdict: Verdict) -> None:
        """Reports the ranks that hang; the leader also writes the stacks into the run."""
        if not self.is_leader:
            self.screen.line("hang", verdict.message)
            return
        self.screen.line("hang", f"{verdict.message} (stacks: {record_hang(self.run_dir, verdict)})")

    # --- the fork server ---

    def _get_fork_server(self) -> ForkServer:
        """Returns the fork server; a new one if it has ended, or if the workers' environment has changed."""
        own_environment = {name: value for name, value in os.environ.items() if name not in SECRETS}
        environment = WORKER_DEFAULTS | self.plan.env | own_environment | {"PYTHONUNBUFFERED": "1"}
        if self.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus)
        if self.fork_server is not None and not (self.fork_server.is_alive and self.fork_server.environment == environment):
            self.fork_server.close()
            self.fork_server = None
        if self.fork_server is None:
            self.fork_server = ForkServer(environment, self.run_dir.log_path(self.placement.first_rank))
        return self.fork_server

    def close(self) -> None:
        if self.fork_server is not None:
            self.fork_server.close()
        if self._scratch is not None:
            self._scratch.remove()
            self._scratch = None  # a member's supervisor is closed twice: by the rendezvous and by its owner
        sweep()
        self._remove_half_written_files()  # again, because the disk may have been read-only before

    def _remove_half_written_files(self) -> None:
        """Removes the half-written files that ended processes of this machine left in the run."""
        if isinstance(self.job, PLAN_RECORDING_JOBS):
            remove_half_written_files(self.run_dir.path)
            remove_half_written_files(self.run_dir.log_path(0).parent)
            remove_half_written_files(self.run_dir.media)

    # --- restarts ---

    def restart_reason(self, end: JobEnd) -> str | None:
        """Returns the reason for another attempt, and sets its plan; None if the job has ended."""
        if end.outcome is Outcome.OOM and isinstance(self.job, PLAN_RECORDING_JOBS):
            return self._reason_after_oom(end)
        if not self.is_leader or self.stopped:
            return None  # only the leader starts attempts
        diagnostics = self.diagnostics
        if end.outcome is Outcome.NAN and diagnostics.find_nan and not diagnostics.nan_step:
            steps = [event["step"] for event in self.run_dir.events() if event["event"] == "nan"]
            self.prepare_attempt(self.plan, self.placement, replace(diagnostics, nan_step=steps[-1] if steps else sys.maxsize))
            return f"{end.message.splitlines()[0]} Every module is checked now; "
        if not end.lost or not self.policy.restarts:
            return None
        num_without_progress = self._restarts.add()
        if num_without_progress > self.policy.restarts:
            self.screen.notice(f"given up: {self.policy.restarts} restarts brought no new checkpoint (--restarts N)")
            return None
        self._pause(self.policy.pause_seconds(num_without_progress))
        if self.stopped:
            return None
        if end.outcome is not Outcome.INFRA:
            return ""
        first_line = end.message.partition("\n")[0]
        return f"{first_line.partition(' (see ')[0]}; "

    def _reason_after_oom(self, end: JobEnd) -> str | None:
        new_plan = None
        if self.replan is not None and not self.stopped:
            try:
                new_plan, self.replan = self.replan(), None
            except Problem as problem:
                end.message = str(problem)
                return None
        may_restart = self.is_leader and not self.stopped
        plan_and_sentence = plan_after_oom(self.run_dir, self.plan, new_plan, end.result.get("smaller"), may_restart)
        if plan_and_sentence is None:
            return None
        self.plan, sentence = plan_and_sentence
        return f"{sentence}; "

    def report_restart(self, why: str, outcome: Outcome) -> None:
        """Shows and records that another attempt begins."""
        steps = self.run_dir.checkpoint_steps()
        label = "plan" if outcome == Outcome.OOM else "restart"
        self.screen.line(label, f"{why}restarting from {f'step {steps[-1]:,}' if steps else 'the beginning'}")
        self.run_dir.log_event("restarted", step=steps[-1] if steps else 0, why=str(outcome))

    def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self.stopped and time.monotonic() < deadline:
            time.sleep(min(0.1, max(0.0, deadline - time.monotonic())))

    # --- signals ---

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        self.stopped = True
        if number == signal.SIGINT:
            self.num_interrupts += 1
            if self.num_interrupts > 1:
                if self.attempt is not None:
                    self.attempt.kill()
                return
        if self.attempt is not None:
            self.attempt.stop()
        if number == signal.SIGINT and not (self.attempt is not None and self.attempt.left_before_start):
            self.screen.notice("stopping after this step and saving (Ctrl-C again ends at once)")
