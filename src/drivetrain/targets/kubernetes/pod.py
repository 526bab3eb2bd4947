"""The program of a pod: finds its number and the first pod in what the cluster's operator has set, and supervises `drivetrain train`.

It repeats the command where that helps, and leaves the same files as the program on an SSH machine (`host/program.py`), so that
`kubectl exec` can ask it the same questions. Its arguments: its own options, `--`, and the words after `drivetrain`.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from drivetrain.outcomes import EXIT_CODES, Outcome, outcome_of_code
from drivetrain.targets.host.library import JOB_VARIABLE, STOPPED_CODE, read_json, write_json
from drivetrain.targets.host.program import record_process, supervise
from drivetrain.targets.kubernetes.restarts import FIRST_REPEATED_CODE, Restarts, final_code, restarts_of
from drivetrain.targets.layout import Layout

ASKED, FETCHED, OWNER = "asked", "fetched", "owner.json"
"""Files of the job's folder: `stop` asks the run to end; all files were copied; the job that began here last."""
ASKED_SECONDS = 600.0
"""A pod that was asked to stop waits so long for its deletion: if it ended, the operator would start it again."""
NAME_SECONDS = 600.0
POLL_SECONDS = 0.3
DEFAULT_PORT = "29500"
FINAL = "final"
"""The key of exit.json with the pod's exit code, if no other pod is to be started."""


class PodPlace(NamedTuple):
    """Where this pod is in its job."""

    rank: int
    leader: str
    """The address of the first pod."""
    port: str


def position(environment: Mapping[str, str]) -> PodPlace:
    """Reads what the operator has set: RANK and MASTER_ADDR (PyTorchJob), PET_NODE_RANK and PET_MASTER_ADDR (TrainJob)."""
    rank = int(environment.get("PET_NODE_RANK") or environment.get("RANK") or 0)
    leader = environment.get("PET_MASTER_ADDR") or environment.get("MASTER_ADDR") or ""
    port = environment.get("PET_MASTER_PORT") or environment.get("MASTER_PORT") or DEFAULT_PORT
    # The name of the first pod is known to the cluster's DNS only after the pod has started: the pod itself takes its address.
    return PodPlace(rank, (environment.get("POD_IP") or leader) if rank == 0 else leader, port)


def is_operators(name: str) -> bool:
    """Whether a variable is the operator's: drivetrain would take its command for a worker of another launcher."""
    return name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") or name.startswith("PET_")


def main(words: Sequence[str]) -> int:
    options, command = _read(words)
    place = position(os.environ)
    layout = Layout(options.base, options.project, options.run)
    job, output = Path(layout.job(place.rank)), Path(layout.output(place.rank))
    for name in [name for name in os.environ if is_operators(name)]:
        del os.environ[name]
    os.environ[JOB_VARIABLE] = str(job)
    if (code := _final_code(job)) is not None:
        print(f"drivetrain: this job has ended with code {code}, which a repetition does not change", flush=True)
        return code
    restarts = restarts_of(options.storage, layout, place.rank, options.retries)
    if not restarts.count_start():
        return _give_up(job, restarts, EXIT_CODES[Outcome.INFRA])
    meeting = ["--rendezvous", f"{place.leader}:{place.port}", "--node-rank", str(place.rank)] if options.nodes > 1 else []
    for folder in (job, output.parent):
        folder.mkdir(parents=True, exist_ok=True)
    for name in ("exit.json", "stop", ASKED, FETCHED):
        (job / name).unlink(missing_ok=True)
    write_json(job / OWNER, {"owner": os.environ.get("POD_OWNER", "")})
    signal.signal(signal.SIGTERM, lambda *_: os._exit(STOPPED_CODE))  # until the command runs: process 1 ignores signals without a handler
    if place.rank > 0:
        _wait_for_name(place.leader)
    python = [sys.executable, "-P", "-m", "drivetrain"]
    write_json(
        job / "job.json", {"words": [*python, *command, *meeting], "variables": {}, "cwd": layout.folder, "retries": options.retries}
    )
    record_process(job, os.getpid())
    with open(output, "ab", buffering=0) as log:
        code = _supervised(job, log)
    if code < FIRST_REPEATED_CODE or (job / "stop").exists():
        restarts.forget()
    elif not restarts.may_repeat():
        code = _give_up(job, restarts, code)
    _stay(job, options.keep)
    return code


def _give_up(job: Path, restarts: Restarts, code: int) -> int:
    """Returns the exit code that ends the job, because its run fails again and again. The next job of the run counts from the beginning."""
    restarts.forget()
    further = f"in {restarts.limit + 1} pods without a new checkpoint" if restarts.is_known else "and its files are only in this pod"
    print(f"drivetrain: it ended with code {code} ({outcome_of_code(code)}) {further}: no other pod is started for it", flush=True)
    job.mkdir(parents=True, exist_ok=True)
    write_json(
        job / "exit.json", {"attempts": 0, "ended": time.time()} | read_json(job / "exit.json") | {"code": code, FINAL: final_code(code)}
    )
    return final_code(code)


def _wait_for_name(leader: str) -> None:
    """Waits until the cluster's DNS knows the first pod, which may start later than this one."""
    deadline = time.monotonic() + NAME_SECONDS
    while time.monotonic() < deadline:
        try:
            socket.getaddrinfo(leader, None)
            return
        except OSError:
            time.sleep(POLL_SECONDS)


def _read(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser("drivetrain.targets.kubernetes.pod", description=__doc__)
    for name in ("base", "project", "run"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--storage", default="")
    for name, default in (("nodes", 1), ("retries", 3), ("keep", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    end = list(words).index("--")
    return parser.parse_args(words[:end]), list(words[end + 1 :])


def _final_code(job: Path) -> int | None:
    """Returns the code with which this job has ended in an earlier start of the container, if it ends so again: a TrainJob's pods are
    started again after any code."""
    owner, ended = read_json(job / OWNER).get("owner"), read_json(job / "exit.json")
    code = ended.get(FINAL, ended.get("code", 0))
    is_same_job = bool(owner) and owner == os.environ.get("POD_OWNER")
    return code if is_same_job and 0 < code < FIRST_REPEATED_CODE else None


def _supervised(job: Path, log: IO[bytes]) -> int:
    """Supervises the command. What it prints goes to the container's log and to the run's output file."""
    reading, writing = os.pipe()
    stdout, stderr = os.dup(1), os.dup(2)
    sys.stdout.flush()
    os.dup2(writing, 1)
    os.dup2(writing, 2)
    os.close(writing)

    def copy() -> None:
        while data := os.read(reading, 1 << 16):
            os.write(stdout, data)
            log.write(data)

    copier = threading.Thread(target=copy, daemon=True)
    copier.start()
    try:
        return supervise(job, {})
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        copier.join(timeout=10)  # a process that the run has left may keep the pipe open


def _stay(job: Path, keep: int) -> None:
    """Waits until the run's files were fetched, or the pod is deleted; at most `keep` seconds."""
    is_deleted = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: is_deleted.set())
    was_signalled, was_asked = (job / "stop").exists(), (job / ASKED).exists()
    seconds = max(float(keep), ASKED_SECONDS) if was_asked else 0.0 if was_signalled else float(keep)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not is_deleted.wait(POLL_SECONDS):
        if (job / FETCHED).exists() and not was_asked:
            break


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
