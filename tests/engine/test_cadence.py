"""When a training logs, evaluates, saves and stops: by the step's number, or by a clock."""

from __future__ import annotations

from typing import Any

import pytest

from drivetrain.engine.cadence import Cadence, Due, Period
from drivetrain.engine.group.requests import Requests

PER_EPOCH, TOTAL = 10, 35


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def cadence(log: Any = 4, evaluate: Any = "1ep", save: Any = 15, clock: Clock | None = None, **options: Any) -> Cadence:
    periods = (Period(setting, PER_EPOCH, clock or Clock()) for setting in (log, evaluate, save))
    usual = {"evaluates": True, "saves_at_epoch_ends": False, "is_main": True}
    return Cadence(*periods, TOTAL, PER_EPOCH, **(usual | options))


def walk(decides: Cadence, steps: int = TOTAL) -> list[Due]:
    """Takes one step after the other."""
    return [decides.after(decides.before(step, step), Requests()) for step in range(1, steps + 1)]


def steps_with(dues: list[Due], what: str) -> list[int]:
    return [due.step for due in dues if getattr(due, what)]


def test_each_period_in_steps_and_the_end() -> None:
    dues = walk(cadence())
    assert steps_with(dues, "evaluate") == [10, 20, 30, 35]
    assert steps_with(dues, "save") == [15, 30, 35]
    assert steps_with(dues, "log") == [4, 8, 10, 12, 16, 20, 24, 28, 30, 32, 35], "an evaluation has a row"
    assert steps_with(dues, "is_last") == [35] and not steps_with(dues, "stop")


def test_a_resumed_training_decides_as_an_unbroken_one() -> None:
    whole, resumed = walk(cadence()), cadence()
    assert [resumed.after(resumed.before(step, step), Requests()) for step in range(17, TOTAL + 1)] == whole[16:]


def test_what_falls_due_within_an_epoch_of_a_source_waits_for_its_end() -> None:
    dues = walk(cadence(evaluate=7, save=15, saves_at_epoch_ends=True))
    assert steps_with(dues, "evaluate") == [10, 20, 30, 35]
    assert [due.step for due in dues if due.save and due.can_save] == [20, 30]


def test_a_whole_epoch_taken_at_once_is_due_as_its_steps_are() -> None:
    decides = cadence(save=15, saves_at_epoch_ends=True)
    dues = [decides.after(decides.before(first, first + 9), Requests()) for first in (1, 11, 21)]
    assert steps_with(dues, "save") == [20, 30] and steps_with(dues, "evaluate") == [10, 20, 30]


def test_requests_of_any_rank_take_effect_and_a_stop_is_not_forgotten() -> None:
    decides = cadence(saves_at_epoch_ends=True)
    due = decides.after(decides.before(3, 3), Requests(stop=True, save=True))
    assert due.stop and due.save and not due.can_save
    later = [decides.after(decides.before(step, step), Requests()) for step in range(4, 11)]
    assert all(due.stop and due.save for due in later) and steps_with(later, "can_save") == [10]


@pytest.mark.parametrize(("kind", "due_at"), [("log", [3, 6, 9]), ("save", [3, 6, 9]), ("evaluate", [4, 7])])
def test_a_period_in_seconds_is_checked_after_every_step(kind: str, due_at: list[int]) -> None:
    """An evaluation is requested with one step's gradients, and follows the next step."""
    clock = Clock()
    decides = cadence(**{"log": 1000, "evaluate": 1000, "save": 1000, kind: "30s"}, clock=clock)
    dues = []
    for step in range(1, 10):
        clock.seconds += 10
        assert decides.quiet_until(step) == step, "no step may be taken without a look at the clock"
        requests = Requests()
        decides.request(requests, stop=False, step=step)
        dues.append(decides.after(decides.before(step, step), requests))
    assert steps_with(dues, kind) == due_at


def test_steps_with_nothing_due_between_them_end_before_the_next_that_has() -> None:
    decides = cadence()
    assert [decides.quiet_until(step) for step in (0, 3, 4, 8, 12, 30, 32)] == [4, 4, 8, 10, 15, 32, 35]
    assert cadence(stop_after=20).quiet_until(5) == 5, "each step has to be looked at"


def test_the_best_weights_are_saved_and_the_end_of_patience_ends() -> None:
    due = Due(10, evaluate=True)
    assert due.after_evaluation(True, False).save and not due.after_evaluation(True, False).is_last
    assert due.after_evaluation(False, True).is_last and due.after_evaluation(False, True).save
    assert not due.after_evaluation(False, False).save


def test_a_task_without_evaluation_data_never_evaluates() -> None:
    decides = cadence(evaluates=False)
    assert not steps_with(walk(decides, 20), "evaluate")
    assert decides.quiet_until(20) > 20, "and its steps stay fast"
