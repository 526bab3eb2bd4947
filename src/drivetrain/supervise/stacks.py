"""Where a process is: its Python stack, asked for by a signal that even a stuck interpreter answers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from drivetrain.processes.procfs import process_state
from drivetrain.processes.stack_dumps import DUMP_SIGNAL, collectives_path, request_pipe
from drivetrain.project import is_users

ANSWER_SECONDS = 5.0
SETTLED = 0.2  # seconds in which no more is written: on a busy machine an answer comes in pieces
FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
WAITS = (
    "/torch/distributed/",
    "/drivetrain/engine/group/collectives.py",
    "/torch/cuda/streams.py",
)  # for other ranks; for the device, which may wait for others'
COMPILES = (
    "/torch/_dynamo/convert_frame.py",
    "/torch/_inductor/compile_fx.py",
    "/torch/_inductor/async_compile.py",
    "/torch/_inductor/graph.py",
    "/torch/utils/cpp_extension.py",
    "/triton/compiler/",
)
IMPORTS = "<frozen importlib"
LOADS = ("/torch/utils/data/", "/multiprocessing/")


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line} in {self.function}"


@dataclass(frozen=True)
class Stack:
    """Of a process's main thread, the innermost frame first."""

    frames: list[Frame]
    text: str
    """All threads, as they were written."""
    stopped: bool = False
    """Whether the process was stopped (state T)."""

    @property
    def waits(self) -> bool:
        """Whether it waits for other ranks, or for the device."""
        return not self.stopped and any(sign in frame.file for frame in self.frames[:2] for sign in WAITS)

    @property
    def loads(self) -> bool:
        """Whether it waits for a process that loads data."""
        return any(sign in frame.file for frame in self.frames[:4] for sign in LOADS)

    @property
    def builds(self) -> bool:
        """Whether it imports, or one of its threads compiles: that takes as long as it takes."""
        return any(frame.file.startswith(IMPORTS) for frame in self.frames) or any(sign in self.text for sign in COMPILES)

    @property
    def operation(self) -> str:
        """What it waits in."""
        return next((f.function for f in self.frames[:2] if any(sign in f.file for sign in WAITS)), "")

    @property
    def users(self) -> Frame | None:
        """The innermost line of the user's own."""
        return next((frame for frame in self.frames if is_users(frame.file)), None)

    @property
    def line(self) -> Frame | None:
        """The line to look at: the user's where there is one, else the first that is not torch's."""
        ours = (f for f in self.frames if "/torch/" not in f.file and not f.file.startswith("<"))
        return self.users or next(ours, None) or next(iter(self.frames), None)


def ask_about_collectives(folder: Path, rank: int) -> str:
    """The last collectives of a rank, a line each; empty where it cannot say."""
    collectives_path(folder, rank).unlink(missing_ok=True)
    try:
        os.close(os.open(request_pipe(folder, rank), os.O_WRONLY | os.O_NONBLOCK))
    except OSError:
        return ""  # it has none to tell of, or its thread is not waiting
    deadline = time.monotonic() + ANSWER_SECONDS
    while time.monotonic() < deadline:
        time.sleep(0.02)
        with contextlib.suppress(OSError, ValueError):
            entries = json.loads(collectives_path(folder, rank).read_text())
            return "\n".join(f"  {e['collective_seq_id']:>6} {e['profiling_name']} {e['input_sizes']} {e['state']}" for e in entries[-5:])
    return ""


def ask(pid: int, file: Path) -> Stack:
    """The stack of a process that writes it to a file; without frames where it does not answer."""
    stopped = process_state(pid) == "T"
    before = file.stat().st_size if file.exists() else 0
    try:
        assert DUMP_SIGNAL is not None
        os.kill(pid, DUMP_SIGNAL)
        if stopped:
            os.kill(pid, signal.SIGCONT)
    except (ProcessLookupError, PermissionError, AssertionError):
        return Stack([], "it is gone", stopped)
    changed, text = time.monotonic(), ""
    while time.monotonic() - changed < (SETTLED if text else ANSWER_SECONDS):
        time.sleep(0.005)
        if stopped and text:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)  # as it was: it must not go on training meanwhile
        with contextlib.suppress(OSError), open(file) as answers:
            answers.seek(before)
            if (now := answers.read()) != text:
                changed, text = time.monotonic(), now
    return read(text, stopped)


def read(text: str, stopped: bool = False) -> Stack:
    last = max(text.rfind("Thread 0x"), text.rfind("thread 0x"))  # the main thread, the oldest, is written last
    main = text[last:] if last >= 0 else ""
    matches = (FRAME.match(line) for line in main.splitlines())
    return Stack([Frame(m["file"], int(m["line"]), m["function"]) for m in matches if m], text.strip() or "no answer", stopped)
