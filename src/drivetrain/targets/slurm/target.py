"""Slurm: each run is a batch job, submitted on this machine or on a login node behind SSH."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from drivetrain.launch.request import Request
from drivetrain.outcomes import Outcome, Problem
from drivetrain.runs import is_run
from drivetrain.targets.archive import package_archive
from drivetrain.targets.base import STOP_SECONDS, Check, JobState, RenderedCommand, RenderedFile, Rendering, Target, TargetSettings
from drivetrain.targets.errors import SLURM, explain
from drivetrain.targets.host.connection import ReachableHost, SshHost, copy
from drivetrain.targets.host_checks import python_checks
from drivetrain.targets.layout import DEFAULT_BASE, Layout
from drivetrain.targets.local import code_folder, folder_checks, secret_values, unpack_code
from drivetrain.targets.record import Record
from drivetrain.targets.slurm.script import SlurmJob, script
from drivetrain.targets.slurm.states import CANCELLED, IMPOSSIBLE, STOPPED, end_of, phase_of, state_of_accounting
from drivetrain.targets.ssh import checked_address, host_checks, prepare_host
from drivetrain.targets.submission import Submission
from drivetrain.targets.transfer import send_run

CPUS_PER_GPU = 4
MIRROR_SECONDS = 0.4
POLL_SECONDS = 1.0
CPU_TORCH = "this login node has no GPU, so that torch for CPUs would be built for a run on GPUs"
CUDA_TORCH = "set torch: in the target for the driver of the machines (cu126, or cu130 from driver 580 on), or python:"


@dataclass(frozen=True, kw_only=True)
class SlurmSettings(TargetSettings):
    partition: str | None = None
    """As sbatch --partition; so are account, qos, constraint, mem and gres."""
    account: str | None = None
    """The account that is charged."""
    qos: str | None = None
    """The quality of service."""
    constraint: str | None = None
    """Features that the machines must have, such as a100."""
    gpus: int | None = None
    """GPUs of each machine (default: --procs with --device cuda, else none)."""
    gres: str | None = None
    """Generic resources as Slurm writes them, such as gpu:a100:4; replaces `gpus` in the script."""
    cpus: int | None = None
    """CPU cores of each machine (default: four for a GPU, else one for a process)."""
    mem: str | None = None
    """Memory of each machine, such as 64G."""
    time: str | None = None
    """The time limit, such as 24h; --time-limit wins."""
    grace: int = 120
    """Seconds before the time limit at which the run saves and is queued again."""
    retries: int = 3
    """How often a run is queued again after a lost machine, a hang or a lack of memory; after preemption as long as it saves something new."""
    sbatch: list[str] = field(default_factory=list)
    """Further options, such as --exclusive: each becomes an #SBATCH line."""
    prologue: list[str] = field(default_factory=list)
    """Shell lines before the run, such as `module load cuda` or `source venv/bin/activate`."""
    python: str | None = None
    """The Python of the jobs (default: the one that submits; with `host`, an environment that is built there once)."""
    host: str | None = None
    """A login node, as ssh knows it; without it, sbatch runs on this machine, and runs/ must be on the shared file system."""
    options: list[str] = field(default_factory=list)
    """Further words for ssh to that node."""
    dir: str = DEFAULT_BASE
    """With `host`: drivetrain's folder there, on the shared file system."""
    torch: str = "auto"
    """With `host`: the build of torch, such as cu126 (auto: for the login node's GPU driver; if it has none, a run on GPUs needs a value)."""


