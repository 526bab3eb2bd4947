"""`tune` finds better settings, stops bad trials early, and loses or repeats nothing after an interruption."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from drivetrain.describe import task_settings, tune_facts
from drivetrain.hardware import Hardware
from drivetrain.launch.machine import LocalMachine
from drivetrain.launch.request import Request
from drivetrain.outcomes import Problem
from drivetrain.recipe import make
from drivetrain.runs import Run, read_lines
from drivetrain.task_ref import find_task
from drivetrain.tasks.rl.population_rules import VARYING
from drivetrain.tune import folder as folders
from drivetrain.tune.folder import Goal
from drivetrain.tune.search import SearchRequest, requests_of_slots
from drivetrain.tune.space import make_space
from drivetrain.tune.study import Study
from drivetrain.tune.table import Table
from drivetrain.tune.tuner import Tuner, TunerSettings, with_early_evaluations
from drivetrain.watch.screen import Screen
from tests.command import COMMAND, environment, expect_error, run_drivetrain, run_ok, write_task
from tests.waiting import wait_until

pytest.importorskip("optuna")

RATE = "learning_rate=1e-6..1e-1,log"
SLOW = ("return F.cross", "import os, time; time.sleep(0.5 if os.path.exists('slow') else 0.03)\n        return F.cross")
DIGITS = task_settings(find_task("digits"))


def space_of(*words: str, task: dict[str, str] | None = None, **given: str) -> Any:
    return make_space(DIGITS, task or {}, list(words), given, "digits")


# --- the results of a study -----------------------------------------------------------------------------


STUDY = ["digits", "epochs=30", "--search", "learning_rate=1e-5..1e-1,log", "--search", "hidden=16|64", "--metric", "eval/accuracy"]


@pytest.fixture(scope="module")
def finished_study(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Runs a small study of digits; returns its folder and its result as JSON."""
    top = tmp_path_factory.mktemp("studied")
    process = subprocess.run(
        [*COMMAND, "tune", *STUDY, "--trials", "4", "--name", "s", "--json"], capture_output=True, text=True, env=environment(), cwd=top
    )
    assert process.returncode == 0, process.stderr
    assert len(process.stdout.splitlines()) == 1, "one JSON object"
    return top, json.loads(process.stdout)


def test_a_study_finds_better_settings(finished_study: tuple[Path, dict[str, Any]]) -> None:
    _, result = finished_study
    values = [t["value"] for t in result["trials"]]
    best = result["best"]
    assert best["value"] == max(t["value"] for t in result["trials"] if t["state"] == "finished")
    assert best["value"] > 0.9 > min(values) + 0.2
    assert best["params"]["learning_rate"] > 1e-3
    assert all(1e-5 <= t["params"]["learning_rate"] <= 1e-1 and t["params"]["hidden"] in (16, 64) for t in result["trials"])
    assert len({t["params"]["learning_rate"] for t in result["trials"]}) == 4


def test_a_bad_trial_is_stopped_early_and_recorded(finished_study: tuple[Path, dict[str, Any]]) -> None:
    top, result = finished_study
    full = max(t["steps"] for t in result["trials"])
    pruned = [t for t in result["trials"] if t["state"] == "pruned"]
    assert pruned
    for trial in pruned:
        run = top / trial["run"]
        assert max(row["step"] for row in read_lines(run / "metrics.jsonl")) < full
        assert json.loads((run / "run.json").read_text())["outcome"] == "preempted", "it was stopped after a save"
        assert list((run / "checkpoints").glob("step-*"))


