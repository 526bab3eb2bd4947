"""Fault injection: a process dies, hangs or runs out of something at a named step or observation point.

DRIVETRAIN_FAULTS=die@step:7:rank=1,hang@step:12:rank=0 drivetrain train digits --procs 2
DRIVETRAIN_FAULTS=kill@rename:2 drivetrain train digits           # kill -9 of all processes inside the second rename
DRIVETRAIN_FAULTS=oom@step:7:rank=2 drivetrain train digits --procs 4    # between forward and backward of step 7

Steps are numbered as in metrics.jsonl. Each fault is injected once in a run, even if the run is restarted. It happens on
rank 0; `oom` and `kill` happen on all ranks. `rank=R` chooses another rank.
"""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from drivetrain.engine.log.observe import Observer
from drivetrain.outcomes import Problem
from drivetrain.runs import Run

FAULTS_VARIABLE = "DRIVETRAIN_FAULTS"
SAMPLES_VARIABLE = "DRIVETRAIN_SAMPLES"  # if set, each rank writes the sample ids of every step to the run's logs
PACE_VARIABLE = "DRIVETRAIN_PACE"  # seconds to sleep before every step
FRONT_VARIABLE = "_DRIVETRAIN_FRONT"  # tells workers the pid of the front end, which owns the terminal
KILL_POINTS = ("restore", "start", "step", "evaluate", "save", "written", "rename", "published")
PHASES = {"step": "backward", "update": "update", "evaluation": "metrics", "save": "written"}  # phase of a fault -> observation point
SLOW_SECONDS = 1.0  # how long the fault "slow" delays a step
TORN_FILE_BYTES = 7  # what the fault "torn" leaves of a checkpoint's largest file


def _front_pid() -> int:
    return int(os.environ.get(FRONT_VARIABLE, os.getppid()))


def _die(run: Run | None) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _kill_front(run: Run | None) -> None:
    os.kill(_front_pid(), signal.SIGKILL)  # the kernel then ends its workers
    time.sleep(60)


def _hang(run: Run | None) -> None:
    while True:
        time.sleep(3600)


def _slow_down(run: Run | None) -> None:
    time.sleep(SLOW_SECONDS)


def _preempt(run: Run | None) -> None:
    os.kill(_front_pid(), signal.SIGTERM)


def _stop(run: Run | None) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _tear_checkpoint(run: Run | None) -> None:
    """Truncates the newest checkpoint, as a power failure does, then kills this process."""
    deadline = time.monotonic() + 10
    while run is not None and any(run.checkpoints.glob(".step-*")) and time.monotonic() < deadline:
        time.sleep(0.01)  # wait for a save in progress: it will be the newest checkpoint
    if run is not None and run.checkpoint_steps():
        newest = run.checkpoints / f"step-{run.checkpoint_steps()[-1]:08d}"
        largest = max(newest.iterdir(), key=lambda file: file.stat().st_size)
        os.truncate(largest, TORN_FILE_BYTES)
    _die(run)


def _out_of_memory(run: Run | None) -> None:
    import torch

    raise torch.OutOfMemoryError(f"out of memory, as {FAULTS_VARIABLE} asked for")


def _make_next_loss_nan(run: Run | None) -> None:
    """Replaces the loss of the next backward pass by NaN."""
    from torch import Tensor

    original: Any = Tensor.backward

    def backward(loss: Tensor, *args: Any, **options: Any) -> None:
        setattr(Tensor, "backward", original)  # noqa: B010 (mypy refuses to assign a method)
        original(loss * float("nan"), *args, **options)

    setattr(Tensor, "backward", backward)  # noqa: B010


def _fill_disk(run: Run | None) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


ACTIONS: dict[str, Callable[[Run | None], None]] = {
    "die": _die, "agent": _kill_front, "hang": _hang, "stop": _stop, "slow": _slow_down, "preempt": _preempt, "torn": _tear_checkpoint,
    "oom": _out_of_memory, "nan": _make_next_loss_nan, "full": _fill_disk,
}  # fmt: skip


class KillAt(Observer):
    """Kills the front end and this process when this process reaches an observation point for the n-th time."""

    def __init__(self, point: str, count: int) -> None:
        self.point, self.num_left = point, count

    def reached(self, name: str) -> None:
        if name == self.point:
            self.num_left -= 1
            if self.num_left == 0:
                os.kill(_front_pid(), signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)


