"""`--on kubernetes` with real API servers; stand-ins for the operators, the scheduler and the kubelets run the pods (`cluster.py`)."""

from __future__ import annotations

import base64
import json
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from drivetrain.runs import Run
from drivetrain.targets.kubernetes import checks as cluster_checks
from tests.command import COMMAND, TASK, environment, expect_error, run_drivetrain, run_ok, write_task
from tests.system.cluster import Cluster, cluster
from tests.system.cluster_api import Object
from tests.system.kubelet_container import IMAGE_ENV
from tests.waiting import wait_until

FAST = ("plan.threads=1", "plan.compile=off")
SLOW = ("return F.cross", "import time; time.sleep(0.05 * model.training)\n        return F.cross")
WITHOUT_DROPOUT = TASK.replace("nn.Dropout(0.2)", "nn.Identity()")  # its masks depend on the number of processes
SECRET = "planted-secret-" + "x" * 20
OURS = "app.kubernetes.io/managed-by=drivetrain"


@pytest.fixture(scope="module")
def started_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("kubernetes")) as started:
        started.add_claim("runs")
        yield started


@pytest.fixture
def lab(started_cluster: Cluster, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """The cluster, which the user's kubectl reaches; a folder with a task and the target `lab`. Afterwards the cluster is empty again."""
    monkeypatch.setenv("KUBECONFIG", str(started_cluster.kubeconfig))
    write_task(change=SLOW)
    write_target()
    yield started_cluster
    started_cluster.remove_objects()


def write_target(**settings: object) -> None:
    entry = {"kind": "kubernetes", "runs_volume": "runs", "device": "cpu", "job": "pytorchjob"} | settings
    Path("drivetrain.yaml").write_text(yaml.safe_dump({"targets": {"lab": {k: v for k, v in entry.items() if v is not None}}}))


def losses(name: str) -> list[float]:
    return [row["train/loss"] for row in Run(f"runs/{name}").rows() if "train/loss" in row]


def step(name: str) -> int:
    return int(Run(f"runs/{name}").last_row().get("step", 0))


def weights(name: str) -> bytes:
    return Run(f"runs/{name}").model_path.read_bytes()


def record(name: str) -> dict[str, Any]:
    return dict(json.loads(Path(f"runs/{name}/target.json").read_text()))


def follow(name: str) -> subprocess.Popen[str]:
    return subprocess.Popen([*COMMAND, "logs", "-f", name], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def our_objects(cluster: Cluster) -> list[str]:
    kinds = "pytorchjobs,trainjobs,pods,configmaps,secrets"
    return [line for line in cluster.kubectl("get", kinds, "-l", OURS, "-o", "name").splitlines() if "/" in line]


def pod_names(cluster: Cluster, name: str) -> list[str]:
    label = {"pytorchjob": "training.kubeflow.org/job-name", "trainjob": "jobset.sigs.k8s.io/jobset-name"}[record(name)["handle"]["kind"]]
    return sorted(pod["metadata"]["name"] for pod in cluster.pods(**{label: record(name)["handle"]["job"]}))


def test_a_pod_without_a_volume_trains_and_its_run_comes_home(lab: Cluster) -> None:
    write_target(runs_volume=None, keep=120)
    run_ok("train", "small.py", *FAST, "--name", "here")
    output = run_ok("train", "small.py", *FAST, "--on", "lab", "--wait", "--name", "there")
    assert "without runs_volume: or bucket: in the target, the run is kept in its pods" in output
    assert losses("there") == losses("here")
    assert weights("there") == weights("here")
    assert "finished on lab" in run_ok("status", "there")
    run = Run("runs/there")
    assert run.checkpoint_steps() == Run("runs/here").checkpoint_steps()
    assert "done    " in (run.path / "logs" / "output.log").read_text()
    assert "already" in run_ok("train", "small.py", *FAST, "--on", "lab", "--name", "there")
    assert "removed from the namespace default: PyTorchJob there-" in run_ok("down", "lab", "--yes")
    assert not our_objects(lab)
    assert "finished on lab" in run_ok("status", "there")


def test_killed_pods_cost_no_step_of_two_that_train_as_one(lab: Cluster) -> None:
    """Also: a secret of the user and the token of the pods are written nowhere."""
    write_task(change=SLOW, text=WITHOUT_DROPOUT)
    write_target(secrets=["MY_API_KEY"])
    train = ("train", "small.py", "steps=400", "save_every=10", *FAST, "--on", "lab", "--nodes", "2", "--name")
    run_ok(*train, "killed", MY_API_KEY=SECRET)
    follower = follow("killed")
    wait_until(lambda: step("killed") >= 20, "steps", process=follower)
    facts = lab.kubectl("get", "pytorchjobs,pods,configmaps,events", "-o", "yaml")
    job = record("killed")["handle"]["job"]
    for role in ("worker", "master"):
        before, pod = step("killed"), lab.kubelet.find("default", f"{job}-{role}-0")
        assert pod is not None
        pod.containers["pytorch"].signal(signal.SIGKILL)
        wait_until(lambda pod=pod, role=role: lab.kubelet.find("default", f"{job}-{role}-0") not in (pod, None), "another pod", 180)
        wait_until(lambda before=before: step("killed") >= min(before + 15, 395), "further steps", process=follower)
    printed, _ = follower.communicate(timeout=300)
    assert follower.returncode == 0, printed
    assert "2 of 2 machines have joined" in printed
    assert Run("runs/killed").status == "finished"
    run_ok(*train, "undisturbed", "--wait", MY_API_KEY=SECRET)
    assert [row["step"] for row in Run("runs/killed").rows() if "train/loss" in row] == list(range(1, 401))
    assert losses("killed") == losses("undisturbed")
    assert weights("killed") == weights("undisturbed")
    _assert_no_secret(lab, facts, "undisturbed", "killed")


@pytest.mark.long
def test_an_elastic_run_survives_a_lost_pod(lab: Cluster) -> None:
    write_task(change=SLOW, text=WITHOUT_DROPOUT)
    run_ok("train", "small.py", "steps=300", "save_every=20", *FAST, "--on", "lab", "--nodes", "1:2", "--name", "elastic")
    job = record("elastic")["handle"]["job"]
    policy = lab.kubectl("get", "pytorchjob", job, "-o", "jsonpath={.spec.elasticPolicy.minReplicas},{.spec.elasticPolicy.maxReplicas}")
    assert policy == "1,1"  # they count workers; the master is the other machine
    follower = follow("elastic")
    wait_until(lambda: step("elastic") >= 40, "steps", process=follower)
    pod = lab.kubelet.find("default", f"{job}-worker-0")
    assert pod is not None
    pod.containers["pytorch"].signal(signal.SIGKILL)
    printed, _ = follower.communicate(timeout=400)
    assert follower.returncode == 0, printed
    assert Run("runs/elastic").status == "finished"
    assert [row["step"] for row in Run("runs/elastic").rows() if "train/loss" in row] == list(range(1, 301))
    assert printed.count("of 2 machines have joined") >= 2, printed  # at the start, and after the loss


@pytest.fixture
def bucket() -> Iterator[Path]:
    """A folder of this machine that all pods have, too."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)


@pytest.mark.long
def test_a_run_in_a_bucket_outlives_its_pod(lab: Cluster, bucket: Path) -> None:
    """A killed pod is replaced by one with an empty disk."""
    write_target(runs_volume=None, bucket=f"file://{bucket}", env={"DRIVETRAIN_BUCKET_LEASE": "6"})
    train = ("train", "small.py", "steps=100", "save_every=10", *FAST)
    run_ok(*train, "--name", "undisturbed")
    run_ok(*train, "--on", "lab", "--name", "killed")
    follower = follow("killed")
    wait_until(lambda: step("killed") >= 20, "steps", process=follower)
    pod = lab.kubelet.find("default", f"{record('killed')['handle']['job']}-master-0")
    assert pod is not None
    pod.containers["pytorch"].signal(signal.SIGKILL)
    printed, _ = follower.communicate(timeout=300)
    assert follower.returncode == 0, printed
    assert "copied from file://" in "".join(lab.kubectl("logs", pod) for pod in pod_names(lab, "killed"))
    assert Run("runs/killed").status == "finished"
    assert losses("killed") == losses("undisturbed")
    assert weights("killed") == weights("undisturbed")


def _assert_no_secret(lab: Cluster, facts: str, *names: str) -> None:
    """The token is that of the Secrets in the cluster; their values may be nowhere else."""
    secrets = lab.api.items("/api/v1/namespaces/default/secrets", labelSelector=OURS)
    assert len(secrets) == 2
    values = {base64.b64decode(value) for secret in secrets for value in secret["data"].values()}
    assert SECRET.encode() in values
    assert len(values) == 3, "the user's secret, and a token for each run"
    logs = "".join(lab.kubectl("logs", pod) for name in names for pod in pod_names(lab, name))
    for value in values:
        assert value.decode() not in facts
        assert value.decode() not in logs
        assert not subprocess.run(["grep", "-r", value, ".", str(lab.kubelet.folder / "claims")], capture_output=True).stdout


def test_status_logs_stop_and_resume(lab: Cluster) -> None:
    run_ok("train", "small.py", "steps=500", *FAST, "--name", "reference", "--hang-after", "5min")
    run_ok("train", "small.py", "steps=500", *FAST, "--on", "lab", "--name", "stopped")
    follower = follow("stopped")
    wait_until(lambda: step("stopped") >= 10, "steps", process=follower)
    shown = run_ok("status", "stopped")
    (pod,) = pod_names(lab, "stopped")
    assert "running on lab" in shown
    assert f"pod 0   {pod}   running   on node-1" in shown
    assert "Started  " in shown
    assert "on lab already" in run_ok("train", "small.py", "steps=500", *FAST, "--on", "lab", "--name", "stopped")
    assert "still runs there: stop it first" in expect_error("down", "lab", "--yes")
    assert "stopped on lab (preempted)" in run_ok("stop", "stopped")
    printed, _ = follower.communicate(timeout=120)
    assert follower.returncode == 0, printed
    assert step("stopped") < 500
    assert not pod_names(lab, "stopped")
    write_task(text="raise SystemExit('this version must not be used')")
    assert "resume  from step" in run_ok("resume", "stopped", "--wait")
    assert losses("stopped") == losses("reference")
    assert weights("stopped") == weights("reference")


@pytest.mark.long
def test_what_a_pod_waits_for(lab: Cluster) -> None:
    def reason(name: str, text: str) -> str:
        return str(wait_until(lambda: text in (shown := run_ok("status", name)) and shown, text, 60))

    write_target(image="registry.example/missing:1")
    run_ok("train", "small.py", *FAST, "--on", "lab", "--name", "image")
    assert "the image registry.example/missing:1 cannot be pulled" in reason("image", "cannot be pulled")
    write_target(gpus=2, device="cuda")
    run_ok("train", "small.py", *FAST, "--on", "lab", "--name", "gpus")
    assert "no node has as many free nvidia.com/gpu as a pod asks for" in reason("gpus", "nvidia.com/gpu")
    write_target(runs_volume="nothing")
    run_ok("train", "small.py", *FAST, "--on", "lab", "--name", "volume")
    assert json.loads(run_ok("status", "gpus", "--json"))["status"] == "queued"
    reason("volume", "there is no PersistentVolumeClaim nothing: create it")
    write_target()
    found = checks(0)
    fixes = {name: found[f"pod {record(name)['handle']['job']}-master-0"]["fix"] for name in ("image", "gpus", "volume")}
    assert "cannot be pulled" in fixes["image"]
    assert "no node has as many free nvidia.com/gpu" in fixes["gpus"]
    assert "there is no PersistentVolumeClaim nothing" in fixes["volume"]
    run_ok("stop", "image", "gpus", "volume")
    assert not pod_names(lab, "image") and not pod_names(lab, "gpus")


def test_a_crash_is_not_repeated(lab: Cluster) -> None:
    write_task(text=TASK.replace("return F.cross", "raise ValueError('this task crashes')\n        return F.cross"))
    done = run_drivetrain("train", "small.py", *FAST, "--on", "lab", "--wait", "--name", "crashed")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "this task crashes" in done.stdout
    assert record("crashed")["exit_code"] == 1
    assert len(pod_names(lab, "crashed")) == 1
    created = [event for event in events(lab, "crashed") if event["reason"] == "SuccessfulCreatePod"]
    assert [event["count"] for event in created] == [1], "the operator has made one pod, and no other after its end"


def events(lab: Cluster, name: str) -> list[Object]:
    """Returns the events of a run's job."""
    return lab.api.items("/api/v1/namespaces/default/events", fieldSelector=f"involvedObject.name={record(name)['handle']['job']}")


@pytest.mark.long
def test_a_run_that_fails_at_each_start_ends(lab: Cluster) -> None:
    """The operator makes its pod again after every code of 128 or more."""
    dies = "import os\n        os.kill(os.getpid(), 9)\n        return F.cross"
    write_task(change=("return F.cross", dies))
    write_target(retries=1)
    done = run_drivetrain("train", "small.py", *FAST, "--restarts", "0", "--on", "lab", "--wait", "--name", "hopeless")
    assert done.returncode == 201, done.stdout + done.stderr
    assert "in 2 pods without a new checkpoint" in done.stdout
    assert "without a new checkpoint: drivetrain logs tell why" in run_ok("status", "hopeless")
    created = [event for event in events(lab, "hopeless") if event["reason"] == "SuccessfulCreatePod"]
    assert [event["count"] for event in created] == [2], "retries: 1"
    assert record("hopeless")["exit_code"] == 201


@pytest.mark.long
@pytest.mark.parametrize("kind", ["pytorchjob", "trainjob"])
def test_a_run_that_meets_its_deadline_saves_and_can_go_on(lab: Cluster, kind: str) -> None:
    write_target(deadline="75s", job=kind, image="registry.example/drivetrain:cpu")
    done = run_drivetrain("train", "small.py", "steps=20000", "save_every=1000", *FAST, "--on", "lab", "--wait", "--name", "late")
    assert done.returncode == 200, done.stdout + done.stderr
    assert "its deadline passed: raise deadline: in the target" in run_ok("status", "late")
    last = step("late")
    assert Run("runs/late").checkpoint_steps()[-1] == last > 0, "it has saved in its grace period"
    write_target(job=kind, image="registry.example/drivetrain:cpu")
    assert "done    " in run_ok("resume", "late", f"steps={last + 5}", "--wait")
    assert [row["step"] for row in Run("runs/late").rows() if "train/loss" in row] == list(range(1, last + 6))


@pytest.mark.long
def test_large_code_travels_by_a_volume(lab: Cluster) -> None:
    write_task(change=("import torch\n", "import torch\nimport table\n"))
    Path("table.py").write_text(f"WIDTH = 7\n# {'x' * (1 << 20)}\n")
    write_target(code_volume="nothing")
    message = expect_error("train", "small.py", "steps=5", *FAST, "--on", "lab", "--name", "large")
    assert "code_volume: there is no PersistentVolumeClaim nothing in default: create it, or install the large ones as a package" in message
    assert not our_objects(lab) and not Path("runs/large").exists()
    write_target(code_volume="runs")
    output = run_ok("train", "small.py", "steps=5", *FAST, "--on", "lab", "--wait", "--name", "large")
    assert "MB) to the volume runs" in output
    assert "done    5 steps" in output
    assert not [name for name in our_objects(lab) if name.startswith("configmap")]
    assert not [pod for pod in lab.pods() if pod["metadata"]["name"].startswith("drivetrain-files")], "the pod that copied the code is gone"


def test_kubectl_applies_what_dry_run_prints(lab: Cluster) -> None:
    text = run_ok("train", "small.py", "steps=5", *FAST, "--on", "lab", "--name", "by-hand", "--dry-run")
    assert not Path("runs").exists()
    lab.kubectl("apply", "-f", "-", stdin=text)
    (job,) = [item for item in yaml.safe_load_all(text) if item["kind"] == "PyTorchJob"]
    name = job["metadata"]["name"]
    conditions = lambda: lab.kubectl("get", "pytorchjob", name, "-o", "jsonpath={.status.conditions[*].type}").split()  # noqa: E731
    wait_until(lambda: {"Succeeded", "Failed"} & set(conditions()), "the job's end", 120)
    assert "done    5 steps" in lab.kubectl("logs", f"{name}-master-0")
    assert "Succeeded" in conditions()


def test_train_job(lab: Cluster) -> None:
    write_task(text=WITHOUT_DROPOUT)
    write_target(job="trainjob", image="registry.example/drivetrain:cpu")
    run_ok("train", "small.py", *FAST, "--procs", "2", "--name", "here")
    output = run_ok("train", "small.py", *FAST, "--on", "lab", "--nodes", "2", "--wait", "--name", "there")
    assert "2 of 2 machines have joined" in output
    assert losses("there") == pytest.approx(losses("here"), rel=1e-6)
    assert "finished on lab" in run_ok("status", "there")
    logs = Run("runs/there").path / "logs"
    assert {path.name for path in logs.glob("*.log")} == {"output.log", "output-1.log", "rank-0.log", "rank-1.log"}
    assert "machine" in (logs / "output-1.log").read_text(), "the other pod's output"


def test_a_train_job_whose_pods_are_killed_finishes_exactly(lab: Cluster) -> None:
    write_task(change=SLOW, text=WITHOUT_DROPOUT)
    write_target(job="trainjob", image="registry.example/drivetrain:cpu")
    train = ("train", "small.py", "steps=300", "save_every=10", *FAST, "--on", "lab", "--nodes", "2", "--name")
    run_ok(*train, "killed")
    follower = follow("killed")
    wait_until(lambda: step("killed") >= 20, "steps", process=follower)
    for number in (1, 0):
        (name,) = [name for name in pod_names(lab, "killed") if f"-node-0-{number}-" in name]
        pod, before = lab.kubelet.find("default", name), step("killed")
        assert pod is not None
        container = pod.containers["node"]
        container.signal(signal.SIGKILL)
        wait_until(lambda pod=pod, container=container: pod.containers["node"] is not container, "another container", 180)
        wait_until(lambda before=before: step("killed") >= min(before + 15, 295), "further steps", process=follower)
    printed, _ = follower.communicate(timeout=400)
    assert follower.returncode == 0, printed
    assert Run("runs/killed").status == "finished"
    run_ok(*train, "undisturbed", "--wait")
    assert [row["step"] for row in Run("runs/killed").rows() if "train/loss" in row] == list(range(1, 301))
    assert losses("killed") == losses("undisturbed")
    assert weights("killed") == weights("undisturbed")


def test_the_python_client_creates_the_train_job_that_dry_run_prints(lab: Cluster) -> None:
    kubernetes = pytest.importorskip("kubernetes")
    write_target(job="trainjob", image="registry.example/drivetrain:cpu")
    text = run_ok("train", "small.py", "steps=5", *FAST, "--on", "lab", "--name", "by-client", "--dry-run")
    code, job = yaml.safe_load_all(text)
    configuration = kubernetes.config.new_client_from_config(str(lab.kubeconfig))
    kubernetes.client.CoreV1Api(configuration).create_namespaced_config_map("default", code, field_validation="Strict")
    jobs = kubernetes.client.CustomObjectsApi(configuration)
    where = {"group": "trainer.kubeflow.org", "version": "v1alpha1", "namespace": "default", "plural": "trainjobs"}
    jobs.create_namespaced_custom_object(**where, body=job, field_validation="Strict")
    name = job["metadata"]["name"]
    conditions = lambda: lab.kubectl("get", "trainjob", name, "-o", "jsonpath={.status.conditions[*].type}").split()  # noqa: E731
    wait_until(lambda: {"Complete", "Failed"} & set(conditions()), "the job's end", 120)
    (pod,) = lab.pods(**{"jobset.sigs.k8s.io/jobset-name": name})
    assert "done    5 steps" in lab.kubectl("logs", pod["metadata"]["name"])
    assert "Complete" in conditions()


NVIDIA_SMI = """\
#!/bin/sh
[ "$1" = "--query-gpu=index,utilization.gpu,memory.used,memory.total,power.draw" ] || exit 1
echo "0, 97, 61203, 81559, 612.43"
"""


@pytest.mark.long
def test_status_shows_the_gpu_of_each_rank(lab: Cluster, bucket: Path) -> None:
    """What nvidia-smi prints in a pod is played by a script."""
    program = bucket / "nvidia-smi"
    program.write_text(NVIDIA_SMI)
    program.chmod(0o755)
    write_target(env={"PATH": f"{bucket}:{IMAGE_ENV['PATH']}"})
    write_task(change=SLOW, text=WITHOUT_DROPOUT)
    run_ok("train", "small.py", "steps=5000", *FAST, "--on", "lab", "--nodes", "2", "--procs", "1", "--name", "watched")
    job = record("watched")["handle"]["job"]
    shown = str(wait_until(lambda: "rank 1 " in (text := run_ok("status", "watched")) and text, "both pods"))
    assert f"rank 0   GPU 0 of {job}-master-0: 97 % busy, 61203 of 81559 MiB, 612.43 W" in shown
    assert f"rank 1   GPU 0 of {job}-worker-0: 97 % busy, 61203 of 81559 MiB, 612.43 W" in shown
    run_ok("stop", "watched")


def test_a_field_that_the_cluster_does_not_know(lab: Cluster) -> None:
    """An older Trainer: its schema has no runtimePatches. The API server refuses the job, and nothing of it stays."""
    write_target(job="trainjob", image="registry.example/drivetrain:cpu", secrets=["MY_API_KEY"])
    with lab.changed_schema("trainjobs.trainer.kubeflow.org", "runtimePatches"):
        message = expect_error("train", "small.py", *FAST, "--on", "lab", "--name", "old", MY_API_KEY=SECRET)
    assert "Trainer is older than 2.3" in message
    assert not our_objects(lab)
    assert not Path("runs/old").exists()


def test_trials_are_jobs(lab: Cluster) -> None:
    write_task()
    search = ("--search", "learning_rate=0.001..0.1,log", "--trials", "2", "--jobs", "2", "--prune", "none", "--metric", "eval/accuracy")
    result = json.loads(run_ok("tune", "small.py", "epochs=1", *FAST, *search, "--on", "lab", "--json"))
    assert [trial["state"] for trial in result["trials"]] == ["finished"] * 2
    jobs = {json.loads(Path(trial["run"], "target.json").read_text())["handle"]["job"] for trial in result["trials"]}
    assert len(jobs) == 2


def test_down_removes_what_this_user_made(lab: Cluster) -> None:
    others: list[Object] = [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "plain"}, "data": {"a": "b"}},
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "colleague", "labels": {"app.kubernetes.io/managed-by": "drivetrain", "drivetrain/owner": "colleague"}},
        },
    ]
    lab.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(others))
    run_ok("train", "small.py", "steps=3", *FAST, "--on", "lab", "--wait", "--name", "over")
    before = our_objects(lab)
    assert any(name.startswith("pytorchjob") for name in before) and "configmap/plain" not in before
    output = run_ok("down", "lab", "--yes")
    assert "the files in runs stay" in output
    wait_until(lambda: our_objects(lab) == ["configmap/colleague"], "what is left", 60)
    lab.kubectl("get", "configmap", "plain")
    lab.kubectl("delete", "configmap", "plain", "colleague")


