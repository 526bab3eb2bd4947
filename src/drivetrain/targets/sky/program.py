"""The user's `sky`: every call of it, and what its answers mean."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from drivetrain.outcomes import Outcome, Problem
from drivetrain.targets.consent import Consent
from drivetrain.targets.sky.failures import ANSI, sky_problem
from drivetrain.targets.sky.task_file import LAUNCH_VARIABLE

FIRST_VERSION = (0, 12, 1)
"""The first SkyPilot whose answers are JSON and whose task files have max_hourly_cost."""
ANSWER_SECONDS = 180.0
"""For a question; the first one starts sky's API server, and may download its price lists."""
DOWN_SECONDS = 900.0
PROGRESS = re.compile(r"Launching|Trying|Failed to|[Ss]etting up|Cluster launched|is up\b|instance", re.ASCII)
CHOSEN = "✔"


class SkyCluster(NamedTuple):
    """What sky knows of a cluster."""

    name: str
    status: str
    """UP, INIT, STOPPED, AUTOSTOPPING or PENDING."""
    nodes: int
    resources: str
    is_unhealthy: bool = False
    """Whether an INIT cluster is not being launched, but has lost machines."""


class SkyOffer(NamedTuple):
    """The machines that sky would start."""

    infra: str
    """The cloud and region."""
    instance: str
    hourly: float
    """US dollars an hour for all machines."""


@dataclass(frozen=True)
class SkyProgram:
    """The `sky` of this machine."""

    path: str = "sky"

    def version(self) -> str:
        """Returns SkyPilot's version; raises Problem if it is missing or too old. Starts no API server."""
        text = self._ask("--version")
        match = re.search(r"(\d+)\.(\d+)\.(\d+)\S*", text)
        if match is None:
            raise Problem(f"{self.path} --version answers {text.strip()[:80]!r}: it is not SkyPilot's sky; set program: in the target")
        if tuple(map(int, match.groups())) < FIRST_VERSION and not match[0].startswith("1.0.0-dev"):
            needed = ".".join(map(str, FIRST_VERSION))
            raise Problem(f"SkyPilot {match[0]} is too old: drivetrain needs {needed} or later (pip install -U skypilot)")
        return match[0]

    def clouds(self) -> list[str]:
        """Returns the clouds that sky may use."""
        answer = self._json("check", "-o", "json")
        workspaces = answer.values() if isinstance(answer, dict) else []
        return sorted({str(cloud) for clouds in workspaces for cloud in clouds})

    def clusters(self, name: str | None = None) -> list[SkyCluster]:
        """Returns the user's clusters, or the one of this name; asks their clouds."""
        rows = self._json("status", "-o", "json", "--refresh", *([name] if name else []))
        rows = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
        clusters = [
            SkyCluster(
                str(row.get("name")), str(row.get("status")), int(row.get("nodes") or 1), str(row.get("resources_str") or ""), row.get("init_kind") == "unhealthy"
            )
            for row in rows
        ]  # fmt: skip
        return [cluster for cluster in clusters if name in (None, cluster.name)]

    def offer(self, task_file: Path) -> SkyOffer:
        """Returns the machines that sky would start now; starts none."""
        text = self._ask("launch", "--dryrun", "-y", str(task_file))
        for line in text.splitlines():
            if line.rstrip().endswith(CHOSEN):
                cells = re.split(r"\s{2,}", line.removesuffix("\n").strip().removesuffix(CHOSEN).strip())
                with contextlib.suppress(ValueError):
                    return SkyOffer(cells[0], cells[1], float(cells[-1]))
        raise Problem("sky names no price for these machines: set price: in the target, in US dollars an hour for each machine")

    @staticmethod
    def launch_words(cluster: str, task_file: str, launch: str) -> list[str]:
        """Returns the words after `sky` that start machines; `launch` comes back in a file on each machine when its setup is complete."""
        return ["launch", "-y", "-d", "-c", cluster, "--env", f"{LAUNCH_VARIABLE}={launch}", task_file]

    def launch(self, cluster: str, task_file: Path, launch: str, consent: Consent, notice: Callable[[str], None]) -> None:
        """Starts machines that cost money; returns when they can be reached."""
        if not isinstance(consent, Consent):
            raise TypeError("machines that cost money start only with the user's consent")
        output = []
        with self._start(self.launch_words(cluster, str(task_file), launch)) as process:
            assert process.stdout is not None
            for line in process.stdout:
                plain = ANSI.sub("", line).strip()
                output.append(plain)
                if PROGRESS.search(plain):
                    notice(f"sky: {plain[:160]}")
        if process.returncode:
            raise sky_problem("\n".join(output), process.returncode)

    def down(self, names: Sequence[str]) -> None:
        """Removes clusters with their disks."""
        self._ask("down", "-y", *names, seconds=DOWN_SECONDS)

    def _json(self, *words: str) -> Any:
        """Returns sky's answer. Other lines may stand before it, such as that the API server starts."""
        text = self._ask(*words)
        start = re.search(r"^[\[{]", text, re.MULTILINE)
        try:
            return json.JSONDecoder().raw_decode(text, start.start() if start else 0)[0]
        except ValueError:
            raise Problem(f"sky {words[0]} does not answer with JSON: {text.strip()[-160:]!r}", Outcome.INFRA) from None

    def _ask(self, *words: str, seconds: float = ANSWER_SECONDS) -> str:
        with self._start(list(words)) as process:
            try:
                text, _ = process.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                raise Problem(
                    f"sky {words[0]} did not answer within {seconds:.0f} s: sky api status shows what it does", Outcome.INFRA
                ) from None
        if process.returncode:
            raise sky_problem(text, process.returncode)
        return ANSI.sub("", text)

    def _start(self, words: list[str]) -> subprocess.Popen[str]:
        try:
            return subprocess.Popen(
                [self.path, *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
            )
        except OSError as error:
            raise Problem(
                f"there is no {self.path} on this machine ({error.strerror}): pip install 'skypilot[aws]' (or another cloud), or set program: in the"
                " target to the path of your sky"
            ) from None
