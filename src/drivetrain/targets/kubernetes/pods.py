"""Commands and files in pods: the program of `host/program.py` through `kubectl exec`, folders as tar streams."""

from __future__ import annotations

import contextlib
import fnmatch
import re
import secrets
import shutil
import subprocess
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivetrain.outcomes import Outcome, Problem
from drivetrain.targets.errors import NO_FOLDER, FolderMissing
from drivetrain.targets.host.connection import ReachableHost
from drivetrain.targets.kubernetes import names
from drivetrain.targets.kubernetes.failures import explain_kubectl, explain_pod
from drivetrain.targets.kubernetes.kubectl import Kubectl
from drivetrain.targets.kubernetes.pod_template import CONTAINER_SECURITY, RUNS, Image
from drivetrain.targets.record import RECORD

NOT_PULLED = (RECORD, f".{RECORD}.lock", "code.tar.gz", "job", "lock")
"""The run's record, and what belongs to this machine."""
FILES_CONTAINER = "files"
START_SECONDS, FILES_SECONDS = 180.0, 3600
POLL_SECONDS = 0.5
FINAL_REASONS = {"ErrImageNeverPull", "InvalidImageName"}
"""What waiting does not change."""


@dataclass(frozen=True)
class PodHost(ReachableHost):
    """A pod of a run."""

    kubectl: Kubectl | None = None
    pod: str = ""
    container: str = ""
    title: str = ""
    """How messages name it, if not as the pod."""

    @property
    def name(self) -> str:
        return self.title or self.pod

    @property
    def is_local(self) -> bool:
        return False

    @property
    def cluster(self) -> Kubectl:
        assert self.kubectl is not None
        return self.kubectl

    def command(self) -> list[str]:
        return self.cluster.exec_words(self.pod, self.container, super().command())

    def problem(self, output: str, code: int) -> Problem:
        if "no Python 3.11" in output:
            return Problem(f"{self.name}: its image has no Python 3.11 or later: build one with drivetrain image build")
        if re.search(r"tar: .*(?:Cannot open|Cannot chdir|No such file)", output):
            return FolderMissing(f"{self.name}: {NO_FOLDER} any more: what was copied before is in runs/ here", Outcome.INFRA)
        problem = explain_kubectl(self.cluster.target, output, code)
        return Problem(str(problem), Outcome.INFRA)

    def fetch_folder(self, there: str, here: Path) -> None:
        """Copies a folder of the pod here, as far as its files differ."""
        process = self.cluster.start(self._words("tar", "-C", there, "-cf", "-", "."), subprocess.DEVNULL, subprocess.PIPE)
        assert process.stdout is not None and process.stderr is not None
        is_whole = True
        try:
            with tarfile.open(fileobj=process.stdout, mode="r|") as archive:
                for entry in archive:
                    _unpack(archive, entry, here)
        except tarfile.TarError:
            is_whole = False
        shutil.copyfileobj(process.stdout, _Nowhere())
        errors = process.stderr.read().decode(errors="replace")
        code = process.wait()
        # tar ends with 1 if a file grew while it was read
        if code > 1 or not is_whole:
            raise self.problem(errors, code)

    def send_folder(self, here: Path, there: str, filters: Sequence[str]) -> None:
        process = self.cluster.start(
            self.cluster.exec_words(self.pod, self.container, ["tar", "-C", there, "-xf", "-"]), subprocess.PIPE, subprocess.DEVNULL
        )
        assert process.stdin is not None and process.stderr is not None
        with contextlib.suppress(BrokenPipeError), process.stdin, tarfile.open(fileobj=process.stdin, mode="w|") as archive:
            for path in sorted(here.rglob("*")):
                relative = path.relative_to(here).as_posix()
                if path.is_file() and not path.is_symlink() and is_sent(f"/{relative}", filters):
                    archive.add(path, relative, recursive=False, filter=_without_owner)
        errors = process.stderr.read().decode(errors="replace")
        if code := process.wait():
            raise self.problem(errors, code)

    def _words(self, *words: str) -> list[str]:
        return self.cluster.exec_words(self.pod, self.container, words, stdin=False)


class _Nowhere:
    def write(self, data: bytes) -> int:
        return len(data)


