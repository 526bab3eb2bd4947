"""The run directory: its layout, the files in it, its lock, and the list of all runs."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.outcomes import Outcome, Problem
from drivetrain.settings import PACKAGE, nearest

if TYPE_CHECKING:
    from torch import nn

FORMAT = 1
RUNS = Path("runs")


class Run:
    """One execution of a recipe: a directory that holds everything about it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @property
    def name(self) -> str:
        """How users name it: relative to `runs/` where it is there."""
        try:
            return str(self.path.resolve().relative_to(RUNS.resolve()))
        except ValueError:
            return str(self.path)

    # files
    @property
    def json_path(self) -> Path:
        return self.path / "run.json"

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def events_path(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def model_path(self) -> Path:
        return self.path / "model" / "model.safetensors"

    def log_path(self, rank: int) -> Path:
        return self.path / "logs" / f"rank-{rank}.log"

    @property
    def time_path(self) -> Path:
        """Where the time of its ranks goes."""
        return self.path / "logs" / "time.json"

    @property
    def first_path(self) -> Path:
        """How long first steps take on this machine."""
        return self.path / "logs" / f"first-{socket.gethostname()}.json"

    # run.json
    def read(self) -> dict[str, Any]:
        try:
            info = json.loads(self.json_path.read_text())
        except FileNotFoundError:
            raise Problem(f"{self.path} is no run: it has no run.json") from None
        except (OSError, ValueError) as error:
            raise Problem(f"{self.json_path} cannot be read: {error}") from None
        if info.get("format") != FORMAT:
            raise Problem(f"{self.path} has format {info.get('format')}; this drivetrain reads format {FORMAT}")
        return dict(info)

    def write(self, info: dict[str, Any]) -> None:
        write_atomic(self.json_path, json.dumps({"format": FORMAT} | info, indent=1) + "\n")

    def update(self, **changes: Any) -> None:
        self.write(self.read() | changes)

    def event(self, kind: str, **detail: Any) -> None:
        """Append to events.jsonl; one write, so that concurrent writers do not mix."""
        row = {"time": time.time(), "event": kind, "rank": int(os.environ.get("RANK", 0))} | detail
        try:
            with open(self.events_path, "ab", buffering=0) as file:
                file.write(json.dumps(row).encode() + b"\n")
        except OSError:
            pass  # a full disk stops nothing but the save, which says so

    @property
    def status(self) -> str:
        """finished, running, or how it stopped: an outcome's word, or `killed` where it could not say."""
        info = self.read()
        if info["status"] == "running":
            return "running" if holder(self.path) else "killed"
        return str(info["outcome"]) if info["status"] == "stopped" else str(info["status"])

    @property
    def finished(self) -> bool:
        return bool(self.read()["status"] == "finished")

    # metrics
    def rows(self) -> list[dict[str, Any]]:
        """The logged metrics, one dict a row."""
        return list(read_lines(self.metrics_path))

    def events(self) -> list[dict[str, Any]]:
        return list(read_lines(self.events_path))

    def steps(self) -> list[int]:
        """The steps that have a published checkpoint, oldest first."""
        found = (re.fullmatch(r"step-(\d+)", p.name) for p in self.checkpoints.glob("step-*"))
        return sorted(int(m[1]) for m in found if m)

    @property
    def last_step(self) -> int:
        """The newest of them; 0 where there is none."""
        return max(self.steps(), default=0)

    def disk_bytes(self) -> int:
        return sum(f.lstat().st_size for f in self.path.rglob("*") if f.is_file())

    def model(self) -> nn.Module:
        """The trained model, from the final weights or the last good checkpoint."""
        import drivetrain

        return drivetrain.load(self)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole JSON lines of a file; a half-written last one is left out."""
    try:
        text = path.read_text(errors="replace")
    except FileNotFoundError:
        return
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            yield row


def write_atomic(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-{socket.gethostname()}-{os.getpid()}-")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def sweep(folder: Path) -> None:
    """Remove what processes of this machine were writing when they were killed."""
    for half in folder.glob(f".*-{socket.gethostname()}-*-*"):
        writer = half.name.rsplit("-", 2)[1]
        if half.is_file() and writer.isdigit() and not alive(int(writer)):
            half.unlink(missing_ok=True)


# --- finding and making runs -------------------------------------------------------------------


def find(text: str | os.PathLike[str]) -> Run:
    """The run that a name or a path means."""
    for path in (RUNS / text, Path(text)):
        if (path / "run.json").is_file():
            return Run(path)
    if (RUNS / text).is_dir() and (stages := sorted((RUNS / text).glob("*/run.json"))):
        return Run(stages[-1].parent)
    names = [r.name for r in all_runs()]
    raise Problem(f"there is no run {str(text)!r}{nearest(str(text), names)} (drivetrain runs lists them; looked in {RUNS.absolute()})")


def record_plan(run: Run, facts: dict[str, Any]) -> None:
    """Note choices of the plan that the first steps settled."""
    with contextlib.suppress(OSError, Problem, KeyError):  # a full disk must not stop the training
        plan = run.read()["plan"]
        settled = {k: v for k, v in facts.items() if k in plan and k != "reasons"}
        run.update(plan=plan | settled | {"reasons": plan["reasons"] | facts["reasons"]})


def all_runs(root: Path | None = None) -> list[Run]:
    root = root or RUNS
    files = [*root.glob("*/run.json"), *root.glob("*/*/run.json")]
    return [Run(f.parent) for f in sorted(files, key=lambda f: f.parent)]


def new_path(label: str, root: Path | None = None) -> Path:
    """A fresh directory with a readable name: digits-001, digits-002, ..."""
    root = root or RUNS
    label = re.sub(r"[^\w.-]+", "-", label)
    taken = [int(m[1]) for p in root.glob(f"{label}-*") if (m := re.fullmatch(re.escape(label) + r"-(\d+)", p.name))]
    number = max(taken, default=0) + 1
    while True:
        path = root / f"{label}-{number:03d}"
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            number += 1
        except OSError as error:
            raise Problem(f"cannot make the run directory {path.absolute()}: {error.strerror}; choose another with --run-dir") from None


def holder(path: Path) -> int | None:
    """The pid of the process that holds a run's lock, or None where nobody does."""
    try:
        handle = os.open(path / "lock", os.O_RDWR)
    except OSError:
        return None
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return None
    except OSError:
        try:
            return int(json.loads(os.read(handle, 4096) or b"{}").get("pid", -1))
        except ValueError:
            return -1
    finally:
        os.close(handle)


@dataclass
class Lock:
    """The right to write a run's directory; the kernel takes it back when the process dies.

    A POSIX record lock, since a forked loader worker does not inherit it. (This process must not open
    the file again: closing any handle of it would release the lock.)
    """

    handle: int

    @staticmethod
    def take(path: Path) -> Lock:
        try:
            path.mkdir(parents=True, exist_ok=True)
            handle = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise Problem(f"cannot write the run directory {path}: {error.strerror}; choose another with --run-dir") from None
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            try:
                owner = json.loads(os.read(handle, 4096))
            except ValueError:
                owner = {}
            os.close(handle)
            raise Problem(
                f"{path} is being trained by process {owner.get('pid', '?')} on {owner.get('host', '?')}:"
                f" wait for it, stop it (kill {owner.get('pid', 'PID')}), or choose another --name"
            ) from None
        try:
            os.ftruncate(handle, 0)
            os.pwrite(handle, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
        except OSError as error:
            os.close(handle)
            raise Problem(f"cannot write the run directory {path}: {error.strerror}; choose another with --run-dir") from None
        return Lock(handle)

    def release(self) -> None:
        os.close(self.handle)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies (Linux; elsewhere nothing)."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the kernel knew
            os.kill(os.getpid(), signal.SIGKILL)


# --- provenance --------------------------------------------------------------------------------


def provenance() -> dict[str, Any]:
    """Where a run comes from: versions, command line, git state, host."""
    names = ("drivetrain", "torch", "numpy", "safetensors")
    versions = {"python": platform.python_version()}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions,
        "command": sys.argv,
        "folder": os.getcwd(),
        "host": socket.gethostname(),
        "git": _git_state(),
    }


def _git_state() -> dict[str, Any] | None:
    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", *words], capture_output=True, text=True, timeout=5, stdin=subprocess.DEVNULL)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    return None if commit is None else {"commit": commit, "changed": bool(git("status", "--porcelain", "-uno"))}


def store_task(run: Run, file: Path) -> None:
    """Copy a task's file, and the modules beside it that it imports, into the run."""
    target = run.path / "task"
    shutil.rmtree(target, ignore_errors=True)  # of a start that was killed
    target.mkdir(parents=True)
    for source in modules_of(file):
        copy = target / source.relative_to(file.parent)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, copy)


def modules_of(file: Path) -> list[Path]:
    """A task's file, and the modules beside it that it imports, and those that they do."""
    import ast

    waiting: list[Path] = [file]
    done: dict[Path, None] = {}
    while waiting:
        source = waiting.pop()
        if source in done:
            continue
        done[source] = None
        try:
            tree = ast.parse(source.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue  # of a package beside the task; perhaps never imported
        for node in ast.walk(tree):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            for name in names:
                top = file.parent / name.split(".")[0]
                if top.is_dir() and top != PACKAGE:
                    waiting += sorted(top.rglob("*.py"))
                elif top.with_suffix(".py").is_file() and top != PACKAGE:
                    waiting.append(top.with_suffix(".py"))
    return list(done)


def stop_info(outcome: Outcome, message: str = "") -> dict[str, Any]:
    """What run.json says of a run's end."""
    return {
        "status": "finished" if outcome is Outcome.OK else "stopped",
        "outcome": str(outcome),
        "message": message,
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
    }
