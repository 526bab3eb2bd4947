"""Draws what a model learned in its context: return against episode for each held-out task, and the way it took."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from drivetrain.tasks.distill.envs import TaskEnv

BLUE, GREY, ORANGE, BLACK = "#2f6fab", "#9aa0a6", "#d1731e", "#202124"
COLUMNS = 4
"""Tasks in one row of a picture."""


@dataclass(frozen=True)
class TaskResult:
    """An evaluation of one held-out task."""

    label: str
    optimum: float
    returns: Tensor
    """[streams, episodes]"""
    source: Tensor
    """The mean return of the recorded learner in each of its episodes."""
    places: Tensor
    """The cells of the last episode of the first stream."""
    goals: tuple[int, ...] = ()
    """The cells to go to."""

    @property
    def last_return(self) -> float:
        """The mean return of the last ten episodes."""
        return float(self.returns[:, -10:].mean())


def draw_curves(results: list[TaskResult], learner: str) -> np.ndarray:
    """Draws the return of each episode: of the model in its context, of the learner whose histories were recorded, and the optimum."""
    figure, axes = _grid(len(results), 2.2)
    for result, axis in zip(results, axes, strict=False):
        episode = np.arange(1, result.returns.shape[1] + 1)
        mean, deviation = result.returns.mean(0).numpy(), result.returns.std(0, correction=0).numpy()
        axis.fill_between(episode, mean - deviation, mean + deviation, color=BLUE, alpha=0.2, linewidth=0)
        axis.plot(episode, mean, color=BLUE, label="in context")
        axis.plot(np.arange(1, len(result.source) + 1), result.source.numpy(), color=ORANGE, label=f"the recorded learner ({learner})")
        axis.axhline(result.optimum, color=GREY, linestyle="--", label="optimum")
        axis.set_title(result.label, fontsize=9)
        axis.set_ylim(0, result.optimum * 1.08)
        axis.tick_params(labelsize=7)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.supxlabel("episode", fontsize=9)
    figure.supylabel("return", fontsize=9)
    figure.legend(handles, labels, loc="outside upper center", ncols=3, fontsize=8, frameon=False)
    return _pixels(figure)


def draw_episodes(results: list[TaskResult], env: TaskEnv) -> np.ndarray:
    """Draws the way of one stream through its last episode, for each task: from the grey disc to the square; stars are goals."""
    figure, axes = _grid(len(results), 2.4)
    for result, axis in zip(results, axes, strict=False):
        row, column = (result.places // env.size).numpy(), (result.places % env.size).numpy()
        visits = np.zeros((env.size, env.size))
        np.add.at(visits, (row, column), 1)
        axis.imshow(visits, cmap="Blues", vmin=0, vmax=max(4, visits.max()))
        axis.plot(column, row, color=ORANGE, linewidth=1.5)
        for goal in result.goals:
            axis.plot(goal % env.size, goal // env.size, "*", color=BLACK, markersize=9)
        axis.plot(column[0], row[0], "o", color=GREY, markersize=5)
        axis.plot(column[-1], row[-1], "s", color=ORANGE, markersize=5)
        axis.set_title(f"{result.label}: {float(result.returns[0, -1]):.0f} of {result.optimum:.0f}", fontsize=9)
        axis.set_xticks([])
        axis.set_yticks([])
    return _pixels(figure)


def _grid(count: int, height: float) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = -(-count // COLUMNS)
    figure, axes = pyplot.subplots(
        rows, min(count, COLUMNS), figsize=(2.6 * min(count, COLUMNS), height * rows + 0.4), layout="constrained", squeeze=False
    )
    flat = axes.flatten()
    for axis in flat[count:]:
        axis.axis("off")
    return figure, flat


def _pixels(figure: Any) -> np.ndarray:
    """Returns a figure as [height, width, 3] bytes."""
    from matplotlib import pyplot

    figure.set_dpi(110)
    figure.canvas.draw()
    pixels = np.asarray(figure.canvas.buffer_rgba())[..., :3].copy()
    pyplot.close(figure)
    return pixels
