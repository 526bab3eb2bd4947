"""Runs `drivetrain` commands without their imports: in forks of a process that has imported torch and the engine already.

A training takes half a second instead of three. Nothing else differs: front end, fork server and workers are processes of their own, with
their own session, handles and environment. Tests that kill or signal commands, and the command blocks of the docs, start them as users do.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from tests.processes import CONTEXT

MODULES = ("drivetrain", "drivetrain.describe", "drivetrain.processes.forkserver", "drivetrain.processes.survey")
"""Modules whose `python -P -m MODULE` becomes a fork."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGCHLD)
READ_AT_START = ("PYTHON", "OMP_", "MKL_", "LD_", "TORCH", "CUDA", "HF_", "KMP_")
"""Prefixes of variables that the interpreter or a library reads when it starts: a fork would not see another value."""


def _as_library(function: Any) -> Any:
    """Lets a function's frames count as Python's: drivetrain names the innermost line of the user's code, which these are not."""
    function.__code__ = function.__code__.replace(co_filename=subprocess.__file__)
    return function


def can_run_warm(words: tuple[str, ...], variables: dict[str, str]) -> bool:
    """Returns whether a command may be forked: not if it compiles, because a fork of torch's compiler aborts."""
    compiles = any(word.endswith("compile=on") for word in words)
    return sys.platform == "linux" and not compiles and not any(name.startswith(READ_AT_START) for name in variables)


def run_warm(words: tuple[str, ...], environment: dict[str, str], seconds: float) -> subprocess.CompletedProcess[str]:
    """Runs a command as `subprocess.run` would."""
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder, "stdout"), Path(folder, "stderr")
        process = CONTEXT.Process(target=_command, args=(words, os.getcwd(), environment, *map(str, files)), daemon=False)
        process.start()
        process.join(seconds)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(["drivetrain", *words], seconds, files[0].read_bytes(), files[1].read_bytes())
        output, errors = (file.read_text() for file in files)
        return subprocess.CompletedProcess(["drivetrain", *words], process.exitcode, output, errors)


@_as_library
def _command(words: tuple[str, ...], folder: str, environment: dict[str, str], stdout: str, stderr: str) -> None:
    os.chdir(folder)
    for number, file in ((0, os.devnull), (1, stdout), (2, stderr)):
        handle = os.open(file, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(handle, number)
        os.close(handle)
    subprocess.Popen = ForkingPopen  # type: ignore[misc]
    sys.path[0:1] = [folder]  # as `python -m` has it
    _run("drivetrain", list(words), environment)


class ForkingPopen(subprocess.Popen[Any]):
    """Forks this process instead of starting another Python for a module of drivetrain."""

    @_as_library
    def _execute_child(self, *given: Any) -> None:
        names = ("args", "executable", "preexec_fn", "close_fds", "pass_fds", "cwd", "env", "startupinfo", "creationflags", "shell",
                 "p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")  # fmt: skip
        options = dict(zip(names, given, strict=False))
        words = options["args"]
        is_module = isinstance(words, list) and words[:3] == [sys.executable, "-P", "-m"] and words[3] in MODULES
        starts_session = bool(given[-2])
        if not is_module or threading.active_count() > 1:  # a fork has none of the other threads, but the locks that they hold
            super()._execute_child(*given)  # type: ignore[misc]
            return
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self._become(words[3], words[4:], options, starts_session)
            finally:
                os._exit(1)
        self._child_created = True
        self._close_pipe_fds(*(options[name] for name in names[-6:]))  # type: ignore[attr-defined]

    @_as_library
    def _become(self, module: str, words: list[str], options: dict[str, Any], starts_session: bool) -> None:
        gc.disable()  # a file or socket that is collected would close a handle that by then is another's
        if starts_session:
            os.setsid()
        for number, source in enumerate((options["p2cread"], options["c2pwrite"], options["errwrite"])):
            if source not in (-1, number):
                os.dup2(source, number)
        kept = sorted({0, 1, 2, *options["pass_fds"]})
        for low, high in zip(kept, [*kept[1:], 1 << 16], strict=True):
            os.closerange(low + 1, high)
        if options["cwd"]:
            os.chdir(options["cwd"])
        del sys.path[0]  # -P
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        _run(module, words, dict(os.environ if options["env"] is None else options["env"]))


@_as_library
def _run(module: str, words: list[str], environment: dict[str, str]) -> None:
    """Does what `python -m MODULE WORDS` does, and ends this process."""
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [module, *words]
    code = 1
    try:
        if module == "drivetrain":
            from drivetrain.cli import run_command

            code = run_command(words)
        else:
            importlib.import_module(module).main()
            code = 0
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
