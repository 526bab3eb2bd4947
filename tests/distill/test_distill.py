"""The task `distill`: it learns to learn, on any number of processes and after interruptions; wrong settings are named."""

from __future__ import annotations

import json
import resource
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import drivetrain
from drivetrain.outcomes import Problem
from drivetrain.tasks.distill import histories
from drivetrain.tasks.distill.distill import Distill
from drivetrain.tasks.distill.model import Steps
from drivetrain.tasks.distill.play import play
from tests.command import expect_error, run_ok
from tests.engine.test_invariance import assert_same_metrics
from tests.sample_tasks import rows

TINY: dict[str, Any] = {
    "size": 5, "streams": 5, "episodes": 8, "num_tasks": 12, "window": 40, "region": 40, "regions": 2, "latents": 4, "width": 16, "layers": 1, "heads": 2,
    "inner": 32, "eval_tasks": 2, "eval_streams": 3, "eval_episodes": 3,
}  # fmt: skip
WORDS = [f"{name}={value}" for name, value in TINY.items()]
SHORT = [*WORDS, "steps=6", "global_batch=16", "log_every=1", "eval_every=3", "save_every=3", "warmup=2"]
VARIANTS = ["ad", "compressed", "latent"]
ONE_FAST = ["latent", *(pytest.param(variant, marks=pytest.mark.system) for variant in VARIANTS if variant != "latent")]
"""One variant in the fast tests: the engine does the same for each."""


@pytest.mark.parametrize("variant", VARIANTS)
def test_samples_are_parts_of_histories_and_regions_begin_at_their_markers(variant: str) -> None:
    task = Distill(variant=variant, **TINY)
    found, data = task.histories(), task.train_data()

    class Rand:
        def uniform(self, k: int) -> torch.Tensor:
            return torch.linspace(0, 0.999, len(data))[:, None].expand(-1, k)

    batch = task.augment(data[torch.arange(len(data))], Rand())  # type: ignore[arg-type]
    starts = set()
    for row, (place, action) in enumerate(zip(batch["place"], batch["action"], strict=True)):
        history = data[row]
        length = len(place)
        matches = [
            s
            for s in range(161 - length)
            if torch.equal(history["place"][s : s + length], place) and torch.equal(history["action"][s : s + length], action)
        ]
        assert matches
        starts.add(matches[0])
    assert max(starts) == 160 - length
    assert variant == "ad" or all(start % 40 == 0 for start in starts)
    assert variant != "ad" or any(start % 40 for start in starts)
    assert found.facts.steps == 160


def test_held_out_tasks_are_never_trained_on() -> None:
    task = Distill(**TINY)
    train, held_out = task.histories().split()
    assert len(train) + len(held_out) == 12
    assert not set(train) & set(held_out)
    trained = task.train_data()
    assert len(trained) == len(train) * 5
    goals = {task.histories().facts.tasks[row] for row in held_out}
    evaluated = task.eval_data()
    assert evaluated is not None
    assert {int(sample) for sample in evaluated[:]["task"]} <= goals
    rewarded = trained[:]["next_place"][trained[:]["reward"] > 0]
    assert not {int(place) for place in rewarded.unique()} & goals


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_stream_does_not_depend_on_the_others(variant: str) -> None:
    task = Distill(variant=variant, **TINY)
    torch.manual_seed(0)
    env, model = task.histories().facts.env(), task.model().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # so that actions depend on the context
        many = play(env, model, torch.tensor([3, 3, 8]), torch.tensor([0, 1, 0]), 5, greedy=False)
        alone = play(env, model, torch.tensor([3]), torch.tensor([1]), 5, greedy=False)
    assert torch.equal(many.returns[1:2], alone.returns)
    assert torch.equal(many.places[1:2], alone.places)
    assert not torch.equal(many.places[0], many.places[1])


@pytest.mark.parametrize("variant", ONE_FAST)
def test_two_processes_give_the_curve_of_one(variant: str, folder: Path) -> None:
    words = [*SHORT, f"variant={variant}", "dropout=0", "attention_dropout=0"]
    run_ok("train", "distill", *words, "--procs", "1", "--name", "one")
    run_ok("train", "distill", *words, "--procs", "2", "--name", "two")
    assert_same_metrics(rows("runs/one"), rows("runs/two"), 2e-4)
    rates = [row["learning_rate"] for row in rows("runs/two") if "learning_rate" in row]
    assert rates[1] == pytest.approx(2e-3)  # the schedule counts optimizer steps: its peak is at step 2 for two processes, too


