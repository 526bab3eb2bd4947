"""A synthetic twin that the tests of this folder share; they read it and never change it."""

from __future__ import annotations

from pathlib import Path

import pytest

from drivetrain.tasks.cxr.data.columns import CxrIndex
from drivetrain.tasks.cxr.twin.write import write_twin
from tests.cxr.small_data import build

TWIN_STUDIES = 30


@pytest.fixture(scope="session")
def twin(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_twin(tmp_path_factory.mktemp("cxr-twin"), TWIN_STUDIES)


@pytest.fixture(scope="session")
def twin_index(twin: tuple[Path, Path]) -> CxrIndex:
    return build(*twin)
