"""Stands in for the scheduler, the kubelets and the container runtimes of a cluster: runs pods as local processes.

Pods are bound to Node objects by node selector, taints and GPUs; each gets an address in a network namespace of its own, and its containers
get own files, process ids and a host name. Images are not pulled: all that `Kubelet.images` allows are this machine's files with the Python
under test. Left out: CPU and memory limits, probes, sidecars, image pull secrets, quality of service, preemption, resource use. A container
that failed and may restart does so after `RESTART_SECONDS` and not, as on a real node, after 10 seconds that double each time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from drivetrain.chaos.hosts import Host
from tests.system.cluster_api import Api, ApiError, Object, now, pods_path, record_event
from tests.system.kubelet_pod import RunningPod
from tests.system.kubelet_volumes import number_of

GPU = "nvidia.com/gpu"
RESYNC_SECONDS = 1.0


class Kubelet:
    """Watches the cluster's pods: binds them to nodes, runs them and writes their status back."""

    def __init__(self, api: Api, folder: Path, hosts: list[Host], port: int) -> None:
        self.api, self.folder, self.port = api, folder, port
        self.images: Callable[[str], bool] = lambda image: "missing" not in image
        """Whether an image can be pulled."""
        self.running: dict[str, RunningPod] = {}
        """The pods that were started, by uid."""
        self.free_hosts = list(hosts)
        self.lock = threading.Lock()
        self._ended, self._wake = threading.Event(), threading.Event()
        self._threads = [
            threading.Thread(target=self._loop, daemon=True),
            threading.Thread(target=api.watch, args=("/api/v1/pods", self._wake.set, self._ended), daemon=True),
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Kills all containers."""
        self._ended.set()
        self._wake.set()
        for pod in list(self.running.values()):
            pod.kill()
        for thread in self._threads[:1]:
            thread.join(10)

    def find(self, namespace: str, name: str) -> RunningPod | None:
        """Returns the newest pod of that name."""
        return next((pod for pod in reversed(list(self.running.values())) if (pod.namespace, pod.name) == (namespace, name)), None)

    # --- nodes ---

    def add_node(self, name: str, gpus: int = 0, labels: dict[str, str] | None = None, taints: list[Object] | None = None) -> None:
        """Registers a node; `gpus` is what a device plugin would report."""
        capacity = {"cpu": "16", "memory": "64Gi", "pods": "110", "ephemeral-storage": "100Gi"} | ({GPU: str(gpus)} if gpus else {})
        node = {
            "apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux"} | (labels or {})},
            "spec": {"taints": taints or []},
        }  # fmt: skip
        status = {
            "capacity": capacity, "allocatable": capacity, "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
            "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "kubelet is posting ready status", "lastHeartbeatTime": now()}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": self.port}},
            "nodeInfo": dict.fromkeys(("machineID", "systemUUID", "bootID", "kernelVersion", "osImage"), "stand-in")
            | {"containerRuntimeVersion": "containerd://1.7.0", "kubeletVersion": "v1.20.2", "kubeProxyVersion": "v1.20.2", "operatingSystem": "linux", "architecture": "amd64"},
        }  # fmt: skip
        self.api.create("/api/v1/nodes", node)
        self.api.patch(f"/api/v1/nodes/{name}/status", {"status": status})
        # A new node is tainted until its controller has seen it ready.
        self.api.patch(f"/api/v1/nodes/{name}", {"spec": {"taints": taints or None}})

    def remove_node(self, name: str) -> None:
        self.api.delete(f"/api/v1/nodes/{name}")

    # --- pods ---

    def _loop(self) -> None:
        while not self._ended.is_set():
            self._wake.wait(RESYNC_SECONDS)
            self._wake.clear()
            if self._ended.is_set():
                return
            try:
                self._sync(self.api.items("/api/v1/pods"))
            except (ApiError, OSError):
                time.sleep(0.2)  # the API server restarts

    def _sync(self, pods: list[Object]) -> None:
        seen = set()
        for pod in pods:
            uid = pod["metadata"]["uid"]
            seen.add(uid)
            if "nodeName" not in pod["spec"]:
                self._schedule(pod, pods)
            elif uid not in self.running and "deletionTimestamp" not in pod["metadata"]:
                self.running[uid] = RunningPod(self, pod)
                self.running[uid].start()
            elif "deletionTimestamp" in pod["metadata"]:
                self._end(pod)
        for uid in set(self.running) - seen:
            self.running.pop(uid).kill()
        self.write_hosts()

    def _end(self, pod: Object) -> None:
        running = self.running.get(pod["metadata"]["uid"])
        if running is None:
            self.forget(pod)
        else:
            running.end(float(pod["metadata"].get("deletionGracePeriodSeconds", 30)))

    def forget(self, pod: Object) -> None:
        """Removes a pod that has ended and was deleted from the API server."""
        metadata = pod["metadata"]
        self.api.delete(pods_path(metadata["namespace"], metadata["name"]), gracePeriodSeconds=0)

    def _schedule(self, pod: Object, pods: list[Object]) -> None:
        """Binds a pod to the first node that fits, or writes why there is none."""
        nodes = self.api.items("/api/v1/nodes")
        reasons: dict[str, int] = {}
        path = pods_path(pod["metadata"]["namespace"], pod["metadata"]["name"])
        for node in nodes:
            reason = self._unfit(pod, node, pods)
            if not reason:
                binding = {
                    "apiVersion": "v1",
                    "kind": "Binding",
                    "metadata": {"name": pod["metadata"]["name"]},
                    "target": {"kind": "Node", "name": node["metadata"]["name"]},
                }
                self.api.call("POST", f"{path}/binding", binding)
                record_event(
                    self.api,
                    pod,
                    "Pod",
                    "Scheduled",
                    f"Successfully assigned {pod['metadata']['name']} to {node['metadata']['name']}",
                    "default-scheduler",
                )
                pod["spec"]["nodeName"] = node["metadata"]["name"]
                return
            reasons[reason] = reasons.get(reason, 0) + 1
        message = (
            f"0/{len(nodes)} nodes are available: {', '.join(f'{count} {reason}' for reason, count in sorted(reasons.items()))}."
            if nodes
            else "no nodes available to schedule pods"
        )
        conditions = pod.get("status", {}).get("conditions", ())
        if not any(condition.get("message") == message for condition in conditions):
            condition = {
                "type": "PodScheduled",
                "status": "False",
                "reason": "Unschedulable",
                "message": message,
                "lastTransitionTime": now(),
            }
            self.api.patch(f"{path}/status", {"status": {"phase": "Pending", "conditions": [condition]}})
            record_event(self.api, pod, "Pod", "FailedScheduling", message, "default-scheduler", warning=True)

    def _unfit(self, pod: Object, node: Object, pods: list[Object]) -> str:
        """Returns why a pod cannot run on a node; "" if it can."""
        labels, spec = node["metadata"].get("labels", {}), pod["spec"]
        if any(labels.get(name) != value for name, value in spec.get("nodeSelector", {}).items()):
            return "node(s) didn't match node selector"
        for taint in node["spec"].get("taints", ()):
            if taint["effect"] != "PreferNoSchedule" and not any(
                _tolerates(toleration, taint) for toleration in spec.get("tolerations", ())
            ):
                return f"node(s) had taint {{{taint['key']}: {taint.get('value', '')}}}, that the pod didn't tolerate"
        taken = sum(num_gpus(other) for other in pods if other["spec"].get("nodeName") == node["metadata"]["name"] and _is_active(other))
        if num_gpus(pod) and num_gpus(pod) + taken > number_of(node["status"].get("allocatable", {}).get(GPU, 0)):
            return f"Insufficient {GPU}"
        return ""

    # --- names ---

    def write_hosts(self) -> None:
        """Writes /etc/hosts of all pods: headless services resolve to the addresses of the pods that they select."""
        services = self.api.items("/api/v1/services")
        pods = [pod for pod in list(self.running.values()) if pod.host is not None and not pod.has_ended]
        lines = [line for pod in pods for line in _service_lines(pod, services)]
        for pod in pods:
            assert pod.host is not None
            pod.write_hosts("".join([f"127.0.0.1 localhost\n{pod.host.address} {pod.name}\n", *lines]))


def _service_lines(pod: RunningPod, services: list[Object]) -> list[str]:
    metadata, spec = pod.pod["metadata"], pod.pod["spec"]
    assert pod.host is not None
    lines = []
    for service in services:
        selector = service["spec"].get("selector")
        is_selected = selector and selector.items() <= metadata.get("labels", {}).items()
        if is_selected and service["metadata"]["namespace"] == pod.namespace and service["spec"].get("clusterIP") == "None":
            name = service["metadata"]["name"]
            host = f"{spec['hostname']}.{name}" if spec.get("subdomain") == name and spec.get("hostname") else name
            lines.append(f"{pod.host.address} {host} {host}.{pod.namespace}.svc {host}.{pod.namespace}.svc.cluster.local\n")
    return lines


def num_gpus(pod: Object) -> int:
    wishes = [container.get("resources", {}) for container in pod["spec"]["containers"]]
    return sum(number_of((wish.get("limits") or wish.get("requests") or {}).get(GPU, 0)) for wish in wishes)


def _is_active(pod: Object) -> bool:
    return pod.get("status", {}).get("phase") not in ("Succeeded", "Failed")


def _tolerates(toleration: dict[str, Any], taint: dict[str, Any]) -> bool:
    if toleration.get("effect") not in (None, "", taint["effect"]):
        return False
    if toleration.get("operator") == "Exists":
        return toleration.get("key") in (None, "", taint["key"])
    return bool(toleration.get("key") == taint["key"] and toleration.get("value", "") == taint.get("value", ""))
