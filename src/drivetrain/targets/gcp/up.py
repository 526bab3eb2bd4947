"""`drivetrain up`: makes the machines, or starts them again, and waits until they can train. Each step may be repeated."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from drivetrain.outcomes import Outcome, Problem
from drivetrain.targets.base import RenderedCommand, RenderedFile, Rendering
from drivetrain.targets.consent import Agree, Consent
from drivetrain.targets.gcp.deployment import BACKEND, PLAN, VARIABLES, Deployment, backend_text, progress_line
from drivetrain.targets.gcp.failures import NoCapacity
from drivetrain.targets.gcp.hosts import hosts_of
from drivetrain.targets.gcp.machines import Machine, names_text
from drivetrain.targets.gcp.plan import Changes
from drivetrain.targets.gcp.prices import cost_of
from drivetrain.targets.gcp.settings import GcpSettings, num_machines, region, terraform_variables
from drivetrain.targets.gcp.startup import is_ready, wait_until_ready

MAX_ZONES = 6  # that a message names


@dataclass(frozen=True)
class Up:
    """One `drivetrain up`."""

    target: str
    settings: GcpSettings
    deployment: Deployment
    max_cost: float | None
    agree: Agree
    notice: Callable[[str], None]

    def run(self) -> list[Machine]:
        """Returns the machines, which can train."""
        with self.deployment.locked():
            existing = self.deployment.find_machines()
            variables = self.variables(self.deployment.public_key(), bool(existing))
            if self._is_up(existing, variables):
                return self._ready(existing)
            self.deployment.write_configuration(variables)
            self.notice("comparing the machines with the settings (terraform plan)")
            self.deployment.init()
            changes = self.deployment.plan()
            check_changes(changes, existing, self.target)
            if not changes.is_empty:
                consent = self.agree(f"start the machines of {self.target}", cost_of(self.settings, self._sum(variables)))
                self._apply(consent)
            machines = self._running()
            self.deployment.write_machines([])  # none is ready until the wait below ends
            hosts = hosts_of(machines, self.deployment, self.settings.python, bool(self.settings.ssh_source_ranges))
            wait_until_ready(self.deployment, hosts, machines, self.settings.start_minutes, self.notice)
            return self._ready(self._running())

    def variables(self, public_key: str, is_made: bool) -> dict[str, Any]:
        """Returns Terraform's variables. The time limit of machines that exist stays, unless the user gives another sum."""
        cost = cost_of(self.settings, self.max_cost if self.max_cost is not None else self.settings.max_cost)
        minutes = 0 if cost.max_hours is None else round(cost.max_hours * 60)
        if is_made and cost.max_hours is None and self.deployment.has_configuration():
            minutes = int(json.loads((self.deployment.folder / VARIABLES).read_text()).get("max_run_minutes", 0))
        return terraform_variables(self.settings, self.deployment.project, self.deployment.name, public_key, minutes)

    def _sum(self, variables: dict[str, Any]) -> float | None:
        """Returns the dollars after which Google stops the machines; None: it does not."""
        minutes = variables["max_run_minutes"]
        return (minutes + 0.5) / 60 * cost_of(self.settings, None).hourly if minutes else None

    def _is_up(self, machines: Sequence[Machine], variables: dict[str, Any]) -> bool:
        """Whether there is nothing to do: the machines that were made ready last run, with these settings."""
        known = {(machine.name, machine.id, machine.started) for machine in self.deployment.known_machines()}
        if (
            not known
            or known != {(machine.name, machine.id, machine.started) for machine in machines}
            or not all(m.is_running for m in machines)
        ):
            return False
        if not self.deployment.has_configuration() or json.loads((self.deployment.folder / VARIABLES).read_text()) != variables:
            return False
        return all(
            is_ready(host) for host in hosts_of(machines, self.deployment, self.settings.python, bool(self.settings.ssh_source_ranges))
        )

    def _apply(self, consent: Consent) -> None:
        try:
            self.deployment.apply(consent, lambda line: self.notice(progress_line(line)) if progress_line(line) else None)
        except (Problem, KeyboardInterrupt) as error:
            self.notice(
                f"what was made so far may cost money: repeat `drivetrain up {self.target}`, or `drivetrain down {self.target}` removes it"
            )
            if isinstance(error, NoCapacity):
                raise Problem(f"{error}: {self._other_zones(error.zone)}", Outcome.INFRA) from None
            raise

    def _other_zones(self, full: str) -> str:
        """Returns the advice for a zone without capacity: the zones that have this GPU."""
        later = "try again later"
        if not self.settings.use_gpu:
            return f"{later}, or set zone: to another one of {region(self.settings)}"
        try:
            rows = (
                self.deployment.cloud.gcloud("compute", "accelerator-types", "list", f"--filter=name={self.settings.accelerator_type}")
                or []
            )
        except Problem:
            return f"{later}, or set zone: to another one (gcloud compute accelerator-types list)"
        zones = sorted({str(row.get("zone", "")).rpartition("/")[2] for row in rows} - {full, ""})
        near = region(self.settings)
        zones = sorted(zones, key=lambda zone: (not zone.startswith(near), zone.partition("-")[0] != near.partition("-")[0], zone))
        return f"{later}, or set zone: to another one with {self.settings.accelerator_type}: {', '.join(zones[:MAX_ZONES])}"

    def _running(self) -> list[Machine]:
        """Returns the machines; raises Problem if one does not run."""
        machines = self.deployment.find_machines()
        stopped = [machine for machine in machines if machine.is_stopped]
        if stopped or len(machines) < num_machines(self.settings):
            what = (
                f"{names_text(stopped)} stopped again"
                if stopped
                else f"{len(machines)} of {num_machines(self.settings)} machines are there"
            )
            raise Problem(f"{what}: repeat `drivetrain up {self.target}`", Outcome.INFRA)
        return machines

    def _ready(self, machines: list[Machine]) -> list[Machine]:
        self.deployment.write_machines(machines)
        return machines


