"""A training killed at named observation points gives the same result; tests/system/test_kill_long.py kills at random times."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.killing import KILL_POINTS, kill_and_compare


@pytest.mark.system  # slow
@pytest.mark.timeout(1200)
def test_killed_at_every_observation_point(folder: Path) -> None:
    print(kill_and_compare(1, False, len(KILL_POINTS), seed=0))
