"""`data`: make and check the data of the built-in tasks."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from drivetrain.cli.flags import Parser, add_common, folder_flag, whole_number
from drivetrain.outcomes import Outcome, Problem
from drivetrain.terminal import one_line, show

TEXT = """\
cxr-synthetic: write generated chest X-rays with findings, questions and labels, in the folders and files of MIMIC-CXR-JPG
and MIMIC-Ext-CXR-QBA. cxr-check: read these data sets (real or generated), build their index, and report what is in them,
what is missing, and what a model could learn by a short cut.

  drivetrain data cxr-synthetic --studies 1000 --to data/cxr
  drivetrain data cxr-check --mimic data/cxr/mimic-cxr-jpg --qba data/cxr/mimic-ext-cxr-qba"""


def parser(verb: str) -> Parser:
    parser = Parser("drivetrain data", TEXT)
    parser.add_argument("action", choices=["cxr-synthetic", "cxr-check"], help="what to do")
    parser.add_argument("--studies", type=whole_number(1), metavar="N", help="cxr-synthetic: studies to write")
    parser.add_argument("--to", type=folder_flag("--to"), metavar="DIR", help="cxr-synthetic: the folder to write (data/cxr-synthetic-N)")
    parser.add_argument("--seed", type=whole_number(0), metavar="S", default=0, help="cxr-synthetic: another seed gives other studies")
    parser.add_argument("--mimic", metavar="DIR", help="cxr-check: the folder of MIMIC-CXR-JPG")
    parser.add_argument("--qba", metavar="DIR", help="cxr-check: the folder of MIMIC-Ext-CXR-QBA, or one of its exports")
    parser.add_argument(
        "--decode", type=whole_number(-1), metavar="N", default=0, help="cxr-check: read N of the JPEG files as well (-1: all)"
    )
    parser.add_argument("--json", action="store_true", help="cxr-check: print the report as JSON")
    add_common(parser)
    return parser


def run(verb: str, words: list[str]) -> int:
    args = parser(verb).parse(words)
    return {"cxr-synthetic": _synthetic, "cxr-check": _check}[args.action](args)


def _synthetic(args: argparse.Namespace) -> int:
    from drivetrain.tasks.cxr.twin.write import default_folder, write_twin

    if args.studies is None:
        raise Problem("--studies says how many studies to write: drivetrain data cxr-synthetic --studies 1000")
    mimic, qba = write_twin(
        Path(args.to) if args.to else default_folder(args.studies), args.studies, args.seed, None if args.quiet else _progress
    )
    show(f"data      {args.studies:,} studies   next: drivetrain data cxr-check --mimic {mimic} --qba {qba}")
    return 0


def _check(args: argparse.Namespace) -> int:
    from drivetrain.tasks.cxr.data.check import check_data, report_text
    from drivetrain.tasks.cxr.data.index import find_or_build

    if not args.mimic or not args.qba:
        raise Problem("cxr-check needs both folders: --mimic DIR (MIMIC-CXR-JPG) and --qba DIR (MIMIC-Ext-CXR-QBA)")
    quiet = args.quiet or args.json
    index = find_or_build(args.mimic, args.qba, notice=_ignore if quiet else _progress)
    report = check_data(index, args.decode, _ignore if quiet else _progress)
    show(json.dumps(report, indent=1) if args.json else report_text(report))
    return Outcome.DATA.code if report["errors"] else 0


def _progress(text: str) -> None:
    show(one_line(text))


def _ignore(text: str) -> None:
    pass
