"""What a job, its pods and its events say about a run. Pure: values from the cluster's objects."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drivetrain.outcomes import Outcome, outcome_of_code
from drivetrain.targets.base import JobState
from drivetrain.targets.kubernetes.failures import PAST_DEADLINE, explain_pod
from drivetrain.targets.kubernetes.jobs import JobKind
from drivetrain.targets.kubernetes.restarts import code_of_run

GAVE_UP = (
    "it ended with code {code} ({outcome}) again and again, without a new checkpoint: drivetrain logs tell why, and resume tries again"
)
TERMINATING = "Terminating"
"""The phase of a pod that was deleted, and still has time to save."""


@dataclass(frozen=True)
class PodState:
    """One pod of a run."""

    name: str
    rank: int
    phase: str
    node: str = ""
    restarts: int = 0
    code: int | None = None
    """The exit code of a container that has ended."""
    reason: str = ""
    """Why it waits or has failed, with the fix."""
    is_ready: bool = False
    """Whether commands can run in its container."""

    def line(self) -> str:
        """Returns a line for `status`."""
        parts = [f"pod {self.rank}", self.name, self.phase.lower()]
        parts += [f"on {self.node}"] if self.node else []
        parts += [f"{self.restarts} restart{'s' * (self.restarts > 1)}"] if self.restarts else []
        return f"{'   '.join(parts)}{f': {self.reason}' if self.reason else ''}"


def pod_states(pods: Iterable[Mapping[str, Any]], kind: JobKind, target: str) -> list[PodState]:
    """Returns the pods by rank; of several pods of one rank the newest, as the operator replaces pods."""
    newest: dict[int, Mapping[str, Any]] = {}
    for pod in sorted(pods, key=lambda pod: str(pod["metadata"].get("creationTimestamp") or "")):
        newest[kind.rank(pod)] = pod
    return [_pod_state(pod, rank, kind.container, target) for rank, pod in sorted(newest.items())]


def _pod_state(pod: Mapping[str, Any], rank: int, container: str, target: str) -> PodState:
    status = pod.get("status") or {}
    found: Mapping[str, Any] = next((entry for entry in status.get("containerStatuses") or [] if entry.get("name") == container), {})
    state = found.get("state") or {}
    terminated, waiting = state.get("terminated") or {}, state.get("waiting") or {}
    pod_code = terminated.get("exitCode")
    code = None if pod_code is None else code_of_run(pod_code)
    image = _image(pod, container)
    reason = ""
    for word, message in _reasons(status, waiting, terminated, found.get("lastState") or {}):
        reason = explain_pod(word, message, image, target)
        break
    if code is not None and code != pod_code and not reason:
        reason = GAVE_UP.format(code=code, outcome=outcome_of_code(code))
    is_deleted = "deletionTimestamp" in pod["metadata"]
    return PodState(
        str(pod["metadata"]["name"]), rank, TERMINATING if is_deleted else str(status.get("phase") or "Pending"), str((pod.get("spec") or {}).get("nodeName") or ""),
        int(found.get("restartCount") or 0), code, reason, "running" in state and not is_deleted,
    )  # fmt: skip


def _image(pod: Mapping[str, Any], container: str) -> str:
    containers = (pod.get("spec") or {}).get("containers") or []
    return str(next((entry.get("image") for entry in containers if entry.get("name") == container), "") or "of the pod")


def _reasons(
    status: Mapping[str, Any], waiting: Mapping[str, Any], terminated: Mapping[str, Any], last: Mapping[str, Any]
) -> Iterable[tuple[str, str]]:
    """Yields what may be wrong with a pod, the most telling first: (reason, message)."""
    if status.get("reason"):  # Evicted, NodeLost, DeadlineExceeded
        yield str(status["reason"]), str(status.get("message") or "")
    if terminated.get("reason") and terminated["reason"] not in ("Completed", "Error"):
        yield str(terminated["reason"]), str(terminated.get("message") or "")
    if waiting.get("reason") and waiting["reason"] not in ("ContainerCreating", "PodInitializing"):
        earlier = (last.get("terminated") or {}).get("reason")
        yield (
            str(earlier if waiting["reason"] == "CrashLoopBackOff" and earlier == "OOMKilled" else waiting["reason"]),
            str(waiting.get("message") or ""),
        )
    for condition in status.get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            yield str(condition.get("reason") or ""), str(condition.get("message") or "")


def state_of(
    kind: JobKind, job: Mapping[str, Any] | None, pods: Sequence[PodState], events: Sequence[Mapping[str, Any]], target: str
) -> JobState:
    """Returns the state of a run; `events` are those of the job."""
    if job is None:
        return JobState("lost", None, "its job was deleted")
    end = kind.end(job)
    if end is not None:
        return _ended(end.is_success, end.reason, pods, target)
    waiting = [pod for pod in pods if pod.phase == "Pending"]
    if any(pod.phase == "Running" for pod in pods):
        return JobState("running", None, f"waits for pod {waiting[0].rank}: {waiting[0].reason}" if waiting and waiting[0].reason else "")
    return JobState("queued", None, _waiting_reason(kind, job, pods, events, target))


def has_started(job: Mapping[str, Any] | None, pods: Sequence[PodState]) -> bool:
    """Whether a container of a run has ever started: then its volume may have files of it."""
    conditions = ((job or {}).get("status") or {}).get("conditions") or []
    was_running = any(condition.get("type") in ("Running", "Restarting") for condition in conditions)
    return was_running or any(pod.is_ready or pod.restarts or pod.code is not None for pod in pods)


def _ended(is_success: bool, reason: str, pods: Sequence[PodState], target: str) -> JobState:
    if is_success:
        return JobState("ended", 0)
    if re.search(PAST_DEADLINE, reason):
        if any(pod.phase == TERMINATING for pod in pods):
            return JobState("running", None, "its deadline passed: it saves")
        return JobState("ended", Outcome.PREEMPTED.code, explain_pod(reason, "", "of the pod", target))
    failed = [pod for pod in pods if pod.code]
    code = failed[0].code if failed else None
    cause = next((pod.reason for pod in failed if pod.reason), "")
    if not cause and code:
        cause = f"it ended with code {code} ({outcome_of_code(code)})"
    return JobState("ended", code or Outcome.INFRA.code, cause or explain_pod(reason, "", "of the pod", target))


def _waiting_reason(
    kind: JobKind, job: Mapping[str, Any], pods: Sequence[PodState], events: Sequence[Mapping[str, Any]], target: str
) -> str:
    for condition in (job.get("status") or {}).get("conditions") or []:
        if condition.get("type") == "Suspended" and condition.get("status") == "True":
            return "the job is suspended: its queue has no room for it yet (kubectl describe workloads)"
    if reasons := [pod.reason for pod in pods if pod.reason]:
        return reasons[0]
    if pods:
        return "its pods start"
    for event in reversed(events):
        if event.get("type") == "Warning":
            return explain_pod(str(event.get("reason") or ""), str(event.get("message") or ""), "of the pod", target)
    return f"the operator of {kind.title}s has made no pod yet (drivetrain doctor --on {target} shows whether it is there)"


def event_line(event: Mapping[str, Any]) -> str:
    number = event.get("count") or 1
    times = f" ({number} times)" if number > 1 else ""
    subject = (event.get("involvedObject") or {}).get("name", "")
    time = event.get("lastTimestamp") or event.get("eventTime") or ""
    return f"{time}  {event.get('reason', '')}  {subject}: {event.get('message', '')}{times}"
