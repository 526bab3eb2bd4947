"""This machine, in the background: the run goes on when the terminal is closed."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

from drivetrain import hardware
from drivetrain.outcomes import Problem
from drivetrain.targets.base import STOP_SECONDS, Check, JobState, RenderedCommand, Rendering, Target
from drivetrain.targets.host.connection import ReachableHost, request_bytes, request_text
from drivetrain.targets.record import Record
from drivetrain.targets.submission import Submission

RETRIES = 3
MIN_FREE_BYTES = 1 << 30


class LocalTarget(Target):
    """Runs of this machine."""

    kind: ClassVar[str] = "local"

    @property
    def host(self) -> ReachableHost:
        return ReachableHost(sys.executable)

    def render(self, submission: Submission) -> Rendering:
        arguments = start_arguments(submission, self.settings.env)
        return Rendering(commands=(request_command(self.host, "start", arguments, submission.secrets),))

    def submit(self, submission: Submission, rendering: Rendering, notice: Callable[[str], None]) -> dict[str, Any]:
        arguments = start_arguments(submission, self.settings.env)
        unpack_code(submission)
        self.host.call("start", notice=notice, **arguments | {"secrets": secret_values(submission)})
        return self.known_handle(submission)

    def known_handle(self, submission: Submission) -> dict[str, Any]:
        return {"job": str(submission.run.path.absolute() / "job")}

    def state(self, record: Record) -> JobState:
        return job_state(self.host.call("job_state", job=record.handle["job"]))

    def stop(self, record: Record, seconds: float = STOP_SECONDS) -> None:
        self.host.call("stop", job=record.handle["job"], grace=seconds)

    def pull(self, record: Record) -> None:
        """Does nothing: the run's folder is here."""

    def reach(self) -> str:
        return hardware.detect().sentence()

    def checks(self) -> Iterator[Check]:
        yield from folder_checks()


def folder_checks() -> Iterator[Check]:
    """Yields what `doctor` shows of the folder on this machine that has the runs."""
    folder = Path.cwd()
    free, is_writable = shutil.disk_usage(folder).free, os.access(folder, os.W_OK)
    yield Check("folder", "ok" if is_writable else "fault", str(folder), "" if is_writable else "go to a folder that you may write")
    is_enough = free > MIN_FREE_BYTES
    yield Check(
        "disk", "ok" if is_enough else "fault", f"{free / 1e9:,.1f} GB free", "" if is_enough else "make room: drivetrain runs prune"
    )


def code_folder(submission: Submission) -> Path:
    """Returns the folder of the run's code where the run's folder is on this machine."""
    assert submission.code is not None
    return submission.run.path.absolute() / "code" / submission.code.digest[:16]


def unpack_code(submission: Submission) -> None:
    """Unpacks the code archive into the run's folder, where files are shared with the target."""
    if submission.code is None or code_folder(submission).is_dir():
        return
    try:
        temporary = code_folder(submission).with_name(f".new-{os.getpid()}")
        submission.code.unpack(temporary)
        os.replace(temporary, code_folder(submission))
    except OSError as error:
        raise Problem(f"cannot write {code_folder(submission)}: {error.strerror}") from None


def start_arguments(submission: Submission, env: dict[str, str]) -> dict[str, Any]:
    """Returns the request that starts a run in its folder on this machine; without the values of secrets."""
    run_dir = submission.run.path.absolute()
    code = str(code_folder(submission)) if submission.code is not None else ""
    return {
        "job": str(run_dir / "job"), "words": submission.words(sys.executable, str(run_dir), code), "variables": env, "secrets": {},
        "cwd": os.getcwd(), "output": str(run_dir / "logs" / "output.log"), "retries": RETRIES,
    }  # fmt: skip


def secret_values(submission: Submission) -> dict[str, str]:
    """Returns the variables that are handed to the run in memory only."""
    values = {name: os.environ[name] for name in submission.secrets}
    return values | ({"DRIVETRAIN_TOKEN": submission.token} if submission.token else {})


def request_command(host: ReachableHost, verb: str, arguments: dict[str, Any], secrets: tuple[str, ...] = ()) -> RenderedCommand:
    """Returns the command that sends a request to a host's program; secrets are shown by name."""
    shown = arguments | {"secrets": {name: f"${name}" for name in secrets}} if secrets else arguments
    return RenderedCommand(tuple(host.command()), request_text(verb, shown), request_bytes(verb, arguments))


def job_state(answer: dict[str, Any]) -> JobState:
    """Returns the state of a job of the host's program."""
    phase = answer["phase"]
    if phase == "running":
        return JobState("running")
    if phase == "ended":
        return JobState("ended", int(answer["code"]))
    return JobState("lost", None, "its process ended without an exit code: the machine was restarted, or it was killed")
