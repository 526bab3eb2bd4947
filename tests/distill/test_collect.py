"""PPO on all tasks at once: what it records is what happened, on any number of processes and after interruptions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from drivetrain.tasks.distill import histories
from drivetrain.tasks.distill.histories import Histories
from tests.command import expect_error, run_ok

SMALL = [
    "size=5",
    "streams=4",
    "num_tasks=6",
    "epochs=6",
    "horizon=20",
    "global_batch=96",
    "region=40",
    "eval_episodes=10",
    "save_every=2ep",
]


def assert_consistent(recorded: Histories) -> None:
    """Plays the recorded actions again and compares places and rewards."""
    env, facts = recorded.facts.env(), recorded.facts
    task = torch.tensor(facts.tasks).repeat_interleave(facts.streams)
    place, action, reward, after = (getattr(recorded, n).flatten(0, 1) for n in ("place", "action", "reward", "next_place"))
    state = env.start(task)
    for step in range(facts.steps):
        if step % facts.limit == 0:
            state = env.start(task)
        assert torch.equal(state["place"], place[:, step].long())
        state, expected, _ = env.step(state, action[:, step].long(), torch.zeros(len(task), 0))
        assert torch.equal(state["place"], after[:, step].long())
        assert torch.equal(expected, reward[:, step].float())


@pytest.mark.parametrize("world", ["darkroom", "darkroom-permuted", "key-to-door"])
def test_a_history_is_what_happened(world: str, folder: Path) -> None:
    run_ok("train", "histories", *SMALL, f"world={world}", "limit=10", "--name", "h")
    recorded = histories.read("runs/h")
    assert recorded.place.shape == (6, 4, 120)
    assert recorded.facts.learner == "ppo"
    assert len(recorded.action.unique()) == 5
    assert_consistent(recorded)


def test_the_learners_improve_from_random_to_optimal(folder: Path) -> None:
    run_ok("train", "histories", *SMALL, "limit=10", "streams=20", "epochs=24", "global_batch=600", "--name", "h")
    returns = histories.read("runs/h").returns()
    optimum = histories.read("runs/h").facts.env().optimum(torch.tensor(histories.read("runs/h").facts.tasks))
    assert returns[:, 0].mean() < 0.45 * optimum.mean()
    assert returns[:, -5:].mean() > 0.9 * optimum.mean()


def test_two_processes_record_the_same_histories(folder: Path) -> None:
    run_ok("train", "histories", *SMALL, "--procs", "1", "--name", "one")
    run_ok("train", "histories", *SMALL, "--procs", "2", "--name", "two")
    one, two = histories.read("runs/one"), histories.read("runs/two")
    for name in ("place", "action", "reward", "next_place"):
        assert (getattr(one, name) == getattr(two, name)).float().mean() > 0.995  # a rounding may tip an action


def test_an_interrupted_collection_continues_bit_for_bit(folder: Path) -> None:
    assert "bit-equal" in run_ok("verify-resume", "histories", "--steps", "24", *SMALL)


def test_a_batch_that_does_not_fit_says_which_does(folder: Path) -> None:
    message = expect_error("train", "histories", *SMALL, "global_batch=100")
    assert "24 environments x 20 steps evenly: take global_batch=96" in message
