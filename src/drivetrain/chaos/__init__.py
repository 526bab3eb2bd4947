"""Faults on demand: processes that die, hang or run out of something at a named step or moment of the code.

DRIVETRAIN_FAULTS=die@step:7:rank=1,hang@step:12:rank=0 drivetrain train digits --procs 2
DRIVETRAIN_FAULTS=kill@rename:2 drivetrain train digits           # kill -9 of everything inside the second rename
DRIVETRAIN_FAULTS=oom@step:7:rank=2 drivetrain train digits --procs 4    # between forward and backward of step 7

A step is named by the number it is logged with. Each fault strikes once in a run, however often that is started anew,
on one rank or (`oom`, `kill`) on all.
"""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from drivetrain.engine.log.observe import Observer
from drivetrain.outcomes import Problem
from drivetrain.runs import Run

VARIABLE = "DRIVETRAIN_FAULTS"
FRONT = "_DRIVETRAIN_FRONT"  # tells a worker the process that owns the terminal
MOMENTS = ("restore", "start", "step", "evaluate", "save", "written", "rename", "published")
PLACES = {"step": "backward", "update": "update", "evaluation": "metrics", "save": "written"}  # the moment at which a fault strikes
SAMPLES = "DRIVETRAIN_SAMPLES"  # set: each rank notes the samples of every step in the run's logs
PACE = "DRIVETRAIN_PACE"  # set: so many seconds are slept before every step
SLOW_SECONDS = 1.0
TORN = 7  # bytes that are left of a torn file


def _front() -> int:
    return int(os.environ.get(FRONT, os.getppid()))


def _die(run: Run | None) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _kill_agent(run: Run | None) -> None:
    os.kill(_front(), signal.SIGKILL)  # the kernel ends its workers with it
    time.sleep(60)


def _hang(run: Run | None) -> None:
    while True:
        time.sleep(3600)


def _slow(run: Run | None) -> None:
    time.sleep(SLOW_SECONDS)


def _preempt(run: Run | None) -> None:
    os.kill(_front(), signal.SIGTERM)


def _stop(run: Run | None) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _tear(run: Run | None) -> None:
    """Cut the newest checkpoint short, as a machine that loses power does; then die."""
    deadline = time.monotonic() + 10
    while run is not None and any(run.checkpoints.glob(".step-*")) and time.monotonic() < deadline:
        time.sleep(0.01)  # one that is being written would be the newest in a moment
    if run is not None and run.checkpoint_steps():
        newest = run.checkpoints / f"step-{run.checkpoint_steps()[-1]:08d}"
        largest = max(newest.iterdir(), key=lambda file: file.stat().st_size)
        os.truncate(largest, TORN)
    _die(run)


def _out_of_memory(run: Run | None) -> None:
    import torch

    raise torch.OutOfMemoryError(f"out of memory, as {VARIABLE} asked for")


def _not_a_number(run: Run | None) -> None:
    """The next backward pass, and only that, starts from a loss that is no number."""
    from torch import Tensor

    plain: Any = Tensor.backward

    def backward(loss: Tensor, *args: Any, **options: Any) -> None:
        setattr(Tensor, "backward", plain)  # noqa: B010 (a method of torch's)
        plain(loss * float("nan"), *args, **options)

    setattr(Tensor, "backward", backward)  # noqa: B010


def _fill_disk(run: Run | None) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


ACTIONS: dict[str, Callable[[Run | None], None]] = {
    "die": _die, "agent": _kill_agent, "hang": _hang, "stop": _stop, "slow": _slow, "preempt": _preempt, "torn": _tear,
    "oom": _out_of_memory, "nan": _not_a_number, "full": _fill_disk,
}  # fmt: skip


class Kill(Observer):
    """Counts the moments this process reaches and strikes at the chosen one."""

    def __init__(self, name: str, count: int) -> None:
        self.name, self.left = name, count

    def moment(self, name: str) -> None:
        if name == self.name:
            self.left -= 1
            if self.left == 0:
                os.kill(_front(), signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)


