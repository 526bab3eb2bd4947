"""The scripts of Google Cloud's machines with faults: each command fails for a while, or the machine is taken away during it."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from tests.command import COMMAND, environment
from tests.machine_scripts import StandInMachine
from tests.waiting import wait_until

CHANGING = ("apt-get", "dpkg", "curl", "systemctl", "useradd", "usermod", "gpg", "nvidia-ctk")


@pytest.fixture
def gpu_machine(tmp_path: Path) -> StandInMachine:
    return StandInMachine(tmp_path / "a machine", num_gpus=2)


@pytest.fixture
def cpu_machine(tmp_path: Path) -> StandInMachine:
    return StandInMachine(tmp_path / "a machine")


@pytest.mark.parametrize("command", CHANGING)
def test_a_short_fault_is_overcome(gpu_machine: StandInMachine, command: str) -> None:
    (gpu_machine.folder / f"fails-once-{command}").touch()
    assert gpu_machine.start() == 0 and gpu_machine.start() == 0
    assert gpu_machine.ready == "start-2"
    assert not (gpu_machine.folder / f"fails-once-{command}").exists()


@pytest.mark.parametrize("command", CHANGING)
def test_a_lasting_fault_leaves_no_ready_machine(gpu_machine: StandInMachine, command: str) -> None:
    gpu_machine.fail(command)
    codes = [gpu_machine.start(), gpu_machine.start()]
    assert codes[-1] == 1 and gpu_machine.ready is None
    assert gpu_machine.console()[-1].startswith("drivetrain: failed: ")
    gpu_machine.mend(command)
    gpu_machine.start(), gpu_machine.start()
    assert gpu_machine.ready == "start-4"


def test_killed_at_every_command(tmp_path: Path) -> None:
    """A spot machine can be taken back at any moment of its preparation; the next starts finish it."""
    whole = StandInMachine(tmp_path / "whole", num_gpus=1)
    whole.start(), whole.start()
    for number in range(1, len(whole.calls()) + 1):
        machine = StandInMachine(tmp_path / f"machine {number}", num_gpus=1)
        for _ in range(4):
            machine.start(KILL_AT=str(number))
            if machine.ready and machine.ready == f"start-{machine.starts}":
                break
        assert machine.ready, f"killed at call {number}, {whole.calls()[number - 1]}: {machine.console()}"
        assert machine.calls().count("shutdown -r now") <= 2  # one may be the call at which it is killed
        assert machine.has("cuda-drivers") and machine.has("nvidia-container-toolkit")


def test_a_training_saves_before_the_end(cpu_machine: StandInMachine, folder: Path) -> None:
    """A command that the user has started there himself, without a supervisor: the signal reaches drivetrain, not each of its processes."""
    cpu_machine.scripts["save"] = cpu_machine.scripts["save"].replace("SAVE_SECONDS=5\n", "SAVE_SECONDS=60\n")
    words = [*COMMAND, "train", "digits", "epochs=100000", "--name", "one", "--procs", "2", "--device", "cpu", "plan.threads=1"]
    process = subprocess.Popen(words, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        metrics = Path("runs/one/metrics.jsonl")
        wait_until(lambda: metrics.exists() and metrics.stat().st_size > 0, "the first steps", 120, process)
        cpu_machine.add_process(process.pid)
        script = subprocess.Popen(["bash", "-c", cpu_machine.scripts["save"]], env=cpu_machine.environment())
        assert process.wait(60) == 200  # preempted
        assert script.wait(60) == 0
        assert cpu_machine.console()[-1] == "drivetrain: all runs have saved"
        assert list(Path("runs/one/checkpoints").iterdir())
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait()
