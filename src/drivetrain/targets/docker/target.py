"""A container engine of this machine: Docker, or podman. One container trains one run, in the run's folder on this machine.

An engine does not read exit codes, so that no container is started again: the supervisor in it restarts lost and hung processes, and
`drivetrain resume` continues a run that has ended.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, ClassVar

from drivetrain import runs
from drivetrain.outcomes import Problem
from drivetrain.targets.base import POLL_SECONDS, STOP_SECONDS, Check, JobState, RenderedCommand, Rendering, Target, TargetSettings
from drivetrain.targets.docker.command import ContainerJob, check_size, container_name, run_command, shm_size
from drivetrain.targets.docker.engine import PROGRAMS, Engine, find_engine, gpu_runtime, host_gpus
from drivetrain.targets.errors import Unsure
from drivetrain.targets.image.record import DEFAULT_TAGS, SOURCE_LABEL, Variant, read_images, source_digest
from drivetrain.targets.local import code_folder, unpack_code
from drivetrain.targets.record import JOB_VARIABLE, Record
from drivetrain.targets.submission import Submission

MIN_FREE_BYTES = 5e9
ENDED = "container.json"
"""The file of a run's job folder that keeps how its container ended, after the container was removed."""
NO_GPU = "this machine has no NVIDIA GPU, or its driver is not loaded"
NO_GPU_FIX = "give --device cpu, or set gpus: none in the target"
RUNNING = ("running", "paused", "restarting", "stopping")
NOT_STARTED = ("created", "configured", "initialized")


@dataclass(frozen=True, kw_only=True)
class DockerSettings(TargetSettings):
    engine: str | None = None
    """docker or podman (default: the one that is there, docker first)."""
    image: str | None = None
    """The image, with drivetrain as its entry point (default: the one that `drivetrain image build` made last)."""
    gpus: str = ""
    """GPUs of the container: all, none, a number, or device=0,1 (default: all with --device cuda, or if this machine has NVIDIA GPUs)."""
    shm: str | None = None
    """Size of /dev/shm, such as 8g (default: 64 MB, 256 MB for each loader worker, 256 MB for each process with a GPU)."""
    data: str | None = None
    """A folder of this machine that the run finds as /data."""
    cpus: float | None = None
    """CPU cores that the container may use."""
    memory: str | None = None
    """Memory that the container may use, such as 16g."""
    network: str = ""
    """The network, as for `docker run`: none, host, or a name."""
    options: list[str] = field(default_factory=list)
    """Further words for `docker run`, such as --ulimit=memlock=-1."""


