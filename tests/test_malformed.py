"""Malformed commands, recipes and plans end with exit code 2 and one or two lines that name the fix, and write nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drivetrain import recipe
from drivetrain.cli import run_command
from drivetrain.plan import Plan
from tests.command import write_task

BILLION_LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{key}: &{key} [*{alias}, *{alias}, *{alias}, *{alias}, *{alias}, *{alias}, *{alias}, *{alias}, *{alias}]\n"
    for alias, key in zip("abcdefgh", "bcdefghi", strict=True)
)
DEEP = 5000  # levels of nesting, far more than are allowed

# command line -> words of its message
COMMANDS: list[tuple[str, str]] = [
    ("train small.py --name ../x", "'../x' is no name"),
    ("train small.py --name /tmp/x", "a folder elsewhere is --run-dir"),
    ("train small.py --name a//b", "is no name"),
    ("train small.py --name .hidden", "is no name"),
    ("train small.py --name ..", "is no name"),
    ("train small.py --name=-x", "is no name"),
    (f"train small.py --name {'n' * 300}", "has 300 characters: write a name of at most"),
    ("tune small.py --name ../x --search hidden=8|16", "'../x' is no name"),
    ("train small.py --name x --run-dir y", "give one"),
    ("train small.py --run-dir hdfs:///run", "hdfs addresses"),
    ("train small.py --run-dir https://host/run", "https addresses"),
    ("tune small.py --run-dir s3://bucket/run --search hidden=8|16", "s3 addresses"),
    ("chaos small.py --keep s3://bucket/x", "s3 addresses"),
    ("export none --out s3://bucket/x", "s3 addresses"),
    ("play snake --out s3://bucket/x", "s3 addresses"),
    ("train small.py --restarts -1", "--restarts: -1: write a whole number of 0 or more"),
    ("train small.py --profile -1", "--profile: -1: write a whole number of 0 or more"),
    ("train small.py --procs 0", "--procs: 0: write a whole number of 1 to"),
    ("train small.py --procs 1000000000", "write a whole number of 1 to"),
    ("train small.py --node-rank -1", "write a whole number of 0 to"),
    ("train small.py --nodes 0", "write a number of machines"),
    ("train small.py --nodes 999999999999", "write a number of machines"),
    ("train small.py --time-limit -4h", "--time-limit: expected one argument"),
    ("train small.py --time-limit 0s", "write a time"),
    (f"train small.py --time-limit {'9' * 400}s", "write a time"),
    ("train small.py --hang-after 10", "write a time"),
    ("tune small.py --procs 0 --search hidden=8|16", "--procs: 0: write a whole number of 1"),
    ("tune small.py --jobs 0 --search hidden=8|16", "--jobs: 0"),
    ("tune small.py --trials 0 --search hidden=8|16", "--trials: 0"),
    ("chaos small.py --faults -1", "--faults: -1: write a whole number of 0 or more"),
    ("chaos small.py --steps 0", "--steps: 0"),
    ("chaos small.py --hang-after never", "write a time"),
    ("chaos small.py --schedule nonsense", "write kill@POINT:COUNT"),
    ("chaos small.py --kinds nonsense", "there are"),
    ("verify-resume small.py --steps 1", "--steps: 1: write a whole number of 2"),
    ("play snake --port 99999", "write a whole number of 0 to 65535"),
    ("logs none --rank -1", "--rank: -1"),
    ("train small.py learning_rate=inf", "learning_rate is a number that is finite"),
    ("train small.py learning_rate=nan", "learning_rate is a number that is finite"),
    ("train small.py weight_decay=1e999", "weight_decay is a number that is finite"),
    ("train small.py epochs=1e999", "epochs is a whole number"),
    (f"train small.py hidden={10**30}", "hidden is a whole number of at most 63 bits"),
    (f"train small.py hidden={'9' * 5000}", "hidden is a whole number"),
    (f"train small.py save_every={'9' * 400}", "save_every is a number of steps"),
    (f"train small.py hidden={'[' * DEEP}", "hidden is a whole number"),
    (f"train small.py {'k' * DEEP}=1", "has no setting"),
    ("train small.py =5", "is no setting"),
    ("train small.py patience=3", "needs a metric to watch"),
    ("train small.py patience=3 --dry-run", "needs a metric to watch"),
    ("plan small.py patience=3", "needs a metric to watch"),
    ("train small.py warmup=10min --dry-run", "give steps or epochs"),
    ("train small.py start=missing --dry-run", "missing"),
    ("plan small.py start=none.safetensors", "there is no such file"),
    ("train small.py --dry-run --run-dir full", "not empty and not a run"),
    ("train small.py --dry-run --nodes 2", "needs --rendezvous"),
    ("train small.py --dry-run --nodes 2 --rendezvous here", "write HOST:PORT"),
    ("train small.py plan.threads=1000000000", "plan.threads='1000000000' does not fit: it is a whole number of 1 to 1024"),
    ("train small.py plan.threads=0 --dry-run", "whole number of 1"),
    (f"train small.py plan.micro_batch={10**30}", "plan.micro_batch"),
    ("train small.py plan.workers=100000", "0 to 256"),
    ("train small.py plan.env=x", "no choice 'env' to pin"),
    ("train \x1b[2Jsmall", "there is no task"),
    ("status ../../x", "x"),
]  # fmt: skip

RECIPES: list[tuple[str, str]] = [
    ("task: small.py\nname: ../../x", "'../../x' is no name"),
    ("task: small.py\nname: /etc/x", "is no name"),
    ("task: small.py\nname: 5", "name is text, not 5"),
    ("task: small.py\nname: [a]", "name is text"),
    ("task: small.py\nname:", "name is text"),
    ("task: 5", "is no recipe"),
    ("task: small.py\n5: 3", "the key '5' is no name of a setting"),
    ("task: small.py\nepochs: 2\nepochs: 3", "line 3: not valid YAML: the key 'epochs' stands there twice"),
    ("task: small.py\nplan: {micro_batch: 5, micro_batch: 6}", "'micro_batch' stands there twice"),
    ("task: small.py\nplan: 5", "plan is a mapping"),
    ("task: small.py\nplan: {5: 6}", "the plan has no choice"),
    ("task: small.py\nplan: {threads: 1000000}", "1 to 1024"),
    ("task: small.py\nstages: 5", "stages is a list"),
    ("task: small.py\nstages: [5]", "stages is a list"),
    ("task: small.py\nstages: [{name: ../x}]", "is no name"),
    ("task: small.py\nstages: [{name: a/b}]", "without /"),
    ("task: small.py\nstages: [{name: 5}]", "name is text"),
    ("task: small.py\nstages: [{task: 5}]", "task is text"),
    ("task: small.py\nstages: [{plan: 5}]", "plan is a mapping"),
    ("task: small.py\nstages: [{5: 5}]", "no name of a setting"),
    ("task: small.py\nhidden: " + "[" * DEEP + "]" * DEEP, "nested deeper than 50 levels"),
    ("task: small.py\nhidden: " + "{a: " * DEEP + "}" * DEEP, "nested deeper than 50 levels"),
    ("task: small.py\nhidden: &a [*a]", "is inside the value that it names"),
    (BILLION_LAUGHS + "task: small.py\nhidden: *i", "more than 20,000 values"),
    ("task: small.py\nhidden: " + "9" * 5000, "not valid YAML"),
    ("task: small.py\nhidden: 2024-99-99", "not valid YAML"),
    ("task: small.py\nhidden: 2024-01-01", "hidden is a whole number"),
    ("task: small.py\nhidden: {a: 1}", "hidden is a whole number"),
    ("task: small.py\nlearning_rate: .inf", "that is finite"),
    ("task: small.py\nlearning_rate: .nan", "that is finite"),
    ("task: small.py\n? [a]\n: 3", "not valid YAML"),
    ("task: !!python/object/apply:os.system ['true']", "not valid YAML"),
    ("- task: small.py", "is no recipe"),
    ("", "is no recipe"),
    ("task: small.py\n# " + "x" * 300_000, "larger than 256 KiB"),
]

PLANS: list[tuple[Any, str]] = [
    ([], "holds a list"),
    (None, "holds a NoneType"),
    (5, "holds a int"),
    ({}, "is no file that --plan knows"),
    ({"plan": {}}, "is no complete plan"),
    ({"plan": []}, "is no file that --plan knows"),
    ({"env": {"PYTHONPATH": "/tmp/x"}}, "'PYTHONPATH' is no variable that a plan may set"),
    ({"env": {"OMP_NUM_THREADS": 3}}, "OMP_NUM_THREADS: '3' does not fit"),
    ({"env": None}, "plan.env: None does not fit"),
    ({"threads": 10**9}, "plan.threads: 1000000000 does not fit: it is a whole number of 1 to 1024"),
    ({"threads": "many"}, "plan.threads"),
    ({"threads": float("nan")}, "plan.threads: nan does not fit"),
    ({"threads": None}, "plan.threads: None does not fit"),
    ({"world_size": 10**400}, "plan.world_size"),
    ({"world_size": 10**12}, "plan.world_size"),
    ({"world_size": -1}, "plan.world_size: -1 does not fit"),
    ({"nodes": 0}, "plan.nodes: 0 does not fit"),
    ({"micro_batch": [1]}, "plan.micro_batch: [1] does not fit"),
    ({"micro_batch": {"a": 1}}, "plan.micro_batch"),
    ({"device": "../../x"}, "plan.device: '../../x' does not fit: it is one of cuda, cpu, mps"),
    ({"backend": "mpi"}, "plan.backend"),
    ({"precision": 5}, "plan.precision"),
    ({"deterministic": "perhaps"}, "true or false"),
    ({"workers": 10**6}, "0 to 256"),
    ({"reasons": {"a": 1}}, "plan.reasons"),
    ({"reasons": []}, "plan.reasons"),
    ({"rejected": [1]}, "plan.rejected"),
    ({"predicted": {"memory_bytes": 5}}, "plan.predicted"),
    ({"predicted": {"memory_bytes": {"a": "b"}, "seconds_by_part": {}, "usable_bytes": 1, "step_seconds": 1, "samples_per_second": 1}}, "predicted"),
    ({"format": 7}, "a plan of format 7"),
    ('{"a": ' * DEEP + "1" + "}" * DEEP, "nested deeper"),
    ("[" * 100_000, "nested deeper"),
    ('{"strategy": "single", "strategy": "ddp"}', "'strategy' stands there twice"),
    ("{", "is not valid JSON"),
    ("\x00", "is not valid JSON"),
]  # fmt: skip


@pytest.fixture
def refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., None]:
    write_task()
    Path("full").mkdir()
    Path("full/file").touch()

    def run(words: list[str], message: str) -> None:
        before = sorted(folder.parent.rglob("*"))
        code = run_command(words)
        output = capsys.readouterr()
        assert code == 2, (code, output)
        assert "Traceback" not in output.err and len(output.err.splitlines()) <= 3 and len(output.err) < 1500, output.err[:3000]
        assert message in output.err, output.err
        assert output.err.replace("\n", "").isprintable()
        assert sorted(folder.parent.rglob("*")) == before, "it must write nothing"

    return run


@pytest.mark.parametrize(("words", "message"), COMMANDS, ids=[words[:60] for words, _ in COMMANDS])
def test_a_malformed_command_is_refused(words: str, message: str, refused: Callable[..., None]) -> None:
    refused(words.split(), message)


@pytest.mark.parametrize(("text", "message"), RECIPES, ids=[text[:60] for text, _ in RECIPES])
def test_a_malformed_recipe_is_refused(text: str, message: str, refused: Callable[..., None]) -> None:
    Path("r.yaml").write_text(text)
    refused(["train", "r.yaml", "--dry-run"], message)


@pytest.mark.parametrize(("values", "message"), PLANS, ids=[str(values)[:60] for values, _ in PLANS])
def test_a_malformed_plan_is_refused(values: Any, message: str, refused: Callable[..., None]) -> None:
    if isinstance(values, dict) and values and "plan" not in values:
        values = Plan(global_batch=100, micro_batch=100, eval_micro_batch=100).to_json() | values
    Path("p.json").write_text(values if isinstance(values, str) else json.dumps(values))
    refused(["train", "small.py", "--plan", "p.json", "--dry-run"], message)


def test_a_setting_whose_default_is_infinite_takes_infinity(folder: Path) -> None:
    write_task(change=("hidden: int = 32", "limit: float = float('inf')\n    hidden: int = 32"))
    write_task("plain.py", change=("hidden: int = 32", "limit: float = 1e999\n    hidden: int = 32"))
    assert recipe.load("plain.py", ["limit=inf"])[0].settings["limit"] == float("inf")
    assert recipe.load("plain.py", ["limit=5"])[0].settings["limit"] == 5.0


def test_valid_names_and_aliases_are_accepted(folder: Path) -> None:
    write_task()
    Path("r.yaml").write_text(
        "task: small.py\nname: night 3/ablation-2.1_b\nplan: &p {micro_batch: 5}\nstages:\n- {name: a, plan: *p}\n- {name: b, plan: {<<: *p, threads: 1}}\n"
    )
    assert [r.name for r in recipe.load("r.yaml", [])] == ["night 3/ablation-2.1_b/1-a", "night 3/ablation-2.1_b/2-b"]
    assert recipe.load("r.yaml", [])[1].pins == {"micro_batch": 5, "threads": 1}
