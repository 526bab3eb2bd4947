"""`pull`: copy a run from its target, or from a bucket, to this machine."""

from __future__ import annotations

from drivetrain.buckets.url import is_url
from drivetrain.cli.delete_runs import format_disk_size
from drivetrain.cli.flags import Parser
from drivetrain.outcomes import Problem
from drivetrain.terminal import one_line, show


def parser(verb: str) -> Parser:
    parser = Parser(
        "drivetrain pull",
        "Copy runs from their targets into runs/: metrics, logs, checkpoints, the model. A run that has ended is pulled by\n"
        "whatever looks at it first (status, logs, train --wait); `pull` copies it at any time. With the address of a run in a\n"
        "bucket: copies that run into runs/NAME, with its newest checkpoint.",
    )
    parser.add_argument("targets", nargs="+", metavar="RUN", help="names of runs on targets, or addresses in a bucket")
    return parser


def run(verb: str, words: list[str]) -> int:
    from drivetrain.launch.bucket import copy_from_bucket
    from drivetrain.targets import submit
    from drivetrain.targets.record import find_recorded

    for text in parser(verb).parse(words).targets:
        if is_url(text):
            run_dir = copy_from_bucket(text)
            show(f"{run_dir.name}   {format_disk_size(run_dir.disk_bytes())} from {text}")
            continue
        record = find_recorded(text)
        if record is None:
            raise Problem(f"{text} is not on a target: its files are on this machine (drivetrain runs lists the runs)")
        record = submit.pull(record)
        reason = f" ({record.facts['reason']})" if record.facts.get("reason") else ""
        show(one_line(f"{record.run.name}   {format_disk_size(record.run.disk_bytes())} from {record.target}, {record.phase}{reason}"))
    return 0
