"""kill -9 at named observation points; kills at random times are in tests/system/test_kill_long.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.killing import KILL_POINTS, kill_and_compare


@pytest.mark.system  # it takes its time
@pytest.mark.timeout(1200)
def test_killed_at_every_named_moment(folder: Path) -> None:
    print(kill_and_compare(1, False, len(KILL_POINTS), seed=0))
