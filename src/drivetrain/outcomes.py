"""How a run can end: nine outcomes, each with its exit code, and the error that carries one of them."""

from __future__ import annotations

from enum import StrEnum


class Outcome(StrEnum):
    """How a run ended."""

    OK = "ok"
    USER_ERROR = "user-error"
    USAGE = "usage"
    DATA = "data"
    NAN = "nan"
    PREEMPTED = "preempted"
    INFRA = "infra"
    HANG = "hang"
    OOM = "oom"

    @property
    def code(self) -> int:
        return EXIT_CODES[self]

    @property
    def retryable(self) -> bool:
        """Whether the same command may succeed if it is repeated: exit codes from 200 up."""
        return self.code >= 200


EXIT_CODES = {
    Outcome.OK: 0,
    Outcome.USER_ERROR: 1,
    Outcome.USAGE: 2,
    Outcome.DATA: 65,
    Outcome.NAN: 70,
    Outcome.PREEMPTED: 200,
    Outcome.INFRA: 201,
    Outcome.HANG: 202,
    Outcome.OOM: 203,
}
"""Below 128 a repeated command fails again; from 200 up it continues where the run stopped. None is 128 + n, the code of a death by
signal n, so that a killed worker never looks like one that chose its outcome."""


class Problem(Exception):
    """An error that the user can fix: one or two lines that name the fix, shown without a traceback."""

    def __init__(self, message: str, outcome: Outcome = Outcome.USAGE) -> None:
        super().__init__(message)
        self.outcome = outcome


def outcome_of_code(code: int) -> Outcome:
    """Returns the outcome of a process's exit code; deaths by signal and unknown codes are INFRA."""
    return next((outcome for outcome, known in EXIT_CODES.items() if known == code), Outcome.INFRA)
