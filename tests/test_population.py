"""Trials as a population: each equals an ordinary run, and no finished trial is lost."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from drivetrain.describe import task_settings
from drivetrain.engine.group import Group
from drivetrain.engine.log.observe import Observers
from drivetrain.engine.loop import Training
from drivetrain.hardware import Hardware
from drivetrain.launch.ending import record_end
from drivetrain.launch.machine import LocalMachine
from drivetrain.launch.opening import OpenedRun, record_start
from drivetrain.outcomes import Outcome, Problem
from drivetrain.plan.choose import choose as plan_of
from drivetrain.processes.job import PopulationJob, PopulationMember
from drivetrain.processes.population import programs, train_population
from drivetrain.recipe import Recipe, make
from drivetrain.runs import Run, read_lines
from drivetrain.supervise import JobEnd
from drivetrain.task_ref import find_task, instantiate
from drivetrain.tasks.rl.envs import Env
from drivetrain.tasks.rl.envs.cartpole import CartPoleEnv
from drivetrain.tasks.rl.population import Population, check_task
from drivetrain.tasks.rl.population_rules import VARYING
from drivetrain.tasks.rl.worlds import CartPole, Snake
from drivetrain.tune import folder as folders
from drivetrain.tune import population
from drivetrain.tune.folder import Goal
from drivetrain.tune.population import NoPopulation, PopulationContext, PopulationTuner
from drivetrain.tune.space import make_space
from drivetrain.tune.study import Study
from drivetrain.tune.table import Table
from drivetrain.tune.tuner import TunerSettings
from drivetrain.watch.files import MetricsFile
from drivetrain.watch.screen import Screen, show_event
from tests.command import COMMAND, environment, expect_error, run_ok
from tests.waiting import wait_until

pytest.importorskip("optuna")

HARDWARE = Hardware(cpu_cores=2, memory_bytes=2**34)
CPU = Group(0, 1, torch.device("cpu"))
SMALL: dict[str, Any] = {
    "envs": 8, "horizon": 8, "global_batch": 16, "passes": 2, "epochs": 3, "eval_episodes": 3, "eval_every": "2ep", "best": "max:return",
    "log_every": 1,
}  # fmt: skip
GOAL = Goal("eval/return", "max")


# --- members equal ordinary runs ------------------------------------------------


def members(name: str, trials: list[dict[str, Any]]) -> list[PopulationMember]:
    task = find_task(name)
    return [PopulationMember(i, f"together/{i}", instantiate(task, SMALL | changes).settings()) for i, changes in enumerate(trials)]


def trained_together(name: str, trials: list[dict[str, Any]], size: int = 8) -> list[tuple[str, dict[str, Any]]]:
    """Trains the trials as one program; returns what the worker reported."""
    reports: list[tuple[str, dict[str, Any]]] = []
    population_members = members(name, trials)
    plan = plan_of(population_members[0].settings, HARDWARE, device="cpu", world_size=1, local_procs=1, pins={"threads": 1})
    for member in population_members:
        Path(member.run).mkdir(parents=True)
    job = PopulationJob(run="together", task=find_task(name), plan=plan, folder=".", members=population_members, size=size)
    assert train_population(job, CPU, lambda kind, value: reports.append((kind, value)), False)["outcome"] is Outcome.OK
    return reports


def trained_alone(name: str, changes: dict[str, Any], folder: str) -> Run:
    task = instantiate(find_task(name), SMALL | changes)
    plan = plan_of(task.settings(), HARDWARE, device="cpu", world_size=1, local_procs=1, pins={"threads": 1})
    observer = Observers([MetricsFile(Run(folder))])
    Training(task, plan, Run(folder), CPU, observer, False).run_to_end()
    observer.close()
    return Run(folder)


DIFFERENT_SETTINGS = [
    {"learning_rate": 1e-3, "gamma": 0.9, "clip": 0.0},
    {"learning_rate": 4e-3, "entropy_weight": 0.05, "value_clip": 0.1, "warmup": 3, "weight_decay": 0.1},
    {"learning_rate": 2e-3, "gae": 0.5, "clip": 0.1, "seed": 5, "ratio_clip": 0.05, "value_weight": 1.0, "decay": "cosine"},
]


SNAKE_SETTINGS = {"agents": 2, "rival": 0.0, "grid": 4, "net": "mlp", "policies": "independent", "width": 8}


@pytest.mark.parametrize(
    ("name", "common"),
    [
        ("cartpole", {"optim": "adamw"}),
        ("cartpole", {"optim": "adam", "activation": "relu", "layers": 1, "scale_rewards": False, "scale_values": True}),
        ("bandit", {"optim": "sgd", "momentum": 0.5}),
        pytest.param("snake", SNAKE_SETTINGS, marks=pytest.mark.system),  # slow
        pytest.param("snake", SNAKE_SETTINGS | {"net": "conv", "policies": "shared"}, marks=pytest.mark.system),
    ],
    ids=["adamw", "adam", "sgd", "snakes", "conv"],
)
def test_a_member_equals_an_ordinary_run(folder: Path, name: str, common: dict[str, Any]) -> None:
    trials = [changes | common for changes in DIFFERENT_SETTINGS]
    trained_together(name, trials)
    final_weights = []
    for number, changes in enumerate(trials):
        alone, together = trained_alone(name, changes, f"alone/{number}"), Run(f"together/{number}")
        rows_alone = {row["step"]: row for row in alone.rows()}
        assert [row["step"] for row in together.rows()] == [s for s, row in rows_alone.items() if "eval/return" in row]
        for row in together.rows():
            assert row.keys() == rows_alone[row["step"]].keys()
            for key in set(row) - {"time", "samples_per_second", "env_steps_per_second", "memory_bytes"}:
                assert row[key] == pytest.approx(rows_alone[row["step"]][key], rel=1e-3, abs=1e-5), (number, row["step"], key)
        weights, expected = load_file(together.model_path), load_file(alone.model_path)
        assert weights.keys() == expected.keys()
        for key in weights:
            assert torch.allclose(weights[key], expected[key], rtol=1e-3, atol=1e-5), (number, key)
        final_weights.append(torch.cat([t.flatten() for t in weights.values()]))
    assert all(float((final_weights[a] - final_weights[b]).abs().max()) > 1e-3 for a, b in ((0, 1), (0, 2), (1, 2))), (
        "the members differ, or the test proves nothing"
    )


def test_a_member_whose_loss_is_not_finite_fails_alone(folder: Path) -> None:
    reports = trained_together("cartpole", [{"learning_rate": 1e30}, {"learning_rate": 1e-3}])
    ends = [(value["trial"], value["outcome"]) for kind, value in reports if kind == "member_end"]
    assert ends == [(1, Outcome.OK), (0, Outcome.NAN)], "the members that finish are reported first"
    assert "lower learning_rate" in reports[-1][1]["message"] and not Path("together/0/model").exists()
    expected = load_file(trained_alone("cartpole", {"learning_rate": 1e-3}, "alone").model_path)
    assert all(torch.allclose(t, expected[k], rtol=1e-3, atol=1e-5) for k, t in load_file("together/1/model/model.safetensors").items())


def test_trials_of_one_shape_are_one_program() -> None:
    trials = members(
        "cartpole", [{"width": w, "learning_rate": r, "gamma": g} for w, r, g in ((8, 1e-3, 0.9), (16, 1e-3, 0.9), (8, 2e-3, 0.8))]
    )
    trials += members("cartpole", [{"width": 8, "epochs": 5}, {"width": 8, "seed": 7, "clip": 0.0, "decay": "cosine"}])
    assert [len(group) for group in programs(trials, VARYING, 9)] == [3, 1, 1]
    assert [len(group) for group in programs(trials, VARYING, 2)] == [2, 1, 1, 1], "a program has at most two trials"


class HostTransfers(TorchDispatchMode):
    """Records operations that copy from the host or to it."""

    def __init__(self) -> None:
        super().__init__()
        self.transfers: list[str] = []
        self.num_operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = {t.device.type for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        outputs = {t.device.type for t in tree_leaves(result) if isinstance(t, torch.Tensor)}
        is_copy = inputs and inputs != outputs and "cpu" in inputs | outputs and "meta" not in inputs & outputs
        if is_copy or "_local_scalar_dense" in str(func):
            self.transfers.append(str(func))
        self.num_operations += 1
        return result


def test_an_iteration_does_not_use_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """So it can be captured as one CUDA graph. It runs on the meta device, whose tensors have no values to read."""
    monkeypatch.setattr(CartPoleEnv, "limit", 20)
    device = torch.device("meta")
    tasks = [CartPole(**SMALL | changes) for changes in DIFFERENT_SETTINGS]
    trials = Population(tasks, [task.model() for task in tasks], torch.zeros(24, 3), device)
    trials.begin(torch.zeros(3, 8, trials.num_reset_uniform, device=device))
    inputs = torch.zeros(3, 8, trials.num_uniform, device=device), torch.zeros(3, 2, 8, 8, dtype=torch.int64, device=device)
    trials.iterate(*inputs)
    with HostTransfers() as recorder:
        trials.iterate(*inputs)
        metrics = trials.evaluate(torch.zeros(5, dtype=torch.int64, device=device))
    assert recorder.num_operations > 1000 and recorder.transfers == []
    assert {name: values.shape for name, values in metrics.items()} == {"return": (3, 5), "length": (3, 5)}


# --- generations ---------------------------------------------------------------------------------

SEARCH = ["learning_rate=1e-4..1e-2,log", "gamma=0.9..0.999"]


def begin(
    monkeypatch: pytest.MonkeyPatch, trials: int, size: int, search: list[str], worker: Callable[..., JobEnd] | None = None, **settings: Any
) -> Any:
    """Returns the tuner of a small study whose worker is this process."""
    recipe = make(find_task("cartpole"), {}, {k: v for k, v in SMALL.items() if k != "best"} | settings, {})
    space = make_space(task_settings(recipe.task), {}, search, {}, "cartpole")
    study_folder = folders.open_folder("study", "cartpole", folders.identity(recipe, space, GOAL))
    study_folder.write_tune_json(**folders.identity(recipe, space, GOAL), status="running")
    study = Study(study_folder.path, space, "max", "tpe", 0, "none", trials)
    machine = LocalMachine(HARDWARE, "cpu", [], 1)

    def plan(recipe: Recipe) -> Any:
        return plan_of(recipe.settings, HARDWARE, device="cpu", world_size=1, local_procs=1, pins={"threads": 1})

    def record(recipe: Recipe, run: Run, plan: Any) -> None:
        record_start(OpenedRun(run), recipe, plan, machine)

    monkeypatch.setattr(population, "run_workers", worker or run_in_this_process)
    context = PopulationContext(size, [], plan, record, record_end)
    return PopulationTuner(
        TunerSettings(recipe, GOAL, trials, [[]]), study_folder, study, Table(Screen(quiet=True), space, GOAL.metric), context
    )


def run_in_this_process(job: PopulationJob, plan: Any, placement: Any, screen: Any, gpus: list[str], max_trials: int = 99) -> JobEnd:
    """Does a worker's job in this process; with more than `max_trials` trials at once it reports out of memory."""
    if max(len(group) for group in programs(job.members, VARYING, job.size)) > max_trials:
        return JobEnd(Outcome.OOM, "out of memory")
    train_population(job, CPU, lambda kind, value: show_event(screen, kind, json.loads(json.dumps(value))), False)
    return JobEnd(Outcome.OK)


