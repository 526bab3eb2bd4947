"""A machine that drivetrain reaches with commands: this one, or one behind SSH. Requests go to `program.py` there."""

from __future__ import annotations

import ast
import base64
import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any

from drivetrain.names import private_cache
from drivetrain.outcomes import Outcome, Problem
from drivetrain.targets.errors import explain
from drivetrain.targets.host.library import GROWING, REPLACED
from drivetrain.targets.host.program import tail_digest

PARTS = ("library.py", "environment.py", "network.py", "checkpoints.py", "program.py")
"""The files of the program, in the order in which they are joined."""
MAX_DEPTH = 3  # of a file that is mirrored: STAGE/logs/FILE
PYTHONS = ("python3.14", "python3.13", "python3.12", "python3.11", "python3")
NO_PYTHON = "drivetrain: no Python 3.11"
_RUN = (
    r"import sys; sys.version_info >= (3, 11) or sys.exit(\"drivetrain: no Python 3.11\"); r = sys.stdin.buffer; s = r.read(int(r.readline())); "
    r"exec(compile(s, \"host_program.py\", \"exec\"), dict(__name__=\"__main__\", SOURCE=s.decode()))"
)
FIND_PYTHON = (
    'for p in "$@"; do if command -v "$p" >/dev/null 2>&1; then '
    'case "$p" in */*) ;; *) "$p" -c "import sys; sys.exit(sys.version_info < (3, 11))" >/dev/null 2>&1 || continue ;; esac; '
    f'exec "$p" -c "{_RUN}"; fi; done; echo "{NO_PYTHON}" >&2; exit 127'
)
"""Starts the program, which comes first on stdin, with the first Python that is new enough. It is one line without apostrophes, so that
any login shell hands it on as it is."""
CONNECT_SECONDS = 10
RSYNC = ("rsync", "-a", "--no-links", "--no-devices", "--no-specials", "--partial", "-s")
"""Copies files and folders only: the other machine cannot place a link here."""
NOT_PULLED = ("--exclude=/target.json", "--exclude=/code.tar.gz")
"""The other machine cannot change the run's record."""
REPLACE_ALL = "--ignore-times"
"""Also files of the same size that were written within the same second."""
ADDRESS = re.compile(r"(?!-)[\w.@:%\[\]-]+")
MAX_SOCKET_FOLDER = 45  # bytes; a socket's path has at most 108, of which ssh needs 60


