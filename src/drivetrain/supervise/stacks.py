"""Requests the Python stack of a process with a signal, which works even if its interpreter is stuck."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivetrain.processes.procfs import process_state
from drivetrain.processes.stack_dumps import DUMP_SIGNAL, collectives_path, request_pipe
from drivetrain.project import is_users

ANSWER_SECONDS = 5.0  # a process may take this long to answer
SETTLED_SECONDS = 0.2  # without new output, after which an answer is complete: on a busy machine it comes in pieces
FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
# A process whose innermost frames are in these files waits for other ranks, or for the device, which may itself wait for other ranks.
WAITING_FILES = (
    "/torch/distributed/",
    "/drivetrain/engine/group/collectives.py",
    "/torch/cuda/streams.py",
)
COMPILER_FILES = (
    "/torch/_dynamo/convert_frame.py",
    "/torch/_inductor/compile_fx.py",
    "/torch/_inductor/async_compile.py",
    "/torch/_inductor/graph.py",
    "/torch/utils/cpp_extension.py",
    "/triton/compiler/",
)
IMPORT_FILE = "<frozen importlib"
NUM_COLLECTIVES = 5  # shown for each rank
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
        """Whether it imports modules, or one of its threads compiles: both may take any time."""
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
        """The line to show: the user's if there is one, else the innermost that is not torch's."""
        others = (frame for frame in self.frames if "/torch/" not in frame.file and not frame.file.startswith("<"))
        return self.users_line or next(others, None) or next(iter(self.frames), None)


def request_stack(pid: int, file: Path) -> Stack:
    """Asks a process to write its stack to a file, and returns it; it has no frames if the process does not answer."""
    is_stopped = process_state(pid) == "T"
    size_before = file.stat().st_size if file.exists() else 0
    try:
        assert DUMP_SIGNAL is not None
        os.kill(pid, DUMP_SIGNAL)
        if is_stopped:
            os.kill(pid, signal.SIGCONT)
    except (ProcessLookupError, PermissionError, AssertionError):
        return Stack([], "the process has ended", is_stopped)
    changed_at, text = time.monotonic(), ""
    while time.monotonic() - changed_at < (SETTLED_SECONDS if text else ANSWER_SECONDS):
        time.sleep(0.005)
        if is_stopped and text:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)  # stopped again, so that it does not train
        with contextlib.suppress(OSError), open(file) as stacks:
            stacks.seek(size_before)
            new_text = stacks.read()
            if new_text != text:
                changed_at, text = time.monotonic(), new_text
    return parse_stack(text, is_stopped)


def parse_stack(text: str, is_stopped: bool = False) -> Stack:
    begin = max(text.rfind("Thread 0x"), text.rfind("thread 0x"))  # faulthandler writes the main thread last
    main_thread = text[begin:] if begin >= 0 else ""
    matches = (FRAME.match(line) for line in main_thread.splitlines())
    frames = [Frame(match["file"], int(match["line"]), match["function"]) for match in matches if match]
    return Stack(frames, text.strip() or "no answer", is_stopped)


def _collective_line(entry: dict[str, Any]) -> str:
    return f"  {entry['collective_seq_id']:>6} {entry['profiling_name']} {entry['input_sizes']} {entry['state']}"


def request_collectives(folder: Path, rank: int) -> str:
    """Returns the last collectives of a rank, one a line; "" if it does not answer."""
    file = collectives_path(folder, rank)
    file.unlink(missing_ok=True)
    try:
        os.close(os.open(request_pipe(folder, rank), os.O_WRONLY | os.O_NONBLOCK))
    except OSError:
        return ""  # the rank is the only one, or its thread is not ready for requests
    deadline = time.monotonic() + ANSWER_SECONDS
    while time.monotonic() < deadline:
        time.sleep(0.02)
        with contextlib.suppress(OSError, ValueError):
            entries = json.loads(file.read_text())
            return "\n".join(_collective_line(entry) for entry in entries[-NUM_COLLECTIVES:])
    return ""
