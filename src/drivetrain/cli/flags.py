"""The argument parser, and the flags that several verbs share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import NoReturn

from drivetrain.buckets.url import is_url
from drivetrain.buckets.url import parse as parse_url
from drivetrain.names import check_folder, check_name
from drivetrain.outcomes import Problem
from drivetrain.settings import Length, nearest


class Parser(argparse.ArgumentParser):
    """An argument parser that raises Problem, and accepts flags before, between and after other arguments."""

    def __init__(self, program: str, description: str) -> None:
        super().__init__(prog=program, description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)

    @property
    def actions(self) -> list[argparse.Action]:
        return list(self._actions)

    def parse(self, words: list[str]) -> argparse.Namespace:
        args, unknown = self.parse_known_intermixed_args(words)
        if unknown:
            flags = [flag for action in self.actions for flag in action.option_strings]
            raise Problem(f"{self.prog} has no flag {unknown[0]!r}{nearest(unknown[0], flags)} ({self.prog} --help)")
        return args

    def error(self, message: str) -> NoReturn:
        raise Problem(f"{message} ({self.prog} --help)")


def add_common(parser: Parser) -> None:
    parser.add_argument("-q", "--quiet", action="store_true", help="print errors only")
    parser.add_argument("-v", "--verbose", action="store_true", help="print every process's output")


MAX_PROCS, MAX_NODES = 4096, 100_000  # larger values are typing errors
MAX_INT = 2**31 - 1


def whole_number(low: int, high: int = MAX_INT) -> Callable[[str], int]:
    """Returns a parser for a flag that is a whole number between two bounds."""

    def parse_number(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = low - 1
        if not low <= number <= high:
            upper = f"{low} or more" if high == MAX_INT else f"{low} to {high}"
            raise argparse.ArgumentTypeError(f"{text[:80]}: write a whole number of {upper}")
        return number

    return parse_number


def folder_flag(flag: str) -> Callable[[str], str]:
    """Returns a parser for a flag that is a folder of this machine."""
    return partial(check_folder, label=flag)


def bucket_address(flag: str) -> Callable[[str], str]:
    """Returns a parser for a flag that is an address in a bucket."""
    return lambda text: str(parse_url(text, flag))


def folder_or_bucket(text: str) -> str:
    """Parses --run-dir of a run: a folder of this machine, or an address in a bucket."""
    return str(parse_url(text, "--run-dir")) if is_url(text) else check_folder(text, "--run-dir")


def add_run_folder(parser: Parser, noun: str) -> None:
    """Adds --run-dir and --name, of which at most one may be given. `noun`: run or study."""
    if noun == "run":
        kind: Callable[[str], str] = folder_or_bucket
        metavar, help_text = "DIR|URL", "the run's own folder, or its address in a bucket (s3://, gs://, file:///)"
    else:
        kind, metavar, help_text = folder_flag("--run-dir"), "DIR", f"the {noun}'s own folder"
    parser.add_argument("--run-dir", type=kind, metavar=metavar, help=help_text)
    parser.add_argument("--name", type=partial(check_name, label="--name"), metavar="N", help=f"the {noun}'s name: its folder is runs/N")


def seconds(text: str) -> float:
    """Parses a flag's wall-clock time."""
    try:
        length = Length.parse(text)
    except ValueError:
        length = None
    if length is None or length.unit != "seconds" or length.value <= 0:
        raise argparse.ArgumentTypeError(f"{text[:80]}: write a time, such as 30s, 10min or 4h")
    return length.value


def node_range(text: str) -> tuple[int, int]:
    """Parses N or MIN:MAX machines."""
    low, _, high = text.partition(":")
    try:
        min_nodes, max_nodes = int(low), int(high or low)
    except ValueError:
        min_nodes, max_nodes = 0, 0
    if not 1 <= min_nodes <= max_nodes <= MAX_NODES:
        raise argparse.ArgumentTypeError(f"{text[:80]}: write a number of machines, or MIN:MAX, such as 1:4")
    return min_nodes, max_nodes


def add_fault_tolerance(parser: Parser) -> None:
    parser.add_argument(
        "--restarts", type=whole_number(0), default=3, metavar="N",
        help="restart a lost or hung process from the last checkpoint, up to N times without progress (default 3; 0: never)",
    )  # fmt: skip
    parser.add_argument(
        "--hang-after", type=seconds, default=30.0, metavar="TIME",
        help="the shortest silence that may be called a hang (default 30s; it is never less than ten times the longest seen)",
    )  # fmt: skip
    parser.add_argument(
        "--time-limit", type=seconds, metavar="TIME", help="save and stop before this much time has passed, such as 4h; resume goes on"
    )


def add_diagnostics(parser: Parser) -> None:
    parser.add_argument("--find-nan", action="store_true", help="if a loss is NaN: repeat its steps and name the module it comes from")
    parser.add_argument(
        "--profile", type=whole_number(0), default=0, metavar="N", help="profile N steps: a trace, the slowest operations, a sentence"
    )
    parser.add_argument(
        "--check-collectives", action="store_true", help="compare every collective over all processes before it begins (slow)"
    )


def add_placement(parser: Parser) -> None:
    parser.add_argument(
        "--procs", type=whole_number(1, MAX_PROCS), metavar="N", help="processes on this machine (default: one a visible GPU, one on a CPU)"
    )
    parser.add_argument("--device", choices=["cuda", "cpu", "mps"], help="where to train (default: GPUs if there are any; mps is untested)")
    parser.add_argument("--gpus", metavar="0,1", help="the GPUs to use")
    parser.add_argument(
        "--nodes", type=node_range, default=(1, 1), metavar="N|MIN:MAX",
        help="machines that train together: run the same command on each. With MIN:MAX it goes on while MIN are left, and with more when they come",
    )  # fmt: skip
    parser.add_argument("--rendezvous", metavar="HOST:PORT", help="the address at which the machines meet; HOST is one of them")
    parser.add_argument("--node-rank", type=whole_number(0, MAX_NODES), metavar="K", help="this machine's number, where the order matters")


def add_target(parser: Parser) -> None:
    parser.add_argument(
        "--on",
        metavar="TARGET",
        help="where to run: a target of drivetrain.yaml, or local, docker, slurm, kubernetes, gcp, sky (drivetrain targets)",
    )
    parser.add_argument("--wait", action="store_true", help="with --on: show its output until it ends, and end with its exit code")
    add_yes(parser)


def add_yes(parser: Parser) -> None:
    parser.add_argument("--yes", action="store_true", help="with --on: agree to the price of machines that it starts, without a question")
