"""Faults on demand: end the processes, or let memory run out, at a named moment of the code.

DRIVETRAIN_FAULTS=kill@rename:2 drivetrain train digits           # kill -9 of everything inside the second rename
DRIVETRAIN_FAULTS=oom@step:7:rank=2 drivetrain train digits --procs 4    # between forward and backward of step 7
DRIVETRAIN_FAULTS=oom@step:7,oom@step:7,oom@update:9 drivetrain train digits

An `oom` names a step by the number it is logged with, and raises what torch raises: in the `step` itself (`micro=2`: in
its second micro-batch), in the optimizer's `update`, or in the `evaluation` after it; on one rank, or on all. It
strikes once in a run, however often that is started anew.
"""

from __future__ import annotations

import os
import re
import signal
from collections import Counter

from drivetrain.engine.observe import Observer
from drivetrain.outcomes import Problem
from drivetrain.runs import Run

VARIABLE = "DRIVETRAIN_FAULTS"
MOMENTS = ("restore", "start", "step", "evaluate", "save", "written", "rename", "published")
PLACES = {"step": "backward", "update": "update", "evaluation": "metrics"}  # of an oom: the moment at which it strikes


class Kill(Observer):
    """Counts the moments this process reaches and strikes at the chosen one."""

    def __init__(self, name: str, count: int) -> None:
        self.name, self.left = name, count

    def moment(self, name: str) -> None:
        if name == self.name:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getppid(), signal.SIGKILL)  # the front end; the kernel ends its workers with it
                os.kill(os.getpid(), signal.SIGKILL)


class Shortage(Observer):
    """Knows the step that is under way, and raises torch's error at the chosen place in the chosen one."""

    def __init__(self, text: str, place: str, step: int, micro: int, run: Run | None) -> None:
        self.text, self.name, self.step, self.micro, self.run = text, PLACES[place], step, micro, run
        self.struck = False
        self._now = self._seen = 0

    def resumed(self, step: int) -> None:
        self._now = step

    def moment(self, name: str) -> None:
        if name == "step":
            self._now += 1
        if name in ("take", "evaluate"):  # each attempt at a step
            self._seen = 0
        if name != self.name or self._now != self.step or self.struck:
            return
        self._seen += 1
        if self._seen == self.micro:
            self.struck = True
            if self.run is not None:
                self.run.event("injected", fault=self.text)
            import torch

            raise torch.OutOfMemoryError(f"out of memory, as {VARIABLE}={self.text} asked for")


def read(text: str, rank: int, run: Run | None = None) -> Observer | None:
    """One fault; None where it is another rank's."""
    if match := re.fullmatch(r"kill@(\w+):(\d+)", text):
        if match[1] in MOMENTS:
            return Kill(match[1], int(match[2]))
    elif match := re.fullmatch(rf"oom@({'|'.join(PLACES)}):(\d+)(:micro=\d+)?(:rank=\d+)?", text):
        place, step = match[1], int(match[2])
        micro, where = (int(option.partition("=")[2]) if option else None for option in (match[3], match[4]))
        return Shortage(text, place, step, micro or 1, run) if where in (None, rank) else None
    raise Problem(
        f"{VARIABLE}={text}: write kill@MOMENT:COUNT, with a moment of {', '.join(MOMENTS)},"
        f" or oom@PLACE:STEP[:micro=M][:rank=R], with a place of {', '.join(PLACES)}"
    )


def injectors(run: Run) -> list[Observer]:
    """The faults that the environment asks of this process, without those that struck before the run was started anew."""
    words = os.environ.get(VARIABLE, "")
    if not words:
        return []
    by_rank = Counter((event["fault"], event["rank"]) for event in run.events() if event["event"] == "injected")
    waiting = words.split(",")
    for fault in {fault for fault, _ in by_rank}:
        for _ in range(max(times for (one, _), times in by_rank.items() if one == fault)):
            waiting.remove(fault) if fault in waiting else None
    found = (read(word, int(os.environ.get("RANK", 0)), run) for word in waiting)
    return [one for one in found if one is not None]