def journal() -> list[tuple[str, int]]:
    """Returns the journal's entries in order: trials that were proposed (operation 4) and that ended (operation 6)."""
    rows, num_proposed, entries = read_lines(Path("study/study.journal")), 0, []
    for row in rows:
        if row["op_code"] == 4:
            entries.append(("proposed", num_proposed))
            num_proposed += 1
        elif row["op_code"] == 6:
            entries.append(("ended", row["trial_id"]))
    return entries


def test_the_sampler_gets_results_after_each_generation(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuner = begin(monkeypatch, 5, 2, SEARCH)
    assert tuner.run()
    expected = [(event, n) for generation in ((0, 1), (2, 3), (4,)) for event in ("proposed", "ended") for n in generation]
    assert journal() == expected
    trials = tuner.study.trials()
    assert {t.state for t in trials} == {"finished"} and len({t.params["gamma"] for t in trials}) == 5
    best = tuner.study.best()
    rows = Run(f"study/trials/trial-{best.number:04d}").rows()
    assert best.value == max(row["eval/return"] for row in rows) and best.facts["steps"] == rows[-1]["step"]
    assert f"Trial {best.number} of study" in Path("study/best.yaml").read_text()
    for trial in trials:
        run = Run(tuner.folder.run_of(trial.number).path)
        assert run.is_finished and run.model_path.is_file() and (run.path / "model/task.json").is_file()
        assert run.read()["recipe"]["settings"]["gamma"] == trial.params["gamma"]
        assert Path(run.path / "lock").is_file() and run.status == "finished"


def test_a_finished_trial_is_never_lost(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tuner dies after it has trained one of two shapes: those trials are kept, the others are trained again."""

    def dies(job: PopulationJob, plan: Any, place: Any, screen: Any, gpus: list[str]) -> JobEnd:
        groups = list(programs(job.members, VARYING, job.size))
        assert len(groups) == 2
        run_in_this_process(replace(job, members=groups[0]), plan, place, screen, gpus)
        raise KeyboardInterrupt

    tuner = begin(monkeypatch, 4, 4, ["width=8|16", "gamma=0.9..0.999"], dies)
    with pytest.raises(KeyboardInterrupt):
        tuner.run()
    before = {t.number: t for t in tuner.study.trials()}
    finished = {n: t for n, t in before.items() if t.state == "finished"}
    assert 0 < len(finished) < 4
    files = {n: Run(f"study/trials/trial-{n:04d}").model_path.stat().st_mtime_ns for n in finished}
    assert all(t.params["width"] == before[0].params["width"] for t in finished.values())
    tuner.folder.lock.release()

    second_tuner = begin(monkeypatch, 4, 4, ["width=8|16", "gamma=0.9..0.999"])
    assert second_tuner.run()
    after = {t.number: t for t in second_tuner.study.trials()}
    assert len(after) == 4 and {t.state for t in after.values()} == {"finished"}
    assert {n: t.params for n, t in after.items()} == {n: t.params for n, t in before.items()}, "with the same parameters"
    assert {n: after[n] for n in finished} == finished
    assert {n: Run(f"study/trials/trial-{n:04d}").model_path.stat().st_mtime_ns for n in finished} == files


def test_out_of_memory_halves_the_generation(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def runs_out_of_memory(job: PopulationJob, *rest: Any) -> JobEnd:
        sizes.append(job.size)
        return run_in_this_process(job, *rest, max_trials=1)

    tuner = begin(monkeypatch, 3, 3, SEARCH, runs_out_of_memory)
    assert tuner.run() and sizes == [3, 1]
    assert [t.state for t in tuner.study.trials()] == ["finished"] * 3


def test_a_worker_that_is_always_killed_ends_the_study(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starts = []

    def killed(*job: Any) -> JobEnd:
        starts.append(1)
        return JobEnd(Outcome.INFRA, "worker 0 was killed by SIGKILL")

    with pytest.raises(Problem, match="SIGKILL"):
        begin(monkeypatch, 2, 2, SEARCH, killed).run()
    assert len(starts) == 4


def test_trials_that_cannot_be_a_population_leave_no_folders(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuner = begin(monkeypatch, 2, 2, SEARCH, lambda *job: JobEnd(Outcome.USAGE, "its own loss()"))
    with pytest.raises(NoPopulation, match="its own loss"):
        tuner.run()
    assert not list(Path("study/trials").iterdir()) and len(tuner.study.unfinished()) == 2


def test_steps_end_with_a_collection(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Problem, match=r"a collection takes 8 steps\. Write steps=16"):
        begin(monkeypatch, 2, 2, SEARCH, steps=20).run()
    shutil.rmtree("study")
    tuner = begin(monkeypatch, 2, 2, SEARCH, steps=16)
    assert tuner.run() and {t.facts["steps"] for t in tuner.study.trials()} == {16}


@pytest.mark.system  # slow
@pytest.mark.timeout(1200)
def test_a_killed_population_is_resumed(folder: Path) -> None:
    """kill -9 of the tuner in the second of three generations."""
    words = ["cartpole", "epochs=40", "envs=64", "horizon=16", "global_batch=256", "eval_every=2ep", "eval_episodes=3", "best=return"]
    words += ["--search", SEARCH[0], "--search", SEARCH[1], "--trials", "6", "--population", "2", "--name", "killed"]
    tuner = subprocess.Popen([*COMMAND, "tune", *words, "-q"], env=environment())
    wait_until(lambda: list(read_lines(Path("runs/killed/trials/trial-0003/metrics.jsonl"))), "the second generation", 500, process=tuner)
    tuner.send_signal(signal.SIGKILL)
    assert tuner.wait() == -9
    run_files = {n: Path(f"runs/killed/trials/trial-{n:04d}/run.json").read_bytes() for n in (0, 1)}
    assert all(json.loads(text)["status"] == "finished" for text in run_files.values())
    result = json.loads(run_ok("tune", *words, "--json"))
    assert [t["state"] for t in result["trials"]] == ["finished"] * 6
    assert {n: Path(f"runs/killed/trials/trial-{n:04d}/run.json").read_bytes() for n in (0, 1)} == run_files
    assert f"return {result['best']['value']:.4g}" in run_ok("eval", f"killed/trials/trial-{result['best']['trial']:04d}")


# --- when populations are used -------------------------------------------------------------------------------------


def chosen(
    option: str, *search: str, task: str = "cartpole", device: str = "cuda", shared_out: bool = False, **settings: str
) -> tuple[int, str]:
    recipe = make(find_task(task), {}, settings, {})
    return population.choose_size(
        option, recipe, make_space(task_settings(recipe.task), {}, list(search), {}, task), 50, device, shared_out
    )


def test_auto_uses_a_population_where_it_can() -> None:
    assert chosen("auto", *SEARCH, "seed=0..9")[0] == 25
    assert "trials with another width cannot be trained at once" in chosen("auto", *SEARCH, "width=32|64")[1]
    assert "no GPU" in chosen("auto", *SEARCH, device="cpu")[1]
    assert "kl_stop=0" in chosen("auto", *SEARCH, kl_stop="0.1")[1]
    for size, _ in (
        chosen("auto", *SEARCH, "width=32|64"), chosen("auto", *SEARCH, device="cpu"), chosen("auto", *SEARCH, shared_out=True),
        chosen("off", *SEARCH), chosen("auto", "hidden=8..64", task="digits"),
    ):  # fmt: skip
        assert size == 0
    assert chosen("8", *SEARCH, "width=32|64", device="cpu")[0] == 8, "shapes may differ on request"


@pytest.mark.parametrize(
    ("option", "search", "given", "reason"),
    [
        ("many", SEARCH, {}, "write the number of trials at once"),
        ("0", SEARCH, {}, "write the number of trials at once"),
        ("4", ["kl_stop=0..0.1"], {}, "kl_stop=0"),
        ("4", SEARCH, {"kl_stop": "0.05"}, "kl_stop=0"),
        ("4", ["net=mlp|lstm"], {}, "an LSTM is not batched"),
        ("4", SEARCH, {"task": "snake"}, "rival=0"),
        ("4", SEARCH, {"precision": "bf16"}, "precision=fp32 or tf32"),
        ("4", SEARCH, {"eval_episodes": "0"}, "eval_episodes=0 evaluates nothing"),
        ("4", ["hidden=8..64"], {"task": "digits"}, "no task whose trials can be one program"),
    ],
)
def test_impossible_populations_name_the_reason(option: str, search: list[str], given: dict[str, Any], reason: str) -> None:
    with pytest.raises(Problem) as problem:
        chosen(option, *search, **given)
    assert reason in str(problem.value)


def test_an_impossible_task_names_the_reason() -> None:
    class OwnLoss(CartPole):
        def loss(self, model: Any, batch: Any) -> Any:
            return super().loss(model, batch)

    class ImpureSource(CartPole):
        def rollout(self, env: Env, *rest: Any) -> Any:
            source = super().rollout(env, *rest)
            source.pure = False
            return source

    for task, reason in ((OwnLoss(), "its own loss()"), (ImpureSource(), "functions of tensors alone"), (Snake(), "rival=0")):
        with pytest.raises(Problem, match=reason.replace("(", r"\(").replace(")", r"\)")):
            check_task(task)
    check_task(CartPole())
    check_task(Snake(rival=0.0))


def test_the_command_line_names_tasks_that_can_be_populations(folder: Path) -> None:
    message = expect_error("tune", "digits", "--search", "hidden=8..64", "--population", "4")
    assert "bandit, cartpole, snake" in message and "--population off" in message
    assert not Path("runs").exists(), "a mistake writes nothing"
