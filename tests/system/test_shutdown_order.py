"""A real systemd, in namespaces of its own, shuts down: save.sh ends before SSH sessions get SIGTERM. Google's service is a stand-in."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.machine_scripts import StandInMachine
from tests.waiting import wait_until

SYSTEMD = "/lib/systemd/systemd"
SERVICE = """\
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/bin/true
ExecStop=/bin/bash -c 'echo save begins >>{log}; sleep 1; echo save ends >>{log}'
TimeoutStopSec=0
KillMode=process
"""
RUN = """trap 'echo the run gets SIGTERM >>"$0"; exit' TERM
echo the run begins >>"$0"
while :; do sleep 0.05; done"""
START = """set -e
mount --make-rprivate /
mount -t proc proc /proc
mount -t tmpfs tmpfs /run
umount -l /sys/fs/cgroup
mount -t cgroup2 none /sys/fs/cgroup
exec env container=docker SYSTEMD_UNIT_PATH="$0" {systemd} --system --unit=basic.target --log-target=console --show-status=0"""
JOIN = 'echo $BASHPID >"$0/cgroup.procs"; exec unshare --mount --pid --fork --kill-child --cgroup --uts --ipc --net -- bash -c "$1" "$2"'


@dataclass
class Systemd:
    """A systemd that knows only the units of a folder."""

    pid: int

    def command(self, *words: str) -> list[str]:
        return ["nsenter", "--target", str(self.pid), "--mount", "--pid", "--net", "--ipc", "--uts", "--cgroup", "--", *words]

    def systemctl(self, *words: str) -> str:
        return subprocess.run(self.command("systemctl", *words), capture_output=True, text=True, timeout=30).stdout


@contextlib.contextmanager
def systemd(folder: Path, units: Path) -> Iterator[Systemd]:
    """Starts systemd in namespaces and a control group of its own; skips where that is not possible."""
    if os.geteuid() != 0 or not os.path.exists(SYSTEMD) or shutil.which("nsenter") is None:
        pytest.skip("needs root, systemd and nsenter")
    for name in ("basic", "sysinit", "shutdown", "umount", "final", "sockets", "slices", "timers", "paths"):
        (units / f"{name}.target").write_text("[Unit]\nDefaultDependencies=no\n")
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    group = next((Path(words[1]) / f"drivetrain-{folder.name}-{os.getpid()}" for words in mounts if words[2] == "cgroup2"), None)
    if group is None:
        pytest.skip("needs control groups of version 2")
    group.mkdir()
    with open(folder / "console", "wb") as console:
        outer = subprocess.Popen(
            ["bash", "-c", JOIN, group, START.format(systemd=SYSTEMD), units], stdin=subprocess.DEVNULL, stdout=console, stderr=console
        )
    children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
    try:
        wait_until(lambda: children.read_text().strip() != "", "a process in the namespaces", 30, outer)
        started = Systemd(int(children.read_text().split()[0]))
        wait_until(lambda: started.systemctl("is-system-running").strip() in ("running", "degraded"), "systemd", 60, outer)
        yield started
    finally:
        for pid in [*map(int, children.read_text().split()), outer.pid]:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        outer.wait()
        wait_until(lambda: _is_removed(group), "the end of the control group", 10)


def _is_removed(group: Path) -> bool:
    for folder, _, _ in os.walk(group, topdown=False):
        with contextlib.suppress(OSError):  # its processes are ending
            os.rmdir(folder)
    return not group.exists()


@pytest.mark.parametrize("has_order", [False, True])
def test_runs_save_before_sessions_end(tmp_path: Path, has_order: bool) -> None:
    machine = StandInMachine(tmp_path / "machine")
    assert machine.start() == 0
    units, log = tmp_path / "units", tmp_path / "log"
    units.mkdir()
    (units / "google-shutdown-scripts.service").write_text(SERVICE.format(log=log))
    if has_order:
        shutil.copytree(machine.folder / "etc/systemd/system/session-.scope.d", units / "session-.scope.d")
    with systemd(tmp_path, units) as started:
        started.systemctl("start", "google-shutdown-scripts.service")
        session = ["systemd-run", "--scope", "--unit=session-9.scope", "--slice=user.slice", "bash", "-c", RUN, str(log)]
        run = subprocess.Popen(started.command(*session), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            wait_until(lambda: log.exists(), "the run", 30, run)
            started.systemctl("start", "--no-block", "shutdown.target")
            wait_until(lambda: {"save ends", "the run gets SIGTERM"} <= set(log.read_text().splitlines()), "the shutdown", 30)
        finally:
            run.kill()
            run.wait()
    events = log.read_text().splitlines()
    is_late = events.index("the run gets SIGTERM") > events.index("save ends")
    assert is_late == has_order, events  # without the order the test would prove nothing
