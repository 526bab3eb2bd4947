"""What a person sees of a study: a table, with the running trials live at its end on a terminal."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from typing import Any

from drivetrain.terminal import one_line
from drivetrain.tune.space import Space, short
from drivetrain.watch.screen import LABEL, PLAIN_SECONDS, Screen, number


def figure(metric: str, value: float | None) -> str:
    """A metric's value as people read it."""
    return "-" if value is None else number(metric, value).removeprefix(f"{metric} ")


class Table:
    """One line a trial: finished ones stay, running ones are redrawn below them."""

    def __init__(self, screen: Screen, space: Space, metric: str) -> None:
        self.screen, self.metric = screen, metric
        self.names = list(space)
        samples = {name: [*map(short, d.choices)] or ["0" * 10] for name, d in space.items()}
        self.widths = [max(len(name), *map(len, samples[name])) for name in self.names]
        self._shown: list[str] = []  # the live part, now on the screen
        self._last = time.monotonic()

    def head(self) -> None:
        if not self.screen.quiet:
            self.screen.put(self._line("trial", self.names, "epoch", self.metric, "state", "best"))

    def row(self, trial: int, params: Mapping[str, Any], progress: str, value: float | None, state: str, best: float | None) -> str:
        values = [short(params[name]) for name in self.names]
        return self._line(str(trial), values, progress, figure(self.metric, value), state, figure(self.metric, best))

    def _line(self, label: str, values: Sequence[str], progress: str, value: str, state: str, best: str) -> str:
        cells = [f"{text:<{width}}" for text, width in zip(values, self.widths, strict=True)]
        cells += [f"{progress:<9}", f"{value:<{max(9, len(self.metric))}}", f"{state:<10}", best]
        return (f"{label:<{LABEL}}" + "  ".join(cells)).rstrip()

    def keep(self, line: str, note: str = "") -> None:
        """A line that stays."""
        if not self.screen.quiet:
            self.clear()
            self.screen.put(line)
            if note:
                self.screen.put(" " * LABEL + note)

    def show(self, lines: list[str]) -> None:
        """The running trials: redrawn on a terminal, told now and then in a log."""
        if self.screen.quiet:
            return
        if self.screen.live:
            width = shutil.get_terminal_size((200, 24)).columns
            lines = [one_line(line)[: width - 1] for line in lines]
            if lines != self._shown:
                self.clear()
                self.screen.stream.write("".join(f"{line}\n" for line in lines))
                self.screen.stream.flush()
                self._shown = lines
        elif time.monotonic() - self._last > PLAIN_SECONDS:
            self._last = time.monotonic()
            for line in lines:
                self.screen.put(line)

    def clear(self) -> None:
        """Wipe the live part."""
        if self._shown:
            self.screen.stream.write(f"\x1b[{len(self._shown)}A\r\x1b[J")
            self._shown = []
