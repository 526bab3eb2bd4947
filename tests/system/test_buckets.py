"""Runs in a bucket of a server that speaks S3 (moto's), behind a proxy that throttles, cuts, slows down and stalls connections."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from drivetrain.buckets.layout import complete_checkpoints
from drivetrain.buckets.lease import Holder, holder_of
from drivetrain.buckets.store import Store
from drivetrain.buckets.url import parse
from drivetrain.runs import Run
from tests.command import COMMAND, environment, expect_error, run_ok, write_task
from tests.killing import SLOW
from tests.sample_tasks import rows, weights
from tests.system.object_store import ACCESS_KEY, SECRET_KEY, ObjectStore, serving
from tests.waiting import wait_until

pytest.importorskip("s3fs", reason="needs pip install -e '.[bucket]'")
SETTINGS = ["epochs=8", "save_every=7", "eval_every=25", "plan.threads=1"]
LEASE_SECONDS = 12  # a mirror on a busy machine must be able to show life so often
SHORT = {"DRIVETRAIN_BUCKET_LEASE": str(LEASE_SECONDS), "DRIVETRAIN_BUCKET_PATIENCE": "60"}


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectStore]:
    with serving() as store:
        yield store


@pytest.fixture
def bucket(server: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    """The server, with this process's environment set so that the tests look at it without the proxy."""
    for name, value in server.direct_environment.items():
        monkeypatch.setenv(name, value)
    server.proxy.fault, server.proxy.num_faults = "", 0
    yield server
    server.proxy.fault = ""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never disturbed, without a bucket."""
    folder = tmp_path_factory.mktemp("undisturbed")
    before = Path.cwd()
    os.chdir(folder)
    try:
        write_task(change=SLOW)
        run_ok("train", "small.py", *SETTINGS, "--name", "undisturbed")
    finally:
        os.chdir(before)
    return folder / "runs" / "undisturbed"


def write_slow_task(step_seconds: float) -> None:
    """Writes the task of `undisturbed`: a step's duration changes no result."""
    write_task(change=(SLOW[0], SLOW[1].replace("0.012", str(step_seconds))))


def variables(bucket: ObjectStore, **extra: str) -> dict[str, str]:
    return bucket.environment | SHORT | extra


def store_of(url: str) -> Store:
    return Store(parse(url, "x"))