class SlurmTarget(Target):
    """A Slurm cluster."""

    kind: ClassVar[str] = "slurm"
    settings_class: ClassVar[type[TargetSettings]] = SlurmSettings
    settings: SlurmSettings

    @property
    def shares_files(self) -> bool:  # type: ignore[override]
        return self.settings.host is None

    @property
    def host(self) -> ReachableHost:
        if self.settings.host is None:
            return ReachableHost(sys.executable)
        return SshHost(None, checked_address(self.settings.host), tuple(self.settings.options))

    # --- knowledge ---

    def render(self, submission: Submission) -> Rendering:
        return self.render_array([submission])

    def render_array(self, submissions: Sequence[Submission]) -> Rendering:
        """Returns the script and the command for runs that differ in their commands only."""
        first = submissions[0]
        if (first.token or first.secrets) and any(option.startswith("--export") for option in self.settings.sbatch):
            raise Problem(f"the target {self.name}: secrets travel in the job's environment: remove --export from sbatch:")
        settings, request = self.settings, first.request
        gpus = self._gpus(first)
        job = SlurmJob(
            name=first.name if len(submissions) == 1 else first.name.rpartition("/")[0], commands=[self._command(s) for s in submissions],
            nodes=request.nodes, gpus=gpus, cpus=settings.cpus or (CPUS_PER_GPU * gpus or request.procs or 1), seconds=self._seconds(first),
            grace=settings.grace, options={name: getattr(settings, name) for name in ("partition", "account", "qos", "constraint", "mem", "gres")},
            extra=settings.sbatch, prologue=settings.prologue, variables=self._variables(), port=first.port, retries=settings.retries,
            run_dirs=[self._run_dir(s) for s in submissions],
            stop_files=[f"{self._job_folder(s)}/stop" for s in submissions], outputs=[self._output(s) for s in submissions],
        )  # fmt: skip
        path = f"{self._job_folder(first)}/job.sh"
        output = self._output(first).replace("%", "%%")
        if len(submissions) > 1:  # each element turns to its own file as soon as it runs
            output = f"{self._job_folder(first).replace('%', '%%')}/array-%a.log"
        folder = () if self.shares_files else (f"--chdir={self._layout(first).folder}",)
        words = (f"--output={output}", *folder, *self._comment(submissions), path)
        variables = {"DRIVETRAIN_TOKEN": "$DRIVETRAIN_TOKEN"} if first.token else {}
        commands = (
            RenderedCommand(("sbatch", "--test-only", *words)),
            RenderedCommand(("sbatch", "--parsable", *words), variables=variables),
        )
        return Rendering((RenderedFile(path, script(job)),), commands)

    def _comment(self, submissions: Sequence[Submission]) -> list[str]:
        """Returns the option with which `find_job` recognises a run's job; none for an array, or if the user sets the comment."""
        if len(submissions) > 1 or any(option.startswith("--comment") for option in self.settings.sbatch):
            return []
        return [f"--comment={job_comment(submissions[0].project, submissions[0].name)}"]

    def _gpus(self, submission: Submission) -> int:
        request = submission.request
        if request.device == "cpu":
            return 0
        return self.settings.gpus or ((request.procs or 1) if request.device == "cuda" else 0)

    def _needs_cuda(self, request: Request) -> bool:
        """Whether an environment for GPUs would be built on the login node, with the torch for that node's driver."""
        settings = self.settings
        if self.shares_files or settings.python or settings.torch != "auto" or request.device == "cpu":
            return False
        return request.device == "cuda" or bool(settings.gpus or _num_gpus(settings.gres or ""))

    def _seconds(self, submission: Submission) -> float | None:
        from drivetrain.settings import Length

        if submission.request.time_limit is not None or self.settings.time is None:
            return submission.request.time_limit
        try:
            length = Length.parse(self.settings.time)
        except ValueError:
            length = Length(0, "steps")
        if length.unit != "seconds":
            raise Problem(f"time: {self.settings.time!r} in the target {self.name}: write a time, such as 24h")
        return length.value

    def _command(self, submission: Submission) -> list[str]:
        python, code = self.settings.python or sys.executable, ""
        if not self.shares_files:
            python = self.settings.python or self._layout(submission).environment_python(submission.lock.name(self.settings.torch))
        if submission.code is not None:
            code = str(code_folder(submission)) if self.shares_files else self._layout(submission).code(submission.code.digest)
        return submission.words(python, self._run_dir(submission), code, time_limit=None)

    def _variables(self) -> dict[str, str]:
        variables = {"PYTHONUNBUFFERED": "1"} | self.settings.env
        if not self.shares_files:
            variables["PYTHONPATH"] = f"{self.settings.dir.rstrip('/')}/code/{package_archive().digest}"
        return variables

    def _layout(self, submission: Submission) -> Layout:
        return Layout(self.settings.dir.rstrip("/"), submission.project, submission.name)

    def _run_dir(self, submission: Submission) -> str:
        return str(submission.run.path.absolute()) if self.shares_files else self._layout(submission).run_dir

    def _job_folder(self, submission: Submission) -> str:
        return f"{self._run_dir(submission)}/job" if self.shares_files else self._layout(submission).job()

    def _output(self, submission: Submission) -> str:
        return f"{self._run_dir(submission)}/logs/output.log"

    # --- actions ---

    def submit(self, submission: Submission, rendering: Rendering, notice: Callable[[str], None]) -> dict[str, Any]:
        return self._submit([submission], rendering, notice)[0]

    def submit_array(self, submissions: list[Submission], notice: Callable[[str], None]) -> list[dict[str, Any]]:
        """Starts all runs as one job with an array."""
        return self._submit(submissions, self.render_array(submissions), notice)

    def _submit(self, submissions: list[Submission], rendering: Rendering, notice: Callable[[str], None]) -> list[dict[str, Any]]:
        if self._needs_cuda(submissions[0].request) and not self.host.call("facts", base=self.settings.dir)["gpus"]:
            raise Problem(f"{self.host.name}: {CPU_TORCH}: {CUDA_TORCH}")
        for submission in submissions:
            self._prepare(submission, notice)
        (file,), (test, command) = rendering.files, rendering.commands
        self.host.call("write", path=file.path, text=file.text)
        self._slurm(test.words)  # otherwise a job that no machine can ever take waits forever
        job = self._slurm(command.words, secret_values(submissions[0])).partition(";")[0]  # JOB;CLUSTER
        numbers = [job] if len(submissions) == 1 else [f"{job}_{number}" for number in range(len(submissions))]
        return [self._handle(number, self._run_dir(s), self._job_folder(s)) for number, s in zip(numbers, submissions, strict=True)]

    def _handle(self, number: str, run_dir: str, job_folder: str) -> dict[str, Any]:
        return {"id": number, "run_dir": run_dir, "job": job_folder, "waits": True, "label": f"{self.name} (job {number})"}

    def find_job(self, record: Record) -> dict[str, Any]:
        comment = job_comment(record.facts["project"], record.facts["name"])
        jobs = [line.partition("|") for line in self._slurm(["squeue", "--noheader", "--me", "--format=%i|%k"]).splitlines()]
        number = next((number for number, _, text in jobs if text == comment), None)
        if number is None:
            return {}
        if self.shares_files:
            run_dir = str(record.run.path.absolute())
            return self._handle(number, run_dir, f"{run_dir}/job")
        layout = Layout(self.settings.dir.rstrip("/"), record.facts["project"], record.facts["name"])
        return self._handle(number, layout.run_dir, layout.job())

    def bring_run(self, submission: Submission, notice: Callable[[str], None]) -> bool:
        return (
            super().bring_run(submission, notice)
            if self.shares_files
            else send_run(self.host, submission, self._run_dir(submission), notice)
        )

    def has_left(self, record: Record) -> bool:
        return self.settings.host not in (None, record.facts["settings"]["host"])

    def _prepare(self, submission: Submission, notice: Callable[[str], None]) -> None:
        """Brings code and environment to where the jobs run, and removes the marks of an earlier job."""
        if self.shares_files:
            unpack_code(submission)
        else:
            prepare_host(self.host, submission, self.settings.dir, self.settings.python, self.settings.torch, notice)
            self.host.call("write", path=self._layout(submission).mark, text="")
        for name in ("stop", "stop.failures", "stop.requeues"):
            self.host.call("delete", path=f"{self._job_folder(submission)}/{name}")
        self.host.call("write", path=f"{self._run_dir(submission)}/logs/output.log", text="", append=True)

    def _slurm(self, words: Sequence[str], secrets: Mapping[str, str] | None = None) -> str:
        """Runs a command of Slurm on the login node; returns what it prints."""
        done = self.host.call("execute", words=list(words), secrets=dict(secrets or {}))
        if done["code"] == 127 and "No such file" in done["errors"]:
            where = (
                "on this machine: log in to the cluster, or set host: LOGIN-NODE in the target"
                if self.shares_files
                else f"on {self.host.name}"
            )
            raise Problem(f"there is no {words[0]} {where}")
        if done["code"]:
            raise explain(self.name, done["errors"] or done["output"], done["code"], SLURM)
        return str(done["output"]).strip()

    def state(self, record: Record) -> JobState:
        job = record.handle["id"]
        try:
            text = self._slurm(["squeue", "--noheader", f"--jobs={job}", "--states=all", "--format=%T|%r"])
        except Problem as problem:
            if "does not know the job" not in str(problem):
                raise
            text = ""
        if not text:
            return self._state_of_old_job(record)
        state, _, reason = text.splitlines()[0].partition("|")
        if phase := phase_of(state):
            hint = IMPOSSIBLE.get(reason, "")
            return JobState(phase, None, f"waits: {reason}{f' ({hint})' if hint else ''}" if phase == "queued" and reason != "None" else "")
        match = re.search(r"\bExitCode=(\d+):(\d+)", self._slurm(["scontrol", "show", "job", "--oneliner", job]))
        ending = end_of(state, match[1] if match else None)
        return STOPPED if ending.reason == CANCELLED and self._was_stopped(record) else ending

    def _was_stopped(self, record: Record) -> bool:
        """Whether `stop` has asked for the job's end."""
        return bool(self.host.call("execute", words=["test", "-e", f"{record.handle['job']}/stop"], secrets={})["code"] == 0)

    def _state_of_old_job(self, record: Record) -> JobState:
        """Returns the end of a job that Slurm's controller has forgotten: from the accounting, else from the run itself."""
        try:
            text = self._slurm(["sacct", "-X", "-n", "-P", f"--jobs={record.handle['id']}", "--format=State,ExitCode"])
            if text:
                return state_of_accounting(text)
        except Problem:
            pass  # this cluster keeps no accounts
        outcome = record.run.read()["outcome"] if is_run(record.run.path) else ""
        return JobState("ended", Outcome(outcome).code) if outcome else JobState("lost", None, "Slurm does not know the job any more")

    def stop(self, record: Record, seconds: float = STOP_SECONDS) -> None:
        """Signals the job's step, so that the run saves; cancels a job that waits, or that does not end in time."""
        job = record.handle["id"]
        self.host.call("write", path=f"{record.handle['job']}/stop", text="")
        if self.state(record).phase == "running":
            self._slurm(["scancel", "--signal=TERM", job])
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline and self.state(record).phase == "running":
                time.sleep(POLL_SECONDS)
        if self.state(record).phase in ("queued", "running"):
            self._slurm(["scancel", job])
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline and self.state(record).phase in ("queued", "running"):
                time.sleep(POLL_SECONDS)

    def mirror(self, record: Record, follow: bool) -> Iterator[str]:
        if self.shares_files:
            yield from super().mirror(record, follow)
            return
        next_question, is_active = 0.0, True
        while is_active:
            if time.monotonic() > next_question:
                is_active = follow and self.patient_state(record).phase in ("queued", "running")
                next_question = time.monotonic() + 2.0
            try:
                yield from self.host.mirror(record.handle["run_dir"], record.run.path, [])
            except ConnectionError as error:
                if not follow:
                    raise Problem(str(error), Outcome.INFRA) from None
            yield ""
            time.sleep(MIRROR_SECONDS if is_active else 0)

    def pull(self, record: Record) -> None:
        if not self.shares_files:
            copy(self.host.copy_from(record.handle["run_dir"], record.run.path), self.host)

    def prepare_down(self) -> None:
        """Raises Problem if a job that runs or waits uses the folder on the login node."""
        if self.shares_files:
            return
        projects = f"{self.host.call('facts', base=self.settings.dir)['base']}/projects/"
        jobs = [line.partition("|") for line in self._slurm(["squeue", "--noheader", "--me", "--format=%i|%Z"]).splitlines()]
        if active := [number for number, _, folder in jobs if folder.startswith(projects)]:
            raise Problem(
                f"{self.name} has jobs that run or wait ({', '.join(active[:3])}): stop their runs with drivetrain stop, or scancel {active[0]}; or --force"
            )

    def down(self) -> str:
        if self.shares_files:
            return super().down()
        return f"removed {self.host.call('remove', base=self.settings.dir)['bytes'] / 1e6:,.0f} MB from {self.settings.dir} on {self.host.name}"

    def reach(self) -> str:
        rows = [line.split("|") for line in self._slurm(["sinfo", "--noheader", "--format=%P|%a|%l|%D|%G"]).splitlines()]
        parts = [
            f"{name} ({nodes} x {gres if gres != '(null)' else 'no GPU'}, {limit})" for name, up, limit, nodes, gres in rows if up == "up"
        ]
        return f"partitions: {', '.join(parts) or 'none is up'}"

    def checks(self) -> Iterator[Check]:
        nodes = [line.split("|") for line in self._slurm([*self._sinfo(), "--Node", "--format=%N|%T|%c|%G"]).splitlines()]
        up = [node for node in nodes if not re.match(r"down|drain|fail|maint|unk", node[1])]
        fix = "" if up else "wait, or choose another partition: sinfo shows why they are down (sinfo -R)"
        yield Check("machines", "ok" if up else "fault", f"{len(up)} of {len(nodes)} can take jobs", fix)
        gpus = self.settings.gpus or 0
        if gpus:
            fitting = [node for node in up if _num_gpus(node[3]) >= gpus]
            fix = "" if fitting else "ask for fewer (gpus: in the target), or for another partition"
            yield Check("GPUs", "ok" if fitting else "fault", f"{len(fitting)} machines have {gpus} or more", fix)
        if self.shares_files:
            yield from folder_checks()
        else:
            facts = self.host.call("facts", base=self.settings.dir)
            yield from host_checks(self.host.name, facts, self.settings.dir, self.settings.python)
            if self._needs_cuda(Request(device=self.settings.device)) and not facts["gpus"]:
                yield Check("torch", "fault", CPU_TORCH, CUDA_TORCH)
        if self.shares_files or self.settings.python:  # the machines must see it at the same path
            yield from python_checks(self.host, self.settings.python or sys.executable, self.settings.env, bool(self.settings.prologue))

    def _sinfo(self) -> list[str]:
        return ["sinfo", "--noheader", *([f"--partition={self.settings.partition}"] if self.settings.partition else [])]


def job_comment(project: str, name: str) -> str:
    """Returns the comment of a run's job, which no other run has."""
    return f"drivetrain:{project}/{name}"


def _num_gpus(gres: str) -> int:
    """Returns the number of GPUs in Slurm's text for generic resources, such as gpu:a100:4(S:0-1)."""
    return sum(int(match[1]) for match in re.finditer(r"\bgpu(?::[^:,(]+)?:(\d+)", gres))
