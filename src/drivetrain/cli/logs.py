"""`logs`: print what a run's processes printed."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from drivetrain import runs
from drivetrain.cli.flags import Parser, whole_number
from drivetrain.cli.submitted import refreshed
from drivetrain.outcomes import Problem
from drivetrain.runs import Run
from drivetrain.targets.record import Record
from drivetrain.terminal import one_line

NUM_LINES = 1000
POLL_SECONDS = 0.3


def parser(verb: str) -> Parser:
    parser = Parser("drivetrain logs", "What a run's processes printed: the last lines of each.")
    parser.add_argument("target", metavar="RUN", help="a run's name or folder")
    parser.add_argument("-f", "--follow", action="store_true", help="go on printing until the run ends")
    parser.add_argument("--rank", type=whole_number(0), metavar="K", help="only the log of process K")
    parser.add_argument(
        "-n", "--lines", type=whole_number(0), default=NUM_LINES, metavar="N", help=f"lines of each log; 0: all (default {NUM_LINES:,})"
    )
    return parser


def run(verb: str, words: list[str]) -> int:
    args = parser(verb).parse(words)
    record = refreshed(args.target)
    run_dir = record.run if record is not None else runs.find(args.target)
    offsets: dict[Path, int] = {}
    _print_new_lines(run_dir, args.rank, offsets, args.lines)
    if not offsets and not (args.follow and record is not None and record.is_active):
        raise Problem(f"{run_dir.name} has no logs{'' if args.rank is None else f' of rank {args.rank}'} yet")
    for _ in _changes(run_dir, record) if args.follow else ():
        _print_new_lines(run_dir, args.rank, offsets, 0)
    return 0


def _changes(run_dir: Run, record: Record | None) -> Iterator[None]:
    """Yields when logs may have new lines, until the run has ended."""
    if record is not None and record.is_active:
        from drivetrain.targets import submit

        for _ in submit.follow(record):
            yield
        return
    while runs.is_run(run_dir.path) and run_dir.status == "running":
        time.sleep(POLL_SECONDS)
        yield


def _print_new_lines(run_dir: Run, rank: int | None, offsets: dict[Path, int], max_lines: int) -> None:
    """Prints what was added to the logs after `offsets`, and updates these. Of a new log prints the last lines; `max_lines` 0: all."""
    files: dict[int, Path] = {}
    for file in (run_dir.path / "logs").glob("*.log"):
        if match := re.fullmatch(r"rank-(\d+)\.log|output(?:-(\d+))?\.log", file.name):
            files[int(match[1]) if match[1] else -1 - int(match[2] or 0)] = file
    chosen = [file for number, file in sorted(files.items()) if rank in (None, number) and file.is_file()]
    for file in chosen:
        if file not in offsets:
            offsets[file] = runs.offset_of_last_lines(file, max_lines) if max_lines else 0
            if offsets[file]:
                print(f"(the last {max_lines:,} lines of {file}; all: --lines 0)", file=sys.stderr, flush=True)
        prefix, colours = f"[{file.stem}] " if len(chosen) > 1 else "", sys.stdout.isatty()
        with open(file, "rb") as stream:
            stream.seek(offsets[file])
            for line in stream:
                offsets[file] += len(line)
                print(f"{prefix}{one_line(line.decode(errors='replace'), colours)}")
    sys.stdout.flush()
