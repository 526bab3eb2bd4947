"""`--on local`: the run's record, its verbs, its secrets, its exit codes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import yaml

from drivetrain.runs import Run
from tests.command import COMMAND, environment, expect_error, run_drivetrain, run_ok, write_task
from tests.waiting import wait_until

FAST = ("plan.threads=1", "plan.compile=off")
SECRETS = {"WANDB_API_KEY": "planted-wandb", "HF_TOKEN": "planted-hf", "MY_SECRET": "planted-own"}
SEES_SECRETS = (
    "return F.cross",
    "import os; print('secrets:', all(os.environ.get(k) for k in ('HF_TOKEN', 'MY_SECRET')), flush=True)\n        return F.cross",
)
SLOW = ("return F.cross", "import time; time.sleep(0.05 * model.training)\n        return F.cross")


def test_a_run_gets_its_secrets_and_no_file_does(folder: Path) -> None:
    write_task(change=SEES_SECRETS)
    Path("drivetrain.yaml").write_text(
        yaml.safe_dump({"targets": {"here": {"kind": "local", "secrets": ["MY_SECRET"], "env": {"COLOUR": "blue"}}}})
    )
    for words in (["init", "-q"], ["remote", "add", "origin", "https://me:planted-git@example.org/x.git"]):
        subprocess.run(["git", *words], check=True)
    words = ("train", "small.py", "steps=2", *FAST, "--on", "here", "--name", "one")
    assert "planted" not in run_ok(*words, "--dry-run", **SECRETS)
    output = run_ok(*words, "--wait", **SECRETS)
    assert "secrets: True" in output
    assert "done    2 steps" in output
    done = subprocess.run(["grep", "-rlE", "planted-(wandb|hf|own|git)", "runs"], capture_output=True, text=True)
    assert done.stdout == ""
    assert "finished already" in run_ok(*words, **SECRETS)
    record = json.loads(Path("runs/one/target.json").read_text())
    assert (record["phase"], record["exit_code"], record["secrets"]) == ("ended", 0, ["MY_SECRET", "WANDB_API_KEY", "HF_TOKEN"])
    assert any(line.startswith("torch==") for line in record["environment"])


def test_stop_and_resume_of_a_run_in_the_background(folder: Path) -> None:
    write_task(change=SLOW)
    run_ok("train", "small.py", "steps=600", *FAST, "--on", "local", "--name", "long")
    wait_until(lambda: Run("runs/long").last_row().get("step", 0) >= 3, "steps")
    assert "running on local" in run_ok("status", "long")
    assert "is running on local already" in run_ok("train", "small.py", "steps=600", *FAST, "--on", "local", "--name", "long")
    assert "stop it first" in expect_error("resume", "long")
    assert "stopped on local (preempted)" in run_ok("stop", "long")
    stopped_at = Run("runs/long").last_row()["step"]
    assert stopped_at < 600
    Path("small.py").unlink()  # the run has its own copy
    output = run_ok("resume", "long", f"steps={stopped_at + 10}", "--wait")
    assert f"of {stopped_at + 10}" in output
    assert [row["step"] for row in Run("runs/long").rows()] == list(range(1, stopped_at + 11))
    assert "finished on local" in run_ok("status", "long")


def test_the_end_of_a_run_is_the_end_of_the_command(folder: Path) -> None:
    write_task(change=("return F.cross", "raise ValueError('wrong')\n        return F.cross"))
    done = run_drivetrain("train", "small.py", *FAST, "--on", "local", "--wait", "--name", "wrong")
    assert done.returncode == 1
    assert "ValueError: wrong" in done.stdout
    assert "user-error on local" in run_ok("status", "wrong")
    assert "has no setting 'hiden'" in expect_error("train", "small.py", "hiden=3", "--on", "local", "--name", "typo")
    assert not Path("runs/typo").exists()


def test_stop_of_a_run_in_the_foreground(folder: Path) -> None:
    write_task(change=SLOW)
    with subprocess.Popen(
        [*COMMAND, "train", "small.py", "steps=600", *FAST, "--name", "fore"], stdout=subprocess.DEVNULL, env=environment()
    ) as command:
        wait_until(
            lambda: Path("runs/fore/run.json").is_file() and Run("runs/fore").last_row().get("step", 0) >= 3, "steps", process=command
        )
        assert "fore stopped (preempted)" in run_ok("stop", "fore")
        assert command.wait(60) == 200
    assert "fore does not run (preempted)" in run_ok("stop", "fore")
    assert "there is no run" in expect_error("stop", "nix")
    assert "is not on a target" in expect_error("pull", "fore")


def test_two_commands_that_submit_one_name(folder: Path) -> None:
    """One of them starts the run; the other says so and changes nothing."""
    write_task(change=SLOW)
    words = [*COMMAND, "train", "small.py", "steps=400", *FAST, "--on", "local", "--name", "one"]
    both = [subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment()) for _ in range(2)]
    outputs = [command.communicate(timeout=120)[0] for command in both]
    assert sum("running on local   next" in output for output in outputs) == 1, outputs
    assert "running on local" in run_ok("status", "one")
    run_ok("stop", "one")


def test_a_damaged_record(folder: Path) -> None:
    Path("runs/x").mkdir(parents=True)
    Path("runs/x/target.json").write_text("")
    assert "drivetrain runs rm x" in expect_error("status", "x")
    run_ok("runs", "rm", "x", "--yes")
    assert not Path("runs/x").exists()