class Strike(Observer):
    """Knows the step that is under way, and acts at the chosen place in the chosen one."""

    def __init__(self, text: str, kind: str, place: str, step: int, micro: int, run: Run | None) -> None:
        self.text, self.act, self.name, self.step, self.micro, self.run = text, ACTIONS[kind], PLACES[place], step, micro, run
        self.late = place == "step" and kind not in ("oom", "nan")  # a step that is replayed as a graph has no moments within
        self.later = place == "save"  # the first that comes: it is written behind the training's back
        self.struck = False
        self._now = self._seen = 0

    def resumed(self, step: int) -> None:
        self._now = step

    def moment(self, name: str) -> None:
        if name == "step":
            self._now += 1
        if name in ("take", "evaluate"):  # each attempt at a step
            self._seen = 0
        replayed = name == "taken" and self.late and not self._seen
        if (name != self.name and not replayed) or self.struck or not (self._now == self.step or (self.later and self._now > self.step)):
            return
        self._seen += 1
        if self._seen == self.micro or replayed:
            self.struck = True
            if self.run is not None:
                self.run.log_event("injected", fault=self.text)
            self.act(self.run)


class FirstStep(Observer):
    """Notes when a run that was started anew has taken its first step."""

    def __init__(self, run: Run) -> None:
        self.run, self.steps = run, 0

    def moment(self, name: str) -> None:
        if name == "step":
            self.steps += 1
            if self.steps == 2:
                self.run.log_event("stepped")


class Paced(Observer):
    """Takes its time before every step, so that what is done to a run from outside falls between two of them."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def moment(self, name: str) -> None:
        if name == "step":
            time.sleep(self.seconds)


class Samples:
    """Notes which samples each step took on this rank; a step that is taken again is noted again, and the last one counts."""

    def __init__(self, training: Any, path: Path) -> None:
        feed = training.feed
        plain, per_epoch = feed.micro_batches, feed.steps_per_epoch
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "a", buffering=1)  # noqa: SIM115 (open as long as the run)

        def recorded(epoch: int, index: int) -> Iterator[Any]:
            taken: list[int] = []
            for micro in plain(epoch, index):
                taken += micro.ids[: micro.weight].tolist()
                yield micro
            file.write(json.dumps([epoch * per_epoch + index + 1, training.group.size, taken]) + "\n")

        feed.micro_batches = recorded


def read(text: str, rank: int, run: Run | None = None) -> Observer | None:
    """One fault; None where it is another rank's."""
    if match := re.fullmatch(r"kill@(\w+):(\d+)", text):
        if match[1] in MOMENTS:
            return Kill(match[1], int(match[2]))
    elif match := re.fullmatch(rf"({'|'.join(ACTIONS)})@({'|'.join(PLACES)}):(\d+)(:micro=\d+)?(:rank=\d+)?", text):
        kind, place, step = match[1], match[2], int(match[3])
        micro, where = (int(option.partition("=")[2]) if option else None for option in (match[4], match[5]))
        where = 0 if where is None and kind != "oom" else where
        return Strike(text, kind, place, step, micro or 1, run) if where in (None, rank) else None
    raise Problem(
        f"{VARIABLE}={text}: write kill@MOMENT:COUNT, with a moment of {', '.join(MOMENTS)},"
        f" or FAULT@PLACE:STEP[:micro=M][:rank=R], with a fault of {', '.join(ACTIONS)} and a place of {', '.join(PLACES)}"
    )


def injectors(run: Run) -> list[Observer]:
    """The faults that the environment asks of this process, without those that struck before the run was started anew."""
    words, pace = os.environ.get(VARIABLE, ""), float(os.environ.get(PACE, 0))
    if not words and not pace:
        return []
    by_rank = Counter((event["fault"], event["rank"]) for event in run.events() if event["event"] == "injected")
    waiting = words.split(",") if words else []
    for fault in {fault for fault, _ in by_rank}:
        for _ in range(max(times for (one, _), times in by_rank.items() if one == fault)):
            waiting.remove(fault) if fault in waiting else None
    found = (read(word, int(os.environ.get("RANK", 0)), run) for word in waiting)
    first = [FirstStep(run)] if int(os.environ.get("RANK", 0)) == 0 else []
    return [*first, *([Paced(pace)] if pace else []), *(one for one in found if one is not None)]
