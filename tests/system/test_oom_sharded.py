"""Out of memory on one rank of four where state is sharded: all start anew with the smaller micro-batch, and nothing is lost."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.command import good
from tests.engine.test_invariance import same
from tests.samples import rows

WAYS = [("fsdp", 2), ("fsdp", 3), ("deepspeed", 1), ("deepspeed", 2), ("deepspeed", 3)]
COMMON = ["--procs", "4", "epochs=4", "save_every=30", "log_every=1", "optim=sgd", "learning_rate=0.05", "clip=0.5"]


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("seed", range(2))
def test_the_run_finishes_as_one_that_began_smaller(way: tuple[str, int], seed: int, folder: Path) -> None:
    draw = random.Random(f"{way} {seed}")
    step, rank = draw.randint(2, 88), draw.randrange(4)
    strategy = [f"plan.strategy={way[0]}", f"plan.zero_stage={way[1]}"]
    faults = {"DRIVETRAIN_FAULTS": f"oom@step:{step}:rank={rank}"}
    good("train", "digits", *strategy, "plan.micro_batch=16", *COMMON, "--name", "short", **faults)
    good("train", "digits", *strategy, "plan.micro_batch=8", *COMMON, "--name", "smaller")
    same(rows(Path("runs/short")), rows(Path("runs/smaller")), 5e-5)
    events = [json.loads(line) for line in Path("runs/short/events.jsonl").read_text().splitlines()]
    [oom] = [e for e in events if e["event"] == "oom"]
    assert (oom["step"], oom["rank"], oom["was"], oom["now"]) == (step, rank, 16, 8)
    assert [e["event"] for e in events].count("restarted") == 1
