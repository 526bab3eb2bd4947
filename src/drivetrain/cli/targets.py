"""`targets`: where runs can execute."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from drivetrain.cli.flags import Parser
from drivetrain.outcomes import Problem
from drivetrain.terminal import one_line, show

if TYPE_CHECKING:
    from drivetrain.targets.base import Target
    from drivetrain.targets.config import WrongEntry

TARGETS = """\
List where runs can execute (--on NAME), and whether each can be reached. Your own targets stand in drivetrain.yaml
(the project's) or ~/.config/drivetrain/targets.yaml:

  targets:
    box:
      kind: ssh
      hosts: [gpu1]
    cluster:
      kind: slurm
      partition: gpu
      gpus: 8

`drivetrain targets KIND` explains the keys of a kind."""


def parser(verb: str) -> Parser:
    parser = Parser("drivetrain targets", TARGETS)
    parser.add_argument("kind", nargs="?", metavar="KIND", help="explain the keys of this kind")
    parser.add_argument("--json", action="store_true", help="print the list as JSON")
    return parser


def run(verb: str, words: list[str]) -> int:
    from drivetrain.targets.config import all_targets, config_files

    args = parser(verb).parse(words)
    if args.kind is not None:
        return _explain(args.kind)
    with ThreadPoolExecutor(max_workers=16) as pool:
        rows = list(pool.map(_row, all_targets()))
    if args.json:
        show(json.dumps(rows))
        return 0
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        show(f"{row['name']:<{width}}  {row['kind']:<7}  {'ok' if row['ok'] else 'no':<3} {one_line(row['text'])}")
    files = ", ".join(map(str, config_files()))
    show(f"\n{'from ' + files if files else 'your own: see drivetrain targets --help'}")
    return 0


def _row(target: Target | WrongEntry) -> dict[str, Any]:
    from drivetrain.targets.config import WrongEntry

    try:
        if isinstance(target, WrongEntry):
            raise target.problem
        text, ok = target.reach(), True
    except Problem as problem:
        text, ok = str(problem), False
    return {"name": target.name, "kind": target.kind, "ok": ok, "text": text}


def _explain(kind: str) -> int:
    from drivetrain.settings import nearest
    from drivetrain.targets.config import KINDS, settings_help

    if kind not in KINDS:
        raise Problem(f"there is no kind {kind!r}{nearest(kind, KINDS)}: {', '.join(KINDS)}")
    show(f"keys of a target of kind {kind}\n")
    for name, doc in settings_help(kind):
        show(f"  {name:<12} {one_line(doc.replace(chr(10), ' '))}")
    return 0
