"""Stands in for Kubeflow's Trainer 2.3, and for JobSet and the Job controller that it uses.

A TrainJob is resolved with its ClusterTrainingRuntime: the command, image, variables, resources and number of nodes of `spec.trainer`, and
`spec.runtimePatches`, are merged into the runtime's job `node`. Its pods have the names, labels and variables that JobSet's indexed Job gives
them; a container that fails is started again in its pod until the Job's `backoffLimit` (6) is reached. Left out: initializers, suspension,
success policies, MPI, and all kinds of jobs but torch.
"""

from __future__ import annotations

import copy
import hashlib
from datetime import UTC, datetime
from typing import Any

from tests.system.cluster_api import Api, Object, now, pods_path

GROUP = "/apis/trainer.kubeflow.org/v1alpha1"
PORT = 29400
BACKOFF_LIMIT = 6
LISTS_BY_NAME = ("containers", "initContainers", "volumes", "env", "replicatedJobs", "imagePullSecrets")


class TrainJobs:
    def __init__(self, api: Api) -> None:
        self.api = api
        self.path = f"{GROUP}/trainjobs"

    def reconcile(self) -> list[Object]:
        """Advances all jobs; returns them."""
        if self.api.find(GROUP) is None:
            return []
        jobs = self.api.items(self.path)
        for job in jobs:
            if "deletionTimestamp" not in job["metadata"]:
                self._advance(job)
        return jobs

    def _advance(self, job: Object) -> None:
        metadata, before = job["metadata"], job.get("status") or {}
        if any(condition["type"] in ("Complete", "Failed") and condition["status"] == "True" for condition in before.get("conditions", ())):
            return
        runtime = self.api.find(f"{GROUP}/clustertrainingruntimes/{job['spec']['runtimeRef']['name']}")
        if runtime is None:
            return  # Trainer's webhook would have refused it
        if self._is_past_deadline(job):
            self._fail_at_deadline(job, before)
            return
        node = resolve(job, runtime)
        count = job["spec"].get("trainer", {}).get("numNodes") or runtime["spec"].get("mlPolicy", {}).get("numNodes", 1)
        labels = {"jobset.sigs.k8s.io/jobset-name": metadata["name"]}
        selector = f"jobset.sigs.k8s.io/jobset-name={metadata['name']}"
        pods = self.api.items(pods_path(metadata["namespace"]), labelSelector=selector)
        there = {pod["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"]: pod for pod in pods}
        for index in range(count):
            if str(index) not in there:
                self._create_pod(job, node, index, count)
        self._create_service(job, labels)
        status = job_status(before, pods, count)
        if status != before:
            self.api.patch(f"{GROUP}/namespaces/{metadata['namespace']}/trainjobs/{metadata['name']}/status", {"status": status})
            if any(condition["type"] == "Failed" for condition in status["conditions"]):
                for pod in pods:
                    if pod.get("status", {}).get("phase") in ("Pending", "Running", None):
                        self.api.delete(pods_path(metadata["namespace"], pod["metadata"]["name"]))

    @staticmethod
    def _is_past_deadline(job: Object) -> bool:
        deadline, created = job["spec"].get("activeDeadlineSeconds"), datetime.fromisoformat(job["metadata"]["creationTimestamp"])
        return deadline is not None and (datetime.now(UTC) - created).total_seconds() > deadline

    def _fail_at_deadline(self, job: Object, before: Object) -> None:
        """Deletes the pods, as Trainer deletes its JobSet."""
        name, namespace = job["metadata"]["name"], job["metadata"]["namespace"]
        condition = {
            "type": "Failed", "status": "True", "reason": "DeadlineExceeded", "message": "TrainJob exceeded its active deadline", "lastTransitionTime": now(),
        }  # fmt: skip
        status = before | {"conditions": [*before.get("conditions", ()), condition]}
        for pod in self.api.items(pods_path(namespace), labelSelector=f"jobset.sigs.k8s.io/jobset-name={name}"):
            self.api.delete(pods_path(namespace, pod["metadata"]["name"]))
        self.api.patch(f"{GROUP}/namespaces/{namespace}/trainjobs/{name}/status", {"status": status})

    def _create_pod(self, job: Object, node: Object, index: int, count: int) -> None:
        name, namespace = job["metadata"]["name"], job["metadata"]["namespace"]
        template = copy.deepcopy(node["template"]["spec"]["template"])
        job_name = f"{name}-node-0"
        labels = {
            "jobset.sigs.k8s.io/jobset-name": name, "jobset.sigs.k8s.io/replicatedjob-name": "node", "jobset.sigs.k8s.io/job-index": "0",
            "batch.kubernetes.io/job-name": job_name, "job-name": job_name, "batch.kubernetes.io/job-completion-index": str(index),
            "batch.kubernetes.io/controller-uid": job["metadata"]["uid"],
        }  # fmt: skip
        metadata = template.get("metadata", {})
        annotations = metadata.get("annotations", {}) | {"batch.kubernetes.io/job-completion-index": str(index)}
        owner = {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "name": name,
            "uid": job["metadata"]["uid"],
            "controller": True,
        }
        suffix = hashlib.sha256(f"{job['metadata']['uid']}{index}".encode()).hexdigest()[:5]
        metadata |= {
            "name": f"{job_name}-{index}-{suffix}", "namespace": namespace, "labels": metadata.get("labels", {}) | labels,
            "annotations": annotations, "ownerReferences": [owner],
        }  # fmt: skip
        spec = template["spec"]
        spec.setdefault("restartPolicy", "OnFailure")
        spec |= {"hostname": f"{job_name}-{index}", "subdomain": name}
        processes = job["spec"].get("trainer", {}).get("numProcPerNode", "auto")
        index_field = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
        variables: list[Object] = [
            {"name": "PET_NNODES", "value": str(count)}, {"name": "PET_NPROC_PER_NODE", "value": str(processes)}, {"name": "PET_NODE_RANK", "valueFrom": index_field},
            {"name": "PET_MASTER_ADDR", "value": f"{job_name}-0.{name}"}, {"name": "PET_MASTER_PORT", "value": str(PORT)}, {"name": "JOB_COMPLETION_INDEX", "valueFrom": index_field},
        ]  # fmt: skip
        for container in spec["containers"]:
            container["env"] = [*container.get("env", ()), *variables]
        self.api.create(pods_path(namespace), {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})

    def _create_service(self, job: Object, labels: dict[str, str]) -> None:
        name, namespace = job["metadata"]["name"], job["metadata"]["namespace"]
        owner = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "name": name, "uid": job["metadata"]["uid"]}
        spec = {"clusterIP": "None", "selector": labels, "publishNotReadyAddresses": True}
        path = f"/api/v1/namespaces/{namespace}/services"
        if self.api.find(f"{path}/{name}") is None:
            self.api.create(
                path, {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "ownerReferences": [owner]}, "spec": spec}
            )


