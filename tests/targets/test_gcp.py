"""Machines of Google Cloud, on stand-ins for gcloud, terraform and ssh (cloud_programs.py): consent, runs, preemption."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

import drivetrain.targets.gcp
from drivetrain.targets.gcp import deployment
from tests.command import run_drivetrain, write_task
from tests.targets.stand_in_cloud import PROGRAMS, StandInCloud

PACKAGE = Path(drivetrain.targets.gcp.__file__).parent


# --- consent -----------------------------------------------------------------------------------


def test_no_code_starts_machines_without_a_consent() -> None:
    """`terraform apply`, the start of machines and builds take a Consent, and every caller hands on one that it got or asked for."""
    words, callers = [], []
    for path in (*PACKAGE.glob("*.py"), *PACKAGE.with_name("image").glob("*.py")):
        tree = ast.parse(path.read_text())
        constants = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        words += [
            (path.stem, value)
            for value in constants
            if value in ("apply", "start", "resume", "reset", "simulate-maintenance-event", "submit")
        ]
        for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
            annotations = {argument.arg: ast.unparse(argument.annotation) for argument in function.args.args if argument.annotation}
            for node in ast.walk(function):
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Attribute)
                    and node.func.attr in ("apply", "start", "submit_build")
                    and node.args
                ):
                    callers.append((path.stem, function.name, node.func.attr))
                    assert isinstance(node.args[0], ast.Name) and node.args[0].id == "consent"
                    assert annotations.get("consent") == "Consent" or "consent = self.agree(" in ast.unparse(function)
    assert sorted(words) == [("cloud", "submit"), ("deployment", "apply"), ("deployment", "start"), ("up", "apply")], (
        "up has the word in render_up, which runs nothing"
    )
    assert sorted(callers) == [("build", "cloud_build", "submit_build"), ("up", "_apply", "apply"), ("up", "run", "start")]
    with pytest.raises(TypeError, match="consent"):
        deployment.Deployment("demo-project", "gcp").apply(None, print)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="consent"):
        deployment.Deployment("demo-project", "gcp").start(None, [])  # type: ignore[arg-type]


def test_up_shows_the_price_and_starts_nothing_without_consent(cloud: StandInCloud) -> None:
    output = cloud.run("up", "gcp", code=2)
    assert "2 x n1-standard-4 with 1 nvidia-tesla-t4 in us-central1-a" in output
    assert "$   1.08 an hour" in output and "read 2026-11-19" in output
    assert "repeat the command with --yes" in output
    assert cloud.applied == 0 and not cloud.resources


def test_a_dry_run_starts_no_program(cloud: StandInCloud) -> None:
    output = cloud.run("up", "gcp", "--dry-run", "--max-cost", "20")
    assert '"max_run_minutes": 1087' in output and "at most $20.00 in 18.1 hours" in output
    assert not cloud.calls and not cloud.state.exists()


# --- up ----------------------------------------------------------------------------------------


def test_up_and_down(cloud: StandInCloud) -> None:
    output = cloud.run("up", "gcp", "--yes")
    assert "dt-master-gcp: packages" in output and "gcp is up: dt-master-gcp, dt-worker-gcp" in output
    assert {entry["name"] for entry in cloud.resources if entry["kind"] == "machine"} == {"dt-master-gcp", "dt-worker-gcp"}
    num_calls = len(cloud.calls)
    assert "gcp is up" in cloud.run("up", "gcp")
    assert [call[0] for call in cloud.calls[num_calls:]] == ["gcloud", "ssh", "ssh"], "a second `up` only looks"
    assert "left nothing behind" in cloud.run("down", "gcp", "--orphans"), "what Terraform knows is no orphan"
    assert oct(cloud.state.stat().st_mode)[-3:] == "700"
    assert "removed the machines of gcp" in cloud.run("down", "gcp", "--yes")
    assert not cloud.resources and not cloud.state.exists()
    assert "gcp has no machines" in cloud.run("down", "gcp", "--yes")


def test_the_state_may_be_in_a_bucket(cloud: StandInCloud) -> None:
    """Then a computer that has never seen the machines continues, and removes them."""
    cloud.write_target(state_bucket="demo-tfstate")
    cloud.run("up", "gcp", "--yes")
    subprocess.run(["rm", "-r", str(cloud.state)], check=True)
    assert "left nothing behind" in cloud.run("down", "gcp", "--orphans"), "the bucket knows the machines"
    assert "gcp is up" in cloud.run("up", "gcp")
    assert cloud.applied == 1
    subprocess.run(["rm", "-r", str(cloud.state)], check=True)
    cloud.run("down", "gcp", "--yes")
    assert not cloud.resources


def test_settings_that_would_delete_machines_are_refused(cloud: StandInCloud) -> None:
    cloud.run("up", "gcp", "--yes")
    output = cloud.run("up", "gcp", "--yes", "--max-cost", "20", code=2)
    assert "would delete" in output and "drivetrain down gcp" in output
    assert cloud.applied == 1


def test_the_time_limit_stays_when_up_is_repeated(cloud: StandInCloud) -> None:
    output = cloud.run("up", "gcp", "--yes", "--max-cost", "20")
    assert "at most $20.0" in output or "at most $19.9" in output
    assert "Google stops them in 18." in output
    cloud.change_machine("dt-worker-gcp", status="TERMINATED")
    output = cloud.run("up", "gcp", "--yes")
    assert "at most $" in output and "Google stops them in" in output
    assert cloud.applied == 2
    assert "pays for 5 minutes" in cloud.run("up", "gcp", "--max-cost", "0.1", code=2)


def test_two_commands_do_not_change_the_machines_at_once(cloud: StandInCloud) -> None:
    import fcntl

    cloud.state.mkdir(parents=True)
    with open(cloud.state / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "another command changes the machines" in cloud.run("up", "gcp", "--yes", code=201)


@pytest.mark.parametrize(("command", "output", "expected", "code"), [
    ("gcloud compute instances list", "gcloud-reauthentication", "the login to Google Cloud has expired: gcloud auth login", 2),
    ("terraform init", "terraform-registry", "Terraform cannot load Google's provider", 201),
    ("terraform plan", "terraform-api-off", "gcloud services enable compute.googleapis.com --project=demo-project", 2),
    ("terraform apply", "terraform-quota", "the quota CPUS_PER_VM_FAMILY of the project demo-project is 176.0", 2),
    ("terraform apply", "terraform-capacity", "us-central1-a has no machine of this kind at present: try again later, or set zone: to another one with nvidia-tesla-t4:"
     " us-central1-c, us-east1-d, europe-west1-b", 201),
])  # fmt: skip
def test_a_failure_of_a_program_is_one_line(cloud: StandInCloud, command: str, output: str, expected: str, code: int) -> None:
    zones = [
        {"zone": f"https://www.googleapis.com/compute/v1/projects/p/zones/{zone}"}
        for zone in ("europe-west1-b", "us-east1-d", "us-central1-a", "us-central1-c")
    ]
    (cloud.folder / "answers.json").write_text(json.dumps({"compute accelerator-types list": zones}))
    cloud.inject(fail={command: {"err": PROGRAMS.with_name("outputs").joinpath(f"{output}.txt").read_text()}})
    done = run_drivetrain("up", "gcp", "--yes", **cloud.variables)
    assert done.returncode == code
    assert expected in done.stderr and done.stderr.count("\n") == 1
    assert ("what was made so far may cost money" in done.stdout) == ("apply" in command)
    cloud.inject()
    assert "gcp is up" in cloud.run("up", "gcp", "--yes")


def test_doctor(cloud: StandInCloud) -> None:
    quotas = {"compute project-info describe": {"quotas": [{"metric": "GPUS_ALL_REGIONS", "limit": 0.0, "usage": 0.0}]},
              "compute regions describe": {"quotas": [{"metric": "NVIDIA_T4_GPUS", "limit": 4.0, "usage": 1.0}]},
              "services list": [], "projects describe demo-project": {"lifecycleState": "ACTIVE"}}  # fmt: skip
    (cloud.folder / "answers.json").write_text(json.dumps(quotas))
    output = cloud.run("doctor", "--on", "gcp", code=201)
    assert "not up (2 x n1-standard-4 with 1 nvidia-tesla-t4" in output
    assert "Terraform v1.11.4" in output and "gcloud: me@example.com" in output
    assert "fix: gcloud services enable compute.googleapis.com --project=demo-project" in output
    assert "planted-access-token" not in output
    (cloud.folder / "answers.json").write_text(json.dumps(quotas | {"services list": [{"config": {}}]}))
    output = cloud.run("doctor", "--on", "gcp", code=201)
    assert "ok       quota NVIDIA_T4_GPUS    1 of 4 used in us-central1, 2 wanted" in output
    assert "fault    quota GPUS_ALL_REGIONS  0 of 0 used in all regions, 2 wanted" in output
    cloud.run("up", "gcp", "--yes")
    assert "dt-master-gcp: GPU" in cloud.run("doctor", "--on", "gcp", code=201)
    cloud.inject(fail={"gcloud projects describe": {"err": PROGRAMS.with_name("outputs").joinpath("gcloud-no-login.txt").read_text()}})
    assert "fix: gcloud auth login && gcloud auth application-default login" in cloud.run("doctor", "--on", "gcp", code=201)


# --- runs --------------------------------------------------------------------------------------


def test_a_run_needs_machines(cloud: StandInCloud) -> None:
    output = cloud.run("train", "digits", "--on", "gcp", code=2)
    assert output.strip() == "drivetrain: gcp has no machines: drivetrain up gcp (it shows the price and asks)"
    assert not list(Path("runs").iterdir()), "no trace of the run is left"


def wait_for_log(name: str, text: str, cloud: StandInCloud) -> None:
    """Waits until the log of a run has this text; at first, it has no log."""
    deadline = time.monotonic() + 120
    while text not in (shown := run_drivetrain("logs", name, **cloud.variables)).stdout:
        assert time.monotonic() < deadline, shown.stdout + shown.stderr
        time.sleep(1)


@pytest.mark.system  # for its length
def test_down_spares_an_active_run_and_pulls_one_that_has_ended(cloud: StandInCloud) -> None:
    write_task("slow.py", ("def augment(self, batch, rand):", "def augment(self, batch, rand):\n        import time; time.sleep(0.3)"))
    cloud.write_target(nodes=1, device="cpu")
    cloud.run("up", "gcp", "--yes")
    settings = ("plan.threads=1", "plan.compile=off")
    cloud.run("train", "slow.py", *settings, "epochs=100", "--on", "gcp", "--name", "active")
    assert "active is running on gcp: drivetrain stop active first, or --force" in cloud.run("down", "gcp", "--yes", code=2)
    Path("runs/active").rename("elsewhere")  # as a run of another folder
    assert "still runs there: stop it first" in cloud.run("down", "gcp", "--yes", code=201)
    Path("elsewhere").rename("runs/active")
    cloud.run("stop", "active")
    cloud.run("train", "slow.py", *settings, "steps=2", "--on", "gcp", "--name", "ended")
    wait_for_log("ended", "done", cloud)
    cloud.run("down", "gcp", "--yes")
    assert Path("runs/ended/model/model.safetensors").exists() and not cloud.resources


@pytest.mark.system  # for its length
def test_a_preempted_run_resumes_exactly(cloud: StandInCloud) -> None:
    """The machine is killed in the middle of a run. `up` starts it again at another address; the run ends with the bits of an undisturbed one."""
    write_task("slow.py", ("def augment(self, batch, rand):", "def augment(self, batch, rand):\n        import time; time.sleep(0.05)"))
    cloud.write_target(nodes=1, spot=True, device="cpu")
    settings = ("epochs=4", "save_every=4", "plan.threads=1", "plan.compile=off")
    cloud.run("up", "gcp", "--yes")
    cloud.run("train", "slow.py", *settings, "--on", "gcp", "--name", "one", "--procs", "1")
    run = next((cloud.folder / "machines" / "dt-master-gcp").glob(".drivetrain/projects/*/runs")) / "one"
    deadline = time.monotonic() + 120
    while not list(run.glob("checkpoints/step-*")):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    job = json.loads(next(run.parents[1].glob("jobs/one/0/process.json")).read_text())
    os.killpg(job["pid"], signal.SIGKILL)  # the machine loses its power
    kill_descendants(run.parents[1])
    started = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime()) + ".000+00:00"
    cloud.change_machine("dt-master-gcp", status="TERMINATED")
    (cloud.folder / "answers.json").write_text(json.dumps({"compute operations list": [{"insertTime": started}]}))
    output = cloud.run("status", "one")
    assert "was preempted" in output and "drivetrain up gcp, then drivetrain resume one" in output
    assert "was preempted" in cloud.run("pull", "one", code=201)
    assert "drivetrain up gcp" in cloud.run("resume", "one", code=2)
    cloud.run("up", "gcp", "--yes")
    cloud.run("resume", "one", "--wait")
    cloud.run("train", "slow.py", *settings, "--name", "whole", "--procs", "1", "--device", "cpu")
    rows = [[json.loads(line) for line in Path(f"runs/{name}/metrics.jsonl").read_text().splitlines()] for name in ("one", "whole")]
    losses = [[(row["step"], row["train/loss"]) for row in part if "train/loss" in row] for part in rows]
    assert losses[0] == losses[1]
    assert "resumed" in Path("runs/one/events.jsonl").read_text()
    cloud.run("down", "gcp", "--yes")


def kill_descendants(folder: Path) -> None:
    """Kills the processes of a machine: those that have its folder in their environment."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            mine = str(folder).encode() in path.read_bytes() and int(path.parent.name) != os.getpid()
        except OSError:
            continue
        if mine:
            os.kill(int(path.parent.name), signal.SIGKILL)
