"""The worker's side: it writes its heartbeat, and tells its watcher when a training begins and ends."""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from drivetrain.processes.stack_dumps import dump_collectives_on_request, dump_stacks_on_signal, stacks_path
from drivetrain.runs import Run
from drivetrain.watch.heartbeat import HeartbeatWriter, clear_heartbeat
from drivetrain.watch.screen import EventPipe


@dataclass(frozen=True)
class LeaderPort:
    """Where the leader listens, and the token that its members need."""

    port: int
    """0: it does not listen."""
    token: str


@dataclass(frozen=True)
class TrainingStart:
    """Sent to the watcher when a training begins."""

    run: str
    leader: LeaderPort


class LaunchedWorker:
    """What the worker of another launcher got from its watcher."""

    def __init__(self, launcher: str, page: int, event_pipe: int, folder: Path, leader: LeaderPort) -> None:
        self.launcher, self.leader = launcher, leader
        """The launcher's name, and, on rank 0, the port of its own watcher."""
        self._page, self._events, self._folder = page, EventPipe(event_pipe), folder

    def prepare(self) -> None:
        """Makes this process able to write its stacks and its last collectives for the watcher."""
        rank = int(os.environ["RANK"])
        dump_stacks_on_signal(open(stacks_path(self._folder, rank), "a"))  # noqa: SIM115 (open as long as the process)
        # For the sockets of loader workers, which a killed process cannot remove.
        multiprocessing.current_process()._config["tempdir"] = str(self._folder)  # type: ignore[attr-defined]
        if int(os.environ["WORLD_SIZE"]) > 1:
            os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "200")
            dump_collectives_on_request(self._folder, rank)

    def begin(self, run: Run, leader: LeaderPort) -> HeartbeatWriter:
        """Starts the watch of a training; returns the observer that writes its heartbeat."""
        clear_heartbeat(self._page)
        self._events.send("begin", asdict(TrainingStart(str(run.path), leader)))
        return HeartbeatWriter(self._page)

    def end(self) -> None:
        """Ends the watch: what follows has no heartbeat."""
        self._events.send("end", None)
