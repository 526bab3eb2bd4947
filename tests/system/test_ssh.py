"""Runs on machines behind real SSH servers, which have their own network and disks."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from drivetrain.launch.rendezvous.handshake import VERSION
from drivetrain.runs import Run
from tests.command import COMMAND, TASK, environment, expect_error, run_ok, write_task
from tests.planted import NAMES, SECRETS, SETTING, check_arrived, check_in_no_file, write_planted_project
from tests.system.slurm import cluster
from tests.system.ssh import Boxes, boxes, server_on_this_machine
from tests.waiting import Stopwatch, wait_until

FAST = ("plan.threads=1", "plan.compile=off")
SLOW = ("return F.cross", "import time; time.sleep(0.05 * model.training)\n        return F.cross")
WITHOUT_DROPOUT = TASK.replace("nn.Dropout(0.2)", "nn.Identity()")  # its masks depend on the number of processes


@pytest.fixture(scope="module")
def two_boxes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Boxes]:
    with boxes(tmp_path_factory.mktemp("ssh") / "keys") as started:
        yield started


def losses(name: str) -> list[float]:
    return [row["train/loss"] for row in Run(f"runs/{name}").rows() if "train/loss" in row]


def step(name: str) -> int:
    return int(Run(f"runs/{name}").last_row().get("step", 0))


def no_process_left(two_boxes: Boxes) -> bool:
    return not two_boxes.commands(0) and not two_boxes.commands(1)


def test_two_machines_train_as_one(two_boxes: Boxes, folder: Path) -> None:
    write_task(text=WITHOUT_DROPOUT)
    two_boxes.write_target(secrets=["MY_API_KEY"])
    run_ok("train", "small.py", *FAST, "--procs", "2", "--name", "here")
    output = two_boxes.run(
        "train", "small.py", *FAST, "--on", "boxes", "--nodes", "2", "--wait", "--name", "there", MY_API_KEY="planted-secret"
    )
    assert "2 of 2 machines have joined" in output
    assert "run     runs/there " in output, "the last line names the run as this machine does"
    assert losses("there") == pytest.approx(losses("here"), rel=1e-6)
    run = Run("runs/there")
    assert run.status == "finished"
    assert run.model_path.is_file()
    assert run.checkpoint_steps() == Run("runs/here").checkpoint_steps()
    assert {path.name for path in (run.path / "logs").glob("*.log")} == {"output.log", "output-1.log", "rank-0.log", "rank-1.log"}
    wait_until(lambda: no_process_left(two_boxes), "the end of every process", 10)
    for number in (0, 1):
        assert "planted-secret" not in two_boxes.on_server(number, "grep", "-r", "planted-secret", str(two_boxes.base))
    assert not subprocess.run(["grep", "-r", "planted-secret", "."], capture_output=True).stdout
    assert "already" in two_boxes.run("train", "small.py", *FAST, "--on", "boxes", "--nodes", "2", "--name", "there", MY_API_KEY="x")


def test_two_projects_may_have_runs_of_one_name(two_boxes: Boxes, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, project in enumerate(("one", "two"), 1):
        (folder / project).mkdir()
        monkeypatch.chdir(folder / project)
        write_task()
        two_boxes.write_target(hosts=["box1"])
        two_boxes.run("train", "small.py", f"steps={number}", *FAST, "--on", "boxes", "--wait", "--name", "same")
        assert step("same") == number


def test_a_killed_client_leaves_the_run_and_can_follow_it_again(two_boxes: Boxes, folder: Path) -> None:
    write_task(change=SLOW)
    two_boxes.write_target(hosts=["box1"])
    client = two_boxes.start("train", "small.py", "steps=200", *FAST, "--on", "boxes", "--wait", "--name", "kept")
    wait_until(lambda: step("kept") >= 5, "steps")
    client.send_signal(signal.SIGKILL)
    client.wait()
    followers = lambda: [line for line in two_boxes.commands(0) if "host_program" in line]  # noqa: E731
    wait_until(lambda: not followers(), "the end of the followed connection", 30)
    before = step("kept")
    assert "running on boxes" in two_boxes.run("status", "kept")
    assert "ends in" in two_boxes.run("status", "kept")
    output = two_boxes.run("logs", "-f", "kept")
    assert "done    200 steps" in output
    assert step("kept") == 200 > before
    assert json.loads(Path("runs/kept/target.json").read_text())["exit_code"] == 0
    wait_until(lambda: no_process_left(two_boxes), "the end of every process", 10)


def test_stop_ends_every_process_and_resume_is_exact(two_boxes: Boxes, folder: Path) -> None:
    write_task(change=SLOW)
    two_boxes.write_target(hosts=["box1"])
    run_ok("train", "small.py", "steps=250", *FAST, "--name", "reference")
    two_boxes.run("train", "small.py", "steps=250", *FAST, "--on", "boxes", "--name", "stopped")
    follower = two_boxes.start("logs", "-f", "stopped")
    wait_until(lambda: step("stopped") >= 10, "steps")
    assert "stopped on boxes (preempted)" in two_boxes.run("stop", "stopped")
    assert follower.wait(60) == 0
    wait_until(lambda: no_process_left(two_boxes), "the end of every process", 10)
    assert step("stopped") < 250
    Path("small.py").write_text("raise SystemExit('this version must not be used')")
    two_boxes.run("resume", "stopped", "--wait")
    assert losses("stopped") == losses("reference")


@pytest.mark.long
def test_a_run_follows_its_target_to_other_machines(two_boxes: Boxes, folder: Path) -> None:
    """After `down`, on another host, and on another host when the first one is lost: it continues with what was copied here."""
    write_task(change=SLOW)
    two_boxes.write_target(hosts=["box1"])
    two_boxes.run("train", "small.py", "steps=10", *FAST, "--on", "boxes", "--wait", "--name", "moved")
    two_boxes.run("down", "boxes", "--yes")
    assert "finished on boxes" in two_boxes.run("status", "moved")
    output = two_boxes.run("resume", "moved", "steps=20", "--wait")
    assert "box1: sending moved (step 10, " in output and "it has nothing of it there" in output
    assert "resume  from step 10" in output
    two_boxes.write_target(hosts=["box2"])
    output = two_boxes.run("resume", "moved", "steps=30", "--wait")
    assert "box2: sending moved (step 20, " in output
    two_boxes.run("resume", "moved", "steps=1000")
    wait_until(lambda: step("moved") >= 35 or not two_boxes.run("status", "moved"), "steps")
    two_boxes.servers[1].cut_cable()
    try:
        two_boxes.write_target(hosts=["box1"])
        output = two_boxes.run("resume", "moved", "steps=45", "--wait")
    finally:
        two_boxes.servers[1].mend_cable()
    assert "its machines do not answer, and boxes has others now" in output
    assert "box1: sending moved (step 30, " in output and "it has step 20 there" in output
    assert [row["step"] for row in Run("runs/moved").rows()] == list(range(1, 46))
    for pid in two_boxes.servers[1].processes():
        if "supervise" in Path(f"/proc/{pid}/cmdline").read_text():
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: no_process_left(two_boxes), "the end of every process", 30)


@pytest.mark.long
def test_a_supervisor_that_is_killed_takes_its_processes_along(two_boxes: Boxes, folder: Path) -> None:
    write_task(change=SLOW)
    two_boxes.write_target(hosts=["box1"])
    two_boxes.run("train", "small.py", "steps=2000", *FAST, "--on", "boxes", "--name", "lost")
    follower = two_boxes.start("logs", "-f", "lost")
    wait_until(lambda: step("lost") >= 5, "steps")
    for pid in two_boxes.servers[0].processes():
        if "supervise" in Path(f"/proc/{pid}/cmdline").read_text():
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: no_process_left(two_boxes), "no orphan", 60)
    follower.wait(60)
    assert "lost" in two_boxes.run("status", "lost", "--json")


def test_a_cut_link_between_machines_and_to_the_client(two_boxes: Boxes, folder: Path) -> None:
    write_task(change=SLOW, text=WITHOUT_DROPOUT)
    two_boxes.write_target()
    client = two_boxes.start(
        "train", "small.py", "steps=260", "save_every=10", *FAST, "--on", "boxes", "--nodes", "2", "--wait", "--name", "cut"
    )
    wait_until(lambda: step("cut") >= 15, "steps")
    two_boxes.client.cut_cable()
    two_boxes.servers[1].cut_cable()
    time.sleep(25)  # longer than ssh and the machines wait for an answer
    two_boxes.client.mend_cable()
    two_boxes.servers[1].mend_cable()
    output, _ = client.communicate(timeout=300)
    assert client.returncode == 0, output
    assert step("cut") == 260
    assert [row["step"] for row in Run("runs/cut").rows()] == list(range(1, 261))
    assert any(event["event"] == "restarted" for event in Run("runs/cut").events()), "the link between the machines was lost"
    run_ok("train", "small.py", "steps=260", *FAST, "--procs", "2", "--name", "here", "--hang-after", "5min")
    assert losses("cut") == pytest.approx(losses("here"), rel=1e-5)


@pytest.mark.long
def test_a_run_that_lost_a_machine_comes_home(two_boxes: Boxes, folder: Path) -> None:
    write_task(change=SLOW, text=WITHOUT_DROPOUT)
    two_boxes.write_target()
    words = ("train", "small.py", "steps=150", "save_every=10", *FAST, "--on", "boxes", "--nodes", "1:2", "--wait", "--name", "one-left")
    client = two_boxes.start(*words)
    wait_until(lambda: step("one-left") >= 15, "steps", 120, client)
    two_boxes.servers[1].cut_cable()
    try:
        output, _ = client.communicate(timeout=300)
        assert client.returncode == 0, output
        assert "box2: " in output and "the logs of its processes are missing" in output
        assert Run("runs/one-left").model_path.is_file()
        assert "done    150 steps" in two_boxes.run("logs", "-f", "one-left")
        assert "from boxes, ended (box2: " in two_boxes.run("pull", "one-left")
    finally:
        two_boxes.servers[1].mend_cable()
    for pid in two_boxes.servers[1].processes():
        with contextlib.suppress(OSError):
            if "supervise" in Path(f"/proc/{pid}/cmdline").read_text():
                os.kill(pid, signal.SIGKILL)
    wait_until(lambda: no_process_left(two_boxes), "the end of every process", 60)


@pytest.mark.long
def test_a_hang_gives_a_verdict_and_a_restart(two_boxes: Boxes, folder: Path) -> None:
    write_task(text=WITHOUT_DROPOUT)
    two_boxes.write_target(env={"DRIVETRAIN_FAULTS": "hang@step:12:rank=1"})
    words = ("train", "small.py", "steps=30", "save_every=5", *FAST, "--hang-after", "5s")
    output = two_boxes.run(*words, "--on", "boxes", "--nodes", "2", "--wait", "--name", "hung")
    assert "rank 1 hangs in step 12" in output and "done    30 steps" in output
    assert [event["why"] for event in Run("runs/hung").events() if event["event"] == "restarted"] == ["hang"]
    (verdict,) = [event for event in Run("runs/hung").events() if event["event"] == "hang"]
    assert verdict["ranks"] == [1]


@pytest.mark.long
def test_a_failed_run_gives_its_exit_code_and_a_running_one_can_be_pulled(two_boxes: Boxes, folder: Path) -> None:
    write_task(change=("return F.cross", "raise ValueError('wrong')\n        return F.cross"))
    two_boxes.write_target(hosts=["box1"])
    assert "ValueError: wrong" in two_boxes.run("train", "small.py", *FAST, "--on", "boxes", "--wait", "--name", "wrong", code=1)
    assert "user-error on boxes" in two_boxes.run("status", "wrong")
    write_task(change=SLOW)
    two_boxes.run("train", "small.py", "steps=2000", "save_every=10", *FAST, "--on", "boxes", "--name", "runs-on")
    wait_until(lambda: "from boxes, running" in two_boxes.run("pull", "runs-on") and Run("runs/runs-on").checkpoint_steps(), "a checkpoint")
    assert json.loads(Path("runs/runs-on/target.json").read_text())["pulled"] is False
    before = max(Run("runs/runs-on").checkpoint_steps())
    assert "stopped on boxes (preempted)" in two_boxes.run("stop", "runs-on")
    assert max(Run("runs/runs-on").checkpoint_steps()) > before, "the end is pulled all the same"


STRANGER = """
import json, os, socket, sys, time
host, port, deadline, kept = sys.argv[1], int(sys.argv[2]), time.monotonic() + 4, []
greeting = json.dumps({"drivetrain": int(sys.argv[3]), "nonce": "0" * 64}).encode() + b"\\n"
garbage = [os.urandom(4096), b"GET / HTTP/1.0\\r\\n\\r\\n", b"x" * 300_000, b"{" * 5000 + b"\\n", greeting + b'{"proof": "' + b"0" * 64 + b'"}\\n', b"\\0" * 100 + b"\\n", b""]
for number in range(400):
    if time.monotonic() > deadline:
        break
    peer = socket.socket()
    peer.settimeout(0.2)
    try:
        peer.connect((host, port))
        peer.sendall(garbage[number % len(garbage)])
    except OSError:
        pass
    kept = [*kept[-100:], peer]
