"""`hardware`: what this machine has, or what a described one would have."""

from __future__ import annotations

import json
from pathlib import Path

from drivetrain.cli.flags import Parser

TEXT = """\
What this machine has that training can use: cores and memory within the container's limits, /dev/shm, disk,
network, torch's versions, and GPUs with their memory, driver, links and published rates. Nothing is started on a GPU.
With --hardware, a machine that is not here, as a plan for it would see it:

  drivetrain hardware --hardware 4xL4-24GB
  drivetrain hardware --hardware "2 nodes x 8xA100-40GB, 100Gb/s"
"""


def parser(verb: str) -> Parser:
    parser = Parser("drivetrain hardware", TEXT)
    parser.add_argument("--hardware", metavar="WORDS", help="a machine that is not here: COUNTxNAME-MEMORYGB, and more after commas")
    parser.add_argument("--json", action="store_true", help="all of it as JSON")
    return parser


def run(verb: str, words: list[str]) -> int:
    args = parser(verb).parse(words)

    from drivetrain.hardware import detect, report
    from drivetrain.hardware.described import parse

    hardware = detect() if args.hardware is None else parse(args.hardware)
    facts = report.gather(hardware, Path.cwd())
    print(json.dumps(facts, indent=1) if args.json else report.text(hardware, facts), end="\n" if args.json else "")
    return 0
