"""One or several machines behind SSH, without root, agent or Docker there."""

from __future__ import annotations

import contextlib
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, TypeVar

from drivetrain.outcomes import Outcome, Problem
from drivetrain.targets.archive import Archive, package_archive
from drivetrain.targets.base import MAX_SILENCE_SECONDS, STOP_SECONDS, Check, JobState, RenderedCommand, Rendering, Target, TargetSettings
from drivetrain.targets.environment import torch_backend
from drivetrain.targets.errors import Unsure
from drivetrain.targets.host.connection import ADDRESS, ReachableHost, SshHost, copy
from drivetrain.targets.host_checks import meeting_checks, python_checks
from drivetrain.targets.layout import DEFAULT_BASE, Layout
from drivetrain.targets.local import RETRIES, job_state, request_command, secret_values
from drivetrain.targets.record import Record
from drivetrain.targets.submission import Submission
from drivetrain.targets.transfer import send_run

RECONNECT_SECONDS = 2.0
MIN_FREE_BYTES = 2 << 30  # an environment with torch for a CPU
MAX_CLOCK_SECONDS = 30.0
Item = TypeVar("Item")
DRIVERS_BACKEND = "$TORCH_BACKEND"
"""Stands for the build of torch in what --dry-run shows: the machine's driver decides."""
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class HostSettings(TargetSettings):
    dir: str = DEFAULT_BASE
    """drivetrain's folder on each machine: code, environments, runs."""
    python: str | None = None
    """A Python there with torch and drivetrain's other packages; without it, an environment is built there once."""
    torch: str = "auto"
    """The build of torch: auto (for the GPU's driver), cpu, or as cu126."""


@dataclass(frozen=True, kw_only=True)
class SshSettings(HostSettings):
    hosts: list[str] = field(default_factory=list)
    """Machines as ssh knows them: names of ~/.ssh/config, HOST or USER@HOST. The first one has the run's folder."""
    options: list[str] = field(default_factory=list)
    """Further words for ssh, such as -F, FILE or -p, PORT."""
    rendezvous: str | None = None
    """The address at which the machines reach the first one (default: its address in the SSH configuration)."""


