"""After real kills, every logged loss and the weights are bit-equal.

Four kills of two configurations; DRIVETRAIN_KILLS=20 takes twenty kills of all four configurations.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.killing import kill_and_compare

KILLS = int(os.environ.get("DRIVETRAIN_KILLS", 0))
CONFIGURATIONS = [(1, False), (1, True), (2, False), (2, True)] if KILLS else [(1, False), (2, True)]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("procs", "loader"), CONFIGURATIONS)
def test_many_kills(procs: int, loader: bool, folder: Path) -> None:
    print(kill_and_compare(procs, loader, KILLS or 4, seed=random.randrange(10**6)))
