"""Starts gcloud and terraform, and ssh to a machine that may not be ready. No other file starts a program of the cloud."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from drivetrain.outcomes import Outcome, Problem
from drivetrain.targets.consent import Consent
from drivetrain.targets.gcp.failures import explain_cloud

ANSWER_SECONDS = 300.0
"""gcloud retries by itself; a command that takes longer hangs."""
INSTALL = {
    "gcloud": "install the Google Cloud CLI: https://cloud.google.com/sdk/docs/install",
    "terraform": "install Terraform 1.5 or later: https://developer.hashicorp.com/terraform/install",
    "ssh": "install OpenSSH's client",
    "ssh-keygen": "install OpenSSH's client",
}
QUIET = {"CLOUDSDK_CORE_DISABLE_PROMPTS": "1", "TF_IN_AUTOMATION": "1", "TF_INPUT": "0"}
"""Neither program waits for an answer on the terminal."""


class CloudOutput(NamedTuple):
    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Cloud:
    """A project of Google Cloud, as gcloud reaches it."""

    project: str

    def gcloud(self, *words: str) -> Any:
        """Runs a command of gcloud in the project; returns what it prints, from JSON."""
        command = ["gcloud", *words, f"--project={self.project}", "--format=json", "--quiet"]
        output = run_program(command)
        if output.code:
            raise explain_cloud("gcloud", output.err or output.out, output.code, self.project)
        try:
            return json.loads(output.out or "null")
        except ValueError:
            raise Problem(f"gcloud {' '.join(words[:3])} printed no JSON: {output.out[:80]!r}", Outcome.INFRA) from None

    def gcloud_text(self, *words: str) -> CloudOutput:
        """Runs a command of gcloud whose output is no JSON; the caller judges its exit code."""
        return run_program(["gcloud", *words, f"--project={self.project}", "--quiet"])

    def submit_build(self, consent: Consent, words: Sequence[str], show: Callable[[str], None]) -> CloudOutput:
        """Builds an image with Cloud Build; the caller judges the exit code. This costs money, so that it takes the user's consent."""
        if not isinstance(consent, Consent):
            raise TypeError("submit_build needs the user's consent")
        return run_program(self.submit_words(words), show=show, seconds=None)

    def submit_words(self, words: Sequence[str]) -> list[str]:
        return ["gcloud", "builds", "submit", *words, f"--project={self.project}", "--quiet"]

    def terraform(self, folder: Path, *words: str, show: Callable[[str], None] | None = None, good: Sequence[int] = (0,)) -> CloudOutput:
        """Runs terraform in a folder; `show` gets each line as it appears. Raises Problem for an exit code that is not in `good`."""
        output = run_program(["terraform", f"-chdir={folder}", *words], show=show, seconds=None)
        if output.code not in good:
            raise explain_cloud("terraform", output.err or output.out, output.code, self.project, folder)
        return output


def run_program(words: Sequence[str], show: Callable[[str], None] | None = None, seconds: float | None = ANSWER_SECONDS) -> CloudOutput:
    """Runs a program to its end; `show` gets the lines of its output as they appear."""
    try:
        process = subprocess.Popen(
            list(words), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", env=os.environ | QUIET
        )  # fmt: skip
    except FileNotFoundError:
        raise Problem(f"there is no {words[0]} on this machine: {INSTALL[words[0]]}") from None
    try:
        if show is None:
            out, err = process.communicate(timeout=seconds)
        else:
            out, err = _communicate(process, show)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise Problem(f"{' '.join(words[:3])} has not answered for {seconds:.0f} s: is the network up?", Outcome.INFRA) from None
    except KeyboardInterrupt:
        process.wait()  # the terminal has interrupted it too: terraform writes its state before it ends
        raise
    return CloudOutput(process.returncode, out, err)


def _communicate(process: subprocess.Popen[str], show: Callable[[str], None]) -> tuple[str, str]:
    """Reads the output of a process line by line; its errors come with their own thread."""
    from threading import Thread

    assert process.stdout is not None and process.stderr is not None
    errors: list[str] = []
    reader = Thread(target=lambda: errors.append(process.stderr.read()), daemon=True)  # type: ignore[union-attr]
    reader.start()
    lines = []
    for line in process.stdout:
        lines.append(line)
        show(line.rstrip("\n"))
    process.wait()
    reader.join()
    return "".join(lines), "".join(errors)


def default_project() -> str:
    """Returns gcloud's own project, or that of the environment; "" if there is none."""
    if name := os.environ.get("GOOGLE_CLOUD_PROJECT", ""):
        return name
    return run_program(["gcloud", "config", "get-value", "project", "--quiet"]).out.strip().replace("(unset)", "")
