"""Stands in for Kubeflow's training operator 1.9 and Trainer 2.3, and for the controllers that they need.

For a PyTorchJob it creates pods and headless services, restarts what failed as the replica's restart policy says, and writes the job's
conditions and counts, as the real operator does. `operator_trainjob.py` does so for TrainJobs. Objects whose owner is gone are deleted, as
the garbage collector does. Left out: gang scheduling, suspension, autoscaling, and the container that real Workers run first, which waits
until the Master's name resolves.
"""

from __future__ import annotations

import copy
import threading
import time
from datetime import UTC, datetime
from typing import Any

from tests.system.cluster_api import Api, ApiError, Object, now, pods_path, record_event
from tests.system.operator_trainjob import TrainJobs

JOBS = "/apis/kubeflow.org/v1/pytorchjobs"
CONTAINER, PORT = "pytorch", 23456
FIRST_RETRYABLE_CODE = 128
RESYNC_SECONDS = 1.0
OWNED = ("pods", "services", "configmaps", "secrets")


class Operator:
    """Brings pods in line with jobs, whenever one of either changes."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self.train_jobs = TrainJobs(api)
        self._ended, self._wake = threading.Event(), threading.Event()
        watched = (JOBS, self.train_jobs.path, "/api/v1/pods")
        self._threads = [threading.Thread(target=self._loop, daemon=True)]
        self._threads += [threading.Thread(target=api.watch, args=(path, self._wake.set, self._ended), daemon=True) for path in watched]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._ended.set()
        self._wake.set()
        self._threads[0].join(10)

    def _loop(self) -> None:
        while not self._ended.is_set():
            self._wake.wait(RESYNC_SECONDS)
            self._wake.clear()
            if self._ended.is_set():
                return
            try:
                jobs = self._jobs()
                for job in jobs:
                    if "deletionTimestamp" not in job["metadata"]:
                        Reconciliation(self.api, job).run()
                jobs += self.train_jobs.reconcile()
                self._collect_garbage({job["metadata"]["uid"] for job in jobs})
            except (ApiError, OSError) as error:
                if not isinstance(error, ApiError) or error.code not in (404, 409, 503):
                    print(f"operator: {error}", flush=True)
                time.sleep(0.2)

    def _jobs(self) -> list[Object]:
        """Returns the jobs; none if the resource is not installed."""
        return self.api.items(JOBS) if self.api.find("/apis/kubeflow.org/v1") is not None else []

    def _collect_garbage(self, owners: set[str]) -> None:
        for kind in OWNED:
            for item in self.api.items(f"/api/v1/{kind}"):
                references = item["metadata"].get("ownerReferences", ())
                is_ours = any(reference["kind"] in ("PyTorchJob", "TrainJob") for reference in references)
                if (
                    is_ours
                    and not any(reference["uid"] in owners for reference in references)
                    and "deletionTimestamp" not in item["metadata"]
                ):
                    self.api.delete(f"/api/v1/namespaces/{item['metadata']['namespace']}/{kind}/{item['metadata']['name']}")


class Reconciliation:
    """One pass over one PyTorchJob."""

    def __init__(self, api: Api, job: Object) -> None:
        self.api, self.job, self.spec = api, job, job["spec"]
        self.name, self.namespace = job["metadata"]["name"], job["metadata"]["namespace"]
        self.policy = self.spec.get("runPolicy", {})
        self.status: Object = copy.deepcopy(job.get("status") or {})
        self.replicas: dict[str, Object] = self.spec["pytorchReplicaSpecs"]

    def run(self) -> None:
        before = copy.deepcopy(self.status)
        pods = self.api.items(pods_path(self.namespace), labelSelector=f"training.kubeflow.org/job-name={self.name}")
        pods = [
            pod for pod in pods if any(owner["uid"] == self.job["metadata"]["uid"] for owner in pod["metadata"].get("ownerReferences", ()))
        ]
        if self._is("Succeeded") or self._is("Failed"):
            self._clean_up(pods)
        else:
            self._advance(pods)
        if self.status != before:
            path = f"/apis/kubeflow.org/v1/namespaces/{self.namespace}/pytorchjobs/{self.name}/status"
            self.api.patch(path, {"status": self.status})

    def _advance(self, pods: list[Object]) -> None:
        if not self.status.get("conditions"):
            self._set("Created", "PyTorchJobCreated", f"PyTorchJob {self.name} is created.")
            self.status["startTime"] = now()
        if self._is_past_limits(pods):
            for pod in pods:
                self._delete(pod)
            return
        for kind, replica in self.replicas.items():
            mine = [pod for pod in pods if pod["metadata"]["labels"]["training.kubeflow.org/replica-type"] == kind.lower()]
            self._reconcile_pods(kind, replica, mine)
            self._count(kind, mine)
        self._update_conditions()

    # --- pods ---

    def _reconcile_pods(self, kind: str, replica: Object, pods: list[Object]) -> None:
        there = {int(pod["metadata"]["labels"]["training.kubeflow.org/replica-index"]): pod for pod in pods}
        for index in range(replica.get("replicas", 1)):
            pod = there.get(index)
            if pod is None:
                self._create(kind, index, replica)
            elif pod.get("status", {}).get("phase") == "Failed" and "deletionTimestamp" not in pod["metadata"]:
                self._handle_failure(kind, replica, pod)

    def _handle_failure(self, kind: str, replica: Object, pod: Object) -> None:
        code = next(
            (
                status["state"]["terminated"]["exitCode"]
                for status in pod["status"].get("containerStatuses", ())
                if "terminated" in status["state"]
            ),
            0,
        )
        restart = replica.get("restartPolicy", "OnFailure")
        record_event(
            self.api,
            self.job,
            "PyTorchJob",
            "ExitedWithCode",
            f"Pod: {self.namespace}.{pod['metadata']['name']} exited with code {code}",
            "pytorchjob-controller",
        )
        if restart in ("OnFailure", "Always") or (restart == "ExitCode" and code >= FIRST_RETRYABLE_CODE):
            self._delete(pod)
            self._set("Restarting", "PyTorchJobRestarting", f"job {self.name} is restarting because {kind} replica(s) failed.")
        elif restart == "ExitCode":
            self._fail(f'job "{self.name}" is failing because "{kind}" replica(s) failed.')
        else:
            self._fail(f"PyTorchJob {self.name} is failed because 1 {kind} replica(s) failed.")

    def _create(self, kind: str, index: int, replica: Object) -> None:
        template = copy.deepcopy(replica["template"])
        name = f"{self.name}-{kind.lower()}-{index}"
        owner = {
            "apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "name": self.name, "uid": self.job["metadata"]["uid"], "controller": True, "blockOwnerDeletion": True,
        }  # fmt: skip
        labels = {
            "training.kubeflow.org/operator-name": "pytorchjob-controller", "training.kubeflow.org/job-name": self.name,
            "training.kubeflow.org/replica-type": kind.lower(), "training.kubeflow.org/replica-index": str(index),
        }  # fmt: skip
        if kind == "Master" or ("Master" not in self.replicas and index == 0):
            labels["training.kubeflow.org/job-role"] = "master"
        metadata = template.get("metadata", {})
        metadata |= {"name": name, "namespace": self.namespace, "labels": metadata.get("labels", {}) | labels, "ownerReferences": [owner]}
        restart = replica.get("restartPolicy", "OnFailure")
        template["spec"]["restartPolicy"] = "Never" if restart == "ExitCode" else restart
        for container in template["spec"]["containers"]:
            container["env"] = [
                *container.get("env", ()),
                *({"name": key, "value": value} for key, value in self._env(kind, index).items()),
            ]
        self.api.create(pods_path(self.namespace), {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]})
        service = {"clusterIP": "None", "selector": labels, "ports": [{"name": "pytorchjob-port", "port": self._port(kind)}]}
        service_metadata = {"name": name, "namespace": self.namespace, "labels": labels, "ownerReferences": [owner]}
        body = {"apiVersion": "v1", "kind": "Service", "metadata": service_metadata, "spec": service}
        self.api.create(f"/api/v1/namespaces/{self.namespace}/services", body)
        record_event(self.api, self.job, "PyTorchJob", "SuccessfulCreatePod", f"Created pod: {name}", "pytorchjob-controller")

    def _env(self, kind: str, index: int) -> dict[str, str]:
        """Returns what the operator adds to a container's variables."""
        env = {"PYTHONUNBUFFERED": "1"}
        total = sum(replica.get("replicas", 1) for replica in self.replicas.values())
        if "Master" in self.replicas:
            rank = index if kind == "Master" else index + 1
            env |= {"MASTER_PORT": str(self._port("Master")), "PET_MASTER_PORT": str(self._port("Master"))}
            address = f"{self.name}-master-0"
            env |= {"MASTER_ADDR": address, "PET_MASTER_ADDR": address, "RANK": str(rank), "PET_NODE_RANK": str(rank)}
            processes = str(self.spec.get("nprocPerNode", 1))
            env["WORLD_SIZE"] = str(total * (int(processes) if processes.isdigit() else 1))
        if "nprocPerNode" in self.spec:
            env["PET_NPROC_PER_NODE"] = str(self.spec["nprocPerNode"])
        elastic = self.spec.get("elasticPolicy")
        if elastic is None:
            return env | {"PET_NNODES": str(total)}
        endpoint = f"{elastic.get('rdzvHost', f'{self.name}-worker-0')}:{elastic.get('rdzvPort', self._port('Worker'))}"
        low, high = elastic.get("minReplicas", total), elastic.get("maxReplicas", total)
        env |= {"PET_RDZV_ENDPOINT": endpoint, "PET_RDZV_BACKEND": elastic.get("rdzvBackend", "c10d"), "PET_NNODES": f"{low}:{high}"}
        if "maxRestarts" in elastic:
            env["PET_MAX_RESTARTS"] = str(elastic["maxRestarts"])
        return env

    def _port(self, kind: str) -> int:
        for container in self.replicas.get(kind, {}).get("template", {}).get("spec", {}).get("containers", ()):
            for port in container.get("ports", ()):
                if port.get("name") == "pytorchjob-port":
                    return int(port["containerPort"])
        return PORT

    def _delete(self, pod: Object) -> None:
        if "deletionTimestamp" not in pod["metadata"]:
            self.api.delete(pods_path(self.namespace, pod["metadata"]["name"]))

    def _clean_up(self, pods: list[Object]) -> None:
        """Deletes the pods of a job that has ended, as its policy says."""
        policy = self.policy.get("cleanPodPolicy", "None")
        for pod in pods:
            is_active = pod.get("status", {}).get("phase") in ("Pending", "Running", None)
            if policy == "All" or (policy == "Running" and is_active):
                self._delete(pod)
                self.api.delete(f"/api/v1/namespaces/{self.namespace}/services/{pod['metadata']['name']}")
        for counts in self.status.get("replicaStatuses", {}).values():
            if self._is("Succeeded") and counts.get("active"):
                counts["succeeded"] = counts.get("succeeded", 0) + counts.pop("active")
        ttl = self.policy.get("ttlSecondsAfterFinished")
        if ttl is not None and _seconds_since(self.status.get("completionTime")) > ttl:
            self.api.delete(f"/apis/kubeflow.org/v1/namespaces/{self.namespace}/pytorchjobs/{self.name}")

    # --- the status ---

    def _is_past_limits(self, pods: list[Object]) -> bool:
        """Fails a job that has restarted too often, or runs for too long. Only restarts within a pod count, as in the real operator."""
        deadline, limit = self.policy.get("activeDeadlineSeconds"), self.policy.get("backoffLimit")
        if deadline is not None and _seconds_since(self.status.get("startTime")) > deadline:
            self._fail(f"Job {self.name} has failed because it was active longer than specified deadline")
            return True
        running = [pod for pod in pods if pod.get("status", {}).get("phase") == "Running"]
        restarts = sum(status["restartCount"] for pod in running for status in pod["status"].get("containerStatuses", ()))
        has_failed = any(pod.get("status", {}).get("phase") == "Failed" for pod in pods)
        if limit is not None and ((limit == 0 and has_failed) or (limit > 0 and restarts >= limit)):
            self._fail(f"Job {self.name} has failed because it has reached the specified backoff limit")
            return True
        return False

    def _count(self, kind: str, pods: list[Object]) -> None:
        phases = [pod.get("status", {}).get("phase") for pod in pods]
        counts = {"active": phases.count("Running"), "succeeded": phases.count("Succeeded"), "failed": phases.count("Failed")}
        selector = {"matchLabels": {"training.kubeflow.org/job-name": self.name, "training.kubeflow.org/replica-type": kind.lower()}}
        before = self.status.get("replicaStatuses", {}).get(kind, {})
        changed: dict[str, Any] = {name: number or None for name, number in counts.items() if number or name in before}
        self.status.setdefault("replicaStatuses", {})[kind] = changed | {"selector": "", "labelSelector": selector}

    def _update_conditions(self) -> None:
        leading = "Master" if "Master" in self.replicas else "Worker"
        counts = self.status["replicaStatuses"][leading]
        if self._is("Failed"):
            return
        if (counts.get("succeeded") or 0) >= self.replicas[leading].get("replicas", 1):
            self.status["completionTime"] = now()
            self._set("Succeeded", "PyTorchJobSucceeded", f"PyTorchJob {self.name} is successfully completed.")
        elif counts.get("active"):
            self._set("Running", "PyTorchJobRunning", f"PyTorchJob {self.name} is running.")

    def _fail(self, message: str) -> None:
        self.status.setdefault("completionTime", now())
        self._set("Failed", "PyTorchJobFailed", message)
        record_event(self.api, self.job, "PyTorchJob", "PyTorchJobFailed", message, "pytorchjob-controller", warning=True)

    def _is(self, kind: str) -> bool:
        return any(condition["type"] == kind and condition["status"] == "True" for condition in self.status.get("conditions", ()))

    def _set(self, kind: str, reason: str, message: str) -> None:
        """Sets a condition. Running and Restarting exclude each other, and an end sets Running to false."""
        if self._is(kind):
            return
        conditions = [condition for condition in self.status.get("conditions", ()) if condition["type"] != kind]
        if kind in ("Running", "Restarting"):
            conditions = [condition for condition in conditions if condition["type"] not in ("Running", "Restarting")]
        for condition in conditions:
            if kind in ("Succeeded", "Failed") and condition["type"] == "Running":
                condition["status"] = "False"
        moment = now()
        conditions.append(
            {"type": kind, "status": "True", "reason": reason, "message": message, "lastUpdateTime": moment, "lastTransitionTime": moment}
        )
        self.status["conditions"] = conditions


def _seconds_since(moment: str | None) -> float:
    if moment is None:
        return 0.0
    return (datetime.now(UTC) - datetime.fromisoformat(moment)).total_seconds()
