"""The target kubernetes without a cluster: objects, hostile names and settings, secrets, and what failures tell.

The outputs of kubectl are those of kubectl 1.33 with real API servers; the states of pods in kubernetes-pods.json are written after the
messages of the scheduler and the kubelet.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.launch.request import Request
from drivetrain.outcomes import EXIT_CODES, Outcome, Problem
from drivetrain.runs import Run
from drivetrain.targets.archive import make_archive
from drivetrain.targets.base import JobState
from drivetrain.targets.config import make_target, settings_help
from drivetrain.targets.environment import EnvironmentLock
from drivetrain.targets.image import record
from drivetrain.targets.image.record import BuiltImage, record_image
from drivetrain.targets.kubernetes import checks, names, specs
from drivetrain.targets.kubernetes.failures import AlreadyExists, NotFound, explain_kubectl
from drivetrain.targets.kubernetes.jobs import KINDS
from drivetrain.targets.kubernetes.kubectl import Kubectl
from drivetrain.targets.kubernetes.pod import is_operators, position
from drivetrain.targets.kubernetes.pods import PodHost, files_pod, is_sent
from drivetrain.targets.kubernetes.rendering import to_yaml
from drivetrain.targets.kubernetes.settings import LABEL_VALUE, KubernetesSettings
from drivetrain.targets.kubernetes.states import pod_states, state_of
from drivetrain.targets.kubernetes.target import KubernetesTarget, gpu_lines
from drivetrain.targets.submission import Submission
from tests.command import expect_error, run_ok

OUTPUTS = Path(__file__).parent / "outputs"
GOLDEN = Path(__file__).with_name("kubernetes_golden.txt")
SECRET = "hf_" + "planted" * 4
TOKEN = "planted-token"
SHAPES = {
    "CPU": Request(settings=("epochs=5",), device="cpu"),
    "one GPU": Request(settings=("epochs=5",), device="cuda", procs=1),
    "2x8 GPUs": Request(settings=("epochs=5",), device="cuda", procs=8, nodes=2, min_nodes=1),
}
FULL: dict[str, Any] = {
    "namespace": "ml-team", "runs_volume": "runs", "data_volume": "photos", "cpu": "16", "memory": "64Gi", "node_selector": ["nvidia.com/gpu.product=NVIDIA-L4"],
    "tolerations": ["nvidia.com/gpu:NoSchedule", "dedicated=ml:NoSchedule"], "secret_refs": ["hf/token as HF_TOKEN"], "deadline": "24h", "queue": "gpus",
    "image_pull_secret": "registry", "service_account": "trainer", "env": {"OMP_NUM_THREADS": "2"},
}  # fmt: skip
LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
WILD = st.text(st.characters(exclude_categories=["Cs"]), max_size=60) | st.sampled_from(
    ["$(touch x)", "`id`", "$(POD_IP)", "$$(A)", "a: b", "- x", "{}", "null", "1e3", "0o7", "yes", "y", "~", "!!python/object", "---", "a\n---\nb", "\0", "%s", "&a"]
)  # fmt: skip


FOLDER = WILD.filter(lambda text: "\0" not in text)


@pytest.fixture(autouse=True)
def account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A user without images, whose objects are marked with a known owner."""
    monkeypatch.setattr(names, "owner", lambda: "me-0a1b2c3d")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def target(job: str = "pytorchjob", **values: Any) -> KubernetesTarget:
    made = make_target("k8s", "kubernetes", {"image": "registry.example/team/train:3", "job": job} | values, Path("drivetrain.yaml"))
    assert isinstance(made, KubernetesTarget)
    return made


def submission(request: Request = SHAPES["CPU"], name: str = "digits-001", files: dict[str, bytes] | None = None) -> Submission:
    code = make_archive({"mine.py": b"x = 1\n", "lib/table.bin": b"\xff\0"} if files is None else files)
    return Submission(
        Run(Path("runs") / name), name, request, "mine.py:Mine", code, EnvironmentLock(()), "project-0a1b2c3d",
        token=TOKEN if request.nodes > 1 else "",
    )  # fmt: skip


