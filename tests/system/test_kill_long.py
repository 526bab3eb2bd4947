"""Real kills of each configuration, then every logged loss and the weights are bit-equal: four, or as many as DRIVETRAIN_KILLS says."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.killing import break_and_compare

KILLS = int(os.environ.get("DRIVETRAIN_KILLS", 4))


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("procs", [1, 2])
@pytest.mark.parametrize("loader", [False, True], ids=["tensors", "loader"])
def test_many_kills(procs: int, loader: bool, folder: Path) -> None:
    print(break_and_compare(procs, loader, KILLS, seed=random.randrange(10**6)))
