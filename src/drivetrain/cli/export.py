"""`export`: write a run's model as ONNX and safetensors."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from drivetrain.cli.flags import Parser, add_common, folder_flag
from drivetrain.outcomes import Problem

TEXT = """\
Write a run's model as ONNX (each graph checked against torch on real inputs, and refused where it differs) and
safetensors, with export.json that describes inputs and outputs and has each file's SHA-256. A finished run's
final weights are taken, else its last good checkpoint's. For a task that learns by playing: policy.onnx, reset.onnx and step.onnx, so that
other programs play by the very same rules (drivetrain play RUN). For adapters of a language model: a peft folder,
or with --merge a whole model of transformers."""


def parser(verb: str) -> Parser:
    parser = Parser("drivetrain export", TEXT)
    parser.add_argument("target", metavar="RUN", help="a run's name or folder")
    parser.add_argument("--out", type=folder_flag("--out"), metavar="DIR", help="the folder (default: the run's model/)")
    parser.add_argument("--merge", action="store_true", help="for adapters: the base model with the adapters added to its weights")
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")
    add_common(parser)
    return parser


def run(verb: str, words: list[str]) -> int:
    args = parser(verb).parse(words)

    from drivetrain import runs
    from drivetrain.export import describe, export, writable
    from drivetrain.launch.trained import load_trained, user_code
    from drivetrain.watch.screen import Screen, format_size

    screen = Screen(quiet=args.quiet or args.json)
    run_dir = runs.find(args.target)
    if args.merge:
        default_folder = "merged"
    else:
        default_folder = "model" if run_dir.is_finished else "export"
    folder = Path(args.out) if args.out else run_dir.path / default_folder
    task, model = load_trained(run_dir, screen)
    with writable(folder):
        facts = {"run": folder.name, "metrics": {}}
        files = task.model_files(model.state_dict(), folder, facts, merge=model if args.merge else None)
        if files is not None:
            describe(run_dir, files, folder)
    if files is not None:
        if args.json:
            print(json.dumps({"folder": str(folder), "files": files}))
        for name in files:
            screen.line("export", f"{name:<28}{format_size((folder / name).stat().st_size):>8}")
        screen.line("", str(folder))
        return 0
    if args.merge:
        raise Problem(f"{type(task).__name__} has no adapters to merge: leave --merge out")
    screen.busy("making graphs ...")
    with user_code(run_dir):
        graphs = export(task, model, run_dir, folder)
    if args.json:
        print(json.dumps({"folder": str(folder), "graphs": {name: asdict(graph) for name, graph in graphs.items()}}))
        return 0
    for graph in graphs.values():
        signature = ", ".join(spec.name for spec in graph.inputs) + " -> " + ", ".join(spec.name for spec in graph.outputs)
        screen.line("export", f"{graph.file:<14}{format_size(graph.bytes):>8}   {signature}   (within {graph.difference:.0e} of torch)")
    screen.line("", f"{folder}/model.safetensors, {folder}/export.json")
    return 0
