"""A training logs, evaluates, saves and stops at certain steps, or at certain times."""

from __future__ import annotations

from typing import Any

import pytest

from drivetrain.engine.cadence import Cadence, Due, Period
from drivetrain.engine.group.requests import Requests

STEPS_PER_EPOCH, TOTAL_STEPS = 10, 35


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def cadence(log: Any = 4, evaluate: Any = "1ep", save: Any = 15, clock: Clock | None = None, **options: Any) -> Cadence:
    periods = (Period(setting, STEPS_PER_EPOCH, clock or Clock()) for setting in (log, evaluate, save))
    defaults = {"evaluates": True, "saves_at_epoch_ends": False, "is_main": True}
    return Cadence(*periods, TOTAL_STEPS, STEPS_PER_EPOCH, **(defaults | options))


def due_after_each_step(schedule: Cadence, steps: int = TOTAL_STEPS) -> list[Due]:
    return [schedule.after(schedule.before(step, step), Requests()) for step in range(1, steps + 1)]


def steps_with(dues: list[Due], action: str) -> list[int]:
    return [due.step for due in dues if getattr(due, action)]


def test_each_period_in_steps_and_the_end() -> None:
    dues = due_after_each_step(cadence())
    assert steps_with(dues, "evaluate") == [10, 20, 30, 35]
    assert steps_with(dues, "save") == [15, 30, 35]
    assert steps_with(dues, "log") == [4, 8, 10, 12, 16, 20, 24, 28, 30, 32, 35], "each evaluation logs a row"
    assert steps_with(dues, "is_last") == [35] and not steps_with(dues, "stop")


def test_a_resumed_training_logs_and_saves_at_the_same_steps() -> None:
    uninterrupted, resumed = due_after_each_step(cadence()), cadence()
    assert [resumed.after(resumed.before(step, step), Requests()) for step in range(17, TOTAL_STEPS + 1)] == uninterrupted[16:]


def test_with_a_source_saves_and_evaluations_wait_for_the_end_of_the_epoch() -> None:
    dues = due_after_each_step(cadence(evaluate=7, save=15, saves_at_epoch_ends=True))
    assert steps_with(dues, "evaluate") == [10, 20, 30, 35]
    assert [due.step for due in dues if due.save and due.can_save] == [20, 30]


def test_an_epoch_taken_in_one_go_is_due_like_its_single_steps() -> None:
    schedule = cadence(save=15, saves_at_epoch_ends=True)
    dues = [schedule.after(schedule.before(first, first + 9), Requests()) for first in (1, 11, 21)]
    assert steps_with(dues, "save") == [20, 30] and steps_with(dues, "evaluate") == [10, 20, 30]


def test_requests_of_any_rank_take_effect_and_a_stop_is_not_forgotten() -> None:
    schedule = cadence(saves_at_epoch_ends=True)
    due = schedule.after(schedule.before(3, 3), Requests(stop=True, save=True))
    assert due.stop and due.save and not due.can_save
    later = [schedule.after(schedule.before(step, step), Requests()) for step in range(4, 11)]
    assert all(due.stop and due.save for due in later) and steps_with(later, "can_save") == [10]


@pytest.mark.parametrize(("kind", "due_at"), [("log", [3, 6, 9]), ("save", [3, 6, 9]), ("evaluate", [4, 7])])
def test_a_period_in_seconds_is_checked_after_every_step(kind: str, due_at: list[int]) -> None:
    """An evaluation is requested with the gradients of one step, and runs after the next step."""
    clock = Clock()
    schedule = cadence(**{"log": 1000, "evaluate": 1000, "save": 1000, kind: "30s"}, clock=clock)
    dues = []
    for step in range(1, 10):
        clock.seconds += 10
        assert schedule.quiet_until(step) == step, "the clock must be read after each step"
        requests = Requests()
        schedule.request(requests, stop=False, step=step)
        dues.append(schedule.after(schedule.before(step, step), requests))
    assert steps_with(dues, kind) == due_at


def test_quiet_until_names_the_next_step_at_which_something_is_due() -> None:
    schedule = cadence()
    assert [schedule.quiet_until(step) for step in (0, 3, 4, 8, 12, 30, 32)] == [4, 4, 8, 10, 15, 32, 35]
    assert cadence(stop_after=20).quiet_until(5) == 5, "with stop_after, each step must be checked"


def test_a_best_evaluation_saves_and_the_end_of_patience_stops() -> None:
    due = Due(10, evaluate=True)
    assert due.after_evaluation(True, False).save and not due.after_evaluation(True, False).is_last
    assert due.after_evaluation(False, True).is_last and due.after_evaluation(False, True).save
    assert not due.after_evaluation(False, False).save


def test_a_task_without_evaluation_data_never_evaluates() -> None:
    schedule = cadence(evaluates=False)
    assert not steps_with(due_after_each_step(schedule, 20), "evaluate")
    assert schedule.quiet_until(20) > 20
