"""`chaos`: train with injected faults, and compare the result with an undisturbed training."""

from __future__ import annotations

from pathlib import Path

from drivetrain.chaos.experiment import NUM_FAULTS, NUM_OUTAGES, Experiment, run_experiment
from drivetrain.cli.flags import Parser, add_common, add_placement, folder_flag, seconds, whole_number

TEXT = """\
Train a task twice for K steps: once undisturbed, once with faults at random steps and on random processes (or those
of --schedule). Then say whether anything came out otherwise: the weights, every logged figure, the samples that each
step took, processes or files that were left behind; and how much time each kind of fault cost.

  die      a process is killed (-9)                   agent    the command itself is killed (-9), and repeated
  hang     a process sleeps for ever                  stop     a process is stopped (state T)
  slow     a process takes a second longer            preempt  the command gets SIGTERM, and is repeated
  oom      memory runs out (only if asked for)        nan      a loss is not a number: the run ends, and is resumed
  torn     the newest checkpoint is cut short         full     the disk is full during a save

With --hosts N the training runs on N hosts that are made on this machine (network namespaces: Linux, root or the
right to make them), each with its own command; all but the first are lost in turn, and come back:

  host     all its processes are killed (-9)          agent    only its command is killed
  cut      its cable is cut, and mended"""
STEPS = 120
MAX_HOSTS = 8


def parser(verb: str) -> Parser:
    parser = Parser("drivetrain chaos", TEXT)
    parser.add_argument("target", metavar="TASK", help="as for train")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings, as for train")
    parser.add_argument(
        "--faults", type=whole_number(0), metavar="N", help=f"number of faults (default {NUM_FAULTS}; {NUM_OUTAGES} with --hosts)"
    )
    parser.add_argument("--kinds", metavar="A,B", help="only faults of these kinds (default: all but oom)")
    parser.add_argument(
        "--hosts", type=whole_number(2, MAX_HOSTS), metavar="N", help="train on N hosts made on this machine; --procs processes on each"
    )
    parser.add_argument("--schedule", metavar="FAULTS", help="exactly these faults, such as die@step:7:rank=1,hang@step:20")
    parser.add_argument("--steps", type=whole_number(3), default=STEPS, metavar="K", help=f"optimizer steps to train (default {STEPS})")
    parser.add_argument("--seed", type=whole_number(0), default=0, metavar="N", help="seed of the faults (default 0)")
    parser.add_argument("--hang-after", type=seconds, default=2.0, metavar="TIME", help="as for train (default 2s)")
    parser.add_argument("--keep", type=folder_flag("--keep"), metavar="DIR", help="keep both runs, and report.json, in this folder")
    add_placement(parser)
    add_common(parser)
    return parser


def run(verb: str, words: list[str]) -> int:
    args = parser(verb).parse(words)

    from drivetrain.chaos.report import show
    from drivetrain.watch.screen import Screen

    screen = Screen(quiet=args.quiet)
    experiment = Experiment(
        task=args.target, settings=args.settings, steps=args.steps, procs=args.procs or 1, num_hosts=args.hosts,
        num_faults=args.faults, schedule=args.schedule.split(",") if args.schedule else [],
        kinds=args.kinds.split(",") if args.kinds else [], seed=args.seed, hang_after=args.hang_after,
        device=args.device, gpus=args.gpus,
    )  # fmt: skip
    report = run_experiment(experiment, Path(args.keep) if args.keep else None, screen)
    return 0 if show(report, screen) else 1
