"""Prints a training's output for people; on a terminal the progress line is redrawn in place."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from typing import Any, NamedTuple, TextIO

from drivetrain.engine.log.observe import Observer
from drivetrain.terminal import one_line

LABEL_WIDTH = 8
PLAIN_SECONDS = 30.0  # between progress lines in a file or pipe, where no line can be redrawn
LIVE_SECONDS = 0.1  # between two drawings on a terminal
PLAIN_WIDTH = 200
ERASE_LINE = "\r\x1b[2K"


def format_metric(name: str, value: float) -> str:
    if "accuracy" in name and 0 <= value <= 1:
        return f"{name} {100 * value:.1f} %"
    return f"{name} {value:.4g}" if abs(value) < 1e4 else f"{name} {value:,.0f}"


def format_duration(seconds: float) -> str:
    """Returns H:MM:SS."""
    minutes, seconds = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"


def format_size(num_bytes: float) -> str:
    size = num_bytes
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


class Screen(Observer):
    """Draws on a terminal, or writes plain lines to a file or pipe."""

    def __init__(self, stream: TextIO | None = None, quiet: bool = False) -> None:
        self.stream = stream or sys.stdout
        self.quiet = quiet
        self.live = self.stream.isatty() and os.environ.get("TERM") != "dumb"
        """Whether a line can be redrawn."""
        self.has_colours = self.live and not os.environ.get("NO_COLOR")
        self._facts: dict[str, Any] = {}
        """What `started` reported."""
        self._has_live_line = False
        """Whether the terminal's last line will be redrawn, so that it has no newline yet."""
        self._live_line_is_temporary = False
        """Whether `close` erases that line."""
        self._last_draw_time = 0.0
        self._evaluation: dict[str, float] = {}
        """The metrics of the newest evaluation."""
        self._first_draw: _FirstDraw | None = None

    # --- lines ---

    def line(self, label: str, text: str) -> None:
        """Prints a line that begins with a label."""
        if self.quiet:
            return
        first_column = f"{label:<{LABEL_WIDTH}}"
        if self.has_colours and label:
            first_column = f"\x1b[1m{first_column}\x1b[0m"  # bold
        self._print(first_column + one_line(text))

    def put(self, text: str) -> None:
        """Prints a line without a label, even if `quiet`."""
        self._print(one_line(text))

    def _print(self, text: str) -> None:
        erase = ERASE_LINE if self._has_live_line else ""
        self._has_live_line = False
        self._write(f"{erase}{text}\n")

    def _write(self, text: str) -> None:
        try:
            self.stream.write(text)
            self.stream.flush()
        except OSError:
            self.quiet, self.live = True, False  # the pipe or the terminal was closed: the training continues without output

    def busy(self, text: str) -> None:
        """On a terminal, shows what is being done until the next line is printed."""
        if self.live and not self.quiet:
            self._write(f"{ERASE_LINE}{'start':<{LABEL_WIDTH}}{one_line(text)}")
            self._has_live_line = self._live_line_is_temporary = True

    def worker_output(self, text: str) -> None:
        """Prints a line that a worker printed, with its colours."""
        if not self.quiet:
            self._print(one_line(text, self.has_colours))

    def notice(self, text: str) -> None:
        self._lines("note", text)

    def planned(self, facts: dict[str, Any]) -> None:
        if facts["sentence"]:
            self._lines("plan", facts["sentence"])

    def _lines(self, label: str, text: str) -> None:
        """Prints one or more lines, the first with a label."""
        first, *others = text.splitlines() or [""]
        self.line(label, first)
        for line in others:
            self.line("", line)

    def started(self, facts: dict[str, Any]) -> None:
        self._facts = facts
        self._first_draw = None
        trainable = f", {facts['trainable']:,} trainable" if facts["trainable"] != facts["parameters"] else ""
        if facts["processes"] == 1:
            processes = f"1 process on {facts['device']}"
        else:
            processes = f"{facts['processes']} processes on {facts['device']} ({facts['backend']})"
        model = f"{facts['parameters']:,} parameters{trainable}"
        self.line("model", f"{model}; {processes}, {facts['precision']}, accumulation {facts['accumulation']}")
        if facts["step"]:
            self.line("resume", f"from step {facts['step']:,} of {facts['steps']:,}")

    # --- progress ---

    def tick(self, facts: dict[str, Any]) -> None:
        now = time.monotonic()
        min_seconds = LIVE_SECONDS if self.live else PLAIN_SECONDS
        if self.quiet or now - self._last_draw_time < min_seconds:
            return
        is_first = self._last_draw_time == 0.0
        self._last_draw_time = now
        if self.live or not is_first:  # a file gets its first progress line after PLAIN_SECONDS
            self._draw(facts, final=False)

    def row(self, row: dict[str, Any]) -> None:
        if metrics := {name.removeprefix("eval/"): value for name, value in row.items() if name.startswith("eval/")}:
            self._evaluation = metrics
        is_last_step = row["step"] == self._facts.get("steps")
        if is_last_step and not self.quiet:
            self._draw(row, final=True)
        else:
            self.tick(row)

    def _draw(self, facts: dict[str, Any], final: bool) -> None:
        text = self._fit([_Piece(piece.importance, one_line(piece.text)) for piece in self._pieces(facts)])
        if self.live and not final:
            self._write(ERASE_LINE + text)
            self._has_live_line, self._live_line_is_temporary = True, False
        else:
            self.put(text)

    def _pieces(self, facts: dict[str, Any]) -> list[_Piece]:
        """Returns the pieces of the progress line, from left to right."""
        step, steps, epochs = facts["step"], self._facts["steps"], self._facts["epochs"]
        if self._first_draw is None:
            self._first_draw = _FirstDraw(time.monotonic(), step)
        seconds_per_step = (time.monotonic() - self._first_draw.time) / max(1, step - self._first_draw.step)
        seconds_left = seconds_per_step * (steps - step)
        share = step / steps
        num_hashes = round(10 * share)
        bar = "#" * num_hashes + "." * (10 - num_hashes)
        return [
            _Piece(5, f"epoch {facts['epoch']}/{epochs}"),
            _Piece(9, f"step {step:,}/{steps:,}"),
            _Piece(10, format_metric("loss", facts.get("train/loss", float("nan")))),
            _Piece(7, self._second_metric(facts)),
            _Piece(2, f"lr {facts['learning_rate']:.2g}"),
            _Piece(6, f"{facts['samples_per_second']:,.0f} samples/s"),
            _Piece(1, format_size(facts["memory_bytes"]) if "memory_bytes" in facts else ""),
            _Piece(3, f"[{bar}] {100 * share:.0f} %"),
            _Piece(8, format_duration(facts["time"] if step == steps else seconds_left)),
        ]

    def _second_metric(self, facts: dict[str, Any]) -> str:
        """Returns the first training metric other than the loss, or else the first evaluation metric, if that is not the loss."""
        train_metrics = {k.removeprefix("train/"): v for k, v in facts.items() if k.startswith("train/") and k != "train/loss"}
        name, value = next(iter((train_metrics or self._evaluation).items()), ("loss", 0.0))
        return "" if name == "loss" else format_metric(name, value)

    def _fit(self, pieces: list[_Piece]) -> str:
        """Joins the pieces; a narrow terminal loses the least important ones."""
        width = shutil.get_terminal_size((PLAIN_WIDTH, 24)).columns if self.live else PLAIN_WIDTH
        pieces = [piece for piece in pieces if piece.text]
        while len(pieces) > 1 and LABEL_WIDTH + len(_joined(pieces)) >= width:
            pieces.remove(min(pieces))
        text = f"{'train':<{LABEL_WIDTH}}{_joined(pieces)}"
        return text[: width - 1] if self.live else text

    def close(self) -> None:
        """Erases a temporary line; keeps the last progress line."""
        if self._has_live_line:
            self._write(ERASE_LINE if self._live_line_is_temporary else "\n")
            self._has_live_line = False


