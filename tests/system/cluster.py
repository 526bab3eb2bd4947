"""A Kubernetes cluster on this machine: real API servers, with stand-ins for all that acts on their objects.

Real are etcd, kube-apiserver 1.20 and, behind its aggregation layer, apiextensions-apiserver 1.36 with the resources of Kubeflow's training
operator (PyTorchJob) and Trainer (TrainJob, ClusterTrainingRuntime), which validates each field. Stand-ins are the two operators
(`operator.py`), and scheduler, kubelets and container runtimes (`kubelet.py`).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from drivetrain.chaos.hosts import hosts
from drivetrain.outcomes import Problem
from tests.launching import free_port
from tests.system.cluster_api import Api, Object, pods_path
from tests.system.kubelet import Kubelet
from tests.system.kubelet_server import KubeletServer
from tests.system.operator import Operator
from tests.waiting import wait_until

PARTS = Path(os.environ.get("DRIVETRAIN_TEST_PARTS", Path(__file__).resolve().parents[3] / "shared")) / "kubernetes"
PROGRAMS = ("etcd", "kubectl", "openssl", "curl", "xz", "ip", "unshare", "nsenter")
NUM_ADDRESSES = 8
GROUPS = {"kubeflow.org": "v1", "trainer.kubeflow.org": "v1alpha1"}
AGGREGATION = (
    "--requestheader-client-ca-file=ca.crt", "--requestheader-username-headers=X-Remote-User", "--requestheader-group-headers=X-Remote-Group",
    "--requestheader-extra-headers-prefix=X-Remote-Extra-", "--proxy-client-cert-file=c.crt", "--proxy-client-key-file=c.key",
)  # fmt: skip
RUNTIME = """\
apiVersion: trainer.kubeflow.org/v1alpha1
kind: ClusterTrainingRuntime
metadata: {name: torch-distributed, labels: {trainer.kubeflow.org/framework: torch}}
spec:
  mlPolicy: {numNodes: 1, torch: {numProcPerNode: auto}}
  template:
    spec:
      replicatedJobs:
      - name: node
        template:
          metadata: {labels: {trainer.kubeflow.org/trainjob-ancestor-step: trainer}}
          spec: {template: {spec: {containers: [{name: node, image: pytorch/pytorch, command: [echo, no command]}]}}}
