"""The two kinds of job: PyTorchJob v1 of Kubeflow's training operator, and TrainJob of Kubeflow Trainer 2.3. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from drivetrain.outcomes import Problem
from drivetrain.targets.kubernetes.pod_template import (
    CONTAINER_SECURITY,
    Image,
    PodSpec,
    command,
    environment,
    literal,
    mounts,
    pod_settings,
    resources,
)
from drivetrain.targets.kubernetes.settings import KubernetesSettings, without_empty

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
RESTART_POLICIES = ("Always", "OnFailure", "Never", "ExitCode")
RUNTIME_KINDS = ("ClusterTrainingRuntime", "TrainingRuntime")


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """What both kinds of job are made of."""

    name: str
    namespace: str | None
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    pod: PodSpec
    min_nodes: int | None = None
    deadline: int | None = None
    queue: str | None = None
    clean_pod_policy: str = "None"
    runtime: Mapping[str, str] | None = None

    def metadata(self) -> dict[str, Any]:
        queue = {QUEUE_LABEL: self.queue} if self.queue else {}
        return without_empty(
            {"name": self.name, "namespace": self.namespace, "labels": {**self.labels, **queue}, "annotations": dict(self.annotations)}
        )


class JobEnding(NamedTuple):
    """How a job's own status says that it has ended."""

    is_success: bool
    reason: str


class JobKind(ABC):
    """A kind of job of a cluster."""

    name: ClassVar[str]
    """As in the setting `job`."""
    api: ClassVar[str]
    plural: ClassVar[str]
    title: ClassVar[str]
    container: ClassVar[str]
    """The container of a pod that trains."""
    pod_label: ClassVar[str]
    """The label of the job's pods that has the job's name."""
    rank_label: ClassVar[tuple[str, ...]]
    """Labels or annotations of a pod, the first that is there has its number."""
    ends: ClassVar[Mapping[str, bool]]
    """Type of a condition that ends the job -> whether it has succeeded."""
    install: ClassVar[str]
    """The command that installs its operator."""

    @abstractmethod
    def render(self, job: JobSpec) -> dict[str, Any]:
        """Returns the object."""

    @abstractmethod
    def image(self, job: Mapping[str, Any]) -> Image:
        """Returns the image of an object of this kind."""

    @abstractmethod
    def check(self, job: Mapping[str, Any]) -> None:
        """Raises Problem for what no schema of the cluster refuses, but no operator accepts."""

    @abstractmethod
    def check_settings(self, name: str, settings: KubernetesSettings) -> None:
        """Raises Problem for settings of the target `name` that this kind does not have."""

    def path(self, namespace: str, name: str = "") -> str:
        """Returns the API path of the jobs of a namespace, or of one."""
        return f"/apis/{self.api}/namespaces/{namespace}/{self.plural}{f'/{name}' if name else ''}"

    def end(self, job: Mapping[str, Any]) -> JobEnding | None:
        """Returns how a job has ended; None while it has not."""
        for condition in (job.get("status") or {}).get("conditions") or []:
            if condition.get("status") == "True" and condition.get("type") in self.ends:
                reason = str(condition.get("message") or condition.get("reason") or "")
                return JobEnding(self.ends[condition["type"]], reason)
        return None

    def rank(self, pod: Mapping[str, Any]) -> int:
        """Returns the number of a pod's node in the run."""
        metadata = pod["metadata"]
        values = (metadata.get("labels") or {}) | (metadata.get("annotations") or {})
        return next((int(values[key]) for key in self.rank_label if str(values.get(key, "")).isdigit()), 0)


