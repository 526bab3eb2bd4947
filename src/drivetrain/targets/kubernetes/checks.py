"""What `doctor`, `targets` and `down` ask a cluster. They install and change nothing, except that `down` deletes what carries our labels."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from drivetrain.outcomes import Outcome, Problem
from drivetrain.targets.base import Check
from drivetrain.targets.kubernetes import names
from drivetrain.targets.kubernetes.jobs import KINDS, JobKind
from drivetrain.targets.kubernetes.kubectl import Kubectl, NotFound
from drivetrain.targets.kubernetes.settings import KubernetesSettings
from drivetrain.targets.kubernetes.settings import runtime as parse_runtime
from drivetrain.targets.kubernetes.specs import IN_IMAGE
from drivetrain.targets.kubernetes.states import pod_states

PLUGIN = "kubectl create -f https://raw.githubusercontent.com/NVIDIA/k8s-device-plugin/v0.17.1/deployments/static/nvidia-device-plugin.yml"
RIGHTS: tuple[tuple[str, str, str], ...] = (
    *((verb, "configmaps", "") for verb in ("get", "list", "create", "delete")),
    *((verb, "secrets", "") for verb in ("list", "create", "delete")),
    *((verb, "pods", "") for verb in ("get", "list", "create", "delete")),
    ("get", "pods", "log"), ("create", "pods", "exec"), ("list", "events", ""),
)  # fmt: skip
"""What runs and `down` need beside the rights to jobs: verb, resource, subresource."""
JOB_RIGHTS = ("get", "list", "create", "delete")
GPU_LABELS = {"feature.node.kubernetes.io/pci-10de.present": "true", "kubernetes.azure.com/accelerator": "nvidia"}
ANY_GPU_LABELS = ("cloud.google.com/gke-accelerator", "k8s.amazonaws.com/accelerator")
INSTANCE_TYPE = "node.kubernetes.io/instance-type"
AWS_GPU_TYPE = re.compile(r"(g(?!4ad)|p)\d\w*\..+")
"""Machine types of Amazon with NVIDIA GPUs; those of g4ad are AMD's."""
MAX_PENDING = 5


class NoCluster(Problem):
    """The cluster cannot be asked."""


class Platform(NamedTuple):
    """A kind of cluster, how it is recognised, and the command that adds a GPU node."""

    name: str
    labels: tuple[str, ...]
    """Prefixes of node labels."""
    provider: str
    """The beginning of a node's providerID."""
    add_gpus: str


PLATFORMS = (
    Platform("OpenShift", ("node.openshift.io/",), "", "oc edit machineset -n openshift-machine-api (a GPU machine type), and install the NVIDIA GPU Operator from OperatorHub"),
    Platform("GKE", ("cloud.google.com/gke-",), "gce://", "gcloud container node-pools create gpu --cluster CLUSTER --location ZONE --machine-type n1-standard-4"
             " --accelerator type=nvidia-tesla-t4,count=1,gpu-driver-version=default --num-nodes 1"),
    Platform("EKS", ("eks.amazonaws.com/", "alpha.eksctl.io/"), "aws://", f"eksctl create nodegroup --cluster CLUSTER --name gpu --node-type g4dn.xlarge --nodes 1, and then: {PLUGIN}"),
    Platform("AKS", ("kubernetes.azure.com/",), "azure://", f"az aks nodepool add --cluster-name CLUSTER --resource-group GROUP --name gpu --node-vm-size Standard_NC4as_T4_v3 --node-count 1, and then: {PLUGIN}"),
    Platform("minikube", ("minikube.k8s.io/",), "", "minikube start --driver docker --container-runtime docker --gpus all"),
    Platform("Kind", (), "kind://", f"Kind gives no GPUs to its nodes by itself: nvkind cluster create (github.com/NVIDIA/nvkind), and then: {PLUGIN}"),
)  # fmt: skip
OTHER = Platform("Kubernetes", (), "", f"add a node with an NVIDIA GPU and its driver, and then: {PLUGIN}")


def platform_of(nodes: Sequence[Mapping[str, Any]]) -> Platform:
    """Recognises the kind of cluster from the labels and provider ids of its nodes."""
    for platform in PLATFORMS:
        for node in nodes:
            labels = node["metadata"].get("labels") or {}
            provider = str((node.get("spec") or {}).get("providerID") or "")
            if any(label.startswith(platform.labels) for label in labels if platform.labels):
                return platform
            if platform.provider and provider.startswith(platform.provider):
                return platform
    return OTHER


# --- what the cluster has ----------------------------------------------------------------------