class DockerTarget(Target):
    """Containers of this machine."""

    kind: ClassVar[str] = "docker"
    settings_class: ClassVar[type[TargetSettings]] = DockerSettings
    settings: DockerSettings

    @property
    def engine(self) -> Engine:
        if self.settings.engine not in (None, *PROGRAMS):
            raise Problem(f"engine: {self.settings.engine!r:.100} in the target {self.name}: write docker or podman")
        return find_engine(self.settings.engine)

    # --- knowledge ---

    def render(self, submission: Submission) -> Rendering:
        job = self.job(submission, self.settings.engine or _engine_there(), is_rootless=_is_rootless(self.settings.engine))
        return Rendering(commands=(RenderedCommand(tuple(run_command(job))),))

    def job(self, submission: Submission, engine: str, is_rootless: bool) -> ContainerJob:
        """Returns what to ask of the engine."""
        settings, request, run_dir = self.settings, submission.request, submission.run.path.absolute()
        _check_request(request.nodes, request.settings)
        gpus = self._gpus(request.device)
        image = self.image("gpu" if gpus else "cpu")
        words = submission.words("", f"/runs/{submission.name}", "/code")
        return ContainerJob(
            engine=engine, name=container_name(submission.name, run_dir), run_dir=run_dir, run=submission.name,
            image=image, pull=self._may_pull(image), words=words[words.index("drivetrain") + 1 :],
            user=(os.getuid(), os.getgid()), is_rootless=is_rootless, code=code_folder(submission) if submission.code is not None else None,
            data=Path(settings.data).expanduser().absolute() if settings.data is not None else None, gpus=gpus,
            shm=check_size(settings.shm, "shm") or shm_size(request.settings, request.procs or _num_gpus(gpus), bool(gpus)),
            cpus=settings.cpus, memory=check_size(settings.memory, "memory"), network=settings.network,
            variables={"PYTHONUNBUFFERED": "1", JOB_VARIABLE: f"/runs/{submission.name}/job"} | settings.env, secrets=submission.secrets, options=settings.options,
        )  # fmt: skip

    def _gpus(self, device: str | None) -> str:
        """Returns which GPUs the container gets; "": none."""
        if device == "cpu" or self.settings.gpus == "none":
            return ""
        return self.settings.gpus or ("all" if device == "cuda" or host_gpus() else "")

    def image(self, variant: Variant) -> str:
        if self.settings.image is not None:
            return self.settings.image
        built = read_images().get(variant)
        return built.tag if built is not None else DEFAULT_TAGS[variant]

    def _may_pull(self, image: str) -> bool:
        """Whether the image may come from a registry: not where its name is only this machine's, and a stranger's there."""
        return self.settings.image is not None or "/" in image

    # --- actions ---

    def submit(self, submission: Submission, rendering: Rendering, notice: Callable[[str], None]) -> dict[str, Any]:
        engine, (command,) = self.engine, rendering.commands
        engine.facts()  # raises Problem if it does not answer, or is on another machine
        if self.settings.data is not None and not Path(self.settings.data).expanduser().is_dir():
            raise Problem(f"data: {self.settings.data}: there is no such folder on this machine: correct it in the target {self.name}")
        gpus = self._gpus(submission.request.device)
        if gpus and not host_gpus():
            raise Problem(f"{NO_GPU}: {NO_GPU_FIX}")
        name = container_name(submission.name, submission.run.path.absolute())
        image = self.image("gpu" if gpus else "cpu")
        self._check_image(engine, image, notice)
        unpack_code(submission)
        self._remove_earlier(engine, name, submission)
        output = _output(submission.run.path)
        output.parent.mkdir(parents=True, exist_ok=True)
        offset = output.stat().st_size if output.is_file() else 0
        try:
            answer = engine.run(*command.words[1:], image=image, seconds=None)
        except Problem as problem:
            if _is_running(engine.inspect("container", name)):  # only the engine's answer was lost
                raise Unsure(str(problem), problem.outcome) from None
            engine.try_run("rm", "--volumes", name)  # it was created, but could not be started
            raise
        return self._handle(engine, answer.splitlines()[-1].strip(), name, offset)

    def _handle(self, engine: Engine, identity: str, name: str, offset: int) -> dict[str, Any]:
        return {"engine": engine.program, "container": identity, "name": name, "offset": offset, "label": f"{self.name} ({name})"}

    def find_job(self, record: Record) -> dict[str, Any]:
        """Returns the handle of the run's container, which has its name. Nobody has copied its output yet, so that this begins at the file's end."""
        engine, run_dir = self.engine, record.run.path.absolute()
        name = container_name(record.facts["name"], run_dir)
        facts = engine.inspect("container", name)
        if facts is None or str(facts["State"]["Status"]).lower() in NOT_STARTED:
            return {}
        output = _output(run_dir)
        return self._handle(engine, facts["Id"], name, output.stat().st_size if output.is_file() else 0)

    def _check_image(self, engine: Engine, image: str, notice: Callable[[str], None]) -> None:
        """Raises Problem if there is no image; notes an image of another version, and one that must be pulled."""
        facts = engine.inspect("image", image)
        if facts is None and not self._may_pull(image):
            flag = " --gpu" if image == DEFAULT_TAGS["gpu"] else ""
            raise Problem(f"there is no image {image}: build it with `drivetrain image build{flag}`, or set image: in the target")
        if facts is None:
            notice(f"pulling {image}")
        elif _is_other_version(facts):
            notice(f"{image} was built from another version of drivetrain: `drivetrain image build` makes it again")

    def _remove_earlier(self, engine: Engine, name: str, submission: Submission) -> None:
        """Removes the container of an earlier attempt, which has ended."""
        facts = engine.inspect("container", name)
        if facts is None:
            return
        if _is_running(facts):
            raise Unsure(f"{submission.name} runs already, in the container {name}: drivetrain stop {submission.name}")
        engine.run("rm", "--volumes", name)

    def state(self, record: Record) -> JobState:
        ended = runs.parse_row(_read(_ended_file(record)))
        if ended is not None and ended.get("container") == record.handle["container"]:
            return JobState("ended", int(ended["code"]), str(ended["reason"]))
        facts = self._recorded_engine(record).inspect("container", record.handle["container"])
        if facts is None:
            return JobState("lost", None, "its container was removed, and with it the exit code and the end of the output")
        return container_state(facts["State"])

    def _recorded_engine(self, record: Record) -> Engine:
        return find_engine(record.handle["engine"])

    def stop(self, record: Record, seconds: float = STOP_SECONDS) -> None:
        if self.state(record).phase in ("running", "queued"):
            self._change(record, "stop", "--time", f"{max(1, seconds):.0f}", seconds=seconds + STOP_SECONDS)

    def mirror(self, record: Record, follow: bool) -> Iterator[str]:
        """Writes what the container prints into output.log; with `follow`, until it has ended."""
        while self._has_container(record):
            with _open_output(record) as output:
                process = self._start_logs(record, output, follow)
                try:
                    while process.poll() is None:
                        yield ""
                        time.sleep(POLL_SECONDS)
                finally:
                    process.kill()
                    process.wait()
            if not follow or self.state(record).phase in ("ended", "lost"):
                break
            time.sleep(POLL_SECONDS)  # the engine has ended the connection, not the run: ask it again
        yield ""

    def _change(self, record: Record, *words: str, seconds: float = STOP_SECONDS) -> None:
        """Gives the engine an order for the run's container. Another command, which follows the run, may have removed it meanwhile."""
        try:
            self._recorded_engine(record).run(*words, record.handle["container"], seconds=seconds)
        except Problem:
            if self._has_container(record):
                raise

    def _has_container(self, record: Record) -> bool:
        return self._recorded_engine(record).inspect("container", record.handle["container"]) is not None

    def _start_logs(self, record: Record, output: IO[bytes], follow: bool) -> subprocess.Popen[bytes]:
        words = [record.handle["engine"], "logs", *(["--follow"] if follow else []), record.handle["container"]]
        return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)

    def pull(self, record: Record) -> None:
        """Completes output.log. When the container has ended, keeps how, and removes it."""
        if not self._has_container(record):
            return
        state = self.state(record)
        for _ in self.mirror(record, follow=False):
            pass
        if state.phase == "ended":
            ended = {"container": record.handle["container"], "code": state.code, "reason": state.reason}
            runs.write_atomic(_ended_file(record), json.dumps(ended) + "\n")
            self._change(record, "rm", "--volumes")

    def reach(self) -> str:
        engine = self.engine
        facts = engine.facts()
        num_gpus = host_gpus()
        gpus = f"{num_gpus} GPU{'s' if num_gpus > 1 else ''}" if num_gpus else "no GPU"
        return f"{engine.program} {facts['version']}{' without root' if facts['rootless'] else ''}, {gpus}"

    def checks(self) -> Iterator[Check]:
        engine = self.engine
        facts = engine.facts()
        gpus = self._gpus(self.settings.device)
        yield self._image_check(engine, "gpu" if gpus else "cpu")
        if gpus:
            yield _gpu_check(engine, facts)
        yield from _disk_checks(facts["root"])

    def _image_check(self, engine: Engine, variant: Variant) -> Check:
        image = self.image(variant)
        facts = engine.inspect("image", image)
        build = f"drivetrain image build{' --gpu' if variant == 'gpu' else ''}"
        if facts is None and self._may_pull(image):
            return Check("image", "warning", f"{image} is not on this machine: the first run pulls it", f"{engine.program} pull {image}")
        if facts is None:
            return Check("image", "fault", f"there is no image {image}", build)
        if _is_other_version(facts):
            return Check("image", "warning", f"{image} was built from another version of drivetrain", build)
        return Check("image", "ok", f"{image}, {facts['Size'] / 1e9:.1f} GB")

    def down(self) -> str:
        """Removes the containers of runs that have ended."""
        engine = self.engine
        names = engine.run(
            "ps", "--all", "--filter", "label=drivetrain.run", "--filter", "status=exited", "--filter", "status=created", "--format", "{{.Names}}"
        ).split()  # fmt: skip
        if names:
            engine.run("rm", "--volumes", *names)
        return f"removed {len(names)} containers of runs that had ended; images: {engine.program} image rm NAME"


