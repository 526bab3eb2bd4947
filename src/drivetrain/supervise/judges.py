"""Who gives the verdict on a hang: a machine that is alone by itself; of several, the one that leads, by what all of them see."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from drivetrain.supervise.verdict import Sight, Verdict, judge

HERE = None
"""The leading machine itself, among those that report."""
PATIENCE = 2.0  # seconds that other machines get to tell what their ranks wait in, before the verdict is given without it


class Judge:
    """Of one machine's ranks, where there are no others."""

    asks = False
    """Whether the ranks are to be looked at though none is silent beyond its limit."""

    def __call__(self, sights: list[Sight] | None) -> Verdict | None:
        return judge(sights or [], whole=True)


class Reporting(Judge):
    """Tells the machine that leads what is seen here; the verdict comes from there."""

    def __init__(self, tell: Callable[[list[Sight]], None]) -> None:
        self._tell = tell
        self._over = False

    def __call__(self, sights: list[Sight] | None) -> Verdict | None:
        if sights is None:
            return None
        if sights or self._over:
            self._tell(sights)
            self.asks = False
        self._over = any(s.over for s in sights)
        return None


@dataclass(frozen=True)
class Report:
    """What a machine saw last, and since when it sees the same."""

    sights: list[Sight]
    first: float
    last: float


class Leading(Judge):
    """Judges by what all machines see."""

    def __init__(
        self,
        others: Callable[[], Sequence[Hashable]],
        ask: Callable[[], None],
        spread: Callable[[Verdict], None],
        exclude: Callable[[Hashable], None],
        answer_seconds: float,
    ) -> None:
        """`others` gives the machines that still take part, `ask` has them look at once, `spread` tells them the verdict,
        `exclude` removes one that does not answer within `answer_seconds` while others wait."""
        self._others, self._ask, self._spread, self._exclude, self._answer_seconds = others, ask, spread, exclude, answer_seconds
        self._reports: dict[Hashable, Report] = {}
        self._heard: dict[Hashable, float] = {}
        self._due = math.inf
        self._asked = math.inf

    def hear(self, machine: Hashable, sights: list[Sight]) -> None:
        """A machine that no longer sees anybody silent beyond their limit says so by an empty list."""
        before, now = self._reports.get(machine), time.monotonic()
        self._heard[machine] = now
        if not sights:
            if before is not None and any(s.over for s in before.sights):
                del self._reports[machine]
            return
        same = before is not None and _silent(before.sights) == _silent(sights)
        self._reports[machine] = Report(sights, before.first if same and before is not None else now, now)

    def __call__(self, sights: list[Sight] | None) -> Verdict | None:
        if sights is not None:
            self.hear(HERE, sights)
        machines = [HERE, *self._others()]
        reports = [self._reports[machine] for machine in machines if machine in self._reports]
        heard_all = len(reports) == len(machines)
        # That all wait for each other holds only if there was a moment at which all did.
        at_one_time = heard_all and max(r.first for r in reports) <= min(r.last for r in reports)
        verdict = judge(sorted((s for r in reports for s in r.sights), key=lambda s: s.rank), whole=at_one_time)
        self.asks = verdict is not None and HERE not in self._reports
        if verdict is None:
            self._due = math.inf
            self._check_answers(any(s.over for r in reports for s in r.sights))
            return None
        if not heard_all and time.monotonic() < self._due:
            if self._due == math.inf:
                self._due = time.monotonic() + PATIENCE
                self._ask()
            return None
        self._spread(verdict)
        return verdict

    def _check_answers(self, ranks_wait: bool) -> None:
        """While ranks wait beyond their limit: every machine has to say what its own ranks do."""
        now = time.monotonic()
        if not ranks_wait:
            self._asked = math.inf
        elif self._asked == math.inf:
            self._asked = now
            self._ask()
        elif now - self._asked > self._answer_seconds:
            for machine in [m for m in self._others() if self._heard.get(m, -math.inf) < self._asked]:
                self._exclude(machine)
            self._asked = math.inf


def _silent(sights: list[Sight]) -> list[tuple[int, bool, float]]:
    return [(s.rank, s.over, s.since) for s in sights]
