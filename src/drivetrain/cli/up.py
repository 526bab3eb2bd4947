"""`up` and `down`: make a target's machines and wait for them; remove what drivetrain keeps on a target, or what a crash left behind."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import TYPE_CHECKING

from drivetrain.cli.flags import Parser
from drivetrain.outcomes import Outcome, Problem
from drivetrain.terminal import one_line, show

if TYPE_CHECKING:
    from drivetrain.targets.base import Orphan, Target

UP = """\
Make the machines of a target, such as gcp, and wait until they can train. Shows what they cost, and asks before money is spent.
Repeating the command goes on where it stopped; if the machines are ready, it says so."""
DOWN = """\
Remove what drivetrain keeps on a target: code, environments, and runs that were not pulled; the machines, if drivetrain made them.
With --orphans: find machines and disks that a crash left behind, by their label, and delete them."""


def parser(verb: str) -> Parser:
    if verb == "up":
        parser = Parser("drivetrain up", UP)
        parser.add_argument("target", metavar="TARGET", help="a target's name, such as gcp")
        parser.add_argument(
            "--max-cost", type=dollars, metavar="DOLLARS", help="the machines stop when they have cost so much; runs save before that"
        )
        parser.add_argument("--dry-run", action="store_true", help="show the price, the files and the commands, and stop")
    else:
        parser = Parser("drivetrain down", DOWN)
        parser.add_argument("target", nargs="?", metavar="TARGET", help="a target's name")
        parser.add_argument(
            "--orphans", action="store_true", help="find and delete what a crash left behind (without TARGET: of all targets)"
        )
        parser.add_argument("--force", action="store_true", help="also while runs are active there; they are lost")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    return parser


def dollars(text: str) -> float:
    """Parses a flag's sum of money."""
    try:
        amount = float(text.removeprefix("$"))
    except ValueError:
        amount = 0.0
    if not 0 < amount < 1e6:
        raise argparse.ArgumentTypeError(f"{text[:80]}: write US dollars, such as 20")
    return amount


def run(verb: str, words: list[str]) -> int:
    args = parser(verb).parse(words)
    if verb == "up":
        return _up(args)
    if args.orphans:
        return _remove_orphans(args)
    if args.target is None:
        raise Problem("name the target: drivetrain down TARGET (drivetrain targets lists them)")
    return _down(args)


def _up(args: argparse.Namespace) -> int:
    from drivetrain.targets.config import find_target
    from drivetrain.targets.consent import ask_consent

    target = find_target(args.target)
    if args.dry_run:
        cost, rendering = target.render_up(args.max_cost)
        for line in cost.lines():
            show(line)
        show()
        show(rendering.text())
        return 0
    agree = partial(ask_consent, show=show, ask=input if sys.stdin.isatty() else None, is_agreed=args.yes)
    show(target.up(args.max_cost, agree, _progress))
    return 0


def _progress(line: str) -> None:
    show(one_line(line))
    sys.stdout.flush()


def _down(args: argparse.Namespace) -> int:
    from drivetrain.targets.config import find_target

    target = find_target(args.target)
    if not _agrees(f"remove all that drivetrain keeps on {target.name}, with runs that were not pulled?", args.yes):
        return 0
    if not args.force:
        target.prepare_down()
    show(f"removing what is kept on {target.name}")
    show(target.down())
    return 0


def _agrees(question: str, yes: bool) -> bool:
    if yes:
        return True
    if not sys.stdin.isatty():
        raise Problem("removing needs --yes where nobody can be asked")
    if input(f"{question} [y/N] ").strip().lower() in ("y", "yes"):
        return True
    show("nothing was removed")
    return False


def _remove_orphans(args: argparse.Namespace) -> int:
    found, unknown = _orphans(args.target)
    num_left = 0
    if found:
        for target, orphans in found:
            for orphan in orphans:
                show(f"{target.name:<12} {orphan}")
        if _agrees("delete all of these?", args.yes):
            num_left = sum(target.delete_orphans(orphans, _progress) for target, orphans in found)
    elif not unknown:
        show("a crash left nothing behind")
    if unknown:
        names = ", ".join(unknown)
        raise Problem(f"what a crash left on {names} is not known: correct the fault above, and repeat the command", Outcome.INFRA)
    return Outcome.INFRA.code if num_left else 0


def _orphans(name: str | None) -> tuple[list[tuple[Target, list[Orphan]]], list[str]]:
    """Returns targets with what a crash left behind, and the names of targets that cannot be asked, whose problems it prints."""
    from drivetrain.targets.config import WrongEntry, all_targets, find_target

    found, unknown = [], []
    for target in all_targets() if name is None else [find_target(name)]:
        try:
            if isinstance(target, WrongEntry):
                raise target.problem
            if orphans := target.orphans():
                found.append((target, orphans))
        except Problem as problem:
            if name is not None:
                raise
            print(f"drivetrain: {target.name}: {one_line(problem)}", file=sys.stderr)
            unknown.append(target.name)
    return found, unknown
