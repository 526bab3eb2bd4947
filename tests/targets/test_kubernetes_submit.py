"""Submissions to Kubernetes under unlucky circumstances: lost answers, refusals, images that the cluster does not have."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drivetrain.cli.submitted import agree_on
from drivetrain.launch.request import Request
from drivetrain.outcomes import Outcome, Problem
from drivetrain.runs import Run
from drivetrain.targets import submit
from drivetrain.targets.errors import Unsure
from drivetrain.targets.image.record import BuiltImage, record_image
from drivetrain.targets.kubernetes import creating, names, pods, specs
from drivetrain.targets.kubernetes.failures import explain_kubectl
from drivetrain.targets.kubernetes.jobs import KINDS
from drivetrain.targets.kubernetes.kubectl import Kubectl, NotFound
from drivetrain.targets.kubernetes.settings import KubernetesSettings
from drivetrain.targets.kubernetes.target import KubernetesTarget
from drivetrain.targets.record import Record, read_record
from drivetrain.tune.study import Proposal
from drivetrain.tune.trial_on_target import TrialOnTarget, start_on_target
from drivetrain.watch.screen import Screen
from tests.command import write_task
from tests.targets.test_kubernetes import SHAPES, submission, target

LOST_ANSWERS = {
    "context deadline exceeded": "error: context deadline exceeded",
    "client timeout": "Unable to connect to the server: net/http: request canceled (Client.Timeout exceeded while awaiting headers)",
    "gateway timeout": "Error from server (Timeout): Timeout: request did not complete within requested timeout 30s",
    "cut": "error: unexpected EOF",
    "etcd": "Error from server: etcdserver: request timed out",
}
NOT_SENT = {
    "refused": "The connection to the server 10.0.0.1:6443 was refused - did you specify the right host or port?",
    "unreachable": "Unable to connect to the server: dial tcp 10.0.0.1:6443: i/o timeout",
}


@pytest.fixture(autouse=True)
def account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(names, "owner", lambda: "me-0a1b2c3d")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(creating, "PAUSE_SECONDS", 0.0)


class Server:
    """Stands in for a cluster: has the objects that were created, and loses answers."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.lost_answers: dict[str, str] = {}
        """Plural -> what kubectl prints after an object of it was created."""
        self.refused: dict[str, str] = {}
        """Part of a job's name -> what kubectl prints instead of creating it."""
        self.is_deaf = False
        """Whether nothing is created of what is in `lost_answers`."""

    def run(self, kubectl: Kubectl, *words: str, stdin: bytes = b"", seconds: float = 0) -> str:
        if words[:2] == ("delete", "--raw"):
            return self.delete(words[2].partition("?")[0])
        if words[:2] == ("create", "--raw"):
            return "{}" if "dryRun" in words[2] else self.create(words[2], json.loads(stdin))
        if words[:2] == ("get", "--raw"):
            return self.get(words[2].partition("?")[0])
        return "{}"

    def get(self, path: str) -> str:
        if path.endswith(("/pods", "/events")):
            return json.dumps({"items": []})
        if path not in self.objects:
            raise NotFound("not found")
        return json.dumps(self.objects[path])

    def delete(self, path: str) -> str:
        if self.objects.pop(path, None) is None:
            raise NotFound("not found")
        return "{}"

    def create(self, path: str, value: dict[str, Any]) -> str:
        name = value["metadata"]["name"]
        for part, text in self.refused.items():
            if part in name and path.endswith("jobs"):
                raise explain_kubectl("k8s", text, 1)
        text = self.lost_answers.get(path.rpartition("/")[2])
        if not (text and self.is_deaf):
            self.objects[f"{path}/{name}"] = value | {"metadata": value["metadata"] | {"uid": f"uid of {name}"}}
        if text:
            raise explain_kubectl("k8s", text, 1)
        return json.dumps(self.objects[f"{path}/{name}"])

    def plurals(self) -> list[str]:
        return sorted(path.split("/")[-2] for path in self.objects)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    made = Server()
    monkeypatch.setattr(Kubectl, "run", lambda *words, **rest: made.run(*words, **rest))
    return made


# --- answers that are lost -----------------------------------------------------------------------