def has_kind(kubectl: Kubectl, kind: JobKind) -> bool:
    try:
        resources = kubectl.get(f"/apis/{kind.api}").get("resources") or []
    except NotFound:
        return False
    except Problem as problem:
        if "no such kind" in str(problem):
            return False
        raise
    return any(resource.get("name") == kind.plural for resource in resources)


def find_kind(kubectl: Kubectl) -> JobKind:
    """Returns the kind of job that the cluster has; raises Problem if it has none, NoCluster if it cannot be asked."""
    try:
        kind = next((kind for kind in KINDS.values() if has_kind(kubectl, kind)), None)
    except Problem as problem:
        raise NoCluster(str(problem), problem.outcome) from None
    if kind is None:
        raise Problem(
            f"the cluster has neither PyTorchJobs nor TrainJobs: install Kubeflow's operator: {KINDS['pytorchjob'].install}", Outcome.INFRA
        )
    return kind


def _nodes(kubectl: Kubectl) -> list[dict[str, Any]]:
    return kubectl.items("/api/v1/nodes")


def is_ready(node: Mapping[str, Any]) -> bool:
    conditions = (node.get("status") or {}).get("conditions") or []
    return any(condition.get("type") == "Ready" and condition.get("status") == "True" for condition in conditions)


def allocatable(node: Mapping[str, Any], resource: str) -> int:
    value = str(((node.get("status") or {}).get("allocatable") or {}).get(resource, "0"))
    return int(value) if value.isdigit() else 0


def reach(kubectl: Kubectl, settings: KubernetesSettings) -> str:
    version = kubectl.get("/version").get("gitVersion", "?")
    parts = [f"namespace {kubectl.namespace}"]
    title = "Kubernetes"
    with contextlib.suppress(Problem):  # a user of one namespace may not see the nodes
        nodes = _nodes(kubectl)
        title = platform_of(nodes).name
        gpus = sum(allocatable(node, settings.gpu_resource) for node in nodes if is_ready(node))
        parts += [f"{len(nodes)} nodes", f"{gpus} {settings.gpu_resource}" if gpus else "no GPU"]
    return f"{title} {version}, {', '.join(parts)}"


def wanted_kind(settings: KubernetesSettings, kinds: Sequence[JobKind]) -> JobKind:
    """Returns the kind of job of the settings, or the first of the `kinds` that the cluster has."""
    return KINDS.get(settings.job) or (kinds[0] if kinds else KINDS["pytorchjob"])


# --- doctor ------------------------------------------------------------------------------------


def all_checks(kubectl: Kubectl, settings: KubernetesSettings) -> Iterator[Check]:
    """Yields the checks after `reach`."""
    yield _namespace_check(kubectl)
    kinds = [kind for kind in KINDS.values() if has_kind(kubectl, kind)]
    wanted = wanted_kind(settings, kinds)
    yield _operator_check(kubectl, wanted, kinds)
    if wanted.name == "trainjob" and wanted in kinds:
        yield _runtime_check(kubectl, settings)
    yield _rights_check(kubectl, wanted)
    yield from _node_checks(kubectl, settings)
    yield from _volume_checks(kubectl, settings)
    yield from _pending_checks(kubectl, kinds)


def _namespace_check(kubectl: Kubectl) -> Check:
    try:
        kubectl.get(f"/api/v1/namespaces/{kubectl.namespace}")
    except NotFound:
        fix = f"kubectl create namespace {kubectl.namespace}, or correct namespace: in the target"
        return Check("namespace", "fault", f"there is no namespace {kubectl.namespace}", fix)
    except Problem:
        return Check("namespace", "ok", f"{kubectl.namespace} (you may not read it)")
    return Check("namespace", "ok", kubectl.namespace)


def _operator_check(kubectl: Kubectl, kind: JobKind, kinds: Sequence[JobKind]) -> Check:
    if kind not in kinds:
        return Check("operator", "fault", f"the cluster has no {kind.title}s ({kind.api})", kind.install)
    deployment = "training-operator" if kind.name == "pytorchjob" else "trainer"
    try:
        found = [item for item in kubectl.items("/apis/apps/v1/deployments") if deployment in str(item["metadata"]["name"])]
    except Problem:
        return Check("operator", "ok", f"{kind.title} ({kind.api}); you may not see whether its operator runs")
    if not any((item.get("status") or {}).get("readyReplicas") for item in found):
        where = (
            f"kubectl -n {found[0]['metadata'].get('namespace', 'kubeflow')} describe deployment {found[0]['metadata']['name']}"
            if found
            else kind.install
        )
        return Check("operator", "warning", f"the cluster knows {kind.title}s, but no operator of them was seen running", where)
    return Check("operator", "ok", f"{kind.title} ({kind.api}), {found[0]['metadata']['name']} runs")


