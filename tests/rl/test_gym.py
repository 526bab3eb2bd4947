"""Gymnasium's environments by name: learned, resumed to the last bit, and refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.command import bad, good

SMALL = ["epochs=3", "envs=4", "horizon=32", "global_batch=64", "eval_episodes=2", "log_every=1"]


@pytest.mark.system  # it takes its time
def test_acrobot_is_learned(folder: Path) -> None:
    good("train", "gym", "world=Acrobot-v1", "epochs=30", "--name", "one")
    last = [json.loads(line) for line in Path("runs/one/metrics.jsonl").read_text().splitlines()][-1]
    assert last["eval/return"] > -120, last  # chance alone ends at -500


@pytest.mark.system  # it takes its time
def test_a_broken_run_is_the_unbroken_one(folder: Path) -> None:
    assert "bit-equal" in good("verify-resume", "gym", "world=Acrobot-v1", "--steps", "24", *SMALL)


@pytest.mark.parametrize(
    ("world", "words"),
    [
        ("Acrobut-v1", "world=Acrobut-v1: Environment `Acrobut` doesn't exist. Did you mean: `Acrobot`?"),
        ("Pendulum-v1", "Pendulum-v1 takes actions of Box(-2.0, 2.0, (1,), float32): only numbered ones"),
        ("Blackjack-v1", "Blackjack-v1 is seen as Tuple: only Box and Discrete"),
    ],
)
def test_what_cannot_be_learned_is_named(world: str, words: str, folder: Path) -> None:
    assert words in bad("train", "gym", f"world={world}")


def test_numbered_observations(folder: Path) -> None:
    good("train", "gym", "world=FrozenLake-v1", *SMALL, "--name", "one")
    good("export", "one", "-q")
    card = json.loads(Path("runs/one/model/export.json").read_text())
    assert list(card["graphs"]) == ["policy"] and card["graphs"]["policy"]["inputs"][0]["shape"] == [1, 16]
