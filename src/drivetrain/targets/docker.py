"""A container engine of this machine: Docker, or podman."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from drivetrain.outcomes import Problem
from drivetrain.targets.base import STOP_SECONDS, JobState, Rendering, Target
from drivetrain.targets.record import Record
from drivetrain.targets.submission import Submission


class DockerTarget(Target):
    """Containers."""

    kind: ClassVar[str] = "docker"

    def render(self, submission: Submission) -> Rendering:
        raise Problem("the docker target is not ready")

    def submit(self, submission: Submission, rendering: Rendering, notice: Callable[[str], None]) -> dict[str, Any]:
        raise Problem("the docker target is not ready")

    def state(self, record: Record) -> JobState:
        raise Problem("the docker target is not ready")

    def stop(self, record: Record, seconds: float = STOP_SECONDS) -> None:
        raise Problem("the docker target is not ready")

    def reach(self) -> str:
        raise Problem("the docker target is not ready")

    def pull(self, record: Record) -> None:
        raise Problem("the docker target is not ready")
