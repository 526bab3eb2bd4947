"""Runs a container of the stand-in kubelet as local processes in namespaces of their own, and keeps what it prints."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from drivetrain.chaos.hosts import Host
from tests.waiting import wait_until

REPOSITORY = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
INIT = Path(__file__).with_name("container_init.py")
IMAGE_PATHS = list(dict.fromkeys(map(str, (REPOSITORY, Path(sys.prefix), Path(sys.prefix).resolve(), Path(sys.base_prefix)))))
IMAGE_ENV = {
    "PATH": f"{BIN}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
    "OMP_WAIT_POLICY": "PASSIVE",
    "LANG": "C.UTF-8",
}
ENTRYPOINT = ["drivetrain"]


@dataclass(frozen=True)
class Mount:
    """A volume of a container: a folder of this machine, or memory if `source` is empty."""

    path: str
    source: str
    read_only: bool = False
    size: str = "50%"


class Container:
    """A container that was started: its processes have their own files, process ids, host name and network address."""

    def __init__(
        self, name: str, host: Host, hostname: str, folder: Path, command: Sequence[str], env: Mapping[str, str], mounts: Sequence[Mount],
        hosts_file: Path, working_folder: str = "", user: int | None = None, group: int = 0, groups: Sequence[int] = (),
    ) -> None:  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        self.name, self.log, self.env, self.user, self.group = name, folder / "log", dict(env), user, group
        self._stopped = False
        (folder / "root").mkdir(exist_ok=True)
        facts = {
            "hostname": hostname, "root": str(folder / "root"), "image": IMAGE_PATHS, "mounts": [vars(mount) for mount in mounts],
            "hosts": str(hosts_file), "folder": working_folder, "command": list(command), "env": self.env, "user": user, "group": group, "groups": list(groups),
        }  # fmt: skip
        words = [sys.executable, "-I", str(INIT)]
        self.process = subprocess.Popen([*host.enter, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(facts).encode())
        self.process.stdin.close()
        self.log.touch()
        self._reader = threading.Thread(target=self._keep_log, args=(self.process.stdout,), daemon=True)
        self._reader.start()
        self.started = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    def _keep_log(self, output: IO[bytes]) -> None:
        with open(self.log, "ab", buffering=0) as file:
            for line in output:
                file.write(f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.%f}000Z ".encode() + line.rstrip(b"\n") + b"\n")

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None and not self._reader.is_alive()

    def wait(self) -> int:
        """Returns the exit code, once the container has ended and its output is complete."""
        code = self.process.wait()
        self._reader.join()
        return code if code >= 0 else 128 - code

    @property
    def pid(self) -> int | None:
        """The number of the container's process 1 on this machine."""
        with contextlib.suppress(OSError):
            children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
            return int(children[0]) if children else None
        return None

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to process 1, as a container runtime does. A process 1 without a handler ignores all but SIGKILL."""
        pid = self.pid
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def stop(self, seconds: float) -> None:
        """Sends SIGTERM, and after `seconds` SIGKILL, which ends all processes of the container."""
        if seconds > 0:
            self.signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(seconds)
        self.signal(signal.SIGKILL)
        if self.process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
        self.process.kill()  # before process 1 exists
        self.wait()

    def exec(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Starts a further command in the container."""
        pid = wait_until(lambda: self.pid, "process 1 of the container", 10)
        user = [] if self.user is None else ["--setuid", str(self.user), "--setgid", str(self.group)]
        words = [
            "/usr/bin/nsenter",
            "--target",
            str(pid),
            "--mount",
            "--uts",
            "--ipc",
            "--net",
            "--pid",
            "--root",
            "--wd",
            *user,
            "--",
            *command,
        ]
        pipe = subprocess.PIPE
        return subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, env=self.env)


def expand(text: str, env: Mapping[str, str]) -> str:
    """Replaces $(NAME) as Kubernetes does: unknown names stay, $$ is a dollar sign."""

    def value(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return env.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([A-Za-z_.-][A-Za-z0-9_.-]*)\)", value, text)


def container_command(spec: Mapping[str, Any], env: Mapping[str, str]) -> list[str]:
    """Returns the words of a container's command, with the image's entry point where the container names none."""
    command = spec.get("command") or ENTRYPOINT
    return [expand(word, env) for word in (*command, *spec.get("args", ()))]
