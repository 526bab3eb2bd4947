"""The folder of a deployment on this computer: Terraform's files and state, the SSH key, and the machines as they were seen last."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import drivetrain
from drivetrain import runs
from drivetrain.outcomes import Outcome, Problem
from drivetrain.targets.consent import Consent
from drivetrain.targets.gcp.cloud import Cloud, run_program
from drivetrain.targets.gcp.failures import plain
from drivetrain.targets.gcp.machines import LABEL, Machine, from_facts, read_machines, to_facts
from drivetrain.targets.gcp.plan import Changes, read_plan

VARIABLES, BACKEND, PLAN, MACHINES, KEY = "terraform.tfvars.json", "backend.tf", "up.tfplan", "machines.json", "key"
CONFIGURATION = (".tf", ".sh", ".tftpl", ".py", ".service", ".timer")
"""Files of Terraform's configuration; others that lie beside them, as someone's state, are not copied."""
CHANGES = 2  # the exit code of `terraform plan -detailed-exitcode` if there is something to do


def state_folder(project: str, deployment: str) -> Path:
    """Returns the folder that keeps what this computer knows of a deployment."""
    base = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return base / "drivetrain" / "gcp" / project.replace(":", "_") / deployment


def configuration() -> Path:
    """Returns the folder with Terraform's configuration: of the installed package, or of the checkout."""
    package = Path(drivetrain.__file__).parent
    for folder in (package / "infra" / "gcp", package.parent.parent / "infra" / "gcp"):
        if folder.is_dir():
            return folder
    raise Problem("Terraform's configuration infra/gcp is missing from this installation: install drivetrain again")


