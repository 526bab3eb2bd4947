"""The scripts of Google Cloud's machines run for real, on stand-ins of machines: start-up, saving before the end, shutdown when idle.

tests/system/test_machine_scripts.py kills them at every command, and lets every command fail.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.machine_scripts import StandInMachine, compose

APT_ERROR = "Reading package lists...\nE: Failed to fetch http://deb.debian.org/x.deb  404  Not Found [IP: 203.0.113.1 80]\n"


@pytest.fixture
def gpu_machine(tmp_path: Path) -> StandInMachine:
    return StandInMachine(tmp_path / "a machine", num_gpus=2)


@pytest.fixture
def cpu_machine(tmp_path: Path) -> StandInMachine:
    return StandInMachine(tmp_path / "a machine")


@pytest.mark.parametrize("name", ["startup", "idle", "save"])
def test_syntax(name: str) -> None:
    text = compose(use_gpu=True, num_gpus=1, idle_minutes=30, ssh_user="me", save_seconds=25)[name]
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    if shutil.which("shellcheck"):
        done = subprocess.run(["shellcheck", "-"], input=text, text=True, capture_output=True)
        assert done.returncode == 0, done.stdout


def test_units_of_systemd(cpu_machine: StandInMachine) -> None:
    cpu_machine.start()
    units = cpu_machine.folder / "etc/systemd/system"
    assert (units / "session-.scope.d/drivetrain.conf").read_text() == "[Unit]\nBefore=google-shutdown-scripts.service\n"
    service, timer = units / "drivetrain-idle.service", units / "drivetrain-idle.timer"
    assert "ExecStart=/usr/local/sbin/drivetrain-idle\n" in service.read_text()
    if shutil.which("systemd-analyze"):
        service.write_text(
            service.read_text().replace("/usr/local/sbin/drivetrain-idle", "/bin/true")
        )  # the program is not on this machine
        done = subprocess.run(["systemd-analyze", "verify", service, timer], capture_output=True, text=True)
        assert done.returncode == 0 and "drivetrain" not in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["drivetrain", "train"], True),
        (["python3", "-m", "drivetrain", "train"], True),
        (["/opt/venv/bin/python", "/opt/venv/bin/drivetrain", "train"], True),
        (["/opt/venv/bin/python", "/opt/venv/bin/torchrun", "--nproc-per-node", "2", "-m", "drivetrain", "train"], True),
        (["vim", "drivetrain"], False),
        (["python3", "-m", "http.server"], False),
        (["tail", "-f", "/home/me/drivetrain"], False),
        (["python3", "-m"], False),
    ],
)
def test_what_is_a_command_of_drivetrain(cpu_machine: StandInMachine, words: list[str], expected: bool) -> None:
    folder = cpu_machine.folder / "proc/77"
    folder.mkdir()
    (folder / "cmdline").write_bytes(b"".join(word.encode() + b"\0" for word in words))
    (folder / "environ").write_bytes(b"HOME=/root\0NOTE=DRIVETRAIN_JOB=x\0")
    (folder / "status").write_text("Name:\tx\nPPid:\t1\n")
    program = cpu_machine.scripts["idle"].partition("# A timer runs this")[0] + "leading_processes"
    found = subprocess.run(["bash", "-c", program], env=cpu_machine.environment(), capture_output=True, text=True).stdout
    assert found.split() == (["77"] if expected else [])


# --- start-up ----------------------------------------------------------------------------------


def test_cpu_machine(cpu_machine: StandInMachine) -> None:
    assert cpu_machine.start() == 0
    assert cpu_machine.ready == "start-1"
    assert cpu_machine.console()[-1] == "drivetrain: ready"
    assert cpu_machine.has("python3-venv") and cpu_machine.has("rsync")
    assert not cpu_machine.has("cuda-drivers") and not cpu_machine.has("nvidia-container-toolkit")
    assert not any("shutdown" in call for call in cpu_machine.calls())
    assert "systemctl enable --now drivetrain-idle.timer" in cpu_machine.calls()


def test_gpu_machine_restarts_once(gpu_machine: StandInMachine) -> None:
    assert gpu_machine.start() == 0
    assert gpu_machine.ready is None
    assert gpu_machine.console()[-1] == "drivetrain: restarting once, to load the GPU's driver"
    assert gpu_machine.calls()[-1] == "shutdown -r now"
    installs = [call.split(" install ")[1] for call in gpu_machine.calls() if " install " in call]
    assert installs[-2:] == ["nvidia-driver-pinning-580", "cuda-drivers"]  # the branch is fixed before the driver is installed
    assert gpu_machine.start() == 0
    assert gpu_machine.ready == "start-2"
    assert gpu_machine.has("nvidia-container-toolkit") and "nvidia-ctk runtime configure --runtime=docker" in gpu_machine.calls()
    list_file = gpu_machine.folder / "etc/apt/sources.list.d/nvidia-container-toolkit.list"
    assert "[signed-by=" in list_file.read_text()


def test_later_starts_change_nothing(gpu_machine: StandInMachine) -> None:
    gpu_machine.start(), gpu_machine.start()
    before = gpu_machine.changes()
    assert gpu_machine.start() == 0
    assert gpu_machine.ready == "start-3"
    assert gpu_machine.changes()[len(before) :] == [
        "systemctl daemon-reload",
        "systemctl enable --now drivetrain-idle.timer",
        "systemctl daemon-reload",
        "usermod -aG docker me",
    ]


def test_progress_is_on_the_console_and_in_the_log(gpu_machine: StandInMachine) -> None:
    gpu_machine.start(), gpu_machine.start()
    log = (gpu_machine.folder / "var/log/drivetrain-startup.log").read_text()
    assert all(line.startswith("drivetrain: ") for line in gpu_machine.console())
    assert all(re.search(rf"^\d{{4}}-\S+Z {re.escape(line)}$", log, re.MULTILINE) for line in gpu_machine.console())
    texts = [line.removeprefix("drivetrain: ") for line in gpu_machine.console()]
    for text in ("preparing this machine", "packages", "the GPU's driver (some minutes)", "container toolkit"):
        assert text in texts


def test_a_fault_is_said_and_said_again(cpu_machine: StandInMachine) -> None:
    cpu_machine.fail("apt-get", APT_ERROR)
    assert cpu_machine.start() == 1
    assert cpu_machine.ready is None
    reason = "packages: E: Failed to fetch http://deb.debian.org/x.deb  404  Not Found [IP: 203.0.113.1 80]"
    assert cpu_machine.console()[-1] == f"drivetrain: failed: {reason}"
    assert "drivetrain: packages: attempt 1 of 4 failed: E: Failed" in "\n".join(cpu_machine.console())
    assert "systemctl enable --now drivetrain-idle.timer" in cpu_machine.calls()  # a machine that cannot be prepared stops itself too
    assert cpu_machine.start() == 1
    assert f"drivetrain: the last start failed: {reason}" in cpu_machine.console()
    cpu_machine.mend("apt-get")
    assert cpu_machine.start() == 0
    assert cpu_machine.ready == "start-3"
    assert cpu_machine.start() == 0
    assert cpu_machine.console()[-3:] != [] and "failed" not in cpu_machine.console()[-4]


def test_a_driver_that_does_not_load_never_restarts_twice(gpu_machine: StandInMachine) -> None:
    (gpu_machine.folder / "driver-broken").touch()
    assert [gpu_machine.start() for _ in range(4)] == [0, 1, 1, 1]
    assert gpu_machine.calls().count("shutdown -r now") == 1
    assert gpu_machine.console()[-1] == (
        "drivetrain: failed: checking the GPUs: nvidia-smi shows 0 GPUs instead of 2, after the restart for the driver: "
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
    )


def test_missing_gpus(tmp_path: Path) -> None:
    fewer = StandInMachine(tmp_path / "fewer", num_gpus=3, expected_gpus=4)
    assert [fewer.start(), fewer.start()] == [0, 1]
    assert "nvidia-smi shows 3 GPUs instead of 4" in fewer.console()[-1]
    none = StandInMachine(tmp_path / "none", num_gpus=0, expected_gpus=1)
    assert none.start() == 1
    assert none.console()[-1].endswith("failed: the GPU's driver (some minutes): no NVIDIA GPU is attached to this machine")
    assert not any("install cuda-drivers" in call for call in none.calls())


def test_no_console(cpu_machine: StandInMachine) -> None:
    (cpu_machine.folder / "dev/ttyS0").unlink()
    assert cpu_machine.start() == 0 and cpu_machine.ready


def test_idle_shutdown_can_be_off(tmp_path: Path) -> None:
    machine = StandInMachine(tmp_path / "machine", idle_minutes=0)
    assert machine.start() == 0
    assert not any("drivetrain-idle" in call for call in machine.calls())
    timer = machine.folder / "etc/systemd/system/drivetrain-idle.timer"
    timer.parent.mkdir(parents=True, exist_ok=True)
    timer.touch()  # it was on before
    assert machine.start() == 0
    assert "systemctl disable --now drivetrain-idle.timer" in machine.calls() and not timer.exists()


# --- idle --------------------------------------------------------------------------------------


def is_down(machine: StandInMachine) -> bool:
    return "shutdown -h now" in machine.calls()


def idle_until(machine: StandInMachine, start: int, minutes: int) -> None:
    """Runs the script now and then over so many minutes, and at the last one."""
    for minute in sorted({*range(0, minutes, 8), minutes - 1}):
        machine.set_time(start + 60 * minute)
        machine.run("idle")


def test_idle_machine_shuts_down(cpu_machine: StandInMachine) -> None:
    idle_until(cpu_machine, 100, 30)
    assert not is_down(cpu_machine)
    idle_until(cpu_machine, 100 + 30 * 60, 1)
    assert is_down(cpu_machine)
    assert cpu_machine.console()[-1].startswith("drivetrain: idle for 30 minutes: shutting down")


def test_the_installed_script_is_this_one(cpu_machine: StandInMachine) -> None:
    cpu_machine.start()
    program = cpu_machine.folder / "usr/local/sbin/drivetrain-idle"
    assert program.read_text() == cpu_machine.scripts["idle"] and os.access(program, os.X_OK)
    subprocess.run([program], env=cpu_machine.environment(), check=True)
    assert (cpu_machine.folder / "run/drivetrain-idle-since").read_text() == "100\n"


@pytest.mark.parametrize("activity", ["load", "connection", "gpu", "process"])
def test_activity_keeps_it_on(gpu_machine: StandInMachine, activity: str) -> None:
    (gpu_machine.folder / "loaded").write_text("2")
    (gpu_machine.folder / "gpu-use").write_text("0\n[N/A]\n")
    sleeper = subprocess.Popen(["sleep", "60"], env={**os.environ, "DRIVETRAIN_JOB": "/somewhere/jobs/one"})
    try:
        idle_until(gpu_machine, 100, 29)
        match activity:
            case "load":
                gpu_machine.set_load(0.5)
            case "connection":
                (gpu_machine.folder / "connections").write_text("0 0 10.0.0.2:22 203.0.113.7:50000\n")
            case "gpu":
                (gpu_machine.folder / "gpu-use").write_text("0\n97\n")
            case "process":
                gpu_machine.add_process(sleeper.pid)
        idle_until(gpu_machine, 100 + 29 * 60, 60)
        assert not is_down(gpu_machine)
        gpu_machine.set_load(0.0)
        (gpu_machine.folder / "connections").write_text("")
        (gpu_machine.folder / "gpu-use").write_text("0\n4\n")
        (gpu_machine.folder / f"proc/{sleeper.pid}").unlink(missing_ok=True)
        idle_until(gpu_machine, 100 + 89 * 60, 30)
        assert not is_down(gpu_machine)  # it counts from the end of the activity
        idle_until(gpu_machine, 100 + 119 * 60, 1)
        assert is_down(gpu_machine)
    finally:
        sleeper.kill()
        sleeper.wait()


@pytest.mark.parametrize("content", ["", "nonsense", "999999", "-5"])
def test_a_damaged_record_delays_only(cpu_machine: StandInMachine, content: str) -> None:
    (cpu_machine.folder / "run/drivetrain-idle-since").write_text(content)
    cpu_machine.set_time(7200)
    cpu_machine.run("idle")
    assert not is_down(cpu_machine)
    idle_until(cpu_machine, 7260, 31)
    assert is_down(cpu_machine)


def test_a_load_of_eight_is_no_octal_number(cpu_machine: StandInMachine) -> None:
    for load in (0.08, 0.09):
        cpu_machine.set_load(load)
        idle_until(cpu_machine, 100, 31)
    assert is_down(cpu_machine)


# --- saving before the end ---------------------------------------------------------------------

WORKER = """\
import signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])  # has the variable too: not a supervisor
def on_signal(number, frame):
    time.sleep({seconds})
    child.kill()
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, on_signal)
print(child.pid, flush=True)
while True:
    time.sleep(0.1)