print(number)
"""
"""Sends bytes without the token to the port where the machines of a run meet: 400 connections or 4 seconds, a hundred open at a time."""


def test_garbage_and_a_flood_at_the_meeting_point_change_nothing(two_boxes: Boxes, folder: Path) -> None:
    write_task(change=SLOW, text=WITHOUT_DROPOUT)
    two_boxes.write_target()
    steps = "steps=200"
    client = two_boxes.start("train", "small.py", steps, *FAST, "--on", "boxes", "--nodes", "2", "--wait", "--name", "noise")
    wait_until(lambda: step("noise") >= 10, "steps")
    words = next(line for line in two_boxes.commands(0) if "--rendezvous" in line).split()
    host, port = words[words.index("--rendezvous") + 1].split(":")
    sent = subprocess.run(
        [*two_boxes.client.enter, sys.executable, "-c", STRANGER, host, port, str(VERSION)], capture_output=True, text=True, timeout=60
    )
    assert int(sent.stdout) >= 50, sent.stderr
    assert step("noise") < 200, "the run was still training"
    output, _ = client.communicate(timeout=300)
    assert client.returncode == 0, output
    assert "without the token, the last from 10.77.0." in output
    assert [event["event"] for event in Run("runs/noise").events()].count("restarted") == 0
    assert [row["step"] for row in Run("runs/noise").rows()] == list(range(1, 201))
    run_ok("train", "small.py", steps, *FAST, "--procs", "2", "--name", "here", "--hang-after", "5min")
    assert losses("noise") == pytest.approx(losses("here"), rel=1e-5)


def test_refused_logins(two_boxes: Boxes, folder: Path) -> None:
    """The cache's folder is new, because a connection that is open already is used again."""
    write_task()
    two_boxes.write_target(hosts=["box1"])
    known = (two_boxes.folder / "known_hosts").read_text()
    try:
        (two_boxes.folder / "known_hosts").write_text(known.replace("10.77.0.11", "10.77.0.99").replace("10.77.0.12", "10.77.0.11"))
        message = two_boxes.run("train", "small.py", "--on", "boxes", code=201, XDG_CACHE_HOME=str(folder))
        assert "its host key has changed" in message and "ssh-keygen -R" in message
        (two_boxes.folder / "known_hosts").write_text("")
        assert "its host key is not known: connect once by hand" in two_boxes.run(
            "train", "small.py", "--on", "boxes", code=201, XDG_CACHE_HOME=str(folder)
        )
    finally:
        (two_boxes.folder / "known_hosts").write_text(known)
    two_boxes.write_target(hosts=["nobody@box1"])
    assert "it refused the login (publickey)" in two_boxes.run("train", "small.py", "--on", "boxes", code=201)
    two_boxes.write_target(hosts=["box1"], options=["-F", str(two_boxes.folder / "config"), "-p", "2222"])
    assert "no SSH server answers there" in two_boxes.run("train", "small.py", "--on", "boxes", code=201)
    two_boxes.write_target(hosts=["10.77.0.77"], options=["-F", str(two_boxes.folder / "config")])
    assert "cannot be reached" in two_boxes.run("train", "small.py", "--on", "boxes", code=201)
    assert not list(Path("runs").glob("*/run.json"))


