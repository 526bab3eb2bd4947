"""Draws a study: the best value so far over the trials, the importance of each parameter, and the value over each parameter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from drivetrain.tune.folder import Goal
from drivetrain.tune.space import Dimension, Space, short
from drivetrain.tune.study import Study, TrialRecord

BLUE, GREY, LINE = "#2f6fab", "#9aa0a6", "#d1731e"


def draw(folder: Path, study: Study, space: Space, goal: Goal) -> list[Path]:
    """Writes history.png, importances.png and slices.png, if any trial has finished; returns the files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    trials = [t for t in study.trials() if t.state in ("finished", "pruned") and t.value is not None]
    if not any(t.state == "finished" for t in trials):
        return []
    files = []
    for name, figure in (
        ("history.png", _history(pyplot, trials, goal)),
        ("importances.png", _importances(pyplot, study.importances(), list(space), goal)),
        ("slices.png", _slices(pyplot, trials, space, goal)),
    ):
        figure.savefig(folder / name, dpi=120)
        pyplot.close(figure)
        files.append(folder / name)
    return files


def _history(pyplot: Any, trials: list[TrialRecord], goal: Goal) -> Any:
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    finished = [t for t in trials if t.state == "finished"]
    _draw_points(axes, trials, lambda t: t.number)
    choose = max if goal.direction == "max" else min
    best: list[float] = []  # the best value up to each trial
    for trial in finished:
        best.append(choose([*best[-1:], float(trial.value or 0)]))
    trial_numbers = [t.number for t in finished]
    axes.step([*trial_numbers, trials[-1].number], [*best, best[-1]], where="post", color=LINE, label="best so far")
    axes.set(xlabel="trial", ylabel=goal.metric)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False)
    return figure


def _importances(pyplot: Any, shares: dict[str, float], names: list[str], goal: Goal) -> Any:
    figure, axes = pyplot.subplots(figsize=(7, 1.2 + 0.45 * len(names)), layout="constrained")
    if shares:
        order = sorted(shares, key=lambda name: shares[name])
        bars = axes.barh(order, [100 * shares[name] for name in order], color=BLUE)
        axes.bar_label(bars, fmt="%.0f %%", padding=3)
        axes.set(xlabel=f"share in {goal.metric} (PED-ANOVA)", xlim=(0, 112))
    else:
        axes.text(0.5, 0.5, "too few finished trials that differ", ha="center", va="center", transform=axes.transAxes)
        axes.set_axis_off()
    return figure


def _slices(pyplot: Any, trials: list[TrialRecord], space: Space, goal: Goal) -> Any:
    columns = min(3, len(space))
    rows = -(-len(space) // columns)
    figure, grid = pyplot.subplots(
        rows, columns, figsize=(3.6 * columns + 0.6, 3.2 * rows), squeeze=False, sharey=True, layout="constrained"
    )
    for axes in grid.flat[len(space) :]:
        axes.set_axis_off()
    for i, (name, dimension) in enumerate(space.items()):
        axes = grid.flat[i]
        _draw_slice(axes, name, dimension, trials)
        if i % columns == 0:
            axes.set_ylabel(goal.metric)
    grid.flat[0].legend(frameon=False, fontsize=8)
    return figure


def _draw_slice(axes: Any, name: str, dimension: Dimension, trials: list[TrialRecord]) -> None:
    axes.set_xlabel(name)
    if dimension.choices:
        position = {choice: i for i, choice in enumerate(dimension.choices)}
        _draw_points(axes, trials, lambda t: position[t.params[name]])
        axes.set_xticks(range(len(position)), [short(choice) for choice in position])
        axes.set_xlim(-0.5, len(position) - 0.5)
    else:
        _draw_points(axes, trials, lambda t: t.params[name])
        if dimension.is_log:
            axes.set_xscale("log")
        axes.set_xlim(dimension.low, dimension.high)


def _draw_points(axes: Any, trials: list[TrialRecord], x: Callable[[TrialRecord], Any]) -> None:
    for state, style in (("pruned", {"color": GREY, "marker": "x"}), ("finished", {"color": BLUE, "marker": "o"})):
        of_state = [t for t in trials if t.state == state]
        if of_state:
            axes.scatter([x(t) for t in of_state], [t.value for t in of_state], s=22, label=state, clip_on=False, **style)
