"""PPO on all tasks at once: what it records is what happened, on any number of processes and after interruptions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from drivetrain.tasks.distill import histories
from drivetrain.tasks.distill.collect import CollectHistories
from drivetrain.tasks.distill.histories import Histories
from tests.command import expect_error, run_ok
from tests.sample_tasks import rows

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


def test_an_evaluation_plays_recorded_tasks_only(folder: Path) -> None:
    run_ok("train", "histories", *SMALL, "eval_episodes=300", "--name", "h")  # 6 of 25 tasks
    learned = float(histories.read("runs/h").returns()[:, -1].mean())
    assert rows("runs/h")[-1]["eval/return"] > 0.8 * learned


class HostWaits(TorchFunctionMode):
    """Records what would make the host wait for a GPU: values from Python or the host, and values that the host reads."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", str(func))
        from_host = any(leaf.device.type == "cpu" for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.dim())
        is_copy = from_host and any(isinstance(leaf, Tensor) and leaf.device.type == "meta" for leaf in tree_leaves(result))
        if is_copy or name in ("tensor", "as_tensor", "item", "tolist", "__bool__", "nonzero"):
            self.functions.add(name)
        return result


class Random:
    """Stands for the engine's random numbers."""

    def __init__(self, num_envs: int, device: str) -> None:
        self.ids = torch.arange(num_envs, device=device)

    def __len__(self) -> int:
        return len(self.ids)

    def uniform(self, k: int = 1) -> Tensor:
        return torch.rand(len(self), k, device=self.ids.device)


@pytest.mark.parametrize("world", ["darkroom", "darkroom-permuted", "key-to-door"])
def test_the_host_waits_nowhere_in_a_collection(world: str) -> None:
    """A wait would keep a GPU's collections from being captured. The device `meta` takes the same code as a GPU."""
    task = CollectHistories(world=world, size=5, streams=4, num_tasks=6, epochs=6, horizon=20, global_batch=96)
    source, model = task.train_data(), task.model()
    source.collect(model, Random(24, "cpu"), lambda x: x)  # type: ignore[arg-type]
    source.load({name: values.to("meta") for name, values in source.state().items()})
    model.to("meta")
    source.collect(model, Random(24, "meta"), lambda x: x)  # type: ignore[arg-type]
    with HostWaits() as waits:
        source.collect(model, Random(24, "meta"), lambda x: x)  # type: ignore[arg-type]
    assert not waits.functions
    with waits:
        torch.tensor([1, 2], device="meta"), torch.zeros(2).to("meta")
    assert waits.functions == {"tensor", "to"}, "a copy from the host must be noticed, or this test proves nothing"


def test_two_processes_record_the_same_histories(folder: Path) -> None:
    run_ok("train", "histories", *SMALL, "--procs", "1", "--name", "one")
    run_ok("train", "histories", *SMALL, "--procs", "2", "--name", "two")
    one, two = histories.read("runs/one"), histories.read("runs/two")
    for name in ("place", "action", "reward", "next_place"):
        assert (getattr(one, name) == getattr(two, name)).float().mean() > 0.995  # a rounding may tip an action


@pytest.mark.parametrize(("words", "steps"), [(["steps=40"], 40), (["steps=50"], 60), (["epochs=2", "steps=180"], 180)])
def test_optimizer_steps_determine_how_long_histories_are(words: list[str], steps: int, folder: Path) -> None:
    run_ok("train", "histories", *SMALL, *words, "--name", "h")  # 20 optimizer steps learn from a collection of 20 steps of play
    recorded = histories.read("runs/h")
    assert recorded.facts.steps == recorded.place.shape[2] == steps
    assert_consistent(recorded)


def test_a_resumed_run_with_more_epochs_has_longer_histories(folder: Path) -> None:
    run_ok("train", "histories", *SMALL, "epochs=2", "--name", "h")
    begun = histories.read("runs/h")
    run_ok("resume", "h", "epochs=5")
    recorded = histories.read("runs/h")
    assert recorded.facts.steps == recorded.place.shape[2] == 100
    assert torch.equal(recorded.action[..., :40], begun.action)
    assert_consistent(recorded)


def test_a_run_that_ends_early_hands_on_what_it_recorded(folder: Path) -> None:
    """Episodes have a fixed length, so that the second evaluation is not better than the first."""
    run_ok("train", "histories", *SMALL, "eval_every=1ep", "best=min:length", "patience=1", "--name", "h")
    recorded = histories.read("runs/h")
    assert recorded.facts.steps == recorded.place.shape[2] == 40
    assert_consistent(recorded)


def test_an_interrupted_collection_continues_bit_for_bit(folder: Path) -> None:
    assert "bit-equal" in run_ok("verify-resume", "histories", "--steps", "24", *SMALL)


def test_a_batch_that_does_not_fit_says_which_does(folder: Path) -> None:
    message = expect_error("train", "histories", *SMALL, "global_batch=100")
    assert "24 environments x 20 steps evenly: take global_batch=96" in message
