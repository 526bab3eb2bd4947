"""Recipes with stages, and built-in recipes: later stages read files of earlier ones, and settings reach the stages that have them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from drivetrain import task_ref
from drivetrain.cli import completion, run_command
from drivetrain.launch.request import Request
from drivetrain.outcomes import Problem
from drivetrain.recipe import Recipe, load
from drivetrain.runs import Run
from drivetrain.targets import submit
from drivetrain.targets.archive import package_files
from drivetrain.targets.config import find_target
from drivetrain.task_ref import BUILT_IN, built_in_recipes
from tests.command import TASK, environment, expect_error, run_drivetrain, run_ok, write_task
from tests.launching import free_port, run
from tests.test_machines import start_two_machines

FAST = ("plan.threads=1", "plan.compile=off")
READER = TASK.replace("class Small(Task):", "class Reader(Task):\n    histories: str").replace(
    'return datasets.digits("train")', 'assert len(open(self.histories).readlines()) >= 4\n        return datasets.digits("train")'
)
"""A task that fails unless it can read the rows of metrics of another run."""
RECIPE = """\
task: small.py
steps: 4
log_every: 1
stages:
  - name: collect
    learning_rate: 0.02
  - name: read
    task: reader.py
    histories: ${collect.path}/metrics.jsonl
    learning_rate: 0.0
  - name: finetune
    learning_rate: 0.0
    weight_decay: 0
    start: ${collect.path}
"""


@pytest.fixture
def recipe(folder: Path) -> Path:
    """`three.yaml` in an empty working folder: the second stage reads a file of the first, and the third starts from its weights."""
    write_task()
    write_task("reader.py", text=READER)
    Path("three.yaml").write_text(RECIPE)
    return folder


@pytest.fixture
def built_in(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the built-in recipes, which has only `gallery`, of built-in tasks."""
    own = recipe / "built-in"
    own.mkdir()
    (own / "gallery.yaml").write_text(
        "task: digits\nsteps: 2\nstages:\n  - name: collect\n  - name: play\n    task: bandit\n    start: ${collect.path}\n"
    )
    monkeypatch.setattr(task_ref, "RECIPES", own)
    return own


def weights(name: str) -> bytes:
    return Path(f"runs/{name}/model/model.safetensors").read_bytes()


def recorded(name: str) -> dict[str, Any]:
    return dict(json.loads(Path(f"runs/{name}/run.json").read_text())["recipe"])


# --- files ---------------------------------------------------------------------------------------


