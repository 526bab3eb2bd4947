"""`pull`: copy a run from its target to this machine."""

from __future__ import annotations

from drivetrain.cli.delete_runs import format_disk_size
from drivetrain.cli.flags import Parser
from drivetrain.outcomes import Problem
from drivetrain.terminal import show


def parser(verb: str) -> Parser:
    parser = Parser(
        "drivetrain pull",
        "Copy runs from their targets into runs/: metrics, logs, checkpoints, the model. A run that has ended is pulled by\n"
        "whatever looks at it first (status, logs, train --wait); `pull` copies it at any time.",
    )
    parser.add_argument("targets", nargs="+", metavar="RUN", help="names of runs on targets")
    return parser


def run(verb: str, words: list[str]) -> int:
    from drivetrain.targets import submit
    from drivetrain.targets.record import find_recorded

    for text in parser(verb).parse(words).targets:
        record = find_recorded(text)
        if record is None:
            raise Problem(f"{text} is not on a target: its files are on this machine (drivetrain runs lists the runs)")
        record = submit.pull(record)
        show(f"{record.run.name}   {format_disk_size(record.run.disk_bytes())} from {record.target}, {record.phase}")
    return 0