class PyTorchJobKind(JobKind):
    """One Master and N-1 Workers. The operator repeats a pod whose exit code is 128 or more."""

    name, api, plural, title, container = "pytorchjob", "kubeflow.org/v1", "pytorchjobs", "PyTorchJob", "pytorch"
    pod_label = "training.kubeflow.org/job-name"
    rank_label = ("training.kubeflow.org/replica-index",)
    ends: ClassVar[Mapping[str, bool]] = {"Succeeded": True, "Failed": False}
    install = "kubectl apply --server-side -k 'github.com/kubeflow/training-operator.git/manifests/overlays/standalone?ref=v1.9.3'"

    def render(self, job: JobSpec) -> dict[str, Any]:
        pod = job.pod
        replicas = {"Master": self._replica(pod, 1)}
        if pod.nodes > 1:
            replicas["Worker"] = self._replica(pod, pod.nodes - 1)
        policy = {"cleanPodPolicy": job.clean_pod_policy, "backoffLimit": pod.retries, "activeDeadlineSeconds": job.deadline}
        elastic = None
        if job.min_nodes is not None and pod.nodes > 1:  # they count Workers; there is always one Master
            elastic = {"minReplicas": max(1, job.min_nodes - 1), "maxReplicas": pod.nodes - 1, "maxRestarts": pod.retries}
        spec = {"runPolicy": without_empty(policy), "elasticPolicy": elastic, "pytorchReplicaSpecs": replicas}
        return {"apiVersion": self.api, "kind": self.title, "metadata": job.metadata(), "spec": without_empty(spec)}

    def image(self, job: Mapping[str, Any]) -> Image:
        (container,) = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"]
        return Image(container["image"], container.get("imagePullPolicy", ""))

    def _replica(self, pod: PodSpec, number: int) -> dict[str, Any]:
        container = {
            "name": self.container, "image": pod.image, "imagePullPolicy": pod.pull_policy, "command": command(pod), "args": [literal(word) for word in pod.words],
            "env": environment(pod), "resources": resources(pod), "securityContext": CONTAINER_SECURITY, "volumeMounts": mounts(pod),
        }  # fmt: skip
        spec = {"containers": [without_empty(container)], "priorityClassName": pod.priority_class, **pod_settings(pod)}
        template = {"metadata": {"labels": dict(pod.labels)}, "spec": without_empty(spec)}
        return {"replicas": number, "restartPolicy": "ExitCode", "template": template}

    def check(self, job: Mapping[str, Any]) -> None:
        replicas = job["spec"]["pytorchReplicaSpecs"]
        if (replicas.get("Master") or {}).get("replicas") != 1:
            raise Problem("a PyTorchJob has exactly one Master: pytorchReplicaSpecs.Master.replicas is 1")
        for role, replica in replicas.items():
            if role not in ("Master", "Worker"):
                raise Problem(f"a PyTorchJob has a Master and Workers, and no {role}")
            if replica["restartPolicy"] not in RESTART_POLICIES:
                raise Problem(f"restartPolicy of {role} is {replica['restartPolicy']!r}: write one of {', '.join(RESTART_POLICIES)}")

    def check_settings(self, name: str, settings: KubernetesSettings) -> None:
        """Every setting has a place in a PyTorchJob."""

    def rank(self, pod: Mapping[str, Any]) -> int:
        role = (pod["metadata"].get("labels") or {}).get("training.kubeflow.org/replica-type", "master")
        return 0 if role.lower() == "master" else 1 + super().rank(pod)


class TrainJobKind(JobKind):
    """The pods of a ClusterTrainingRuntime, with our container in place of its own."""

    name, api, plural, title, container = "trainjob", "trainer.kubeflow.org/v1alpha1", "trainjobs", "TrainJob", "node"
    pod_label = "jobset.sigs.k8s.io/jobset-name"
    rank_label = ("batch.kubernetes.io/job-completion-index",)
    ends: ClassVar[Mapping[str, bool]] = {"Complete": True, "Failed": False}
    install = " && ".join(
        f"kubectl apply --server-side -k 'https://github.com/kubeflow/trainer.git/manifests/overlays/{part}?ref=v2.3.0'"
        for part in ("manager", "runtimes")
    )

    def render(self, job: JobSpec) -> dict[str, Any]:
        pod = job.pod
        trainer = {
            "image": pod.image, "command": command(pod), "args": [literal(word) for word in pod.words], "numNodes": pod.nodes,
            "resourcesPerNode": resources(pod), "env": environment(pod),
        }  # fmt: skip
        container = {"name": self.container, "securityContext": CONTAINER_SECURITY, "volumeMounts": mounts(pod)}
        template = {"metadata": {"labels": dict(pod.labels)}, "spec": {"containers": [container], **pod_settings(pod)}}
        replicated = [{"name": self.container, "template": {"spec": {"template": template}}}]
        patch = {"manager": "drivetrain.dev/submit", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": replicated}}}}
        spec = {
            "runtimeRef": dict(job.runtime or {}),
            "activeDeadlineSeconds": job.deadline,
            "trainer": without_empty(trainer),
            "runtimePatches": [patch],
        }
        return {"apiVersion": self.api, "kind": self.title, "metadata": job.metadata(), "spec": without_empty(spec)}

    def image(self, job: Mapping[str, Any]) -> Image:
        return Image(job["spec"]["trainer"]["image"])

    def check(self, job: Mapping[str, Any]) -> None:
        kind = job["spec"]["runtimeRef"].get("kind")
        if kind not in RUNTIME_KINDS:
            raise Problem(f"runtimeRef.kind is {kind!r}: write one of {', '.join(RUNTIME_KINDS)}")

    def check_settings(self, name: str, settings: KubernetesSettings) -> None:
        for key in ("priority_class", "clean_pod_policy"):
            if getattr(settings, key) != getattr(KubernetesSettings(), key):
                raise Problem(f"{key}: in the target {name}: a TrainJob takes it from its runtime; remove it, or write job: pytorchjob")


KINDS: dict[str, JobKind] = {kind.name: kind for kind in (PyTorchJobKind(), TrainJobKind())}
