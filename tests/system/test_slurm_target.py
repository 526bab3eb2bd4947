"""`--on slurm` with a real Slurm of three nodes: two nodes, stop and resume, the time limit, a lost node, an array of trials."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from drivetrain.runs import Run
from tests.command import COMMAND, TASK, environment, expect_error, run_drivetrain, run_ok, write_task
from tests.planted import NAMES, SECRETS, SETTING, check_arrived, check_in_no_file, write_planted_project
from tests.system.slurm import Cluster, cluster
from tests.waiting import wait_until

FAST = ("plan.threads=1", "plan.compile=off")
SLOW = ("return F.cross", "import time; time.sleep(0.1 * model.training)\n        return F.cross")
WITHOUT_DROPOUT = TASK.replace("nn.Dropout(0.2)", "nn.Identity()")  # its masks depend on the number of processes


@pytest.fixture(scope="module")
def started_cluster() -> Iterator[Cluster]:
    with cluster() as started:
        yield started


@pytest.fixture
def slurm(started_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setenv("SLURM_CONF", str(started_cluster.config))
    return started_cluster


def write_target(**settings: object) -> None:
    Path("drivetrain.yaml").write_text(yaml.safe_dump({"targets": {"cluster": {"kind": "slurm"} | settings}}))


def losses(name: str) -> list[float]:
    return [row["train/loss"] for row in Run(f"runs/{name}").rows() if "train/loss" in row]


def step(name: str) -> int:
    return int(Run(f"runs/{name}").last_row().get("step", 0))


def status(name: str) -> dict[str, object]:
    return dict(json.loads(run_ok("status", name, "--json")))


def test_two_nodes_train_as_one(slurm: Cluster, folder: Path) -> None:
    write_task(text=WITHOUT_DROPOUT)
    run_ok("train", "small.py", *FAST, "--procs", "2", "--name", "here")
    output = run_ok("train", "small.py", *FAST, "--on", "slurm", "--nodes", "2", "--wait", "--name", "two", MY_API_KEY="planted-secret")
    assert "2 of 2 machines have joined" in output
    assert losses("two") == pytest.approx(losses("here"), rel=1e-6)
    assert Run("runs/two").read()["plan"]["nodes"] == 2
    assert "DRIVETRAIN_TOKEN=" not in Path("runs/two/job/job.sh").read_text()
    assert not subprocess.run(["grep", "-r", "planted-secret", "."], capture_output=True).stdout


def test_planted_secrets_arrive_and_are_in_no_file(slurm: Cluster, folder: Path) -> None:
    write_planted_project(WITHOUT_DROPOUT)
    write_target(secrets=NAMES)
    train = ("train", "small.py", "steps=2", *FAST, "--on", "cluster", "--nodes", "2", "--name", "hidden")
    assert "planted-" not in run_ok(*train, "--dry-run", **SECRETS)
    assert "planted" not in expect_error("train", "small.py", SETTING, "--on", "cluster")
    run_ok(*train, "--wait", **SECRETS)
    for rank in (0, 1):
        check_arrived(Path(f"runs/hidden/logs/rank-{rank}.log").read_text())
    check_in_no_file(folder)


def test_a_training_has_its_gpus_and_its_prologue(slurm: Cluster, folder: Path) -> None:
    """The GPUs of the cluster are device files; Slurm tells a job which of them it has."""
    shown = "print('has', os.environ['SLURM_STEP_GPUS'], os.environ['CUDA_VISIBLE_DEVICES'], os.environ['COLOUR'], flush=True)"
    write_task(change=("return F.cross", f"import os; {shown}\n        return F.cross"))
    write_target(gpus=2, cpus=1, prologue=["export COLOUR='dark blue'", "source ./colours.sh"])
    Path("colours.sh").write_text('export COLOUR="$COLOUR and green"\n')
    output = run_ok("train", "small.py", "steps=2", *FAST, "--on", "cluster", "--wait", "--name", "has")
    assert "has 0,1 0,1 dark blue and green" in output
    script = Path("runs/has/job/job.sh").read_text()
    assert "#SBATCH --gres=gpu:2\n" in script
    write_target(gres="gpu:1", prologue=["export COLOUR=red"])
    assert "has 0 0 red" in run_ok("train", "small.py", "steps=2", *FAST, "--on", "cluster", "--wait", "--name", "one")


def test_stop_saves_and_resume_is_exact(slurm: Cluster, folder: Path) -> None:
    write_task(change=SLOW)
    run_ok("train", "small.py", "steps=80", *FAST, "--name", "reference", "--hang-after", "5min")
    run_ok("train", "small.py", "steps=80", *FAST, "--on", "slurm", "--name", "stopped")
    wait_until(lambda: step("stopped") >= 5, "steps")
    assert "running" in run_ok("status", "stopped")
    assert "stopped on slurm (preempted)" in run_ok("stop", "stopped")
    assert step("stopped") < 80
    output = run_ok("resume", "stopped", "--wait")
    assert "resume  from step" in output
    assert losses("stopped") == losses("reference")


def test_a_submission_that_was_killed_before_its_record_is_found_again(slurm: Cluster, folder: Path) -> None:
    """The record is as it was before sbatch answered."""
    write_task(change=SLOW)
    train = ("train", "small.py", "steps=800", *FAST, "--on", "slurm", "--name", "killed")
    run_ok(*train)
    record = Path("runs/killed/target.json")
    written = json.loads(record.read_text())
    for words in (("status", "killed"), train, ("stop", "killed")):
        record.write_text(json.dumps(written | {"handle": {}, "phase": "submitting"}))
        if words[0] == "train":
            assert "on slurm already" in run_ok(*words)
        elif words[0] == "status":
            assert "on slurm" in run_ok(*words)
        else:
            run_ok(*words)
        assert json.loads(record.read_text())["handle"] == written["handle"]
        assert slurm.run("squeue", "-h", "-t", "pending,running,completing", "-o", "%j").split().count("killed") <= 1
    wait_until(lambda: not slurm.run("squeue", "-h", "-o", "%i").strip(), "the end of the job")


def test_scancel_by_somebody_else_is_told(slurm: Cluster, folder: Path) -> None:
    write_task(change=SLOW)
    run_ok("train", "small.py", "steps=800", *FAST, "--on", "slurm", "--name", "cancelled")
    wait_until(lambda: step("cancelled") >= 5, "steps")
    slurm.run("scancel", json.loads(Path("runs/cancelled/target.json").read_text())["handle"]["id"])
    wait_until(lambda: status("cancelled")["status"] != "running", "the job's end")
    facts = status("cancelled")
    assert facts["status"] == "preempted", "it saved its state"
    assert facts["target"]["reason"] == "it was cancelled"  # type: ignore[index]


def test_the_time_limit_saves_and_queues_the_run_again(slurm: Cluster, folder: Path) -> None:
    """Slurm sends the signal at most a minute early, so that each start has a minute at least, and two at most."""
    write_task(change=(SLOW[0], SLOW[1].replace("model.training", "('SLURM_JOB_ID' in __import__('os').environ)")))
    write_target(time="3min", grace=60)
    run_ok("train", "small.py", "steps=1300", *FAST, "--name", "reference", "--hang-after", "5min")
    output = run_ok("train", "small.py", "steps=1300", *FAST, "--on", "cluster", "--wait", "--name", "limited", seconds=900)
    assert "queued again" in output
    run = Run("runs/limited")
    assert run.status == "finished"
    assert [event["event"] for event in run.events()].count("started") >= 2
    assert losses("limited") == losses("reference")


def test_a_lost_node_costs_no_step(slurm: Cluster, folder: Path) -> None:
    write_task(change=SLOW, text=WITHOUT_DROPOUT)
    run_ok("train", "small.py", "steps=300", *FAST, "--procs", "2", "--name", "reference", "--hang-after", "5min")
    run_ok("train", "small.py", "steps=300", "save_every=10", *FAST, "--on", "slurm", "--nodes", "2", "--name", "moved")
    wait_until(lambda: step("moved") >= 20, "steps")
    (nodes,) = slurm.run("squeue", "-h", "-t", "running", "-o", "%N").split()
    lost = slurm.run("scontrol", "show", "hostnames", nodes).split()[1]
    slurm.kill_node(lost)
    try:
        wait_until(lambda: slurm.run("squeue", "-h", "-t", "running", "-o", "%N").strip() not in ("", nodes), "other nodes", 300)
        output = subprocess.run([*COMMAND, "logs", "-f", "moved"], capture_output=True, text=True, timeout=300, env=environment()).stdout
    finally:
        slurm.start_node(lost)
    assert "done    300 steps" in output
    assert [row["step"] for row in Run("runs/moved").rows()] == list(range(1, 301))
    assert losses("moved") == pytest.approx(losses("reference"), rel=1e-5)
    wait_until(lambda: len(slurm.run("sinfo", "-h", "-N", "-t", "idle", "-o", "%N").split()) == 3, "three idle nodes")


def test_trials_are_an_array(slurm: Cluster, folder: Path) -> None:
    write_task()
    search = ("--search", "learning_rate=0.001..0.1,log", "--trials", "3", "--jobs", "3", "--prune", "none", "--metric", "eval/accuracy")
    words = ("tune", "small.py", "epochs=2", *FAST, *search)
    result = json.loads(run_ok(*words, "--on", "slurm", "--name", "study", "--json", seconds=300))
    assert [trial["state"] for trial in result["trials"]] == ["finished"] * 3
    handles = [json.loads(Path(trial["run"], "target.json").read_text())["handle"]["id"] for trial in result["trials"]]
    assert len({handle.partition("_")[0] for handle in handles}) == 1, "one job, three elements"
    assert result["best"]["value"] == max(trial["value"] for trial in result["trials"])


def test_what_slurm_refuses(slurm: Cluster, folder: Path) -> None:
    write_task()
    train = ("train", "small.py", "--name", "refused")
    assert "no machine of Slurm has as many" in expect_error(*train, "--on", "slurm", "--nodes", "9")
    assert "no machine of Slurm has as many" in expect_error(*train, "--on", "slurm", "--device", "cuda", "--procs", "8")
    for key, message in {"partition": "has no partition none", "constraint": "sinfo -o '%f'"}.items():
        write_target(**{key: "nix"})
        assert message.replace("none", "nix") in expect_error(*train, "--on", "cluster")
    assert "there is no sbatch on this machine" in expect_error(*train, "--on", "slurm", PATH="/nowhere")
    assert "controller does not answer" in expect_error(*train, "--on", "slurm", code=201, SLURM_CONF="/nowhere/slurm.conf")
    assert not Path("runs/refused").exists()


def test_doctor_and_targets(slurm: Cluster, folder: Path) -> None:
    write_target(gpus=2)
    assert "partitions: main* (3 x gpu:2, infinite)" in run_ok("targets")
    output = run_ok("doctor", "--on", "cluster")
    assert "3 of 3 can take jobs" in output and "3 machines have 2 or more" in output
    write_target(gpus=4)
    checks = {check["subject"]: check for check in json.loads(run_drivetrain("doctor", "--on", "cluster", "--json").stdout)}
    assert checks["GPUs"]["verdict"] == "fault" and "ask for fewer" in checks["GPUs"]["fix"]


def test_a_queued_run_waits_and_can_be_stopped(slurm: Cluster, folder: Path) -> None:
    write_task(change=SLOW)
    run_ok("train", "small.py", "steps=800", *FAST, "--on", "slurm", "--nodes", "3", "--name", "first")
    write_target(sbatch=["--exclusive"])
    run_ok("train", "small.py", *FAST, "--on", "cluster", "--name", "second")
    assert status("second")["status"] == "queued"
    assert "waits: " in run_ok("status", "second")
    assert "queued" in run_ok("runs")
    assert "drivetrain stop second first" in expect_error("runs", "rm", "second", "--yes")
    run_ok("stop", "second", "first")
    assert Run("runs/first").status == "preempted"
    assert status("second")["status"] == "ended"
    record = json.loads(Path("runs/second/target.json").read_text())
    assert (record["exit_code"], record["reason"]) == (200, "it was stopped"), "as for a run that has begun"
    run_ok("runs", "rm", "second", "--yes")
    assert not Path("runs/second").exists()