def test_the_python_and_the_meeting_point_are_checked(two_boxes: Boxes, folder: Path) -> None:
    write_task()
    two_boxes.write_target(python="/nonexistent/python")
    message = two_boxes.run("train", "small.py", "--on", "boxes", code=201)
    assert "box1: /nonexistent/python cannot be started" in message and "correct python: in the target" in message
    assert not list(Path("runs").glob("*"))

    def verdicts(**entry: str) -> dict[str, str]:
        two_boxes.write_target(**entry)
        checks = json.loads(two_boxes.run("doctor", "--on", "boxes", "--json", code=201))  # a small disk
        return {check["subject"]: check["verdict"] for check in checks}

    broken = verdicts(python="/nonexistent/python", rendezvous="10.77.0.12")
    assert broken["box1: Python"] == broken["box2: Python"] == "fault"
    assert broken["box1: meeting point"] == "fault", "it is the address of the second machine"
    working = verdicts()
    assert [working[name] for name in ("box1: Python", "box2: Python", "box1: meeting point", "box2: way to box1")] == ["ok"] * 4


def test_a_full_disk_there(two_boxes: Boxes, folder: Path) -> None:
    write_task()
    two_boxes.write_target(hosts=["box1"])
    two_boxes.on_server(0, "sh", "-c", f"rm -r {two_boxes.base}/code; cat /dev/zero > {two_boxes.base}/filler")
    try:
        assert "the disk is full there" in two_boxes.run("train", "small.py", "--on", "boxes", code=201)
        assert "disk" in two_boxes.run("doctor", "--on", "boxes", code=201)
    finally:
        two_boxes.on_server(0, "rm", f"{two_boxes.base}/filler")