def _runtime_check(kubectl: Kubectl, settings: KubernetesSettings) -> Check:
    """Whether the runtime is there, whose pods a TrainJob takes."""
    reference = parse_runtime(kubectl.target, settings)
    place = f"/namespaces/{kubectl.namespace}" if reference["kind"] == "TrainingRuntime" else ""
    path = f"/apis/{KINDS['trainjob'].api}{place}/{reference['kind'].lower()}s/{reference['name']}"
    try:
        kubectl.get(path)
    except NotFound:
        fix = "kubectl get clustertrainingruntimes lists what there is: correct runtime: in the target"
        return Check("runtime", "fault", f"there is no {reference['kind']} {reference['name']}", fix)
    except Problem as problem:
        return Check("runtime", "warning", str(problem))
    return Check("runtime", "ok", f"{reference['kind']} {reference['name']}")


def _rights_check(kubectl: Kubectl, kind: JobKind) -> Check:
    wanted = [*((verb, _group(kind), kind.plural, "") for verb in JOB_RIGHTS), *((verb, "", *right) for verb, *right in RIGHTS)]
    try:
        missing = [right for right in wanted if not kubectl.may(*right)]
    except Problem as problem:
        return Check("rights", "warning", f"the cluster does not say what you may do: {problem}")
    if not missing:
        return Check("rights", "ok", f"you may create and delete {kind.plural}, read pods and logs, and run commands in pods")
    texts = [f"{verb} {resource}{f'/{sub}' if sub else ''}" for verb, _, resource, sub in missing]
    fix = f"ask the cluster's administrator for a role in {kubectl.namespace} with these rights"
    return Check("rights", "fault", f"you may not: {', '.join(texts)}", fix)


def _group(kind: JobKind) -> str:
    return kind.api.partition("/")[0]


def _node_checks(kubectl: Kubectl, settings: KubernetesSettings) -> Iterator[Check]:
    try:
        nodes = _nodes(kubectl)
    except Problem:
        yield Check("nodes", "warning", "you may not see the cluster's nodes", "ask its administrator how many GPUs it has")
        return
    ready = [node for node in nodes if is_ready(node)]
    unready = [str(node["metadata"]["name"]) for node in nodes if node not in ready]
    fix = f"kubectl describe node {unready[0]}" if unready else "add a node"
    is_fine = bool(ready) and not unready
    evidence = f"{len(ready)} of {len(nodes)} are ready{'; not: ' + ', '.join(unready[:3]) if unready else ''}"
    yield Check("nodes", "ok" if is_fine else "warning" if ready else "fault", evidence, "" if is_fine else fix)
    yield _gpu_check(ready, platform_of(nodes), settings)


def _gpu_check(nodes: Sequence[Mapping[str, Any]], platform: Platform, settings: KubernetesSettings) -> Check:
    resource, wanted = settings.gpu_resource, settings.gpus or 0
    counts = {str(node["metadata"]["name"]): allocatable(node, resource) for node in nodes}
    with_gpus = {name: count for name, count in counts.items() if count}
    if with_gpus:
        fits = max(with_gpus.values()) >= wanted
        evidence = f"{sum(with_gpus.values())} {resource} on {len(with_gpus)} nodes ({max(with_gpus.values())} on one)"
        return Check(
            "GPUs", "ok" if fits else "fault", evidence, "" if fits else f"set gpus: to {max(with_gpus.values())} or less in the target"
        )
    hardware = [name for node in nodes if _has_gpu_label(node) and (name := str(node["metadata"]["name"]))]
    if hardware:
        evidence = f"{hardware[0]} has an NVIDIA GPU, but no {resource} can be allocated: the device plugin does not run there"
        return Check(
            "GPUs", "fault" if wanted else "warning", evidence, f"{PLUGIN} (kubectl get pods -A | grep nvidia shows what is there)"
        )
    return Check("GPUs", "fault" if wanted else "warning", f"no node of this {platform.name} cluster has {resource}", platform.add_gpus)


def _has_gpu_label(node: Mapping[str, Any]) -> bool:
    labels = node["metadata"].get("labels") or {}
    capacity = (node.get("status") or {}).get("capacity") or {}
    is_aws = str((node.get("spec") or {}).get("providerID") or "").startswith("aws://")
    is_known = any(labels.get(key) == value for key, value in GPU_LABELS.items()) or any(key in labels for key in ANY_GPU_LABELS)
    is_gpu_type = is_aws and AWS_GPU_TYPE.fullmatch(str(labels.get(INSTANCE_TYPE, ""))) is not None
    return is_known or is_gpu_type or any(key.startswith("nvidia.com/gpu") for key in [*labels, *capacity])


