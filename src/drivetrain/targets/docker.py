"""A container engine of this machine: Docker, or podman."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from drivetrain.targets.base import STOP_SECONDS, JobState, Rendering, Target
from drivetrain.targets.record import Record
from drivetrain.targets.submission import Submission


class DockerTarget(Target):
    """Containers."""

    kind: ClassVar[str] = "docker"

    def render(self, submission: Submission) -> Rendering:
        raise NotImplementedError

    def submit(self, submission: Submission, rendering: Rendering, notice: Callable[[str], None]) -> dict[str, Any]:
        raise NotImplementedError

    def state(self, record: Record) -> JobState:
        raise NotImplementedError

    def stop(self, record: Record, seconds: float = STOP_SECONDS) -> None:
        raise NotImplementedError

    def reach(self) -> str:
        raise NotImplementedError
