"""A container engine of this machine: `docker` or `podman`, and what it answers."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivetrain.outcomes import Outcome, Problem
from drivetrain.targets.errors import DOCKER, explain

PROGRAMS = ("docker", "podman")
ANSWER_SECONDS = 60.0
HINT = re.compile(r"(Run|See) '\w+ .*--help'")
"""What docker adds to each error."""
LOOPBACK = re.compile(r"tcp://(localhost|127\.[\d.]+|\[::1\])(:\d+)?/?")


@dataclass(frozen=True)
class Engine:
    program: str

    @property
    def is_podman(self) -> bool:
        return self.program == "podman"

    def run(self, *words: str, image: str = "", seconds: float | None = ANSWER_SECONDS) -> str:
        """Runs a command of the engine and returns what it prints; raises Problem with the fix if it fails."""
        done = self.try_run(*words, seconds=seconds)
        if done.returncode:
            raise self.problem(done.stderr or done.stdout, done.returncode, image)
        return done.stdout.strip()

    def problem(self, output: str, code: int, image: str = "") -> Problem:
        """Returns the problem that the engine's output tells."""
        lines = [line for line in output.splitlines() if not HINT.match(line)]
        return explain(self.program, "\n".join(lines), code, DOCKER, image=image)

    def try_run(self, *words: str, seconds: float | None = ANSWER_SECONDS) -> subprocess.CompletedProcess[str]:
        """Runs a command that may fail."""
        try:
            return subprocess.run(
                [self.program, *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=seconds
            )
        except FileNotFoundError:
            raise no_engine(self.program) from None
        except subprocess.TimeoutExpired:
            raise Problem(f"{self.program} did not answer within {seconds:.0f} s: is its service in trouble?", Outcome.INFRA) from None

    def inspect(self, kind: str, name: str) -> dict[str, Any] | None:
        """Returns what the engine knows about a container or an image; None if it does not have it."""
        done = self.try_run(kind, "inspect", name)
        if done.returncode:
            if re.search(r"no such|not known|no container", done.stderr, re.IGNORECASE):
                return None
            raise self.problem(done.stderr or done.stdout, done.returncode, name)
        answer = json.loads(done.stdout)
        return dict(answer[0]) if answer else None

    def facts(self) -> dict[str, Any]:
        """Returns the engine's version, root folder and runtimes, and whether it runs without root; raises Problem if it does not answer."""
        check_local(self.program)
        if self.is_podman:
            answer = json.loads(self.run("info", "--format", "json"))
            host = answer["host"]
            return {
                "version": answer["version"]["Version"], "rootless": host["security"]["rootless"], "root": answer["store"]["graphRoot"],
                "runtimes": [],
            }  # fmt: skip
        answer = json.loads(self.run("info", "--format", "{{json .}}"))
        if answer.get("ServerErrors"):
            raise self.problem("\n".join(answer["ServerErrors"]), 1)
        return {
            "version": answer["ServerVersion"], "rootless": any("rootless" in option for option in answer.get("SecurityOptions") or ()),
            "root": answer["DockerRootDir"], "runtimes": list(answer.get("Runtimes") or ()),
        }  # fmt: skip


def no_engine(program: str) -> Problem:
    return Problem(f"there is no {program} on this machine: install Docker or podman, or train without containers: --on local")


def find_engine(preferred: str | None) -> Engine:
    """Returns the engine that the user asked for, else docker, else podman."""
    programs = (preferred,) if preferred else PROGRAMS
    for program in programs:
        if shutil.which(program) is not None:
            return Engine(program)
    raise no_engine(preferred or "docker or podman")


def check_local(program: str, environment: Mapping[str, str] = os.environ) -> None:
    """Raises Problem if the engine is on another machine, which does not have the run's folder."""
    variable = "CONTAINER_HOST" if program == "podman" else "DOCKER_HOST"
    address = environment.get(variable, "")
    source = f"{variable} is {address}"
    if not address and program == "docker" and shutil.which(program) is not None:
        address = Engine(program).try_run("context", "inspect", "--format", "{{.Endpoints.docker.Host}}").stdout.strip()
        source = f"Docker's context is {address}"
    if re.match(r"(tcp|ssh|https?)://", address) and not LOOPBACK.fullmatch(address):
        raise Problem(f"{source}, which is another machine: the run's folder is here. Unset it, or use a target of kind ssh")


def host_gpus() -> int:
    """Returns the number of NVIDIA GPUs whose driver is loaded on this machine."""
    devices = [path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    if not devices and Path("/dev/dxg").exists() and shutil.which("nvidia-smi") is not None:  # Windows' Linux
        return 1
    return len(devices)


def gpu_runtime(engine: Engine, facts: Mapping[str, Any]) -> str:
    """Returns how the engine gives GPUs to containers; "" if it cannot."""
    if "nvidia" in facts["runtimes"]:
        return "the runtime nvidia"
    specification = next(_cdi_files(), None)
    if specification is not None:
        return f"CDI ({specification})"
    if not engine.is_podman and shutil.which("nvidia-container-runtime-hook") is not None:
        return "nvidia-container-runtime-hook"
    return ""


def _cdi_files() -> Iterator[Path]:
    for folder in ("/etc/cdi", "/var/run/cdi"):
        yield from Path(folder).glob("nvidia*")
