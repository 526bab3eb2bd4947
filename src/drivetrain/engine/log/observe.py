"""The interface of observers, to which the engine reports what happens in a training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from drivetrain.engine.log.pictures import PngImage

T = TypeVar("T")


class Observer:
    """Receives what happens on rank 0 (and `reached` on every rank). By default each method does nothing."""

    def resumed(self, step: int) -> None:
        """Training resumes after this step; rows of later steps are dropped."""

    def started(self, facts: dict[str, Any]) -> None:
        """The model is built: parameters, processes, device, steps."""

    def tick(self, facts: dict[str, Any]) -> None:
        """The newest metrics between two rows, for a progress line."""

    def row(self, row: dict[str, Any]) -> None:
        """One logged row of metrics."""

    def picture(self, step: int, image: PngImage) -> None:
        """A picture that the task's `remarks` returned after the evaluation of a step."""

    def planned(self, facts: dict[str, Any]) -> None:
        """Choices of the plan that were made during the first steps; `sentence` describes them for the user."""

    def notice(self, text: str) -> None:
        """A sentence for the user."""

    def flush(self) -> None:
        """Writes all rows so far to the disk."""

    def reached(self, name: str) -> None:
        """The code has reached an observation point: for progress, heartbeats and fault injection."""

    @property
    def watches(self) -> bool:
        """Whether this observer listens to observation points."""
        return type(self).reached is not Observer.reached

    def close(self) -> None:
        """The run ends."""


class Observers(Observer):
    """Several observers as one."""

    def __init__(self, members: list[Observer]) -> None:
        self.members = members
        self._watchers = [m for m in members if m.watches]  # called several times a step

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

    def picture(self, step: int, image: PngImage) -> None:
        for member in self.members:
            member.picture(step, image)

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
        return bool(self._watchers)

    def reached(self, name: str) -> None:
        for member in self._watchers:
            member.reached(name)

    def close(self) -> None:
        for member in self.members:
            member.close()


def observe_fetches(batches: Iterator[T], reached: Callable[[str], None]) -> Iterator[T]:
    """Yields the batches, with an observation point before and after each wait for data."""
    while True:
        reached("fetch")
        batch = next(batches, None)
        reached("fetched")
        if batch is None:
            return
        yield batch
