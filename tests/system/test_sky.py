"""The whole way of `--on sky`: a stand-in for `sky` starts real SSH servers, and real ssh and rsync train there."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from drivetrain.runs import Run
from tests.command import TASK, environment, run_drivetrain, run_ok, write_task
from tests.system import sky_machine
from tests.targets import sky_stand_in
from tests.waiting import wait_until

FAST = ("plan.threads=1", "plan.compile=off", "steps=60", "save_every=10")
SLOW = ("return F.cross", "import time; time.sleep(0.06 * model.training)\n        return F.cross")


@dataclass
class Sky:
    """The stand-in, and a user with a home folder of its own."""

    state: Path
    variables: dict[str, str]

    def run(self, *words: str, code: int = 0) -> str:
        """Runs drivetrain as this user; returns what it prints."""
        done = run_drivetrain(*words, seconds=120, **self.variables)
        assert done.returncode == code, f"{shlex.join(words)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def launches(self) -> int:
        lines = (self.state / "calls.jsonl").read_text().splitlines()
        return sum(words[0] == "launch" and "--dryrun" not in words for words in map(json.loads, lines))

    def clusters(self) -> list[str]:
        path = self.state / "clusters.json"
        return list(json.loads(path.read_text())) if path.exists() else []

    def take_back(self, cluster: str) -> None:
        """Ends a cluster as a cloud does that takes its spot machines back."""
        self.end(cluster)
        (self.state / "clusters.json").write_text("{}")

    def end(self, cluster: str) -> None:
        subprocess.run([self.state / "end", cluster], check=True, env=environment(**self.variables))


@pytest.fixture
def sky(folder: Path) -> Iterator[Sky]:
    for program in (sky_machine.SSHD, "ssh", "rsync"):
        if shutil.which(program) is None:
            pytest.skip(f"needs {program} (tests/system/install)")
    if os.geteuid() != 0:
        pytest.skip("needs root, to start SSH servers")
    Path("/run/sshd").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="sky ") as name:  # sshd's own paths have no space
        home = Path(name)
        with tempfile.TemporaryDirectory(prefix="sky-") as plain:
            state = Path(plain) / "state"
            programs = Path(plain) / "bin"
            for path in (state, programs):
                path.mkdir()
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", state / "id"], check=True)
            write_program(programs / "sky", sky_stand_in.__name__)
            for verb in ("start", "end"):
                write_program(state / verb, sky_machine.__name__, verb)
            variables = {"PATH": f"{programs}:{os.environ['PATH']}", "SKY_STAND_IN": str(state), "HOME": str(home)}
            target = {"kind": "sky", "gpus": "A10:1", "python": sys.executable, "dir": str(Path(plain) / "disk"), "device": "cpu"}
            targets = {"cloud": target, "spot": target | {"spot": True}}
            Path("drivetrain.yaml").write_text(yaml.safe_dump({"targets": targets}))
            user = Sky(state, variables)
            try:
                yield user
            finally:
                for cluster in user.clusters():
                    user.end(cluster)


def write_program(path: Path, *words: str) -> None:
    """Writes a program that runs a module of the tests."""
    modules = Path(__file__).parents[2]
    path.write_text(
        f'#!/bin/sh\nPYTHONPATH={shlex.quote(f"{modules}/src:{modules}")} exec {shlex.join([sys.executable, "-P", "-m", *words])} "$@"\n'
    )
    path.chmod(0o755)


def losses(name: str) -> list[float]:
    return [row["train/loss"] for row in Run(f"runs/{name}").rows() if "train/loss" in row]


@pytest.mark.system
def test_a_run_on_spot_machines_survives_their_loss(sky: Sky, folder: Path) -> None:
    """Price and consent, launch, status, pull, preemption, resume with the same bits on new machines, down."""
    write_task()
    run_ok("train", "small.py", *FAST, "--name", "reference")
    write_task(change=SLOW)
    train = ("train", "small.py", *FAST, "--on", "spot", "--name", "far")
    output = sky.run(*train, code=2)
    assert "$   0.40 an hour   1 x 1x_A10_SECURE[Spot] at RunPod (US)" in output and "repeat the command with --yes" in output
    assert sky.launches() == 0 and not Path("runs/far").exists()
    output = sky.run(*train, "--yes")
    (cluster,) = sky.clusters()
    assert f"running on spot ({cluster})" in output and sky.launches() == 1
    wait_until(lambda: "running on spot" in sky.run("status", "far") and int(Run("runs/far").last_row().get("step", 0)) >= 15, "steps", 60)
    sky.run("pull", "far")
    pulled = Run("runs/far").checkpoint_steps()[-1]
    sky.take_back(cluster)
    output = sky.run("status", "far")
    assert "the cloud took them back" in output and "drivetrain resume far" in output
    assert "--yes" in sky.run("resume", "far", code=2) and sky.launches() == 1
    output = sky.run("resume", "far", "--yes", "--wait")
    assert f"sending far (step {pulled}, " in output and "it has nothing of it there" in output
    assert sky.launches() == 2
    assert losses("far") == losses("reference")
    assert Run("runs/far").model_path.is_file()
    assert f"removed {cluster} with their disks" in sky.run("down", "spot", "--yes")
    assert sky.clusters() == [] and not list(sky.state.glob(f"{cluster}-*"))
    assert "finished on spot" in sky.run("status", "far")


@pytest.mark.system
def test_two_machines_train_as_one(sky: Sky, folder: Path) -> None:
    write_task(text=TASK.replace("nn.Dropout(0.2)", "nn.Identity()"))  # its masks depend on the number of processes
    run_ok("train", "small.py", *FAST, "--procs", "2", "--name", "here")
    output = sky.run("train", "small.py", *FAST, "--on", "cloud", "--nodes", "2", "--yes", "--wait", "--name", "there")
    assert "$   1.50 an hour   2 x gpu_1x_a10 at Lambda (us-east-1)" in output
    assert "2 of 2 machines have joined" in output
    assert losses("there") == pytest.approx(losses("here"), rel=1e-6)
    (cluster,) = sky.clusters()
    assert cluster.endswith("-x2")
    assert f"removed {cluster} with their disks" in sky.run("down", "cloud", "--yes")
