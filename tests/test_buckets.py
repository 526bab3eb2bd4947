"""Runs in a bucket, with stores of this process and folders (`file:///`). tests/system/test_buckets.py uses a server that speaks S3."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drivetrain.buckets.errors import Temporary, explain
from drivetrain.buckets.fetch import copy_small_files, fetch, link
from drivetrain.buckets.layout import complete_checkpoints, is_safe, is_small, read_mark
from drivetrain.buckets.lease import Lease, Lost, holder_of
from drivetrain.buckets.models import upload_model
from drivetrain.buckets.push import Pusher
from drivetrain.buckets.store import Store
from drivetrain.buckets.url import BucketUrl, is_url, parse
from drivetrain.engine.state.checkpoint import verify
from drivetrain.outcomes import Outcome, Problem
from drivetrain.runs import Run
from tests.command import COMMAND, environment, expect_error, run_drivetrain, run_ok, write_task
from tests.launching import free_port
from tests.sample_tasks import rows, weights
from tests.waiting import wait_until

# --- addresses ---------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["s3://team/runs/night-3", "gs://team_1/night-3", "file:///mnt/share/a b/night-3", "s3://a.b-c/x/y/z"])
def test_addresses(text: str) -> None:
    assert str(parse(text + "/", "--run-dir")) == text
    assert is_url(text)


HOSTILE = {
    "s3://team": "write s3://BUCKET/PATH/NAME",
    "s3:///runs/x": "write s3://BUCKET/PATH/NAME",
    "s3://team/../other/x": "write s3://BUCKET/PATH/NAME",
    "s3://team/runs/.hidden": "write s3://BUCKET/PATH/NAME",
    "s3://team/runs//x": "write s3://BUCKET/PATH/NAME",
    "s3://team/runs/*": "write s3://BUCKET/PATH/NAME",
    "s3://team/runs/x\ny": "write s3://BUCKET/PATH/NAME",
    "s3://team/$(touch x)/x;y": "write s3://BUCKET/PATH/NAME",
    "s3://team/" + "n" * 300: "has 300 characters",
    "s3://key:secret@team/x": "keys do not belong in an address",
    "s3://team/x?X-Amz-Signature=abc": "keys do not belong in an address",
    "file://host/share/x": "write file:///FOLDER/NAME",
    "file:///x": "write file:///FOLDER/NAME",
    "file:///mnt/../etc/x": "write file:///FOLDER/NAME",
    "hdfs://name/x": "hdfs addresses are not supported",
    "https://host/run": "https addresses are not supported",
}


@pytest.mark.parametrize("text", HOSTILE)
def test_addresses_that_are_refused(text: str) -> None:
    with pytest.raises(Problem) as caught:
        parse(text, "--run-dir")
    assert HOSTILE[text] in str(caught.value)
    assert "secret" not in str(caught.value)
    assert "abc" not in str(caught.value)


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", ".bucket/lock", "a/.ssh/x", "a\\..\\x\0", "a\nb", "", "a//b", "-" * 300])
def test_names_in_a_bucket_that_are_never_written_here(name: str) -> None:
    assert not is_safe(name)
    assert not is_small(name)


def test_files_of_a_machine_are_not_copied() -> None:
    """The lock and the record of a target are of one machine."""
    assert is_small("metrics.jsonl")
    assert is_small("2-tune/logs/rank-0.log")
    for name in ("lock", "target.json", "2-tune/lock", "job/x", "checkpoints/step-00000001/manifest.json", "2-tune/checkpoints/x"):
        assert not is_small(name)


# --- failures ----------------------------------------------------------------------------------


class ClientError(Exception):
    """A stand-in for botocore's exception, which holds the answer of the store."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"An error occurred ({code}) when calling the PutObject operation: {text}")
        self.response = {"Error": {"Code": code, "Message": text}}