"""


class Cluster:
    """The API servers and the stand-ins; `kubeconfig` is the administrator's."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.port = folder, port
        self.kubeconfig = folder / "core.kubeconfig"
        self.api: Api
        self.kubelet: Kubelet
        self.operator: Operator

    def kubectl(self, *words: str, code: int = 0, stdin: str | None = None) -> str:
        done = subprocess.run(
            ("kubectl", "--kubeconfig", str(self.kubeconfig), *words), capture_output=True, text=True, timeout=120, input=stdin
        )
        assert done.returncode == code, f"kubectl {' '.join(words)}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def pods(self, **labels: str) -> list[Object]:
        selector = ",".join(f"{name}={value}" for name, value in labels.items())
        return self.api.items("/api/v1/pods", **({"labelSelector": selector} if selector else {}))

    def remove_operators(self) -> None:
        """Makes the cluster one in which neither the training operator nor Trainer is installed."""
        for group, version in GROUPS.items():
            self.api.delete(f"/apis/apiregistration.k8s.io/v1/apiservices/{version}.{group}")
        self._wait_for_groups(False)

    def install_operators(self, *groups: str) -> None:
        for group in groups or tuple(GROUPS):
            self.api.create("/apis/apiregistration.k8s.io/v1/apiservices", _api_service(group, GROUPS[group], self.port + 2))
        self._wait_for_groups(True, *groups)

    def _wait_for_groups(self, is_there: bool, *groups: str) -> None:
        for group in groups or tuple(GROUPS):
            path = f"/apis/{group}/{GROUPS[group]}"
            wait_until(lambda path=path: (self.api.find(path) is not None) == is_there, f"{path}: {is_there}", 60)

    def add_claim(self, name: str, namespace: str = "default") -> None:
        """Makes a PersistentVolumeClaim that is bound: the stand-in kubelets have a folder for it."""
        path = f"/api/v1/namespaces/{namespace}/persistentvolumeclaims"
        spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
        self.api.create(path, {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": spec})
        self.api.patch(f"{path}/{name}/status", {"status": {"phase": "Bound", "accessModes": spec["accessModes"]}})

    def remove_objects(self, namespace: str = "default") -> None:
        """Deletes all jobs and pods, at once, and the config maps and secrets of runs."""
        for group, kind in (("kubeflow.org", "pytorchjobs"), ("trainer.kubeflow.org", "trainjobs")):
            for job in self.api.items(f"/apis/{group}/{GROUPS[group]}/namespaces/{namespace}/{kind}"):
                self.api.delete(f"/apis/{group}/{GROUPS[group]}/namespaces/{namespace}/{kind}/{job['metadata']['name']}")
        pods = lambda: self.api.items(pods_path(namespace))  # noqa: E731
        for pod in pods():
            self.api.delete(pods_path(namespace, pod["metadata"]["name"]), gracePeriodSeconds=0)
        for kind in ("configmaps", "secrets"):
            for item in self.api.items(f"/api/v1/namespaces/{namespace}/{kind}", labelSelector="app.kubernetes.io/managed-by"):
                self.api.delete(f"/api/v1/namespaces/{namespace}/{kind}/{item['metadata']['name']}")
        wait_until(lambda: not pods(), "the end of all pods", 60)

    @contextlib.contextmanager
    def changed_schema(self, resource: str, missing: str) -> Iterator[None]:
        """Makes the operator one of an earlier version: the spec of its resource has one field less."""
        servers = Api(f"https://127.0.0.1:{self.port + 2}", *certificates(self.folder))
        path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{resource}"
        before = servers.get(path)
        changed = json.loads(json.dumps(before))
        for version in changed["spec"]["versions"]:
            del version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"][missing]
        self._replace(servers, path, changed)
        try:
            yield
        finally:
            self._replace(servers, path, before)

    @staticmethod
    def _replace(servers: Api, path: str, definition: Object) -> None:
        definition["metadata"]["resourceVersion"] = servers.get(path)["metadata"]["resourceVersion"]
        servers.call("PUT", path, definition)
        time.sleep(1)  # the server takes a changed schema a moment later

    def write_user(self, name: str) -> Path:
        """Returns the kubeconfig of a new user, who may do nothing."""
        folder, config = self.folder, self.folder / f"{name}.kubeconfig"
        run = lambda *words: subprocess.run(("openssl", *words), cwd=folder, check=True, capture_output=True)  # noqa: E731
        run("req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        run(
            "x509",
            "-req",
            "-in",
            f"{name}.csr",
            "-CA",
            "ca.crt",
            "-CAkey",
            "ca.key",
            "-CAcreateserial",
            "-days",
            "30",
            "-extfile",
            "ce",
            "-out",
            f"{name}.crt",
        )
        config.write_text(self.kubeconfig.read_text().replace("/c.crt", f"/{name}.crt").replace("/c.key", f"/{name}.key"))
        return config


def certificates(folder: Path) -> list[str]:
    """Returns the administrator's certificate and key, and the authority's certificate."""
    return [str(folder / name) for name in ("c.crt", "c.key", "ca.crt")]


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Starts a cluster with one node without GPUs; skips where that is not possible."""
    _check_parts()
    kubelet_port, started = free_port(), Cluster(folder, _free_ports())
    try:
        with hosts(NUM_ADDRESSES) as addresses:
            _start_servers(started)
            started.api = Api(f"https://127.0.0.1:{started.port + 1}", *certificates(folder))
            started.install_operators()
            started.api.create("/apis/trainer.kubeflow.org/v1alpha1/clustertrainingruntimes", yaml.safe_load(RUNTIME))
            server = KubeletServer(kubelet_port, folder / "s.crt", folder / "s.key")
            started.kubelet = Kubelet(started.api, folder, addresses, kubelet_port)
            started.operator = Operator(started.api)
            server.start(started.kubelet)
            started.kubelet.add_node("node-1")
            started.kubelet.start()
            started.operator.start()
            try:
                yield started
            finally:
                started.operator.close()
                started.kubelet.close()
                server.shutdown()
    except Problem as problem:
        pytest.skip(str(problem))
    finally:
        _stop_servers(folder)


def _check_parts() -> None:
    if not (PARTS / "up").is_file():
        pytest.skip(f"needs the API servers in {PARTS} (DRIVETRAIN_TEST_PARTS)")
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)} (tests/system/install)")
    if os.geteuid() != 0:
        pytest.skip("needs root, to run containers")


def _free_ports() -> int:
    """Returns a port after which four more are free."""
    while True:
        port = free_port()
        with contextlib.suppress(OSError, OverflowError):
            for number in range(1, 5):
                _bind(port + number)
            return port


def _bind(port: int) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", port))


def _start_servers(cluster: Cluster) -> None:
    """Starts the API servers; both again with the flags with which one stands behind the aggregation layer of the other."""
    folder = cluster.folder
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "up.log", "wb") as log:
        subprocess.run(
            ["bash", str(PARTS / "up"), str(folder), str(cluster.port)], check=True, stdout=log, stderr=log, stdin=subprocess.DEVNULL
        )
    etcd, core, resources = map(int, (folder / "pids").read_text().split())
    pids = [etcd, _restart(folder, core, *AGGREGATION).pid]
    (folder / "pids").write_text("\n".join(map(str, [*pids, resources])) + "\n")
    # It asks the main server what a user may do.
    pids.append(_restart(folder, resources, "--authorization-kubeconfig=core.kubeconfig").pid)
    (folder / "pids").write_text("\n".join(map(str, pids)) + "\n")
    ready = ("kubectl", "--kubeconfig", str(cluster.kubeconfig), "get", "--raw", "/readyz")
    wait_until(lambda: subprocess.run(ready, capture_output=True).returncode == 0, "the API server", 120)
    # What the aggregation layer passes on may not be defined in the main server too.
    cluster.kubectl("delete", "crd", "pytorchjobs.kubeflow.org")
    spec = {"type": "ExternalName", "externalName": "localhost", "ports": [{"port": cluster.port + 2}]}
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "operators"}, "spec": spec}
    cluster.kubectl("create", "--validate=false", "-f", "-", stdin=yaml.safe_dump(service))


def _restart(folder: Path, pid: int, *flags: str) -> subprocess.Popen[bytes]:
    """Starts a server again with further flags; of two values of a flag the last counts."""
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]
    _end(pid)
    with open(folder / f"{Path(words[0]).name}.log", "ab") as log:
        return subprocess.Popen([*words, *flags], cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def _api_service(group: str, version: str, port: int) -> Object:
    spec = {
        "group": group, "version": version, "groupPriorityMinimum": 1000, "versionPriority": 15, "insecureSkipTLSVerify": True,
        "service": {"name": "operators", "namespace": "default", "port": port},
    }  # fmt: skip
    return {"apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService", "metadata": {"name": f"{version}.{group}"}, "spec": spec}


def _stop_servers(folder: Path) -> None:
    if (folder / "pids").is_file():
        for pid in reversed((folder / "pids").read_text().split()):
            _end(int(pid))


def _end(pid: int) -> None:
    """Kills a server, which keeps nothing that is needed again, whether it is a child of this process or not."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
        wait_until(lambda: not Path(f"/proc/{pid}").exists(), f"the end of process {pid}", 30)