@dataclass(frozen=True)
class Deployment:
    """Machines of one name in a project."""

    project: str
    name: str
    bucket: str = ""
    """The bucket of Terraform's state; "": the state is in the folder."""
    own_key: str = ""
    """The user's private key for ssh; "": the deployment has one of its own."""

    @property
    def cloud(self) -> Cloud:
        return Cloud(self.project)

    @cached_property
    def folder(self) -> Path:
        return state_folder(self.project, self.name)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lets one command at a time change the machines."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(self.folder / "lock", "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Problem(f"another command changes the machines of {self.name}: wait for it", Outcome.INFRA) from None
            yield

    # --- machines ---

    def find_machines(self) -> list[Machine]:
        """Asks Google Cloud for the machines of this deployment."""
        return read_machines(self.cloud.gcloud("compute", "instances", "list", f"--filter=labels.{LABEL}={self.name}") or [])

    def known_machines(self) -> list[Machine]:
        """Returns the machines that `up` made ready last; [] if there are none."""
        try:
            facts = json.loads((self.folder / MACHINES).read_text())
            return from_facts(facts["machines"])
        except FileNotFoundError:
            return []
        except (ValueError, KeyError, TypeError):
            raise Problem(f"{self.folder / MACHINES} is damaged: drivetrain up writes it again") from None

    def write_machines(self, machines: Sequence[Machine]) -> None:
        runs.write_atomic(self.folder / MACHINES, json.dumps({"format": runs.FORMAT, "machines": to_facts(machines)}, indent=1) + "\n")

    def forget_machines(self) -> None:
        (self.folder / MACHINES).unlink(missing_ok=True)

    # --- the SSH key ---

    @property
    def key(self) -> Path:
        return Path(self.own_key).expanduser() if self.own_key else self.folder / KEY

    @property
    def known_hosts(self) -> Path:
        return self.folder / "known_hosts"

    def public_key(self) -> str:
        """Returns the public key that the machines accept; that of a key pair of their own is made once."""
        public = self.key.with_name(f"{self.key.name}.pub")
        if self.own_key and not public.is_file():
            raise Problem(f"ssh_key: there is no public key {public}: correct ssh_key: in the target, or leave it out")
        if not public.is_file():
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            run_program(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", f"drivetrain-{self.name}", "-f", str(self.key)])
        return public.read_text().strip()

    # --- Terraform ---

    def write_configuration(self, variables: dict[str, Any]) -> None:
        """Writes Terraform's files; what an older version left is removed."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        source = configuration()
        files = {path.name: path for path in source.iterdir() if path.is_file() and path.suffix in CONFIGURATION and path.name != BACKEND}
        folders = {path.name for path in source.iterdir() if path.is_dir() and not path.name.startswith((".", "test"))}
        for old in self.folder.glob("*.tf"):
            if old.name not in files:
                old.unlink()
        for name, path in files.items():
            shutil.copyfile(path, self.folder / name)
        for name in folders:
            shutil.copytree(source / name, self.folder / name, dirs_exist_ok=True)
        (self.folder / VARIABLES).write_text(json.dumps(variables, indent=1) + "\n")
        if self.bucket:
            (self.folder / BACKEND).write_text(backend_text(self.bucket, self.name))

    def has_configuration(self) -> bool:
        return (self.folder / VARIABLES).is_file()

    def init(self) -> None:
        self.cloud.terraform(self.folder, "init", "-input=false", "-no-color", "-reconfigure")

    def plan(self) -> Changes:
        """Lets Terraform compare the machines with the settings; returns what is to do."""
        done = self.cloud.terraform(
            self.folder, "plan", "-input=false", "-no-color", "-detailed-exitcode", f"-out={PLAN}", good=(0, CHANGES)
        )  # fmt: skip
        if done.code != CHANGES:
            return Changes()
        return read_plan(json.loads(self.cloud.terraform(self.folder, "show", "-json", PLAN).out))

    def apply(self, consent: Consent, show: Callable[[str], None]) -> None:
        """Carries out the plan. This costs money, so that it takes the user's consent."""
        if not isinstance(consent, Consent):
            raise TypeError("apply needs the user's consent")
        self.cloud.terraform(self.folder, "apply", "-input=false", "-no-color", PLAN, show=show)

    def start(self, consent: Consent, machines: Sequence[Machine]) -> None:
        """Starts machines that are stopped. This costs money, so that it takes the user's consent."""
        if not isinstance(consent, Consent):
            raise TypeError("start needs the user's consent")
        for machine in machines:
            self.cloud.gcloud("compute", "instances", "start", machine.name, f"--zone={machine.zone}")

    def known_to_terraform(self) -> set[str] | None:
        """Returns the names of the resources in Terraform's state; None if there is no state to read."""
        if not self.has_configuration():
            return None
        self.init()
        done = self.cloud.terraform(self.folder, "show", "-json")
        return names_in_state(json.loads(done.out or "{}"))

    def bucket_of_models(self) -> str:
        """Returns the name of the bucket in Terraform's state; "BUCKET" if there is none."""
        resources = resources_in_state(json.loads(self.cloud.terraform(self.folder, "show", "-json").out or "{}"))
        return next(
            (str(resource["values"]["name"]) for resource in resources if resource.get("type") == "google_storage_bucket"), "BUCKET"
        )

    def outputs(self) -> dict[str, Any]:
        """Returns Terraform's outputs; {} if `up` was never run here."""
        if not self.has_configuration():
            return {}
        self.init()
        facts = json.loads(self.cloud.terraform(self.folder, "output", "-json").out or "{}")
        return {name: entry.get("value") for name, entry in facts.items()}

    def destroy(self) -> None:
        self.cloud.terraform(self.folder, "destroy", "-input=false", "-no-color", "-auto-approve")

    def remove_folder(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def backend_text(bucket: str, name: str) -> str:
    """Returns the file that says that Terraform keeps its state in a bucket. Without it, the state is in the folder."""
    prefix = f"drivetrain/{name}"
    return f'terraform {{\n  backend "gcs" {{\n    bucket = {json.dumps(bucket)}\n    prefix = {json.dumps(prefix)}\n  }}\n}}\n'


def resources_in_state(facts: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields all resources in what `terraform show -json` prints."""
    modules = [((facts.get("values") or {}).get("root_module") or {})]
    while modules:
        module = modules.pop()
        modules += module.get("child_modules") or []
        yield from (resource for resource in module.get("resources") or [] if resource.get("mode") != "data")


def names_in_state(facts: dict[str, Any]) -> set[str]:
    """Returns the names of all resources in what `terraform show -json` prints."""
    names = (str((resource.get("values") or {}).get("name", "")) for resource in resources_in_state(facts))
    return {name.rpartition("/")[2] for name in names} - {""}  # projects/P/serviceAccounts/EMAIL


def progress_line(line: str) -> str:
    """Returns a line of terraform's output that tells of a resource, shortened; "" for others."""
    text = plain(line)
    return text if ": " in text and text.split(": ", 1)[1].startswith(("Creat", "Still", "Destr", "Modif")) else ""
