"""Google Cloud: machines that `up` makes and `down` removes. In between they are machines behind SSH."""

from __future__ import annotations

import contextlib
import getpass
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

from drivetrain.outcomes import Outcome, Problem
from drivetrain.targets.base import Check, JobState, Orphan, Rendering, TargetSettings
from drivetrain.targets.consent import Agree, Consent, Cost
from drivetrain.targets.errors import FolderMissing, FolderStopped
from drivetrain.targets.gcp import checks, orphans
from drivetrain.targets.gcp.cloud import default_project
from drivetrain.targets.gcp.deployment import Deployment
from drivetrain.targets.gcp.hosts import hosts_of
from drivetrain.targets.gcp.machines import Machine, names_text, read_time, seconds_left
from drivetrain.targets.gcp.prices import cost_of, machine_text
from drivetrain.targets.gcp.settings import GcpSettings, check_project, deployment_name
from drivetrain.targets.gcp.up import Up, render_up
from drivetrain.targets.host.connection import SshHost
from drivetrain.targets.record import Record, all_records
from drivetrain.targets.ssh import HostsTarget, on_each
from drivetrain.targets.submission import Submission

SAVE_SECONDS = 180.0
"""Before Google stops the machines, a run has so long to save."""
LOOK_SECONDS = 20.0
DELETED = "was deleted"
KEEPS_FILES = "deleting bucket", "force_destroy"


def _refuse(action: str, cost: Cost) -> Consent:
    """Stands for the user where nothing may be started."""
    raise Problem(f"{action}: this command starts nothing")


