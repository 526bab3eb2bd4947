"""Out of memory 30 times, on random ranks, steps and micro-batches: no rank waits forever."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.test_oom import train_with_random_faults
from tests.processes import on_ranks


@pytest.mark.parametrize("seed", [10, 11, 12])
def test_all_ranks_agree_in_thirty_repetitions(seed: int, tmp_path: Path) -> None:
    assert on_ranks(4, train_with_random_faults, str(tmp_path), seed, 10) == [10] * 4