def check_changes(changes: Changes, existing: Sequence[Machine], target: str) -> None:
    """Refuses a plan that deletes machines, or that makes machines which are there already."""
    if changes.replaced_machines:
        raise Problem(
            f"these settings would delete {', '.join(changes.replaced_machines)} with the runs on its disk: keep the old settings, or `drivetrain down {target}` first"
        )
    double = [machine for machine in existing if machine.name in changes.new_machines]
    if double:
        raise Problem(
            f"{names_text(double)} exists, but not in Terraform's state here: it was made on another computer (use one state_bucket: on both), or a"
            f" crash left it behind (drivetrain down {target} --orphans)"
        )


def render_up(up: Up) -> Rendering:
    """Returns what `up --dry-run` prints: the files that it writes and the commands that it runs."""
    deployment = up.deployment
    key = deployment.key.with_suffix(".pub")
    variables = up.variables(key.read_text().strip() if key.exists() else "(the key that `up` makes)", is_made=False)
    files = [RenderedFile(str(deployment.folder / VARIABLES), json.dumps(variables, indent=1))]
    if deployment.bucket:
        files.append(RenderedFile(str(deployment.folder / BACKEND), backend_text(deployment.bucket, deployment.name)))
    terraform = ("terraform", f"-chdir={deployment.folder}")
    commands = (
        RenderedCommand((*terraform, "init", "-input=false", "-no-color", "-reconfigure")),
        RenderedCommand((*terraform, "plan", "-input=false", "-no-color", "-detailed-exitcode", f"-out={PLAN}")),
        RenderedCommand(
            (*terraform, "apply", "-input=false", "-no-color", PLAN), request="nothing; it runs only after you agree to the price"
        ),
    )
    return Rendering(tuple(files), commands)
