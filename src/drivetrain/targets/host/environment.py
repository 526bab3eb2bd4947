"""A part of the program on a machine: what the machine has, its copies of code, and its Python environments."""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

from drivetrain.targets.host.library import EXECUTE_SECONDS, POLL_SECONDS, TAIL_BYTES, Failure, folder, locked, reply

# --- what the machine has ----------------------------------------------------------------------


def facts(base: str) -> dict[str, Any]:
    path = folder(base)
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    return {
        "host": platform.node(), "python": sys.executable, "version": platform.python_version(), "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)), "gpus": _gpus(), "rsync": shutil.which("rsync") is not None, "base": str(path),
        "writable": os.access(existing, os.W_OK), "free_bytes": shutil.disk_usage(existing).free, "time": time.time(),
    }  # fmt: skip


def _gpus() -> list[dict[str, str]]:
    """Returns the name and the driver of each GPU, as nvidia-smi says; with a timeout, because a broken driver makes it wait forever."""
    if shutil.which("nvidia-smi") is None:
        return []
    try:
        words = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=20, text=True)
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = [line.split(", ") for line in done.stdout.splitlines() if done.returncode == 0 and ", " in line]
    return [{"name": line[0], "driver": line[1]} for line in lines]


# --- a Python that the user made ---------------------------------------------------------------

PACKAGES = {"torch": "torch", "numpy": "numpy", "psutil": "psutil", "safetensors": "safetensors", "yaml": "pyyaml"}
"""Module -> package."""
PROBE = """
import importlib.util, json, sys
lacks = [name for name in sys.argv[2:] if importlib.util.find_spec(name) is None]
found = {"path": sys.executable, "version": "%d.%d.%d" % sys.version_info[:3], "is_new": sys.version_info >= (3, 11), "lacks": lacks}
if sys.argv[1] == "import" and not lacks:
    try:
        import psutil, torch
        found.update(torch=torch.__version__, uses_gpu=torch.cuda.is_available())
    except Exception as error:
        found["error"] = "%s: %s" % (type(error).__name__, error)
print(json.dumps(found))
"""


def check_python(python: str, variables: dict[str, str] | None = None, only_find: bool = False) -> dict[str, Any]:
    """Returns what the Python of a target's `python:` is; if it cannot train, with `fault` and `fix`. `only_find`: torch is not imported,
    which takes seconds."""
    fix = "correct python: in the target, or leave it out: an environment is built then"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | (variables or {})
    words = [os.path.expanduser(python), "-c", PROBE, "find" if only_find else "import", *PACKAGES]
    output = ""
    try:
        done = subprocess.run(
            words,
            cwd="/",
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=EXECUTE_SECONDS,
        )
        output = (done.stderr.splitlines() or [f"code {done.returncode}"])[-1]
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except OSError as error:
        return {"fault": f"{python} cannot be started ({error.strerror})", "fix": fix}
    except subprocess.TimeoutExpired:
        return {"fault": f"{python} does not import torch within {EXECUTE_SECONDS:.0f} s", "fix": fix}
    except (ValueError, IndexError):
        return {"fault": f"{python} is no Python that works ({output[:200]})", "fix": fix}
    if not found["is_new"]:
        return {"fault": f"{python} is Python {found['version']}, and drivetrain needs 3.11 or later", "fix": fix}
    if found["lacks"]:
        lacks = " ".join(PACKAGES[name] for name in found["lacks"])
        return {"fault": f"{python} lacks {lacks}", "fix": f"{python} -m pip install {lacks}, or leave out python: in the target"}
    if "error" in found:
        return {"fault": f"{python} cannot import torch ({found['error'][:200]})", "fix": fix}
    return found if only_find else found | {"has_gpu": bool(_gpus())}


# --- code and environment ----------------------------------------------------------------------


def missing(base: str, archives: list[str], environment: str, python: str = "") -> dict[str, Any]:
    """Returns which archives and environment this machine does not have yet; raises Failure if the user's `python` cannot train."""
    root = folder(base)
    for path in (root, root / "code", root / "environments"):
        if path.exists() and path.stat().st_uid != os.geteuid():
            raise Failure(f"{path} belongs to another user, whose programs would run: set dir: in the target to a folder of yours")
    absent = [digest for digest in archives if not (root / "code" / digest).is_dir()]
    ready = not environment or (root / "environments" / environment / "ready").is_file()
    if python and "fault" in (found := check_python(python, only_find=True)):
        raise Failure(f"{found['fault']}: {found['fix']}")
    return {"archives": absent, "environment": not ready}


def store(base: str, digest: str, size: int) -> dict[str, Any]:
    """Unpacks an archive, which follows the request on stdin, if its content has the digest."""
    data = sys.stdin.buffer.read(size)
    if hashlib.sha256(data).hexdigest() != digest:
        raise Failure("the archive was damaged on its way: submit again")
    target = folder(base) / "code" / digest
    with locked(target):
        if target.is_dir():
            return {}
        temporary = target.with_name(f".{digest}-{os.getpid()}")
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as archive:
                archive.extractall(temporary, filter="data")
            os.replace(temporary, target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return {}


def build(base: str, digest: str, requirements: list[str], installer: str, flags: list[str]) -> dict[str, Any]:
    """Makes a virtual environment with these packages.

    `installer` (a package) installs the others with `flags`; where pip has its own package index or folder here, pip does it without them.
    """
    target = folder(base) / "environments" / digest
    with locked(target):
        if (target / "ready").is_file():
            return {}
        shutil.rmtree(target, ignore_errors=True)
        reply(notice=f"building the environment: {len(requirements)} packages (once)")
        log = target.with_name(f"{digest}.log")
        log.write_text("")
        _logged([sys.executable, "-m", "venv", str(target)], log)
        python = str(target / "bin" / "python")
        (target / "requirements.txt").write_text("".join(f"{line}\n" for line in requirements))
        pip = [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
        if _has_own_index(python):
            flags = []
        else:
            _logged([*pip, installer], log)
            pip = [python, "-m", installer, "pip", "install", "--python", python]
        _logged([*pip, *flags, "-r", str(target / "requirements.txt")], log)
        (target / "ready").write_text("")
    return {}


def _has_own_index(python: str) -> bool:
    """Whether pip is configured with another package index, or with a folder of packages."""
    done = subprocess.run([python, "-m", "pip", "config", "list"], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    return any(
        name in line.partition("=")[0]
        for line in done.stdout.splitlines()
        for name in ("index-url", "index_url", "find-links", "find_links")
    )


def _logged(words: list[str], log: Path) -> None:
    """Runs a command; every few seconds tells its last line, and raises Failure with its last lines if it fails."""
    with open(log, "ab") as output:
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    shown, next_notice = "", time.monotonic() + 2
    while process.poll() is None:
        time.sleep(POLL_SECONDS)
        if time.monotonic() > next_notice:
            line = (_tail(log).splitlines() or [""])[-1].strip()[:100]
            if line != shown:
                reply(notice=line)
            shown, next_notice = line, time.monotonic() + 5
    if process.returncode:
        text = _tail(log)
        if "ensurepip" in text:
            raise Failure(
                "Python has no venv module here: install it (Debian, Ubuntu: apt install python3-venv), or set python: in the target"
            )
        errors = [line for line in text.splitlines() if "error" in line.lower()] or text.splitlines()
        raise Failure(f"the environment could not be built: {' / '.join(errors[-3:])[:500]} (all of it: {log})")


def _tail(path: Path) -> str:
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        return file.read().decode(errors="replace")
