"""Machines of any cloud through SkyPilot: `sky launch` starts them, and the training goes there over SSH."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from drivetrain.names import private_cache
from drivetrain.outcomes import Outcome, Problem
from drivetrain.targets.base import STOP_SECONDS, Check, JobState, RenderedCommand, RenderedFile, Rendering, Target
from drivetrain.targets.consent import Cost, Price
from drivetrain.targets.errors import FolderMissing
from drivetrain.targets.record import Record, all_records
from drivetrain.targets.sky.machines import SkyMachines, forget_keys, ssh_file
from drivetrain.targets.sky.program import SkyCluster, SkyProgram
from drivetrain.targets.sky.settings import SkySettings
from drivetrain.targets.sky.task_file import PREFIX, cluster_name, host_names, is_of_target, task_file
from drivetrain.targets.submission import Submission

COPY_SECONDS = 300.0
"""Of a run on spot machines, whoever follows it gets new checkpoints so often."""


class SkyTarget(Target):
    """Machines that SkyPilot starts and stops. Runs of one folder with as many machines share a cluster."""

    kind: ClassVar[str] = "sky"
    settings_class: ClassVar[type[SkySettings]] = SkySettings
    shares_files = False
    settings: SkySettings

    def __init__(self, name: str, settings: SkySettings) -> None:
        super().__init__(name, settings)
        self.sky = SkyProgram(settings.program)
        self._ready: dict[str, SkyMachines] = {}
        """Clusters that were brought up for a submission which has not used them yet."""

    # --- knowledge ---

    def machines(self, submission: Submission) -> SkyMachines:
        """Returns the machines of a submission, which may not exist yet."""
        cluster = cluster_name(self.name, submission.request.nodes)
        return SkyMachines(self.name, self.settings, cluster, host_names(cluster, submission.request.nodes))

    def recorded_machines(self, record: Record) -> SkyMachines:
        return SkyMachines(self.name, self.settings, record.handle["cluster"], record.handle["hosts"])

    def render(self, submission: Submission) -> Rendering:
        machines, nodes = self.machines(submission), submission.request.nodes
        path = _task_path(machines.cluster)
        launch = RenderedCommand((self.settings.program, *SkyProgram.launch_words(machines.cluster, str(path), "RANDOM")))
        text = task_file(self.settings, nodes)
        if self.settings.price is None:
            text = text.replace("setup: |", "  # max_hourly_cost: the price that you agree to, of one machine\nsetup: |", 1)
        return Rendering((RenderedFile(str(path), text),), (launch, *machines.render(submission).commands))

    def known_handle(self, submission: Submission) -> dict[str, Any]:
        machines = self.machines(submission)
        return {"cluster": machines.cluster, "label": f"{self.name} ({machines.cluster})"} | machines.known_handle(submission)

    # --- money ---

    def cost(self, submission: Submission) -> Cost:
        return self._cost(submission.request.nodes)

    def cost_together(self, submissions: Sequence[Submission]) -> Cost:
        """Runs with as many machines share a cluster."""
        return self._cost(max(submission.request.nodes for submission in submissions))

    def _cost(self, nodes: int) -> Cost:
        if self.settings.price is not None:
            item = f"{nodes} x {self.settings.gpus or self.settings.instance_type or 'machine'} through sky"
            return Cost((Price(item, nodes * self.settings.price),), f"price: in the target {self.name}")
        version = self.sky.version()
        path = _task_path(f"{cluster_name(self.name, nodes)}-price")
        path.write_text(task_file(self.settings, nodes))
        offer = self.sky.offer(path)
        return Cost(
            (Price(f"{nodes} x {offer.instance} at {offer.infra}", offer.hourly),), f"SkyPilot {version}, {time.strftime('%Y-%m-%d')}"
        )

    # --- actions ---

    def submit(self, submission: Submission, rendering: Rendering, notice: Callable[[str], None]) -> dict[str, Any]:
        cluster = cluster_name(self.name, submission.request.nodes)
        machines = self._ready.pop(cluster, None) or self._bring_up(submission, notice)
        machines.submit(submission, rendering, notice)
        return self.known_handle(submission)

    def bring_run(self, submission: Submission, notice: Callable[[str], None]) -> bool:
        machines = self._bring_up(submission, notice)
        self._ready[machines.cluster] = machines
        return machines.bring_run(submission, notice)

    def _bring_up(self, submission: Submission, notice: Callable[[str], None]) -> SkyMachines:
        """Starts the machines, unless they are up. A machine that is up counts as not idle again."""
        nodes, consent = submission.request.nodes, submission.consent
        if consent is None:
            raise Problem(f"{self.name} starts machines that cost money: nothing was started without consent to the price")
        cluster, launch = cluster_name(self.name, nodes), secrets.token_hex(8)
        hosts = host_names(cluster, nodes)
        if not any(found.status == "UP" for found in self.sky.clusters(cluster)):
            forget_keys(hosts)
        is_from_sky = self.settings.price is None
        path = _task_path(cluster)
        path.write_text(task_file(self.settings, nodes, consent.cost.hourly if is_from_sky else None))
        notice(f"sky launch {cluster}: this takes minutes; machines without a run stop after {self.settings.idle_minutes} minutes")
        self.sky.launch(cluster, path, launch, consent, notice)
        if not ssh_file(cluster).is_file():
            self.sky.clusters(cluster)  # it writes the SSH configuration of the clusters that it shows
        addresses = SkyMachines(self.name, self.settings, cluster, hosts).wait_for_setup(launch)
        return SkyMachines(self.name, self.settings, cluster, hosts, addresses[0] if addresses else None)

    def state(self, record: Record) -> JobState:
        machines = self.recorded_machines(record)
        try:
            return machines.state(record)
        except Problem as problem:
            if problem.outcome is Outcome.INFRA and (reason := machines.why_gone()):
                return JobState("lost", None, f"{reason}: drivetrain resume {record.run.name} starts machines again")
            raise

    def stop(self, record: Record, seconds: float = STOP_SECONDS) -> None:
        machines = self.recorded_machines(record)
        try:
            machines.stop(record, seconds)
        except Problem as problem:
            if problem.outcome is not Outcome.INFRA or not machines.is_gone(record):
                raise

    def mirror(self, record: Record, follow: bool) -> Iterator[str]:
        """Follows the first machine. From spot machines copies the checkpoints too, because they may vanish."""
        machines = self.recorded_machines(record)
        copied, next_copy = Future[None](), time.monotonic() + COPY_SECONDS
        copied.set_result(None)
        with ThreadPoolExecutor(max_workers=1) as pool:
            try:
                for name in machines.mirror(record, follow):
                    yield name
                    if self.settings.spot and copied.done() and time.monotonic() > next_copy:
                        copied, next_copy = pool.submit(_copy, machines, record), time.monotonic() + COPY_SECONDS
            except Problem as problem:
                if problem.outcome is not Outcome.INFRA or not machines.is_gone(record):
                    raise

    def pull(self, record: Record) -> None:
        machines = self.recorded_machines(record)
        try:
            machines.pull(record)
        except FolderMissing:
            raise
        except Problem as problem:
            if problem.outcome is Outcome.INFRA and (reason := machines.why_gone()):
                raise FolderMissing(f"{reason}: what was copied before is in {record.run.path}", Outcome.INFRA) from None
            raise

    # --- about the place ---

    def reach(self) -> str:
        return f"SkyPilot {self.sky.version()}; {self.settings.gpus or self.settings.instance_type or 'no GPU'} at {self.settings.infra or 'the cheapest cloud'}"

    def checks(self) -> Iterator[Check]:
        try:
            clouds = self.sky.clouds()
            clusters = self._clusters()
        except Problem as problem:
            yield _fault("clouds", problem)
            return
        fix = "" if clouds else "set up the credentials of a cloud: `sky check` tells what is missing"
        yield Check("clouds", "ok" if clouds else "fault", ", ".join(clouds) or "sky may use none", fix)
        if clouds:
            yield self._price_check()
        for cluster in clusters:
            if is_of_target(cluster.name, self.name):
                yield Check("cluster", "ok", f"{cluster.name}: {cluster.status}, {cluster.nodes} x {cluster.resources}")
            else:
                yield Check(
                    "cluster",
                    "warning",
                    f"{cluster.name} is not of this folder and target",
                    f"if nothing needs it: sky down {cluster.name}",
                )

    def _price_check(self) -> Check:
        try:
            cost = self._cost(self.settings.nodes or 1)
        except Problem as problem:
            return _fault("price", problem)
        return Check("price", "ok", f"${cost.hourly:.2f} an hour for {cost.prices[0].item} ({cost.source})")

    def _clusters(self) -> list[SkyCluster]:
        """Returns all clusters that drivetrain started."""
        return [cluster for cluster in self.sky.clusters() if cluster.name.startswith(PREFIX)]

    def prepare_down(self) -> None:
        """Copies runs that have ended; raises Problem if one is active, or cannot be asked. Runs of machines that are gone are left alone."""
        present = {cluster.name for cluster in self._clusters()}
        own = (record for record in all_records() if record.target == self.name and record.facts["kind"] == self.kind)
        self.save_ended(record for record in own if record.handle.get("cluster") in present and not record.is_complete)

    def down(self) -> str:
        clusters = [cluster.name for cluster in self._clusters()]
        mine = [name for name in clusters if is_of_target(name, self.name)]
        others = [name for name in clusters if name not in mine]
        if mine:
            self.sky.down(mine)
            if left := [cluster.name for cluster in self._clusters() if cluster.name in mine]:
                raise Problem(
                    f"sky did not remove {', '.join(left)}: they may still cost money; repeat the command, or look with `sky status`",
                    Outcome.INFRA,
                )
            forget_keys([host for name in mine for host in host_names(name, _nodes_of(name))])
        removed = f"removed {', '.join(mine)} with their disks" if mine else "sky has no cluster of this folder and target"
        return removed + (f"; of other folders or targets: {', '.join(others)} (sky down NAME)" if others else "")


def _fault(subject: str, problem: Problem) -> Check:
    text, _, fix = str(problem).partition(": ")
    return Check(subject, "fault", text, fix)


def _nodes_of(cluster: str) -> int:
    suffix = cluster.rpartition("-x")[2]
    return int(suffix) if suffix.isdigit() and "-x" in cluster else 1


def _task_path(cluster: str) -> Path:
    return private_cache("sky") / f"{cluster}.yaml"


def _copy(machines: SkyMachines, record: Record) -> None:
    with suppress(Problem, OSError):  # the next copy comes, and the last one at the run's end
        machines.pull(record)