def container(job: dict[str, Any]) -> dict[str, Any]:
    """Returns the container of the first pod, with the parts of a TrainJob's trainer."""
    if job["kind"] == "PyTorchJob":
        return dict(job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0])
    return dict(job["spec"]["trainer"])


# --- objects -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_in_a_bucket(kind: str) -> None:
    rendering = target(kind, bucket="s3://team/runs/").render(submission())
    words = container(rendering.job)["args"]
    assert words[words.index("--run-dir") + 1] == "s3://team/runs/project-0a1b2c3d/digits-001"
    assert "--keep=0" in container(rendering.job)["command"]
    assert not rendering.notes
    resumed = replace(SHAPES["CPU"], verb="resume", target="x", settings=())
    words = container(target(kind, bucket="s3://team/runs").render(submission(resumed)).job)["args"]
    assert words[:2] == ["resume", "s3://team/runs/project-0a1b2c3d/digits-001"]


@pytest.mark.parametrize("address", ["/mnt/runs", "http://team/runs", "s3://me:key@team/runs", "s3://team/$(id)", "s3://"])
def test_what_is_no_bucket_is_refused(address: str) -> None:
    with pytest.raises(Problem, match=r"bucket: in the target k8s|k8s\.bucket contains a secret: write a URL without its password"):
        target(bucket=address).render(submission())


