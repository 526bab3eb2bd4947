"""The pictures of an evaluation show what was played, the recorded learner and the optimum."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from drivetrain.tasks.distill import pictures
from drivetrain.tasks.distill.envs import Darkroom, KeyToDoor
from drivetrain.tasks.distill.pictures import TaskResult, draw_curves, draw_episodes

RETURNS = torch.tensor([[0.0, 4, 8], [2, 6, 12]])


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Returns a list that gets each figure that is drawn."""
    drawn: list[Any] = []
    pixels = pictures._pixels

    def keep(figure: Any) -> np.ndarray:
        drawn.append(figure)
        return pixels(figure)

    monkeypatch.setattr(pictures, "_pixels", keep)
    return drawn


def result(label: str, places: list[int], goals: tuple[int, ...]) -> TaskResult:
    return TaskResult(label, 19.0, RETURNS, torch.tensor([1.0, 3, 9, 15]), torch.tensor(places), goals)


def test_a_curve_for_each_task_with_its_source_and_its_optimum(figures: list[Any]) -> None:
    results = [result(label, [40], ()) for label in ("(4,2)", "(5,6)", "(6,8)")]
    image = draw_curves(results, "ppo")
    assert image.ndim == 3 and image.shape[2] == 3 and image.dtype == np.uint8
    axes = [axis for axis in figures[0].axes if axis.axison]
    assert [axis.get_title() for axis in axes] == ["(4,2)", "(5,6)", "(6,8)"]
    for axis in axes:
        lines = {line.get_label(): line.get_xydata().tolist() for line in axis.lines}
        assert lines["in context"] == [[1, 1], [2, 5], [3, 10]]
        assert lines["the recorded learner (ppo)"] == [[1, 1], [2, 3], [3, 9], [4, 15]]
        assert [y for _, y in lines["optimum"]] == [19, 19]
        assert axis.get_ylim()[1] > 19
    assert [text.get_text() for text in figures[0].legends[0].get_texts()] == ["in context", "the recorded learner (ppo)", "optimum"]


def test_a_last_episode_shows_its_way_and_its_goals(figures: list[Any]) -> None:
    env = KeyToDoor()
    task = env.cell(4, 5) * 81 + env.cell(3, 5)
    way = [env.cell(4, 4), env.cell(4, 5), env.cell(3, 5), env.cell(3, 5)]
    draw_episodes([result(env.label(task), way, env.goals(task))], env)
    (axis,) = figures[0].axes
    points = {
        line.get_marker(): line.get_xydata().tolist() for line in axis.lines if len(line.get_xydata()) == 1 and line.get_marker() != "*"
    }
    stars = [line.get_xydata()[0].tolist() for line in axis.lines if line.get_marker() == "*"]
    assert stars == [[5, 4], [5, 3]]  # column, row: the key, then the door
    assert points == {"o": [[4, 4]], "s": [[5, 3]]}
    assert [line.get_xydata().tolist() for line in axis.lines if len(line.get_xydata()) > 1] == [[[4, 4], [5, 4], [5, 3], [5, 3]]]
    assert axis.images[0].get_array()[3, 5] == 2, "two visits"
    assert axis.get_title() == f"{env.label(task)}: 8 of 19"


def test_a_model_without_its_histories_has_no_line_of_the_learner(figures: list[Any]) -> None:
    task = TaskResult("(4,2)", 19.0, RETURNS, torch.zeros(0), torch.tensor([40]), Darkroom().goals(38))
    draw_curves([task], "ppo")
    assert task.last_return == pytest.approx(float(RETURNS.mean()))
    assert {len(line.get_xydata()) for line in figures[0].axes[0].lines} == {3, 0, 2}
