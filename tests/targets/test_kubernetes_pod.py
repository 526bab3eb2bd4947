"""The program of a pod, started as a cluster's operator starts it: by itself, on this machine."""

from __future__ import annotations

import hashlib
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
from drivetrain.targets.kubernetes.restarts import RestartsOnVolume, code_of_run, final_code
from drivetrain.targets.layout import Layout
from tests.command import environment, write_task
from tests.waiting import wait_until

MASTER = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "x-master-0", "MASTER_PORT": "23456", "PET_NNODES": "1", "POD_IP": "127.0.0.1"}


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(str(tmp_path / "volume"), "project", "a run")


def start(layout: Layout, *words: str, keep: int = 0, storage: str = "", retries: int = 0, **variables: str) -> subprocess.Popen[str]:
    options = [
        f"--base={layout.base}",
        f"--project={layout.project}",
        f"--run={layout.run}",
        f"--retries={retries}",
        f"--keep={keep}",
        f"--storage={storage}",
    ]
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


DEADLY = """\
import os
from pathlib import Path

from small import Small


class Deadly(Small):
    def loss(self, model, batch):
        if not Path("healthy").exists() and model.training:
            os.kill(os.getpid(), 9)
        return super().loss(model, batch)
"""


def start_deadly(layout: Layout, storage: str, retries: int, **variables: str) -> tuple[int, str]:
    """Starts a pod whose training dies in its first step, where there is no file `healthy`; returns its exit code and what it printed."""
    folder = Path(layout.folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_task(str(folder / "small.py"))
    (folder / "deadly.py").write_text(DEADLY)
    run_dir = layout.run_dir if storage in ("volume", "") else storage
    words = [
        "train",
        "deadly.py",
        "steps=3",
        "plan.threads=1",
        "plan.compile=off",
        "--device",
        "cpu",
        "--restarts",
        "0",
        "--run-dir",
        run_dir,
    ]
    options = [
        f"--base={layout.base}",
        f"--project={layout.project}",
        f"--run={layout.run}",
        f"--storage={storage}",
        f"--retries={retries}",
    ]
    command = [sys.executable, "-P", "-c", POD_WITHOUT_PAUSES, *options, "--", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(**MASTER, **variables), timeout=300)
    return done.returncode, done.stdout + done.stderr


POD_WITHOUT_PAUSES = """
import sys
from drivetrain.targets.host import program
from drivetrain.targets.kubernetes import pod
program.RETRY_SECONDS = 0.0
sys.exit(pod.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("storage", ["volume", "bucket"])
def test_a_run_that_always_fails_is_not_made_again_for_ever(layout: Layout, tmp_path: Path, storage: str) -> None:
    """The operator makes a pod again after every code of 128 or more; one of 101 to 103 ends the job."""
    address = storage if storage == "volume" else f"file://{tmp_path}/bucket/a-run"
    infra = EXIT_CODES[Outcome.INFRA]
    assert [start_deadly(layout, address, 1)[0] for _ in range(2)] == [infra, final_code(infra)]
    assert code_of_run(final_code(infra)) == infra
    code, printed = start_deadly(layout, address, 0)
    assert code == final_code(infra), "the next job counts from the beginning"
    assert "in 1 pods without a new checkpoint" in printed
    assert job_state(layout.job())["code"] == infra, "the outcome of the run stays what it is"
    Path(layout.folder, "healthy").touch()
    assert start_deadly(layout, address, 0)[0] == 0


def test_a_new_checkpoint_begins_the_count_again(layout: Layout) -> None:
    restarts = RestartsOnVolume(1, layout, 0)
    assert [restarts.count_start() for _ in range(3)] == [True, True, False]
    assert not restarts.may_repeat()
    write_checkpoint(Path(layout.run_dir), 10)
    assert restarts.may_repeat()
    assert restarts.count_start()
    restarts.forget()
    assert [restarts.count_start() for _ in range(3)] == [True, True, False]


def write_checkpoint(run: Path, step: int) -> None:
    """Writes a checkpoint without files that counts as complete."""
    manifest: dict[str, object] = {"files": {}}
    folder = run / "checkpoints" / f"step-{step:08d}"
    folder.mkdir(parents=True)
    (run / "run.json").write_text("{}")
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest | {"digest": digest}))


def test_a_run_that_is_only_in_its_pod_ends_with_it(layout: Layout) -> None:
    code, printed = start_deadly(layout, "", 0)
    assert code == final_code(EXIT_CODES[Outcome.INFRA])
    assert "its files are only in this pod" in printed


def test_a_killed_pod_counts_and_a_stopped_one_does_not(layout: Layout) -> None:
    """A pod that the kernel kills for its memory leaves no exit code of its own."""
    restarts = RestartsOnVolume(3, layout, 0)
    killed = start(layout, *train(layout), "epochs=100000", storage="volume", retries=3)
    wait_until(lambda: restarts.read().get("starts") == 1, "the start", 120, killed)
    killed.kill()
    killed.communicate(timeout=30)
    stopped = start(layout, *train(layout), "epochs=100000", storage="volume", retries=3)
    wait_until(lambda: restarts.read().get("starts") == 2, "the start", 120, stopped)
    wait_until(lambda: Path(layout.run_dir, "metrics.jsonl").is_file(), "the first steps", 120, stopped)
    stopped.send_signal(signal.SIGTERM)
    stopped.communicate(timeout=60)
    assert stopped.returncode == EXIT_CODES[Outcome.PREEMPTED]
    assert restarts.read() == {}
