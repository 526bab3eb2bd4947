"""Values from files and messages become typed dataclasses, or are refused."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from drivetrain import strict
from drivetrain.outcomes import Outcome


@dataclass(frozen=True)
class Inner:
    number: int


@dataclass(frozen=True)
class Outer:
    name: str
    inner: Inner
    pair: tuple[str, int]
    outcome: Outcome = Outcome.OK
    parts: dict[str, float] = field(default_factory=dict)
    maybe: int | None = None
    choice: Literal["a", "b"] = "a"


VALID: dict[str, Any] = {"name": "n", "inner": {"number": 3}, "pair": ["x", 1]}


def test_values_that_fit_become_typed() -> None:
    outer = strict.read(Outer, VALID | {"outcome": "nan", "parts": {"x": 1}})
    assert outer == Outer("n", Inner(3), ("x", 1), Outcome.NAN, {"x": 1.0})


@pytest.mark.parametrize(
    "change",
    [
        {"name": 5},
        {"inner": {"number": True}},
        {"inner": {"number": 1, "more": 2}},
        {"inner": []},
        {"pair": ["x"]},
        {"pair": "x1"},
        {"outcome": "fine"},
        {"parts": {"x": float("nan")}},
        {"parts": {1: 2.0}},
        {"maybe": "1"},
        {"choice": "c"},
        {"unknown": 1},
    ],
)
def test_values_that_do_not_fit_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(strict.Mismatch):
        strict.read(Outer, VALID | change)


def test_a_missing_field_is_named() -> None:
    with pytest.raises(strict.Mismatch, match="Outer lacks 'inner'"):
        strict.read(Outer, {"name": "n", "pair": ["x", 1]})
