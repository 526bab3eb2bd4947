"""How a run can end: nine words, each with its exit code, and the error that carries one of them."""

from __future__ import annotations

from enum import StrEnum


class Outcome(StrEnum):
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
        """Repeating the same command may succeed: codes from 200 up."""
        return self.code >= 200


# Below 128 a repetition fails again; from 200 up it goes on where it stopped. No code is one that a
# signal's death gives (128 + n), so a killed worker is never mistaken for one that spoke.
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


class Problem(Exception):
    """Something the user can mend: one or two lines that name the fix, without a traceback."""

    def __init__(self, message: str, outcome: Outcome = Outcome.USAGE) -> None:
        super().__init__(message)
        self.outcome = outcome


def outcome_of_code(code: int) -> Outcome:
    """The word for a process's exit code; deaths by signal and unknown codes are the machine's."""
    return next((outcome for outcome, known in EXIT_CODES.items() if known == code), Outcome.INFRA)
