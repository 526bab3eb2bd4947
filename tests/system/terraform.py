"""Terraform in a copy of infra/gcp. Terraform is real; the provider hashicorp/google is a stand-in that knows the schema only."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
INFRA = CHECKOUT / "infra" / "gcp"
PROVIDER = Path(os.environ.get("DRIVETRAIN_TEST_PARTS", CHECKOUT.parent / "shared")) / "terraform"
PACKAGES = ("tf==1.2.0", "msgpack")
"""What the provider's stand-in needs."""
CONFIGURATION = """\
disable_checkpoint = true
provider_installation {
  dev_overrides { "hashicorp/google" = "%s" }
  direct {}
}
"""


@dataclass
class Terraform:
    """A copy of infra/gcp with a state of its own."""

    folder: Path
    python: Path

    def run(self, *words: str, code: int = 0) -> str:
        """Runs terraform in the folder; returns all that it prints."""
        configuration = self.folder.parent / "terraform.rc"
        configuration.write_text(CONFIGURATION % PROVIDER)
        variables = {"TF_SCHEMA_PYTHON": str(self.python), "TF_CLI_CONFIG_FILE": str(configuration), "TF_IN_AUTOMATION": "1"}
        done = subprocess.run(
            ["terraform", *words],
            cwd=self.folder,
            env=os.environ | variables,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=300,
        )
        output = done.stdout + done.stderr
        assert done.returncode == code, f"terraform {' '.join(words)} ended with {done.returncode}:\n{output}"
        return output

    def plan(self, **variables: Any) -> dict[str, Any]:
        """Returns the plan of these variables, as `terraform show -json` prints it."""
        self._write(variables)
        self.run("plan", "-no-color", "-input=false", "-out=plan")
        text = self.run("show", "-json", "plan")
        return dict(json.loads(next(line for line in text.splitlines() if line.startswith("{"))))

    def refusal(self, **variables: Any) -> str:
        """Returns why terraform refuses these variables, as one line."""
        self._write(variables)
        text = self.run("plan", "-no-color", "-input=false", code=1)
        return " ".join(re.sub(r"[│╷╵]", " ", text).split())

    def _write(self, variables: dict[str, Any]) -> None:
        (self.folder / "terraform.tfvars.json").write_text(json.dumps({"project_id": "my-project"} | variables))


def resources(plan: dict[str, Any], kind: str) -> dict[str, dict[str, Any]]:
    """Returns the planned resources of a type by address."""
    planned = plan["planned_values"]["root_module"]["resources"]
    return {entry["address"]: entry["values"] for entry in planned if entry["type"] == kind}


def copy_of_infra(folder: Path) -> Terraform:
    """Copies infra/gcp to a folder, without its backend, so that the state is there; skips where Terraform is missing."""
    if shutil.which("terraform") is None:
        pytest.skip("needs terraform 1.9 or later")
    if not (PROVIDER / "provider.py").exists():
        pytest.skip(f"needs the provider's schema in {PROVIDER} (DRIVETRAIN_TEST_PARTS)")
    shutil.copytree(INFRA, folder, ignore=shutil.ignore_patterns("backend.tf", ".terraform*", "*.tfstate*", "*.tfvars", "*.tfvars.json"))
    return Terraform(folder, _python_of_provider())


def _python_of_provider() -> Path:
    """Returns a Python with what the provider's stand-in needs; the first test process of this machine makes it."""
    environment = Path(tempfile.gettempdir()) / f"drivetrain-terraform-{os.getuid()}"
    python = environment / "bin" / "python"
    with open(f"{environment}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (environment / "complete").exists():
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(environment)], check=True, capture_output=True)
            done = subprocess.run([python, "-m", "pip", "install", "-q", *PACKAGES], capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"needs the packages {', '.join(PACKAGES)}: {done.stderr.strip()[-200:]}")
            (environment / "complete").touch()
    return python
