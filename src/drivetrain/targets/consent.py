"""The user's consent to a cost. Code that starts machines which cost money takes a `Consent`, and only `ask_consent` makes one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from drivetrain.outcomes import Problem

_MADE_BY_ASKING = object()


class Price(NamedTuple):
    """One line of a cost estimate."""

    item: str
    """What is paid for, such as `2 x n1-standard-4 in us-central1`."""
    hourly: float
    """US dollars for an hour of all of it."""


@dataclass(frozen=True)
class Cost:
    """What machines cost while they exist."""

    prices: tuple[Price, ...]
    source: str
    """Where the prices come from, with their date."""
    max_hours: float | None = None
    """After so many hours the machines are stopped or removed; None: when the user removes them."""
    after: str = ""
    """What costs money after these hours, in words."""

    @property
    def hourly(self) -> float:
        """US dollars an hour."""
        return sum(price.hourly for price in self.prices)

    def lines(self) -> Iterator[str]:
        """Yields what the user reads before answering."""
        for price in self.prices:
            yield f"${price.hourly:7.2f} an hour   {price.item}"
        yield f"${self.hourly:7.2f} an hour   in all, {self._total()}"
        yield f"prices: {self.source}"

    def _total(self) -> str:
        if self.max_hours is None:
            return f"${24 * self.hourly:,.2f} a day, until you remove the machines"
        text = f"at most ${self.max_hours * self.hourly:,.2f} in {self.max_hours:,.1f} hours"
        return f"{text}, {self.after}" if self.after else text


def total_cost(costs: Sequence[Cost]) -> Cost:
    """Returns the cost of several runs at a time."""
    limits = [cost.max_hours for cost in costs if cost.max_hours is not None]
    return Cost(
        prices=tuple(price for cost in costs for price in cost.prices),
        source="; ".join(dict.fromkeys(cost.source for cost in costs)),
        max_hours=max(limits) if len(limits) == len(costs) else None,
        after="; ".join(dict.fromkeys(cost.after for cost in costs if cost.after)),
    )


class Consent:
    """Proof that the user agreed to a cost."""

    def __init__(self, cost: Cost, key: object) -> None:
        if key is not _MADE_BY_ASKING:
            raise TypeError("only ask_consent makes a Consent")
        self.cost = cost


Agree = Callable[[str, Cost], Consent]
"""Asks the user whether an action may cost so much; raises Problem if not."""


def ask_consent(action: str, cost: Cost, show: Callable[[str], None], ask: Callable[[str], str] | None, is_agreed: bool = False) -> Consent:
    """Shows a cost and returns the user's consent; raises Problem without it.

    `ask` prints a question and returns the answer; None: nobody can be asked. `is_agreed`: --yes was given.
    """
    for line in cost.lines():
        show(line)
    if not is_agreed:
        if ask is None:
            raise Problem(f"{action} costs money and nobody can be asked: repeat the command with --yes")
        if ask(f"{action} for this price? [y/N] ").strip().lower() not in ("y", "yes"):
            raise Problem("nothing was started: no consent to the price")
    return Consent(cost, _MADE_BY_ASKING)