# The texts are those of S3, botocore, aiohttp and gcsfs.
RECORDED: list[tuple[BaseException, str, bool]] = [
    (ImportError("Install s3fs to access S3"), "pip install 'drivetrain[bucket]'", False),
    (ClientError("NoSuchBucket", "The specified bucket does not exist"), "there is no bucket team", False),
    (ClientError("AccessDenied", "Access Denied"), "need to list, read, write and delete", False),
    (OSError("Forbidden: b/team/o\nme@x.iam does not have storage.objects.create access"), "need to list, read, write", False),
    (OSError("Forbidden: https://storage.googleapis.com/b/team\nAnonymous caller does not have storage.objects.list access"), "gcloud auth", False),
    (ClientError("ExpiredToken", "The provided token has expired."), "the credentials have expired", False),
    (ClientError("InvalidAccessKeyId", "The AWS Access Key Id you provided does not exist in our records."), "refuses these credentials", False),
    (ClientError("SignatureDoesNotMatch", "The request signature we calculated does not match"), "refuses these credentials", False),
    (ClientError("RequestTimeTooSkewed", "The difference between the request time and the current time is too large."), "clock", False),
    (ClientError("PermanentRedirect", "The bucket you are attempting to access must be addressed using the specified endpoint."), "AWS_REGION", False),
    (type("NoCredentialsError", (Exception,), {})("Unable to locate credentials"), "there are no credentials here", False),
    (type("ProfileNotFound", (Exception,), {})("The config profile (x) could not be found"), "correct AWS_PROFILE", False),
    (ClientError("SlowDown", "Please reduce your request rate."), "throttled", True),
    (type("HttpError", (Exception,), {})("The rate of change requests to the object exceeds the rate limit., 429"), "throttled", True),
    (ClientError("InternalError", "We encountered an internal error. Please try again."), "a fault of its own", True),
    (type("HttpError", (Exception,), {})("Backend Error, 503"), "a fault of its own", True),
    (type("EndpointConnectionError", (Exception,), {})('Could not connect to the endpoint URL: "http://127.0.0.1:1/"'), "cannot be reached", True),
    (type("ReadTimeoutError", (Exception,), {})('Read timeout on endpoint URL: "http://127.0.0.1/"'), "does not answer", True),
    (type("ConnectionClosedError", (Exception,), {})("Connection was closed before we received a valid response"), "connection to the store broke", True),
    (OSError(28, "No space left on device", "/runs/x"), "the disk is full (/runs/x)", False),
]  # fmt: skip


@pytest.mark.parametrize(("error", "text", "is_temporary"), RECORDED, ids=[f"{type(e).__name__}-{t}" for e, t, _ in RECORDED])
def test_each_failure_gives_one_line_that_names_the_fix(error: BaseException, text: str, is_temporary: bool) -> None:
    problem = explain(error, BucketUrl("gs" if "gcloud" in text else "s3", "team/runs/x"))
    assert text in str(problem)
    assert "\n" not in str(problem)
    assert isinstance(problem, Temporary) == is_temporary
    if is_temporary:
        assert problem.outcome is Outcome.INFRA


def test_an_unknown_failure_shows_no_key() -> None:
    error = RuntimeError("GET https://me:hunter2@host/x?X-Amz-Signature=abcdef AKIAABCDEFGHIJKLMNOP token=xyzzy")
    text = str(explain(error, BucketUrl("s3", "team/x")))
    for secret in ("hunter2", "abcdef", "AKIA", "xyzzy"):
        assert secret not in text


def test_throttled_and_cut_requests_are_repeated_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drivetrain.buckets.store.FIRST_PAUSE_SECONDS", 0.001)
    store = memory_store("repeated")
    store.patience = 10.0
    errors = [ClientError("SlowDown", "Please reduce your request rate."), ConnectionResetError("Connection reset by peer")]
    original = store._fs.pipe_file

    def fail(*args: Any, **options: Any) -> None:
        if errors:
            raise errors.pop(0)
        original(*args, **options)

    monkeypatch.setattr(store._fs, "pipe_file", fail)
    store.write("x", b"1")
    assert store.read("x") == b"1"
    errors.append(ClientError("AccessDenied", "Access Denied"))
    with pytest.raises(Problem, match="access denied"):
        store.write("x", b"2")
    store.patience = 0.0
    errors.append(ClientError("SlowDown", "Please reduce your request rate."))
    with pytest.raises(Temporary, match="throttled"):
        store.write("x", b"2")


