"""The program that drivetrain runs on a machine to keep files and processes there. It needs Python's standard library only.

`connection.py` sends it to the machine with each request, joined with the other files of this folder. It reads the request as one line of JSON from stdin, and answers in lines of JSON:
{"notice": text} while it works, {"file": ...} for parts of files, and at last {"result": ...} or {"error": text}.
`start` leaves a copy of it there, which supervises one job: it repeats the command if its outcome can be retried, and records its end.

Folders below `base`: code/DIGEST (unpacked archives), environments/DIGEST (virtual environments), projects/PROJECT/jobs/NAME and runs/NAME.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import errno
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from drivetrain.targets.host.checkpoints import position_of
from drivetrain.targets.host.environment import build, check_python, facts, missing, store
from drivetrain.targets.host.library import (
    CHUNK_BYTES,
    EXECUTE_SECONDS,
    FIRST_RETRYABLE_CODE,
    GROWING,
    JOB_VARIABLE,
    POLL_SECONDS,
    PROJECT_MARK,
    REPLACED,
    RETRY_SECONDS,
    STOPPED_CODE,
    TAIL_BYTES,
    Failure,
    folder,
    locked,
    read_json,
    reply,
    write_json,
)  # fmt: skip
from drivetrain.targets.host.network import connect, listen

OWN_NAME = re.compile(r"\.?[0-9a-f]{32,64}(-[\w.+-]+?)?(\.log|\.lock)?")
"""A copy of code, an environment, their logs, locks and temporary folders."""

# --- jobs --------------------------------------------------------------------------------------


def start(
    job: str, words: list[str], variables: dict[str, str], secrets: dict[str, str], cwd: str, output: str, retries: int,
    needs: dict[str, Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Starts a supervised command that outlives this connection. Secrets are handed over in memory only. Returns what is missing of
    `needs`, if anything is: then nothing was started."""
    if needs is not None and ((lacks := missing(**needs))["archives"] or lacks["environment"]):
        return {"missing": lacks | facts(needs["base"])}
    path, log = folder(job), folder(output)
    with locked(path / "job"):
        if job_state(job)["phase"] == "running":
            raise Failure("it is running already")
        path.mkdir(parents=True, exist_ok=True)
        for name in ("exit.json", "stop"):
            (path / name).unlink(missing_ok=True)
        folder(cwd).mkdir(parents=True, exist_ok=True)
        if needs is not None:
            (folder(cwd) / PROJECT_MARK).touch()
        log.parent.mkdir(parents=True, exist_ok=True)
        words = [_expanded(word) for word in words]
        variables = {name: _expanded(value) for name, value in variables.items()}
        write_json(path / "job.json", {"words": words, "variables": variables, "cwd": str(folder(cwd)), "retries": retries})
        (path / "program.py").write_text(globals()["SOURCE"])
        with open(log, "ab") as file:
            process = subprocess.Popen(
                [sys.executable, str(path / "program.py"), "supervise", str(path)],
                stdin=subprocess.PIPE, stdout=file, stderr=file, start_new_session=True, env={**os.environ, JOB_VARIABLE: str(path)},
            )  # fmt: skip
        assert process.stdin is not None
        process.stdin.write(json.dumps(secrets).encode())
        process.stdin.close()
        record_process(path, process.pid)
    return {"pid": process.pid}


def record_process(path: Path, pid: int) -> None:
    """Notes which process supervises a job."""
    write_json(path / "process.json", {"pid": pid, "started": _start_time(pid)})


def _expanded(text: str) -> str:
    """Returns a path in this user's home, or an option with one, with the absolute path."""
    option, equals, path = text.partition("=") if text.startswith("--") else ("", "", text)
    return f"{option}{equals}{os.path.expanduser(path)}" if path.startswith("~/") else text