def checks(code: int) -> dict[str, dict[str, str]]:
    done = run_drivetrain("doctor", "--on", "lab", "--json")
    assert done.returncode == code, done.stdout + done.stderr
    return {check["subject"]: check for check in json.loads(done.stdout)}


def test_doctor(lab: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    found = checks(0)
    assert found["rights"]["verdict"] == "ok"
    assert found["GPUs"]["verdict"] == "warning" and "no node of this Kubernetes cluster has nvidia.com/gpu" in found["GPUs"]["evidence"]
    write_target(gpus=2, device="cuda")
    assert checks(201)["GPUs"]["verdict"] == "fault"
    lab.kubelet.add_node("gpu-1", gpus=4, labels={"eks.amazonaws.com/nodegroup": "gpu"})
    try:
        found = checks(0)
        assert found["GPUs"] | {"verdict": "ok", "evidence": "4 nvidia.com/gpu on 1 nodes (4 on one)"} == found["GPUs"]
        assert "EKS" in found["reach"]["evidence"]
    finally:
        lab.kubelet.remove_node("gpu-1")
    write_target()
    lab.remove_operators()
    try:
        found = checks(201)
        assert found["operator"]["verdict"] == "fault" and "training-operator" in found["operator"]["fix"]
        write_target(job="auto")
        assert "the cluster has neither PyTorchJobs nor TrainJobs" in expect_error("train", "small.py", "--on", "lab", code=201)
    finally:
        lab.install_operators()


def test_a_user_without_rights(lab: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(lab.write_user("nobody")))
    found = checks(201)
    assert found["rights"]["verdict"] == "fault" and "create pytorchjobs" in found["rights"]["evidence"]
    message = expect_error("train", "small.py", *FAST, "--on", "lab", "--name", "forbidden")
    assert "you (nobody) may not" in message
    assert not Path("runs/forbidden").exists()


def grant(lab: Cluster, user: str, rules: list[Object]) -> None:
    """Gives a user of the cluster these rights in the namespace, and no others."""
    about = {"apiVersion": "rbac.authorization.k8s.io/v1", "metadata": {"name": user}}
    subject = {"kind": "User", "name": user, "apiGroup": "rbac.authorization.k8s.io"}
    reference = {"kind": "Role", "name": user, "apiGroup": "rbac.authorization.k8s.io"}
    binding = about | {"kind": "RoleBinding", "subjects": [subject], "roleRef": reference}
    lab.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all([about | {"kind": "Role", "rules": rules}, binding]))