"""


def start_worker(machine: StandInMachine, seconds: float) -> subprocess.Popen[str]:
    variables = {**os.environ, "DRIVETRAIN_JOB": "/home/me/jobs/one"}
    process = subprocess.Popen([sys.executable, "-c", WORKER.format(seconds=seconds)], env=variables, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    machine.add_process(process.pid)
    machine.add_process(child)
    return process


def test_runs_save_before_the_end(cpu_machine: StandInMachine) -> None:
    cpu_machine.start()
    processes = [start_worker(cpu_machine, 0.5), start_worker(cpu_machine, 1.0)]
    bystander = subprocess.Popen(["sleep", "60"])
    cpu_machine.add_process(bystander.pid)
    try:
        script = subprocess.Popen(["bash", "-c", cpu_machine.scripts["save"]], env=cpu_machine.environment())
        started = time.monotonic()
        assert [process.communicate(timeout=20)[0] for process in processes] == ["saved\n", "saved\n"]
        assert script.wait(20) == 0
        assert time.monotonic() - started < cpu_machine.save_seconds
        assert cpu_machine.console()[-2:] == ["drivetrain: shutting down: asking 2 runs to save", "drivetrain: all runs have saved"]
        assert cpu_machine.ready is None
        assert bystander.poll() is None
    finally:
        for process in (*processes, bystander):
            process.kill()
            process.wait()


def test_it_waits_no_longer_than_google_does(tmp_path: Path) -> None:
    machine = StandInMachine(tmp_path / "machine", save_seconds=2)
    process = start_worker(machine, 60)
    try:
        started = time.monotonic()
        assert machine.run("save") == 0
        assert 0.9 < time.monotonic() - started < 10
        assert f"still saving after 2 s: {process.pid}." in machine.console()[-1]
    finally:
        process.kill()
        process.wait()


def test_nothing_to_save(cpu_machine: StandInMachine) -> None:
    started = time.monotonic()
    assert cpu_machine.run("save") == 0
    assert time.monotonic() - started < 5 and cpu_machine.console() == []
