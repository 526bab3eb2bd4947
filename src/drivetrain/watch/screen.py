"""What a person sees of a training: aligned lines, one of them live on a terminal."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from typing import Any, TextIO

from drivetrain.engine.log.observe import Observer
from drivetrain.terminal import one_line

LABEL = 8  # width of the first column
PLAIN_SECONDS = 30.0  # between progress lines where nothing can be redrawn
LIVE_SECONDS = 0.1


def number(name: str, value: float) -> str:
    """A metric as people read it."""
    if "accuracy" in name and 0 <= value <= 1:
        return f"{name} {100 * value:.1f} %"
    return f"{name} {value:.4g}" if abs(value) < 1e4 else f"{name} {value:,.0f}"


def duration(seconds: float) -> str:
    whole = max(0, round(seconds))
    return f"{whole // 3600}:{whole % 3600 // 60:02d}:{whole % 60:02d}"


def size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


class Screen(Observer):
    """Draws on a terminal, or writes plain lines to a file or pipe."""

    def __init__(self, stream: TextIO | None = None, quiet: bool = False) -> None:
        self.stream = stream or sys.stdout
        self.quiet = quiet
        self.live = self.stream.isatty() and os.environ.get("TERM") != "dumb"
        self.colour = self.live and not os.environ.get("NO_COLOR")
        self._facts: dict[str, Any] = {}
        self._drawn = self._passing = False
        self._last = 0.0
        self._evaluated: dict[str, float] = {}
        self._start: tuple[float, int] | None = None

    # --- lines ---

    def line(self, label: str, text: str) -> None:
        """One finished line under a label."""
        if self.quiet:
            return
        head = f"{label:<{LABEL}}"
        if self.colour and label:
            head = f"\x1b[1m{head}\x1b[0m"
        self._put(head + one_line(text))

    def put(self, text: str) -> None:
        """One finished line as it is, without codes that a terminal would obey."""
        self._put(one_line(text))

    def _put(self, text: str) -> None:
        wipe, self._drawn = "\r\x1b[2K" if self._drawn else "", False
        self._write(f"{wipe}{text}\n")

    def _write(self, text: str) -> None:
        try:
            self.stream.write(text)
            self.stream.flush()
        except OSError:
            self.quiet, self.live = True, False  # the reader left, or the terminal is gone; the training goes on

    def busy(self, text: str) -> None:
        """Something that takes a moment, shown until the next line; only where it can be wiped again."""
        if self.live and not self.quiet:
            self._write(f"\r\x1b[2K{'start':<{LABEL}}{one_line(text)}")
            self._drawn = self._passing = True

    def passed_on(self, text: str) -> None:
        """A line that the user's own code printed; its colours stay."""
        if not self.quiet:
            self._put(one_line(text, self.colour))

    def notice(self, text: str) -> None:
        first, *more = text.splitlines() or [""]
        self.line("note", first)
        for line in more:
            self.line("", line)

    def planned(self, facts: dict[str, Any]) -> None:
        if facts["sentence"]:
            first, *more = facts["sentence"].splitlines()
            self.line("plan", first)
            for line in more:
                self.line("", line)

    def started(self, facts: dict[str, Any]) -> None:
        self._facts = facts
        self._start = None
        trainable = f", {facts['trainable']:,} trainable" if facts["trainable"] != facts["parameters"] else ""
        one = facts["processes"] == 1
        self.line(
            "model",
            f"{facts['parameters']:,} parameters{trainable}; {facts['processes']} process{'' if one else 'es'} on {facts['device']}"
            f"{'' if one else ' (' + facts['backend'] + ')'}, {facts['precision']}, accumulation {facts['accumulation']}",
        )
        if facts["step"]:
            self.line("resume", f"from step {facts['step']:,} of {facts['steps']:,}")

    # --- progress ---

    def tick(self, facts: dict[str, Any]) -> None:
        now = time.monotonic()
        if self.quiet or now - self._last < (LIVE_SECONDS if self.live else PLAIN_SECONDS):
            return
        if not self.live and self._last == 0.0:
            self._last = now
            return
        self._last = now
        self._draw(facts, final=False)

    def row(self, row: dict[str, Any]) -> None:
        self._evaluated = {k.removeprefix("eval/"): v for k, v in row.items() if k.startswith("eval/")} or self._evaluated
        last = row["step"] == self._facts.get("steps")
        if last and not self.quiet:
            self._draw(row, final=True)
        else:
            self.tick(row)

    def _draw(self, facts: dict[str, Any], final: bool) -> None:
        text = self._fit([(importance, one_line(piece)) for importance, piece in self._pieces(facts)])
        if self.live and not final:
            self._write("\r\x1b[2K" + text)
            self._drawn, self._passing = True, False
        else:
            self.put(text)

    def _pieces(self, facts: dict[str, Any]) -> list[tuple[int, str]]:
        """(importance, text): a narrow terminal loses the least important first."""
        step, steps, epochs = facts["step"], self._facts["steps"], self._facts["epochs"]
        if self._start is None:
            self._start = time.monotonic(), step
        begun, first = self._start
        spent = time.monotonic() - begun
        share = step / steps
        eta = spent / max(1, step - first) * (steps - step)
        means = {k.removeprefix("train/"): v for k, v in facts.items() if k.startswith("train/") and k != "train/loss"}
        metric = next(iter((means or self._evaluated).items()), None)
        bar = "#" * round(10 * share) + "." * (10 - round(10 * share))
        return [
            (5, f"epoch {facts['epoch']}/{epochs}"),
            (9, f"step {step:,}/{steps:,}"),
            (10, number("loss", facts.get("train/loss", float("nan")))),
            (7, number(*metric) if metric and metric[0] != "loss" else ""),
            (2, f"lr {facts['learning_rate']:.2g}"),
            (6, f"{facts['samples_per_second']:,.0f} samples/s"),
            (1, size(facts["memory_bytes"]) if "memory_bytes" in facts else ""),
            (3, f"[{bar}] {100 * share:.0f} %"),
            (8, duration(facts["time"] if step == steps else eta)),
        ]

    def _fit(self, pieces: list[tuple[int, str]]) -> str:
        width = shutil.get_terminal_size((200, 24)).columns if self.live else 200
        pieces = [p for p in pieces if p[1]]
        while len(pieces) > 1 and LABEL + len("  ".join(t for _, t in pieces)) >= width:
            pieces.remove(min(pieces))
        text = f"{'train':<{LABEL}}" + "  ".join(t for _, t in pieces)
        return text if not self.live else text[: width - 1]

    def close(self) -> None:
        if self._drawn:
            self._write("\r\x1b[2K" if self._passing else "\n")  # the last progress stays
            self._drawn = False