@dataclass(frozen=True)
class ReachableHost:
    """This machine."""

    python: str | None = None
    """An interpreter to try first; None: the first in PYTHONS."""

    @property
    def name(self) -> str:
        return "this machine"

    @property
    def is_local(self) -> bool:
        return True

    def command(self) -> list[str]:
        """Returns the command that takes the program and a request on stdin."""
        return ["/bin/sh", "-c", FIND_PYTHON, "sh", *([self.python] if self.python else []), *PYTHONS]

    def call(self, verb: str, data: bytes = b"", notice: Callable[[str], None] | None = None, **arguments: Any) -> dict[str, Any]:
        """Sends a request and returns its result; raises Problem for what the user can fix. `data` follows the request."""
        process = self._start()
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        errors: list[bytes] = []
        reader = threading.Thread(target=lambda: errors.append(process.stderr.read()), daemon=True)  # type: ignore[union-attr]
        reader.start()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(request_bytes(verb, arguments) + data)
            process.stdin.close()
        result: dict[str, Any] | None = None
        for message in _messages(process.stdout):
            if "notice" in message and notice is not None:
                notice(str(message["notice"]))
            if (answer := self._result(message)) is not None:
                result = answer
        code = process.wait()
        reader.join()
        if result is None:
            raise self.problem(b"".join(errors).decode(errors="replace"), code)
        return result

    def problem(self, output: str, code: int) -> Problem:
        """Returns what is wrong, and the fix, from the output of a command that gave no answer."""
        return explain(self.name, output, code)

    def _result(self, message: dict[str, Any]) -> dict[str, Any] | None:
        if "error" in message:
            raise Problem(f"{self.name}: {message['error']}", Outcome.INFRA)
        result = message.get("result")
        return result if isinstance(result, dict) else None

    def _start(self) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(self.command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        except FileNotFoundError as error:
            raise Problem(f"there is no {error.filename} on this machine: install it") from None

    def mirror(self, run: str, to: Path, jobs: Sequence[str], follow: bool = False) -> Iterator[str]:
        """Copies what was added to a run's small files there into the folder `to`; yields the name of each changed file. With `follow`
        goes on until the jobs have ended. Raises ConnectionError if the connection breaks."""
        process = self._start()
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        try:
            arguments = {"run": run, "have": _sizes(to), "jobs": list(jobs), "follow": follow}
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(request_bytes("mirror", arguments))
                process.stdin.flush()  # stays open: its end tells the program that this process has gone
            for message in _messages(process.stdout):
                if "file" in message:
                    yield _write_part(to, message)
                elif self._result(message) is not None:
                    return
            problem = self.problem(process.stderr.read().decode(errors="replace"), process.wait())
            raise ConnectionError(str(problem))
        finally:
            process.stdin.close()
            process.kill()
            process.wait()
            process.stdout.close()
            process.stderr.close()

    def copy_from(self, there: str, here: Path) -> list[str]:
        """Returns the command that copies a folder's content from the machine."""
        return [*RSYNC, *NOT_PULLED, f"{there}/", f"{here}/"]

    def copy_to(self, here: Path, there: str, filters: Sequence[str]) -> list[str]:
        """Returns the command that copies a folder's content to the machine; `filters` are options of rsync."""
        return [*RSYNC, REPLACE_ALL, *filters, f"{here}/", f"{there}/"]

    def send_folder(self, here: Path, there: str, filters: Sequence[str]) -> None:
        """Copies a folder's content to the machine; `filters` are options of rsync."""
        copy(self.copy_to(here, there, filters), self)


@dataclass(frozen=True)
class SshHost(ReachableHost):
    """A machine behind OpenSSH. One connection is shared by all commands and stays open for a minute."""

    address: str = ""
    """As for `ssh`: a name of the SSH configuration, HOST or USER@HOST."""
    options: tuple[str, ...] = ()
    """Further options of ssh, such as -F FILE or -p PORT; they win over those of this class."""

    @property
    def name(self) -> str:
        return self.address

    @property
    def is_local(self) -> bool:
        return False

    @property
    def ssh(self) -> list[str]:
        return [
            "ssh", "-T", *self.options, "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_SECONDS}", "-o", "ServerAliveInterval=5",
            "-o", "ServerAliveCountMax=3", "-o", "StrictHostKeyChecking=yes", *_sharing(),
        ]  # fmt: skip

    def command(self) -> list[str]:
        # An SSH server hands the words to a shell as one text, so that they are quoted for it.
        return [*self.ssh, "--", self.address, shlex.join(super().command())]

    @property
    def hostname(self) -> str:
        """The name or address that the SSH configuration gives for this machine."""
        try:
            done = subprocess.run(["ssh", "-G", *self.options, "--", self.address], capture_output=True, text=True)
        except FileNotFoundError:
            raise Problem("there is no ssh on this machine: install it") from None
        names = [line.partition(" ")[2] for line in done.stdout.splitlines() if line.startswith("hostname ")]
        return names[0] if names else self.address.rpartition("@")[2]

    def copy_from(self, there: str, here: Path) -> list[str]:
        return [*RSYNC, *NOT_PULLED, "-e", shlex.join(self.ssh), f"{self.address}:{_from_home(there)}/", f"{here}/"]

    def copy_to(self, here: Path, there: str, filters: Sequence[str]) -> list[str]:
        return [*RSYNC, REPLACE_ALL, *filters, "-e", shlex.join(self.ssh), f"{here.absolute()}/", f"{self.address}:{_from_home(there)}/"]


def _from_home(path: str) -> str:
    """Returns a path for rsync, which begins in the home folder and does not know ~."""
    return path.removeprefix("~/")


def _sharing() -> list[str]:
    """Returns the options with which commands share a connection; none where the path of its socket would be too long."""
    folder = str(private_cache("ssh"))
    if len(folder.encode()) > MAX_SOCKET_FOLDER or '"' in folder:
        return []
    path = folder.replace("%", "%%")
    return ["-o", "ControlMaster=auto", "-o", f'ControlPath="{path}/%C"', "-o", "ControlPersist=60"]


@cache
def _program() -> bytes:
    parts = [_without_own_imports(Path(__file__).with_name(part).read_text()) for part in PARTS]
    source = "\n".join(["from __future__ import annotations", *parts]).encode()
    return f"{len(source)}\n".encode() + source


def _without_own_imports(text: str) -> str:
    """Returns the source of a part without what it imports from the others, and without its future imports."""
    tree = ast.parse(text)
    lines = text.splitlines()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in ("drivetrain", "__future__"):
            for number in range(node.lineno - 1, int(node.end_lineno or node.lineno)):
                lines[number] = ""
    return "\n".join(lines)


def request_bytes(verb: str, arguments: dict[str, Any]) -> bytes:
    """Returns what the command of a host reads on stdin: the program and the request."""
    return _program() + request_text(verb, arguments).encode() + b"\n"


def request_text(verb: str, arguments: dict[str, Any]) -> str:
    return json.dumps({"verb": verb, **arguments})


def _messages(stream: IO[bytes]) -> Iterator[dict[str, Any]]:
    for line in stream:
        with contextlib.suppress(ValueError):
            message = json.loads(line)
            if isinstance(message, dict):  # a login script may print other lines
                yield message


def copy(words: list[str], host: ReachableHost) -> None:
    """Runs a command of `copy_from` or `copy_to`."""
    if shutil.which("rsync") is None:
        raise Problem("there is no rsync on this machine: install it")
    done = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise explain(host.name, done.stderr, done.returncode)


# --- the mirrored files ------------------------------------------------------------------------


def _sizes(folder: Path) -> dict[str, list[Any]]:
    """Returns the size of each growing file that is here, with a digest of its last bytes."""
    sizes: dict[str, list[Any]] = {}
    patterns = ("*.jsonl", "logs/*.log", "logs/*.jsonl", "*/*.jsonl", "*/logs/*.log")
    for path in {path for pattern in patterns for path in folder.glob(pattern)}:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            sizes[path.relative_to(folder).as_posix()] = [size, tail_digest(file, size)]
    return sizes


def _write_part(folder: Path, message: dict[str, Any]) -> str:
    """Writes a part of a file that the machine has sent; returns the file's name."""
    name = str(message["file"])
    parts, is_known = Path(name).parts, Path(name).suffix in (*GROWING, *REPLACED)
    if Path(name).is_absolute() or not 1 <= len(parts) <= MAX_DEPTH or ".." in parts or not is_known or parts[-1] == "target.json":
        raise Problem(f"the other machine sent a file with the name {name!r:.100}: it is not written", Outcome.INFRA)
    try:
        _write(folder / name, message)
    except OSError as error:
        raise Problem(f"cannot write {folder / name}: {error.strerror}; the run there is not affected", Outcome.INFRA) from None
    except (ValueError, KeyError, TypeError):
        raise Problem(f"the other machine sent something that is no part of {name!r:.100}", Outcome.INFRA) from None
    return name


def _write(path: Path, message: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if "content" in message:
        temporary = path.with_name(f".{path.name}-{os.getpid()}")
        temporary.write_bytes(base64.b64decode(message["content"]))
        os.replace(temporary, path)
        return
    data, offset = base64.b64decode(message["data"]), int(message["offset"])
    with open(path, "r+b" if path.exists() else "w+b") as file:
        if not data:  # the file there begins again
            file.truncate(offset)
        file.seek(offset)  # two commands that follow a run write the same bytes
        file.write(data)
