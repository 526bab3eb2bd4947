"""SmolLM2-135M, from an installed package, learns Python's own reference on two cores without a network."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.command import run_ok
from tests.sample_tasks import rows

pytestmark = [pytest.mark.system, pytest.mark.alone, pytest.mark.timeout(1200)]


def test_held_out_perplexity_falls(folder: Path) -> None:
    cache = {"XDG_CACHE_HOME": str(folder / "cache")}
    words = ["context=128", "global_batch=4", "steps=20", "learning_rate=5e-4", "eval_first=true"]
    output = run_ok("train", "lora", *words, "prompt=The with statement", "--name", "reference", seconds=1100, **cache)
    events = [json.loads(line) for line in (folder / "runs" / "reference" / "events.jsonl").read_text().splitlines()]
    before = next(e["metrics"]["perplexity"] for e in events if e["event"] == "before")
    after = [row["eval/perplexity"] for row in rows(folder / "runs" / "reference") if "eval/perplexity" in row][-1]
    print(f"held-out perplexity {before:.1f} before, {after:.1f} after 20 steps")
    assert 32 < before < 33 and after < 28, "docs/lora.md says 32.5 and 27.1"
    assert output.count("'The with statement' goes on: ") == 2, "a sample before and one after"
    assert "goes on" not in run_ok("predict", "reference", "The with statement", "temperature=0", "tokens=8", **cache)
