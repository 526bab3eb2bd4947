"""Machines that cost money start only after the user has agreed to their price."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from drivetrain.launch.request import Request
from drivetrain.outcomes import Problem
from drivetrain.recipe import load
from drivetrain.runs import Run
from drivetrain.targets import submit
from drivetrain.targets.config import find_target
from drivetrain.targets.consent import Agree, Consent, Cost, Price, ask_consent
from drivetrain.targets.local import LocalTarget
from drivetrain.targets.record import read_record
from drivetrain.targets.submission import Submission
from drivetrain.tune.trial_on_target import consent_to_trials
from tests.command import write_task

COST = Cost((Price("1 x a2-highgpu-1g", 3.67),), "a list of 2026-01-01")
REQUEST = Request(settings=("steps=2", "plan.threads=1", "plan.compile=off"), name="one")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Consent | None]:
    """The consents with which a target's machines were started; starting ends with a Problem."""
    consents: list[Consent | None] = []

    def submit_array(target: LocalTarget, submissions: list[Submission], notice: object) -> list[dict[str, object]]:
        consents.extend(submission.consent for submission in submissions)
        raise Problem("started")

    monkeypatch.setattr(LocalTarget, "submit_array", submit_array)
    monkeypatch.setattr(LocalTarget, "cost", lambda target, submission: COST)
    return consents


def asking(shown: list[str], answer: str | None, is_agreed: bool = False) -> Agree:
    def answer_question(question: str) -> str:
        shown.append(question)
        return str(answer)

    return partial(ask_consent, show=shown.append, ask=None if answer is None else answer_question, is_agreed=is_agreed)


def start(agree: Agree) -> None:
    target = find_target("local")
    recipes = load("small.py", list(REQUEST.settings))
    submit.submit(target, submit.prepare(target, recipes, REQUEST, Run("runs/one")), agree, print)


@pytest.mark.parametrize(("answer", "message"), [("n", "no consent"), ("", "no consent"), (None, "--yes")])
def test_nothing_starts_without_consent(answer: str | None, message: str, folder: Path, seen: list[Consent | None]) -> None:
    write_task()
    shown: list[str] = []
    with pytest.raises(Problem, match=message):
        start(asking(shown, answer))
    assert "$   3.67 an hour   1 x a2-highgpu-1g" in shown
    assert seen == []
    assert not Path("runs").exists()


@pytest.mark.parametrize(("answer", "is_agreed"), [("y", False), (None, True)])
def test_consent_reaches_the_target(answer: str | None, is_agreed: bool, folder: Path, seen: list[Consent | None]) -> None:
    write_task()
    with pytest.raises(Problem, match="started"):
        start(asking([], answer, is_agreed))
    assert [consent and consent.cost for consent in seen] == [COST]


def test_resume_asks_again(folder: Path, seen: list[Consent | None], monkeypatch: pytest.MonkeyPatch) -> None:
    write_task()
    with monkeypatch.context() as before:
        before.setattr(LocalTarget, "submit_array", lambda *arguments: [{"id": "1"}])
        start(asking([], "y"))
    record = read_record(Run("runs/one"))
    assert record is not None
    with pytest.raises(Problem, match="no consent"):
        submit.resubmit(record, (), Request(), asking([], "n"), print)
    assert seen == []


def test_a_search_asks_once_for_all_trials_at_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_task()
    monkeypatch.setattr(LocalTarget, "cost", lambda target, submission: COST)
    shown: list[str] = []
    (recipe,) = load("small.py", [])
    consent = consent_to_trials(find_target("local"), recipe, [Request()] * 3, folder, asking(shown, "yes"))
    assert consent is not None and consent.cost.hourly == pytest.approx(3 * 3.67)
    assert sum("[y/N]" in line for line in shown) == 1


def test_a_target_without_a_price_asks_nothing(folder: Path) -> None:
    write_task()
    target = find_target("local")
    submission = submit.prepare(target, load("small.py", []), REQUEST, Run("runs/one"))
    assert submit.consent_to(target, [submission], asking([], "n")) is None


def test_only_a_question_makes_a_consent() -> None:
    with pytest.raises(TypeError):
        Consent(COST, object())


def test_a_duration_gives_a_total() -> None:
    lines = list(Cost(COST.prices, COST.source, max_hours=2.0).lines())
    assert any("at most $7.34 in 2.0 hours" in line for line in lines)
