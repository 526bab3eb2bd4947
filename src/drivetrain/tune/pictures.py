"""Pictures of a study: how the best value came about, which parameters matter, and each parameter against the value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from drivetrain.tune.folder import Goal
from drivetrain.tune.space import Dimension, Space, short
from drivetrain.tune.study import Study, Tried

BLUE, GREY, LINE = "#2f6fab", "#9aa0a6", "#d1731e"


def draw(folder: Path, study: Study, space: Space, goal: Goal) -> list[Path]:
    """Write history.png, importances.png and slices.png; no finished trial, no pictures."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tried = [t for t in study.tried() if t.state in ("finished", "pruned") and t.value is not None]
    if not any(t.state == "finished" for t in tried):
        return []
    files = []
    for name, figure in (
        ("history.png", _history(pyplot, tried, goal)),
        ("importances.png", _importances(pyplot, study.importances(), list(space), goal)),
        ("slices.png", _slices(pyplot, tried, space, goal)),
    ):
        figure.savefig(folder / name, dpi=120)
        pyplot.close(figure)
        files.append(folder / name)
    return files


def _history(pyplot: Any, tried: list[Tried], goal: Goal) -> Any:
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    finished = [t for t in tried if t.state == "finished"]
    _points(axes, tried, lambda t: t.number)
    choose = max if goal.direction == "max" else min
    best = [choose(float(t.value or 0) for t in finished[: i + 1]) for i in range(len(finished))]
    places = [t.number for t in finished]
    axes.step([*places, tried[-1].number], [*best, best[-1]], where="post", color=LINE, label="best so far")
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


def _slices(pyplot: Any, tried: list[Tried], space: Space, goal: Goal) -> Any:
    columns = min(3, len(space))
    rows = -(-len(space) // columns)
    figure, grid = pyplot.subplots(
        rows, columns, figsize=(3.6 * columns + 0.6, 3.2 * rows), squeeze=False, sharey=True, layout="constrained"
    )
    for axes in grid.flat[len(space) :]:
        axes.set_axis_off()
    for i, (name, dimension) in enumerate(space.items()):
        axes = grid.flat[i]
        _slice(axes, name, dimension, tried)
        if i % columns == 0:
            axes.set_ylabel(goal.metric)
    grid.flat[0].legend(frameon=False, fontsize=8)
    return figure


def _slice(axes: Any, name: str, dimension: Dimension, tried: list[Tried]) -> None:
    axes.set_xlabel(name)
    if dimension.choices:
        place = {choice: i for i, choice in enumerate(dimension.choices)}
        _points(axes, tried, lambda t: place[t.params[name]])
        axes.set_xticks(range(len(place)), [short(choice) for choice in place])
        axes.set_xlim(-0.5, len(place) - 0.5)
    else:
        _points(axes, tried, lambda t: t.params[name])
        if dimension.log:
            axes.set_xscale("log")
        axes.set_xlim(dimension.low, dimension.high)


def _points(axes: Any, tried: list[Tried], place: Any) -> None:
    for state, style in (("pruned", {"color": GREY, "marker": "x"}), ("finished", {"color": BLUE, "marker": "o"})):
        some = [t for t in tried if t.state == state]
        if some:
            axes.scatter([place(t) for t in some], [t.value for t in some], s=22, label=state, clip_on=False, **style)
