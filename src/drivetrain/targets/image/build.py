"""Builds the image of runs: from a temporary context with the Dockerfile and this package's wheel, and nothing else."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import yaml

from drivetrain import __version__
from drivetrain.confidential import looks_secret_variable
from drivetrain.outcomes import Problem
from drivetrain.targets.base import RenderedCommand, RenderedFile, Rendering
from drivetrain.targets.consent import Consent
from drivetrain.targets.docker.engine import PROGRAMS, Engine, check_local, find_engine
from drivetrain.targets.environment import torch_backend
from drivetrain.targets.gcp.builds import MAX_BUILD_HOURS, Builder
from drivetrain.targets.gcp.failures import explain_cloud
from drivetrain.targets.image.failures import DOCKERFILE, FOLDER, STEP, failed_build
from drivetrain.targets.image.record import DEFAULT_TAGS, SOURCE_LABEL, BuiltImage, Variant, log_file, record_image, source_digest
from drivetrain.targets.image.wheel import make_wheel, wheel_name

COMPOSE, CLOUD_BUILD = "compose.yaml", "cloudbuild.yaml"
BASE = "python:3.12-slim"
OLDEST_BACKEND = "cu126"
"""The build of torch for GPUs where this machine has none: it runs with most drivers."""
CLOUD_TIMEOUT = f"{3600 * MAX_BUILD_HOURS}s"
NAME = re.compile(r"[a-z0-9][a-z0-9._/:@-]*", re.IGNORECASE)
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class ImageBuild:
    """What `drivetrain image build` was asked for."""

    variant: Variant
    base: str = BASE
    tag: str = ""
    """"" : drivetrain:cpu or drivetrain:gpu."""
    push: str | None = None
    """The name in a registry."""
    arguments: Mapping[str, str] = field(default_factory=dict)
    """Build arguments of the Dockerfile, such as PIP_ARGS."""
    engine: str | None = None

    @property
    def name(self) -> str:
        return self.tag or DEFAULT_TAGS[self.variant]


def compose_text() -> str:
    """Returns the compose file for trainings without the target."""
    return (FOLDER / COMPOSE).read_text()


def check_build(build: ImageBuild) -> None:
    for flag, name in (("--tag", build.tag), ("--push", build.push or ""), ("--base", build.base)):
        if name and not NAME.fullmatch(name):
            raise Problem(f"{flag} {name!r:.200} is no name of an image: write NAME:TAG or REGISTRY/NAME:TAG")
    for name, value in build.arguments.items():
        if looks_secret_variable(name, value):
            raise Problem(f"--build-arg {name} is a secret: it would stay in the image; use an index without a password during the build")


def check_cloud_build(build: ImageBuild) -> None:
    if build.push is None:
        raise Problem("--cloud-build needs --push REF: the name under which Cloud Build keeps the image in your registry")


def build_arguments(build: ImageBuild) -> dict[str, str]:
    torch = metadata.version("torch").partition("+")[0]
    backend = "cpu" if build.variant == "cpu" else _gpu_backend()
    return {"BASE": build.base, "TORCH": f"torch=={torch}", "TORCH_BACKEND": backend} | dict(build.arguments)


def _gpu_backend() -> str:
    """Returns the build of torch for this machine's driver."""
    words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return OLDEST_BACKEND
    backend = torch_backend(done.stdout.split()) if done.returncode == 0 else "cpu"
    return OLDEST_BACKEND if backend == "cpu" else backend


def labels() -> dict[str, str]:
    return {"org.opencontainers.image.title": "drivetrain", "org.opencontainers.image.version": __version__, SOURCE_LABEL: source_digest()}


def build_words(build: ImageBuild, context: str, tag: str) -> list[str]:
    """Returns the words after the engine's name."""
    words = ["build", "--tag", tag, "--file", f"{context}/{DOCKERFILE}"]
    words += [word for name, value in build_arguments(build).items() for word in ("--build-arg", f"{name}={value}")]
    words += [word for name, value in labels().items() for word in ("--label", f"{name}={value}")]
    return [*words, context]


def cloud_build_config(build: ImageBuild, builder: Builder) -> str:
    """Returns the configuration with which Google Cloud Build makes and keeps the image."""
    assert build.push is not None
    words = [word.replace("$", "$$") for word in build_words(build, ".", build.push)]  # Cloud Build reads $NAME
    config: dict[str, object] = {"steps": [{"name": "docker", "args": words}], "images": [build.push], "timeout": CLOUD_TIMEOUT}
    if builder.account:
        config["options"] = {"logging": "CLOUD_LOGGING_ONLY"}  # Google refuses an account of one's own without a place for logs
    return yaml.safe_dump(config, sort_keys=False)


