"""A pod on the stand-in kubelet: its volumes, containers and status, from its start to its removal."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.chaos.hosts import Host
from tests.system.cluster_api import ApiError, Object, now, pods_path, record_event
from tests.system.kubelet_container import Container, Mount, container_command
from tests.system.kubelet_volumes import NotReady, container_env, container_mounts, make_volumes

if TYPE_CHECKING:
    from tests.system.kubelet import Kubelet

RESTART_SECONDS = 1.0
RETRY_SECONDS = 0.3
IMAGE_USER = 1000
"""The user and group of an image of `drivetrain image build`."""


class RunningPod:
    """Runs in a thread of its own until the pod has ended."""

    def __init__(self, kubelet: Kubelet, pod: Object) -> None:
        self.kubelet, self.pod = kubelet, pod
        metadata = pod["metadata"]
        self.namespace, self.name, self.uid = metadata["namespace"], metadata["name"], metadata["uid"]
        self.folder = kubelet.folder / "pods" / self.uid
        self.folder.mkdir(parents=True)
        self.hosts_file = self.folder / "hosts"
        self.hosts_file.touch()
        self.host: Host | None = None
        self.containers: dict[str, Container] = {}
        """The newest container of each name."""
        self.statuses: dict[str, dict[str, Any]] = {}
        self.has_ended = False
        self._must_end, self._grace = threading.Event(), 0.0
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self, seconds: float) -> None:
        """The pod was deleted: its containers may take so long to end. Then it is removed."""
        if self._must_end.is_set():
            return
        self._grace = seconds
        self._must_end.set()
        threading.Thread(target=self._stop_and_forget, daemon=True).start()

    def kill(self) -> None:
        self._grace = 0.0
        self._must_end.set()
        for container in list(self.containers.values()):
            container.stop(0)
        self._thread.join(10)

    def write_hosts(self, text: str) -> None:
        """Writes /etc/hosts in place, because it is mounted in the containers, and only if it differs."""
        data = text.encode()
        if self.hosts_file.read_bytes() != data:
            with open(self.hosts_file, "r+b", buffering=0) as file:
                file.write(data)
                file.truncate()

    # --- the thread ---

    def _run(self) -> None:
        phase = "Failed"
        try:
            phase = self._start_and_wait()
        except _Ended:
            pass
        finally:
            self.has_ended = True
            self._give_back_host()
        self._write_status(phase)

    def _stop_and_forget(self) -> None:
        deadline = time.monotonic() + self._grace
        for container in list(self.containers.values()):
            container.stop(max(0.0, deadline - time.monotonic()))
        self._thread.join(self._grace + 10)
        self.kubelet.forget(self.pod)

    def _start_and_wait(self) -> str:
        spec = self.pod["spec"]
        volumes = self._patiently(lambda: make_volumes(self.kubelet.api, self.pod, self.folder / "volumes", self.kubelet.folder / "claims"))
        self.host = self._patiently(self._take_host)
        self.kubelet.write_hosts()
        for container in spec.get("initContainers", ()):
            while (code := self._run_container(container, volumes, "Pending")) != 0:
                if spec.get("restartPolicy", "Always") == "Never":
                    return "Failed"
                self._restart_later(container, code)
        (container,) = spec["containers"]
        while True:
            code = self._run_container(container, volumes, "Running")
            policy = spec.get("restartPolicy", "Always")
            if policy == "Never" or (policy == "OnFailure" and code == 0):
                return "Succeeded" if code == 0 else "Failed"
            self._restart_later(container, code)

    def _patiently(self, action: Any) -> Any:
        """Repeats an action until what it needs is there, and writes meanwhile why the pod waits."""
        written = ""
        while True:
            self._check_end()
            try:
                return action()
            except NotReady as missing:
                if str(missing) != written:
                    written = str(missing)
                    for container in self._all_containers():
                        is_config = missing.reason.endswith("Error")
                        self._set_state(
                            container["name"],
                            waiting={
                                "reason": missing.reason if is_config else "ContainerCreating",
                                "message": written if is_config else "",
                            },
                        )
                    self._write_status("Pending")
                    record_event(
                        self.kubelet.api,
                        self.pod,
                        "Pod",
                        "Failed" if missing.reason.endswith("Error") else missing.reason,
                        written,
                        "kubelet",
                        True,
                    )
                time.sleep(RETRY_SECONDS)

    def _check_end(self) -> None:
        if self._must_end.is_set():
            raise _Ended

    def _take_host(self) -> Host:
        with self.kubelet.lock:
            if not self.kubelet.free_hosts:
                raise NotReady("FailedCreatePodSandBox", "the stand-in kubelet has no free address")
            return self.kubelet.free_hosts.pop()

    def _give_back_host(self) -> None:
        host, self.host = self.host, None
        if host is not None:
            with self.kubelet.lock:
                self.kubelet.free_hosts.insert(0, host)  # the last one to be used again

    # --- containers ---

    def _all_containers(self) -> list[Object]:
        return [*self.pod["spec"].get("initContainers", ()), *self.pod["spec"]["containers"]]

    def _run_container(self, spec: Object, volumes: dict[str, Mount], phase: str) -> int:
        """Runs a container to its end; returns its exit code."""
        self._pull(spec)
        assert self.host is not None
        address = self.host.address
        env = self._patiently(lambda: container_env(self.kubelet.api, self.pod, spec, address))
        security = self.pod["spec"].get("securityContext", {}) | spec.get("securityContext", {})
        user, group = security.get("runAsUser", IMAGE_USER), security.get("runAsGroup", IMAGE_USER)
        if user:
            env["HOME"] = next((variable["value"] for variable in spec.get("env", ()) if variable["name"] == "HOME"), "/")
        groups = [*security.get("supplementalGroups", ()), *([security["fsGroup"]] if "fsGroup" in security else [])]
        number = self.statuses.get(spec["name"], {}).get("restartCount", 0)
        container = Container(
            spec["name"], self.host, self.pod["spec"].get("hostname") or self.name, self.folder / f"{spec['name']}-{number}", container_command(spec, env),
            env, container_mounts(spec, volumes), self.hosts_file, spec.get("workingDir", ""), user, group, groups,
        )  # fmt: skip
        self.containers[spec["name"]] = container
        if self._must_end.is_set():  # deleted while it started
            container.stop(0)
        self._set_state(spec["name"], running={"startedAt": container.started})
        self._write_status(phase)
        record_event(self.kubelet.api, self.pod, "Pod", "Started", f"Started container {spec['name']}", "kubelet")
        code = container.wait()
        ended = {
            "exitCode": code,
            "reason": "Completed" if code == 0 else "Error",
            "startedAt": container.started,
            "finishedAt": now(),
            "containerID": f"containerd://{self.uid}-{number}",
        }
        self._set_state(spec["name"], terminated=ended)
        return code

    def _pull(self, spec: Object) -> None:
        """Waits with the messages of a container runtime until the image can be pulled."""
        image, first = spec["image"], True
        while not self.kubelet.images(image):
            self._check_end()
            message = f'failed to pull and unpack image "{image}": failed to resolve reference "{image}": {image}: not found'
            if first:
                record_event(self.kubelet.api, self.pod, "Pod", "Pulling", f'Pulling image "{image}"', "kubelet")
                record_event(
                    self.kubelet.api,
                    self.pod,
                    "Pod",
                    "Failed",
                    f'Failed to pull image "{image}": rpc error: code = NotFound desc = {message}',
                    "kubelet",
                    True,
                )
                self._set_state(spec["name"], waiting={"reason": "ErrImagePull", "message": f"rpc error: code = NotFound desc = {message}"})
            else:
                self._set_state(spec["name"], waiting={"reason": "ImagePullBackOff", "message": f'Back-off pulling image "{image}"'})
            self._write_status("Pending")
            time.sleep(RETRY_SECONDS)
            first = False

    def _restart_later(self, spec: Object, code: int) -> None:
        status = self.statuses[spec["name"]]
        status["lastState"] = status["state"]
        waiting = {"reason": "CrashLoopBackOff", "message": f"back-off 10s restarting failed container={spec['name']} pod={self.name}"}
        self._set_state(spec["name"], waiting=waiting)
        self._write_status("Running")
        if code != 0:
            record_event(self.kubelet.api, self.pod, "Pod", "BackOff", "Back-off restarting failed container", "kubelet", True)
        self._must_end.wait(RESTART_SECONDS)
        self._check_end()
        status["restartCount"] += 1

    # --- the status ---

    def _set_state(self, name: str, **state: Any) -> None:
        spec = next(container for container in self._all_containers() if container["name"] == name)
        status = self.statuses.setdefault(
            name,
            {
                "name": name,
                "image": spec["image"],
                "imageID": "",
                "restartCount": 0,
                "lastState": {},
                "containerID": f"containerd://{self.uid}",
            },
        )
        status |= {"state": state, "ready": "running" in state, "started": "running" in state}

    def _write_status(self, phase: str) -> None:
        names = {container["name"] for container in self.pod["spec"]["containers"]}
        is_ready = phase == "Running" and all(status["ready"] for name, status in self.statuses.items() if name in names)
        ready = {"status": "True" if is_ready else "False", "lastTransitionTime": now()}
        conditions = [{"type": kind, **ready} for kind in ("Ready", "ContainersReady")]
        conditions += [{"type": "PodScheduled", "status": "True", "lastTransitionTime": now()}]
        status: dict[str, Any] = {
            "phase": phase, "conditions": conditions, "hostIP": "127.0.0.1", "startTime": self.pod["metadata"]["creationTimestamp"],
            "containerStatuses": [status for name, status in self.statuses.items() if name in names],
            "initContainerStatuses": [status for name, status in self.statuses.items() if name not in names] or None,
        }  # fmt: skip
        if self.host is not None:
            status |= {"podIP": self.host.address, "podIPs": [{"ip": self.host.address}]}
        try:
            self.kubelet.api.patch(pods_path(self.namespace, self.name, "status"), {"metadata": {"uid": self.uid}, "status": status})
        except (ApiError, OSError):
            pass  # the pod was deleted, and there may be another one of its name

    def log(self, container: str) -> tuple[Path, Container] | None:
        """Returns the file of a container's lines, and the container."""
        found = self.containers.get(container)
        return (found.log, found) if found is not None else None


class _Ended(Exception):
    """The pod was deleted before its containers ran."""