def test_the_folder_holds_all_results(finished_study: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    top, result = finished_study
    monkeypatch.chdir(top)
    listed = next(line for line in run_ok("runs").splitlines() if line.startswith("s "))
    assert "finished  4 trials  best accuracy 9" in listed
    study = json.loads((top / "runs/s/tune.json").read_text())
    assert (study["format"], study["status"], study["task"]) == (1, "finished", "digits")
    assert (study["metric"], study["direction"], study["search"]["hidden"]) == ("eval/accuracy", "max", "16|64")
    assert study["settings"]["epochs"] == 30 and "hidden" not in study["settings"] and study["versions"]["optuna"]
    for name in ("history", "importances", "slices"):
        png = (top / f"runs/s/{name}.png").read_bytes()
        assert png.startswith(b"\x89PNG") and len(png) > 3000
    run = json.loads((top / result["best"]["run"] / "run.json").read_text())
    assert run["recipe"]["settings"]["learning_rate"] == result["best"]["params"]["learning_rate"], "a trial is an ordinary run"


@pytest.mark.system  # slow
def test_the_best_recipe_trains_to_the_same_value(finished_study: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    top, result = finished_study
    monkeypatch.chdir(top)
    run_ok("train", result["recipe"], "--name", "again")
    values = [row["eval/accuracy"] for row in read_lines(top / "runs/again/metrics.jsonl") if "eval/accuracy" in row]
    assert max(values) == result["best"]["value"]


def test_a_finished_study_says_so_and_different_studies_are_refused(
    finished_study: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    top, _ = finished_study
    monkeypatch.chdir(top)
    before = (top / "runs/s/study.journal").read_bytes()
    assert "runs/s is finished: 4 trials" in run_ok("tune", *STUDY, "--trials", "4", "--name", "s")
    other = [w.replace("16|64", "16|32") for w in STUDY]
    assert "hidden=16|64 (now 16|32)" in expect_error("tune", *other, "--trials", "4", "--name", "s")
    assert "eval/accuracy (now eval/loss)" in expect_error("tune", *STUDY[:-1], "eval/loss", "--trials", "4", "--name", "s")
    assert "epochs=30 (now 4)" in expect_error("tune", "digits", "epochs=4", *STUDY[2:], "--name", "s")
    assert "study of digits, not of bandit" in expect_error("tune", "bandit", "--search", RATE, "--name", "s")
    assert (top / "runs/s/study.journal").read_bytes() == before


# --- interruptions ----------------------------------------------------------------------------------


WORDS = {"interrupted": ["epochs=4", "--search", RATE, "--metric", "accuracy", "--prune", "none", "--jobs", "2", "--name", "interrupted"]}


def begin(name: str, trials: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([*COMMAND, "tune", "small.py", *WORDS[name], "--trials", str(trials), "-q"], env=environment())


def rows_of(number: int) -> list[dict[str, Any]]:
    return list(read_lines(Path(f"runs/interrupted/trials/trial-{number:04d}/metrics.jsonl")))


def journal_rows(operations: str) -> list[dict[str, Any]]:
    """Returns the journal's records of some operations (5: a parameter, 6: a state)."""
    return [row for row in read_lines(Path("runs/interrupted/study.journal")) if str(row["op_code"]) in operations]


def params() -> list[tuple[int, float]]:
    return [(row["trial_id"], row["param_value_internal"]) for row in journal_rows("5")]


def exit_code_after(tuner: subprocess.Popen[bytes], number: int) -> int:
    """Sends a signal to the tuner, and checks that no process it started survives; returns the exit code."""
    children = psutil.Process(tuner.pid).children(recursive=True)
    assert len(children) >= 2
    tuner.send_signal(number)
    code = tuner.wait(timeout=240)
    wait_until(lambda: not any(is_alive(process) for process in children), f"the end of {children}", 30)
    return code


def is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.mark.system  # slow
def test_nothing_is_lost_or_repeated_when_the_tuner_dies(folder: Path) -> None:
    write_task(change=SLOW)
    Path("slow").touch()
    tuner = begin("interrupted", 3)
    wait_until(lambda: rows_of(0) and rows_of(1), "two running trials", process=tuner)
    assert exit_code_after(tuner, signal.SIGTERM) == 200, "the exit code of a resumable run"
    assert json.loads(Path("runs/interrupted/tune.json").read_text())["status"] == "stopped"
    first_params = params()
    assert len(first_params) == 2 and not journal_rows("6"), "both can still be resumed"

    Path("slow").unlink()
    tuner = begin("interrupted", 3)
    wait_until(lambda: journal_rows("6"), "a finished trial", process=tuner)
    Path("slow").touch()
    wait_until(lambda: rows_of(2), "the third trial running", process=tuner)
    assert exit_code_after(tuner, signal.SIGKILL) == -9
    finished = {row["trial_id"]: row["values"] for row in journal_rows("6")}
    run_files = {n: Path(f"runs/interrupted/trials/trial-{n:04d}/run.json").read_bytes() for n in finished}
    second_params = params()

    Path("slow").unlink()
    result = json.loads(run_ok("tune", "small.py", *WORDS["interrupted"], "--trials", "3", "--json"))
    assert [t["trial"] for t in result["trials"]] == [0, 1, 2]
    assert {t["state"] for t in result["trials"]} == {"finished"}
    assert params() == second_params and second_params[:2] == first_params, "running trials were resumed with the same parameters"
    for number, text in run_files.items():
        assert Path(f"runs/interrupted/trials/trial-{number:04d}/run.json").read_bytes() == text, "a finished trial is not trained again"
        assert [result["trials"][number]["value"]] == finished[number]
    for number in (0, 1, 2):
        steps = [row["step"] for row in rows_of(number)]
        assert steps == list(range(1, steps[-1] + 1)), "each step is logged once"
    events = [e["event"] for e in read_lines(Path("runs/interrupted/trials/trial-0000/events.jsonl"))]
    assert "resumed" in events, "it did not restart from the beginning"


@pytest.mark.system  # slow
def test_a_killed_trial_is_restarted(folder: Path) -> None:
    kill = "import os, pathlib\n        if not pathlib.Path('{0}').exists():\n            pathlib.Path('{0}').touch()\n            os.kill(int(os.environ['_DRIVETRAIN_FRONT']), 9)\n        "
    write_task(change=("return nn.Sequential", kill.format(folder / "killed") + "return nn.Sequential"))
    text = run_ok("tune", "small.py", "epochs=1", "--search", RATE, "--metric", "accuracy", "--trials", "1", "--name", "k")
    assert "restarted" in text and "SIGKILL" in text
    assert "1 finished" in text


@pytest.mark.system  # slow
def test_a_trial_that_is_always_killed_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / "python"
    program.write_text("#!/bin/sh\necho start >> starts\nkill -9 $$\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    recipe, space, goal = make(find_task("digits"), {}, {}), space_of(RATE), Goal("eval/loss", "min")
    study_folder = folders.open_folder("study", "digits", folders.identity(recipe, space, goal))
    study = Study(study_folder.path, space, "min", "tpe", 0, "none", 1)
    assert Tuner(TunerSettings(recipe, goal, 1, [Request()]), study_folder, study, Table(Screen(quiet=True), space, goal.metric)).run()
    assert len((folder / "starts").read_text().splitlines()) == 4, "three restarts"
    (trial,) = study.trials()
    assert trial.state == "failed" and "SIGKILL" in trial.facts["message"]


def test_three_failures_end_the_search_with_their_message(folder: Path) -> None:
    message = expect_error("tune", "digits", "plan.micro_batch=many", "--search", RATE, "--trials", "9", "--name", "f", max_lines=3)
    assert "the first 3 trials failed" in message and "micro_batch" in message
    assert len(list(Path("runs/f/trials").iterdir())) == 3
    run_ok("runs", "rm", "f", "--yes")
    assert not Path("runs/f").exists()


def test_a_folder_in_use_names_the_process(folder: Path) -> None:
    program = "import sys; from pathlib import Path; from drivetrain.runs import Lock; Lock.acquire(Path('runs/used')); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment()) as other:
        assert other.stdout is not None
        other.stdout.readline()
        message = expect_error("tune", "digits", "--search", RATE, "--name", "used", max_lines=1)
        assert f"being tuned by process {other.pid}" in message
        other.communicate(b"\n")


# --- the search space --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "given", "message"),
    [
        (["learnig_rate=1e-4..1e-2"], {}, "did you mean learning_rate?"),
        (["hidden=0..64"], {}, "a whole number of 1 to 65536"),
        (["hidden=64|99999999"], {}, "a whole number of 1 to 65536"),
        (["hidden=1.5..4"], {}, "a whole number"),
        (["learning_rate=1e-4"], {}, "LOW..HIGH"),
        (["learning_rate=1e-4..1e-2,lin"], {}, "LOW..HIGH,log"),
        (["learning_rate=1e-2..1e-4"], {}, "lower end of the range first"),
        (["learning_rate=0..1,log"], {}, "must begin above 0"),
        (["optim=adam..sgd"], {}, "optim is not a number"),
        (["best=a..b"], {}, "best is not a number"),
        (["hidden=64|64"], {}, "repeated"),
        (["hidden"], {}, "--search learning_rate="),
        (["hidden=8..64"], {"hidden": "32"}, "give only one"),
        ([], {}, "nothing to search: write --search learning_rate="),
    ],
)
def test_an_invalid_search_names_the_fix(words: list[str], given: dict[str, str], message: str) -> None:
    with pytest.raises(Problem) as problem:
        space_of(*words, **given)
    assert message in str(problem.value)


def test_the_command_lines_search_replaces_the_tasks() -> None:
    search_of_task = {"hidden": "16..32", "learning_rate": "1e-4..1e-2,log", "clip": "0..1"}
    space = space_of(task=search_of_task, clip="0.5")
    assert {name: d.text for name, d in space.items()} == {"hidden": "16..32", "learning_rate": "1e-4..1e-2,log"}
    assert space["hidden"].is_whole and not space["hidden"].is_log
    assert space["learning_rate"].is_log and not space["learning_rate"].is_whole
    assert {name: d.text for name, d in space_of("hidden=8..64", task=search_of_task).items()} == {"hidden": "8..64"}


def test_ppo_tasks_declare_what_is_searched(folder: Path) -> None:
    words = ["cartpole", "epochs=3", "envs=8", "horizon=8", "global_batch=32", "eval_episodes=2", "--name", "own"]
    text = run_ok("tune", *words, "--trials", "2")
    assert "(cartpole's own; --search replaces it)" in text and "eval_every=1ep, not 10ep" in text
    study = json.loads(Path("runs/own/tune.json").read_text())
    assert study["metric"] == "eval/return" and study["search"] == tune_facts(find_task("cartpole")).search
    assert len(study["search"]) > 3 and all(name in VARYING for name in study["search"]), "they can be trained as a population"
    assert len([row for row in Run("runs/own/trials/trial-0000").rows() if "eval/return" in row]) == 3
    assert "entropy_weight=1e-4..3e-2,log" in run_ok("tune", "bandit", "--help") and "gamma" not in tune_facts(find_task("bandit")).search


def test_a_trial_is_evaluated_during_training_unless_eval_every_is_set() -> None:
    def eval_every(task: str, **given: str) -> Any:
        return with_early_evaluations(make(find_task(task), {}, given))[0].settings["eval_every"]

    assert eval_every("snake") == "25ep" and eval_every("cartpole") == "10ep"
    assert eval_every("cartpole", epochs="15") == "1ep" and eval_every("cartpole", epochs="1") == "10ep"
    assert eval_every("snake", eval_every="200ep") == "200ep"
    assert with_early_evaluations(make(find_task("snake"), {}, {}))[0].origin["eval_every"] == "tune", "best.yaml gets it, too"


def test_a_task_may_declare_what_is_searched(folder: Path) -> None:
    write_task("plain.py", ("    hidden: int", '    search = {"hidden": "8|16"}\n    hidden: int'))
    assert tune_facts(find_task("plain.py")).search == {"hidden": "8|16"}
    assert "search" not in task_settings(find_task("plain.py"))
    write_task("derived.py", ("class Small(Task):", "from plain import Small as Base\n\n\nclass Small(Base):"))
    assert tune_facts(find_task("derived.py:Small")).search == {"hidden": "8|16"}, "the file must be imported to see it"
    write_task("wrong.py", ("    hidden: int", '    search: str = "hidden"\n    hidden: int'))
    assert "search is what `tune` searches" in expect_error("train", "wrong.py", "--dry-run")


def test_mistakes_on_the_command_line(folder: Path) -> None:
    assert "did you mean hidden" in expect_error("tune", "digits", "--search", "hiden=8..64")
    assert "nothing to search" in expect_error("tune", "digits")
    assert "To search it: --search 'hidden=8..64'" in expect_error("tune", "digits", "hidden=8..64")
    assert "eval/NAME" in expect_error("tune", "digits", "--search", RATE, "--metric", "train/loss")
    assert not Path("runs").exists(), "a mistake writes nothing"
    Path("hidden").mkdir()
    Path("hidden/optuna.py").write_text("raise ImportError")
    process = run_drivetrain("tune", "digits", "--search", RATE, PYTHONPATH=f"{folder / 'hidden'}:{':'.join(sys.path)}")
    assert process.returncode == 2 and "pip install 'drivetrain[tune]'" in process.stderr


def test_help_shows_examples_and_settings(folder: Path) -> None:
    text = run_ok("tune", "digits", "--help")
    assert "--search 'hidden=64|128|256'" in text and "Width of the hidden layer" in text


@pytest.mark.parametrize(
    ("flags", "num_gpus", "requests"),
    [
        ({}, 0, [Request()]),
        ({"jobs": 2}, 0, [Request(settings=("plan.threads=4",))] * 2),
        ({"jobs": 2, "procs": 2}, 0, [Request(procs=2, settings=("plan.threads=2",))] * 2),
        ({}, 2, [Request(gpus="0"), Request(gpus="1")]),
        ({"jobs": 2}, 4, [Request(gpus="0,1"), Request(gpus="2,3")]),
        ({"procs": 2}, 4, [Request(procs=2, gpus="0,1"), Request(procs=2, gpus="2,3")]),
        ({"gpus": "5,7"}, 2, [Request(gpus="5"), Request(gpus="7")]),
    ],
)
def test_each_trial_gets_its_share_of_the_machine(flags: dict[str, Any], num_gpus: int, requests: list[Request]) -> None:
    gpus = [str(number) for number in range(num_gpus)]
    machine = LocalMachine(Hardware(8, 2**34, gpu_note="a test"), "cuda" if gpus else "cpu", gpus, max(1, num_gpus))
    recipe = make(find_task("digits"), {}, {})
    assert requests_of_slots(SearchRequest(**flags), machine, recipe) == requests
    if gpus:
        with pytest.raises(Problem, match="GPUs to use"):
            requests_of_slots(SearchRequest(**flags | {"jobs": 5}), machine, recipe)


# --- proposals ---------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_the_same_seed_proposes_the_same_trials_even_after_an_interruption(folder: Path, sampler: str) -> None:
    space = space_of(RATE, "hidden=16|64|128", "global_batch=8..64")

    def proposals(name: str, seed: int, interrupted: bool) -> list[dict[str, Any]]:
        path = folder / name
        path.mkdir()
        params = []
        study = Study(path, space, "max", sampler, seed, "median", 14)
        for _ in range(14):
            (proposal,) = study.ask()
            if interrupted:
                with open(path / "study.journal", "ab") as journal:
                    journal.write(b'{"half a li')
                (path / "study.journal.lock").touch()
                study = Study(path, space, "max", sampler, seed, "median", 14)
                assert [p.params for p in study.unfinished()] == [proposal.params]
            study.finish(proposal.number, -abs(proposal.params["learning_rate"] - 0.01))
            params.append(proposal.params)
        return params

    uninterrupted = proposals("a", 7, False)
    assert proposals("b", 7, True) == uninterrupted
    assert proposals("c", 8, False) != uninterrupted
    assert all(isinstance(p["global_batch"], int) and p["hidden"] in (16, 64, 128) for p in uninterrupted)
    assert len({p["learning_rate"] for p in uninterrupted}) == 14


def test_a_study_proposes_several_trials_and_stores_several_results(folder: Path) -> None:
    space = space_of("hidden=16|64")
    study = Study(folder, space, "min", "random", 0, "none", 3)
    first, second, third = study.ask(3)
    study.finish(first.number, 0.5, step=3)
    study.finish(second.number, 0.25)
    study.fail(third.number, "why")
    best = study.best()
    assert best is not None and (best.number, best.value) == (1, 0.25)
    assert [t.state for t in study.trials()] == ["finished", "finished", "failed"]
    assert study.trials()[2].facts["message"] == "why"
