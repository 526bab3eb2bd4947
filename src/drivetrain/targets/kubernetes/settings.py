"""The settings of a target of kind kubernetes, and what they may hold."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from drivetrain.buckets.url import parse as parse_bucket
from drivetrain.outcomes import Problem
from drivetrain.settings import Length
from drivetrain.targets.base import TargetSettings

JobChoice = Literal["auto", "pytorchjob", "trainjob"]
DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
DNS_NAME = re.compile(r"(?=.{1,253}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
LABEL_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
QUANTITY = re.compile(r"\d+(\.\d+)?(m|[kMGTPE]i?)?")
IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SECRET_KEY = re.compile(r"[-._A-Za-z0-9]{1,253}")
EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")


@dataclass(frozen=True, kw_only=True)
class KubernetesSettings(TargetSettings):
    context: str | None = None
    """The context of your kubeconfig (default: the current one)."""
    namespace: str | None = None
    """The namespace (default: that of the context)."""
    job: JobChoice = "auto"
    """pytorchjob (Kubeflow's training operator), trainjob (Kubeflow Trainer 2.3 or later), or auto: the one that the cluster has, pytorchjob first."""
    runtime: str = "torch-distributed"
    """The ClusterTrainingRuntime of a TrainJob; TrainingRuntime/NAME for one of the namespace."""
    image: str | None = None
    """The image, with drivetrain in it (default: the one that `drivetrain image build --push` made last, by its digest)."""
    image_pull_secret: str | None = None
    """The Secret with which the cluster pulls the image."""
    gpus: int | None = None
    """GPUs of each pod (default: --procs with --device cuda, else none)."""
    gpu_resource: str = "nvidia.com/gpu"
    """The resource of the GPUs, such as amd.com/gpu or nvidia.com/mig-1g.10gb."""
    cpu: str | None = None
    """CPU cores that each pod requests, such as 8 or 500m."""
    memory: str | None = None
    """Memory that each pod requests, and its limit, such as 32Gi."""
    shm: str | None = None
    """Size of /dev/shm, such as 8Gi (default: 64 MiB, 256 MiB for each loader worker, 256 MiB for each process with a GPU)."""
    runs_volume: str | None = None
    """A PersistentVolumeClaim for runs. Without it and bucket, a run is kept in its pods, and is lost with them."""
    bucket: str | None = None
    """An address to which runs are copied while they train, and from which they go on: s3://BUCKET/PATH, gs://BUCKET/PATH."""
    code_volume: str | None = None
    """A PersistentVolumeClaim for code of more than 1 MiB."""
    data_volume: str | None = None
    """A PersistentVolumeClaim that the run finds as /data."""
    node_selector: list[str] = field(default_factory=list)
    """Labels that a node must have: KEY=VALUE."""
    tolerations: list[str] = field(default_factory=list)
    """Taints that the pods tolerate: KEY, KEY:EFFECT or KEY=VALUE:EFFECT."""
    service_account: str | None = None
    """The service account of the pods."""
    priority_class: str | None = None
    """The priority class of the pods of a PyTorchJob."""
    queue: str | None = None
    """The local queue of Kueue."""
    secret_refs: list[str] = field(default_factory=list)
    """Keys of Secrets that are there, as SECRET/KEY, which become the variable KEY; or `SECRET/KEY as VARIABLE`."""
    deadline: str | None = None
    """After so long, such as 24h, the cluster ends the job; the run then saves."""
    grace: int = 120
    """Seconds that a pod has to save when the cluster ends it."""
    retries: int = 3
    """How often a pod repeats a run after a hang or a lack of memory, and how often a pod is made again without a new checkpoint."""
    keep: int = 3600
    """Without runs_volume and bucket: seconds that the pods stay after the run's end, so that `status`, `logs -f` or `pull` can bring it home."""
    clean_pod_policy: Literal["None", "Running", "All"] = "None"
    """Which pods of a PyTorchJob are deleted at its end; with None their logs stay readable."""
    fs_group: int = 1000
    """The group that owns the files of volumes; 0: the cluster's default."""


class Toleration(NamedTuple):
    key: str
    value: str
    effect: str

    def to_json(self) -> dict[str, str]:
        chosen = {"operator": "Equal", "value": self.value} if self.value else {"operator": "Exists"}
        return {"key": self.key, **chosen, **({"effect": self.effect} if self.effect else {})}


class SecretReference(NamedTuple):
    """A key of a Secret, and the environment variable that gets its value."""

    secret: str
    key: str
    variable: str


def check_settings(name: str, settings: KubernetesSettings) -> None:
    """Raises Problem for a value that no cluster accepts; the message names the setting of the target `name`."""

    def check(key: str, value: str | None, pattern: re.Pattern[str], form: str) -> None:
        if value is not None and not pattern.fullmatch(value):
            raise Problem(f"{key}: {value!r:.100} in the target {name}: write {form}")

    for key in ("namespace", "queue"):
        check(key, getattr(settings, key), DNS_LABEL, "lower-case letters, digits and -, such as ml-team")
    for key in ("image_pull_secret", "runs_volume", "code_volume", "data_volume", "service_account", "priority_class"):
        check(key, getattr(settings, key), DNS_NAME, "the name of an object of the cluster: lower-case letters, digits, - and .")
    for key in ("cpu", "memory", "shm"):
        check(key, getattr(settings, key), QUANTITY, "a quantity of Kubernetes, such as 8, 500m or 32Gi")
    check("image", settings.image, IMAGE, "the name of an image, such as registry.example/team/train:3")
    check("gpu_resource", settings.gpu_resource, LABEL_KEY, "a resource, such as nvidia.com/gpu")
    for key, low in (("gpus", 0), ("grace", 1), ("retries", 0), ("keep", 0), ("fs_group", 0)):
        if getattr(settings, key) is not None and getattr(settings, key) < low:
            raise Problem(f"{key}: {getattr(settings, key)} in the target {name}: write {low} or more")
    if settings.bucket is not None:
        parse_bucket(settings.bucket, f"bucket: in the target {name}")
    runtime(name, settings)
    deadline_seconds(name, settings)
    node_selector(name, settings)
    tolerations(name, settings)
    secret_references(name, settings)


def runtime(name: str, settings: KubernetesSettings) -> dict[str, str]:
    """Returns the runtimeRef of a TrainJob. No schema checks its kind."""
    kind, slash, runtime_name = settings.runtime.rpartition("/")
    kind = kind if slash else "ClusterTrainingRuntime"
    if kind not in ("ClusterTrainingRuntime", "TrainingRuntime") or not DNS_NAME.fullmatch(runtime_name):
        raise Problem(
            f"runtime: {settings.runtime!r:.100} in the target {name}: write the NAME of a ClusterTrainingRuntime, or TrainingRuntime/NAME"
        )
    return {"apiGroup": "trainer.kubeflow.org", "kind": kind, "name": runtime_name}


def deadline_seconds(name: str, settings: KubernetesSettings) -> int | None:
    if settings.deadline is None:
        return None
    try:
        length = Length.parse(settings.deadline)
    except ValueError:
        length = Length(0, "steps")
    if length.unit != "seconds" or length.value < 1:
        raise Problem(f"deadline: {settings.deadline!r:.100} in the target {name}: write a time, such as 24h")
    return round(length.value)


def node_selector(name: str, settings: KubernetesSettings) -> dict[str, str]:
    pairs = {}
    for text in settings.node_selector:
        key, equals, value = text.partition("=")
        if not (equals and LABEL_KEY.fullmatch(key) and LABEL_VALUE.fullmatch(value)):
            raise Problem(f"node_selector: {text!r:.100} in the target {name}: write KEY=VALUE, such as nvidia.com/gpu.product=NVIDIA-L4")
        pairs[key] = value
    return pairs


def tolerations(name: str, settings: KubernetesSettings) -> list[Toleration]:
    return [_toleration(name, text) for text in settings.tolerations]


def _toleration(name: str, text: str) -> Toleration:
    taint, colon, effect = text.partition(":")
    key, equals, value = taint.partition("=")
    is_valid = LABEL_KEY.fullmatch(key) and LABEL_VALUE.fullmatch(value) and (value or not equals) and (effect in EFFECTS or not colon)
    if not is_valid:
        raise Problem(f"tolerations: {text!r:.100} in the target {name}: write KEY, KEY:NoSchedule or KEY=VALUE:NoSchedule")
    return Toleration(key, value, effect)


def secret_references(name: str, settings: KubernetesSettings) -> list[SecretReference]:
    return [_secret_reference(name, text) for text in settings.secret_refs]


def _secret_reference(name: str, text: str) -> SecretReference:
    path, _, variable = text.partition(" as ")
    secret, _, key = path.partition("/")
    reference = SecretReference(secret, key, variable or key)
    if not (DNS_NAME.fullmatch(secret) and SECRET_KEY.fullmatch(key) and VARIABLE.fullmatch(reference.variable)):
        raise Problem(f"secret_refs: {text!r:.100} in the target {name}: write SECRET/KEY, or `SECRET/KEY as VARIABLE`")
    return reference


def memory_quantity(engine_size: str) -> str:
    """Returns a size for `docker run`, such as 64m, as a quantity of Kubernetes."""
    return f"{engine_size.removesuffix('m')}Mi"


def without_empty(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the entries that say something: no None, no empty list, mapping or text."""
    return {key: value for key, value in values.items() if value not in (None, [], {}, "")}
