"""Two hosts on one machine: network namespaces with names, addresses and a cable that can be cut."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from tests.command import COMMAND, environment

BRIDGE = "br-drivetrain"
HOSTS = {"dt1": "10.77.0.11", "dt2": "10.77.0.12"}


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextlib.contextmanager
def network() -> Iterator[None]:
    """The hosts, each with its own interfaces and names."""
    try:
        ip("link", "add", BRIDGE, "type", "bridge")
        ip("addr", "add", "10.77.0.1/24", "dev", BRIDGE)
        ip("link", "set", BRIDGE, "up")
        for name, address in HOSTS.items():
            ip("netns", "add", name)
            ip("link", "add", f"v{name}", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", f"v{name}", "master", BRIDGE, "up")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            folder = Path("/etc/netns") / name
            folder.mkdir(parents=True, exist_ok=True)
            names = "".join(f"{a} {n}\n" for n, a in HOSTS.items())
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        yield
    finally:
        for name in HOSTS:
            for pid in pids(name):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
            subprocess.run(["rm", "-rf", f"/etc/netns/{name}"])
        subprocess.run(["ip", "link", "del", BRIDGE], capture_output=True)


def cut(name: str) -> None:
    ip("link", "set", f"v{name}", "down")


def mend(name: str) -> None:
    ip("link", "set", f"v{name}", "up")


def pids(name: str) -> list[int]:
    """The processes of a host."""
    done = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
    return [int(pid) for pid in done.stdout.split()]


class Agent:
    """The command on one host."""

    def __init__(self, host: str, *words: str, **variables: str) -> None:
        self.host, self.log = host, Path(f"{host}.log")
        shell = f'hostname {host}; exec "$@"'
        command = ["ip", "netns", "exec", host, "unshare", "--uts", "--", "bash", "-c", shell, host, *COMMAND, *words]
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                command, env=environment(GLOO_SOCKET_IFNAME="eth0", **variables), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    @property
    def output(self) -> str:
        return self.log.read_text()

    @property
    def front(self) -> psutil.Process:
        """The command itself; `ip`, `unshare` and `bash` became it."""
        return psutil.Process(self.process.pid)

    def kill(self, workers: bool) -> None:
        """-9 to the command, and first to its workers, if that is asked for."""
        family: list[Any] = self.front.children(recursive=True) if workers else []
        for process in [self.front, *family]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
