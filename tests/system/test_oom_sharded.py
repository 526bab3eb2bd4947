"""When one of four ranks with sharded state runs out of memory, all restart with a smaller micro-batch, and no step is lost.

One strategy is tested once; with DRIVETRAIN_REPETITIONS=10 all five are tested ten times (about eight minutes).
"""

from __future__ import annotations

import functools
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from tests.command import run_ok
from tests.engine.test_invariance import assert_same_metrics
from tests.sample_tasks import rows

REPETITIONS = int(os.environ.get("DRIVETRAIN_REPETITIONS", "0"))
STRATEGIES = [("fsdp", 2), ("fsdp", 3), ("deepspeed", 1), ("deepspeed", 2), ("deepspeed", 3)] if REPETITIONS else [("fsdp", 3)]
COMMON = ["--procs", "4", "epochs=4", "save_every=30", "log_every=1", "optim=sgd", "learning_rate=0.05", "clip=0.5"]


Strategy = tuple[str, int]
"""(strategy, ZeRO stage)."""


def words(strategy: Strategy, micro_batch: int) -> list[str]:
    return ["train", "digits", f"plan.strategy={strategy[0]}", f"plan.zero_stage={strategy[1]}", f"plan.micro_batch={micro_batch}", *COMMON]


@functools.cache
def rows_with_smaller_micro_batch(strategy: Strategy) -> list[dict[str, Any]]:
    """Returns the rows of a run with the smaller micro-batch from the start."""
    run_ok(*words(strategy, 8), "--name", "smaller")
    return rows("runs/smaller")


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("seed", range(max(1, REPETITIONS)))
def test_the_run_ends_like_one_with_the_smaller_micro_batch(strategy: Strategy, seed: int, folder: Path) -> None:
    rng = random.Random(f"{strategy} {seed}")
    step, rank = rng.randint(2, 88), rng.randrange(4)
    run_ok(*words(strategy, 16), "--name", "short", DRIVETRAIN_FAULTS=f"oom@step:{step}:rank={rank}")
    assert_same_metrics(rows(Path("runs/short")), rows_with_smaller_micro_batch(strategy), 5e-5)
    events = [json.loads(line) for line in Path("runs/short/events.jsonl").read_text().splitlines()]
    [oom] = [e for e in events if e["event"] == "oom"]
    assert (oom["step"], oom["rank"], oom["was"], oom["now"]) == (step, rank, 16, 8)
    assert [e["event"] for e in events].count("restarted") == 1
