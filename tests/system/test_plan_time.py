"""Planning a large model on a described machine takes seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.command import run_ok
from tests.waiting import Stopwatch

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.alone
def test_a_model_of_1700_million_parameters_is_planned_in_seconds(tmp_path: Path) -> None:
    stopwatch = Stopwatch()
    text = run_ok("plan", f"{ROOT}/benchmarks/plan_models.py:Smol1700", "--hardware", "4xL4-24GB", XDG_CACHE_HOME=str(tmp_path))
    assert stopwatch.seconds < 40  # 12 to 22 s on an idle machine
    assert "ddp does not fit" in text