@pytest.mark.parametrize("variant", ONE_FAST)
def test_an_interrupted_run_continues_bit_for_bit(variant: str, folder: Path) -> None:
    assert "bit-equal" in run_ok("verify-resume", "distill", "--steps", "6", *SHORT, f"variant={variant}")


def test_the_pictures_and_the_answer_of_predict(folder: Path) -> None:
    output = run_ok("train", "distill", *SHORT, "--name", "d")
    assert "return of the last 10 episodes by held-out task: (" in output
    from PIL import Image

    for name in ("in-context-return", "last-episodes"):
        pixels = np.asarray(Image.open(f"runs/d/media/{name}-00000006.png"))
        assert pixels.shape[2] == 3
        assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 20
    last = [json.loads(line) for line in Path("runs/d/metrics.jsonl").read_text().splitlines()][-1]
    assert {"eval/return", "eval/of_optimum", "eval/worst_return", "eval/accuracy", "eval/loss", "eval/first_return"} <= last.keys()
    answer = run_ok("predict", "d", "(2,2)")
    assert answer.splitlines()[2].startswith("episode 3: return ")
    assert answer.splitlines()[0].endswith(" of 20")
    assert "is no task of darkroom: give a number from 0 to 24" in expect_error("predict", "d", "(9,9)", code=2)


@pytest.mark.system  # slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_exported_graph_gives_the_logits_of_the_model(variant: str, folder: Path) -> None:
    run_ok("train", "distill", *SHORT, f"variant={variant}", "--name", "d")
    run_ok("export", "d")
    import onnxruntime

    model = drivetrain.load("runs/d").eval()
    random = torch.Generator().manual_seed(0)
    steps = 40 if variant == "ad" else 80
    inputs = {
        name: torch.randint(high, (3, steps), generator=random)
        for name, high in (("place", 25), ("action", 5), ("reward", 2), ("next_place", 25))
    }
    inputs["reward"] = inputs["reward"].float()
    session = onnxruntime.InferenceSession(str(next(Path("runs/d").rglob("model.onnx"))))
    (logits,) = session.run(["logits"], {name: values.numpy() for name, values in inputs.items()})
    with torch.no_grad():
        expected = model(Steps(inputs["place"], inputs["action"], inputs["reward"], inputs["next_place"]))
    assert np.abs(logits - expected.numpy()).max() < 1e-4


@pytest.mark.timeout(300)
def test_a_small_form_of_the_recipe_learns_to_learn(folder: Path) -> None:
    """The weights are the same in the first and in the last episode: the context alone makes the difference."""
    words = [
        "train", "darkroom", "size=5", "collect.streams=40", "collect.epochs=30", "collect.global_batch=5000", "train.steps=500", "width=32", "layers=2",
        "heads=2", "inner=64", "window=60", "train.global_batch=64", "train.learning_rate=3e-3", "warmup=40", "eval_streams=20", "eval_episodes=20",
        "train.eval_every=500",
    ]  # fmt: skip
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run_ok(*words)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert cpu_seconds < 120, "at most a minute on two cores; other programs on this machine do not count"
    last = rows("runs/darkroom/2-train")[-1]
    assert last["eval/return"] > 1.6 * last["eval/first_return"]
    assert last["eval/accuracy"] > 0.6
    again = run_ok(*words)
    assert again.count("finished") == 2


