"""The worker's side of hang diagnosis: on a signal it writes its Python stacks; when a named pipe is opened, its last collectives."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import threading
from pathlib import Path
from typing import TextIO

DUMP_SIGNAL = signal.SIGUSR2 if hasattr(signal, "SIGUSR2") else None


def stacks_path(folder: Path, rank: int) -> Path:
    """Returns the file to which a rank, and the processes it forks, write their stacks."""
    return folder / f"stacks-{rank}"


def request_pipe(folder: Path, rank: int) -> Path:
    """Returns the named pipe of a rank; whoever opens it asks the rank for its collectives."""
    return folder / f"request-{rank}"


def collectives_path(folder: Path, rank: int) -> Path:
    """Returns the file to which a rank writes its collectives."""
    return folder / f"collectives-{rank}.json"


def dump_stacks_on_signal(file: TextIO) -> None:
    """Makes this process, and those it forks, write their stacks to a file on DUMP_SIGNAL, even when the interpreter is stuck."""
    if DUMP_SIGNAL is not None:
        faulthandler.register(DUMP_SIGNAL, file=file, all_threads=True, chain=False)


def dump_collectives_on_request(folder: Path, rank: int) -> None:
    """Starts a thread that writes torch's record of the last collectives to a file each time the pipe is opened."""
    pipe = request_pipe(folder, rank)
    try:
        os.mkfifo(pipe)
    except OSError:
        return  # a file system without named pipes

    def answer_requests() -> None:
        from torch._C import _distributed_c10d

        dump = getattr(_distributed_c10d, "_dump_fr_trace_json", lambda: "{}")  # torch 2.11 may lack it

        while True:
            with open(pipe) as request:  # blocks until a writer opens the pipe
                request.read()
            record = json.loads(dump())  # torch's flight recorder
            collectives_path(folder, rank).write_text(json.dumps(record.get("entries", [])))

    threading.Thread(target=answer_requests, name="collectives", daemon=True).start()
