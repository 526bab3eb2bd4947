"""From a submission to the objects of the cluster. Pure, except that it reads which image was built last."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from drivetrain.outcomes import Problem
from drivetrain.targets.docker.command import shm_size
from drivetrain.targets.image.record import DEFAULT_TAGS, Variant, read_images
from drivetrain.targets.kubernetes import names
from drivetrain.targets.kubernetes import settings as parse
from drivetrain.targets.kubernetes.jobs import KINDS, JobKind, JobSpec
from drivetrain.targets.kubernetes.pod_template import CODE, RUNS, Image, PodSpec, config_map, config_map_volume, fits_config_map
from drivetrain.targets.kubernetes.rendering import KubernetesRendering
from drivetrain.targets.kubernetes.restarts import VOLUME
from drivetrain.targets.kubernetes.settings import KubernetesSettings
from drivetrain.targets.layout import Layout
from drivetrain.targets.submission import Submission

TOKEN = "DRIVETRAIN_TOKEN"
IN_IMAGE = "install the large ones as a package in the image (docs/kubernetes.md, Code)"
NO_VOLUME = (
    "without runs_volume: or bucket: in the target, the run is kept in its pods: a lost pod loses it; pods stay {keep} s after its end for `status`,"
    " `logs -f` or `pull` to bring it home"
)


def layout(submission: Submission) -> Layout:
    return Layout(RUNS, submission.project, submission.name)


def bucket_of(settings: KubernetesSettings, project: str, run: str) -> str | None:
    """Returns the address of a run in the bucket of the settings. `train --run-dir ADDRESS` trains it in `runs/RUN`, as `Layout.run_dir` says."""
    return f"{settings.bucket.rstrip('/')}/{project}/{run}" if settings.bucket else None


def outlives_its_pods(settings: KubernetesSettings) -> bool:
    """Whether a run is kept elsewhere than in its pods."""
    return bool(settings.runs_volume or settings.bucket)


def num_gpus(settings: KubernetesSettings, submission: Submission) -> int:
    request = submission.request
    if request.device == "cpu":
        return 0
    return settings.gpus if settings.gpus is not None else ((request.procs or 1) if request.device == "cuda" else 0)


def find_image(settings: KubernetesSettings, variant: Variant, kind: JobKind) -> Image:
    """Returns the image of the setting, else the one that was built last: by its digest if it was pushed, else as the nodes have it."""
    if settings.image is not None:
        return Image(settings.image)
    built = read_images().get(variant)
    flag = " --gpu" if variant == "gpu" else ""
    if built is not None and "/" in built.tag:
        repository = re.sub(r":[^:/@]*$", "", built.tag)
        return Image(f"{repository}@{built.digest}" if built.digest.startswith("sha256:") else built.tag)
    if kind.name == "trainjob":
        raise Problem(
            f"a TrainJob pulls its image from a registry: drivetrain image build{flag} --push REGISTRY/NAME:TAG, or set image: in the target"
        )
    # A name without a registry is this machine's; in a registry it would be a stranger's.
    return Image(built.tag if built is not None else DEFAULT_TAGS[variant], "Never")


def image_of(settings: KubernetesSettings, submission: Submission, kind: JobKind) -> Image:
    """Returns the image of a submission's pods."""
    return find_image(settings, "gpu" if num_gpus(settings, submission) else "cpu", kind)


def recorded_image(handle: Mapping[str, Any], settings: KubernetesSettings) -> Image:
    """Returns the image of a run's pods; of a run that has not recorded it, the image of the settings or any that was built here."""
    if "image" in handle:
        return Image(*handle["image"])
    variant: Variant = "cpu" if "cpu" in read_images() else next(iter(read_images()), "cpu")
    return find_image(settings, variant, KINDS["pytorchjob"])


def secret_names(submission: Submission) -> tuple[str, ...]:
    """Returns the variables of the Secret that `submit` creates."""
    return (*submission.secrets, *((TOKEN,) if submission.token else ()))


