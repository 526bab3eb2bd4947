"""Rows of metrics that arrive late, and several at once."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drivetrain.engine.log.ledger import Block, Ledger
from drivetrain.engine.log.observe import Observer
from drivetrain.engine.log.rows import Rows


def rows_of(sizes: int, per_epoch: int) -> tuple[Rows, Any]:
    """Rows over a feed whose epochs end with a batch of 1 sample, and a ledger whose arriving blocks a test sets."""
    figures = SimpleNamespace(read=lambda row, size: {"loss": row[0]}, guarded=list, count={})
    feed = SimpleNamespace(
        steps_per_epoch=per_epoch, size=lambda index: 1 if index == per_epoch - 1 else sizes, speeds={"turns": 0.5}
    )  # fmt: skip
    ledger: Any = SimpleNamespace(blocks=[], end_pause=lambda: None)
    ledger.arrived = lambda wait: ledger.blocks
    rates, group = SimpleNamespace(at=lambda step: 0.1), SimpleNamespace(device=torch.device("cpu"))
    step: Any = SimpleNamespace(figures=figures, feed=feed, rates=rates, loss_scale=None, group=group, ledger=ledger)
    return Rows(step, Observer(), lambda: 0.0), ledger


def block(first: int, steps: int, seconds: float | None) -> Block:
    return Block(first, [[1.0] * 20] * steps, seconds)


def test_rows_that_arrive_at_once_have_the_speed_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that runs ahead of the device gets two blocks at once at the end: the time between them is not their speed."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    rows, ledger = rows_of(8, per_epoch=1000)
    rows.begin(10)
    now, ledger.blocks = 105.0, [block(0, 10, None)]
    rows.take_in(ledger, 10, False, False)
    assert rows._rows[10]["samples_per_second"] == 10 * 8 / 5, "the first block's time is the host's, and has the start in it"
    for done in (20, 30, 40):
        rows.begin(done)
    now, ledger.blocks = 105.01, [block(first, 10, 2.0) for first in (10, 20, 30)]
    rows.take_in(ledger, 40, False, True)
    speeds = [rows._rows[done]["samples_per_second"] for done in (20, 30, 40)]
    assert speeds == [10 * 8 / 2] * 3
    assert rows._rows[40]["turns_per_second"] == 10 * 4 / 2, "what a source counts beside samples"


def test_speed_counts_the_samples_that_a_batch_has() -> None:
    rows, ledger = rows_of(100, per_epoch=2)  # 101 samples in two steps
    ledger.blocks = [block(0, 2, None)]
    rows.take_in(ledger, 2, True, False)
    for done in range(4, 42, 2):
        ledger.blocks = [block(done - 2, 1, 0.1), block(done - 1, 1, 0.001)]
        rows.take_in(ledger, done, True, False)
        assert rows._rows[done]["samples_per_second"] == pytest.approx(101 / 0.101), "and one sample in 1 ms is no sprint"


def test_a_ledger_times_its_blocks_and_leaves_pauses_out(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    ledger = Ledger(2, torch.device("cpu"))
    seconds = []
    for step in range(4):
        now += 1.0
        ledger.slots(step)
        ledger.note(step)
        ledger.fetch()
        now += 0.25  # on the way to where they are read
        seconds += [one.seconds for one in ledger.arrived(wait=False)]
        if step == 2:
            now += 50.0  # an evaluation
            ledger.end_pause()
    assert seconds == [None, 1.25, 1.25, 1.0]