def test_golden_objects() -> None:
    """After a wanted change: DRIVETRAIN_WRITE_GOLDEN=1 pytest tests/targets/test_kubernetes.py, and read the difference."""
    text = ""
    for kind in KINDS:
        for shape, request in SHAPES.items():
            values = FULL if shape == "2x8 GPUs" else {}
            text += f"=== {kind}, {shape} ===\n\n{target(kind, **values).render(submission(request)).text()}\n"
    if os.environ.get("DRIVETRAIN_WRITE_GOLDEN"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()
    assert TOKEN not in text


@pytest.mark.parametrize("kind", KINDS)
def test_dry_run_is_yaml_for_kubectl_apply(kind: str) -> None:
    rendering = target(kind).render(submission(SHAPES["2x8 GPUs"]))
    documents = list(yaml.safe_load_all(rendering.text()))
    assert documents == list(rendering.objects)
    assert [document["kind"] for document in documents] == ["ConfigMap", KINDS[kind].title]


def test_one_master_and_the_other_pods_are_workers() -> None:
    spec = target().render(submission(SHAPES["2x8 GPUs"])).job["spec"]
    assert {role: replica["replicas"] for role, replica in spec["pytorchReplicaSpecs"].items()} == {"Master": 1, "Worker": 1}
    assert {replica["restartPolicy"] for replica in spec["pytorchReplicaSpecs"].values()} == {"ExitCode"}
    assert spec["elasticPolicy"] == {"minReplicas": 1, "maxReplicas": 1, "maxRestarts": 3}
    assert "Worker" not in target().render(submission()).job["spec"]["pytorchReplicaSpecs"], "a Worker with 0 replicas makes a pod"


def test_own_rules_for_what_no_schema_checks() -> None:
    job = target().render(submission(SHAPES["2x8 GPUs"])).job
    replicas = job["spec"]["pytorchReplicaSpecs"]
    for change, message in (
        ({"Master": replicas["Master"] | {"replicas": 2}}, "exactly one Master"),
        ({"Worker": replicas["Worker"] | {"restartPolicy": "Sometimes"}}, "restartPolicy of Worker is 'Sometimes'"),
        ({"Chief": replicas["Worker"]}, "no Chief"),
    ):
        with pytest.raises(Problem, match=message):
            KINDS["pytorchjob"].check({"spec": {"pytorchReplicaSpecs": replicas | change}})
    with pytest.raises(Problem, match="one of ClusterTrainingRuntime, TrainingRuntime"):
        KINDS["trainjob"].check({"spec": {"runtimeRef": {"name": "x", "kind": "Runtime"}}})
    assert target("trainjob", runtime="TrainingRuntime/mine").render(submission()).job["spec"]["runtimeRef"]["kind"] == "TrainingRuntime"


@pytest.mark.parametrize("outcome", Outcome)
def test_the_operator_repeats_what_can_be_retried(outcome: Outcome) -> None:
    """A PyTorchJob with restartPolicy ExitCode repeats codes of 128 and more."""
    assert (EXIT_CODES[outcome] >= 128) == outcome.retryable


def test_a_run_without_a_volume_says_what_that_means() -> None:
    text = target().render(submission()).text()
    assert "# without runs_volume: or bucket: in the target, the run is kept in its pods" in text
    assert "--keep=3600" in text
    kept = target(runs_volume="runs").render(submission()).text()
    assert "without runs_volume" not in kept
    assert "--keep=0" in kept


def test_large_code_goes_to_a_volume() -> None:
    large = submission(files={"mine.py": b"x = 1\n", "table.bin": os.urandom(1 << 20)})
    with pytest.raises(Problem, match=r"more than 1 MiB.*set code_volume: CLAIM in the target k8s"):
        target().render(large)
    rendering = target(code_volume="code").render(large)
    assert [value["kind"] for value in rendering.objects] == ["PyTorchJob"]
    assert "copies it to the volume code first" in rendering.text()
    assert large.code is not None
    assert {"name": "code", "mountPath": "/code", "subPath": f"code/{large.code.digest}", "readOnly": True} in container(rendering.job)[
        "volumeMounts"
    ]


def test_the_image_that_was_pushed_last_is_used_by_its_digest() -> None:
    digest = f"sha256:{'a' * 64}"
    image = BuiltImage(tag="registry.example:5000/team/train:3", digest=digest, source="x", version="1", base="b", built=0.0)
    made = make_target("k8s", "kubernetes", {"job": "pytorchjob"}, Path("drivetrain.yaml"))
    assert isinstance(made, KubernetesTarget)
    local = container(made.render(submission()).job)
    assert (local["image"], local["imagePullPolicy"]) == ("drivetrain:cpu", "Never"), "in a registry it would be a stranger's"
    record_image("cpu", image)
    assert container(made.render(submission()).job)["image"] == f"registry.example:5000/team/train@{digest}"


def test_a_pod_on_a_volume_pulls_no_image_of_this_machine() -> None:
    spec = files_pod(specs.find_image(KubernetesSettings(), "cpu", KINDS["pytorchjob"]), "runs", {})["spec"]
    assert [(entry["image"], entry["imagePullPolicy"]) for entry in spec["containers"]] == [("drivetrain:cpu", "Never")]


def test_a_train_job_needs_an_image_of_a_registry() -> None:
    made = make_target("k8s", "kubernetes", {"job": "trainjob"}, Path("drivetrain.yaml"))
    with pytest.raises(Problem, match="drivetrain image build --push"):
        made.render(submission())
    assert record.read_images() == {}


# --- hostile input -----------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(word=WILD, variable=WILD, run=FOLDER, project=FOLDER)
@pytest.mark.parametrize("kind", KINDS)
def test_hostile_text_stays_what_it_is(kind: str, word: str, variable: str, run: str, project: str) -> None:
    """Names become labels; words and variables arrive as they are: nothing is expanded, and YAML gives the same text back."""
    made = target(kind)
    made.settings = replace(made.settings, env={"NOTE": variable})
    given = replace(
        submission(replace(SHAPES["CPU"], settings=(f"note={word}",)), files={"mine.py": word.encode()}), name=run, project=project
    )
    rendering = made.render(given)
    assert list(yaml.safe_load_all(rendering.text())) == list(rendering.objects)
    main = container(rendering.job)
    assert f"note={word}" in [expanded(text) for text in main["args"]]
    assert {"name": "NOTE", "value": variable} in [entry | {"value": expanded(entry.get("value", ""))} for entry in main["env"]]
    assert f"--run={run}" in [expanded(text) for text in main["command"]]
    for value in rendering.objects:
        assert LABEL.fullmatch(value["metadata"]["name"])
        assert len(value["metadata"]["name"]) <= 48, "operators add to it, and a service's name has at most 63 characters"
        assert all(LABEL_VALUE.fullmatch(label) for label in value["metadata"]["labels"].values())


def expanded(text: str) -> str:
    """Does what Kubernetes does with arguments and variables, where every variable is set."""
    return re.sub(r"\$(\$|\(\w+\))", lambda match: "$" if match[1] == "$" else "EXPANDED", text)


@given(WILD, WILD)
def test_no_two_runs_share_a_job(one: str, other: str) -> None:
    assert (names.job_name("p", one) == names.job_name("p", other)) == (one == other)
    assert names.job_name("a", one) != names.job_name("b", one)


@settings(deadline=None)  # on a busy machine a single call can take long
@given(st.dictionaries(st.sampled_from(["a", "b"]), WILD))
def test_yaml_gives_the_same_text_back(value: dict[str, str]) -> None:
    assert yaml.safe_load(to_yaml(value)) == value


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"namespace": "My_Team"}, "namespace: 'My_Team' in the target k8s"),
        ({"runs_volume": "../x"}, "runs_volume: '../x'"),
        ({"cpu": "many"}, "cpu: 'many'"),
        ({"memory": "64 GB"}, "memory: '64 GB'"),
        ({"image": "--privileged"}, "image: '--privileged'"),
        ({"gpus": -1}, "gpus: -1"),
        ({"job": "job"}, "k8s.job is 'job'"),
        ({"runtime": "Pod/x"}, "runtime: 'Pod/x'"),
        ({"deadline": "soon"}, "deadline: 'soon'"),
        ({"deadline": "5ep"}, "deadline: '5ep'"),
        ({"node_selector": ["gpu"]}, "node_selector: 'gpu'"),
        ({"tolerations": ["gpu:Always"]}, "tolerations: 'gpu:Always'"),
        ({"secret_refs": ["hf"]}, "secret_refs: 'hf'"),
        ({"secret_refs": ["hf/token as A B"]}, "secret_refs: 'hf/token as A B'"),
        ({"secret_refs": ["hf/NOTE"], "env": {"NOTE": "x"}}, "NOTE in the target k8s is also in env"),
        ({"env": {"RANK": "0"}}, "env: RANK in the target"),
        ({"env": {"HF_TOKEN": SECRET}}, r"secrets: \[HF_TOKEN\]"),
        ({"name_space": "x"}, "unknown key 'name_space'"),
        ({"clean_pod_policy": "Some"}, "k8s.clean_pod_policy is 'Some'"),
    ],
)
def test_wrong_settings(values: dict[str, Any], message: str) -> None:
    with pytest.raises(Problem, match=message):
        target(**values).render(submission())


