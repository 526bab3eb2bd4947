"""`doctor`: check a target; each fault with its evidence and its fix."""

from __future__ import annotations

import json

from drivetrain.cli.flags import Parser
from drivetrain.outcomes import Outcome
from drivetrain.terminal import one_line, show


def parser(verb: str) -> Parser:
    parser = Parser("drivetrain doctor", "Check a target before a run: what is wrong there, how it was seen, and the fix.")
    parser.add_argument(
        "--on", metavar="TARGET", required=True, help="a target of drivetrain.yaml, or local, docker, slurm, kubernetes, gcp, sky"
    )
    parser.add_argument("--json", action="store_true", help="print the checks as JSON")
    return parser


def run(verb: str, words: list[str]) -> int:
    from drivetrain.doctor import check_target
    from drivetrain.targets.config import find_target

    args = parser(verb).parse(words)
    checks = list(check_target(find_target(args.on)))
    if args.json:
        show(json.dumps([check._asdict() for check in checks]))
    else:
        width = max(len(check.subject) for check in checks)
        for check in checks:
            show(f"{check.verdict:<8} {check.subject:<{width}}  {one_line(check.evidence)}")
            if check.fix:
                show(f"{'':<8} {'':<{width}}  fix: {one_line(check.fix)}")
    return Outcome.INFRA.code if any(check.verdict == "fault" for check in checks) else 0
