"""`eval`: evaluate a run's model on its task's evaluation data."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from drivetrain.cli.flags import Parser, add_common, add_placement
from drivetrain.outcomes import Outcome

if TYPE_CHECKING:
    from drivetrain.launch.evaluation import Difference
    from drivetrain.runs import Run
    from drivetrain.watch.screen import Screen

TEXT = """\
Evaluate a run's model on its task's evaluation data, with the code the run keeps. A finished run's final
weights are taken, else its last good checkpoint's. Figures go to eval.json in the run, a confusion matrix
to confusion.png. --bootstrap N adds 95 % intervals: metrics of N resamples of the evaluation data.
--against OTHER evaluates another run, too, and tests each difference by a paired bootstrap."""
DEFAULT_RESAMPLES = 1000
"""Resamples of --against."""


def parser(verb: str) -> Parser:
    parser = Parser("drivetrain eval", TEXT)
    parser.add_argument("target", metavar="RUN", help="a run's name or folder")
    add_placement(parser)
    parser.add_argument("--against", metavar="OTHER", help="a run with the same evaluation data, to compare with")
    parser.add_argument(
        "--bootstrap", metavar="N", type=num_resamples, help=f"resamples for intervals (with --against: {DEFAULT_RESAMPLES})"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    add_common(parser)
    return parser


def num_resamples(text: str) -> int:
    if not (text.isdecimal() and 1 <= int(text) <= 100_000):
        raise argparse.ArgumentTypeError(f"{text[:80]}: write a number of resamples from 1 to 100000, such as 1000")
    return int(text)


def run(verb: str, words: list[str]) -> int:
    args = parser(verb).parse(words)

    from drivetrain.launch.ending import exit_code, raise_failure
    from drivetrain.launch.evaluation import RECORDED, compare, evaluate
    from drivetrain.launch.request import Request
    from drivetrain.runs import find
    from drivetrain.watch.screen import Screen

    run_dirs = [find(name) for name in (args.target, args.against) if name is not None]
    screen = Screen(quiet=args.quiet or args.json)
    resamples = args.bootstrap or (DEFAULT_RESAMPLES if args.against else 0)
    results = []
    for run_dir in run_dirs:
        request = Request(procs=args.procs, gpus=args.gpus, device=args.device, verbose=args.verbose)
        ended = evaluate(run_dir, request, screen, resamples)
        raise_failure(ended, run_dir)
        if ended.outcome is not Outcome.OK:
            return exit_code(ended)
        results.append(ended.result)
    differences = compare(*results) if args.against else []
    if args.json:
        shown = {key: results[0][key] for key in RECORDED}
        print(json.dumps(shown | ({"against": [vars(difference) for difference in differences]} if args.against else {})))
        return 0
    for run_dir, result in zip(run_dirs, results, strict=True):
        _show(run_dir, result, screen)
    for line in difference_lines(differences):
        screen.line("against" if line.startswith("metric ") else "", line)
    return 0


def _show(run_dir: Run, result: dict[str, Any], screen: Screen) -> None:
    """Prints the metrics and tables of an evaluation, and draws its confusion matrix."""
    from drivetrain.launch.report import shown_path
    from drivetrain.watch.screen import format_metric

    intervals = result["intervals"]
    weights_text = "" if result["step"] is None else f"; weights of step {result['step']:,}"
    metrics = "   ".join(format_metric(name, value) + range_text(intervals.get(name)) for name, value in result["metrics"].items())
    groups_text = f"; intervals by resampling {result['groups']:,} groups" if result["groups"] else ""
    screen.line("eval", f"{metrics}   ({result['samples']:,} samples{weights_text}{groups_text})")
    for name, table in result["figures"].items():
        if isinstance(table, dict) and table:
            screen.line("", f"{name}:")
            width = max(map(len, table))
            for row, value in table.items():
                screen.line("", f"  {row:<{width}}  {value:.4g}{range_text(intervals.get(f'{name}: {row}'))}")
    if "confusion" in result["figures"]:
        path = run_dir.path / "confusion.png"
        draw_confusion(result["figures"]["confusion"], result["classes"], str(path), run_dir.name)
        screen.line("", f"confusion matrix: {shown_path(run_dir)}/{path.name}")


def range_text(bounds: list[float] | None) -> str:
    return f" [{bounds[0]:.4g}, {bounds[1]:.4g}]" if bounds else ""


def difference_lines(differences: list[Difference]) -> list[str]:
    """Returns a table of the differences of two runs, with a heading."""
    if not differences:
        return []
    width = max(len(difference.name) for difference in differences)
    lines = [f"{'metric':<{width}}  {'run':>9}  {'other':>9}  {'change':>9}  {'95 % interval':<22}{'p':>6}"]
    for d in differences:
        bounds = f"[{d.interval[0]:+.4f}, {d.interval[1]:+.4f}]"
        lines.append(f"{d.name:<{width}}  {d.value:>9.4f}  {d.other:>9.4f}  {d.value - d.other:>+9.4f}  {bounds:<22}{d.p:>6.3f}")
    return lines


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
