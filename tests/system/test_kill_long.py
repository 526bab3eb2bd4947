"""Thirty real kills of each configuration, then every logged loss and the weights are bit-equal."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.killing import break_and_compare


@pytest.mark.timeout(900)
@pytest.mark.parametrize("procs", [1, 2])
@pytest.mark.parametrize("loader", [False, True], ids=["tensors", "loader"])
def test_thirty_kills(procs: int, loader: bool, folder: Path) -> None:
    print(break_and_compare(procs, loader, 30, seed=random.randrange(10**6)))