# --- a run with checkpoints, without a training --------------------------------------------------


def memory_store(name: str) -> Store:
    return Store(BucketUrl("memory", f"{name}/{time.monotonic_ns()}/run"), patience=0.0)


def folder_store(path: Path) -> Store:
    return Store(BucketUrl("file", str(path.absolute())), patience=0.0)


def write_run(path: Path, status: str = "running") -> Run:
    (path / "logs").mkdir(parents=True, exist_ok=True)
    (path / "run.json").write_text(json.dumps({"format": 1, "status": status}))
    (path / "logs" / "rank-0.log").write_text("hello\n")
    (path / "lock").write_text("of this machine")
    (path / "metrics.jsonl").touch()
    return Run(path)


def write_checkpoint(run: Run, step: int, content: bytes = b"weights") -> None:
    """Writes a row and a checkpoint of two files, as a training does: rows first."""
    with open(run.metrics_path, "a") as file:
        file.write(json.dumps({"step": step}) + "\n")
    path = run.checkpoints / f"step-{step:08d}"
    path.mkdir(parents=True)
    files = {".metadata": b"index", "__0_0.distcp": content * step}
    for name, data in files.items():
        (path / name).write_bytes(data)
    entries = {name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()}
    (path / "manifest.json").write_text(json.dumps({"format": 1, "step": step, "files": entries, "extra": {"best": {"step": None}}}))


def delete_checkpoint(run: Run, step: int) -> None:
    shutil.rmtree(run.checkpoints / f"step-{step:08d}")


def checkpoint_files(run: Run, step: int) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (run.checkpoints / f"step-{step:08d}").iterdir()}


def ignore(_: str) -> None:
    pass


@pytest.mark.parametrize(
    "make", [lambda path: memory_store("copied"), lambda path: folder_store(path / "bucket" / "run")], ids=["memory", "file"]
)
def test_a_run_is_the_same_after_it_was_copied_there_and_back(tmp_path: Path, make: Callable[[Path], Store]) -> None:
    store, run = make(tmp_path), write_run(tmp_path / "here")
    write_checkpoint(run, 10)
    write_checkpoint(run, 20)
    (run.path / "task").mkdir()
    (run.path / "task" / "my task.py").write_text("code")
    run.media.mkdir()
    run.picture_path("x", 10).write_bytes(b"\x89PNG")
    (run.path / "leak").symlink_to("/etc/passwd")
    pusher = Pusher(store, run.path)
    pusher.push(is_last=True)
    assert pusher.missing() == []
    assert not {"lock", "leak"} & set(store.list())
    there = Run(tmp_path / "there")
    assert fetch(store, there.path, ignore)
    assert there.checkpoint_steps() == [20]
    assert checkpoint_files(there, 20) == checkpoint_files(run, 20)
    for name in ("run.json", "metrics.jsonl", "logs/rank-0.log", "task/my task.py", "media/x-00000010.png"):
        assert (there.path / name).read_bytes() == (run.path / name).read_bytes()
    assert not fetch(store, there.path, ignore), "it has all of it"


def test_the_keep_rule_holds_in_the_bucket_and_its_last_checkpoint_stays(tmp_path: Path) -> None:
    store, run = memory_store("keep"), write_run(tmp_path / "here")
    pusher = Pusher(store, run.path)
    for step in (10, 20, 30):
        write_checkpoint(run, step)
        pusher.push()
    delete_checkpoint(run, 10)
    pusher.push()
    assert [found.step for found in complete_checkpoints(store.list())] == [20, 30]
    assert not any("step-00000010" in name for name in store.list())
    for step in (20, 30):  # for example all of them damaged, and removed by hand
        delete_checkpoint(run, step)
    pusher.push()
    assert [found.step for found in complete_checkpoints(store.list())] == [30]


class DyingStore(Store):
    """Dies like a killed process: before or after the n-th write, and never writes again."""

    def __init__(self, url: BucketUrl, writes: int, is_before: bool) -> None:
        super().__init__(url, patience=0.0)
        self.writes, self.is_before = writes, is_before

    def _on_writing(self, action: Callable[[], object], source: Path | None = None) -> None:
        self.writes -= 1
        if self.writes < 0 or (self.writes == 0 and self.is_before):
            raise KeyboardInterrupt
        super()._on_writing(action, source)

    def delete(self, *names: str) -> None:
        for name in names:
            self._on_writing(lambda name=name: Store.delete(self, name))