class FaultInjector(Observer):
    """Injects a fault once: in the chosen phase of the chosen step."""

    def __init__(self, text: str, kind: str, phase: str, step: int, micro_batch: int, run: Run | None) -> None:
        self.text, self.action, self.point = text, ACTIONS[kind], PHASES[phase]
        self.step, self.micro_batch, self.run = step, micro_batch, run
        # A CUDA graph's replay reaches no observation point within the step.
        self.may_happen_at_step_end = phase == "step" and kind not in ("oom", "nan")
        self.at_next_save = phase == "save"  # the first save from `step` on, because saves are written in the background
        self.is_injected = False
        self._current_step = self._num_reached = 0

    def resumed(self, step: int) -> None:
        self._current_step = step

    def reached(self, name: str) -> None:
        if name == "step":
            self._current_step += 1
        if name in ("take", "evaluate"):  # a new attempt at the step
            self._num_reached = 0
        is_replay_end = name == "taken" and self.may_happen_at_step_end and not self._num_reached
        if self.is_injected or not self._is_due() or not (name == self.point or is_replay_end):
            return
        self._num_reached += 1
        if self._num_reached == self.micro_batch or is_replay_end:
            self.is_injected = True
            if self.run is not None:
                self.run.log_event("injected", fault=self.text)
            self.action(self.run)

    def _is_due(self) -> bool:
        return self._current_step == self.step or (self.at_next_save and self._current_step > self.step)


class FirstStepEvent(Observer):
    """Writes the event `stepped` when the first step of this process is complete."""

    def __init__(self, run: Run) -> None:
        self.run, self.num_steps = run, 0

    def reached(self, name: str) -> None:
        if name == "step":
            self.num_steps += 1
            if self.num_steps == 2:
                self.run.log_event("stepped")


class StepDelay(Observer):
    """Sleeps before every step, so that a fault from outside most likely happens between two steps."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def reached(self, name: str) -> None:
        if name == "step":
            time.sleep(self.seconds)


class SampleLog:
    """Writes the sample ids of each step on this rank. A repeated step is written again; its last line counts."""

    def __init__(self, training: Any, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "a", buffering=1)  # noqa: SIM115 (open as long as the run)
        world_size = training.setup.group.size

        def write(step: int, sample_ids: list[int]) -> None:
            file.write(json.dumps([step + 1, world_size, sample_ids]) + "\n")

        training.execution.step.sample_hooks.append(write)


def read_fault(text: str, rank: int, run: Run | None = None) -> Observer | None:
    """Returns the observer that injects a fault, or None if the fault is for another rank."""
    if match := re.fullmatch(r"kill@(\w+):(\d+)", text):
        if match[1] in KILL_POINTS:
            return KillAt(match[1], int(match[2]))
    elif match := re.fullmatch(rf"({'|'.join(ACTIONS)})@({'|'.join(PHASES)}):(\d+)(:micro=\d+)?(:rank=\d+)?", text):
        kind, phase, step = match[1], match[2], int(match[3])
        micro_batch, fault_rank = (int(option.partition("=")[2]) if option else None for option in (match[4], match[5]))
        if fault_rank is None and kind != "oom":
            fault_rank = 0
        return FaultInjector(text, kind, phase, step, micro_batch or 1, run) if fault_rank in (None, rank) else None
    raise Problem(
        f"{FAULTS_VARIABLE}={text}: write kill@POINT:COUNT, with a point of {', '.join(KILL_POINTS)},"
        f" or FAULT@PHASE:STEP[:micro=M][:rank=R], with a fault of {', '.join(ACTIONS)} and a phase of {', '.join(PHASES)}"
    )


def injectors(run: Run) -> list[Observer]:
    """Returns the observers for the faults in this process's environment, without those injected before a restart."""
    faults, delay_seconds = os.environ.get(FAULTS_VARIABLE, ""), float(os.environ.get(PACE_VARIABLE, 0))
    if not faults and not delay_seconds:
        return []
    rank = int(os.environ.get("RANK", 0))
    observers: list[Observer] = [FirstStepEvent(run)] if rank == 0 else []
    if delay_seconds:
        observers.append(StepDelay(delay_seconds))
    for fault in _pending(faults.split(",") if faults else [], run):
        injector = read_fault(fault, rank, run)
        if injector is not None:
            observers.append(injector)
    return observers


def _pending(faults: list[str], run: Run) -> list[str]:
    """Returns the faults that are not injected yet. A fault that happened on several ranks counts once."""
    injected = [(event["fault"], event["rank"]) for event in run.events() if event["event"] == "injected"]
    num_injected: Counter[str] = Counter()
    for (fault, _), times_on_rank in Counter(injected).items():
        num_injected[fault] = max(num_injected[fault], times_on_rank)
    return list((Counter(faults) - num_injected).elements())
