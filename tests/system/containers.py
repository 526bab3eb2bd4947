"""Starts podman's Docker API with an own storage for the time of a test, and imports a base image made from this machine's Python."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from drivetrain.targets.environment import lock_environment
from drivetrain.task_ref import find_task
from tests.waiting import wait_until

PROGRAMS = ("docker", "podman", "runc", "conmon", "catatonit", "ldd")
BASE = "localhost/base:test"
COMMANDS = ("sh", "mkdir", "chmod", "cat", "grep", "id", "rm")
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "__pycache__", "ensurepip", "idlelib", "tkinter"}
CONTAINERS_CONF = """\
[containers]
default_ulimits = ["nofile=20000:20000", "nproc=4096:4096"]
log_driver = "k8s-file"
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "runc"
network_cmd_path = ""
"""
"""Works without systemd, and where root may not raise limits."""


@dataclass(frozen=True)
class Containers:
    """An engine that the command `docker` uses if it gets `variables`."""

    variables: dict[str, str]

    def docker(self, *words: str, code: int = 0) -> str:
        done = subprocess.run(("docker", *words), env=os.environ | self.variables, capture_output=True, text=True, timeout=300)
        assert done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout.strip()

    def inspect(self, kind: str, name: str) -> dict[str, Any]:
        (facts,) = json.loads(self.docker(kind, "inspect", name))
        return dict(facts)


@contextlib.contextmanager
def containers() -> Iterator[Containers]:
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)} (tests/system/install)")
    if os.geteuid() != 0:
        pytest.skip("needs root, to start containers without a user's subordinate ids")
    folder = Path(tempfile.mkdtemp(prefix="containers-"))
    (folder / "containers.conf").write_text(CONTAINERS_CONF)
    storage = ("podman", "--root", str(folder / "storage"), "--runroot", str(folder / "run"))
    address = f"unix://{folder}/podman.sock"
    config = {"CONTAINERS_CONF": str(folder / "containers.conf")}
    started = Containers(config | {"DOCKER_HOST": address, "XDG_STATE_HOME": str(folder / "state")})
    with open(folder / "service.log", "wb") as log:
        service = subprocess.Popen([*storage, "system", "service", "--time=0", address], env=os.environ | config, stdout=log, stderr=log)
    try:
        wait_until((folder / "podman.sock").exists, "podman's Docker API", process=service)
        with open(folder / "base.tar", "wb") as file:
            write_base(file)
        started.docker(
            "import", "--change", "ENV PYTHONPATH=/opt/packages", "--change", "ENV PATH=/usr/local/bin:/bin", str(folder / "base.tar"), BASE
        )
        (folder / "base.tar").unlink()
        yield started
    finally:
        subprocess.run([*storage, "rm", "--all", "--force", "--volumes"], env=os.environ | config, capture_output=True)
        service.kill()  # asked to end, it waits for idle connections
        service.wait()
        _unmount(folder)
        shutil.rmtree(folder)


def _unmount(folder: Path) -> None:
    """Unmounts what the engine has left mounted, such as the container of a failed build."""
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for mount in reversed(mounts):
        if Path(mount).is_relative_to(folder):
            subprocess.run(["umount", mount], check=True)


# --- the base image ----------------------------------------------------------------------------


def write_base(file: Any) -> None:
    """Writes the files of an image with this Python, torch and drivetrain's other packages, so that a build needs no network."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    library, program = Path(sysconfig.get_path("stdlib")), Path(sys.executable).resolve()
    files = {f"usr/local/bin/{version}": program} | {f"bin/{name}": Path(shutil.which(name) or "") for name in COMMANDS}
    for path in library.rglob("*"):
        parts = path.relative_to(library).parts
        if path.is_file() and not SKIPPED & set(parts) and not parts[0].startswith("config-"):
            files["/".join(("usr/local/lib", version, *parts))] = path
    packages = _packages()
    programs = [path for path in files.values() if path.suffix == ".so" or os.access(path, os.X_OK)]
    programs += [path for name, path in packages.items() if name.startswith("opt/packages/torch/lib/")]
    libraries = _libraries(programs)
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, path in (packages | files | libraries).items():
            archive.add(path.resolve(), name, recursive=False, filter=_owned_by_root)
        for name in ("python3", "python"):
            _add(archive, f"usr/local/bin/{name}", tarfile.SYMTYPE, link=version)
        _add(archive, "tmp", tarfile.DIRTYPE, mode=0o1777)
        _add(archive, "etc/passwd", text="root:x:0:0:root:/root:/bin/sh\n")
        _add(archive, "etc/group", text="root:x:0:\n")


def _packages() -> dict[str, Path]:
    """Returns the files of the packages that the task digits needs, and of pip."""
    names = [requirement.partition("==")[0] for requirement in lock_environment([find_task("digits")]).requirements]
    files = {}
    for name in [*names, "pip"]:
        for file in metadata.files(name) or ():
            is_code = file.suffix not in (".pyc", ".h", ".cuh", ".hpp", ".a") and not (
                name != "torch" and {"test", "tests"} & set(file.parts)
            )
            path = Path(str(file.locate()))
            if is_code and ".." not in file.parts and path.is_file():
                files[f"opt/packages/{file}"] = path
    return files


def _libraries(programs: Sequence[Path]) -> dict[str, Path]:
    """Returns the system libraries that programs need, in the folder of the C library."""
    output = subprocess.run(["ldd", *programs], capture_output=True, text=True).stdout
    paths = {Path(match) for match in re.findall(r"(?:=> |^\s)(/\S+) \(", output, re.MULTILINE)}
    (home,) = {path.parent for path in paths if path.name == "libc.so.6"}
    own = Path(sys.prefix)
    return {
        (str(path) if path.name.startswith("ld-") else f"{home}/{path.name}").lstrip("/"): path for path in paths if own not in path.parents
    }


def _owned_by_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.mode |= 0o444
    return entry


def _add(archive: tarfile.TarFile, name: str, kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o755, text: str = "") -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname, entry.mode, entry.size = kind, link, mode, len(text)
    archive.addfile(entry, io.BytesIO(text.encode()))