def test_the_configuration_of_guide_002_trains(folder: Path) -> None:
    recipe = Path(__file__).parents[2] / "recipes" / "guide-002.yaml"
    assert "drivetrain train recipes/guide-002.yaml" in recipe.read_text()
    words = [
        "size=5",
        "collect.streams=2",
        "collect.epochs=10",
        "collect.global_batch=200",
        "train.steps=3",
        "train.global_batch=16",
        "warmup=1",
    ]
    output = run_ok("train", str(recipe), *words, "eval_tasks=2", "eval_streams=2", "eval_episodes=9", "--name", "guide")
    assert "step 3/3" in output
    settings = json.loads(Path("runs/guide/2-train/run.json").read_text())["recipe"]["settings"]
    assert (settings["variant"], settings["inner"], settings["learning_rate"]) == ("compressed", 128, 3e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"window": 39},
            r"would remember 19 steps when its context is full, fewer than an episode of darkroom \(20 steps\): take window=40 or more",
        ),
        (
            {"variant": "compressed", "region": 19},
            r"would remember 19 steps .* fewer than an episode of darkroom \(20 steps\): take region=20 or",
        ),
        (
            {"variant": "latent", "region": 10},
            r"would remember 10 steps .* fewer than an episode of darkroom \(20 steps\): take region=20 or more",
        ),
        ({"variant": "latent", "regions": 9}, r"the histories have 160 steps, fewer than a training sample \(360\)"),
        ({"width": 30, "heads": 4}, r"width=30 is no multiple of 2 x heads=4: take width=24"),
        ({"skip": 150}, r"the histories have 160 steps, fewer than"),
        ({"num_tasks": 2}, r"has no task to train on, only held-out ones"),
        ({"data": "nothing-here"}, r"data=nothing-here has no histories"),
        (
            {"world": "key-to-door", "num_tasks": None, "size": 9, "streams": 100, "episodes": 50},
            r"6,561 tasks .*: 14\.8 GB, .*: take num_tasks=1777",
        ),
    ],
)
def test_settings_that_do_not_fit_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(Problem, match=message):
        Distill(**TINY | settings).histories()


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("world=key-to-door", "data=data has histories of world=darkroom, not of world=key-to-door: leave out one of the two"),
        ("size=17", "data=data has histories of size=5, not of size=17: leave out one of the two"),
    ],
)
def test_histories_of_another_environment_are_refused(word: str, message: str, folder: Path) -> None:
    histories.write(Path("data"), Distill(**TINY).histories())
    assert message in expect_error("train", "distill", *SHORT, "data=data", word)


def test_regions_are_those_of_the_histories_unless_the_user_says_otherwise(tmp_path: Path) -> None:
    histories.write(tmp_path / "data", Distill(**TINY | {"region": 20}).histories())
    settings = TINY | {"data": str(tmp_path), "variant": "compressed"}
    assert Distill(**settings | {"region": None}).model().context_length == 40
    assert Distill(**settings | {"region": 30}).model().context_length == 60


@pytest.fixture
def staged(folder: Path) -> Path:
    """A finished run of the recipe, with very small stages."""
    collect = ["size=5", "collect.streams=4", "num_tasks=8", "collect.epochs=5", "collect.global_batch=640", "collect.eval_episodes=5"]
    run_ok("train", "darkroom", *collect, *WORDS[4:], "train.steps=4", "train.global_batch=16", "train.warmup=1", "--name", "d")
    return folder


def test_a_trained_model_is_used_without_its_histories(staged: Path) -> None:
    before = run_ok("predict", "d/2-train", "(2,2)")
    evaluated = run_ok("eval", "d/2-train")
    shutil.rmtree("runs/d/1-collect")
    assert run_ok("predict", "d/2-train", "(2,2)") == before
    assert "loss" in evaluated and "loss" not in run_ok("eval", "d/2-train")
    metrics = json.loads(Path("runs/d/2-train/eval.json").read_text())["metrics"]
    assert {"return", "first_return", "of_optimum", "worst_return"} <= metrics.keys()
    assert drivetrain.load("runs/d/2-train").context_length == 40
    assert "1-collect has no histories" in expect_error("resume", "d/2-train", "steps=6")


def test_a_project_may_move_with_its_runs(staged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = run_ok("eval", "d/2-train").splitlines()[-1]
    monkeypatch.chdir(staged.rename(staged.with_name("moved")))
    assert run_ok("eval", "d/2-train").splitlines()[-1] == before
    assert "step 6/6" in run_ok("resume", "d/2-train", "steps=6")


def test_an_unknown_variant_names_the_others(folder: Path) -> None:
    assert "ad, compressed, latent" in expect_error("train", "distill", "variant=rnn").replace("|", ", ").replace("'", "")