def test_settings_that_a_train_job_does_not_have() -> None:
    with pytest.raises(Problem, match=r"priority_class: in the target k8s.*job: pytorchjob"):
        target("trainjob", priority_class="high").render(submission())


def test_every_setting_has_its_help() -> None:
    assert all(text for _, text in settings_help("kubernetes"))


# --- secrets -----------------------------------------------------------------------------------


class Recorder:
    """Stands in for kubectl: records what it is called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[str, ...], bytes]] = []

    def __call__(self, kubectl: Kubectl, *words: str, stdin: bytes = b"", seconds: float = 0) -> str:
        self.calls.append((words, stdin))
        if (words[:2] == ("get", "--raw") and "/configmaps/" in words[2]) or "/pytorchjobs/" in words[-1]:
            raise NotFound("nothing")
        if words[:2] == ("create", "--raw"):
            return json.dumps(json.loads(stdin) | {"metadata": {"name": json.loads(stdin)["metadata"]["name"], "uid": "1"}})
        return "{}"


def test_secrets_travel_by_stdin_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    recorder = Recorder()
    monkeypatch.setattr(Kubectl, "run", lambda *words, **rest: recorder(*words, **rest))
    made = target(namespace="ml", runs_volume="runs")
    given = replace(submission(SHAPES["2x8 GPUs"]), secrets=("HF_TOKEN",))
    rendering = made.render(given)
    handle = made.submit(given, rendering, print)
    shown = rendering.text() + json.dumps(handle) + " ".join(word for words, _ in recorder.calls for word in words)
    assert SECRET not in shown
    assert TOKEN not in shown
    secrets = [json.loads(stdin) for _, stdin in recorder.calls if SECRET.encode() in stdin]
    assert {secret["kind"] for secret in secrets} == {"Secret"}
    assert secrets[0]["stringData"] == {"HF_TOKEN": SECRET, "DRIVETRAIN_TOKEN": TOKEN}
    references = [entry for entry in container(rendering.job)["env"] if entry["name"] == "HF_TOKEN"]
    assert references == [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": rendering.secret, "key": "HF_TOKEN"}}}]


def test_every_object_is_checked_before_the_first_is_created(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    monkeypatch.setattr(Kubectl, "run", lambda *words, **rest: recorder(*words, **rest))
    made, given = target(namespace="ml", runs_volume="runs"), submission(SHAPES["2x8 GPUs"])
    made.submit(given, made.render(given), print)
    created = [words[2] for words, _ in recorder.calls if words[:2] == ("create", "--raw")]
    checked = [path for path in created if path.endswith("?dryRun=All&fieldValidation=Strict")]
    assert len(checked) == 3
    assert created[:3] == checked
    assert [path.rpartition("/")[2] for path in created[3:]] == ["secrets", "configmaps", "pytorchjobs"]


def test_what_was_created_is_removed_if_a_later_object_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()

    def run(kubectl: Kubectl, *words: str, **rest: Any) -> str:
        if words[:2] == ("create", "--raw") and words[2].endswith("/pytorchjobs"):
            raise Problem("quota")
        return recorder(kubectl, *words, **rest)

    monkeypatch.setattr(Kubectl, "run", run)
    made, given = target(namespace="ml", runs_volume="runs"), submission(SHAPES["2x8 GPUs"])
    with pytest.raises(Problem, match="quota"):
        made.submit(given, made.render(given), print)
    deleted = [words[2].partition("?")[0].split("/")[-2] for words, _ in recorder.calls if words[0] == "delete"]
    assert deleted == ["secrets", "configmaps", "secrets"], "first that of an earlier submission, then what was made"


# --- what failures tell -----------------------------------------------------------------------

EXPLAINED = {
    "conflict": "repeat the command",
    "context": "your kubeconfig has no context nope: kubectl config get-contexts",
    "exists": "choose another --name",
    "forbidden": "you (bob) may not create configmaps: ask the cluster's administrator",
    "forbidden-get": "you (nobody) may not get pytorchjobs: ask the cluster's administrator",
    "forbidden-list": "you (bob) may not list pods",
    "kubeconfig-broken": "the kubeconfig /home/me/.kube/config cannot be read",
    "namespace": "kubectl create namespace nope, or correct namespace: in the target",
    "no-crd": "is the operator installed? (drivetrain doctor --on k8s)",
    "no-kubeconfig": "kubectl knows no cluster: copy the kubeconfig",
    "other-certificate": "was the cluster made again?",
    "quota": "the namespace's quota team is used up",
    "refused": "the cluster at 127.0.0.1:1 does not answer (connection refused)",
    "unauthorized": "log in again (EKS: aws eks update-kubeconfig",
    "unknown-field": "does not know the field spec.nope",
    "unknown-host": "the cluster cannot be reached: is the network or VPN up",
}
TRANSIENT = ("refused", "unknown-host", "unauthorized")


@pytest.mark.parametrize("output", sorted(OUTPUTS.glob("kubectl-*.txt")), ids=lambda path: path.stem)
def test_what_kubectl_prints_becomes_one_line_with_the_fix(output: Path) -> None:
    name = output.stem.removeprefix("kubectl-")
    problem = explain_kubectl("k8s", output.read_text(), 1)
    assert EXPLAINED[name] in str(problem)
    assert "\n" not in str(problem)
    assert (problem.outcome is Outcome.INFRA) == (name in TRANSIENT)
    assert isinstance(problem, AlreadyExists) == (name == "exists")


def test_no_kubectl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(Problem, match=r"there is no kubectl on this machine: install kubectl"):
        Kubectl("k8s").run("version")


def test_unknown_output_is_shown() -> None:
    assert str(explain_kubectl("k8s", "error: the moon\x1b[31m is in the way\n", 1)) == "k8s: error: the moon is in the way"
    assert isinstance(explain_kubectl("k8s", 'Error from server (NotFound): pods "x" not found', 1), NotFound)


PODS = {
    "image-pull": "the image registry.example/train:1 cannot be pulled: is it pushed",
    "image-denied": "set image_pull_secret: in the target",
    "image-never": "kind load docker-image registry.example/train:1",
    "no-gpu": "no node has as many free nvidia.com/gpu as a pod asks for",
    "no-memory": "no node has as much free memory",
    "taint": "the nodes have the taint dedicated: add it to tolerations:",
    "selector": "no node has the labels of node_selector:",
    "no-claim": "there is no PersistentVolumeClaim runs",
    "secret": "there is no Secret hf: kubectl create secret generic hf",
    "secret-key": "the Secret team/hf has no key HF_TOKEN",
    "no-program": "the container cannot be started",
    "oom": "raise memory: in the target",
    "oom-loop": "raise memory: in the target",
    "evicted": "set memory: in the target",
    "evicted-disk": "set runs_volume: in the target",
}


def pod(status: dict[str, Any], role: str = "master", index: int = 0, name: str = "x-master-0", created: str = "1") -> dict[str, Any]:
    labels = {"training.kubeflow.org/replica-type": role, "training.kubeflow.org/replica-index": str(index)}
    spec = {"containers": [{"name": "pytorch", "image": "registry.example/train:1"}], "nodeName": "gpu1"}
    return {"metadata": {"name": name, "labels": labels, "creationTimestamp": created}, "spec": spec, "status": status}


@pytest.mark.parametrize("case", PODS)
def test_why_a_pod_waits_or_failed(case: str) -> None:
    status = json.loads((OUTPUTS / "kubernetes-pods.json").read_text())[case]
    (state,) = pod_states([pod(status)], KINDS["pytorchjob"], "k8s")
    assert PODS[case] in state.reason
    assert "\n" not in state.line()


def test_every_pod_is_expected() -> None:
    assert set(json.loads((OUTPUTS / "kubernetes-pods.json").read_text())) == set(PODS)


def state(
    conditions: list[dict[str, str]], *pods: dict[str, Any], events: tuple[dict[str, Any], ...] = (), kind: str = "pytorchjob"
) -> JobState:
    job = {"metadata": {"name": "x"}, "status": {"conditions": conditions}}
    return state_of(KINDS[kind], job, pod_states(pods, KINDS[kind], "k8s"), events, "k8s")


RUNNING: dict[str, Any] = {"phase": "Running", "containerStatuses": [{"name": "pytorch", "restartCount": 2, "state": {"running": {}}}]}


def ended(code: int, **more: str) -> dict[str, Any]:
    terminated = {"exitCode": code, "reason": "Error", **more}
    return {"phase": "Failed", "containerStatuses": [{"name": "pytorch", "state": {"terminated": terminated}}]}


def test_states() -> None:
    assert state([], pod(RUNNING)) == JobState("running")
    assert state([{"type": "Succeeded", "status": "True"}]) == JobState("ended", 0)
    failed = [{"type": "Failed", "status": "True", "message": "PyTorchJob x is failed because 1 Master replica(s) failed."}]
    assert state(failed, pod(ended(2))) == JobState("ended", 2, "it ended with code 2 (usage)")
    assert state(failed).code == EXIT_CODES[Outcome.INFRA], "the pods were deleted"
    assert state([{"type": "Running", "status": "True"}, {"type": "Failed", "status": "False"}]).phase == "queued"
    assert state([{"type": "Complete", "status": "True"}], kind="trainjob") == JobState("ended", 0)
    assert state([{"type": "Suspended", "status": "True"}]).reason.startswith("the job is suspended")
    assert "has made no pod yet" in state([]).reason
    event = {
        "type": "Warning",
        "reason": "FailedCreatePod",
        "message": 'pods "x-master-0" is forbidden: exceeded quota: gpus, requested: x',
    }
    assert "the namespace's quota gpus is used up" in state([], events=(event,)).reason
    assert state_of(KINDS["pytorchjob"], None, [], [], "k8s").phase == "lost"


def test_a_pod_that_waits_while_others_run() -> None:
    waiting = json.loads((OUTPUTS / "kubernetes-pods.json").read_text())["no-gpu"]
    answer = state([], pod(RUNNING), pod(waiting, "worker", 0, "x-worker-0"))
    assert answer.phase == "running"
    assert answer.reason.startswith("waits for pod 1: no node has as many free nvidia.com/gpu")


def test_the_newest_pod_of_a_rank_counts() -> None:
    pods = pod_states([pod(RUNNING, created="2026-02"), pod(ended(201), created="2026-01")], KINDS["pytorchjob"], "k8s")
    assert [entry.line() for entry in pods] == ["pod 0   x-master-0   running   on gpu1   2 restarts"]


def test_what_the_gpus_of_a_pod_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the form of `nvidia-smi --format=csv,noheader,nounits`."""
    host = PodHost(None, Kubectl("k8s", None, "ml"), "x-worker-0", "pytorch")
    monkeypatch.setattr(Kubectl, "exec", lambda self, pod, container, words: "0, 97, 61203, 81559, 612.43\n1, 0, 4, 81559, [N/A]\n")
    assert list(gpu_lines(host)) == [
        "x-worker-0   GPU 0: 97 % busy, 61203 of 81559 MiB, 612.43 W",
        "x-worker-0   GPU 1: 0 % busy, 4 of 81559 MiB, [N/A] W",
    ]

    def fail(self: Kubectl, pod: str, container: str, words: tuple[str, ...]) -> str:
        raise Problem('exec: "nvidia-smi": executable file not found in $PATH')

    monkeypatch.setattr(Kubectl, "exec", fail)
    assert list(gpu_lines(host)) == []


