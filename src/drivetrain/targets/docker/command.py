"""The command that starts a run's container. Pure: words from settings; no word is ever read by a shell."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from drivetrain.outcomes import Problem
from drivetrain.plan.choose import MAX_LOADER_WORKERS_PER_GPU
from drivetrain.targets.base import STOP_SECONDS

MAX_NAME = 48
BASE_SHM_MB, WORKER_SHM_MB, GPU_SHM_MB = 64, 256, 256
SIZE = re.compile(r"\d+(\.\d+)?[bkmgBKMG]?")


@dataclass(frozen=True, kw_only=True)
class ContainerJob:
    """What the engine is asked for, and what the container runs."""

    engine: str
    name: str
    run_dir: Path
    image: str
    words: Sequence[str]
    """The words after `drivetrain`."""
    run: str
    """The run's name."""
    user: tuple[int, int] = (1000, 1000)
    is_rootless: bool = False
    pull: bool = True
    """Whether an image that is not here may be pulled."""
    code: Path | None = None
    data: Path | None = None
    gpus: str = ""
    """"": none; all, a number, or device=0,1."""
    shm: str = "64m"
    cpus: float | None = None
    memory: str | None = None
    network: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    secrets: Sequence[str] = ()
    """Names of variables of this process."""
    options: Sequence[str] = ()


def run_command(job: ContainerJob) -> list[str]:
    """Returns the words that start the container."""
    words = [job.engine, "run", "--detach", "--name", job.name, "--init", f"--stop-timeout={STOP_SECONDS:.0f}"]
    words += [f"--label=drivetrain.run={job.run}", f"--label=drivetrain.folder={job.run_dir}"]
    words += [*_user(job), "--cap-drop=ALL", "--security-opt=no-new-privileges", "--security-opt=label=disable"]
    words += _mount(job.run_dir, f"/runs/{job.run}")
    if job.code is not None:
        words += _mount(job.code, "/code", is_read_only=True)
    if job.data is not None:
        words += _mount(job.data, "/data")
    words += [*gpu_words(job.engine, job.gpus), f"--shm-size={job.shm}"]
    limits = {"cpus": f"{job.cpus:g}" if job.cpus is not None else None, "memory": job.memory, "network": job.network or None}
    words += [f"--{name}={value}" for name, value in limits.items() if value is not None]
    for name, value in job.variables.items():
        words += ["--env", f"{name}={value}"]
    for name in job.secrets:
        words += ["--env", name]
    if not job.pull:
        words.append("--pull=never")
    return [*words, *job.options, _check_image(job.image), *job.words]


def _check_image(image: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9]\S*", image):
        raise Problem(f"image: {image!r:.200} is no name of an image: write it as for `docker run`, such as drivetrain:cpu")
    return image


def _user(job: ContainerJob) -> list[str]:
    """Returns the words with which the run's files belong to the user who submits."""
    user = f"--user={job.user[0]}:{job.user[1]}"
    if not job.is_rootless:
        return [user]
    # Without root, an engine maps the container's root to the user of this machine; podman can also keep the number.
    return ["--userns=keep-id", user] if job.engine == "podman" else ["--user=0:0"]


def _mount(source: Path, target: str, is_read_only: bool = False) -> list[str]:
    """Returns the words that mount a folder.

    --volume splits its value at colons only; --mount reads a line of CSV, which podman's Docker API splits again at each comma.
    """
    if not str(source).isprintable():
        raise Problem(f"{str(source)!r}: a path with a line break or a control character cannot be mounted: rename the folder")
    if ":" not in str(source):
        return [f"--volume={source}:{target}{':ro' if is_read_only else ''}"]
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(
        ["type=bind", f"source={source}", f"target={target}", *(["readonly"] if is_read_only else [])]
    )
    return ["--mount", line.getvalue()]


def gpu_words(engine: str, gpus: str) -> list[str]:
    """Returns the words that give GPUs to a container."""
    if not gpus:
        return []
    match = re.fullmatch(r"all|(?P<number>[1-9]\d*)|device=(?P<ids>[\w:.-]+(?:,[\w:.-]+)*)", gpus)
    if match is None:
        raise Problem(f"gpus: {gpus!r:.100}: write all, none, a number, or device=0,1")
    if engine == "podman":
        ids = match["ids"].split(",") if match["ids"] else ["all"] if gpus == "all" else [str(n) for n in range(int(match["number"]))]
        return [f"--device=nvidia.com/gpu={number}" for number in ids]
    return [f'--gpus="{gpus}"' if "," in gpus else f"--gpus={gpus}"]  # Docker reads the value as CSV


def container_name(run: str, run_dir: Path) -> str:
    """Returns the container's name. Its last part is a digest of the run's folder: two projects may have runs of one name."""
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", run).strip("-.")[:MAX_NAME] or "run"
    return f"drivetrain-{plain}-{sha256(str(run_dir).encode('utf-8', 'surrogateescape')).hexdigest()[:8]}"


def shm_size(words: Sequence[str], procs: int, has_gpus: bool) -> str:
    """Returns the size of /dev/shm: 64 MB, 256 MB for each loader worker, and 256 MB for each process with a GPU, which NCCL uses.

    It is a limit; memory that is not used is not taken. Loader workers hand batches over in it: a worker keeps `plan.prefetch` of
    them (2 by default), so that a batch of a process may have up to 128 MB.
    """
    workers = next((int(word.partition("=")[2]) for word in reversed(words) if re.fullmatch(r"plan\.workers=\d{1,3}", word)), None)
    if workers is None:
        workers = MAX_LOADER_WORKERS_PER_GPU if has_gpus else 0  # what a plan chooses at most
    return f"{BASE_SHM_MB + procs * (workers * WORKER_SHM_MB + (GPU_SHM_MB if has_gpus else 0))}m"


def check_size(value: str | None, name: str) -> str | None:
    if value is not None and not SIZE.fullmatch(value):
        raise Problem(f"{name}: {value!r:.100} is no size: write it as 512m or 8g")
    return value
