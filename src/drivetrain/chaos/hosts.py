"""Several hosts on one machine: network namespaces, each with a name, an address and a cable that can be cut.

They hang on a switch in a namespace of its own, so that nothing of this machine's network is touched, and the kernel
takes all of it away when the processes that hold them end. Root is not needed where users may make namespaces.
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

TOOLS = {"ip": "iproute2", "unshare": "util-linux", "nsenter": "util-linux", "hostname": "hostname"}
NETWORK = "10.77.0."


class Host:
    """A name, an address, and what runs there."""

    def __init__(self, switch: Switch, number: int) -> None:
        self.switch, self.name, self.address = switch, f"host{number}", f"{NETWORK}{10 + number}"
        self.cable = f"v{self.name}"
        self.holder = _hold([*switch.inside, "unshare", "--net", "--uts"], self.name)
        self.inside = _enter(self.holder.pid, *switch.spaces, "--uts")
        switch.ip("link", "add", self.cable, "type", "veth", "peer", "name", "eth0", "netns", str(self.holder.pid))
        switch.ip("link", "set", self.cable, "master", "bridge", "up")
        for words in ("link set lo up", f"addr add {self.address}/24 dev eth0", "link set eth0 up"):
            _call([*self.inside, "ip", *words.split()])

    def start(self, words: Sequence[str], environment: Mapping[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
        """A command on this host; its pid is the command's own."""
        return subprocess.Popen([*self.inside, *words], env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def cut(self) -> None:
        self.switch.ip("link", "set", self.cable, "down")

    def mend(self) -> None:
        self.switch.ip("link", "set", self.cable, "up")

    def processes(self) -> list[int]:
        mine = os.readlink(f"/proc/{self.holder.pid}/ns/net")
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and int(entry.name) != self.holder.pid and os.readlink(entry / "ns/net") == mine:
                    found.append(int(entry.name))
        return found

    def kill(self) -> None:
        """-9 to all that runs here."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class Switch:
    """What the cables of all hosts lead to."""

    def __init__(self) -> None:
        for tool, package in TOOLS.items():
            if shutil.which(tool) is None:
                raise Problem(f"hosts on this machine need `{tool}`, of the package {package}")
        mapped = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        self.spaces = ["--net", *(["--user", "--preserve-credentials"] if mapped else [])]
        self.holder = _hold(["unshare", *mapped, "--net"])
        self.inside = _enter(self.holder.pid, *self.spaces)
        self.ip("link", "add", "bridge", "type", "bridge")
        self.ip("link", "set", "bridge", "up")

    def ip(self, *words: str) -> None:
        _call([*self.inside, "ip", *words])


@contextlib.contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """So many of them; at the end all that runs there is killed, and they are gone."""
    switch = Switch()
    made: list[Host] = []
    try:
        for number in range(1, count + 1):
            made.append(Host(switch, number))
        yield made
    finally:
        for host in made:
            host.kill()
        for holder in [*(host.holder for host in made), switch.holder]:
            holder.kill()
            holder.wait()


def _hold(words: list[str], name: str = "") -> subprocess.Popen[bytes]:
    """A process that keeps new namespaces alive for as long as this one lives."""
    script = (f"hostname {name} && " if name else "") + "echo up && exec cat"
    holder = subprocess.Popen([*words, "sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert holder.stdout is not None and holder.stderr is not None
    if holder.stdout.readline().strip() != b"up":
        why = holder.stderr.read().decode().strip()
        holder.wait()
        raise Problem(f"no network namespace can be made here ({why}): run this as root, or where users may make namespaces")
    return holder


def _enter(pid: int, *spaces: str) -> list[str]:
    return ["nsenter", "--target", str(pid), *spaces, "--"]


def _call(words: list[str]) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode != 0:
        raise Problem(f"`{' '.join(words)}` failed: {done.stderr.strip()}")
