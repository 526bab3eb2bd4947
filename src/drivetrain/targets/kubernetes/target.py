"""The target kubernetes: what it does with the objects of `specs.py`, all through `kubectl.py`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from drivetrain.buckets.fetch import copy_small_files, fetch
from drivetrain.buckets.store import Store
from drivetrain.buckets.url import parse as parse_bucket
from drivetrain.outcomes import EXIT_CODES, Outcome, Problem
from drivetrain.targets.base import MAX_SILENCE_SECONDS, RETRY_SECONDS, STOP_SECONDS, Check, JobState, Target, TargetSettings
from drivetrain.targets.errors import FolderMissing
from drivetrain.targets.kubernetes import checks, names, pods, specs
from drivetrain.targets.kubernetes import settings as parse
from drivetrain.targets.kubernetes.creating import create_all, nothing_started
from drivetrain.targets.kubernetes.ended import read_ended, write_ended
from drivetrain.targets.kubernetes.gpus import gpu_lines
from drivetrain.targets.kubernetes.jobs import KINDS, JobKind
from drivetrain.targets.kubernetes.kubectl import Kubectl
from drivetrain.targets.kubernetes.pod import ASKED, FETCHED
from drivetrain.targets.kubernetes.pod_template import RUNS, Image, fits_config_map
from drivetrain.targets.kubernetes.pods import PodHost, on_each
from drivetrain.targets.kubernetes.rendering import KubernetesRendering
from drivetrain.targets.kubernetes.settings import KubernetesSettings
from drivetrain.targets.kubernetes.states import PodState, event_line, has_started, pod_states, state_of
from drivetrain.targets.layout import Layout
from drivetrain.targets.local import job_state, secret_values
from drivetrain.targets.record import Record
from drivetrain.targets.submission import Submission
from drivetrain.targets.transfer import has_checkpoint, send_run

NEVER_STARTED = "it was stopped before a pod of it had started"
DELETE_SECONDS = 60.0
POLL_SECONDS = 1.0
NUM_EVENTS, MAX_PODS = 5, 16  # whose events `status` shows


class KubernetesTarget(Target):
    """A namespace of a Kubernetes cluster."""

    kind: ClassVar[str] = "kubernetes"
    settings_class: ClassVar[type[TargetSettings]] = KubernetesSettings
    settings: KubernetesSettings
    shares_files = False

    def __init__(self, name: str, settings: TargetSettings) -> None:
        super().__init__(name, settings)
        self._job_kind: JobKind | None = None

    @property
    def kubectl(self) -> Kubectl:
        return Kubectl(self.name, self.settings.context, self.settings.namespace)

    # --- knowledge ---

    def render(self, submission: Submission) -> KubernetesRendering:
        parse.check_settings(self.name, self.settings)
        try:
            return specs.make_rendering(self.name, self.settings, submission, self.job_kind())
        except checks.NoCluster as problem:
            note = f"a {KINDS['pytorchjob'].title} is shown, because the cluster cannot be asked which kind it has: {problem}"
            rendering = specs.make_rendering(self.name, self.settings, submission, KINDS["pytorchjob"])
            return KubernetesRendering(
                objects=rendering.objects,
                notes=(note, *rendering.notes),
                secret=rendering.secret,
                secret_variables=rendering.secret_variables,
            )

    def job_kind(self) -> JobKind:
        """Returns the kind of job of the settings, or the one that the cluster has."""
        if self.settings.job != "auto":
            return KINDS[self.settings.job]
        if self._job_kind is None:
            self._job_kind = checks.find_kind(self.kubectl)
        return self._job_kind

    # --- submit ---

    def submit(self, submission: Submission, rendering: Any, notice: Callable[[str], None]) -> dict[str, Any]:
        kind, kubectl = self.job_kind(), self.kubectl
        with nothing_started():
            self._remove_ended(kind, kubectl, names.job_name(submission.project, submission.name))
            objects = self._objects(submission, rendering, kind, kubectl)
            for path, value in objects:
                kubectl.check(path, value)
            if submission.code is not None and not fits_config_map(submission.code):
                self._store_code(submission, kind.image(rendering.job), notice)
        job = create_all(kubectl, objects)
        if rendering.secret:
            with contextlib.suppress(Problem):  # without the right to patch: `down` deletes it
                kubectl.own("secret", rendering.secret, job)
        if not specs.outlives_its_pods(self.settings):
            notice(specs.NO_VOLUME.format(keep=self.settings.keep))
        return self._handle(submission.project, submission.name, kind, kubectl.namespace, job)

    def _objects(
        self, submission: Submission, rendering: KubernetesRendering, kind: JobKind, kubectl: Kubectl
    ) -> list[tuple[str, Mapping[str, Any]]]:
        """Returns what is to be created, with its API paths: the Secret, the ConfigMap unless it is there, the job."""
        core = f"/api/v1/namespaces/{kubectl.namespace}"
        objects: list[tuple[str, Mapping[str, Any]]] = []
        if rendering.secret:
            labels = names.run_labels(submission.project, submission.name)
            secret = {
                "apiVersion": "v1", "kind": "Secret", "metadata": {"name": rendering.secret, "labels": labels}, "immutable": True,
                "stringData": secret_values(submission),
            }  # fmt: skip
            kubectl.delete(f"{core}/secrets/{rendering.secret}")
            objects.append((f"{core}/secrets", secret))
        for value in rendering.objects[:-1]:
            if kubectl.find(f"{core}/configmaps/{value['metadata']['name']}") is None:
                objects.append((f"{core}/configmaps", value))
        return [*objects, (kind.path(kubectl.namespace), rendering.job)]

    def _handle(self, project: str, run: str, kind: JobKind, namespace: str, job: Mapping[str, Any]) -> dict[str, Any]:
        place, name = Layout(RUNS, project, run), job["metadata"]["name"]
        return {
            "job": name, "uid": job["metadata"].get("uid", ""), "kind": kind.name, "namespace": namespace, "run_dir": place.run_dir, "waits": True,
            "project": project, "run": run, "bucket": specs.bucket_of(self.settings, project, run), "label": f"{self.name} ({kind.title} {namespace}/{name})",
            "image": list(kind.image(job)),
        }  # fmt: skip

    def _remove_ended(self, kind: JobKind, kubectl: Kubectl, name: str) -> None:
        """Deletes the job of an earlier submission of the run, which has ended."""
        path = kind.path(kubectl.namespace, name)
        job = kubectl.find(path)
        if job is None:
            return
        if kind.end(job) is None and "deletionTimestamp" not in job["metadata"]:
            raise Problem(f"{kind.title} {name} runs already: kubectl get {kind.plural} {name}")
        self._delete_job(kind, kubectl, name)

    def _delete_job(self, kind: JobKind, kubectl: Kubectl, name: str, seconds: float = DELETE_SECONDS) -> None:
        """Deletes a job with its pods; waits until they are gone, because the next job has pods of the same names."""
        kubectl.delete(kind.path(kubectl.namespace, name))
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if kubectl.find(kind.path(kubectl.namespace, name)) is None and not self._find_pods(kind, kubectl, name):
                return
            time.sleep(POLL_SECONDS)

    def _store_code(self, submission: Submission, image: Image, notice: Callable[[str], None]) -> None:
        """Copies code that no ConfigMap can hold to the volume of the settings."""
        assert submission.code is not None and self.settings.code_volume is not None
        checks.check_code_volume(self.kubectl, self.settings.code_volume)
        notice(f"copying the code ({len(submission.code.data) / 1e6:,.1f} MB) to the volume {self.settings.code_volume}")
        with self._volume(self.settings.code_volume, image) as host:
            host.call("store", data=submission.code.data, base=RUNS, digest=submission.code.digest, size=len(submission.code.data))

    def _volume(self, claim: str, image: Image) -> contextlib.AbstractContextManager[PodHost]:
        """Starts a pod on a volume, with the image of a run: the cluster has or finds that one."""
        settings = self.settings
        spec = {
            "serviceAccountName": settings.service_account,
            "imagePullSecrets": [{"name": settings.image_pull_secret}] if settings.image_pull_secret else [],
            "tolerations": [toleration.to_json() for toleration in parse.tolerations(self.name, settings)],
            "securityContext": parse.without_empty({"fsGroup": settings.fs_group or None, "seccompProfile": {"type": "RuntimeDefault"}}),
        }
        return pods.volume(self.kubectl, image, claim, parse.without_empty(spec))

    def bring_run(self, submission: Submission, notice: Callable[[str], None]) -> bool:
        if self.settings.runs_volume:
            with self._volume(self.settings.runs_volume, specs.image_of(self.settings, submission, self.job_kind())) as host:
                return send_run(host, submission, specs.layout(submission).run_dir, notice)
        if self.settings.bucket:
            return True
        if has_checkpoint(submission):
            raise Problem(
                f"{submission.run.name} has its checkpoints on this machine, and pods without a volume begin with nothing: set runs_volume: in the"
                f" target {self.name}, which sends them there"
            )
        return False

    def find_job(self, record: Record) -> dict[str, Any]:
        name = names.job_name(record.facts["project"], record.facts["name"])
        kind, kubectl = self.job_kind(), self.kubectl
        job = kubectl.find(kind.path(kubectl.namespace, name))
        return {} if job is None else self._handle(record.facts["project"], record.facts["name"], kind, kubectl.namespace, job)

    # --- ask ---

    def _recorded(self, record: Record) -> tuple[JobKind, Kubectl, str]:
        """Returns where a run's job is: its kind, its cluster and namespace, its name."""
        handle = record.handle
        return KINDS[handle["kind"]], Kubectl(self.name, self.settings.context, handle["namespace"]), handle["job"]

    def _find_pods(self, kind: JobKind, kubectl: Kubectl, name: str) -> list[dict[str, Any]]:
        return kubectl.items(f"/api/v1/namespaces/{kubectl.namespace}/pods", labelSelector=f"{kind.pod_label}={name}")

    def pods(self, record: Record) -> list[PodState]:
        kind, kubectl, name = self._recorded(record)
        return pod_states(self._find_pods(kind, kubectl, name), kind, self.name)

    def _hosts(self, record: Record, states: list[PodState]) -> list[tuple[PodHost, str]]:
        """Returns the pods in which commands can run, by rank, with the folders of their jobs."""
        kind, kubectl, _ = self._recorded(record)
        place = _layout(record)
        return [(PodHost(None, kubectl, pod.name, kind.container), place.job(pod.rank)) for pod in states if pod.is_ready]

    def state(self, record: Record) -> JobState:
        if (ended := read_ended(record)) is not None:
            return ended
        kind, kubectl, name = self._recorded(record)
        job = kubectl.find(kind.path(kubectl.namespace, name))
        if job is None or job["metadata"].get("uid", "") != record.handle["uid"]:
            return state_of(kind, None, [], [], self.name)
        states = pod_states(self._find_pods(kind, kubectl, name), kind, self.name)
        state = state_of(kind, job, states, kubectl.events([name]) if not states else [], self.name)
        if state.phase == "running" and not specs.outlives_its_pods(self.settings):
            return self._state_in_pod(record, states) or state
        return state

    def _state_in_pod(self, record: Record, states: list[PodState]) -> JobState | None:
        """Returns the end of a run whose pods stay so that its files can be fetched; None while it trains."""
        with contextlib.suppress(Problem):
            for host, job in self._hosts(record, states)[:1]:
                state = job_state(host.call("job_state", job=job))
                return state if state.phase == "ended" else None
        return None

    def mirror(self, record: Record, follow: bool) -> Iterator[str]:
        """Follows the first pod, which has the run's metrics; connects again after the connection broke or the pod was replaced."""
        deadline = time.monotonic() + MAX_SILENCE_SECONDS
        while True:
            hosts = [] if read_ended(record) is not None else self._hosts(record, self.pods(record))
            # Pods without a common volume have their own logs: all are asked in turn.
            in_turn = len(hosts) > 1 and not self.settings.runs_volume
            try:
                for host, job in hosts if in_turn else hosts[:1]:
                    yield from host.mirror(record.handle["run_dir"], record.run.path, [job], follow and not in_turn)
                deadline = time.monotonic() + MAX_SILENCE_SECONDS
            except ConnectionError as error:
                if not follow or time.monotonic() > deadline:
                    raise Problem(str(error), Outcome.INFRA) from None
                time.sleep(RETRY_SECONDS)
            yield ""
            if not follow or self.patient_state(record).phase in ("ended", "lost"):
                return
            time.sleep(POLL_SECONDS)

    def details(self, record: Record) -> Iterator[str]:
        if read_ended(record) is not None:
            return
        _, kubectl, name = self._recorded(record)
        states = self.pods(record)
        for pod in states:
            yield pod.line()
        ready = [pod.rank for pod in states if pod.is_ready]
        for rank, (host, _) in zip(ready, self._hosts(record, states), strict=True):
            yield from gpu_lines(host, rank, record.facts["request"].get("procs"))
        for event in kubectl.events([name, *(pod.name for pod in states[:MAX_PODS])])[-NUM_EVENTS:]:
            yield event_line(event)

    # --- end ---

    def stop(self, record: Record, seconds: float = STOP_SECONDS) -> None:
        """Asks the processes in the pods to save and end, brings home what only the pods have, and deletes the job."""
        kind, kubectl, name = self._recorded(record)
        if self.state(record).phase not in ("queued", "running"):
            return
        states = self.pods(record)
        is_new = not has_started(kubectl.find(kind.path(kubectl.namespace, name)), states)
        hosts = self._hosts(record, states)
        codes = on_each([host for host, _ in hosts], lambda host: _stop_pod(host, dict(hosts)[host], seconds)) if hosts else []
        with contextlib.suppress(FolderMissing):
            self._fetch(record, [host for host, _ in hosts])
        code = next((code for code in codes if code is not None), EXIT_CODES[Outcome.PREEMPTED])
        write_ended(record, JobState("ended", code, NEVER_STARTED if is_new else "it was stopped"))
        self._delete_job(kind, kubectl, name, seconds + DELETE_SECONDS)
        with contextlib.suppress(Problem):  # if it does not belong to the job: without the right to patch
            kubectl.delete(f"/api/v1/namespaces/{kubectl.namespace}/secrets/{names.secret_name(name)}")

    def pull(self, record: Record) -> None:
        """Copies the run from its pods; if they have ended, from its volume, else what they have printed."""
        state = self.state(record)
        if state.reason == NEVER_STARTED:
            raise FolderMissing(f"{record.run.name}: {NEVER_STARTED}: there is nothing to copy")
        states = [] if read_ended(record) is not None else self.pods(record)
        hosts = self._hosts(record, states)
        if hosts:
            self._fetch(record, [host for host, _ in hosts])
        elif self.settings.runs_volume:
            with self._volume(self.settings.runs_volume, specs.recorded_image(record.handle, self.settings)) as host:
                host.fetch_folder(record.handle["run_dir"], record.run.path)
        elif record.handle.get("bucket"):
            _fetch_from_bucket(record)
        elif states:
            self._fetch_logs(record, states)
        if state.phase == "ended":
            write_ended(record, state)
            for host, job in hosts:
                host.call("write", path=f"{job}/{FETCHED}", text="")

    def _fetch(self, record: Record, hosts: list[PodHost]) -> None:
        """Copies the run from the first pod, and from the others their logs, if they have folders of their own."""
        folder = record.handle["run_dir"]
        for host in hosts[:1]:
            host.fetch_folder(folder, record.run.path)
        for host in () if self.settings.runs_volume else hosts[1:]:
            host.fetch_folder(f"{folder}/logs", record.run.path / "logs")

    def _fetch_logs(self, record: Record, states: list[PodState]) -> None:
        """Writes what pods that have ended had printed; their files are gone with them."""
        kind, kubectl, _ = self._recorded(record)
        place = _layout(record)
        for pod in states:
            path = record.run.path / "logs" / Path(place.output(pod.rank)).name
            text = kubectl.logs(pod.name, kind.container)
            if len(text) > (path.stat().st_size if path.is_file() else 0):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(text)

    def down(self) -> str:
        return checks.remove_all(self.kubectl, self.settings)

    def reach(self) -> str:
        return checks.reach(self.kubectl, self.settings)

    def checks(self) -> Iterator[Check]:
        parse.check_settings(self.name, self.settings)
        yield from checks.all_checks(self.kubectl, self.settings)


def _fetch_from_bucket(record: Record) -> None:
    store = Store(parse_bucket(record.handle["bucket"], "bucket:"))
    if not fetch(store, record.run.path, lambda text: None):
        copy_small_files(store, record.run.path)


def _layout(record: Record) -> Layout:
    return Layout(RUNS, record.handle["project"], record.handle["run"])


def _stop_pod(host: PodHost, job: str, seconds: float) -> int | None:
    """Asks a pod's run to end, and the pod to stay until it is deleted; returns the run's exit code."""
    with contextlib.suppress(Problem):
        host.call("write", path=f"{job}/{ASKED}", text="")
        code = host.call("stop", job=job, grace=seconds).get("code")
        return int(code) if code is not None else None
    return None