def _volume_checks(kubectl: Kubectl, settings: KubernetesSettings) -> Iterator[Check]:
    if settings.runs_volume is None and settings.bucket is None:
        yield Check(
            "runs",
            "warning",
            "runs are kept in their pods: a lost pod loses its run",
            "create a PersistentVolumeClaim and set runs_volume: in the target, or set bucket:",
        )
    for key in ("runs_volume", "code_volume", "data_volume"):
        claim = getattr(settings, key)
        if claim is None:
            continue
        try:
            found = kubectl.get(f"/api/v1/namespaces/{kubectl.namespace}/persistentvolumeclaims/{claim}")
        except NotFound:
            yield Check(
                key,
                "fault",
                f"there is no PersistentVolumeClaim {claim} in {kubectl.namespace}",
                f"create it, or correct {key}: in the target",
            )
            continue
        except Problem as problem:
            yield Check(key, "warning", str(problem))
            continue
        modes = (found.get("spec") or {}).get("accessModes") or []
        is_shared = "ReadWriteMany" in modes
        phase = (found.get("status") or {}).get("phase", "?")
        yield Check(
            key,
            "ok" if is_shared else "warning",
            f"{claim} is {phase.lower()}, {', '.join(modes)}",
            "" if is_shared else "with several pods (--nodes 2) take a claim with ReadWriteMany",
        )


def check_code_volume(kubectl: Kubectl, claim: str) -> None:
    """Raises Problem if the volume for code that no ConfigMap can hold is not there."""
    try:
        kubectl.get(f"/api/v1/namespaces/{kubectl.namespace}/persistentvolumeclaims/{claim}")
    except NotFound:
        text = f"code_volume: there is no PersistentVolumeClaim {claim} in {kubectl.namespace}: create it, or {IN_IMAGE}"
        raise Problem(text) from None
    except Problem:
        return  # a user who may not read claims: the pod that uses it will tell


def _pending_checks(kubectl: Kubectl, kinds: Sequence[JobKind]) -> Iterator[Check]:
    """Yields why pods of our runs wait."""
    path, selector = f"/api/v1/namespaces/{kubectl.namespace}/pods", names.selector(names.own_labels())
    with contextlib.suppress(Problem):
        found = [pod for pod in kubectl.items(path, labelSelector=selector) if (pod.get("status") or {}).get("phase") == "Pending"]
        for kind in kinds:
            own = [pod for pod in found if kind.pod_label in (pod["metadata"].get("labels") or {})]
            for pod in own[:MAX_PENDING]:
                (state,) = pod_states([pod], kind, kubectl.target)
                yield Check(f"pod {state.name}", "warning", "it waits", state.reason or f"kubectl describe pod {state.name}")


# --- down --------------------------------------------------------------------------------------


def remove_all(kubectl: Kubectl, settings: KubernetesSettings) -> str:
    """Deletes the jobs that have ended, and all else that this account has made in the namespace; returns what it deleted."""
    selector, namespace = names.selector(names.own_labels()), kubectl.namespace
    kinds = [kind for kind in KINDS.values() if has_kind(kubectl, kind)]
    wanted = wanted_kind(settings, kinds)
    # A user who may not list the other kind has made none of it.
    listed = [kind for kind in kinds if kind is wanted or kubectl.may("list", _group(kind), kind.plural)]
    jobs = [(kind, job) for kind in listed for job in kubectl.items(kind.path(namespace), labelSelector=selector)]
    if active := [job["metadata"]["name"] for kind, job in jobs if kind.end(job) is None]:
        raise Problem(f"{', '.join(active[:3])} still runs there: stop it first")
    core = f"/api/v1/namespaces/{namespace}"
    paths = {
        **{f"{kind.path(namespace)}/{job['metadata']['name']}": kind.title for kind, job in jobs},
        **{
            f"{core}/{plural}/{item['metadata']['name']}": title
            for plural, title in (("pods", "Pod"), ("secrets", "Secret"), ("configmaps", "ConfigMap"))
            for item in kubectl.items(f"{core}/{plural}", labelSelector=selector)
        },
    }
    deleted = [f"{title} {path.rpartition('/')[2]}" for path, title in paths.items() if kubectl.delete(path)]
    volumes = [volume for volume in (settings.runs_volume, settings.code_volume) if volume]
    stays = f"; the files in {', '.join(volumes)} stay" if volumes else ""
    return f"removed from the namespace {namespace}: {', '.join(deleted) or 'nothing'}{stays}"
