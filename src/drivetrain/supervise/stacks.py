"""Where a process is: its Python stack, requested by a signal that even a stuck interpreter answers."""

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
SETTLED_SECONDS = 0.2  # without further output: on a busy machine an answer comes in pieces
FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
WAITING_FILES = (
    "/torch/distributed/",
    "/drivetrain/engine/group/collectives.py",
    "/torch/cuda/streams.py",
)  # for other ranks; for the device, which may itself wait for other ranks
COMPILER_FILES = (
    "/torch/_dynamo/convert_frame.py",
    "/torch/_inductor/compile_fx.py",
    "/torch/_inductor/async_compile.py",
    "/torch/_inductor/graph.py",
    "/torch/utils/cpp_extension.py",
    "/triton/compiler/",
)
IMPORT_FILE = "<frozen importlib"
LOADER_FILES = ("/torch/utils/data/", "/multiprocessing/")


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line} in {self.function}"

    def is_in(self, files: tuple[str, ...]) -> bool:
        return any(part in self.file for part in files)


@dataclass(frozen=True)
class Stack:
    """The stack of a process's main thread, the innermost frame first."""

    frames: list[Frame]
    text: str
    """All threads, as the process wrote them."""
    is_stopped: bool = False
    """Whether the process was stopped (state T)."""

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for other ranks, or for the device."""
        return not self.is_stopped and any(frame.is_in(WAITING_FILES) for frame in self.frames[:2])

    @property
    def is_loading(self) -> bool:
        """Whether it waits for a process that loads data."""
        return any(frame.is_in(LOADER_FILES) for frame in self.frames[:4])

    @property
    def is_building(self) -> bool:
        """Whether it imports, or one of its threads compiles: no limit of time is known for that."""
        return any(frame.file.startswith(IMPORT_FILE) for frame in self.frames) or any(file in self.text for file in COMPILER_FILES)

    @property
    def operation(self) -> str:
        """The function in which it waits."""
        return next((frame.function for frame in self.frames[:2] if frame.is_in(WAITING_FILES)), "")

    @property
    def users_line(self) -> Frame | None:
        """The innermost line of the user's own code."""
        return next((frame for frame in self.frames if is_users(frame.file)), None)

    @property
    def line(self) -> Frame | None:
        """The line to show: the user's where there is one, else the first that is not torch's."""
        others = (frame for frame in self.frames if "/torch/" not in frame.file and not frame.file.startswith("<"))
        return self.users_line or next(others, None) or next(iter(self.frames), None)


def request_stack(pid: int, file: Path) -> Stack:
    """Returns the stack that a process writes to a file on request; without frames where it does not answer."""
    is_stopped = process_state(pid) == "T"
    before = file.stat().st_size if file.exists() else 0
    try:
        assert DUMP_SIGNAL is not None
        os.kill(pid, DUMP_SIGNAL)
        if is_stopped:
            os.kill(pid, signal.SIGCONT)
    except (ProcessLookupError, PermissionError, AssertionError):
        return Stack([], "it is gone", is_stopped)
    changed_at, text = time.monotonic(), ""
    while time.monotonic() - changed_at < (SETTLED_SECONDS if text else ANSWER_SECONDS):
        time.sleep(0.005)
        if is_stopped and text:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)  # as it was: it must not continue to train meanwhile
        with contextlib.suppress(OSError), open(file) as stacks:
            stacks.seek(before)
            if (now := stacks.read()) != text:
                changed_at, text = time.monotonic(), now
    return parse_stack(text, is_stopped)


def parse_stack(text: str, is_stopped: bool = False) -> Stack:
    last = max(text.rfind("Thread 0x"), text.rfind("thread 0x"))  # faulthandler writes the main thread, the oldest, last
    main_thread = text[last:] if last >= 0 else ""
    matches = (FRAME.match(line) for line in main_thread.splitlines())
    frames = [Frame(match["file"], int(match["line"]), match["function"]) for match in matches if match]
    return Stack(frames, text.strip() or "no answer", is_stopped)


def request_collectives(folder: Path, rank: int) -> str:
    """Returns the last collectives of a rank, one a line; empty where it does not answer."""
    file = collectives_path(folder, rank)
    file.unlink(missing_ok=True)
    try:
        os.close(os.open(request_pipe(folder, rank), os.O_WRONLY | os.O_NONBLOCK))
    except OSError:
        return ""  # the rank has no other ranks, or its thread does not wait for requests
    deadline = time.monotonic() + ANSWER_SECONDS
    while time.monotonic() < deadline:
        time.sleep(0.02)
        with contextlib.suppress(OSError, ValueError):
            entries = json.loads(file.read_text())
            return "\n".join(f"  {e['collective_seq_id']:>6} {e['profiling_name']} {e['input_sizes']} {e['state']}" for e in entries[-5:])
    return ""
