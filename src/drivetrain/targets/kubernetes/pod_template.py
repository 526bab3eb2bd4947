"""What one pod of a run is: image, command, environment, volumes, resources. Pure.

Kubernetes replaces `$(NAME)` in arguments and variables; every `$` is written twice, so that it stays as it is.
"""

from __future__ import annotations

import base64
import io
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from drivetrain.outcomes import Problem
from drivetrain.targets.archive import Archive
from drivetrain.targets.kubernetes import names
from drivetrain.targets.kubernetes.settings import SecretReference, Toleration, without_empty
from drivetrain.targets.layout import Layout

RUNS, CODE, DATA = "/drivetrain", "/code", "/data"
CODE_PREFIX = "files"
"""The files of a ConfigMap are below this folder of the volume, which is mounted by itself: without the links that Kubernetes makes."""
MAX_CONFIG_MAP_BYTES = (1 << 20) - (1 << 14)
POD_PROGRAM = ("python3", "-P", "-m", "drivetrain.targets.kubernetes.pod")
SET_BY_OPERATOR = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "POD_IP", "POD_OWNER")


class Image(NamedTuple):
    name: str
    pull_policy: str = ""
    """"": the cluster's default."""


@dataclass(frozen=True, kw_only=True)
class PodSpec:
    """What a pod is asked for, for both kinds of job."""

    image: str
    words: Sequence[str]
    """The words after `drivetrain`."""
    layout: Layout
    nodes: int = 1
    retries: int = 3
    keep: int = 0
    storage: str = ""
    """Where the run is kept: "volume", the address of a bucket, or "": only in its pods."""
    labels: Mapping[str, str] = field(default_factory=dict)
    pull_policy: str = ""
    image_pull_secret: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    secret: str = ""
    secret_variables: Sequence[str] = ()
    secret_references: Sequence[SecretReference] = ()
    gpus: int = 0
    gpu_resource: str = "nvidia.com/gpu"
    cpu: str | None = None
    memory: str | None = None
    shm: str = "64Mi"
    runs_volume: str | None = None
    code: Mapping[str, Any] | None = None
    """The volume of the code without its name; None: a built-in task."""
    code_path: str = CODE_PREFIX
    """The folder of that volume that has the code."""
    data_volume: str | None = None
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: Sequence[Toleration] = ()
    service_account: str | None = None
    priority_class: str | None = None
    grace: int = 120
    fs_group: int = 1000


def literal(text: str) -> str:
    """Returns a text that Kubernetes does not expand."""
    return text.replace("$", "$$")


def command(pod: PodSpec) -> list[str]:
    """Returns the words that start our program in the pod; its arguments are the words after `drivetrain`."""
    layout = pod.layout
    options = {
        "base": layout.base,
        "project": layout.project,
        "run": layout.run,
        "nodes": pod.nodes,
        "retries": pod.retries,
        "keep": pod.keep,
        "storage": pod.storage,
    }
    return [*POD_PROGRAM, *(literal(f"--{name}={value}") for name, value in options.items()), "--"]


def environment(pod: PodSpec) -> list[dict[str, Any]]:
    """Returns the variables; the values of secrets are references."""
    for name in pod.variables:
        if name in SET_BY_OPERATOR or name.startswith("PET_"):
            raise Problem(f"env: {name} in the target: the cluster's operator sets it; remove it")
    entries: dict[str, dict[str, Any]] = {name: {"value": literal(value)} for name, value in pod.variables.items()}
    entries["POD_IP"] = {"valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    entries["POD_OWNER"] = {"valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['batch.kubernetes.io/controller-uid']"}}}
    for name in pod.secret_variables:
        entries[name] = _secret_key(pod.secret, name)
    for reference in pod.secret_references:
        entries[reference.variable] = _secret_key(reference.secret, reference.key)
    return [{"name": name, **value} for name, value in entries.items()]


def _secret_key(secret: str, key: str) -> dict[str, Any]:
    return {"valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}


def resources(pod: PodSpec) -> dict[str, Any]:
    gpus = {pod.gpu_resource: pod.gpus} if pod.gpus else {}
    return without_empty(
        {
            "requests": without_empty({"cpu": pod.cpu, "memory": pod.memory}) | gpus,
            "limits": without_empty({"memory": pod.memory}) | gpus,
        }
    )


def volumes(pod: PodSpec) -> list[dict[str, Any]]:
    runs: dict[str, Any] = _claim(pod.runs_volume) if pod.runs_volume else {"emptyDir": {}}
    entries = [{"name": "runs", **runs}, {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": pod.shm}}]
    if pod.code is not None:
        entries.append({"name": "code", **pod.code})
    if pod.data_volume is not None:
        entries.append({"name": "data", **_claim(pod.data_volume)})
    return entries


def _claim(name: str) -> dict[str, Any]:
    return {"persistentVolumeClaim": {"claimName": name}}


def mounts(pod: PodSpec) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = [{"name": "runs", "mountPath": RUNS}, {"name": "shm", "mountPath": "/dev/shm"}]
    if pod.code is not None:
        entries.append({"name": "code", "mountPath": CODE, "subPath": pod.code_path, "readOnly": True})
    if pod.data_volume is not None:
        entries.append({"name": "data", "mountPath": DATA})
    return entries


CONTAINER_SECURITY: dict[str, Any] = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def pod_settings(pod: PodSpec) -> dict[str, Any]:
    """Returns the fields of a pod's spec beside its containers, in the form that PyTorchJob and TrainJob share."""
    return without_empty(
        {
            "nodeSelector": dict(pod.node_selector),
            "tolerations": [toleration.to_json() for toleration in pod.tolerations],
            "serviceAccountName": pod.service_account,
            "imagePullSecrets": [{"name": pod.image_pull_secret}] if pod.image_pull_secret else [],
            "terminationGracePeriodSeconds": pod.grace,
            "securityContext": without_empty({"fsGroup": pod.fs_group or None, "seccompProfile": {"type": "RuntimeDefault"}}),
            "volumes": volumes(pod),
        }
    )


# --- code --------------------------------------------------------------------------------------


def code_files(code: Archive) -> dict[str, bytes]:
    """Returns the files of an archive, path -> content."""
    with tarfile.open(fileobj=io.BytesIO(code.data), mode="r:gz") as archive:
        return {entry.name: file.read() for entry in archive if (file := archive.extractfile(entry)) is not None}


def fits_config_map(code: Archive) -> bool:
    return sum(len(content) for content in code_files(code).values()) <= MAX_CONFIG_MAP_BYTES


def config_map(code: Archive) -> dict[str, Any]:
    """Returns the ConfigMap of the code: its name is the digest of its content, so that runs of the same code share it."""
    texts, binaries = {}, {}
    for number, content in enumerate(code_files(code).values()):
        text = _as_text(content)
        if text is None:
            binaries[_key(number)] = base64.b64encode(content).decode()
        else:
            texts[_key(number)] = text
    metadata = {"name": names.code_name(code.digest), "labels": names.own_labels() | {names.ROLE_LABEL: "code"}}
    values = without_empty({"data": texts, "binaryData": binaries})
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "immutable": True, **values}


def _key(number: int) -> str:
    return f"file-{number}"


def _as_text(content: bytes) -> str | None:
    """Returns the text of a file; None if it is binary."""
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return None
    return text if all(char.isprintable() or char in "\n\t" for char in text) else None


def config_map_volume(code: Archive) -> dict[str, Any]:
    items = [{"key": _key(number), "path": f"{CODE_PREFIX}/{path}"} for number, path in enumerate(code_files(code))]
    return {"configMap": {"name": names.code_name(code.digest), "items": items}}
