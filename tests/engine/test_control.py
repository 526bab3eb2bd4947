"""When a stop is heard: at the end of the step in which it was asked for, or a few of a GPU's steps later."""

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
from drivetrain.watch.deadline import MIN_SECONDS, NUM_SAVES, NUM_STEPS, Deadline
from tests.processes import on_ranks
from tests.samples import training


class Gpus:
    """A group whose device is a GPU, as far as the agreement sees."""

    size, is_main = 2, True
    device = torch.device("cuda")

    def sum_on_hosts(self, values: list[float]) -> list[float]:
        return values


class Event:
    def record(self) -> None: ...

    def synchronize(self) -> None: ...


@pytest.mark.parametrize(("seconds", "lag"), [(0.001, MAX_LAG_STEPS), (HOST_LEAD_SECONDS / 3, 4), (0.2, 1)])
def test_a_gpus_answer_is_read_as_soon_as_the_host_is_far_enough_ahead(seconds: float, lag: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    group: Any = Gpus()
    reader = RequestReader(group)

    def heard(step: int, stop: bool) -> bool:
        clock[0] += seconds
        tail = torch.zeros(PIGGYBACK_FLOATS)
        tail[FIRST_REQUEST] = stop
        return reader.read(step, tail, Requests()).stop

    assert not any(heard(step, False) for step in range(200))
    assert reader.lag_steps in (lag, min(MAX_LAG_STEPS, lag + 1)), "by the clock, within a step"
    asked = 200
    took = next(step - asked for step in range(asked, 300) if heard(step, True))
    assert took == reader.lag_steps and RETUNE_AT[0] < 200


def test_on_a_gpu_one_request_takes_effect_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is repeated in every step until it takes effect, and the answers under way then still carry it."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    group: Any = Gpus()
    reader = RequestReader(group)
    taken: list[int] = []
    is_requested = False
    for step in range(60):
        is_requested = is_requested or step in (10, 40)
        piggyback = torch.zeros(PIGGYBACK_FLOATS)
        piggyback[FIRST_REQUEST + 1] = is_requested
        if reader.read(step, piggyback, Requests()).save:
            taken.append(step)
            is_requested = False
    lag = reader.lag_steps
    assert taken == [10 + lag, 40 + lag]


class Asked(Observer):
    """Asks for a stop at an observation point of a step."""

    def __init__(self, moment: str, step: int, here: bool = True) -> None:
        self.at, self.here, self.asked, self.step = (moment, step), here, False, 0

    def __bool__(self) -> bool:
        return self.asked

    def reached(self, name: str) -> None:
        self.step += name == "step"
        self.asked |= self.here and (name, self.step) == self.at


def stopped(folder: str, pins: dict[str, Any], moment: str, step: int, group: Group) -> int:
    asked = Asked(moment, step, here=group.rank == group.size - 1)
    return training("Plain", folder, group, {"log_every": 5, "steps": 30}, pins, asked).run_to_end().step


@pytest.mark.parametrize("pins", [{}, {"accumulation": 2}])
@pytest.mark.parametrize(("world", "moment"), [(1, "fetched"), (1, "taken"), (2, "backward")])
def test_a_stop_ends_the_step_under_way(world: int, moment: str, pins: dict[str, Any], tmp_path: Path) -> None:
    for step in (3, 4, 5):  # one and two before a row is due, and at it
        run = tmp_path / f"{step}"
        assert on_ranks(world, stopped, str(run), pins, moment, step) == [step] * world
        assert Run(run).checkpoint_steps() == [step]
    assert stopped(str(run), pins, "start", 0, Group(0, 1, torch.device("cpu"))) == 5, "nothing new to save"


def test_what_a_time_limit_keeps_is_what_steps_and_saves_take(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, asked = [1000.0], []
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "time", lambda: clock[0])
    deadline = Deadline(2000.0, asked.append)
    assert asked == [2000 - MIN_SECONDS - 50], "a twentieth, as long as nothing was seen"

    def pass_through(**seconds: float) -> None:
        for name, took in seconds.items():
            deadline.reached(name)
            clock[0] += took

    pass_through(step=30.0)  # the first, which sets things up
    for _ in range(3):
        pass_through(step=0.5, taken=0.5)
    pass_through(evaluate=100.0)
    assert asked[-1] == pytest.approx(2000 - MIN_SECONDS - NUM_STEPS - 50)
    pass_through(saving=1.0, save=4.0, published=0.0, step=1.0)
    assert asked[-1] == pytest.approx(2000 - MIN_SECONDS - NUM_STEPS - NUM_SAVES * 4)