def test_dry_run_without_a_cluster(folder: Path) -> None:
    words = ("train", "digits", "--on", "kubernetes", "--dry-run")
    text = run_ok(*words, KUBECONFIG="/nowhere", PATH="/nowhere")
    assert text.startswith("# a PyTorchJob is shown, because the cluster cannot be asked which kind it has: there is no kubectl")
    message = expect_error(*words[:-1], "--name", "nothing", PATH="/nowhere")
    assert message.startswith("drivetrain: there is no kubectl on this machine: install kubectl")
    assert not Path("runs/nothing").exists()


# --- in the pod --------------------------------------------------------------------------------


def test_a_pod_finds_its_place() -> None:
    master = {"RANK": "0", "MASTER_ADDR": "x-master-0", "MASTER_PORT": "23456", "POD_IP": "10.1.2.3", "WORLD_SIZE": "2"}
    assert tuple(position(master)) == (0, "10.1.2.3", "23456"), "its own name may not be known to DNS yet"
    assert tuple(position(master | {"RANK": "1"})) == (1, "x-master-0", "23456")
    node = {"PET_NODE_RANK": "1", "PET_MASTER_ADDR": "x-node-0-0.x", "PET_MASTER_PORT": "29400", "POD_IP": "10.1.2.4"}
    assert tuple(position(node)) == (1, "x-node-0-0.x", "29400")
    assert all(is_operators(name) for name in [*master, *node] if name != "POD_IP")