def resolve(job: Object, runtime: Object) -> Object:
    """Returns the runtime's job `node` with the job's own settings and patches."""
    template = copy.deepcopy(runtime["spec"]["template"])
    for patch in job["spec"].get("runtimePatches", ()):
        template = merged(template, patch.get("trainingRuntimeSpec", {}).get("template", {}))
    (node,) = [replicated for replicated in template["spec"]["replicatedJobs"] if replicated["name"] == "node"]
    (container,) = [item for item in node["template"]["spec"]["template"]["spec"]["containers"] if item["name"] == "node"]
    trainer = job["spec"].get("trainer", {})
    container |= {key: trainer[key] for key in ("image", "command", "args") if key in trainer}
    if "env" in trainer:
        container["env"] = merged(container.get("env", []), trainer["env"], "env")
    if "resourcesPerNode" in trainer:
        container["resources"] = trainer["resourcesPerNode"]
    labels = node["template"].get("metadata", {}).get("labels", {})
    pod = node["template"]["spec"]["template"]
    pod["metadata"] = pod.get("metadata") or {}
    pod["metadata"]["labels"] = labels | pod["metadata"].get("labels", {})
    return dict(node)


def merged(base: Any, change: Any, name: str = "") -> Any:
    """Merges as a strategic merge patch does: objects by key, lists whose items have names by name, other lists as a whole."""
    if isinstance(base, dict) and isinstance(change, dict):
        return base | {key: merged(base.get(key), value, key) for key, value in change.items()}
    if isinstance(base, list) and isinstance(change, list) and name in (*LISTS_BY_NAME, "volumeMounts"):
        key = "mountPath" if name == "volumeMounts" else "name"
        known = {item[key]: item for item in base}
        for item in change:
            known[item[key]] = merged(known.get(item[key]), item)
        return list(known.values())
    return copy.deepcopy(change)


def job_status(before: Object, pods: list[Object], count: int) -> Object:
    phases = [pod.get("status", {}).get("phase") for pod in pods]
    restarts = sum(status["restartCount"] for pod in pods for status in pod.get("status", {}).get("containerStatuses", ()))
    counts = {
        "name": "node", "ready": phases.count("Running"), "active": int(phases.count("Running") > 0), "succeeded": int(phases.count("Succeeded") == count),
        "failed": int("Failed" in phases or restarts > BACKOFF_LIMIT), "suspended": 0,
    }  # fmt: skip
    conditions = list(before.get("conditions", ()))
    if counts["succeeded"]:
        conditions.append(
            {
                "type": "Complete",
                "status": "True",
                "reason": "AllJobsCompleted",
                "message": "jobset completed successfully",
                "lastTransitionTime": now(),
            }
        )
    elif counts["failed"]:
        conditions.append(
            {
                "type": "Failed",
                "status": "True",
                "reason": "FailedJobs",
                "message": "jobset failed due to one or more job failures",
                "lastTransitionTime": now(),
            }
        )
    return {"conditions": conditions, "jobsStatus": [counts]}
