"""What is checked on a machine before a run: the Python of `python:`, and the address at which machines meet."""

from __future__ import annotations

import socket
import sys
import venv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drivetrain.launch.rendezvous import join, parse
from drivetrain.launch.request import Request
from drivetrain.outcomes import Outcome, Problem
from drivetrain.runs import Run
from drivetrain.targets.config import make_target
from drivetrain.targets.environment import EnvironmentLock
from drivetrain.targets.host.connection import ReachableHost
from drivetrain.targets.host_checks import meeting_checks, python_checks
from drivetrain.targets.slurm.target import SlurmSettings, SlurmTarget
from drivetrain.targets.submission import Submission
from tests.command import expect_error

HOST = ReachableHost(sys.executable)
MISSING = {"base": "/nowhere", "archives": [], "environment": ""}


@pytest.fixture(scope="module")
def empty_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, symlinks=True)
    return str(folder / "bin" / "python")


def test_a_python_that_cannot_train_is_named_with_its_fix(empty_python: str, tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho broken >&2; exit 3\n")
    broken.chmod(0o755)
    expected = {
        "/nonexistent/python": "/nonexistent/python cannot be started (No such file or directory): correct python: in the target",
        str(broken): f"{broken} is no Python that works (broken): correct python:",
        empty_python: f"lacks torch numpy psutil safetensors pyyaml: {empty_python} -m pip install torch",
    }
    for python, message in expected.items():
        with pytest.raises(Problem) as caught:
            HOST.call("missing", **MISSING, python=python)
        assert message in str(caught.value) and "\n" not in str(caught.value)
        (check,) = python_checks(HOST, python, {})
        assert check.verdict == "fault" and check.fix
        (check,) = python_checks(HOST, python, {}, is_there_later=True)
        assert check.verdict == "warning"


def test_a_python_that_can_train(tmp_path: Path) -> None:
    HOST.call("missing", **MISSING, python=sys.executable)
    check = next(python_checks(HOST, sys.executable, {}))
    assert check.verdict == "ok" and ", torch 2." in check.evidence
    (tmp_path / "psutil.py").write_text("raise ImportError('torch is broken')")
    (check,) = python_checks(HOST, sys.executable, {"PYTHONPATH": str(tmp_path)})
    assert check.verdict == "fault" and "cannot import torch (ImportError: torch is broken)" in check.evidence


def test_the_way_between_machines_is_checked() -> None:
    checks = list(meeting_checks([HOST, HOST, HOST], "127.0.0.1"))
    assert [check.verdict for check in checks] == ["ok"] * 3
    (check,) = meeting_checks([HOST, HOST], "192.0.2.1")
    assert check.verdict == "fault" and "it does not have the address 192.0.2.1" in check.evidence
    assert "set rendezvous: in the target" in check.fix


def test_the_first_machine_says_why_it_cannot_lead() -> None:
    """It does not wait for itself as a member."""
    with pytest.raises(Problem, match=r"not the address 192\.0\.2\.1: write an address of this machine") as caught:
        join(("192.0.2.1", 29_500), (2, 2), 1, 0, print)
    assert caught.value.outcome is Outcome.USAGE
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = ("127.0.0.1", server.getsockname()[1])
        with pytest.raises(Problem, match=r"in use by another program: choose another port .* with --on: another --name") as caught:
            join(address, (2, 2), 1, 0, print)
    assert caught.value.outcome is Outcome.INFRA, "a target tries it again"
    with pytest.raises(Problem, match="IPv6 addresses are not supported"):
        parse("[::1]:29500")
    for settings in ({"rendezvous": "fd00::1"}, {"hosts": ["[::1]", "b"]}):
        with pytest.raises(Problem, match=r"IPv6 .*: set rendezvous: in the target"):
            make_target("box", "ssh", {"hosts": ["a", "b"]} | settings, Path("f")).leader_address()  # type: ignore[attr-defined]


def test_what_is_wrong_with_the_hosts_of_a_target(folder: Path) -> None:
    Path("drivetrain.yaml").write_text("targets: {box: {kind: ssh, hosts: [a, b, a]}, two: {kind: ssh, hosts: [a, b]}}")
    assert "has the host a twice: remove one" in expect_error("train", "digits", "--on", "box", "--dry-run")
    train = ("train", "digits", "--on", "two", "--nodes", "2", "--dry-run")
    assert "there is no ssh on this machine: install it" in expect_error(*train, PATH="/nowhere")


# --- the build of torch for Slurm's machines ------------------------------------------------------


class BehindLoginNode(SlurmTarget):
    """A cluster whose login node is this machine."""

    host = property(lambda self: HOST)  # type: ignore[assignment]


def with_driver(folder: Path) -> str:
    """Makes a machine with a GPU's driver; returns its PATH."""
    folder.mkdir()
    (folder / "nvidia-smi").write_text("#!/bin/sh\necho NVIDIA A100, 580.65.06\n")
    (folder / "nvidia-smi").chmod(0o755)
    return str(folder)


def test_a_login_node_without_a_gpu_builds_no_environment_for_gpus(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request(device="cuda", procs=2)
    lock = EnvironmentLock(("torch==2.13.0",))
    submission = Submission(Run(Path("runs/x")), "x", request, "digits", None, lock, "project-0a")
    base = folder / "base"
    for name in (lock.name("auto"), lock.name("cu126")):
        (base / "environments" / name).mkdir(parents=True)
        (base / "environments" / name / "ready").touch()  # built before, for a run on CPUs

    def outcome(submission: Submission = submission, **settings: Any) -> str:
        target = BehindLoginNode("cluster", SlurmSettings(host="login", dir=str(base), **settings))
        with pytest.raises(Problem) as caught:
            target.submit(submission, target.render(submission), print)
        return str(caught.value)

    monkeypatch.setenv("PATH", "/nowhere")
    assert "torch for CPUs would be built for a run on GPUs: set torch: in the target" in outcome()
    for submitted in (
        outcome(torch="cu126"),
        outcome(python=sys.executable),
        outcome(replace(submission, request=Request(device="cpu")), gpus=2),
    ):
        assert "there is no sbatch" in submitted, "it came as far as Slurm"
    assert "torch for CPUs" in outcome(replace(submission, request=Request()), gres="gpu:a100:4")
    monkeypatch.setenv("PATH", with_driver(folder / "bin"))
    assert "there is no sbatch" in outcome()