def test_a_stage_uses_the_run_directory_of_an_earlier_one(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_ok("train", "three.yaml", *FAST).count("done    ") == 3
    path = str(recipe / "runs/three/1-collect/metrics.jsonl")
    assert recorded("three/2-read")["settings"]["histories"] == path
    assert recorded("three/2-read")["settings"]["start"] is None, "it uses files, so it begins with new weights"
    assert weights("three/2-read") != weights("three/1-collect") == weights("three/3-finetune")
    assert run_ok("train", "three.yaml", *FAST).count("is finished") == 3
    assert re.search(r"histories +\$\{collect.path\}/metrics.jsonl +recipe", run_ok("train", "three.yaml", *FAST, "--dry-run"))
    assert "done    6 steps" in run_ok("resume", "three/2-read", "steps=6")
    assert recorded("three/2-read")["settings"]["histories"] == path
    monkeypatch.chdir(recipe.rename(recipe.with_name("moved")))
    assert run_ok("train", "three.yaml", "read.steps=6", *FAST).count("is finished") == 3, "the folder may move"


def test_a_recipe_goes_on_at_the_stage_that_failed(recipe: Path) -> None:
    Path("reader.py").write_text(READER.replace("return F.cross", "raise ValueError('too early')\n        return F.cross"))
    assert "too early" in run_drivetrain("train", "three.yaml", *FAST).stderr
    Path("reader.py").write_text(READER)
    output = run_ok("train", "three.yaml", *FAST)
    assert output.count("is finished") == 1 and output.count("done    ") == 2


def test_all_workers_of_torchrun_find_the_files(recipe: Path) -> None:
    words = ("-m", "drivetrain", "train", "three.yaml", *FAST, "--name", "both")
    output = run("torchrun", "--nproc-per-node", 2, "--master-port", free_port(), *words, folder=recipe)
    assert output.count("done    ") == 3
    assert recorded("both/2-read")["settings"]["histories"] == str(recipe / "runs/both/1-collect/metrics.jsonl")


def test_all_workers_of_accelerate_find_the_files(recipe: Path) -> None:
    flags = (
        "--multi_gpu",
        "--num_processes",
        2,
        "--num_machines",
        1,
        "--mixed_precision",
        "no",
        "--dynamo_backend",
        "no",
        "--main_process_port",
        0,
    )
    words = ("-m", "drivetrain", "train", "three.yaml", *FAST, "--name", "both")
    output = run("accelerate", "launch", *flags, *words, folder=recipe, HF_HOME=recipe)
    assert output.count("done    ") == 3
    assert recorded("both/2-read")["settings"]["histories"] == str(recipe / "runs/both/1-collect/metrics.jsonl")


@pytest.mark.system  # slow
def test_two_machines_with_a_shared_folder_find_the_files(recipe: Path) -> None:
    for _ in range(2):
        shutil.rmtree("runs/both/2-read", ignore_errors=True)  # the second time only the first and the last stage are finished
        with start_two_machines(recipe, "three.yaml") as machines:
            for machine in machines:
                machine.succeed()
        assert recorded("both/2-read")["settings"]["histories"] == str(recipe / "runs/both/1-collect/metrics.jsonl")
    assert weights("both/1-collect") == weights("both/3-finetune")


def test_what_is_sent_to_a_target_has_the_text_of_the_recipe(recipe: Path) -> None:
    recipes = load("three.yaml", ["read.steps=7"], {})
    sent = submit.prepare(find_target("local"), recipes, Request(target="three.yaml"), Run("runs/three"))
    assert sent.code is not None
    sent.code.unpack(recipe / "there")
    again = load(str(recipe / "there" / sent.task), list(sent.request.settings), {})
    assert [stage.identity() for stage in again] == [stage.identity() for stage in recipes]
    assert again[1].settings["histories"] == "${collect.path}/metrics.jsonl" and again[1].settings["steps"] == 7


def test_a_target_trains_all_stages(recipe: Path) -> None:
    assert run_ok("train", "three.yaml", *FAST, "--on", "local", "--wait").count("done    ") == 3
    assert recorded("three/2-read")["settings"]["histories"].endswith("/1-collect/metrics.jsonl")


def test_a_batch_script_of_slurm_trains_all_stages(recipe: Path) -> None:
    output = run_ok("train", "three.yaml", *FAST, "--on", "slurm", "--nodes", "2", "--dry-run")
    assert "sbatch --parsable" in output and "--nodes=2" in output
    assert "drivetrain train" in output and "recipe.yaml" in output


def test_weights_of_an_earlier_stage_are_no_weights_of_this_machine(recipe: Path) -> None:
    Path("drivetrain.yaml").write_text("targets: {box: {kind: ssh, hosts: [box]}}\n")
    assert "recipe.yaml" in run_ok("train", "three.yaml", "--on", "box", "--dry-run")
    assert "start=x is on this machine" in expect_error("train", "three.yaml", "read.start=x", "--on", "box", "--dry-run")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("${read.path}/x", "${read.path} names no earlier stage"),
        ("${colect.path}/x", "names no earlier stage; did you mean collect? (earlier stages: collect)"),
        ("${collect.weights}", "${collect.weights} is unknown: write ${STAGE.path}"),
        ("${collect}", "write ${STAGE.path}"),
        ("${HOME}/x", "write ${STAGE.path}"),
    ],
)
def test_a_wrong_reference_is_refused(text: str, message: str, recipe: Path) -> None:
    Path("three.yaml").write_text(RECIPE.replace("${collect.path}/metrics.jsonl", text))
    answer = expect_error("train", "three.yaml", max_lines=1)
    assert message in answer and "histories" in answer
    assert not Path("runs").exists()