class HostsTarget(Target):
    """Machines that are reached with ssh, whatever started them."""

    settings_class: ClassVar[type[TargetSettings]] = HostSettings
    shares_files = False
    settings: HostSettings

    # --- which machines ---

    @abstractmethod
    def hosts(self, number: int | None = None) -> list[SshHost]:
        """Returns the machines, or the first `number` of them."""

    @abstractmethod
    def recorded_hosts(self, record: Record) -> list[SshHost]:
        """Returns the machines of a run."""

    @abstractmethod
    def leader_address(self) -> str:
        """Returns the address at which the machines reach the first one."""

    # --- knowledge ---

    def layout(self, submission: Submission) -> Layout:
        return Layout(self.settings.dir.rstrip("/"), submission.project, submission.name)

    def start_arguments(self, submission: Submission, rank: int) -> dict[str, Any]:
        """Returns the request that starts the run on one machine; without the values of secrets."""
        layout, nodes, package = self.layout(submission), submission.request.nodes, package_archive()
        python = self.settings.python or layout.environment_python(submission.lock.name(self.settings.torch))
        code = layout.code(submission.code.digest) if submission.code is not None else ""
        meeting = (f"{self.leader_address()}:{submission.port}", rank) if nodes > 1 else (None, None)
        words = submission.words(python, layout.run_dir, code, *meeting)
        variables = self.settings.env | {"PYTHONPATH": layout.code(package.digest), "PYTHONUNBUFFERED": "1"}
        needs = missing_arguments(submission, self.settings.dir, self.settings.python, self.settings.torch)
        needs |= {"python": self.settings.python} if self.settings.python else {}
        return {
            "needs": needs, "job": layout.job(rank), "words": words, "variables": variables, "secrets": {}, "cwd": layout.folder,
            "output": layout.output(rank), "retries": RETRIES,
        }  # fmt: skip

    def render(self, submission: Submission) -> Rendering:
        commands: list[RenderedCommand] = []
        hosts = self.hosts(submission.request.nodes)
        secrets = (*submission.secrets, *(("DRIVETRAIN_TOKEN",) if len(hosts) > 1 else ()))
        for rank, host in enumerate(hosts):
            for request in bring_requests(submission, self.settings.dir, self.settings.python, self.settings.torch):
                commands.append(request_command(host, request.verb, request.arguments))
            commands.append(request_command(host, "start", self.start_arguments(submission, rank), secrets))
        return Rendering(commands=tuple(commands))

    # --- actions ---

    def submit(self, submission: Submission, rendering: Rendering, notice: Callable[[str], None]) -> dict[str, Any]:
        hosts, settings = self.hosts(submission.request.nodes), self.settings
        secrets = secret_values(submission)
        if len(hosts) > 1:  # so that nothing starts where a machine cannot be used
            on_each(hosts, lambda host: prepare_host(host, submission, settings.dir, settings.python, settings.torch, notice))
        started: list[SshHost] = []

        def start(host: SshHost) -> None:
            self._start(host, hosts.index(host), submission, secrets, notice)
            started.append(host)

        try:
            on_each(hosts, start)
        except BaseException as error:
            on_each(started, lambda host: self._end(host, hosts.index(host), submission))
            if started and isinstance(error, Problem):
                raise Unsure(str(error), error.outcome) from None
            raise
        return self.known_handle(submission)

    def bring_run(self, submission: Submission, notice: Callable[[str], None]) -> bool:
        return send_run(self.hosts(submission.request.nodes)[0], submission, self.layout(submission).run_dir, notice)

    def _end(self, host: SshHost, rank: int, submission: Submission) -> None:
        """Ends what has started on a machine after others refused the run."""
        with contextlib.suppress(Problem):
            host.call("stop", job=self.layout(submission).job(rank), grace=0.0)

    def known_handle(self, submission: Submission) -> dict[str, Any]:
        hosts, layout = self.hosts(submission.request.nodes), self.layout(submission)
        return {
            "hosts": [host.address for host in hosts],
            "run_dir": layout.run_dir,
            "jobs": [layout.job(rank) for rank in range(len(hosts))],
        }

    def _start(self, host: SshHost, rank: int, submission: Submission, secrets: dict[str, str], notice: Callable[[str], None]) -> None:
        """Starts the run on one machine; first brings what the machine lacks."""
        arguments, settings = self.start_arguments(submission, rank) | {"secrets": secrets}, self.settings
        if lacks := host.call("start", **arguments).get("missing"):
            bring(host, lacks, submission, settings.dir, settings.torch, notice)
            host.call("start", **arguments)

    def state(self, record: Record) -> JobState:
        """Returns the state of the first machine's job, which leads. When that has ended, the run runs while any other works for it; one
        that does not answer only gives a reason."""
        leader, *members = zip(self.recorded_hosts(record), record.handle["jobs"], strict=True)
        state = _ask(leader)
        if state.phase == "running" or not members:
            return state
        answers = on_each(members, _ask_or_problem)
        if running := [answer for answer in answers if isinstance(answer, JobState) and answer.phase == "running"]:
            return running[0]
        problems = [f"{answer} (the logs of its processes are missing)" for answer in answers if isinstance(answer, Problem)]
        return state._replace(reason="; ".join([state.reason] * bool(state.reason) + problems))

    def stop(self, record: Record, seconds: float = STOP_SECONDS) -> None:
        """Stops the run on all machines. Of those that do not answer only the first one matters: without it the others end by themselves."""
        jobs = list(zip(self.recorded_hosts(record), record.handle["jobs"], strict=True))
        problems = on_each(jobs, lambda job: _stop(*job, seconds))
        if problems[0] is not None:
            raise problems[0]

    def mirror(self, record: Record, follow: bool) -> Iterator[str]:
        """Follows the first machine, which has the run's metrics; connects again after the connection broke."""
        first, *others = self.recorded_hosts(record)
        deadline = time.monotonic() + MAX_SILENCE_SECONDS
        while True:
            try:
                for name in first.mirror(record.handle["run_dir"], record.run.path, record.handle["jobs"][:1], follow):
                    yield name
                    deadline = time.monotonic() + MAX_SILENCE_SECONDS
                break
            except ConnectionError as error:
                if not follow or time.monotonic() > deadline:
                    raise Problem(str(error), Outcome.INFRA) from None
                if self.is_gone(record):
                    return
                time.sleep(RECONNECT_SECONDS)
        for host in others:  # their processes' logs
            with contextlib.suppress(ConnectionError, Problem):  # `state` tells of one that does not answer
                yield from host.mirror(record.handle["run_dir"], record.run.path, [], False)

    def is_gone(self, record: Record) -> bool:
        """Whether the machines do not exist any more, so that nobody need wait for them."""
        return False

    def pull(self, record: Record) -> None:
        """Copies the run from the first machine, and the logs of the others that answer."""
        first, *others = self.recorded_hosts(record)
        copy(first.copy_from(record.handle["run_dir"], record.run.path), first)
        for host in others:
            with contextlib.suppress(Problem):  # `state` tells of one that does not answer
                copy(host.copy_from(f"{record.handle['run_dir']}/logs", record.run.path / "logs"), host)

    def reach(self) -> str:
        answers = on_each(self.hosts(), lambda host: host.call("facts", base=self.settings.dir))
        return "; ".join(facts_sentence(answer) for answer in answers)

    def checks(self) -> Iterator[Check]:
        for host in self.hosts():
            yield from host_checks(host.name, host.call("facts", base=self.settings.dir), self.settings.dir, self.settings.python)
            if self.settings.python:
                yield from python_checks(host, self.settings.python, self.settings.env)


