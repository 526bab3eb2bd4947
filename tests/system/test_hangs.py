"""The verdict names the right rank and line: ten hangs, drawn by seed from thirty."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.hangs import THIRTY, check

SEED = int(os.environ.get("DRIVETRAIN_SEED", 7))


@pytest.mark.parametrize(("way", "place"), random.Random(SEED).sample(THIRTY, 10))
def test_the_verdict_names_rank_and_line(way: str, place: str, folder: Path) -> None:
    check(way, place)
