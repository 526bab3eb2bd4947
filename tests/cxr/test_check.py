"""The data check: counts in chunks, so that memory does not grow with the questions, and only on rank 0."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from drivetrain.tasks.cxr import cxr
from drivetrain.tasks.cxr.data import check
from drivetrain.tasks.cxr.data.columns import QUESTION_COLUMNS, CxrIndex
from drivetrain.tasks.cxr.vocabulary import CHEXPERT, GRADES, HEADS, QUESTION_TYPES
from tests.cxr.test_cxr import settings_of


def test_chunks_change_no_count(twin_index: CxrIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = check.check_data(twin_index)
    monkeypatch.setattr(check, "CHUNK", 7)
    assert check.check_data(twin_index) == whole
    column = twin_index.question
    assert sum(whole["grades"].values()) == twin_index.num_questions
    for name in ("A", "unrated"):
        assert whole["grades"][name] == int((column["grade"] == GRADES.index(name)).sum()) > 0
    place = QUESTION_TYPES.index("D02_has_finding")
    of_type = np.asarray(column["type"]) == place
    assert whole["types"]["D02_has_finding"] == {
        "questions": int(of_type.sum()), "with a target": int((of_type & (column["binary"] >= 0)).sum()),
        "yes": int((of_type & (column["binary"] == 1)).sum()), "no": int((of_type & (column["binary"] == 0)).sum()),
    }  # fmt: skip
    for place, label in enumerate(CHEXPERT):
        assert whole["targets"]["category"][label] == int((np.asarray(column["category"]) == place).sum())


def columns(num_questions: int) -> dict[str, Any]:
    """Returns columns of questions that share one row, so that they need no memory."""
    return {name: np.broadcast_to(np.array(1, kind), num_questions) for name, kind in QUESTION_COLUMNS.items()}


def test_memory_does_not_grow_with_the_questions() -> None:
    peaks = []
    for num_questions in (2, 8):
        index: Any = SimpleNamespace(
            question=columns(num_questions * check.CHUNK), num_questions=num_questions * check.CHUNK, region_names=["unknown", "heart"]
        )
        tracemalloc.start()
        counts = check._count_questions(index)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert all(counts.targets[head][1] == num_questions * check.CHUNK for head in HEADS)
    assert peaks[1] < 1.1 * peaks[0] < 24 * check.CHUNK


@pytest.mark.parametrize(("rank", "num_checks"), [("0", 1), ("1", 0)])
def test_rank_0_alone_checks(rank: str, num_checks: int, twin: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(cxr.Cxr, "_check_data", lambda task: checked.append(task))
    cxr.Cxr(**settings_of(twin)).train_data()
    assert len(checked) == num_checks
