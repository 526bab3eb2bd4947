"""Rows of figures that arrive late, and together."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drivetrain.engine.ledger import Block
from drivetrain.engine.observe import Observer
from drivetrain.engine.rows import Rows


def test_rows_that_arrive_together_have_one_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    figures = SimpleNamespace(read=lambda row, size: {"loss": row[0]}, guarded=list)
    feed = SimpleNamespace(steps_per_epoch=1000, size=lambda index: 8, speeds={"turns": 0.5})
    rates = SimpleNamespace(at=lambda step: 0.1)
    step: Any = SimpleNamespace(figures=figures, feed=feed, rates=rates, loss_scale=None, group=SimpleNamespace(device=torch.device("cpu")))
    rows = Rows(step, 8, Observer(), lambda: 0.0)
    for done in (10, 20, 30):
        rows.begin(done)
    now = 102.0
    blocks = [Block(first, [[1.0] * 20] * 10) for first in (0, 10, 20)]
    ledger: Any = SimpleNamespace(arrived=lambda wait: blocks)
    assert rows.take_in(ledger, 30, False, False) is None
    assert [row["samples_per_second"] for row in rows._rows.values()] == [30 * 8 / 2] * 3
    now = 103.0
    rows.begin(40)
    blocks[:] = [Block(30, [[1.0] * 20] * 10)]
    rows.take_in(ledger, 40, False, False)
    assert rows._rows[40]["samples_per_second"] == 10 * 8 / 1
    assert rows._rows[40]["turns_per_second"] == 10 * 4 / 1, "what a source counts beside samples"
