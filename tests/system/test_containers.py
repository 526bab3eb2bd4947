"""With a real container engine: the image builds and trains through podman's Docker API; compose profiles resolve."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from drivetrain.runs import Run
from tests.command import COMMAND, environment, expect_error, run_ok
from tests.planted import NAMES, SECRETS, SETTING, check_arrived, check_in_no_file, write_planted_project
from tests.system.containers import BASE, Containers, containers
from tests.waiting import wait_until

pytestmark = pytest.mark.system

BUILD = ("image", "build", "--base", BASE, "--build-arg", "SYSTEM_PACKAGES=", "--build-arg", "EXTRAS=")
OFFLINE = ("--build-arg", "PIP_ARGS=--no-index --no-deps")
SECRET = "hf_" + "planted" * 4
TARGETS = """\
targets:
  box:
    kind: docker
    engine: docker
    network: none
    data: the data
    secrets: [HF_TOKEN]
"""
TASK = """\
import os
import time
from pathlib import Path

from torch import nn
from torch.nn import functional as F

from drivetrain import Task, datasets


class Slow(Task):
    steps: int = 1000
    global_batch: int = 32
    log_every: int = 1
    crash: bool = False

    def model(self):
        print("user", os.getuid(), "data", Path("/data/note.txt").read_text(), "token", len(os.environ["HF_TOKEN"]), flush=True)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    def train_data(self):
        return datasets.digits("train")

    def loss(self, model, batch):
        if self.crash:
            raise ValueError("this task crashes")
        time.sleep(0.05)
        print("tick", time.time(), flush=True)
        return F.cross_entropy(model(batch[0]), batch[1])