def container_state(state: dict[str, Any]) -> JobState:
    """Returns the state of a run from what the engine says of its container."""
    status = str(state["Status"]).lower()
    if status in NOT_STARTED:
        return JobState("queued", None, "the container is created, but not started")
    if status in RUNNING:
        return JobState("running")
    reason = str(state.get("Error") or "")
    if state.get("OOMKilled"):
        reason = "the container's memory was full, and a process was killed: raise memory: in the target, or use less (plan.workers, plan.micro_batch)"
    return JobState("ended", int(state["ExitCode"]), reason)


def _is_running(container: dict[str, Any] | None) -> bool:
    return container is not None and container["State"]["Status"].lower() in RUNNING


def _check_request(nodes: int, words: tuple[str, ...]) -> None:
    if nodes > 1:
        raise Problem(f"--nodes {nodes}: a target of kind docker is one machine: use a target of kind ssh or slurm, or leave out --nodes")
    for word in words:
        name, _, value = word.partition("=")
        if name == "start" and value not in ("", "none") and not value.startswith("/data/"):
            raise Problem(
                f"{word}: a container sees only its own run and /data: copy that run below data: of the target, and write start=/data/NAME"
            )


def _engine_there() -> str:
    """Returns the engine of this machine; docker, if there is none, so that --dry-run works everywhere."""
    return next((program for program in PROGRAMS if shutil.which(program) is not None), PROGRAMS[0])