def make_rendering(target: str, settings: KubernetesSettings, submission: Submission, kind: JobKind) -> KubernetesRendering:
    """Returns the objects of a submission."""
    parse.check_settings(target, settings)
    kind.check_settings(target, settings)
    request, name = submission.request, names.job_name(submission.project, submission.name)
    labels = names.run_labels(submission.project, submission.name)
    secret = names.secret_name(name) if secret_names(submission) else ""
    job = JobSpec(
        name=name, namespace=settings.namespace, labels=labels, annotations={names.RUN_ANNOTATION: submission.name},
        pod=_pod(target, settings, submission, kind, labels, secret), min_nodes=request.min_nodes, queue=settings.queue,
        deadline=parse.deadline_seconds(target, settings), clean_pod_policy=settings.clean_pod_policy, runtime=parse.runtime(target, settings),
    )  # fmt: skip
    rendered = kind.render(job)
    kind.check(rendered)
    maps = [config_map(submission.code)] if submission.code is not None and fits_config_map(submission.code) else []
    for entry in maps:
        if settings.namespace is not None:
            entry["metadata"]["namespace"] = settings.namespace
    return KubernetesRendering(
        objects=(*maps, rendered), notes=tuple(_notes(settings, submission)), secret=secret, secret_variables=secret_names(submission)
    )


def _notes(settings: KubernetesSettings, submission: Submission) -> list[str]:
    notes = [] if outlives_its_pods(settings) else [NO_VOLUME.format(keep=settings.keep)]
    if submission.code is not None and not fits_config_map(submission.code):
        notes.append(f"the code is too large for a ConfigMap (1 MiB): `train` copies it to the volume {settings.code_volume} first")
    return notes


def _pod(target: str, settings: KubernetesSettings, submission: Submission, kind: JobKind, labels: dict[str, str], secret: str) -> PodSpec:
    request, gpus, place = submission.request, num_gpus(settings, submission), layout(submission)
    image = image_of(settings, submission, kind)
    words = submission.words("", place.run_dir, CODE, bucket=bucket_of(settings, place.project, place.run))
    shm = settings.shm or parse.memory_quantity(shm_size(request.settings, request.procs or max(1, gpus), bool(gpus)))
    pod = PodSpec(
        image=image.name, pull_policy=image.pull_policy, words=words[words.index("drivetrain") + 1 :], layout=place, nodes=request.nodes,
        retries=settings.retries, keep=0 if outlives_its_pods(settings) else settings.keep, labels=labels,
        storage=VOLUME if settings.runs_volume else bucket_of(settings, place.project, place.run) or "", image_pull_secret=settings.image_pull_secret,
        variables=settings.env, secret=secret, secret_variables=secret_names(submission), secret_references=parse.secret_references(target, settings),
        gpus=gpus, gpu_resource=settings.gpu_resource, cpu=settings.cpu, memory=settings.memory, shm=shm, runs_volume=settings.runs_volume,
        data_volume=settings.data_volume, node_selector=parse.node_selector(target, settings), tolerations=parse.tolerations(target, settings),
        service_account=settings.service_account, priority_class=settings.priority_class, grace=settings.grace, fs_group=settings.fs_group,
        **_code(target, settings, submission),
    )  # fmt: skip
    clash = [reference.variable for reference in pod.secret_references if reference.variable in (*pod.secret_variables, *settings.env)]
    if clash:
        raise Problem(f"secret_refs: {clash[0]} in the target {target} is also in env: or secrets:; remove it from one of them")
    return pod


def _code(target: str, settings: KubernetesSettings, submission: Submission) -> dict[str, Any]:
    """Returns where the pods find the code: a ConfigMap, or a folder of `code_volume`."""
    code = submission.code
    if code is None:
        return {}
    if fits_config_map(code):
        return {"code": config_map_volume(code)}
    if settings.code_volume is None:
        raise Problem(
            f"the task's files have more than 1 MiB, which a ConfigMap cannot hold: set code_volume: CLAIM in the target {target}, or {IN_IMAGE}"
        )
    return {"code": {"persistentVolumeClaim": {"claimName": settings.code_volume}}, "code_path": f"code/{code.digest}"}