def start(bucket: ObjectStore, *words: str, **extra: str) -> subprocess.Popen[Any]:
    return subprocess.Popen(
        [*COMMAND, *words], env=environment(**variables(bucket, **extra)), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def mirrors() -> list[psutil.Process]:
    """Returns the mirrors of this test's run, which work in this folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if "drivetrain.buckets.mirror" in process.cmdline() and process.cwd() == os.getcwd():
                found.append(process)
        except psutil.Error:
            continue
    return found


def checkpoints_in(url: str) -> list[int]:
    return [checkpoint.step for checkpoint in complete_checkpoints(store_of(url).list())]


def assert_same(run: Path, reference: Path) -> None:
    assert rows(run) == rows(reference)
    assert weights(run) == weights(reference)


def assert_all_in_bucket(run: Path, url: str) -> None:
    store = store_of(url)
    assert store.read("model/model.safetensors") == weights(run)
    assert store.read("metrics.jsonl") == (run / "metrics.jsonl").read_bytes()
    assert json.loads(store.read("run.json") or b"{}")["status"] == "finished"
    assert checkpoints_in(url)[-1] == Run(run).last_checkpoint_step
    assert holder_of(store) is None


@pytest.mark.parametrize("fault", ["throttle", "cut", "slow"])
def test_a_bad_network_loses_nothing(folder: Path, bucket: ObjectStore, undisturbed: Path, fault: str) -> None:
    """The fault lasts from the first step to the end; cut connections go on for ten seconds."""
    write_task(change=SLOW)
    url = f"s3://team/runs/{fault}"
    command = start(bucket, "train", "small.py", *SETTINGS, "--run-dir", url)
    wait_until(lambda: (folder / "runs" / fault / "metrics.jsonl").is_file(), "the first rows", 120, command)
    bucket.proxy.fault = fault
    if fault == "cut":
        time.sleep(10)
        bucket.proxy.fault = ""
    output = command.communicate(timeout=300)[0]
    assert command.returncode == 0, output
    assert bucket.proxy.num_faults > 3, "the fault must occur, or this test proves nothing"
    assert "missing there" not in output, output
    bucket.proxy.fault = ""
    assert_same(folder / "runs" / fault, undisturbed)
    assert_all_in_bucket(folder / "runs" / fault, url)


@pytest.mark.parametrize("victim", ["mirror", "command", "both"])
def test_killed_in_the_middle_of_an_upload(folder: Path, bucket: ObjectStore, undisturbed: Path, victim: str) -> None:
    """The network is slow, so that the kill hits an upload. Another machine goes on from the bucket alone, with the same bits."""
    write_slow_task(0.15)
    url, name = f"s3://team/runs/killed-{victim}", f"killed-{victim}"
    bucket.proxy.bytes_per_second, bucket.proxy.fault = 40_000, "slow"
    command = start(bucket, "train", "small.py", *SETTINGS, "--run-dir", url)
    wait_until(lambda: checkpoints_in(url), "a checkpoint in the bucket", 200, command)
    wait_until(lambda: is_half_copied(url), "a half-copied checkpoint", 100, command)
    if victim != "mirror":
        kill_with_command(command)
    if victim != "command":
        for mirror in mirrors():
            mirror.kill()
    bucket.proxy.fault = ""
    if victim == "mirror":
        output = command.communicate(timeout=300)[0]
        assert command.returncode == 0, output
        assert_same(folder / "runs" / name, undisturbed)
        assert_all_in_bucket(folder / "runs" / name, url)
        return
    if victim == "command":
        wait_until(lambda: holder_of(store_of(url)) is None, "the last pass of the mirror", 120)
        assert checkpoints_in(url)[-1] == Run(folder / "runs" / name).last_checkpoint_step
    else:
        wait_until(lambda: has_no_lease(url), "the end of the lease", 30)
    other = folder / "other machine"
    other.mkdir()
    os.chdir(other)
    output = run_ok("resume", url, **variables(bucket))
    assert re.search(r"resume  from step [1-9]", output)
    assert_same(Path("runs") / name, undisturbed)
    assert_all_in_bucket(Path("runs") / name, url)


def is_half_copied(url: str) -> bool:
    names = store_of(url).list()
    begun = {match[1] for name in names if (match := re.match(r"checkpoints/(step-\d+)/", name))}
    return any(f"checkpoints/{step}/uploaded.json" not in names for step in begun)


def lease_age(url: str) -> float | None:
    holder: Holder | None = holder_of(store_of(url))
    return holder.age if holder else None


def has_no_lease(url: str) -> bool:
    age = lease_age(url)
    return age is None or age > LEASE_SECONDS + 0.5


def kill_with_command(command: subprocess.Popen[Any]) -> None:
    """Kills the command and its workers, but not its mirror."""
    own = mirrors()
    for child in psutil.Process(command.pid).children(recursive=True):
        if child not in own:
            child.kill()
    command.kill()
    command.communicate()


def test_two_machines(folder: Path, bucket: ObjectStore, undisturbed: Path) -> None:
    """The second is refused while the first trains; it takes over when the first is frozen; that one then stops copying and says so."""
    write_slow_task(0.2)
    url = "s3://team/runs/two"
    command = start(bucket, "train", "small.py", *SETTINGS, "--run-dir", url)
    wait_until(lambda: checkpoints_in(url), "a checkpoint in the bucket", 200, command)
    other = folder / "other machine"
    other.mkdir()
    os.chdir(other)
    write_slow_task(0.2)
    message = expect_error("train", "small.py", *SETTINGS, "--run-dir", url, code=201, **variables(bucket))
    assert re.search(r"is being trained by process \d+ on \S+ \(its last sign of life is \d+ s old\)", message)
    frozen = [psutil.Process(command.pid), *psutil.Process(command.pid).children(recursive=True)]
    for process in frozen:
        process.suspend()
    wait_until(lambda: has_no_lease(url), "the end of the lease", 60)
    run_ok("train", "small.py", *SETTINGS, "--run-dir", url, **variables(bucket))
    for process in frozen:
        process.resume()
    output = command.communicate(timeout=300)[0]
    assert command.returncode == 0, "the first one has trained to its end all the same"
    assert "is not mirrored any more" in output
    assert_same(Path("runs/two"), undisturbed)
    assert_all_in_bucket(Path("runs/two"), url)


def test_a_stopped_run_goes_on_on_another_machine_and_back(folder: Path, bucket: ObjectStore, undisturbed: Path) -> None:
    write_slow_task(0.2)
    url = "s3://team/runs/back"
    command = start(bucket, "train", "small.py", *SETTINGS, "--run-dir", url)
    wait_until(lambda: checkpoints_in(url), "a checkpoint in the bucket", 200, command)
    command.send_signal(signal.SIGTERM)
    assert command.wait(120) == 200
    other = folder / "other machine"
    other.mkdir()
    os.chdir(other)
    again = start(bucket, "resume", url)
    wait_until(
        lambda: "checkpoint" in (other / "runs/back/events.jsonl").read_text() if (other / "runs/back/run.json").is_file() else False,
        "the resume",
        120,
        again,
    )
    again.send_signal(signal.SIGTERM)
    assert again.wait(120) in (0, 200)
    os.chdir(folder)
    run_ok("train", "small.py", *SETTINGS, "--run-dir", url, **variables(bucket))
    assert_same(Path("runs/back"), undisturbed)
    assert_all_in_bucket(Path("runs/back"), url)


def longest_wait_for_rows(path: Path, num_rows: int) -> tuple[int, float]:
    """Reads the metrics until all rows are there. Returns the number of rows at first, and the longest time without a new one."""
    first = count = path.read_text().count("\n")
    last_change, longest = time.monotonic(), 0.0
    while count < num_rows:
        time.sleep(0.05)
        new = path.read_text().count("\n")
        longest = max(longest, time.monotonic() - last_change)
        if new > count:
            count, last_change = new, time.monotonic()
        assert longest < 60, f"no row after row {count} of {num_rows}"
    return first, longest


def test_a_store_that_stalls_forever_does_not_fail_the_run(folder: Path, bucket: ObjectStore, undisturbed: Path) -> None:
    """The run is finished here, names what is missing, and `upload` copies it later. No file or line has the keys."""
    write_task(change=SLOW)
    url = "s3://team/runs/stalled"
    command = start(bucket, "train", "small.py", *SETTINGS, "--run-dir", url, DRIVETRAIN_BUCKET_PATIENCE="1", DRIVETRAIN_BUCKET_TIMEOUT="3")
    wait_until(lambda: (folder / "runs/stalled/metrics.jsonl").is_file(), "the first rows", 120, command)
    bucket.proxy.fault = "stall"
    rows_before, longest_wait = longest_wait_for_rows(folder / "runs/stalled/metrics.jsonl", num_rows=len(rows(undisturbed)))
    assert rows_before < len(rows(undisturbed)) / 2, "the store must stall while the run trains, or the test proves nothing"
    assert longest_wait < 3, "training waited for the store, whose requests time out after 3 s"
    output = command.communicate(timeout=400)[0]
    assert command.returncode == 0, output
    assert "copy it with: drivetrain upload stalled" in output
    assert "missing there: " in output
    assert_same(folder / "runs/stalled", undisturbed)
    bucket.proxy.fault = ""
    wait_until(lambda: has_no_lease(url), "the end of the lease", 60)
    output += run_ok("upload", "stalled", **variables(bucket))
    assert_all_in_bucket(folder / "runs/stalled", url)
    output += run_ok("upload", "stalled", "s3://team/public", **variables(bucket))
    assert store_of("s3://team/public/models").read("latest/model.safetensors") == weights(folder / "runs/stalled")
    for path in folder.rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        assert SECRET_KEY.encode() not in content, path
        assert ACCESS_KEY.encode() not in content, path
    for name in store_of("s3://team/runs").list():
        assert SECRET_KEY.encode() not in (store_of("s3://team/runs").read(name) or b""), name
    assert SECRET_KEY not in output
    assert ACCESS_KEY not in output


def test_what_the_store_refuses(folder: Path, bucket: ObjectStore) -> None:
    write_task()
    words = ("train", "small.py", "steps=1", "--run-dir")
    assert "there is no bucket nobody" in expect_error(*words, "s3://nobody/runs/x", **variables(bucket))
    without = variables(bucket) | {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}
    assert "there are no credentials here" in expect_error(*words, "s3://team/runs/x", **without)
    assert "correct AWS_PROFILE" in expect_error(*words, "s3://team/runs/x", **variables(bucket, AWS_PROFILE="nobody"))
    closed = variables(bucket, AWS_ENDPOINT_URL="http://127.0.0.1:1")
    assert "cannot be reached" in expect_error(*words, "s3://team/runs/x", code=201, **closed)
    assert not Path("runs/x").exists()