def test_which_files_are_sent() -> None:
    filters = ["--include=/logs/output.log", "--exclude=/logs/*.log", "--exclude=/job", "--exclude=/checkpoints/.*"]
    sent = ["/run.json", "/logs/output.log", "/checkpoints/step-00000010/manifest.json"]
    assert [path for path in [*sent, "/logs/rank-0.log", "/job/stop", "/checkpoints/.new/a"] if is_sent(path, filters)] == sent


# --- doctor ------------------------------------------------------------------------------------


def node(labels: dict[str, str], provider: str = "", gpus: int = 0, is_ready: bool = True) -> dict[str, Any]:
    amounts = {"cpu": "8", **({"nvidia.com/gpu": str(gpus)} if gpus else {})}
    condition = {"type": "Ready", "status": "True" if is_ready else "False"}
    return {
        "metadata": {"name": "n1", "labels": labels}, "spec": {"providerID": provider},
        "status": {"allocatable": amounts, "capacity": amounts, "conditions": [condition]},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("labels", "provider", "name", "command"),
    [
        ({}, "kind://docker/kind/kind-worker", "Kind", "nvkind cluster create"),
        ({"eks.amazonaws.com/nodegroup": "a"}, "aws:///eu-west-1a/i-0", "EKS", "eksctl create nodegroup"),
        ({"cloud.google.com/gke-nodepool": "a"}, "gce://p/z/n", "GKE", "gcloud container node-pools create"),
        ({"kubernetes.azure.com/agentpool": "a"}, "azure:///subscriptions/x", "AKS", "az aks nodepool add"),
        ({"node.openshift.io/os_id": "rhcos"}, "aws:///x", "OpenShift", "GPU Operator"),
        ({"minikube.k8s.io/name": "minikube"}, "", "minikube", "minikube start"),
        ({"kubernetes.io/os": "linux"}, "", "Kubernetes", "add a node with an NVIDIA GPU"),
    ],
)
def test_platforms(labels: dict[str, str], provider: str, name: str, command: str) -> None:
    platform = checks.platform_of([node({}), node(labels, provider)])
    assert platform.name == name
    check = checks._gpu_check([node(labels, provider)], platform, KubernetesSettings(gpus=1))
    assert (check.verdict, name in check.evidence, command in check.fix) == ("fault", True, True)


def test_gpus_of_nodes() -> None:
    assert checks._gpu_check([node({}, gpus=8)], checks.OTHER, KubernetesSettings(gpus=8)).verdict == "ok"
    assert "set gpus: to 4 or less" in checks._gpu_check([node({}, gpus=4)], checks.OTHER, KubernetesSettings(gpus=8)).fix
    label = {"feature.node.kubernetes.io/pci-10de.present": "true"}
    assert "the device plugin does not run there" in checks._gpu_check([node(label)], checks.OTHER, KubernetesSettings()).evidence


def test_shared_memory_is_that_of_docker_in_kubernetes_words() -> None:
    volumes = target().render(submission(SHAPES["one GPU"])).job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["volumes"]
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1344Mi"}} in volumes
    assert specs.num_gpus(KubernetesSettings(gpus=2), submission(SHAPES["CPU"])) == 0, "--device cpu wins"