def test_other_dollars_and_recipes_without_stages_stay_as_they_are(recipe: Path) -> None:
    Path("three.yaml").write_text(RECIPE.replace("${collect.path}/metrics.jsonl", "$HOME/$x"))
    assert load("three.yaml", [], {})[1].settings["histories"] == "$HOME/$x"
    assert load("reader.py", ["histories=${a.path}"], {})[0].references == {}


def test_the_first_stage_has_none_before_it(recipe: Path) -> None:
    Path("three.yaml").write_text(RECIPE.replace("    learning_rate: 0.02", "    start: ${collect.path}"))
    assert "no stage comes before" in expect_error("train", "three.yaml", max_lines=1)


# --- settings ------------------------------------------------------------------------------------


def settings_of(stages: list[Recipe], name: str) -> list[Any]:
    return [stage.settings.get(name) for stage in stages]


def loaded(*words: str, variables: Mapping[str, str] | None = None) -> list[Recipe]:
    return load("three.yaml", list(words), variables or {})


def test_a_setting_reaches_every_stage_whose_task_has_it(recipe: Path) -> None:
    assert settings_of(loaded("epochs=5"), "epochs") == [5, 5, 5]
    assert settings_of(loaded("histories=x"), "histories") == [None, "x", None]
    stages = loaded("read.epochs=7", "epochs=5", "plan.threads=1", "read.plan.threads=2", "finetune.plan.micro-batch=3")
    assert settings_of(stages, "epochs") == [5, 7, 5], "that of one stage wins, in any order"
    assert [stage.pins for stage in stages] == [{"threads": "1"}, {"threads": "2"}, {"threads": "1", "micro_batch": "3"}]


def test_a_stage_may_have_dashes_and_dots_in_its_name(recipe: Path) -> None:
    Path("three.yaml").write_text(RECIPE.replace("name: read", "name: pre-read.v1"))
    assert settings_of(loaded("pre-read.v1.log-every=3"), "log_every") == [1, 3, 1]


def test_settings_of_the_environment_and_of_the_recipes_top_reach_the_stages_that_have_them(recipe: Path) -> None:
    stages = loaded(variables={"DRIVETRAIN_HISTORIES": "x", "DRIVETRAIN_EPOCHS": "3"})
    assert settings_of(stages, "histories") == [None, "x", None] and settings_of(stages, "epochs") == [3, 3, 3]
    assert not any(stage.notices for stage in stages)
    assert "three.yaml has no setting historis; did you mean histories?" in loaded(variables={"DRIVETRAIN_HISTORIS": "x"})[0].notices[0]
    Path("three.yaml").write_text(f"histories: top\n{RECIPE}".replace("    histories: ${collect.path}/metrics.jsonl\n", ""))
    assert settings_of(loaded(), "histories") == [None, "top", None]
    Path("three.yaml").write_text(f"historis: top\n{RECIPE}")
    with pytest.raises(Problem, match=r"no stage of three.yaml has a setting 'historis'; did you mean histories\?"):
        loaded()


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("historis=x", "no stage of three.yaml has a setting 'historis'; did you mean histories?"),
        ("raed.epochs=1", "no stage 'raed'; did you mean read? (its stages: collect, read, finetune)"),
        ("raed.plan.threads=1", "no stage 'raed'; did you mean read?"),
        ("collect.histories=x", "has no setting 'histories'"),
        ("read.plan.thread=1", "the plan has no choice 'thread'"),
    ],
)
def test_a_setting_that_no_stage_has_is_refused(word: str, message: str, recipe: Path) -> None:
    assert message in expect_error("train", "three.yaml", word, "--dry-run")


