"""Prints a study as a table. On a terminal, the lines of running trials are redrawn at the end."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from typing import Any

from drivetrain.terminal import one_line
from drivetrain.tune.space import Space, short
from drivetrain.watch.screen import LABEL_WIDTH, PLAIN_SECONDS, Screen, format_metric


def format_value(metric: str, value: float | None) -> str:
    """Formats a metric's value without its name."""
    return "-" if value is None else format_metric(metric, value).removeprefix(f"{metric} ")


class Table:
    """A table with one line for each trial: first the ended trials, then the running ones, whose lines are redrawn."""

    def __init__(self, screen: Screen, space: Space, metric: str) -> None:
        self.screen, self.metric = screen, metric
        self.names = list(space)
        samples = {name: [*map(short, d.choices)] or ["0" * 10] for name, d in space.items()}
        self.widths = [max(len(name), *map(len, samples[name])) for name in self.names]
        self._live_lines: list[str] = []
        """The lines of running trials on the terminal."""
        self._last_print = time.monotonic()

    def print_header(self) -> None:
        if not self.screen.quiet:
            self.screen.put(self._line("trial", self.names, "epoch", self.metric, "state", "best"))

    def row(self, trial: int, params: Mapping[str, Any], progress: str, value: float | None, state: str, best: float | None) -> str:
        values = [short(params[name]) for name in self.names]
        return self._line(str(trial), values, progress, format_value(self.metric, value), state, format_value(self.metric, best))

    def _line(self, label: str, values: Sequence[str], progress: str, value: str, state: str, best: str) -> str:
        cells = [f"{text:<{width}}" for text, width in zip(values, self.widths, strict=True)]
        cells += [f"{progress:<9}", f"{value:<{max(9, len(self.metric))}}", f"{state:<10}", best]
        return (f"{label:<{LABEL_WIDTH}}" + "  ".join(cells)).rstrip()

    def print(self, line: str, note: str = "") -> None:
        """Prints a line that is never redrawn, and a note below it."""
        if not self.screen.quiet:
            self.clear()
            self.screen.put(line)
            if note:
                self.screen.put(" " * LABEL_WIDTH + note)

    def show(self, lines: list[str]) -> None:
        """Shows the running trials: redraws them on a terminal, prints them at intervals in a file."""
        if self.screen.quiet:
            return
        if self.screen.live:
            width = shutil.get_terminal_size((200, 24)).columns
            lines = [one_line(line)[: width - 1] for line in lines]
            if lines != self._live_lines:
                self.clear()
                self.screen.stream.write("".join(f"{line}\n" for line in lines))
                self.screen.stream.flush()
                self._live_lines = lines
        elif time.monotonic() - self._last_print > PLAIN_SECONDS:
            self._last_print = time.monotonic()
            for line in lines:
                self.screen.put(line)

    def clear(self) -> None:
        """Removes the lines of running trials from the terminal."""
        if self._live_lines:
            self.screen.stream.write(f"\x1b[{len(self._live_lines)}A\r\x1b[J")
            self._live_lines = []
