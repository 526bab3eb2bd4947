"""The program of a pod, started as a cluster's operator starts it: by itself, on this machine."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from drivetrain.outcomes import EXIT_CODES, Outcome
from drivetrain.targets.host.program import job_state
from drivetrain.targets.kubernetes.pod import ASKED, FETCHED
from drivetrain.targets.layout import Layout
from tests.command import environment
from tests.waiting import wait_until

MASTER = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "x-master-0", "MASTER_PORT": "23456", "PET_NNODES": "1", "POD_IP": "127.0.0.1"}


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(str(tmp_path / "volume"), "project", "a run")


def start(layout: Layout, *words: str, keep: int = 0, **variables: str) -> subprocess.Popen[str]:
    options = [f"--base={layout.base}", f"--project={layout.project}", f"--run={layout.run}", "--retries=0", f"--keep={keep}"]
    command = [sys.executable, "-P", "-m", "drivetrain.targets.kubernetes.pod", *options, "--", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(**MASTER, **variables))


def train(layout: Layout) -> tuple[str, ...]:
    return ("train", "digits", "epochs=1", "plan.threads=1", "plan.compile=off", "--device", "cpu", "--run-dir", layout.run_dir)


def test_a_pod_trains_by_itself_and_stays_until_its_files_are_fetched(layout: Layout) -> None:
    """The operator's RANK and WORLD_SIZE would make drivetrain one worker of another launcher."""
    pod = start(layout, *train(layout), keep=300)
    wait_until(lambda: job_state(layout.job())["phase"] == "ended", "the end of the training", 120, pod)
    assert job_state(layout.job())["code"] == 0
    assert pod.poll() is None, "its files are only in the pod"
    Path(layout.job(), FETCHED).touch()
    printed, _ = pod.communicate(timeout=30)
    assert pod.returncode == 0
    assert "done    " in printed
    assert Path(layout.output()).read_text() == printed
    assert json.loads(Path(layout.run_dir, "run.json").read_text())["plan"]["world_size"] == 1


def test_what_a_repetition_does_not_change_is_not_repeated(layout: Layout) -> None:
    """A TrainJob starts a pod's container again after any exit code."""
    for owner, is_repeated in (("job-1", True), ("job-1", False), ("job-2", True)):
        pod = start(layout, "train", "nothing", POD_OWNER=owner)
        printed, _ = pod.communicate(timeout=60)
        assert pod.returncode == EXIT_CODES[Outcome.USAGE]
        assert ("nothing" in printed) == is_repeated
        assert ("which a repetition does not change" in printed) != is_repeated


def test_a_pod_that_was_asked_to_stop_stays_until_it_is_deleted(layout: Layout) -> None:
    """Its exit code would make the operator start it again."""
    pod = start(layout, *train(layout), "epochs=100000")
    wait_until(lambda: Path(layout.run_dir, "metrics.jsonl").is_file(), "the first steps", 120, pod)
    Path(layout.job(), ASKED).touch()
    pod.send_signal(signal.SIGTERM)
    wait_until(lambda: job_state(layout.job())["phase"] == "ended", "the end of the training", 60, pod)
    assert job_state(layout.job())["code"] == EXIT_CODES[Outcome.PREEMPTED]
    time.sleep(1.0)
    assert pod.poll() is None
    pod.send_signal(signal.SIGTERM)
    pod.communicate(timeout=30)
    assert pod.returncode == EXIT_CODES[Outcome.PREEMPTED]


def test_a_deleted_pod_saves_and_ends(layout: Layout) -> None:
    pod = start(layout, *train(layout), "epochs=100000", keep=300)
    wait_until(lambda: Path(layout.run_dir, "metrics.jsonl").is_file(), "the first steps", 120, pod)
    pod.send_signal(signal.SIGTERM)
    printed, _ = pod.communicate(timeout=60)
    assert pod.returncode == EXIT_CODES[Outcome.PREEMPTED], printed
    assert list(Path(layout.run_dir, "checkpoints").iterdir())