def _is_rootless(preferred: str | None) -> bool:
    """Whether the engine runs without root; False if it does not answer."""
    try:
        return bool(find_engine(preferred).facts()["rootless"])
    except Problem:
        return False


def _num_gpus(gpus: str) -> int:
    if not gpus:
        return 1
    if gpus.startswith("device="):
        return gpus.count(",") + 1
    return int(gpus) if gpus.isdigit() else max(1, host_gpus())


def _is_other_version(image: dict[str, Any]) -> bool:
    """Whether `drivetrain image build` made the image from other source code than this."""
    source = ((image.get("Config") or {}).get("Labels") or {}).get(SOURCE_LABEL)
    return source is not None and source != source_digest()


def _gpu_check(engine: Engine, facts: dict[str, Any]) -> Check:
    if not host_gpus():
        return Check("GPU", "fault", NO_GPU, NO_GPU_FIX)
    runtime = gpu_runtime(engine, facts)
    if runtime:
        return Check("GPU", "ok", f"{host_gpus()} on this machine; {engine.program} gives them to containers with {runtime}")
    fix = "install the NVIDIA Container Toolkit, then: " + (
        "nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml"
        if engine.is_podman
        else "nvidia-ctk runtime configure --runtime=docker, and restart Docker"
    )
    return Check("GPU", "fault", f"{engine.program} cannot give GPUs to containers", fix)


def _disk_checks(root: str) -> Iterator[Check]:
    for name, folder in (("disk of images", Path(root)), ("disk of runs", Path.cwd())):
        existing = next((path for path in (folder, *folder.parents) if os.access(path, os.R_OK)), Path("/"))
        free = shutil.disk_usage(existing).free
        is_full = free < MIN_FREE_BYTES
        yield Check(name, "warning" if is_full else "ok", f"{free / 1e9:,.0f} GB free at {folder}", "make room there" if is_full else "")


# --- the run's files ---------------------------------------------------------------------------


def _output(run: Path) -> Path:
    return run / "logs" / "output.log"


def _open_output(record: Record) -> IO[bytes]:
    """Opens output.log where this container's output begins. Each reader writes the same bytes at the same place, so that several of
    them do not disturb each other."""
    path = _output(record.run.path)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    os.lseek(descriptor, int(record.handle["offset"]), os.SEEK_SET)
    return os.fdopen(descriptor, "r+b", buffering=0)


def _ended_file(record: Record) -> Path:
    return record.run.path / "job" / ENDED


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
