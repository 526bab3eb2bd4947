"""`verify-resume`: verify that a killed and resumed training of the user's task equals an unbroken one."""

from __future__ import annotations

from drivetrain.cli.flags import Parser, add_common, add_placement, whole_number
from drivetrain.outcomes import Outcome

TEXT = """\
Train K steps twice without a break and once with a kill -9 in the middle and a resume, as the plan has it, and
compare: every loss, every gradient norm and all final weights, bit for bit. Where they differ, it trains again,
records every step, and says whether training itself does not repeat or the resume is to blame, at which step,
and in which operation it began."""


def parser(verb: str) -> Parser:
    from drivetrain.chaos.verify_resume import GPU_STEPS, STEPS

    parser = Parser("drivetrain verify-resume", TEXT)
    parser.add_argument("target", metavar="TASK", help="as for train")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings, as for train")
    parser.add_argument(
        "--steps", type=whole_number(2), metavar="K",
        help=f"steps to train (default {STEPS}, on a GPU {GPU_STEPS}; at least 2: a checkpoint and the kill come after half)",
    )  # fmt: skip
    add_placement(parser)
    add_common(parser)
    return parser


def run(verb: str, words: list[str]) -> int:
    args = parser(verb).parse(words)

    from drivetrain.chaos.verify_resume import verify
    from drivetrain.launch.request import Request
    from drivetrain.recipe import load
    from drivetrain.watch.screen import Screen

    recipe = load(args.target, args.settings)[0]
    request = Request(procs=args.procs, gpus=args.gpus, device=args.device)
    is_exact = verify(recipe, request, args.steps, Screen(quiet=args.quiet))
    return 0 if is_exact else Outcome.USER_ERROR.code
