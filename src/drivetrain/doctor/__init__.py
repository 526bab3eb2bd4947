"""Checks with evidence and fixes."""

from __future__ import annotations

from collections.abc import Iterator

from drivetrain.outcomes import Problem
from drivetrain.targets.base import Check, Target


def check_target(target: Target) -> Iterator[Check]:
    """Yields the checks of a target; if it cannot be reached, only that."""
    try:
        yield Check("reach", "ok", target.reach())
    except Problem as problem:
        text, _, fix = str(problem).partition(": ")
        yield Check("reach", "fault", str(problem) if not fix else text, fix)
        return
    yield from target.checks()
