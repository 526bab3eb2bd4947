"""What the engine tells the world: observers are handed to it and may do nothing."""

from __future__ import annotations

from typing import Any


class Observer:
    """Receives what happens on rank 0 (and `moment` on every rank)."""

    def resumed(self, step: int) -> None:
        """Training goes on after this step: what was noted beyond it never happened."""

    def started(self, facts: dict[str, Any]) -> None:
        """The model is built: parameters, processes, device, steps."""

    def tick(self, facts: dict[str, Any]) -> None:
        """Progress between rows: step, epoch, loss."""

    def row(self, row: dict[str, Any]) -> None:
        """One logged row of metrics."""

    def planned(self, facts: dict[str, Any]) -> None:
        """Choices of the plan that the first steps settled, and in `sentence` what to tell the user of them."""

    def notice(self, text: str) -> None:
        """A sentence for the user."""

    def flush(self) -> None:
        """All rows so far must reach the disk."""

    def moment(self, name: str) -> None:
        """A named point of the code was reached; fault injectors wait for these."""

    @property
    def watches(self) -> bool:
        """Whether moments mean anything to it."""
        return type(self).moment is not Observer.moment

    def close(self) -> None:
        """The run ends."""


class Observers(Observer):
    """Several observers as one."""

    def __init__(self, members: list[Observer]) -> None:
        self.members = members
        self._watching = [m for m in members if m.watches]  # reached every step

    def resumed(self, step: int) -> None:
        for member in self.members:
            member.resumed(step)

    def started(self, facts: dict[str, Any]) -> None:
        for member in self.members:
            member.started(facts)

    def tick(self, facts: dict[str, Any]) -> None:
        for member in self.members:
            member.tick(facts)

    def row(self, row: dict[str, Any]) -> None:
        for member in self.members:
            member.row(row)

    def planned(self, facts: dict[str, Any]) -> None:
        for member in self.members:
            member.planned(facts)

    def notice(self, text: str) -> None:
        for member in self.members:
            member.notice(text)

    def flush(self) -> None:
        for member in self.members:
            member.flush()

    @property
    def watches(self) -> bool:
        return bool(self._watching)

    def moment(self, name: str) -> None:
        for member in self._watching:
            member.moment(name)

    def close(self) -> None:
        for member in self.members:
            member.close()
