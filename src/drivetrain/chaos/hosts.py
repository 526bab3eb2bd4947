"""Creates several hosts on one machine: network namespaces, each with a name, an address and a connection that can be cut.

The hosts are connected to a bridge in another namespace, so this machine's network does not change. The kernel
removes everything when the processes that hold the namespaces end. Root is not needed where users may create namespaces.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from drivetrain.outcomes import Problem

TOOL_PACKAGES = {"ip": "iproute2", "unshare": "util-linux", "nsenter": "util-linux", "hostname": "hostname"}
NETWORK_PREFIX = "10.77.0."


class Host:
    """A network namespace with a name, an address and the processes that run in it."""

    def __init__(self, switch: Switch, number: int) -> None:
        self.switch, self.name, self.address = switch, f"host{number}", f"{NETWORK_PREFIX}{10 + number}"
        self.cable = f"v{self.name}"
        self.holder = _hold_namespaces([*switch.enter, "unshare", "--net", "--uts"], self.name)
        self.enter = _enter_command(self.holder.pid, *switch.namespaces, "--uts")
        switch.ip("link", "add", self.cable, "type", "veth", "peer", "name", "eth0", "netns", str(self.holder.pid))
        switch.ip("link", "set", self.cable, "master", "bridge", "up")
        for words in ("link set lo up", f"addr add {self.address}/24 dev eth0", "link set eth0 up"):
            _call([*self.enter, "ip", *words.split()])

    def start(self, command: Sequence[str], environment: Mapping[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
        """Starts a command on this host. The returned process's pid is the command's own."""
        return subprocess.Popen([*self.enter, *command], env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def cut_cable(self) -> None:
        self.switch.ip("link", "set", self.cable, "down")

    def mend_cable(self) -> None:
        self.switch.ip("link", "set", self.cable, "up")

    def processes(self) -> list[int]:
        namespace = os.readlink(f"/proc/{self.holder.pid}/ns/net")
        pids = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and int(entry.name) != self.holder.pid and os.readlink(entry / "ns/net") == namespace:
                    pids.append(int(entry.name))
        return pids

    def kill(self) -> None:
        """Sends SIGKILL to every process on this host."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class Switch:
    """The bridge that the cables of all hosts are connected to."""

    def __init__(self) -> None:
        for tool, package in TOOL_PACKAGES.items():
            if shutil.which(tool) is None:
                raise Problem(f"hosts on this machine need `{tool}`, of the package {package}")
        user_namespace = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        self.namespaces = ["--net", *(["--user", "--preserve-credentials"] if user_namespace else [])]
        self.holder = _hold_namespaces(["unshare", *user_namespace, "--net"])
        self.enter = _enter_command(self.holder.pid, *self.namespaces)
        self.ip("link", "add", "bridge", "type", "bridge")
        self.ip("link", "set", "bridge", "up")

    def ip(self, *words: str) -> None:
        _call([*self.enter, "ip", *words])


@contextlib.contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """Creates hosts; at the end kills every process on them and removes them."""
    switch = Switch()
    created: list[Host] = []
    try:
        for number in range(1, count + 1):
            created.append(Host(switch, number))
        yield created
    finally:
        for host in created:
            host.kill()
        for holder in [*(host.holder for host in created), switch.holder]:
            holder.kill()
            holder.wait()


def _hold_namespaces(command: list[str], hostname: str = "") -> subprocess.Popen[bytes]:
    """Starts a process in new namespaces. They exist until it ends, at the latest when this process ends."""
    script = (f"hostname {hostname} && " if hostname else "") + "echo up && exec cat"
    holder = subprocess.Popen([*command, "sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert holder.stdout is not None and holder.stderr is not None
    if holder.stdout.readline().strip() != b"up":
        reason = holder.stderr.read().decode().strip()
        holder.wait()
        raise Problem(f"no network namespace can be made here ({reason}): run this as root, or where users may make namespaces")
    return holder


def _enter_command(pid: int, *namespaces: str) -> list[str]:
    """Returns the command prefix that runs a program in the namespaces of a process."""
    return ["nsenter", "--target", str(pid), *namespaces, "--"]


def _call(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise Problem(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