class GcpTarget(HostsTarget):
    """Machines of Google Cloud."""

    kind: ClassVar[str] = "gcp"
    settings_class: ClassVar[type[TargetSettings]] = GcpSettings
    settings: GcpSettings
    _next_look: float = 0.0

    @cached_property
    def deployment(self) -> Deployment:
        name = deployment_name(self.settings, self.name, getpass.getuser())
        project = check_project(self.settings.project or default_project())
        return Deployment(project, name, self.settings.state_bucket, self.settings.ssh_key)

    # --- which machines ---

    def machines(self) -> list[Machine]:
        """Returns the machines that `up` has made ready; raises Problem if there are none."""
        machines = self.deployment.known_machines()
        if not machines:
            raise Problem(f"{self.name} has no machines: drivetrain up {self.name} (it shows the price and asks)")
        return machines

    def _hosts(self, machines: list[Machine]) -> list[SshHost]:
        return hosts_of(machines, self.deployment, self.settings.python, bool(self.settings.ssh_source_ranges))

    def hosts(self, number: int | None = None) -> list[SshHost]:
        machines = self.machines()
        if number is not None and number > len(machines):
            raise Problem(
                f"--nodes {number}: {self.name} has {len(machines)}: set nodes: {number} in the target, and drivetrain up {self.name}"
            )
        return self._hosts(machines[:number])

    def recorded_hosts(self, record: Record) -> list[SshHost]:
        """Returns the machines of a run, at their present addresses: a machine that was stopped gets another one."""
        known = {machine.id: machine for machine in self.deployment.known_machines()}
        return self._hosts([known.get(entry["id"]) or Machine(**entry) for entry in record.handle["machines"]])

    def leader_address(self) -> str:
        return self.machines()[0].internal

    def known_handle(self, submission: Submission) -> dict[str, Any]:
        machines = self.machines()[: submission.request.nodes]
        facts = [{"name": machine.name, "id": machine.id, "zone": machine.zone} for machine in machines]
        return super().known_handle(submission) | {"machines": facts}

    def has_left(self, record: Record) -> bool:
        ids = {machine.id for machine in self.deployment.known_machines()}
        return not ids & {entry["id"] for entry in record.handle["machines"]}

    # --- runs ---

    def start_arguments(self, submission: Submission, rank: int) -> dict[str, Any]:
        """Returns the request that starts the run. Where Google stops the machines at a known time, the run saves and ends before that."""
        left = seconds_left(self.machines())
        if left is not None:
            limit = submission.request.time_limit
            seconds = left - SAVE_SECONDS
            if seconds <= 0:
                raise Problem(
                    f"Google stops the machines of {self.name} in {max(0, left):.0f} s, as --max-cost asks: drivetrain up {self.name} gives them more time"
                )
            submission = replace(submission, request=replace(submission.request, time_limit=min(seconds, limit or seconds)))
        return super().start_arguments(submission, rank)

    def submit(self, submission: Submission, rendering: Rendering, notice: Callable[[str], None]) -> dict[str, Any]:
        try:
            return super().submit(submission, rendering, notice)
        except Problem as problem:
            self._explain_stopped(problem, self.machines())
            raise

    def bring_run(self, submission: Submission, notice: Callable[[str], None]) -> bool:
        try:
            return super().bring_run(submission, notice)
        except Problem as problem:
            self._explain_stopped(problem, self.machines())
            raise

    def _explain_stopped(self, problem: Problem, machines: list[Machine]) -> None:
        """Raises a Problem that says so if a machine that cannot be reached does not run."""
        if problem.outcome is Outcome.INFRA and (reason := self._why_stopped(machines)):
            raise Problem(f"{reason}: drivetrain up {self.name}") from None

    def state(self, record: Record) -> JobState:
        try:
            return super().state(record)
        except Problem as problem:
            if problem.outcome is Outcome.INFRA and (reason := self._why_record_stopped(record)):
                return JobState("lost", None, f"{reason}: drivetrain up {self.name}, then drivetrain resume {record.run.name}")
            raise

    def is_gone(self, record: Record) -> bool:
        if time.monotonic() < self._next_look:
            return False
        self._next_look = time.monotonic() + LOOK_SECONDS
        with contextlib.suppress(Problem):  # if Google Cloud does not answer, nothing is known
            return bool(self._why_record_stopped(record))
        return False

    def mirror(self, record: Record, follow: bool) -> Iterator[str]:
        try:
            yield from super().mirror(record, follow)
        except Problem as problem:
            if problem.outcome is not Outcome.INFRA or not self._why_record_stopped(record):
                raise

    def pull(self, record: Record) -> None:
        try:
            super().pull(record)
        except Problem as problem:
            if problem.outcome is Outcome.INFRA and (reason := self._why_record_stopped(record)):
                kind = FolderMissing if reason.endswith(DELETED) else FolderStopped
                raise kind(f"{reason}: drivetrain up {self.name}, then drivetrain pull {record.run.name}", Outcome.INFRA) from None
            raise

    # --- machines that do not run ---

    def _why_record_stopped(self, record: Record) -> str:
        return self._why_stopped([Machine(**entry) for entry in record.handle["machines"]])

    def _why_stopped(self, machines: list[Machine]) -> str:
        """Returns why one of the machines does not run; "" if all run."""
        present = {machine.id: machine for machine in self.deployment.find_machines()}
        deleted = [machine for machine in machines if machine.id not in present]
        if deleted:
            return f"{names_text(deleted)} {DELETED}"
        stopped = [present[machine.id] for machine in machines if present[machine.id].is_stopped]
        if not stopped:
            return ""
        if any(self._is_preempted(machine) for machine in stopped):
            return f"{names_text(stopped)} was preempted (Google took the spot machine back; its disk is still there)"
        ends = {machine.id: machine.ends for machine in self.deployment.known_machines()}
        if any((ends.get(machine.id) or time.time() + 1) <= time.time() for machine in stopped):
            return f"{names_text(stopped)} was stopped at its time limit (max_cost; its disk is still there)"
        return f"{names_text(stopped)} is stopped (idle, or by hand; its disk is still there)"

    def _is_preempted(self, machine: Machine) -> bool:
        """Whether Google took a spot machine back since its last start."""
        if not machine.is_spot:
            return False
        wanted = f"operationType=compute.instances.preempted AND targetId={machine.id}"
        rows = self.deployment.cloud.gcloud("compute", "operations", "list", f"--filter={wanted}") or []
        times = [read_time(row.get("insertTime")) or 0.0 for row in rows]
        return bool(times) and max(times) >= (machine.started or 0.0)

    # --- up and down ---

    def _up(self, max_cost: float | None, agree: Agree, notice: Callable[[str], None]) -> Up:
        return Up(self.name, self.settings, self.deployment, max_cost, agree, notice)

    def up(self, max_cost: float | None, agree: Agree, notice: Callable[[str], None]) -> str:
        machines = self._up(max_cost, agree, notice).run()
        left = seconds_left(machines)
        limit = f"; Google stops {'it' if len(machines) == 1 else 'them'} in {left / 3600:,.1f} hours" if left is not None else ""
        hourly = cost_of(self.settings, None).hourly
        return f"{self.name} is up: {names_text(machines)} (${hourly:,.2f} an hour{limit})   next: drivetrain train TASK --on {self.name} | down {self.name}"

    def render_up(self, max_cost: float | None) -> tuple[Cost, Rendering]:
        sum_of_user = max_cost if max_cost is not None else self.settings.max_cost
        return cost_of(self.settings, sum_of_user), render_up(self._up(max_cost, _refuse, lambda line: None))

    def prepare_down(self) -> None:
        """Copies runs that have ended; raises Problem if one is active, or cannot be asked. Runs of machines that are gone are left alone."""
        present = {machine.id for machine in self.deployment.find_machines()}
        self.save_ended(record for record in all_records() if self._is_here(record, present))
        machines = self.deployment.known_machines()
        if machines and not self._why_stopped(machines):  # runs of other folders and computers: `remove` refuses while one is active
            on_each(self._hosts(machines), lambda host: host.call("remove", base=self.settings.dir))

    def _is_here(self, record: Record, present: set[str]) -> bool:
        """Whether one of these machines has a run that was not copied completely."""
        is_own = record.target == self.name and record.facts["kind"] == self.kind and bool(record.handle) and not record.is_complete
        return is_own and bool(present & {entry["id"] for entry in record.handle["machines"]})

    def _has_state(self) -> bool:
        """Whether Terraform's state is here or in the bucket; writes the configuration that is needed to read it."""
        deployment = self.deployment
        if not deployment.has_configuration() and deployment.bucket:
            variables = self._up(None, _refuse, lambda line: None).variables(deployment.public_key(), is_made=False)
            deployment.write_configuration(variables)
        return deployment.has_configuration()

    def down(self) -> str:
        deployment = self.deployment
        with deployment.locked():
            if not self._has_state():
                if left := list(orphans.find_orphans(deployment)):
                    raise Problem(
                        f"Terraform's state of {self.name} is not on this computer, but {left[0]} exists: drivetrain down {self.name} --orphans"
                    )
                return f"{self.name} has no machines"
            deployment.init()
            kept = ""
            try:
                deployment.destroy()
            except Problem as problem:
                if not any(word in str(problem) for word in KEEPS_FILES):
                    raise
                kept = f"; the bucket has files, so it is kept (gcloud storage rm -r gs://{deployment.bucket_of_models()} deletes it)"
            deployment.forget_machines()
            if machines := deployment.find_machines():
                raise Problem(f"{names_text(machines)} is left: drivetrain down {self.name} --orphans", Outcome.INFRA)
            if not kept:
                deployment.remove_folder()
        return f"removed the machines of {self.name}, with their disks{kept}"

    def orphans(self) -> list[Orphan]:
        with self.deployment.locked():
            self._has_state()
            return list(orphans.find_orphans(self.deployment))

    def delete_orphans(self, found: list[Orphan], notice: Callable[[str], None]) -> int:
        return orphans.delete_orphans(self.deployment, found, notice)

    # --- what is there ---

    def reach(self) -> str:
        machines = self.deployment.known_machines()
        if not machines:
            return f"not up ({machine_text(self.settings)}): drivetrain up {self.name}"
        try:
            return super().reach()
        except Problem as problem:
            self._explain_stopped(problem, machines)
            raise

    def checks(self) -> Iterator[Check]:
        yield from checks.cloud_checks(self.settings, self.deployment)
        if self.deployment.known_machines():
            yield from super().checks()
