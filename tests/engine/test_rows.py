"""Metrics and speeds of steps whose rows arrive from the device late and several at once."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drivetrain.engine.log.observe import Observer
from drivetrain.engine.log.ring import MetricRing, StepRows
from drivetrain.engine.log.rows import RowLog


def rows_of(batch_size: int, per_epoch: int) -> tuple[RowLog, Any]:
    """Returns a RowLog for a feed whose last batch of an epoch has 1 sample, and a fake ring whose `blocks` the test sets."""
    slots = SimpleNamespace(means=lambda row, size: {"loss": row[0]}, must_be_finite=list, count_slots={})
    feed = SimpleNamespace(
        steps_per_epoch=per_epoch, batch_size=lambda index: 1 if index == per_epoch - 1 else batch_size, speeds={"episodes": 0.5}
    )  # fmt: skip
    ring: Any = SimpleNamespace(blocks=[], end_pause=lambda: None)
    ring.arrived = lambda wait: ring.blocks
    rates, group = SimpleNamespace(at=lambda step: 0.1), SimpleNamespace(device=torch.device("cpu"))
    step: Any = SimpleNamespace(slots=slots, feed=feed, rates=rates, loss_scale=None, group=group, ring=ring)
    return RowLog(step, Observer(), lambda: 0.0), ring


def block(first: int, steps: int, seconds: float | None) -> StepRows:
    return StepRows(first, [[1.0] * 20] * steps, seconds)


def test_rows_that_arrive_together_have_the_speed_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that runs ahead gets several blocks at once; the time between arrivals would give a wrong speed."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    rows, ring = rows_of(8, per_epoch=1000)
    rows.begin(10)
    now, ring.blocks = 105.0, [block(0, 10, None)]
    rows.receive(10, False, False)
    assert rows._rows[10]["samples_per_second"] == 10 * 8 / 5, "the first block has no device time: the host's time counts, with the start"
    for done in (20, 30, 40):
        rows.begin(done)
    now, ring.blocks = 105.01, [block(first, 10, 2.0) for first in (10, 20, 30)]
    rows.receive(40, False, True)
    speeds = [rows._rows[done]["samples_per_second"] for done in (20, 30, 40)]
    assert speeds == [10 * 8 / 2] * 3
    assert rows._rows[40]["episodes_per_second"] == 10 * 4 / 2, "a source may count other things than samples"


def test_speed_counts_the_samples_that_a_batch_has() -> None:
    rows, ring = rows_of(100, per_epoch=2)  # 101 samples in two steps
    ring.blocks = [block(0, 2, None)]
    rows.receive(2, True, False)
    for done in range(4, 42, 2):
        ring.blocks = [block(done - 2, 1, 0.1), block(done - 1, 1, 0.001)]
        rows.receive(done, True, False)
        assert rows._rows[done]["samples_per_second"] == pytest.approx(101 / 0.101), "the short last batch does not change the speed"


def test_a_ring_times_its_blocks_and_leaves_pauses_out(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    ring = MetricRing(2, torch.device("cpu"))
    seconds = []
    for step in range(4):
        now += 1.0
        ring.slots(step)
        ring.commit(step)
        ring.fetch()
        now += 0.25  # until the host reads the rows
        seconds += [rows.seconds for rows in ring.arrived(wait=False)]
        if step == 2:
            now += 50.0  # an evaluation
            ring.end_pause()
    assert seconds == [None, 1.25, 1.25, 1.0]


def test_rows_come_in_order_beyond_the_end_of_the_ring() -> None:
    ring = MetricRing(2, torch.device("cpu"))
    arrived = []
    for step in range(600):
        assert ring.slots(step)[0] == 0, "of a step 256 steps ago"
        ring.slots(step)[0].fill_(step)
        ring.commit(step)
        if ring.is_full:
            ring.fetch()
            arrived += ring.arrived(wait=True)
    values = [row[0] for block in arrived for row in block.rows]
    assert len(values) > 500 and values == list(range(len(values)))
    assert [block.first for block in arrived[1:]] == [block.last + 1 for block in arrived[:-1]]
