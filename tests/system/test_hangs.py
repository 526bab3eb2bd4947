"""The verdict names the right rank and line in ten hangs, drawn at random from thirty."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.hanging_tasks import THIRTY_CASES, check_verdict

SEED = int(os.environ.get("DRIVETRAIN_SEED", 7))


@pytest.mark.parametrize(("hang", "hook"), random.Random(SEED).sample(THIRTY_CASES, 10))
def test_the_verdict_names_rank_and_line(hang: str, hook: str, folder: Path) -> None:
    check_verdict(hang, hook)