def render_build(build: ImageBuild, builder: Builder | None) -> Rendering:
    """Returns the files and commands of a build; CONTEXT is the temporary folder. `builder`: who builds with Cloud Build."""
    check_build(build)
    files = [RenderedFile(f"CONTEXT/{DOCKERFILE}", (FOLDER / DOCKERFILE).read_text())]
    if builder is not None:
        files.append(RenderedFile(f"CONTEXT/{CLOUD_BUILD}", cloud_build_config(build, builder)))
        words = builder.cloud.submit_words(builder.words("CONTEXT", CLOUD_BUILD))
        return Rendering(tuple(files), (RenderedCommand(tuple(words), request="nothing; it runs only after you agree to the price"),))
    engine = build.engine or next((program for program in PROGRAMS if shutil.which(program) is not None), PROGRAMS[0])
    commands = [build_words(build, "CONTEXT", build.name)]
    if build.push is not None:
        commands += [["tag", build.name, build.push], ["push", build.push]]
    return Rendering(tuple(files), tuple(RenderedCommand((engine, *words)) for words in commands))


def build_image(build: ImageBuild, show: Callable[[str], None]) -> BuiltImage:
    """Builds the image, pushes it if asked for, and records it as the one that runs use."""
    check_build(build)
    engine = find_engine(build.engine)
    check_local(engine.program)
    with _context() as context:
        output = _logged([engine.program, *build_words(build, str(context), build.name)], show)
    if output.code:
        raise failed_build(engine.program, output.text, output.code, build.base, log_file())
    digest = _pushed(engine, build, show) if build.push is not None else _local_digest(engine, build.name)
    return _recorded(build, build.push or build.name, digest)


def _local_digest(engine: Engine, name: str) -> str:
    digest = str((engine.inspect("image", name) or {}).get("Id", ""))
    return digest if digest.startswith("sha256:") else f"sha256:{digest}"  # podman leaves the prefix out


def cloud_build(build: ImageBuild, builder: Builder, consent: Consent, show: Callable[[str], None]) -> BuiltImage:
    """Builds the image with Google Cloud Build, which also keeps it. This costs money, so that it takes the user's consent."""
    check_build(build)
    assert build.push is not None
    with _context() as context:
        (context / CLOUD_BUILD).write_text(cloud_build_config(build, builder))
        output = builder.cloud.submit_build(consent, builder.words(str(context), CLOUD_BUILD), show)
    log = log_file()
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(output.out + output.err)
    if output.code and STEP.search(output.out):
        raise failed_build("gcloud", output.out + output.err, output.code, build.base, log)
    if output.code:
        raise explain_cloud("gcloud", output.err or output.out, output.code, builder.project)
    digests = DIGEST.findall(output.out)
    return _recorded(build, build.push, digests[-1] if digests else "")


def _pushed(engine: Engine, build: ImageBuild, show: Callable[[str], None]) -> str:
    """Pushes the image; returns the registry's digest."""
    assert build.push is not None
    engine.run("tag", build.name, build.push, image=build.push)
    output = _logged([engine.program, "push", build.push], show)
    if output.code:
        raise engine.problem(output.text, output.code, build.push)
    digests = (engine.inspect("image", build.push) or {}).get("RepoDigests") or []
    repository = re.sub(r":[^:/]*$", "", build.push)
    return next((text.partition("@")[2] for text in digests if text.partition("@")[0] == repository), "")


def _recorded(build: ImageBuild, tag: str, digest: str) -> BuiltImage:
    image = BuiltImage(tag=tag, digest=digest, source=source_digest(), version=__version__, base=build.base, built=time.time())
    record_image(build.variant, image)
    return image


@contextlib.contextmanager
def _context() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="drivetrain-image-") as folder:
        context = Path(folder)
        (context / DOCKERFILE).write_text((FOLDER / DOCKERFILE).read_text())
        (context / wheel_name()).write_bytes(make_wheel())
        yield context


@dataclass(frozen=True)
class BuildOutput:
    code: int
    text: str


def _logged(words: list[str], show: Callable[[str], None]) -> BuildOutput:
    """Runs a command, shows its lines as they come, and keeps them beside the record of images."""
    log = log_file()
    log.parent.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    try:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            env=os.environ | {"BUILDKIT_PROGRESS": "plain"},
        )  # fmt: skip
    except FileNotFoundError:
        raise Problem(f"there is no {words[0]} on this machine: install it") from None
    assert process.stdout is not None
    with open(log, "w") as file, process.stdout:
        for line in process.stdout:
            lines.append(line)
            file.write(line)
            show(line.rstrip("\n"))
    return BuildOutput(process.wait(), "".join(lines))
