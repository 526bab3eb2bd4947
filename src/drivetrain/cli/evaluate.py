"""`eval`: evaluate a run's model on its task's evaluation data."""

from __future__ import annotations

import json
from typing import Any

from drivetrain.cli.flags import Parser, add_common, add_placement
from drivetrain.outcomes import Outcome

TEXT = """\
Evaluate a run's model on its task's evaluation data, with the code the run keeps. A finished run's final
weights are taken, else its last good checkpoint's. Figures go to eval.json in the run, a confusion matrix
to confusion.png."""


def parser(verb: str) -> Parser:
    parser = Parser("drivetrain eval", TEXT)
    parser.add_argument("target", metavar="RUN", help="a run's name or folder")
    add_placement(parser)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    add_common(parser)
    return parser


def run(verb: str, words: list[str]) -> int:
    args = parser(verb).parse(words)

    from drivetrain.launch.ending import exit_code, raise_failure
    from drivetrain.launch.evaluation import RECORDED, evaluate
    from drivetrain.launch.report import shown_path
    from drivetrain.launch.request import Request
    from drivetrain.runs import find
    from drivetrain.watch.screen import Screen, format_metric

    run_dir, screen = find(args.target), Screen(quiet=args.quiet or args.json)
    ended = evaluate(run_dir, Request(procs=args.procs, gpus=args.gpus, device=args.device, verbose=args.verbose), screen)
    raise_failure(ended, run_dir)
    if ended.outcome is not Outcome.OK:
        return exit_code(ended)
    result = ended.result
    if args.json:
        print(json.dumps({key: result[key] for key in RECORDED}))
        return 0
    weights_text = "" if result["step"] is None else f"; weights of step {result['step']:,}"
    metrics = "   ".join(format_metric(name, value) for name, value in result["metrics"].items())
    screen.line("eval", f"{metrics}   ({result['samples']:,} samples{weights_text})")
    if "confusion" in result["figures"]:
        path = run_dir.path / "confusion.png"
        draw_confusion(result["figures"]["confusion"], result["classes"], str(path), run_dir.name)
        screen.line("", f"confusion matrix: {shown_path(run_dir)}/{path.name}")
    return 0


def draw_confusion(matrix: list[list[float]], names: list[Any], path: str, title: str) -> None:
    """Draws a confusion matrix: true classes in rows, predicted ones in columns; colours are shares of the row, numbers are counts."""
    import matplotlib

    matplotlib.use("Agg")
    import numpy as np
    from matplotlib import pyplot

    counts = np.asarray(matrix, dtype=float)
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    labels = [str(name) for name in names] or [str(index) for index in range(len(counts))]
    side_inches = max(4.0, 0.5 * len(counts) + 1.5)
    figure, axes = pyplot.subplots(figsize=(side_inches, side_inches), layout="constrained")
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    axes.set(xlabel="predicted", ylabel="true", title=title, xticks=range(len(labels)), yticks=range(len(labels)))
    has_long_labels = max(map(len, labels)) > 2
    axes.set_xticklabels(labels, rotation=45 if has_long_labels else 0, ha="right" if has_long_labels else "center")
    axes.set_yticklabels(labels)
    if len(counts) <= 30:
        for row, column in np.argwhere(counts > 0):
            colour = "white" if shares[row, column] > 0.5 else "black"
            axes.text(column, row, f"{counts[row, column]:.0f}", ha="center", va="center", fontsize=8, color=colour)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
