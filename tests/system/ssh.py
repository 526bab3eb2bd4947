"""Real SSH servers on hosts with their own network and their own disks, and a machine to reach them from."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from drivetrain.chaos.hosts import Host, hosts
from drivetrain.outcomes import Problem
from tests.command import COMMAND, environment
from tests.launching import free_port
from tests.waiting import wait_until

SSHD = "/usr/sbin/sshd"
SERVER = """\
Port 22
HostKey {folder}/host-key-{number}
PidFile none
AuthorizedKeysFile {folder}/authorized_keys
StrictModes no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
UsePAM no
MaxStartups 100
MaxSessions 100
AcceptEnv SLURM_CONF
Subsystem sftp internal-sftp
"""
CLIENT = """\
Host *
  User root
  IdentityFile {folder}/id
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  StrictHostKeyChecking yes
  LogLevel ERROR
"""


@dataclass
class Boxes:
    """Two machines with SSH servers, and the user's own machine."""

    servers: list[Host]
    client: Host
    folder: Path
    """Keys and configuration."""
    base: Path
    """drivetrain's folder on each server: on a disk of its own."""

    def command(self, *words: str) -> list[str]:
        """Returns a drivetrain command on the user's machine."""
        return [*self.client.enter, *COMMAND, *words]

    def run(self, *words: str, code: int = 0, seconds: float = 300, **extra: str) -> str:
        """Runs drivetrain on the user's machine; returns what it prints."""
        done = subprocess.run(
            self.command(*words), capture_output=True, text=True, timeout=seconds, env=environment(**extra), stdin=subprocess.DEVNULL
        )
        assert done.returncode == code, f"{shlex.join(words)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def start(self, *words: str, **extra: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(*words),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(**extra),
            stdin=subprocess.DEVNULL,
        )

    def on_server(self, number: int, *words: str) -> str:
        """Runs a command on a server's disk; returns what it prints."""
        pid = next(p for p in self.servers[number].processes() if "sshd" in Path(f"/proc/{p}/cmdline").read_text())
        done = subprocess.run(["nsenter", "--target", str(pid), "--mount", "--", *words], capture_output=True, text=True)
        return done.stdout

    def write_target(self, **entry: Any) -> None:
        """Writes drivetrain.yaml with the target `boxes`."""
        settings = {"kind": "ssh", "hosts": ["box1", "box2"], "options": ["-F", str(self.folder / "config")], "dir": str(self.base)}
        Path("drivetrain.yaml").write_text(yaml.safe_dump({"targets": {"boxes": settings | {"python": sys.executable} | entry}}))

    def commands(self, number: int) -> list[str]:
        """Returns the command lines of drivetrain's processes on a server."""
        lines = []
        for pid in self.servers[number].processes():
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
                if "drivetrain" in line or "host_program" in line or "program.py" in line:
                    lines.append(line)
        return lines


@contextlib.contextmanager
def boxes(folder: Path, disk_size: str = "200m") -> Iterator[Boxes]:
    """Starts two SSH servers; skips where that is not possible."""
    _prepare(folder)
    base = folder / "disk"
    base.mkdir()
    started: list[subprocess.Popen[bytes]] = []
    try:
        with hosts(3) as (*servers, client):
            config, known = CLIENT.format(folder=folder), ""
            for number, server in enumerate(servers, 1):
                _make_key(folder / f"host-key-{number}")
                (folder / f"sshd-{number}").write_text(SERVER.format(folder=folder, number=number))
                known += f"{server.address} {' '.join((folder / f'host-key-{number}.pub').read_text().split()[:2])}\n"
                config += f"Host box{number}\n  HostName {server.address}\n"
                mount = f"mount -t tmpfs -o size={disk_size} tmpfs {shlex.quote(str(base))}"
                serve = shlex.join([SSHD, "-D", "-e", "-f", str(folder / f"sshd-{number}")])
                with open(folder / f"sshd-{number}.log", "wb") as log:
                    words = [*server.enter, "unshare", "--mount", "sh", "-c", f"{mount} && exec {serve}"]
                    started.append(subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log))
            (folder / "known_hosts").write_text(known)
            (folder / "config").write_text(config)
            for number in range(1, len(servers) + 1):
                log_file = folder / f"sshd-{number}.log"
                wait_until(lambda log_file=log_file: "listening" in log_file.read_text(), "an SSH server", 30)
            yield Boxes(servers, client, folder, base)
    except Problem as problem:
        pytest.skip(str(problem))
    finally:
        for process in started:
            process.kill()
            process.wait()


def _prepare(folder: Path) -> None:
    """Makes the folder with the user's key; skips where no SSH server can be started."""
    for program in (SSHD, "ssh", "rsync"):
        if shutil.which(program) is None:
            pytest.skip(f"needs {program} (tests/system/install)")
    if os.geteuid() != 0:
        pytest.skip("needs root, to start SSH servers")
    folder.mkdir(parents=True, exist_ok=True)
    Path("/run/sshd").mkdir(exist_ok=True)
    _make_key(folder / "id")
    shutil.copy(folder / "id.pub", folder / "authorized_keys")


def _make_key(path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)


@contextlib.contextmanager
def server_on_this_machine(folder: Path) -> Iterator[list[str]]:
    """Starts an SSH server on this machine; yields the words for ssh with which it is the host `here`."""
    _prepare(folder)
    _make_key(folder / "host-key-1")
    port = free_port()
    (folder / "sshd").write_text(SERVER.format(folder=folder, number=1).replace("Port 22\n", f"Port {port}\nListenAddress 127.0.0.1\n"))
    (folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {' '.join((folder / 'host-key-1.pub').read_text().split()[:2])}\n")
    (folder / "config").write_text(CLIENT.format(folder=folder) + f"Host here\n  HostName 127.0.0.1\n  Port {port}\n")
    with open(folder / "sshd.log", "wb") as log:
        process = subprocess.Popen([SSHD, "-D", "-e", "-f", str(folder / "sshd")], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        wait_until(lambda: "listening" in (folder / "sshd.log").read_text(), "an SSH server", 30, process)
        yield ["-F", str(folder / "config")]
    finally:
        process.kill()
        process.wait()
