"""Flags that are spelt the same wherever they apply."""

from __future__ import annotations

import argparse
from typing import NoReturn

from drivetrain.outcomes import Problem
from drivetrain.settings import nearest


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors name the fix, and whose flags may stand anywhere."""

    def __init__(self, program: str, description: str) -> None:
        super().__init__(prog=program, description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)

    def parse(self, words: list[str]) -> argparse.Namespace:
        args, unknown = self.parse_known_intermixed_args(words)
        if unknown:
            flags = [o for action in self._actions for o in action.option_strings]
            raise Problem(f"{self.prog} has no flag {unknown[0]!r}{nearest(unknown[0], flags)} ({self.prog} --help)")
        return args

    def error(self, message: str) -> NoReturn:
        raise Problem(f"{message} ({self.prog} --help)")


def add_common(parser: Parser) -> None:
    parser.add_argument("-q", "--quiet", action="store_true", help="print errors only")
    parser.add_argument("-v", "--verbose", action="store_true", help="print every process's output")


def add_placement(parser: Parser) -> None:
    parser.add_argument("--procs", type=int, metavar="N", help="processes on this machine (default: one a visible GPU, one on a CPU)")
    parser.add_argument("--device", choices=["cuda", "cpu", "mps"], help="where to train (default: GPUs if there are any; mps is untested)")
    parser.add_argument("--gpus", metavar="0,1", help="the GPUs to use")
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="machines that train together: run the same command on each")
    parser.add_argument("--rendezvous", metavar="HOST:PORT", help="where they meet; HOST is one of them")
    parser.add_argument("--node-rank", type=int, metavar="K", help="this machine's number, where the order matters")