class SshTarget(HostsTarget):
    """Machines that the user has, behind SSH."""

    kind: ClassVar[str] = "ssh"
    settings_class: ClassVar[type[TargetSettings]] = SshSettings
    settings: SshSettings

    def hosts(self, number: int | None = None) -> list[SshHost]:
        names = self.settings.hosts
        if not names:
            raise Problem(f"the target {self.name} has no hosts: write `hosts: [HOST]` below it in drivetrain.yaml")
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise Problem(f"the target {self.name} has the host {twice} twice: remove one (several processes of a machine: --procs)")
        if number is not None and number > len(names):
            raise Problem(
                f"--nodes {number}: the target {self.name} has {len(names)} host{'s' if len(names) > 1 else ''} ({', '.join(names)})"
            )
        return [SshHost(self.settings.python, checked_address(name), tuple(self.settings.options)) for name in names[:number]]

    def recorded_hosts(self, record: Record) -> list[SshHost]:
        return [SshHost(self.settings.python, name, tuple(self.settings.options)) for name in record.handle["hosts"]]

    def leader_address(self) -> str:
        address = self.settings.rendezvous or self.hosts()[0].hostname
        if ":" in address:
            raise Problem(
                f"machines cannot meet at the IPv6 address {address}: set rendezvous: in the target {self.name} to a name or an IPv4 address"
            )
        return address

    def has_left(self, record: Record) -> bool:
        return not set(record.handle["hosts"]) & set(self.settings.hosts)

    def checks(self) -> Iterator[Check]:
        yield from super().checks()
        if len(self.settings.hosts) > 1:
            yield from meeting_checks(self.hosts(), self.leader_address())

    def down(self) -> str:
        answers = on_each(self.hosts(), lambda host: host.call("remove", base=self.settings.dir))
        return f"removed {self.settings.dir} ({sum(answer['bytes'] for answer in answers) / 1e6:,.0f} MB) from {', '.join(self.settings.hosts)}"


def checked_address(text: str) -> str:
    if not ADDRESS.fullmatch(text):
        raise Problem(f"{text!r} is no host for ssh: write a name of ~/.ssh/config, HOST or USER@HOST")
    return text


def on_each(hosts: Sequence[Item], action: Callable[[Item], Result]) -> list[Result]:
    """Runs an action on all machines at once; raises the first Problem."""
    with ThreadPoolExecutor(max_workers=max(1, min(16, len(hosts)))) as pool:
        return list(pool.map(action, hosts))


def _ask(member: tuple[SshHost, str]) -> JobState:
    """Returns the state of a job on a machine."""
    host, job = member
    return job_state(host.call("job_state", job=job))


def _ask_or_problem(member: tuple[SshHost, str]) -> JobState | Problem:
    try:
        return _ask(member)
    except Problem as problem:
        return problem


def _stop(host: SshHost, job: str, seconds: float) -> Problem | None:
    """Stops a job on a machine; returns the problem if the machine does not answer."""
    try:
        host.call("stop", job=job, grace=seconds)
    except Problem as problem:
        return problem
    return None


def missing_arguments(submission: Submission, base: str, python: str | None, torch: str) -> dict[str, Any]:
    """Returns the request that asks what a machine lacks."""
    archives = [archive.digest for archive in _archives(submission)]
    return {"base": base, "archives": archives, "environment": "" if python else submission.lock.name(torch)}


def _archives(submission: Submission) -> list[Archive]:
    return [package_archive(), *([submission.code] if submission.code is not None else [])]