"""


@pytest.fixture(scope="module")
def engine() -> Iterator[Containers]:
    with containers() as started:
        run_ok(*BUILD, *OFFLINE, **started.variables)
        yield started


@pytest.fixture
def project(folder: Path, engine: Containers) -> Path:
    """A folder with a target, a task and data; its name and that of the task are not plain."""
    path = folder / "it's a $(project), é"
    (path / "the data").mkdir(parents=True)
    (path / "the data" / "note.txt").write_text("mounted")
    (path / "drivetrain.yaml").write_text(TARGETS)
    (path / "a task.py").write_text(TASK)
    os.chdir(path)
    return path


def variables(engine: Containers) -> dict[str, str]:
    return engine.variables | {"HF_TOKEN": SECRET}


def test_the_built_image_is_recorded(engine: Containers) -> None:
    record = json.loads((Path(engine.variables["XDG_STATE_HOME"]) / "drivetrain" / "images.json").read_text())["cpu"]
    image = engine.inspect("image", "drivetrain:cpu")
    assert record["digest"].removeprefix("sha256:") == image["Id"].removeprefix("sha256:")
    assert image["Config"]["Labels"]["drivetrain.source"] == record["source"]
    assert image["Config"]["Entrypoint"] == ["drivetrain"]
    assert set(image["Config"]["Volumes"]) == {"/data", "/runs"}


def test_the_image_trains_without_root_and_without_the_target(engine: Containers) -> None:
    engine.docker("run", "--name", "plain", "--network=none", "drivetrain:cpu", "train", "digits", "epochs=1", "--name", "first")
    assert engine.inspect("container", "plain")["Config"]["User"] == "1000:1000"
    assert "runs/first" in engine.docker("logs", "plain")
    engine.docker("rm", "--volumes", "plain")


def test_digits_trains_in_a_container(project: Path, engine: Containers) -> None:
    output = run_ok("train", "digits", "epochs=2", "--on", "box", "--wait", "--name", "first", **variables(engine))
    assert "accuracy" in output
    run = Run(Path("runs/first"))
    assert run.read()["outcome"] == "ok"
    assert (run.path / "logs" / "output.log").read_text().count("epoch 2/2") >= 1
    assert (run.path / "run.json").stat().st_uid == os.getuid()
    assert not engine.docker("ps", "--all", "--quiet"), "the container was removed after its end"
    assert "finished" in run_ok("status", "first", **variables(engine))
    assert "finished already" in run_ok("train", "digits", "--on", "box", "--name", "first", **variables(engine))


def test_a_run_is_followed_stopped_and_resumed(project: Path, engine: Containers) -> None:
    name, output = "a night, + (3)", project / "runs" / "a night, + (3)" / "logs" / "output.log"
    run_ok("train", "a task.py", "--on", "box", "--name", name, **variables(engine))
    follow = subprocess.Popen([*COMMAND, "logs", "-f", name], env=environment(**variables(engine)), stdout=subprocess.PIPE, text=True)
    try:
        wait_until(
            lambda: output.is_file() and output.read_text().count("tick") >= 5, "lines of the container in output.log", process=follow
        )
        container = engine.docker("ps", "--quiet", "--filter", f"label=drivetrain.run={name}")
        assert "running" in run_ok("status", name, **variables(engine))
        assert "running on box already" in run_ok("train", "a task.py", "--on", "box", "--name", name, **variables(engine))
        facts = engine.inspect("container", container)
        assert facts["Config"]["User"] == f"{os.getuid()}:{os.getgid()}"
    finally:
        run_ok("stop", name, **variables(engine))
    printed, _ = follow.communicate(timeout=120)
    assert f"user {os.getuid()} data mounted token {len(SECRET)}" in printed
    assert json.loads((project / "runs" / name / "target.json").read_text())["exit_code"] == 200
    assert Run(Path("runs") / name).read()["outcome"] == "preempted"
    assert not engine.docker("ps", "--all", "--quiet")

    ticks = output.read_text().count("tick")
    steps = int(Run(Path("runs") / name).last_row()["step"]) + 20
    resumed = run_ok("resume", name, f"steps={steps}", "--wait", **variables(engine))
    assert "resume  from step" in resumed
    assert output.read_text().count("tick") > ticks, "the output of the second container follows that of the first"
    assert Run(Path("runs") / name).read()["outcome"] == "ok"
    leaks = [path for path in (project / "runs").rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert not leaks


def test_a_submission_that_was_killed_before_its_record_is_found_again(project: Path, engine: Containers) -> None:
    """The record is as it was before the engine answered."""
    train = ("train", "a task.py", "--on", "box", "--name", "killed")
    run_ok(*train, **variables(engine))
    record = Path("runs/killed/target.json")
    written = json.loads(record.read_text())
    for words in (("status", "killed"), train, ("stop", "killed")):
        record.write_text(json.dumps(written | {"handle": {}, "phase": "submitting"}))
        output = run_ok(*words, **variables(engine))
        assert words != train or "running on box already" in output
        assert json.loads(record.read_text())["handle"]["container"] == written["handle"]["container"]
    assert json.loads(record.read_text())["exit_code"] == 200
    assert not engine.docker("ps", "--all", "--quiet")


def test_planted_secrets_arrive_and_are_in_no_file(project: Path, engine: Containers) -> None:
    Path("drivetrain.yaml").write_text(TARGETS.replace("[HF_TOKEN]", str(NAMES)))
    write_planted_project()
    hidden = engine.variables | SECRETS
    train = ("train", "small.py", "steps=2", "--on", "box", "--name", "hidden")
    assert "planted-" not in run_ok(*train, "--dry-run", **hidden)
    assert "planted" not in expect_error("train", "small.py", SETTING, "--on", "box", **engine.variables)
    check_arrived(run_ok(*train, "--wait", **hidden))
    check_in_no_file(project)


def test_a_crash_gives_its_exit_code(project: Path, engine: Containers) -> None:
    words = [*COMMAND, "train", "a task.py", "crash=true", "--on", "box", "--wait", "--name", "crashed", "-q"]
    done = subprocess.run(words, env=environment(**variables(engine)), capture_output=True, text=True)
    assert done.returncode == 1
    assert "this task crashes" in done.stdout
    assert json.loads(Path("runs/crashed/target.json").read_text())["phase"] == "ended"


def test_doctor(project: Path, engine: Containers) -> None:
    checks = {check["subject"]: check for check in json.loads(run_ok("doctor", "--on", "box", "--json", **variables(engine)))}
    assert checks["image"]["verdict"] == "ok"
    assert checks["reach"]["evidence"].startswith("docker ")


def test_a_failed_build_names_its_step_and_the_last_image_stays(project: Path, engine: Containers) -> None:
    arguments = ("--build-arg", "EXTRAS=tune", "--build-arg", "PIP_ARGS=--no-index", "--tag", "drivetrain:broken")
    message = expect_error(*BUILD, *arguments, "-q", code=201, **engine.variables)
    assert "of the Dockerfile failed (RUN " in message
    assert "No matching distribution found for optuna" in message
    assert "drivetrain:cpu" in run_ok("image", "list", **engine.variables)


def test_an_image_that_is_not_there(project: Path, engine: Containers) -> None:
    elsewhere = variables(engine) | {"XDG_STATE_HOME": str(project / "state")}
    engine.docker("tag", "drivetrain:cpu", "drivetrain:other")
    engine.docker("image", "rm", "drivetrain:cpu")
    try:
        message = expect_error("train", "digits", "--on", "box", "--name", "none", **elsewhere)
        assert "there is no image drivetrain:cpu: build it with `drivetrain image build`" in message
    finally:
        engine.docker("tag", "drivetrain:other", "drivetrain:cpu")


def compose() -> list[str]:
    if shutil.which("docker") and subprocess.run(["docker", "compose", "version"], capture_output=True).returncode == 0:
        return ["docker", "compose"]
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    pytest.skip("needs docker-compose (tests/system/install)")


@pytest.mark.parametrize(("profile", "services"), [("train", {"train", "train-lora"}), ("gpu", {"train-gpu"})])
def test_compose_profiles_resolve(folder: Path, profile: str, services: set[str]) -> None:
    Path("compose.yaml").write_text(run_ok("image", "compose"))
    command = [*compose(), "--file", "compose.yaml", "--profile", profile, "config"]
    listed = subprocess.run([*command, "--services"], capture_output=True, text=True, check=True, env=environment(TASK="/code/mine.py"))
    full = subprocess.run(command, capture_output=True, text=True, check=True, env=environment(TASK="/code/mine.py"))
    assert services <= set(listed.stdout.split())
    assert "/code/mine.py" in full.stdout or profile != "train"
    assert "1000:1000" in full.stdout
