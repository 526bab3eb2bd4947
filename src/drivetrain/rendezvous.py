"""Several machines by hand: the same command on each, and they find each other at HOST:PORT.

The machine that owns HOST listens there, tells every other its place and the run's name, then frees the
port for torch's own store. So rank 0, and with it the run directory that is written, is always on HOST.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from io import BufferedReader
from typing import Any

from drivetrain.outcomes import Outcome, Problem
from drivetrain.supervise import Place

HELLO = "drivetrain-1"
WAIT = 600.0
ANSWER = 5.0  # a machine of ours greets at once; another program that holds the port may stay silent


def parse(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise Problem(f"--rendezvous {text}: write HOST:PORT, such as node1:29500")
    return host, int(port)


def meet(
    address: tuple[str, int], nodes: int, procs: int, node_rank: int | None, notice: Callable[[str], None],
    offer: Callable[[int], dict[str, Any]], same: dict[str, Any] | None = None,
) -> tuple[Place, dict[str, Any]]:  # fmt: skip
    """This machine's place, and what the first machine offered (`offer(world_size)`) to all.

    A machine whose `same` is not the first one's is turned away."""
    listener = _listen(address) if node_rank in (None, 0) else None
    if listener is not None:
        with listener:
            return _host(listener, address, nodes, procs, notice, offer, json.loads(json.dumps(same)))
    return _join(address, procs, node_rank, notice, same)


def _listen(address: tuple[str, int]) -> socket.socket | None:
    """A listening socket where HOST is this machine and the port is free, else None."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except (OSError, socket.gaierror):
        listener.close()
        return None
    listener.listen()
    return listener


def _host(
    listener: socket.socket, address: tuple[str, int], nodes: int, procs: int, notice: Callable[[str], None],
    offer: Callable[[int], dict[str, Any]], same: dict[str, Any] | None,
) -> tuple[Place, dict[str, Any]]:  # fmt: skip
    guests: list[tuple[socket.socket, dict[str, Any]]] = []
    notice(f"waiting at {address[0]}:{address[1]} for {nodes - 1} more machine{'s' if nodes > 2 else ''}: start the same command there")
    deadline = time.monotonic() + WAIT
    while len(guests) < nodes - 1:
        listener.settimeout(max(0.1, deadline - time.monotonic()))
        try:
            guest, _ = listener.accept()
            guest.settimeout(ANSWER / 2)
            hello = _receive(guest.makefile("rb"))
            if hello.get("hello") != HELLO:
                raise ValueError("not a machine of ours")
            welcome = hello.get("same") == same
            _send(guest, {"hello": HELLO, "welcome": welcome})
        except TimeoutError:
            if time.monotonic() < deadline:
                continue
            raise Problem(f"only {len(guests) + 1} of {nodes} machines came within {WAIT:.0f} s", Outcome.INFRA) from None
        except (OSError, ValueError):
            continue  # a port scanner
        if welcome:
            guests.append((guest, hello))
        notice(f"{len(guests) + 1} of {nodes} machines are here" if welcome else "turned a machine away: its command is not the same")
    if any(h["node_rank"] is not None for _, h in guests):
        guests.sort(key=lambda g: g[1]["node_rank"] if g[1]["node_rank"] is not None else nodes)
    world = procs + sum(h["procs"] for _, h in guests)
    try:
        offered = offer(world)
    except Problem as problem:
        for guest, _ in guests:
            _send(guest, {"problem": str(problem)})
        raise
    first = procs
    for guest, hello in guests:
        _send(guest, {"first_rank": first, "world_size": world, "offer": offered})
        first += hello["procs"]
    for guest, _ in guests:  # they close first, so that no address stays in TIME_WAIT here
        guest.settimeout(10)
        try:
            guest.recv(1)
        except OSError:
            pass
        guest.close()
    return Place(0, procs, world, address), offered


def _join(
    address: tuple[str, int], procs: int, node_rank: int | None, notice: Callable[[str], None], same: dict[str, Any] | None
) -> tuple[Place, dict[str, Any]]:
    where = f"{address[0]}:{address[1]}"
    notice(f"joining the machines that meet at {where}")
    deadline = time.monotonic() + WAIT
    while True:
        try:
            with socket.create_connection(address, timeout=ANSWER) as host, host.makefile("rb") as answers:
                _send(host, {"hello": HELLO, "procs": procs, "node_rank": node_rank, "same": same})
                try:
                    greeting = _receive(answers)
                except (ValueError, OSError):
                    greeting = {}
                if greeting.get("hello") != HELLO:
                    raise Problem(f"port {address[1]} on {address[0]} is in use by another program: choose another --rendezvous port")
                if not greeting["welcome"]:
                    raise Problem(f"the command at {where} has another task, code or settings than this one: run the same on each machine")
                host.settimeout(WAIT)
                try:
                    answer = _receive(answers)
                except (ValueError, OSError):
                    raise Problem(f"the command at {where} ended before all machines had come: run it again", Outcome.INFRA) from None
            break
        except socket.gaierror:
            raise Problem(f"--rendezvous {where}: the name {address[0]} is not known here") from None
        except OSError as error:
            if time.monotonic() > deadline:
                raise Problem(f"nobody answers at {where} ({error.strerror}): is the command running there?", Outcome.INFRA) from None
            time.sleep(0.5)
    if "problem" in answer:
        raise Problem(answer["problem"])
    return Place(answer["first_rank"], procs, answer["world_size"], address), answer["offer"]


def _send(peer: socket.socket, value: dict[str, Any]) -> None:
    peer.sendall(json.dumps(value).encode() + b"\n")


def _receive(peer: BufferedReader) -> dict[str, Any]:
    value = json.loads(peer.readline(1 << 24))
    if not isinstance(value, dict):
        raise ValueError("no answer")
    return value