class _FirstDraw(NamedTuple):
    """When and at which step the progress line was first drawn: the time left is computed from the speed since then."""

    time: float
    step: int


class _Piece(NamedTuple):
    """A part of the progress line."""

    importance: int
    text: str


def _joined(pieces: list[_Piece]) -> str:
    return "  ".join(piece.text for piece in pieces)


class EventPipe(Observer):
    """Sends a worker's events as JSON lines to the supervisor, which gives them to its `Screen`."""

    def __init__(self, handle: int) -> None:
        self._file = open(handle, "wb", buffering=0)  # noqa: SIM115 (open as long as the run)
        self._last_tick_time = 0.0
        self._total_steps = 0

    def send(self, kind: str, value: Any) -> None:
        try:
            self._file.write(json.dumps([kind, value]).encode() + b"\n")
        except (BrokenPipeError, ValueError):
            pass  # the supervisor ended, so the kernel will kill this process

    def started(self, facts: dict[str, Any]) -> None:
        self._total_steps = facts["steps"]
        self.send("started", facts)

    def tick(self, facts: dict[str, Any]) -> None:
        if time.monotonic() - self._last_tick_time > LIVE_SECONDS:
            self._last_tick_time = time.monotonic()
            self.send("tick", facts)

    def row(self, row: dict[str, Any]) -> None:
        if row["step"] == self._total_steps or any(name.startswith("eval/") for name in row):
            self.send("row", row)
        else:
            self.tick(row)

    def notice(self, text: str) -> None:
        self.send("notice", text)

    def planned(self, facts: dict[str, Any]) -> None:
        self.send("planned", facts)


def show_event(screen: Screen, kind: str, value: Any) -> None:
    """Calls the method of a screen that has the name of an event from an `EventPipe`."""
    getattr(screen, kind)(value)
