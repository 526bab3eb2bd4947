"""The stand-ins of the Kubernetes tests behave as the real operators and kubelets do, as far as drivetrain relies on it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.system.cluster import Cluster, cluster
from tests.waiting import wait_until

IMAGE = "drivetrain:cpu"
GRACE = 3


@pytest.fixture(scope="module")
def kubernetes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("kubernetes")) as started:
        yield started


def pytorch_job(name: str, command: str, workers: int = 0, **container: Any) -> dict[str, Any]:
    spec = {
        "terminationGracePeriodSeconds": GRACE,
        "containers": [{"name": "pytorch", "image": IMAGE, "command": ["sh", "-c", command], **container}],
    }
    replica = {"replicas": 1, "restartPolicy": "ExitCode", "template": {"spec": spec}}
    replicas = {"Master": replica} | ({"Worker": replica | {"replicas": workers}} if workers else {})
    return {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {"name": name}, "spec": {"pytorchReplicaSpecs": replicas}}


def conditions(cluster: Cluster, kind: str, name: str) -> dict[str, str]:
    facts = json.loads(cluster.kubectl("get", kind, name, "-o", "json"))
    return {condition["type"]: condition["status"] for condition in facts.get("status", {}).get("conditions", ())}


def apply(cluster: Cluster, *objects: dict[str, Any]) -> None:
    cluster.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(objects))


def test_pods_find_each_other_by_name(kubernetes: Cluster) -> None:
    apply(
        kubernetes,
        pytorch_job("pair", "until getent hosts $(MASTER_ADDR); do sleep 0.1; done; echo rank $RANK of $WORLD_SIZE; hostname; sleep 1", 1),
    )
    wait_until(lambda: "Succeeded" in conditions(kubernetes, "pytorchjob", "pair"), "the job's end", 60)
    worker = kubernetes.kubectl("logs", "pair-worker-0")
    assert "pair-master-0.default.svc" in worker and "rank 1 of 2\npair-worker-0" in worker
    assert "rank 0 of 2\npair-master-0" in kubernetes.kubectl("logs", "-l", "training.kubeflow.org/replica-type=master")
    kubernetes.kubectl("delete", "pytorchjob", "pair")
    wait_until(lambda: not kubernetes.pods(**{"training.kubeflow.org/job-name": "pair"}), "the end of the job's pods", 60)


@pytest.mark.parametrize("websockets", ["true", "false"])
def test_exec_passes_bytes_and_exit_codes(kubernetes: Cluster, websockets: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECTL_REMOTE_COMMAND_WEBSOCKETS", websockets)
    name = f"exec-{websockets}"
    apply(kubernetes, pytorch_job(name, "sleep 600"))
    wait_until(lambda: "Running" in conditions(kubernetes, "pytorchjob", name), "the pod", 60)
    data = bytes(range(256)) * 4096
    words = ["kubectl", "--kubeconfig", str(kubernetes.kubeconfig), "exec", "-i", f"{name}-master-0", "--"]
    done = subprocess.run([*words, "cat"], input=data, capture_output=True, timeout=60)
    assert done.stdout == data, done.stderr
    failed = subprocess.run([*words, "sh", "-c", "echo lost >&2; exit 7"], input=b"", capture_output=True, timeout=60)
    assert failed.returncode == 7 and b"lost" in failed.stderr
    kubernetes.kubectl("delete", "pod", f"{name}-master-0", "--grace-period=0", "--force")
    kubernetes.kubectl("delete", "pytorchjob", name)


def test_the_exit_code_decides_whether_a_pod_is_made_again(kubernetes: Cluster) -> None:
    apply(kubernetes, pytorch_job("permanent", "exit 127"), pytorch_job("retryable", "exit 200"))
    wait_until(lambda: "Failed" in conditions(kubernetes, "pytorchjob", "permanent"), "the job's end", 60)
    first = kubernetes.api.get("/api/v1/namespaces/default/pods/permanent-master-0")["metadata"]["uid"]
    names = {"retryable-master-0"}
    uids = lambda: {pod.uid for pod in kubernetes.kubelet.running.values() if pod.name in names}  # noqa: E731
    seen = uids()
    wait_until(lambda: uids() - seen, "another pod", 60)
    assert "Failed" not in conditions(kubernetes, "pytorchjob", "retryable")
    assert kubernetes.api.get("/api/v1/namespaces/default/pods/permanent-master-0")["metadata"]["uid"] == first
    kubernetes.kubectl("delete", "pytorchjob", "permanent", "retryable")


def test_a_deleted_pod_may_save_and_is_killed_after_its_grace_period(kubernetes: Cluster) -> None:
    apply(
        kubernetes, pytorch_job("polite", "trap 'echo saved; exit 3' TERM; while :; do sleep 0.1; done"), pytorch_job("deaf", "sleep 600")
    )
    wait_until(lambda: "Running" in conditions(kubernetes, "pytorchjob", "polite"), "the pod", 60)
    wait_until(lambda: "Running" in conditions(kubernetes, "pytorchjob", "deaf"), "the pod", 60)
    kubernetes.kubectl("delete", "pytorchjob", "polite", "deaf", "--wait=false")
    polite, deaf = (kubernetes.kubelet.find("default", f"{name}-master-0") for name in ("polite", "deaf"))
    assert polite is not None and deaf is not None
    assert polite.containers["pytorch"].wait() == 3
    assert b"saved" in polite.containers["pytorch"].log.read_bytes()
    assert deaf.containers["pytorch"].wait() == 137, "process 1 of a container ignores signals for which it has no handler"


def test_a_pod_waits_for_what_is_missing_and_says_so(kubernetes: Cluster) -> None:
    apply(
        kubernetes,
        pytorch_job("unknown-image", "true", image="registry.example/missing:1"),
        pytorch_job("no-gpu", "true", resources={"limits": {"nvidia.com/gpu": 1}}),
        pytorch_job("no-secret", "true", env=[{"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "nothing", "key": "a"}}}]),
    )
    wait_until(
        lambda: "0/1 nodes are available: 1 Insufficient nvidia.com/gpu." in kubernetes.kubectl("describe", "pod", "no-gpu-master-0"),
        "a reason",
        60,
    )
    wait_until(lambda: "ImagePullBackOff" in kubernetes.kubectl("get", "pods"), "a reason", 60)
    wait_until(lambda: "CreateContainerConfigError" in kubernetes.kubectl("get", "pods"), "a reason", 60)
    kubernetes.kubectl("create", "secret", "generic", "nothing", "--from-literal=a=b")
    wait_until(lambda: "Succeeded" in conditions(kubernetes, "pytorchjob", "no-secret"), "the job's end", 60)
    kubernetes.kubelet.add_node("gpu-node", gpus=1)
    wait_until(lambda: "Succeeded" in conditions(kubernetes, "pytorchjob", "no-gpu"), "the job's end", 60)
    kubernetes.kubelet.remove_node("gpu-node")
    kubernetes.kubectl("delete", "pytorchjob", "--all")


def test_train_job_through_the_python_client(kubernetes: Cluster) -> None:
    """Strict validation, a conflict, a watch, and a run on two nodes."""
    client = pytest.importorskip("kubernetes").client
    kubernetes_config = pytest.importorskip("kubernetes").config
    watch = pytest.importorskip("kubernetes").watch
    api = client.CustomObjectsApi(kubernetes_config.new_client_from_config(str(kubernetes.kubeconfig)))
    where = {"group": "trainer.kubeflow.org", "version": "v1alpha1", "namespace": "default", "plural": "trainjobs"}
    trainer = {
        "image": IMAGE,
        "numNodes": 2,
        "command": [
            "sh",
            "-c",
            "until getent hosts $PET_MASTER_ADDR; do sleep 0.1; done; sleep 1; echo node $PET_NODE_RANK of $PET_NNODES",
        ],
    }
    runtime = {"apiGroup": "trainer.kubeflow.org", "kind": "ClusterTrainingRuntime", "name": "torch-distributed"}
    job = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": "pair"},
        "spec": {"runtimeRef": runtime, "trainer": trainer},
    }
    with pytest.raises(client.ApiException, match="unknown field"):
        api.create_namespaced_custom_object(**where, body=job | {"spec": job["spec"] | {"colour": 1}}, field_validation="Strict")
    api.create_namespaced_custom_object(**where, body=job, field_validation="Strict")
    with pytest.raises(client.ApiException, match="AlreadyExists"):
        api.create_namespaced_custom_object(**where, body=job)
    for event in watch.Watch().stream(api.list_namespaced_custom_object, **where, timeout_seconds=60):
        if any(condition["type"] == "Complete" for condition in event["object"].get("status", {}).get("conditions", ())):
            break
    pods = kubernetes.pods(**{"jobset.sigs.k8s.io/jobset-name": "pair"})
    assert {kubernetes.kubectl("logs", pod["metadata"]["name"]).splitlines()[-1] for pod in pods} == {"node 0 of 2", "node 1 of 2"}
    api.delete_namespaced_custom_object(**where, name="pair")


def test_a_cluster_without_operators(kubernetes: Cluster) -> None:
    kubernetes.remove_operators()
    try:
        assert "the server could not find the requested resource" in kubernetes.kubectl("get", "pytorchjobs", code=1)
    finally:
        kubernetes.install_operators()
    assert "pytorchjob" in kubernetes.kubectl("api-resources", "--api-group", "kubeflow.org")


def test_a_user_without_rights(kubernetes: Cluster) -> None:
    config = kubernetes.write_user("nobody")
    done = subprocess.run(["kubectl", "--kubeconfig", str(config), "get", "pytorchjobs"], capture_output=True, text=True)
    assert 'User "nobody" cannot list resource "pytorchjobs"' in done.stderr
