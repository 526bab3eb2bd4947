"""What `doctor` finds out about a machine's Python, and about the way between machines."""

from __future__ import annotations

import queue
import secrets
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from drivetrain.outcomes import Problem
from drivetrain.targets.base import Check
from drivetrain.targets.host.connection import ReachableHost
from drivetrain.targets.submission import FIRST_PORT, NUM_PORTS

LISTEN_SECONDS = 20.0


def python_checks(host: ReachableHost, python: str, env: Mapping[str, str], is_there_later: bool = False) -> Iterator[Check]:
    """Yields whether the Python of a target's `python:` can train. `is_there_later`: the job's prologue may bring it."""
    subject = f"{host.name}: Python"
    facts = host.call("check_python", python=python, variables=dict(env))
    if "fault" in facts:
        yield Check(subject, "warning" if is_there_later else "fault", facts["fault"], facts["fix"])
        return
    yield Check(subject, "ok", f"{facts['version']} ({facts['path']}), torch {facts['torch']}")
    if facts["has_gpu"] and not facts["uses_gpu"]:
        fix = "install torch for CUDA there, or leave python: out of the target: an environment is built then"
        yield Check(f"{host.name}: torch", "warning", f"torch {facts['torch']} cannot use the GPUs there", fix)


def meeting_checks(hosts: Sequence[ReachableHost], address: str) -> Iterator[Check]:
    """Yields whether the first machine has the address at which a run's machines meet, and whether the others reach it."""
    first, *others = hosts
    key = secrets.token_hex(16)
    ports: queue.SimpleQueue[str | Problem] = queue.SimpleQueue()

    def listen() -> None:
        try:
            first.call(
                "listen", notice=ports.put, address=address, key=key, connections=len(others), first_port=FIRST_PORT, num_ports=NUM_PORTS,
                seconds=LISTEN_SECONDS,
            )  # fmt: skip
        except Problem as problem:
            ports.put(problem)

    with ThreadPoolExecutor(max_workers=16) as pool:
        listening = pool.submit(listen)
        port = ports.get()
        if isinstance(port, Problem):
            fix = f"set rendezvous: in the target to an address of {first.name} that the others reach"
            yield Check(f"{first.name}: meeting point", "fault", str(port).removeprefix(f"{first.name}: "), fix)
            return
        yield Check(f"{first.name}: meeting point", "ok", f"it has the address {address}")
        for host, answer in zip(
            others, pool.map(lambda host: host.call("connect", address=address, port=int(port), key=key), others), strict=True
        ):
            yield _way_check(host, first, f"{address}:{port}", answer)
        listening.result()


def _way_check(host: ReachableHost, first: ReachableHost, where: str, answer: dict[str, Any]) -> Check:
    subject = f"{host.name}: way to {first.name}"
    if not answer["error"]:
        return Check(subject, "ok", f"{where} answers")
    fix = f"open the ports of {first.name} to it (firewall), or set rendezvous: in the target to an address that it reaches"
    return Check(subject, "fault", f"it cannot connect to {where}: {answer['error']}", fix)
