"""Targets from files: which file wins, checked keys, secrets that are refused."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from drivetrain.confidential import looks_secret
from drivetrain.outcomes import Problem
from drivetrain.targets import environment
from drivetrain.targets.config import KINDS, all_targets, find_target, make_target, settings_help
from drivetrain.targets.environment import lock_environment, torch_backend
from drivetrain.task_ref import find_task
from tests.command import expect_error, run_ok, write_task


def write(path: str, **targets: object) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(yaml.safe_dump({"targets": targets}))


def test_the_projects_file_wins_and_is_found_from_below(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
    write("config/drivetrain/targets.yaml", box={"kind": "ssh", "hosts": ["user-box"]}, other={"kind": "local"})
    write("drivetrain.yaml", box={"kind": "ssh", "hosts": ["project-box"]})
    (folder / "below").mkdir()
    monkeypatch.chdir(folder / "below")
    assert find_target("box").settings.hosts == ["project-box"]  # type: ignore[attr-defined]
    assert find_target("other").kind == "local"
    assert [target.name for target in all_targets()] == ["box", "other", *(kind for kind in KINDS if kind != "ssh")]


def test_every_kind_is_a_target_of_its_own_name(folder: Path) -> None:
    for kind in KINDS:
        assert find_target(kind).kind == kind
    assert find_target("slurm").settings.grace == 120  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"kind": "slrum"}, f"needs a kind: one of {', '.join(KINDS)}; did you mean slurm?"),
        ({}, "needs a kind"),
        ({"kind": "slurm", "partion": "gpu"}, "unknown key 'partion'; did you mean partition?"),
        ({"kind": "slurm", "gpus": "many"}, "box.gpus is 'many', not a whole number"),
        ({"kind": "slurm", "prologue": ["module load\nrm -rf /"]}, "contains a line break"),
        ({"kind": "ssh", "hosts": ["a"], "env": {"HF_TOKEN": "hf_" + "x" * 30}}, "write only its name: secrets: [HF_TOKEN]"),
        ({"kind": "ssh", "hosts": ["a"], "env": {"MY_TOKEN": "abc"}}, "write only its name: secrets: [MY_TOKEN]"),
        ({"kind": "ssh", "hosts": ["a"], "env": ["X"]}, "is a mapping of environment variables"),
        ({"kind": "slurm", "time": "24"}, "write a time, such as 24h"),
    ],
)
def test_wrong_entries_name_the_fix(entry: dict[str, object], message: str, folder: Path) -> None:
    write("drivetrain.yaml", box=entry)
    assert message in expect_error("train", "digits", "--on", "box", "--dry-run")


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("git clone https://me:hunter2@host/x.git", "NAME"),
        ("export WANDB_API_KEY=hunter2; module load y", "WANDB_API_KEY"),
        ("--env=HF_TOKEN=hunter2", "HF_TOKEN"),
        ("SetEnv=HF_TOKEN=hunter2", "HF_TOKEN"),
        ("--export=ALL,MY_TOKEN=hunter2", "MY_TOKEN"),
        ("huggingface-cli login --token hf_hunter2" + "x" * 30, "token"),
        ("echo hf_hunter2" + "x" * 30, "NAME"),
        ("login hf_hunter2" + "x" * 30 + " now", "NAME"),
        ('export DB_PASSWORD="hunter2 and more"', "DB_PASSWORD"),
        ("export DB_PASSWORD='$hunter2'", "DB_PASSWORD"),
        ("DB_PASSWORD=12345678 hunter2", "DB_PASSWORD"),
        ("--wandb-api-key=hunter2", "wandb_api_key"),
    ],
)
@pytest.mark.parametrize(
    "place", [("slurm", "prologue"), ("slurm", "sbatch"), ("ssh", "options"), ("docker", "options"), ("slurm", "partition")]
)
def test_no_entry_may_hold_a_secret(place: tuple[str, str], line: str, name: str, folder: Path) -> None:
    kind, key = place
    with pytest.raises(Problem, match=rf"box\.{key} contains a secret.* secrets: \[{name}\]") as caught:
        make_target("box", kind, {key: line if key == "partition" else ["--first", line]}, Path("drivetrain.yaml"))
    assert "hunter2" not in str(caught.value)
    with pytest.raises(Problem, match=r"box\.env\.NOTE (is|contains) a secret"):
        make_target("box", kind, {"env": {"NOTE": line}}, Path("drivetrain.yaml"))


@pytest.mark.parametrize(
    "line",
    [
        "export WANDB_API_KEY=$(cat ~/.wandb key)", 'export HF_TOKEN="$MY_TOKEN"', "export HF_TOKEN=${MY_TOKEN}", "export MAX_TOKENS=128", "unset HF_TOKEN",
        "PasswordAuthentication=no", "source venv/bin/activate", "--exclusive", "export HF_TOKEN=", "--gres=gpu:a100:4", "http://proxy:3128",
    ],
)  # fmt: skip
def test_lines_that_hold_no_secret(line: str) -> None:
    make_target("box", "slurm", {"prologue": [line], "env": {"NOTE": line}}, Path("drivetrain.yaml"))


def test_unknown_targets_and_files_of_another_shape(folder: Path) -> None:
    assert "there is no target 'slrum'; did you mean slurm?" in expect_error("train", "digits", "--on", "slrum")
    Path("drivetrain.yaml").write_text("targets: [a]\n")
    assert "has no targets: write `targets:`" in expect_error("train", "digits", "--on", "box")
    Path("drivetrain.yaml").write_text("targets: {box: {kind: ssh}}\n")
    assert "has no hosts: write `hosts: [HOST]`" in expect_error("train", "digits", "--on", "box")


def test_a_wrong_entry_hides_no_other(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
    wrong = {
        "typo": {"kind": "slrum"},
        "list": ["a"],
        "odd": {"kind": ["ssh"]},
        "../x": {"kind": "local"},
        "key": {"kind": "slurm", "partion": "x"},
    }
    write("drivetrain.yaml", **wrong, good={"kind": "local"})
    write("config/drivetrain/targets.yaml", other={"kind": "local"})
    environment = {"XDG_CONFIG_HOME": str(folder / "config")}
    rows = {row["name"]: row for row in json.loads(run_ok("targets", "--json", **environment))}
    assert [name for name, row in rows.items() if row["ok"]][:2] == ["good", "other"]
    for name, message in (
        ("typo", "did you mean slurm?"),
        ("list", "needs a kind"),
        ("odd", "needs a kind"),
        ("key", "did you mean partition?"),
    ):
        assert message in rows[name]["text"]
    assert not rows["../x"]["ok"]
    assert find_target("good").kind == "local"
    Path("drivetrain.yaml").write_text("targets: [a]\n")
    rows = {row["name"]: row for row in json.loads(run_ok("targets", "--json", **environment))}
    assert rows["other"]["ok"] and "has no targets: write" in rows["drivetrain.yaml"]["text"]


def test_flags_that_do_not_go_with_a_target(folder: Path) -> None:
    assert "leave out --rendezvous" in expect_error("train", "digits", "--on", "local", "--rendezvous", "a:1")
    assert "not --run-dir" in expect_error("train", "digits", "--on", "local", "--run-dir", "x")
    assert "--smoke tries a task on this machine" in expect_error("train", "digits", "--on", "local", "--smoke")
    assert "addresses are not supported" in expect_error("train", "digits", "--run-dir", "hdfs://bucket/run")
    write("drivetrain.yaml", box={"kind": "ssh", "hosts": ["a"], "secrets": ["NOT_SET_ANYWHERE"]})
    assert "NOT_SET_ANYWHERE is not set here" in expect_error("train", "digits", "--on", "box", "--dry-run")
    write("drivetrain.yaml", box={"kind": "ssh", "hosts": ["a"]})
    assert "has 1 host (a)" in expect_error("train", "digits", "--on", "box", "--nodes", "2", "--dry-run")
    assert "is on this machine, not on box" in expect_error("train", "digits", "start=runs/x", "--on", "box", "--dry-run")


# --- secrets -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("db_password", "hunter2"), ("api_key", "abc"), ("api-key", "abc"), ("hf_token", "x y"), ("token", "abc"), ("db_password", "12345678"), ("data.token", "abc"), ("secret", "s"), ("note", "https://me:pw@host/x.git"),
        ("note", "hf_" + "a" * 30), ("note", "ghp_" + "b" * 36), ("note", "AKIA" + "C" * 16),
    ],
)  # fmt: skip
def test_secrets_are_recognised(name: str, value: str) -> None:
    assert looks_secret(name, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("pad_token", "<pad>"),
        ("max_tokens", "128"),
        ("passes", "4"),
        ("password", ""),
        ("token_dropout", "0.1"),
        ("data", "https://host:8080/x"),
        ("secret", "false"),
        ("token", "128"),
        ("first_pass", "1"),
        ("eos_token", "</s>"),
    ],
)
def test_ordinary_settings_are_no_secrets(name: str, value: str) -> None:
    assert not looks_secret(name, value)


def test_a_secret_as_a_setting_is_refused_everywhere(folder: Path) -> None:
    write_task(change=("hidden: int = 32", 'db_password: str = ""\n    hidden: int = 32'))
    for words in ([], ["--on", "local"], ["--on", "slurm", "--dry-run"]):
        message = expect_error("train", "small.py", "db_password=hunter2", *words)
        assert "db_password looks like a secret" in message and "hunter2" not in message
    Path("recipe.yaml").write_text("task: small.py\ndb_password: hunter2\n")
    assert "looks like a secret" in expect_error("train", "recipe.yaml")
    assert not Path("runs").exists()


# --- environments ------------------------------------------------------------------------------


def test_the_lock_has_what_the_code_imports_and_no_more(folder: Path) -> None:
    write_task(text="import yaml, gymnasium.spaces\n" + Path(write_task()).read_text())
    names = {line.partition("==")[0] for line in lock_environment([find_task("small.py")]).requirements}
    assert {"torch", "numpy", "pyyaml", "safetensors", "packaging"} <= names
    assert "gymnasium" in names, "an import of the task"
    assert not {"pytest", "ruff", "transformers", "optuna"} & names
    assert "transformers" in {line.partition("==")[0] for line in lock_environment([find_task("lora")]).requirements}


def test_the_lock_of_a_source_folder_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    requirements = [Requirement(text) for text in metadata.requires("drivetrain") or ()]
    assert sorted(environment.CORE) == sorted(requirement.name for requirement in requirements if "extra" not in str(requirement.marker))
    locked = lock_environment([find_task("digits")])
    monkeypatch.setattr(environment, "_own_requirements", lambda: environment.CORE)
    assert lock_environment([find_task("digits")]) == locked


def test_the_build_of_torch_fits_the_driver() -> None:
    assert torch_backend([]) == "cpu"
    assert torch_backend(["580.65.06"]) == "cu130"
    assert torch_backend(["580.65.06", "570.1"]) == "cu126"
    assert torch_backend(["550.54"]) == torch_backend(["535.183.01"]) == torch_backend(["525.60"]) == "cu126", "there is no older build"
    with pytest.raises(Problem, match=r"older than torch needs \(525\)"):
        torch_backend(["470.1"])


def test_the_keys_of_each_kind_are_explained(folder: Path) -> None:
    for kind in KINDS:
        assert all(doc for _, doc in settings_help(kind)), kind
    assert "prologue" in run_ok("targets", "slurm")
    assert "there is no kind" in expect_error("targets", "nix")