def rule(verb: str, resource: str, subresource: str = "", group: str = "") -> Object:
    return {"apiGroups": [group], "resources": [f"{resource}/{subresource}" if subresource else resource], "verbs": [verb]}


def test_the_rights_that_doctor_asks_for_are_enough(lab: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first submission to `down`, by a user with exactly these rights."""
    jobs = [rule(verb, "pytorchjobs", group="kubeflow.org") for verb in cluster_checks.JOB_RIGHTS]
    grant(lab, "colleague", [*jobs, *(rule(*right) for right in cluster_checks.RIGHTS)])
    monkeypatch.setenv("KUBECONFIG", str(lab.write_user("colleague")))
    found = checks(0)
    assert found["rights"]["verdict"] == "ok", found["rights"]
    write_target(secrets=["MY_API_KEY"])
    run_ok("train", "small.py", "steps=300", *FAST, "--on", "lab", "--name", "stopped", MY_API_KEY=SECRET)
    wait_until(lambda: run_ok("status", "stopped") and step("stopped") >= 5, "steps")
    assert "Started  " in run_ok("status", "stopped")
    assert "stopped on lab (preempted)" in run_ok("stop", "stopped")
    assert "done    " in run_ok("resume", "stopped", "--wait", MY_API_KEY=SECRET)
    assert "finished on lab" in run_ok("status", "stopped")
    run_ok("pull", "stopped")
    assert "PyTorchJob stopped-" in run_ok("down", "lab", "--yes")
    wait_until(lambda: not our_objects(lab), "an empty cluster", 60)


def test_doctor_misses_each_single_right(lab: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [rule(verb, "pytorchjobs", group="kubeflow.org") for verb in cluster_checks.JOB_RIGHTS]
    grant(lab, "newcomer", [*jobs, *(rule(*right) for right in cluster_checks.RIGHTS if right != ("get", "configmaps", ""))])
    monkeypatch.setenv("KUBECONFIG", str(lab.write_user("newcomer")))
    assert checks(201)["rights"]["evidence"] == "you may not: get configmaps"