def _start_time(pid: int) -> str | None:
    """Returns a text that no other process of this machine has had with this pid; None if the process has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    return None if fields[0] == "Z" else f"{fields[19]}@{boot}"


def job_state(job: str) -> dict[str, Any]:
    """Returns the phase of a job: absent, running, ended (with `code`), or lost, if it left no exit code."""
    path = folder(job)
    process, ended = read_json(path / "process.json"), read_json(path / "exit.json")
    if not process:
        return {"phase": "absent"}
    if _start_time(process["pid"]) == process["started"] and process["started"] is not None and not ended:
        return {"phase": "running"}
    ended = ended or read_json(path / "exit.json")  # written between the two lines above
    return {"phase": "ended", **ended} if ended else {"phase": "lost"}


def stop(job: str, grace: float) -> dict[str, Any]:
    """Asks a job to save and end; after `grace` seconds kills all of its processes."""
    path = folder(job)
    if job_state(job)["phase"] == "running":
        (path / "stop").write_text("")
        with contextlib.suppress(OSError):
            os.kill(read_json(path / "process.json")["pid"], signal.SIGTERM)
    deadline = time.monotonic() + grace
    while job_state(job)["phase"] == "running" and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    killed = _kill_processes(path)
    return {**job_state(job), "killed": killed}


def _kill_processes(job: Path) -> int:
    """Kills every process of a job, whoever its parent is now; returns how many there were."""
    mark, killed = f"{JOB_VARIABLE}={job}\0".encode(), 0
    for _ in range(3):  # a process may start another one meanwhile
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and int(entry.name) != os.getpid() and mark in entry.joinpath("environ").read_bytes() + b"\0":
                    os.kill(int(entry.name), signal.SIGKILL)
                    killed += 1
    return killed


def supervise(path: Path, secrets: dict[str, str]) -> int:
    """Runs a job's command, repeats it while its outcome can be retried, and records its end; returns its exit code."""
    job, child, attempts = read_json(path / "job.json"), None, 0

    def on_signal(number: int, frame: Any) -> None:
        (path / "stop").write_text("")
        if child is not None and child.poll() is None:
            child.send_signal(signal.SIGTERM)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, on_signal)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    while True:
        attempts += 1
        if (path / "stop").exists():
            code = STOPPED_CODE
            break
        try:
            child = subprocess.Popen(
                job["words"], cwd=job["cwd"], stdin=subprocess.DEVNULL, env={**os.environ, **job["variables"], **secrets},
                preexec_fn=_end_with_parent,
            )  # fmt: skip
            if (path / "stop").exists():  # the signal came before the process
                child.send_signal(signal.SIGTERM)
            code = child.wait()
        except OSError as error:
            print(f"drivetrain: cannot start {job['words'][0]}: {error.strerror}", flush=True)
            code = 127
        code = 128 - code if code < 0 else code
        if code < FIRST_RETRYABLE_CODE or attempts > job["retries"] or (path / "stop").exists():
            break
        print(f"drivetrain: it ended with code {code}, which can be retried: attempt {attempts + 1} of {job['retries'] + 1}", flush=True)
        time.sleep(RETRY_SECONDS)
    write_json(path / "exit.json", {"code": code, "attempts": attempts, "ended": time.time()})
    return code


