"""A stop takes effect at the end of the step in which it is requested; on a GPU, a few steps later."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.engine.group import Group
from drivetrain.engine.group.requests import HOST_LEAD_SECONDS, MAX_LAG_STEPS, RETUNE_AT, RequestReader, Requests
from drivetrain.engine.log.observe import Observer
from drivetrain.engine.log.slots import FIRST_REQUEST, PIGGYBACK_FLOATS
from drivetrain.runs import Run
from drivetrain.watch.deadline import MIN_SECONDS, NUM_RESERVED_SAVES, NUM_RESERVED_STEPS, Deadline
from tests.processes import on_ranks
from tests.sample_tasks import training


class FakeGpuGroup:
    """Looks to RequestReader like a group of two GPUs."""

    size, is_main = 2, True
    device = torch.device("cuda")

    def sum_on_hosts(self, values: list[float]) -> list[float]:
        return values


class FakeEvent:
    def record(self) -> None: ...

    def synchronize(self) -> None: ...


@pytest.mark.parametrize(("seconds", "lag"), [(0.001, MAX_LAG_STEPS), (HOST_LEAD_SECONDS / 3, 4), (0.2, 1)])
def test_requests_on_a_gpu_are_read_so_late_that_the_host_need_not_wait(seconds: float, lag: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    group: Any = FakeGpuGroup()
    reader = RequestReader(group)

    def is_stop_read(step: int, stop: bool) -> bool:
        clock[0] += seconds
        piggyback = torch.zeros(PIGGYBACK_FLOATS)
        piggyback[FIRST_REQUEST] = stop
        return reader.read(step, piggyback, Requests()).stop

    assert not any(is_stop_read(step, False) for step in range(200))
    assert reader.lag_steps in (lag, min(MAX_LAG_STEPS, lag + 1)), "the lag in steps follows from the step time"
    requested_at = 200
    delay_steps = next(step - requested_at for step in range(requested_at, 300) if is_stop_read(step, True))
    assert delay_steps == reader.lag_steps and RETUNE_AT[0] < 200


def test_on_a_gpu_one_request_takes_effect_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank repeats its request until it takes effect; later answers that still carry it are ignored."""
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    group: Any = FakeGpuGroup()
    reader = RequestReader(group)
    saved_at: list[int] = []
    is_requested = False
    for step in range(60):
        is_requested = is_requested or step in (10, 40)
        piggyback = torch.zeros(PIGGYBACK_FLOATS)
        piggyback[FIRST_REQUEST + 1] = is_requested
        if reader.read(step, piggyback, Requests()).save:
            saved_at.append(step)
            is_requested = False
    assert saved_at == [10 + reader.lag_steps, 40 + reader.lag_steps]


class StopRequest(Observer):
    """Requests a stop on one rank, at an observation point of a step; is true from then on."""

    def __init__(self, point: str, step: int, on_this_rank: bool) -> None:
        self.stop_at, self.on_this_rank, self.is_requested, self.step = (point, step), on_this_rank, False, 0

    def __bool__(self) -> bool:
        return self.is_requested

    def reached(self, name: str) -> None:
        self.step += name == "step"
        self.is_requested |= self.on_this_rank and (name, self.step) == self.stop_at


def last_step(folder: str, pins: dict[str, Any], point: str, step: int, group: Group) -> int:
    stop = StopRequest(point, step, on_this_rank=group.rank == group.size - 1)
    return training("Plain", folder, group, {"log_every": 5, "steps": 30}, pins, stop).run_to_end().step


@pytest.mark.parametrize("pins", [{}, {"accumulation": 2}])
@pytest.mark.parametrize(("world", "point"), [(1, "fetched"), (1, "taken"), (2, "backward")])
def test_a_stop_ends_the_current_step(world: int, point: str, pins: dict[str, Any], tmp_path: Path) -> None:
    for step in (3, 4, 5):  # rows are logged every 5 steps: two steps before a row, one before, and at it
        run = tmp_path / f"{step}"
        assert on_ranks(world, last_step, str(run), pins, point, step) == [step] * world
        assert Run(run).checkpoint_steps() == [step]
    assert last_step(str(run), pins, "start", 0, Group(0, 1, torch.device("cpu"))) == 5, "nothing new to save"


def test_a_time_limit_stops_early_enough_for_steps_and_a_save(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, stop_times = [1000.0], []
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "time", lambda: clock[0])
    deadline = Deadline(2000.0, stop_times.append)
    assert stop_times == [2000 - MIN_SECONDS - 50], "before anything is measured, a twentieth of the remaining time is reserved"

    def pass_through(**seconds: float) -> None:
        for name, duration in seconds.items():
            deadline.reached(name)
            clock[0] += duration

    pass_through(step=30.0)  # the first step is not counted: it does set-up work
    for _ in range(3):
        pass_through(step=0.5, taken=0.5)
    pass_through(evaluate=100.0)
    assert stop_times[-1] == pytest.approx(2000 - MIN_SECONDS - NUM_RESERVED_STEPS - 50)
    pass_through(saving=1.0, save=4.0, published=0.0, step=1.0)
    assert stop_times[-1] == pytest.approx(2000 - MIN_SECONDS - NUM_RESERVED_STEPS - NUM_RESERVED_SAVES * 4)