# --- a server on this machine ------------------------------------------------------------------


@pytest.fixture(scope="module")
def ssh_options(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    with server_on_this_machine(tmp_path_factory.mktemp("ssh-here") / "keys") as options:
        yield options


def write_target(options: list[str], base: Path | str, **entry: object) -> None:
    settings = {"kind": "ssh", "hosts": ["here"], "options": options, "dir": str(base), "python": sys.executable}
    Path("drivetrain.yaml").write_text(yaml.safe_dump({"targets": {"here": settings | entry}}))


def seconds_to_first_step(name: str, root: Path, *words: str) -> float:
    stopwatch = Stopwatch()
    with subprocess.Popen([*COMMAND, "train", "small.py", *FAST, "--name", name, *words], stdout=subprocess.DEVNULL, env=environment()):
        wait_until(lambda: any(file.stat().st_size for file in root.glob(f"**/runs/{name}/metrics.jsonl")), "the first step")
        return stopwatch.seconds


@pytest.mark.long
def test_planted_secrets_arrive_and_are_in_no_file(ssh_options: list[str], folder: Path) -> None:
    base = folder.parent / "base"
    write_planted_project()
    write_target(ssh_options, base, secrets=NAMES)
    train = ("train", "small.py", "steps=2", *FAST, "--on", "here", "--name", "planted")
    assert "planted-" not in run_ok(*train, "--dry-run", **SECRETS)
    assert "planted" not in expect_error("train", "small.py", SETTING, "--on", "here")
    check_arrived(run_ok(*train, "--wait", **SECRETS))
    check_in_no_file(folder, base)


@pytest.mark.alone
def test_the_way_to_another_machine_is_short(ssh_options: list[str], folder: Path) -> None:
    """With code and environment there already: at most two seconds more until the first step than without a target."""
    write_task()
    base = folder.parent / "base"
    write_target(ssh_options, base)
    run_ok("train", "small.py", *FAST, "--on", "here", "--wait")
    more = []
    for number in range(5):
        here = seconds_to_first_step(f"here-{number}", folder)
        there = seconds_to_first_step(f"there-{number}", base / "projects", "--on", "here")
        more.append(there - here)
    print(f"seconds more until the first step: {[round(seconds, 2) for seconds in more]}")
    assert sorted(more)[2] <= 2.0, more


@pytest.mark.alone
def test_followed_logs_are_a_second_behind_at_most(ssh_options: list[str], folder: Path) -> None:
    write_task(change=("return F.cross", "import time; print(f'now {time.time()}', flush=True); time.sleep(0.4)\n        return F.cross"))
    write_target(ssh_options, folder.parent / "base")
    run_ok("train", "small.py", "steps=30", "eval_every=30", *FAST, "--on", "here", "--name", "talks")
    lags = []
    with subprocess.Popen([*COMMAND, "logs", "-f", "talks"], stdout=subprocess.PIPE, text=True, env=environment()) as follower:
        assert follower.stdout is not None
        for line in follower.stdout:
            if match := re.search(r"now (\d+\.\d+)", line):
                lags.append(time.time() - float(match[1]))
    newest = lags[len(lags) // 2 :]  # the first lines were written before anybody followed
    print(f"seconds behind: at most {max(newest):.2f}")
    assert len(newest) > 5
    assert max(newest) < 1.0


def normalized(requirement: str) -> str:
    name, _, version = requirement.lower().partition("==")
    return f"{re.sub(r'[-_.]+', '-', name)}=={version.partition('+')[0]}"


def test_an_environment_is_built_there_once(ssh_options: list[str], folder: Path) -> None:
    write_task()
    write_target(ssh_options, folder.parent / "base", python=None)
    output = run_ok("train", "small.py", *FAST, "--on", "here", "--wait", seconds=900)
    assert "building the environment" in output
    (environment_folder,) = (folder.parent / "base" / "environments").glob("*/ready")
    locked = (environment_folder.parent / "requirements.txt").read_text().splitlines()
    listed = [environment_folder.parent / "bin/python", "-m", "pip", "list", "--format=freeze"]
    installed = subprocess.run(listed, capture_output=True, text=True).stdout.splitlines()
    assert set(map(normalized, locked)) <= set(map(normalized, installed))
    assert "building" not in run_ok("train", "small.py", *FAST, "--on", "here", "--wait", "--name", "again")
    assert Run("runs/again").status == "finished"
    run_ok("down", "here", "--yes")
    assert not (folder.parent / "base").exists()


@pytest.fixture
def folder_in_home() -> Iterator[str]:
    """A folder as the default one is written, below the home folder."""
    with tempfile.TemporaryDirectory(dir=Path.home(), prefix="drivetrain-test-") as path:
        yield f"~/{Path(path).name}/a b"


def test_a_slurm_cluster_behind_a_login_node(ssh_options: list[str], folder: Path, folder_in_home: str) -> None:
    write_task()
    with cluster() as slurm:
        options = ["-o", "ControlPath=none", "-o", f"SetEnv=SLURM_CONF={slurm.config}", *ssh_options]
        entry = {"kind": "slurm", "host": "here", "options": options, "dir": folder_in_home, "python": sys.executable}
        Path("drivetrain.yaml").write_text(yaml.safe_dump({"targets": {"cluster": entry}}))
        output = run_ok("train", "small.py", *FAST, "--on", "cluster", "--wait", "--name", "far")
        assert "done    " in output
        assert Run("runs/far").status == "finished"
        assert Run("runs/far").model_path.is_file()
        assert "finished on cluster" in run_ok("status", "far")
        run_ok("train", "small.py", "steps=100000", *FAST, "--on", "cluster", "--name", "long")
        assert "cluster has jobs that run or wait" in expect_error("down", "cluster", "--yes")
        run_ok("stop", "long")
        wait_until(lambda: not slurm.run("squeue", "-h", "-o", "%i").strip(), "the end of the job")
        run_ok("down", "cluster", "--yes")
        assert not Path(folder_in_home).expanduser().exists()


@pytest.mark.long
def test_trials_on_another_machine(ssh_options: list[str], folder: Path, folder_in_home: str) -> None:
    write_task()
    write_target(ssh_options, folder_in_home)
    search = ("--search", "learning_rate=0.001..0.1,log", "--trials", "2", "--jobs", "2", "--prune", "none", "--metric", "eval/accuracy")
    result = json.loads(run_ok("tune", "small.py", "epochs=2", *FAST, *search, "--on", "here", "--json"))
    assert [trial["state"] for trial in result["trials"]] == ["finished"] * 2
    assert all(Path(trial["run"], "model/model.safetensors").is_file() for trial in result["trials"])
