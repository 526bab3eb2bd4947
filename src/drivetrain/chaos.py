"""Faults on demand: end the processes at a named moment of the code.

DRIVETRAIN_FAULTS=kill@rename:2 drivetrain train digits    # kill -9 of everything inside the second rename
"""

from __future__ import annotations

import os
import re
import signal

from drivetrain.engine.observe import Observer
from drivetrain.outcomes import Problem

VARIABLE = "DRIVETRAIN_FAULTS"
MOMENTS = ("restore", "start", "step", "evaluate", "save", "written", "rename", "published")


class Injector(Observer):
    """Counts the moments this process reaches and strikes at the chosen one."""

    def __init__(self, plan: str) -> None:
        match = re.fullmatch(r"kill@(\w+):(\d+)", plan)
        if match is None or match[1] not in MOMENTS:
            raise Problem(f"{VARIABLE}={plan}: write kill@MOMENT:COUNT, with a moment of {', '.join(MOMENTS)}")
        self.name, self.left = match[1], int(match[2])

    def moment(self, name: str) -> None:
        if name == self.name:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getppid(), signal.SIGKILL)  # the front end; the kernel ends its workers with it
                os.kill(os.getpid(), signal.SIGKILL)


def injectors() -> list[Observer]:
    plan = os.environ.get(VARIABLE)
    return [Injector(plan)] if plan else []
