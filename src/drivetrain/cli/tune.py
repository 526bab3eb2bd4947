"""`tune`: search a task's settings."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from drivetrain.cli.flags import MAX_PROCS, Parser, add_run_folder, add_yes, whole_number
from drivetrain.outcomes import Outcome, Problem
from drivetrain.terminal import show

if TYPE_CHECKING:
    from drivetrain.recipe import Recipe
    from drivetrain.task_ref import TaskRef

TEXT = """\
Search a task's settings. Each trial is an ordinary run in runs/NAME/trials; trials that fall behind are stopped
early; runs/NAME/best.yaml is the recipe of the best one. The same command continues an unfinished study,
and with a higher --trials a finished one.

  drivetrain tune digits --search learning_rate=1e-4..1e-1,log            between two numbers, by magnitude
  drivetrain tune digits --search 'hidden=64|128|256' epochs=5            among choices; epochs is the same in all
  drivetrain tune my_task.py --trials 100 --metric eval/accuracy          what search = {...} in the task says
  drivetrain tune my_task.py --jobs 4                                     four trials at a time
  drivetrain tune digits --on slurm --jobs 8                              each trial a job of the cluster
  drivetrain tune cartpole --trials 50 --population 25                    25 policies trained at once, as one program"""


def run(verb: str, words: list[str]) -> int:
    if {"-h", "--help"} & set(words):
        _print_help(verb, words)
        return 0
    args = parser(verb).parse(words)

    from drivetrain.cli.submitted import agree_on
    from drivetrain.tune.search import Search, SearchRequest
    from drivetrain.watch.screen import Screen

    recipe, values = _load_recipe(args), dict(vars(args))
    target, as_json, yes = values.pop("target"), values.pop("json"), values.pop("yes")
    request = SearchRequest(words=values.pop("settings"), **values | {"quiet": args.quiet or as_json})
    result = Search(recipe, request, agree_on(yes, Screen(quiet=request.quiet))).run()
    if as_json:
        print(json.dumps(result))
    if result["status"] != "finished":
        return Outcome.PREEMPTED.code
    if result["best"] is None:
        raise Problem(f"no trial of {target} finished: see {result['folder']}/trials", Outcome.USER_ERROR)
    return 0


def parser(verb: str) -> Parser:
    parser = Parser("drivetrain tune", TEXT)
    parser.add_argument("target", metavar="TASK", help="as for train")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings that are the same in all trials, such as epochs=5")
    parser.add_argument("--trials", type=whole_number(1), default=50, metavar="N", help="trials in all (default 50)")
    parser.add_argument(
        "--search",
        action="append",
        default=[],
        metavar="KEY=RANGE",
        help="LOW..HIGH, LOW..HIGH,log or 'A|B|C'; without any, what the task declares",
    )
    parser.add_argument(
        "--metric",
        metavar="eval/NAME",
        help="what is optimised (default: what best names, else what the task is judged by, as a rule eval/loss)",
    )
    parser.add_argument("--direction", choices=["max", "min"], help="which way (default: losses and errors fall, all else rises)")
    parser.add_argument("--prune", choices=["median", "hyperband", "none"], help="how trials are stopped early (default median)")
    parser.add_argument("--sampler", choices=["tpe", "random"], default="tpe", help="how parameters are proposed")
    parser.add_argument(
        "--seed", type=whole_number(0), default=0, metavar="N", help="of the proposals; with one job, the same trials again"
    )
    parser.add_argument("--jobs", type=whole_number(1, MAX_PROCS), metavar="J", help="trials at a time (default: one a GPU, one on a CPU)")
    parser.add_argument(
        "--population", default="auto", metavar="N",
        help="train N trials at once as one program, in generations, none stopped early (tasks whose policies are small: bandit, cartpole, snake);"
        " off: one by one; auto, the default: on a GPU, where what is searched allows it",
    )  # fmt: skip
    parser.add_argument("--procs", type=whole_number(1, MAX_PROCS), metavar="N", help="processes of each trial")
    parser.add_argument("--device", choices=["cuda", "cpu", "mps"], help="where to train (default: GPUs if there are any)")
    parser.add_argument("--gpus", metavar="0,1", help="the GPUs to use, shared out among the jobs")
    parser.add_argument("--on", metavar="TARGET", help="where each trial runs, as for train (Slurm: as an array)")
    add_yes(parser)
    add_run_folder(parser, "study")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("-q", "--quiet", action="store_true", help="print errors only")
    return parser


def _print_help(verb: str, words: list[str]) -> None:
    from drivetrain.cli.train import print_settings

    parser(verb).print_help()
    task = next((word for word in words if not word.startswith("-") and "=" not in word), None)
    if task is not None:
        for found in print_settings(task):
            _print_search(found)


def _print_search(task: TaskRef) -> None:
    """Prints the search space that a task declares."""
    from drivetrain.describe import tune_facts

    if search := tune_facts(task).search:
        show("\nsearched, unless --search is given")
        for name, text in search.items():
            show(f"  {name}={text}")


def _load_recipe(args: argparse.Namespace) -> Recipe:
    from drivetrain.recipe import load

    try:
        recipes = load(args.target, args.settings)
    except Problem as problem:
        for word in args.settings:
            is_range = ".." in word or "|" in word
            if is_range and str(problem).startswith(f"{word} does not fit"):
                raise Problem(f"{problem}\nTo search it: --search '{word}'") from None
        raise
    if len(recipes) > 1:
        raise Problem(f"{args.target} has stages: tune needs a recipe without stages")
    return recipes[0]