def test_a_stage_that_two_have_the_name_of_is_refused(recipe: Path) -> None:
    Path("three.yaml").write_text(RECIPE.replace("name: finetune", "name: collect"))
    assert "several stages 'collect'" in expect_error("train", "three.yaml", "collect.epochs=1")
    Path("three.yaml").write_text(RECIPE.replace("name: read", "name: plan"))
    assert "cannot be called plan" in expect_error("train", "three.yaml", max_lines=1)


def test_stages_that_are_not_trained_yet_are_planned_without_their_files(recipe: Path) -> None:
    output = run_ok("plan", "three.yaml")
    assert output.count("plan    ") == 3 and output.count("reads files of an earlier stage") == 1
    assert len(json.loads(run_ok("plan", "three.yaml", "--json"))) == 3
    assert "has stages" in expect_error("tune", "three.yaml", "--search", "hidden=8|16")


# --- built-in recipes ----------------------------------------------------------------------------


def test_no_recipe_has_the_name_of_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not BUILT_IN.keys() & built_in_recipes().keys()
    (tmp_path / "digits.yaml").write_text("task: digits\n")
    monkeypatch.setattr(task_ref, "RECIPES", tmp_path)
    assert BUILT_IN.keys() & built_in_recipes().keys() == {"digits"}, "a recipe of that name must be found, or this test proves nothing"


def test_every_built_in_recipe_loads_and_is_in_the_wheel() -> None:
    for name, path in built_in_recipes().items():
        assert load(name, [], {})
        assert package_files()[f"drivetrain/recipes/{path.name}"] == path.read_bytes()


def test_there_may_be_no_built_in_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(task_ref, "RECIPES", tmp_path / "missing")
    assert run_command(["train", "--help"]) == 0 and "or a recipe: file.yaml." in capsys.readouterr().out
    with pytest.raises(Problem, match="there is no task 'gallery'"):
        load("gallery", [], {})


def test_a_built_in_recipe_is_found_by_its_name(built_in: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def output(*words: str, code: int = 0) -> str:
        assert run_command(list(words)) == code
        captured = capsys.readouterr()
        return captured.out + captured.err

    assert [stage.name for stage in load("gallery", [], {})] == ["gallery/1-collect", "gallery/2-play"]
    assert "a built-in one (gallery)" in output("train", "--help")
    text = output("train", "gallery", "--help")
    for title in ("settings of Digits", "settings of Bandit", "settings of every task"):
        assert text.count(title) == 1
    assert "did you mean gallery?" in output("train", "galery", code=2)
    text = output("train", "gallery", "play.epochs=3", "--dry-run")
    assert text.index("stage     collect") < text.index("stage     play") and "${collect.path}" in text
    assert output("plan", "gallery").count("plan    ") == 2
    assert "gallery has stages" in output("tune", "gallery", code=2)
    assert "settings of Bandit" in output("tune", "gallery", "--help")
    assert "recipe.yaml" in output("train", "gallery", "--on", "local", "--dry-run")
    for script in (completion.bash_script(), completion.fish_script()):
        assert re.search(r"\bdigits\b.*\bgallery\b", script)
    Path("wrong.yaml").write_text("task: gallery\n")
    assert "gallery is a recipe, not a task" in output("train", "wrong.yaml", code=2)


def test_a_built_in_recipe_trains_and_is_not_repeated(built_in: Path) -> None:
    (built_in / "gallery.yaml").write_text("task: digits\nsteps: 2\nstages:\n  - name: collect\n  - name: tune\n")
    program = (
        f"from drivetrain import task_ref\ntask_ref.RECIPES = task_ref.Path({str(built_in)!r})\nfrom drivetrain.cli import main\nmain()\n"
    )
    for marker in ("done    2 steps", "is finished"):
        process = subprocess.run(
            [sys.executable, "-c", program, "train", "gallery", *FAST], capture_output=True, text=True, env=environment()
        )
        assert process.returncode == 0 and process.stdout.count(marker) == 2, process.stdout + process.stderr
    assert recorded("gallery/2-tune")["settings"]["start"] == str(built_in.parent / "runs/gallery/1-collect")