def _end_with_parent() -> None:
    """Makes the kernel send SIGTERM to this process when its parent dies."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


# --- files -------------------------------------------------------------------------------------


def mirror(run: str, have: dict[str, list[Any]], jobs: list[str], follow: bool) -> dict[str, Any]:
    """Sends what was added to a run's small files since `have` ({path: [size, digest of the last bytes]}); with `follow`, until the
    jobs have ended."""
    if follow:
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    root, sent = folder(run), {path: (size, digest) for path, (size, digest) in have.items()}
    stamps: dict[str, float] = {}
    while True:
        phases = [job_state(job)["phase"] for job in jobs]  # read before the files, so that no line of an ended job is missed
        for path in _small_files(root):
            name = path.relative_to(root).as_posix()
            with contextlib.suppress(FileNotFoundError):
                if path.suffix in GROWING:
                    sent[name] = _send_growth(path, name, *sent.get(name, (0, "")))
                elif stamps.get(name) != (stamp := path.stat().st_mtime):
                    reply(file=name, content=base64.b64encode(path.read_bytes()).decode())
                    stamps[name] = stamp
        if not follow or "running" not in phases:
            return {"phases": phases}
        time.sleep(POLL_SECONDS)


def _end_with_stdin() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


def _small_files(root: Path) -> list[Path]:
    folders = [root, *(path.parent for path in root.glob("*/run.json"))]  # a recipe with stages has a run for each
    files = [file for folder in folders for file in (*folder.glob("*"), *folder.glob("logs/*"), *folder.glob("model/*.json"))]
    return [path for path in files if path.suffix in GROWING + REPLACED and not path.name.startswith(".") and path.is_file()]


def _send_growth(path: Path, name: str, size: int, digest: str) -> tuple[int, str]:
    """Sends the new bytes of a file; all of it, if the bytes that were sent are not in it any more."""
    with open(path, "rb") as file:
        if size and tail_digest(file, size) != digest:
            size = 0
            reply(file=name, offset=0, data="")
        before = size
        file.seek(size)
        while data := file.read(CHUNK_BYTES):
            reply(file=name, offset=size, data=base64.b64encode(data).decode())
            size += len(data)
        return size, tail_digest(file, size) if size != before else digest


def tail_digest(file: Any, size: int) -> str:
    """Returns a digest of the last bytes before `size`; "" if the file is shorter."""
    file.seek(0, os.SEEK_END)
    if file.tell() < size:
        return ""
    file.seek(max(0, size - TAIL_BYTES))
    return hashlib.sha256(file.read(min(size, TAIL_BYTES))).hexdigest()


def write(path: str, text: str, append: bool = False) -> dict[str, Any]:
    """Writes a text file; with `append`, adds to it."""
    file = folder(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "a" if append else "w") as stream:
        stream.write(text)
    return {}


def delete(path: str) -> dict[str, Any]:
    with contextlib.suppress(FileNotFoundError):
        folder(path).unlink()
    return {}


def execute(words: list[str], secrets: dict[str, str]) -> dict[str, Any]:
    """Runs a command and returns what it printed; secrets become environment variables."""
    try:
        done = subprocess.run(
            [_expanded(word) for word in words], stdin=subprocess.DEVNULL, capture_output=True,
            env={**os.environ, **secrets}, timeout=EXECUTE_SECONDS,
        )  # fmt: skip
    except FileNotFoundError as error:
        return {"code": 127, "output": "", "errors": f"{error.filename}: No such file or directory"}
    except subprocess.TimeoutExpired:
        raise Failure(f"{words[0]} did not answer within {EXECUTE_SECONDS:.0f} s") from None
    return {"code": done.returncode, "output": done.stdout.decode(errors="replace"), "errors": done.stderr.decode(errors="replace")}


def remove(base: str) -> dict[str, Any]:
    """Removes what drivetrain keeps in a folder; what others have put there stays."""
    root = folder(base)
    running = [path.parent for path in root.glob("projects/*/jobs/**/process.json") if job_state(str(path.parent))["phase"] == "running"]
    if running:
        raise Failure(f"{', '.join(sorted(str(path.relative_to(root)) for path in running)[:3])} still runs there: stop it first")
    own = [path for name in ("code", "environments") for path in root.glob(f"{name}/*") if OWN_NAME.fullmatch(path.name)]
    projects = [mark.parent for mark in root.glob(f"projects/*/{PROJECT_MARK}")]
    own += [project / name for project in projects for name in ("jobs", "runs", PROJECT_MARK)]
    size = sum(_remove_tree(path) for path in own)
    for path in (*projects, root / "code", root / "environments", root / "projects", root):
        with contextlib.suppress(OSError):  # the folder is missing, or has files of others
            path.rmdir()
    return {"bytes": size}


def _remove_tree(path: Path) -> int:
    """Removes a file or a folder; returns its size."""
    files = [path, *path.glob("**/*")]
    size = sum(file.lstat().st_size for file in files if file.is_file())
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
    return size


FUNCTIONS: tuple[Callable[..., dict[str, Any]], ...] = (
    facts, check_python, listen, connect, missing, store, build, start, job_state, position_of, stop, mirror, write, delete, execute, remove,
)  # fmt: skip
VERBS = {function.__name__: function for function in FUNCTIONS}


def answer(request: dict[str, Any]) -> None:
    try:
        reply(result=VERBS[request.pop("verb")](**request))
    except Failure as failure:
        reply(error=str(failure))
    except BrokenPipeError:
        os._exit(0)
    except OSError as error:
        text = "the disk is full there: make room, or set dir: in the target" if error.errno == errno.ENOSPC else error.strerror
        reply(error=f"{error.filename or 'a file'}: {text}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["supervise"]:
        supervise(Path(sys.argv[2]), json.loads(sys.stdin.read()))
    else:
        answer(json.loads(sys.stdin.buffer.readline()))