class Wire(Observer):
    """The same events as JSON lines, to the front end that owns the terminal."""

    def __init__(self, handle: int) -> None:
        self._file = open(handle, "wb", buffering=0)  # noqa: SIM115 (open as long as the run)
        self._last = 0.0
        self._steps = 0

    def send(self, kind: str, value: Any) -> None:
        try:
            self._file.write(json.dumps([kind, value]).encode() + b"\n")
        except (BrokenPipeError, ValueError):
            pass  # the front end is gone; so will this process be

    def started(self, facts: dict[str, Any]) -> None:
        self._steps = facts["steps"]
        self.send("started", facts)

    def tick(self, facts: dict[str, Any]) -> None:
        if time.monotonic() - self._last > LIVE_SECONDS:
            self._last = time.monotonic()
            self.send("tick", facts)

    def row(self, row: dict[str, Any]) -> None:
        if row["step"] == self._steps or any(name.startswith("eval/") for name in row):
            self.send("row", row)
        else:
            self.tick(row)

    def notice(self, text: str) -> None:
        self.send("notice", text)

    def planned(self, facts: dict[str, Any]) -> None:
        self.send("planned", facts)


def replay(screen: Screen, kind: str, value: Any) -> None:
    """Give a screen an event that came over the wire."""
    getattr(screen, kind)(value)
