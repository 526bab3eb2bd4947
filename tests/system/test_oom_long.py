"""Thirty times out of memory, on any rank, step and micro-batch: no rank waits for another in vain."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.test_oom import repeat
from tests.processes import on_ranks


@pytest.mark.parametrize("seed", [10, 11, 12])
def test_no_rank_is_left_behind_in_thirty_repetitions(seed: int, tmp_path: Path) -> None:
    assert on_ranks(4, repeat, str(tmp_path), seed, 10) == [10] * 4
