"""The worker's side of hang diagnosis: a signal makes it write its Python stacks, a named pipe its last collectives."""

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
    """Returns the file that a rank, and the processes it forks, write their stacks to."""
    return folder / f"stacks-{rank}"


def request_pipe(folder: Path, rank: int) -> Path:
    """Returns the named pipe whose opening asks a rank for its collectives."""
    return folder / f"asked-{rank}"


def collectives_path(folder: Path, rank: int) -> Path:
    """Returns the file that a rank writes its collectives to."""
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
        return  # a file system without pipes

    def answer() -> None:
        from torch._C import _distributed_c10d

        dump = getattr(_distributed_c10d, "_dump_fr_trace_json", lambda: "{}")  # torch 2.11 may lack it

        while True:
            with open(pipe) as request:  # blocks until a writer opens the pipe
                request.read()
            record = json.loads(dump())
            collectives_path(folder, rank).write_text(json.dumps(record.get("entries", [])))

    threading.Thread(target=answer, name="collectives", daemon=True).start()
