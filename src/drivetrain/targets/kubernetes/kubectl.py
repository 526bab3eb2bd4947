"""The only module that starts kubectl: the user's own program, with its configuration and login. No shell reads any word."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import IO, Any

from drivetrain.outcomes import Outcome, Problem
from drivetrain.targets.errors import Unsure
from drivetrain.targets.kubernetes.failures import AlreadyExists, NotFound, explain_kubectl

PROGRAM_VARIABLE = "DRIVETRAIN_KUBECTL"
"""Names another program than `kubectl`, such as oc."""
SECONDS = 30
CHECKS = "?dryRun=All&fieldValidation=Strict"


@dataclass(frozen=True)
class Kubectl:
    """A cluster, as kubectl reaches it."""

    target: str
    """The target's name, for messages."""
    context: str | None = None
    chosen_namespace: str | None = None

    @property
    def words(self) -> list[str]:
        """Returns the first words of every command."""
        program = os.environ.get(PROGRAM_VARIABLE) or "kubectl"
        return [program, *([f"--context={self.context}"] if self.context else [])]

    @cached_property
    def namespace(self) -> str:
        """The namespace of the settings, else that of the context."""
        if self.chosen_namespace is not None:
            return self.chosen_namespace
        return self.run("config", "view", "--minify", "--output=jsonpath={..namespace}").strip() or "default"

    def run(self, *words: str, stdin: bytes = b"", seconds: float = SECONDS) -> str:
        """Runs a command of kubectl; returns what it prints, or raises the problem with its fix."""
        try:
            done = subprocess.run(
                [*self.words, f"--request-timeout={seconds:.0f}s", *words], input=stdin, capture_output=True, timeout=2 * seconds
            )
        except FileNotFoundError:
            raise self.missing() from None
        except subprocess.TimeoutExpired:
            raise Unsure(
                f"{self.target}: kubectl did not answer within {2 * seconds:.0f} s: is the network or VPN up?", Outcome.INFRA
            ) from None
        if done.returncode:
            raise explain_kubectl(self.target, done.stderr.decode(errors="replace"), done.returncode)
        return done.stdout.decode(errors="replace")

    def missing(self) -> Problem:
        return Problem(
            f"there is no {self.words[0]} on this machine: install kubectl, and copy your cluster's kubeconfig to ~/.kube/config"
        )

    def get(self, path: str, **query: str) -> dict[str, Any]:
        """Returns an object, or a list of objects."""
        from urllib.parse import urlencode

        value = json.loads(self.run("get", "--raw", f"{path}?{urlencode(query)}" if query else path))
        return value if isinstance(value, dict) else {}

    def items(self, path: str, **query: str) -> list[dict[str, Any]]:
        return list(self.get(path, **query).get("items") or [])

    def find(self, path: str) -> dict[str, Any] | None:
        """Returns an object; None if there is none."""
        try:
            return self.get(path)
        except NotFound:
            return None

    def check(self, path: str, value: Mapping[str, Any]) -> None:
        """Asks the cluster whether it would create an object, and whether it knows each of its fields."""
        self.run("create", "--raw", f"{path}{CHECKS}", "--filename=-", stdin=json.dumps(value).encode())

    def create(self, path: str, value: Mapping[str, Any]) -> dict[str, Any]:
        """Creates an object; its content goes through stdin only."""
        answer = json.loads(self.run("create", "--raw", path, "--filename=-", stdin=json.dumps(value).encode()))
        return answer if isinstance(answer, dict) else {}

    def delete(self, path: str) -> bool:
        """Deletes an object and what belongs to it; returns whether it was there."""
        try:
            self.run("delete", "--raw", f"{path}?propagationPolicy=Background")
        except NotFound:
            return False
        return True

    def own(self, kind: str, name: str, owner: Mapping[str, Any]) -> None:
        """Makes an object belong to a job, so that the cluster deletes it with the job."""
        metadata = owner["metadata"]
        reference = {"apiVersion": owner["apiVersion"], "kind": owner["kind"], "name": metadata["name"], "uid": metadata["uid"]}
        patch = json.dumps({"metadata": {"ownerReferences": [reference]}})
        self.run(f"--namespace={self.namespace}", "patch", kind, name, "--type=merge", f"--patch={patch}")

    def may(self, verb: str, group: str, resource: str, subresource: str = "") -> bool:
        """Asks the cluster whether this user may do something in the namespace."""
        attributes = {"namespace": self.namespace, "verb": verb, "group": group, "resource": resource, "subresource": subresource}
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        }
        answer = self.create("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", review)
        return bool((answer.get("status") or {}).get("allowed"))

    def events(self, names: Iterable[str]) -> list[dict[str, Any]]:
        """Returns the events of the objects with these names, oldest first."""
        path = f"/api/v1/namespaces/{self.namespace}/events"
        events = [event for name in names for event in self.items(path, fieldSelector=f"involvedObject.name={name}")]
        return sorted(events, key=lambda event: str(event.get("lastTimestamp") or event.get("eventTime") or ""))

    # --- commands in pods ---

    def exec_words(self, pod: str, container: str, words: Sequence[str], stdin: bool = True) -> list[str]:
        """Returns the command that runs another one in a pod. Its words travel as a list."""
        return [
            *self.words, f"--namespace={self.namespace}", "exec", *(["--stdin"] if stdin else []), f"--container={container}", pod, "--", *words,
        ]  # fmt: skip

    def exec(self, pod: str, container: str, words: Sequence[str], seconds: float = SECONDS) -> str:
        """Runs a command in a pod and returns what it prints."""
        return self._exec(self.exec_words(pod, container, words, stdin=False), seconds)

    def _exec(self, words: Sequence[str], seconds: float) -> str:
        try:
            done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds)
        except FileNotFoundError:
            raise self.missing() from None
        except subprocess.TimeoutExpired:
            raise Problem(f"{self.target}: a pod did not answer within {seconds:.0f} s", Outcome.INFRA) from None
        if done.returncode:
            raise explain_kubectl(self.target, done.stderr.decode(errors="replace"), done.returncode)
        return done.stdout.decode(errors="replace")

    def start(self, words: Sequence[str], stdin: int | IO[bytes], stdout: int | IO[bytes]) -> subprocess.Popen[bytes]:
        """Starts a command of `exec_words`."""
        try:
            return subprocess.Popen(words, stdin=stdin, stdout=stdout, stderr=subprocess.PIPE)
        except FileNotFoundError:
            raise self.missing() from None

    def logs(self, pod: str, container: str) -> bytes:
        """Returns what a pod's container has printed."""
        words = [*self.words, f"--request-timeout={SECONDS}s", f"--namespace={self.namespace}", "logs", f"--container={container}", pod]
        try:
            return subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=2 * SECONDS).stdout
        except (OSError, subprocess.TimeoutExpired):
            return b""


__all__ = ["AlreadyExists", "Kubectl", "NotFound"]
