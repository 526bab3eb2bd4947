"""The settings of a rendezvous: the address, the number of machines, and the recipe."""

from __future__ import annotations

import hmac
import re
import shlex
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from drivetrain.launch.rendezvous.handshake import Keys

JOIN_SECONDS = 600.0  # machines wait this long for each other


@dataclass(frozen=True)
class RendezvousConfig:
    address: tuple[str, int]
    nodes: tuple[int, int]
    """The smallest and the largest number of machines that train together."""
    procs: int
    """Processes of this machine."""
    node_rank: int | None
    notice: Callable[[str], None]
    """Prints a line for the user."""
    identity: str
    """The recipe as text, which must be the same on every machine."""

    @property
    def where(self) -> str:
        return f"{self.address[0]}:{self.address[1]}"

    @property
    def interface(self) -> str:
        """The network interface of the address; "" on machines that do not have the address."""
        try:
            return interface_of(socket.gethostbyname(self.address[0]))
        except OSError:
            return ""

    @property
    def command(self) -> str:
        """The command that the user types on the other machines."""
        words = sys.argv[1:]
        if "--node-rank" in words[:-1]:
            words[words.index("--node-rank") + 1] = "K"
        return shlex.join(["drivetrain", *words])

    def identity_digest(self, keys: Keys) -> str:
        """Returns a keyed digest of the recipe. Without the token it reveals nothing about the recipe."""
        return hmac.new(keys.to_leader, self.identity.encode(), "sha256").hexdigest()


def port_in_use(address: tuple[str, int]) -> str:
    """Returns what a user reads if another program has the port."""
    return f"port {address[1]} on {address[0]} is in use by another program: choose another port (--rendezvous; with --on: another --name), or end it"


def interface_of(address: str) -> str:
    """Returns the name of this machine's network interface with an address; "" if there is none."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in addresses):
            return name
    return ""


def machine_name() -> str:
    """Returns this machine's host name; invalid characters are replaced by -."""
    return re.sub(r"[^0-9A-Za-z._-]", "-", socket.gethostname()).strip("._-")[:253] or "machine"