class HostRequest(NamedTuple):
    """A request for the program on a machine, as it is shown and as it is sent."""

    verb: str
    arguments: dict[str, Any]
    data: bytes = b""
    """What follows it."""


def bring_requests(submission: Submission, base: str, python: str | None, torch: str) -> list[HostRequest]:
    """Returns the requests that bring the code and build the environment; a machine gets those whose result it lacks."""
    requests = [
        HostRequest("store", {"base": base, "digest": archive.digest, "size": len(archive.data)}, archive.data)
        for archive in _archives(submission)
    ]
    if python:
        return requests
    lock, backend = submission.lock, torch if torch != "auto" else DRIVERS_BACKEND
    arguments = {"base": base, "digest": lock.name(torch), "requirements": list(lock.requirements), "installer": "uv"}
    return [*requests, HostRequest("build", arguments | {"flags": [f"--torch-backend={backend}"]})]


def prepare_host(
    host: ReachableHost, submission: Submission, base: str, python: str | None, torch: str, notice: Callable[[str], None]
) -> None:
    """Brings the code and the environment that a machine lacks."""
    lacks = host.call("missing", **missing_arguments(submission, base, python, torch))
    if lacks["archives"] or lacks["environment"]:
        bring(host, lacks | host.call("facts", base=base), submission, base, torch, notice)


def bring(host: ReachableHost, lacks: dict[str, Any], submission: Submission, base: str, torch: str, notice: Callable[[str], None]) -> None:
    """Brings the archives that a machine lacks, and builds the environment with the torch for its driver."""
    for verb, arguments, data in bring_requests(submission, base, None, torch):
        if verb == "store" and arguments["digest"] in lacks["archives"]:
            host.call(verb, data=data, **arguments)
        elif verb == "build" and lacks["environment"]:
            if torch == "auto":
                arguments["flags"] = [f"--torch-backend={torch_backend(gpu['driver'] for gpu in lacks['gpus'])}"]
            host.call(verb, notice=lambda text: notice(f"{host.name}: {text}"), **arguments)


def facts_sentence(facts: dict[str, Any]) -> str:
    """Returns what a machine has, in a few words."""
    gpus = facts["gpus"]
    names = f"{len(gpus)} x {gpus[0]['name']} (driver {gpus[0]['driver']})" if gpus else "no GPU"
    return f"{facts['host']}: {facts['cores']} CPU cores, {names}, Python {facts['version']}, {facts['free_bytes'] / 1e9:,.0f} GB free"


def host_checks(name: str, facts: dict[str, Any], base: str, python: str | None) -> Iterator[Check]:
    """Yields what `doctor` shows of a machine."""
    free, ok = facts["free_bytes"], facts["free_bytes"] > MIN_FREE_BYTES
    need = "" if ok else "make room there, or set dir: in the target to a folder on another disk"
    yield Check(f"{name}: disk", "ok" if ok else "fault", f"{free / 1e9:,.1f} GB free for {base}", need)
    writable = "" if facts["writable"] else f"make {base} writable for this user, or set dir: in the target"
    yield Check(
        f"{name}: folder",
        "ok" if facts["writable"] else "fault",
        f"{facts['base']} {'can' if facts['writable'] else 'cannot'} be written",
        writable,
    )
    yield Check(
        f"{name}: rsync",
        "ok" if facts["rsync"] else "fault",
        "is there" if facts["rsync"] else "is missing",
        "" if facts["rsync"] else "install rsync there",
    )
    seconds = abs(facts["time"] - time.time())
    yield Check(
        f"{name}: clock", "ok" if seconds < MAX_CLOCK_SECONDS else "warning", f"differs by {seconds:.0f} s from this machine's",
        "" if seconds < MAX_CLOCK_SECONDS else "set the clock there: times in logs and events are wrong (timedatectl set-ntp true)",
    )  # fmt: skip
    try:
        backend = torch_backend(gpu["driver"] for gpu in facts["gpus"])
        evidence = (
            f"{len(facts['gpus'])} GPUs, driver {facts['gpus'][0]['driver']}: torch for {backend}"
            if facts["gpus"]
            else "no NVIDIA GPU: torch for the CPU"
        )
        yield Check(f"{name}: GPU", "ok", evidence)
    except Problem as problem:
        yield Check(f"{name}: GPU", "fault", str(problem).partition(":")[0], str(problem).partition(": ")[2])
    if python is None:
        yield Check(f"{name}: Python", "ok", f"{facts['version']} ({facts['python']})")