def _without_owner(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


def is_sent(path: str, filters: Sequence[str]) -> bool:
    """Whether a file is copied with these options of rsync: --include=PATTERN and --exclude=PATTERN, the first that fits."""
    parents = ["/".join(path.split("/")[:depth]) for depth in range(2, path.count("/") + 2)]
    for text in filters:
        option, _, pattern = text.partition("=")
        if any(parent.count("/") == pattern.count("/") and fnmatch.fnmatchcase(parent, pattern) for parent in parents):
            return option == "--include"
    return True


def _unpack(archive: tarfile.TarFile, entry: tarfile.TarInfo, folder: Path) -> None:
    """Writes a file of the pod below `folder`; nothing else: no links, and nothing that belongs to this machine."""
    name = entry.name.removeprefix("./")
    if not entry.isfile() or name.split("/")[0] in NOT_PULLED:
        return
    if "checkpoints" in name.split("/") and _is_here(folder / name, entry):
        return
    entry = entry.replace(name=name, mode=0o644, deep=False)
    archive.extract(entry, folder, filter="data")


def _is_here(path: Path, entry: tarfile.TarInfo) -> bool:
    """Whether a file of a checkpoint, which never changes, was copied before."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return status.st_size == entry.size and int(status.st_mtime) == int(entry.mtime)


def on_each(hosts: Sequence[PodHost], action: Any) -> list[Any]:
    """Runs an action on all pods at once; raises the first Problem."""
    with ThreadPoolExecutor(max_workers=max(1, min(16, len(hosts)))) as pool:
        return list(pool.map(action, hosts))


# --- a pod that only reads or writes a volume ---------------------------------------------------


def files_pod(image: Image, claim: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a pod that waits, with a PersistentVolumeClaim at the place where runs have it. `settings`: fields of its spec."""
    container = {
        "name": FILES_CONTAINER, "image": image.name, **({"imagePullPolicy": image.pull_policy} if image.pull_policy else {}), "command": ["python3", "-c", f"import time; time.sleep({FILES_SECONDS})"],
        "securityContext": CONTAINER_SECURITY, "volumeMounts": [{"name": "files", "mountPath": RUNS}],
    }  # fmt: skip
    volumes = [{"name": "files", "persistentVolumeClaim": {"claimName": claim}}]
    spec = {
        **settings, "restartPolicy": "Never", "activeDeadlineSeconds": FILES_SECONDS, "terminationGracePeriodSeconds": 0, "containers": [container],
        "volumes": volumes,
    }  # fmt: skip
    metadata = {"name": f"drivetrain-files-{secrets.token_hex(4)}", "labels": names.own_labels() | {names.ROLE_LABEL: "files"}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


@contextlib.contextmanager
def volume(kubectl: Kubectl, image: Image, claim: str, settings: Mapping[str, Any]) -> Iterator[PodHost]:
    """Starts a pod on a volume, and deletes it afterwards."""
    pod = files_pod(image, claim, settings)
    path = f"/api/v1/namespaces/{kubectl.namespace}/pods"
    name = pod["metadata"]["name"]
    kubectl.create(path, pod)
    try:
        _wait_until_running(kubectl, f"{path}/{name}", image.name, claim)
        yield PodHost(None, kubectl, name, FILES_CONTAINER, f"the volume {claim}")
    finally:
        with contextlib.suppress(Problem):
            kubectl.delete(f"{path}/{name}")


def _wait_until_running(kubectl: Kubectl, path: str, image: str, claim: str) -> None:
    deadline, reason = time.monotonic() + START_SECONDS, "it did not start"
    while time.monotonic() < deadline:
        status = kubectl.get(path).get("status") or {}
        if status.get("phase") == "Running":
            return
        waits = [entry.get("state", {}).get("waiting") or {} for entry in status.get("containerStatuses") or []]
        waits += [
            entry for entry in status.get("conditions") or [] if entry.get("type") == "PodScheduled" and entry.get("status") == "False"
        ]
        if texts := [(str(entry.get("reason") or ""), str(entry.get("message") or "")) for entry in waits if entry.get("message")]:
            reason = explain_pod(*texts[0], image, kubectl.target)
            if FINAL_REASONS & {word for word, _ in texts}:
                break
        time.sleep(POLL_SECONDS)
    raise Problem(f"{kubectl.target}: the pod that reads the volume {claim} does not run: {reason}", Outcome.INFRA)
