"""Fixtures that several files of this folder use."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.targets.stand_in_cloud import StandInCloud, make_cloud


@pytest.fixture
def cloud(folder: Path, tmp_path: Path) -> StandInCloud:
    return make_cloud(tmp_path)