@pytest.mark.parametrize("text", LOST_ANSWERS.values(), ids=LOST_ANSWERS)
def test_a_job_whose_answer_was_lost_is_found_again(server: Server, text: str) -> None:
    server.lost_answers["pytorchjobs"] = text
    made, given = target(namespace="ml", runs_volume="runs"), submission(SHAPES["2x8 GPUs"])
    handle = made.submit(given, made.render(given), print)
    assert handle["uid"] == f"uid of {handle['job']}"
    assert server.plurals() == ["configmaps", "pytorchjobs", "secrets"]


@pytest.mark.parametrize("text", LOST_ANSWERS.values(), ids=LOST_ANSWERS)
def test_what_a_job_may_need_stays_if_nobody_knows_whether_it_was_created(
    server: Server, text: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may appear a moment later. Its record stays, so that the next command finds it."""
    server.lost_answers["pytorchjobs"], server.is_deaf = text, True
    made, given = target(namespace="ml", runs_volume="runs"), submission(SHAPES["2x8 GPUs"])
    with pytest.raises(Unsure, match="the same command with the same --name finds it"):
        submit.submit(made, given, agree_on(False, Screen(quiet=True)), print)
    assert server.plurals() == ["configmaps", "secrets"]
    record = read_record(given.run)
    assert record is not None and not record.handle
    rendering = made.render(given)
    server.objects[f"/apis/kubeflow.org/v1/namespaces/ml/pytorchjobs/{rendering.job['metadata']['name']}"] = rendering.job
    monkeypatch.setattr(submit, "target_of", lambda record: made)
    assert submit.adopt(record).handle["job"] == rendering.job["metadata"]["name"]


@pytest.mark.parametrize("text", NOT_SENT.values(), ids=NOT_SENT)
def test_a_request_that_never_left_starts_nothing(server: Server, text: str, folder: Path) -> None:
    server.lost_answers["pytorchjobs"], server.is_deaf = text, True
    made, given = target(namespace="ml", runs_volume="runs"), submission(SHAPES["2x8 GPUs"])
    with pytest.raises(Problem) as caught:
        submit.submit(made, given, agree_on(False, Screen(quiet=True)), print)
    assert not isinstance(caught.value, Unsure)
    assert not server.objects
    assert not given.run.path.exists()


def test_before_the_job_a_lost_answer_starts_nothing(server: Server, folder: Path) -> None:
    server.lost_answers["configmaps"] = LOST_ANSWERS["cut"]
    made, given = target(namespace="ml", runs_volume="runs"), submission(SHAPES["2x8 GPUs"])
    with pytest.raises(Problem) as caught:
        submit.submit(made, given, agree_on(False, Screen(quiet=True)), print)
    assert not isinstance(caught.value, Unsure)
    assert not server.objects, "also the one whose answer was lost"
    assert not given.run.path.exists()


def test_kubectl_that_does_not_answer_leaves_a_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(words: list[str], **named: Any) -> None:
        raise subprocess.TimeoutExpired(words, 60)

    monkeypatch.setattr(subprocess, "run", wait)
    with pytest.raises(Unsure, match="kubectl did not answer within 60 s"):
        Kubectl("k8s").create("/apis/x/jobs", {"kind": "Job"})


# --- several runs -------------------------------------------------------------------------------


def trial(number: int, made: KubernetesTarget) -> TrialOnTarget:
    from drivetrain.recipe import load

    (recipe,) = load("small.py", [], {})
    request = Request(target="small.py", settings=("steps=3",))
    return TrialOnTarget(Proposal(number, {}), Run(Path(f"runs/study/trials/{number}")), request, "loss", made, recipe, None)


@pytest.fixture
def two_trials(server: Server, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[TrialOnTarget]:
    """Trials of a search, which nobody follows."""
    write_task()
    made = target(namespace="ml", runs_volume="runs")
    monkeypatch.setattr(TrialOnTarget, "_follow", lambda self, record: None)
    monkeypatch.setattr(submit, "target_of", lambda record: made)
    return [trial(number, made) for number in (0, 1)]


def test_if_the_second_trial_is_refused_the_first_is_still_known(server: Server, two_trials: list[TrialOnTarget]) -> None:
    """The search ends and stops what runs; a repeated command continues it."""
    first, second = two_trials
    server.refused["trials-1-"] = 'Error from server (Forbidden): pods "x" is forbidden: exceeded quota: gpus, requested: x'
    with pytest.raises(Problem, match="the namespace's quota gpus is used up"):
        start_on_target([first, second])
    assert first.record is not None and first.record.handle["uid"]
    assert second.record is None
    assert not second.run.path.exists()
    record = read_record(first.run)
    assert record is not None and record.handle == first.record.handle
    stopped: list[Record] = []
    first.target.stop = lambda record, seconds=0.0: stopped.append(record)  # type: ignore[method-assign]
    for each in two_trials:
        each.kill()
    assert [record.run.path for record in stopped] == [first.run.path]


def test_a_trial_whose_job_was_not_recorded_is_no_second_job(server: Server, two_trials: list[TrialOnTarget]) -> None:
    """The command was killed between the job's creation and its record."""
    first, _ = two_trials
    start_on_target([first])
    record = read_record(first.run)
    assert record is not None
    Record(first.run, record.facts | {"handle": {}, "phase": "submitting"}).write()
    before = dict(server.objects)
    with contextlib.suppress(Problem):  # there are no pods to ask for metrics
        start_on_target([first])
    assert server.objects == before
    again = read_record(first.run)
    assert again is not None and again.handle == record.handle


# --- the pod that reads a volume ----------------------------------------------------------------


def image_of_files_pod(made: KubernetesTarget, record: Record, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Returns the image with which `pull` starts a pod on the volume, and its pull policy."""
    used: list[tuple[str, str]] = []

    @contextlib.contextmanager
    def volume(kubectl: Kubectl, image: Any, claim: str, settings: Any) -> Iterator[Any]:
        used.append(tuple(image))
        raise Problem("no cluster")
        yield

    monkeypatch.setattr(pods, "volume", volume)
    with pytest.raises(Problem, match="no cluster"):
        made.pull(record)
    return used[0]


@pytest.mark.parametrize("kind", KINDS)
def test_files_are_fetched_with_the_image_of_the_run(server: Server, kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cluster may have no other: only a GPU image was pushed."""
    digest = f"sha256:{'b' * 64}"
    record_image("gpu", BuiltImage(tag="registry.example/team/train:1", digest=digest, source="x", version="1", base="b", built=0.0))
    made = target(kind, image=None, runs_volume="runs", namespace="ml")
    given = submission(SHAPES["one GPU"])
    record = submit.submit(made, given, agree_on(False, Screen(quiet=True)), print)
    name = f"registry.example/team/train@{digest}"
    assert image_of_files_pod(made, record, monkeypatch) == (name, "")
    resumed = replace(given, request=replace(given.request, verb="resume"))
    assert specs.image_of(made.settings, resumed, KINDS[kind]).name == name
    older = Record(record.run, record.facts | {"handle": {key: value for key, value in record.handle.items() if key != "image"}})
    assert image_of_files_pod(made, older, monkeypatch) == (name, "")


def test_an_image_that_is_not_pulled_is_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = {"reason": "ErrImageNeverPull", "message": 'Container image "drivetrain:cpu" is not present with pull policy of Never'}
    status = {"status": {"phase": "Pending", "containerStatuses": [{"state": {"waiting": waiting}}]}}
    monkeypatch.setattr(Kubectl, "get", lambda self, path: status)
    monkeypatch.setattr(pods.time, "sleep", lambda seconds: pytest.fail("it waits"))
    with pytest.raises(Problem, match="kind load docker-image drivetrain:cpu") as caught:
        pods._wait_until_running(Kubectl("k8s"), "/x", "drivetrain:cpu", "runs")
    assert caught.value.outcome is Outcome.INFRA


# --- large code ---------------------------------------------------------------------------------


def test_a_missing_volume_for_code_names_both_ways_out(server: Server, folder: Path) -> None:
    large = submission(files={"mine.py": b"x = 1\n", "table.py": b"#" * (1 << 20)})
    made = target(code_volume="code", runs_volume="runs", namespace="ml")
    with pytest.raises(
        Problem, match=r"no PersistentVolumeClaim code in ml: create it, or install the large ones as a package in the image"
    ):
        made.submit(large, made.render(large), print)
    assert not server.objects
    assert isinstance(made.settings, KubernetesSettings)