def test_killed_at_every_write_and_at_each_the_bucket_has_a_whole_checkpoint(tmp_path: Path) -> None:
    """And another machine takes it, with all rows up to it, while the next mirror completes what the killed one began."""
    num_kills = 0
    for writes in range(1, 60):
        for is_before in (True, False):
            root = tmp_path / f"{writes}-{is_before}"
            run, url = write_run(root / "here"), BucketUrl("file", f"{root.absolute()}/bucket/run")
            write_checkpoint(run, 10)
            Pusher(Store(url), run.path).push()
            write_checkpoint(run, 20)
            write_checkpoint(run, 30)
            delete_checkpoint(run, 10)
            try:
                pusher = Pusher(DyingStore(url, writes, is_before), run.path)
                pusher.push()
                continue
            except KeyboardInterrupt:
                num_kills += 1
            there = Run(root / "there")
            assert fetch(Store(url), there.path, ignore)
            (step,) = there.checkpoint_steps()
            assert step == 10 or checkpoint_files(there, step) == checkpoint_files(run, step)
            assert [row["step"] for row in there.rows()][: step // 10] == list(range(10, step + 10, 10))
            Pusher(Store(url), run.path).push(is_last=True)
            assert [found.step for found in complete_checkpoints(Store(url).list())] == [20, 30]
        if num_kills and writes > num_kills:  # both returned without a kill
            break
    assert num_kills > 15, "fewer writes than a checkpoint and the small files have: this test proves nothing"


def test_a_checkpoint_that_the_training_deletes_while_it_is_copied_is_copied_all_the_same(tmp_path: Path) -> None:
    class SlowStore(Store):
        def upload(self, file: Path, name: str) -> None:
            if name.endswith("step-00000010/__0_0.distcp") and (run.checkpoints / "step-00000010").exists():
                delete_checkpoint(run, 10)
                write_checkpoint(run, 20)
            super().upload(file, name)

    run = write_run(tmp_path / "here")
    store = SlowStore(BucketUrl("file", f"{tmp_path.absolute()}/bucket/run"))
    write_checkpoint(run, 10)
    Pusher(store, run.path).push()
    assert [found.step for found in complete_checkpoints(store.list())] == [10]


@pytest.mark.parametrize("fault", ["shorter", "changed", "missing", "no mark", "bad mark", "outside"])
def test_a_damaged_checkpoint_is_reported_and_the_one_before_is_taken(tmp_path: Path, fault: str) -> None:
    store, run = folder_store(tmp_path / "bucket" / "run"), write_run(tmp_path / "here")
    write_checkpoint(run, 10)
    write_checkpoint(run, 20)
    Pusher(store, run.path).push()
    folder = tmp_path / "bucket" / "run" / "checkpoints" / "step-00000020"
    data, mark = folder / "__0_0.distcp", folder / "uploaded.json"
    if fault == "shorter":
        data.write_bytes(data.read_bytes()[:-1])
    elif fault == "changed":
        data.write_bytes(data.read_bytes()[:-1] + b"!")
    elif fault == "missing":
        data.unlink()
    elif fault == "no mark":
        mark.unlink()
    elif fault == "bad mark":
        mark.write_text("{")
    else:
        facts = json.loads(mark.read_text())
        facts["files"]["../../../escaped"] = facts["files"].pop("__0_0.distcp")
        mark.write_text(json.dumps(facts))
        assert read_mark(mark.read_bytes()).files == {}
    reports: list[str] = []
    there = Run(tmp_path / "there")
    assert fetch(store, there.path, reports.append, may_write=True)
    assert there.checkpoint_steps() == [10]
    assert fault == "no mark" or "step-00000020 is damaged and not used" in reports[0]
    assert [found.step for found in complete_checkpoints(store.list())] == [10], "nobody takes it again"
    assert not list(there.checkpoints.glob(".*"))


def test_a_checkpoint_whose_metrics_are_gone_is_not_taken(tmp_path: Path) -> None:
    """The training went back to step 10, and its machine was lost before it came to step 20 again."""
    store, run = folder_store(tmp_path / "bucket" / "run"), write_run(tmp_path / "here")
    write_checkpoint(run, 10)
    write_checkpoint(run, 20)
    Pusher(store, run.path).push()
    store.write("metrics.jsonl", b'{"step": 10}\n')
    there = Run(tmp_path / "there")
    assert fetch(store, there.path, ignore)
    assert there.checkpoint_steps() == [10]


def test_the_small_files_of_a_run_are_copied_without_its_checkpoints(tmp_path: Path) -> None:
    store, run = memory_store("small"), write_run(tmp_path / "here")
    write_checkpoint(run, 10)
    Pusher(store, run.path).push()
    store.write("../escaped", b"")
    copy_small_files(store, tmp_path / "a" / "there")
    assert sorted(p.name for p in (tmp_path / "a" / "there").iterdir()) == ["logs", "metrics.jsonl", "run.json"]
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["there"]


def test_a_folder_of_another_run_is_not_overwritten(tmp_path: Path) -> None:
    write_run(tmp_path / "here")
    with pytest.raises(Problem, match="is a run that is not in memory://"):
        link(tmp_path / "here", BucketUrl("memory", "x/here"))


# --- leases ------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda path: memory_store("lease"), lambda path: folder_store(path / "run")], ids=["memory", "file"])
def test_only_one_owner_has_the_lease(tmp_path: Path, make: Callable[[Path], Store]) -> None:
    store = make(tmp_path)
    first = Lease.acquire(store, "first", 60)
    with pytest.raises(Problem, match=rf"is being trained by process {os.getpid()} on .* 0 s old"):
        Lease.acquire(store, "second", 60)
    first.renew()
    Lease.acquire(store, "first", 60)  # the same folder, after its mirror was killed
    first.release()
    assert holder_of(store) is None
    Lease.acquire(store, "second", 60)


def test_a_dead_owner_loses_the_lease_and_cannot_renew_it(tmp_path: Path) -> None:
    store = folder_store(tmp_path / "run")
    dead = Lease.acquire(store, "dead", 60)
    time.sleep(0.3)
    Lease.acquire(store, "heir", 0.2)
    with pytest.raises(Lost, match="was taken over by process"):
        dead.renew()
    dead.release()
    holder = holder_of(store)
    assert holder is not None
    assert holder.owner == "heir", "the dead one removes only its own"


def test_of_two_that_begin_at_the_same_time_one_wins(tmp_path: Path) -> None:
    """The second one creates its lease between the first one's look and its own creation."""

    class RacingStore(Store):
        def create(self, name: str, content: bytes) -> bool:
            Lease.acquire(Store(self.url), "faster", 60)
            return super().create(name, content)

    with pytest.raises(Problem, match="is being trained by"):
        Lease.acquire(RacingStore(BucketUrl("file", f"{tmp_path.absolute()}/run")), "slower", 60)


# --- commands ----------------------------------------------------------------------------------


def test_a_run_goes_on_from_its_bucket_on_a_machine_that_has_never_seen_it(folder: Path) -> None:
    """The command is killed in the middle; the rest of the training on the other machine gives the same bits."""
    write_task()
    url, settings = f"file://{folder}/bucket/first", ["epochs=4", "save_every=7"]
    run_ok("train", "small.py", *settings, "--name", "undisturbed")
    killed = run_drivetrain("train", "small.py", *settings, "--run-dir", url, DRIVETRAIN_FAULTS="kill@step:20")
    assert killed.returncode == -9
    store = Store(parse(url, "x"))
    wait_until(lambda: holder_of(store) is None, "the last pass of the mirror, which outlives the command", 60)
    other = folder / "other machine"
    other.mkdir()
    os.chdir(other)
    output = run_ok("resume", url)
    assert re.search(r"\(step (7|14)\)", output), "it was saved before step 20"
    assert re.search(r"resume  from step (7|14)", output)
    assert rows("runs/first") == rows(folder / "runs" / "undisturbed")
    assert weights("runs/first") == weights(folder / "runs" / "undisturbed")
    assert (folder / "bucket" / "first" / "metrics.jsonl").read_bytes() == Path("runs/first/metrics.jsonl").read_bytes()
    assert (folder / "bucket" / "first" / "model" / "model.safetensors").read_bytes() == weights("runs/first")
    os.chdir(folder)
    assert "is finished" in run_ok("train", "small.py", *settings, "--run-dir", url), "what the other machine did is known here"


def test_commands_that_are_refused(folder: Path) -> None:
    write_task()
    assert "keys do not belong" in expect_error("train", "small.py", "--run-dir", "s3://key:secret@team/x")
    assert "there is no run at" in expect_error("resume", f"file://{folder}/bucket/none")
    assert not Path("runs/none").exists()
    assert "has no setting" in expect_error("train", "small.py", "x=1", "--run-dir", f"file://{folder}/bucket/none")
    run_ok("train", "small.py", "steps=1", "--name", "mine")
    assert "is a run that is not in" in expect_error("train", "small.py", "steps=1", "--run-dir", f"file://{folder}/bucket/mine")
    assert "has no bucket" in expect_error("upload", "mine")
    store = folder_store(folder / "bucket" / "held")
    Lease.acquire(store, "another machine", 60)
    message = expect_error("train", "small.py", "steps=1", "--run-dir", str(store.url), code=201)
    assert "is being trained by process" in message
    assert not Path("runs/held").exists()


def test_a_run_is_pulled_from_its_bucket(folder: Path) -> None:
    write_task()
    url = f"file://{folder}/bucket/done"
    run_ok("train", "small.py", "steps=4", "save_every=2", "--run-dir", url)
    other = folder / "other machine"
    other.mkdir()
    os.chdir(other)
    assert f"from {url}" in run_ok("pull", url)
    assert "finished" in run_ok("status", "done")
    assert weights("runs/done") == weights(folder / "runs" / "done")
    assert Run(Path("runs/done")).checkpoint_steps() == [4]
    assert "there is no run at" in expect_error("pull", f"file://{folder}/bucket/none")
    assert not Path("runs/none").exists()


def test_a_missing_package_is_named(folder: Path) -> None:
    """`fsspec` without `s3fs`, as it comes with torch."""
    write_task()
    Path("hidden").mkdir()
    Path("hidden/s3fs.py").write_text("raise ImportError('No module named s3fs')\n")
    message = expect_error("train", "small.py", "--run-dir", "s3://team/x", PYTHONPATH=f"hidden:{os.environ.get('PYTHONPATH', '')}")
    assert "pip install 'drivetrain[bucket]'" in message


def test_the_model_of_a_finished_run_is_uploaded(folder: Path) -> None:
    write_task()
    url = f"file://{folder}/public"
    output = run_ok("train", "small.py", "steps=2", "--name", "done", "--upload", url)
    assert f"upload  {url}/models/done" in output
    for name in ("done", "latest"):
        copy = folder / "public" / "models" / name
        assert (copy / "model.safetensors").read_bytes() == weights("runs/done")
        assert json.loads((copy / "task.json").read_text())["step"] == 2
        assert "model.safetensors" in json.loads((copy / "uploaded.json").read_text())["files"]
    (folder / "public" / "models" / "latest" / "stale.onnx").write_bytes(b"")
    run_ok("train", "small.py", "steps=3", "--name", "later")
    run_ok("upload", "later", url)
    latest = folder / "public" / "models" / "latest"
    assert json.loads((latest / "task.json").read_text())["step"] == 3
    assert not (latest / "stale.onnx").exists()
    assert sorted(p.name for p in (folder / "public" / "models").iterdir()) == ["done", "later", "latest"]


def test_a_resumed_run_uploads_its_model_too(folder: Path) -> None:
    """run.json keeps the address; `resume --upload` changes it, or gives one to a run that had none."""
    write_task(change=("return F.cross", "assert not Path('crash').exists()\n        return F.cross"))
    task = Path("small.py").read_text()
    Path("small.py").write_text(f"from pathlib import Path\n{task}")
    Path("crash").touch()
    url = f"file://{folder}/public"
    done = run_drivetrain("train", "small.py", "steps=2", "--name", "first", "--upload", url)
    assert done.returncode == 1, done.stdout + done.stderr
    Path("crash").unlink()
    assert f"upload  {url}/models/first" in run_ok("resume", "first")
    assert (folder / "public" / "models" / "first" / "model.safetensors").read_bytes() == weights("runs/first")
    assert "upload  " not in run_ok("resume", "first"), "it was finished before"
    run_ok("train", "small.py", "steps=2", "--name", "second")
    assert f"upload  {url}/models/second" in run_ok("resume", "second", "steps=3", "--upload", url)
    assert "upload  " not in run_ok("train", "small.py", "steps=2", "--name", "third")


def test_with_several_machines_the_leader_uploads(folder: Path) -> None:
    write_task()
    url, address = f"file://{folder}/public", f"127.0.0.1:{free_port()}"
    words = (
        "train",
        "small.py",
        "steps=3",
        "plan.threads=1",
        "--procs",
        "1",
        "--nodes",
        "2",
        "--rendezvous",
        address,
        "--upload",
        url,
        "--name",
    )
    started = [
        subprocess.Popen(
            [*COMMAND, *words, name, "--node-rank", rank], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank, name in (("0", "two"), ("1", "two-member"))
    ]
    leader, member = (process.communicate(timeout=300)[0] for process in started)
    assert [process.returncode for process in started] == [0, 0], leader + member
    assert f"upload  {url}/models/two" in leader
    assert "upload" not in member
    assert sorted(path.name for path in (folder / "public" / "models").iterdir()) == ["latest", "two"]


def test_a_run_with_the_name_of_the_newest_model_is_refused(folder: Path) -> None:
    """Its own copy, and the copy of the newest model, would have one address."""
    write_task()
    for words in (("--name", "latest"), ("--run-dir", "elsewhere/latest"), ("--run-dir", f"file://{folder}/share/latest")):
        message = expect_error("train", "small.py", "steps=2", *words, "--upload", f"file://{folder}/public")
        assert "models/latest is the newest model" in message
    assert not Path("runs").exists()
    run_ok("train", "small.py", "steps=2", "--name", "latest")
    assert "models/latest is the newest model" in expect_error("upload", "latest", f"file://{folder}/public")


def test_a_failed_upload_does_not_fail_the_run(folder: Path) -> None:
    write_task()
    Path("public").write_text("a file where a folder must be")
    output = run_ok("train", "small.py", "steps=2", "--name", "done", "--upload", f"file://{folder}/public", DRIVETRAIN_BUCKET_PATIENCE="1")
    assert "the model was not uploaded" in output
    assert f"drivetrain upload done file://{folder}/public" in output
    assert Run(Path("runs/done")).is_finished


def test_uploading_is_interrupted_and_the_copy_is_not_taken_for_a_complete_one(tmp_path: Path) -> None:
    run = write_run(tmp_path / "done", "finished")
    (run.path / "model").mkdir()
    run.card_path.write_text("{}")
    run.model_path.write_bytes(b"first")
    url = BucketUrl("file", str(tmp_path / "public"))
    upload_model(run, url, 0.0)
    run.model_path.write_bytes(b"second")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "upload", lambda *_: (_ for _ in ()).throw(Temporary("cut")))
        with pytest.raises(Temporary):
            upload_model(run, url, 0.0)
    assert not (tmp_path / "public" / "models" / "done" / "uploaded.json").exists()
    assert read_mark((tmp_path / "public" / "models" / "latest" / "uploaded.json").read_bytes()) is not None
    upload_model(run, url, 0.0)
    assert (tmp_path / "public" / "models" / "latest" / "model.safetensors").read_bytes() == b"second"


def test_the_engine_reads_a_checkpoint_that_came_from_a_bucket(folder: Path) -> None:
    write_task()
    url = f"file://{folder}/bucket/first"
    run_ok("train", "small.py", "steps=4", "save_every=2", "--run-dir", url)
    there = Run(folder / "there")
    assert fetch(Store(parse(url, "x")), there.path, ignore)
    assert verify(there.checkpoints / "step-00000004").step == 4
