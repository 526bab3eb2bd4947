"""Run directories: names, deletion, reading of broken folders, and of only the end of long files."""

from __future__ import annotations

import builtins
import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drivetrain import cli, runs
from drivetrain.launch.request import Request
from drivetrain.outcomes import Problem
from drivetrain.runs import Follower, Lock, Run, files, layout, read_lines, truncate_rows
from drivetrain.tune.study import Proposal
from drivetrain.tune.trial import RunningTrial
from tests.command import expect_error, run_ok, write_task

PLAN = {"world_size": 1, "nodes": 1, "device": "cpu", "precision": "fp32", "global_batch": 8, "reasons": {}}


def make_run(path: str, status: str = "finished", rows: int = 3, **changes: Any) -> Run:
    """Makes a run directory as `train` does."""
    run = Run(Path(path))
    identity = {"task": "Small", "code": "", "settings": {}}
    recipe = {"task": {"path": "small.py", "label": "small"}, "identity": identity, "settings": {}, "pins": {}}
    facts = {"recipe": recipe, "plan": PLAN, "status": status, "outcome": "ok", "message": "", "folder": ".", "created": "2026-01-01T00:00"}
    run.write(facts | changes)
    run.metrics_path.write_text("".join(json.dumps({"step": n, "epoch": 1, "train/loss": 1.0}) + "\n" for n in range(1, rows + 1)))
    return run


@pytest.fixture
def ask(folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Returns a function that runs a command in this process and returns its output, or its error after `error: `."""

    def call(*words: str) -> str:
        capsys.readouterr()
        error = ""
        try:
            cli._dispatch(list(words))
        except Problem as problem:
            error = f"error: {problem}"
        assert len(error.splitlines()) <= 2
        return error or capsys.readouterr().out

    return call


# --- names and deleting ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", ".", "./", "..", "a/..", "a/../b", "../runs", "../runs/a", "*", "?", "a/.", "/", "x" * 300, "runs"])
def test_only_a_runs_own_name_deletes_it(name: str, ask: Callable[..., str]) -> None:
    for other in ("b", "c"):
        make_run(f"runs/{other}")
    Path("runs/a").mkdir()
    Path("runs/a/notes").write_text("mine")
    answer = ask("runs", "rm", name, "--yes")
    assert answer.startswith("error: ")
    assert len(answer) < 400
    assert sorted(p.name for p in Path("runs").iterdir()) == ["a", "b", "c"]
    assert ask("status", name).startswith("error: there is no run"), "`status` refuses such a name, too"


def test_rm_shows_the_runs_and_asks(ask: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    make_run("runs/a")
    make_run("runs/b", status="stopped", outcome="nan")
    for stage in ("1-pretrain", "2-finetune", "10-last"):
        make_run(f"runs/two/{stage}")
    assert runs.find("two").name == "two/10-last"
    assert "--yes" in ask("runs", "rm", "a")
    shown = ask("runs", "rm", "a", "b", "b", "--dry-run").splitlines()
    assert [line.split()[-1] for line in shown] == ["finished", "nan"]
    assert str(Path("runs/a").absolute()) in shown[0]
    assert "0.0 MB" in shown[0]
    assert "there is no run 'aa'" in ask("runs", "rm", "b", "aa", "--yes"), "if one name is wrong, nothing is deleted"
    assert Path("runs/b").is_dir()

    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(builtins, "input", lambda text: "n")
    ask("runs", "rm", "a")
    assert Path("runs/a").is_dir()
    monkeypatch.setattr(builtins, "input", lambda text: "y")
    ask("runs", "rm", "a", "two")
    assert sorted(p.name for p in Path("runs").iterdir()) == ["b"]
    ask("runs", "rm", str(Path("runs/b").absolute()))
    assert not Path("runs/b").exists()


def test_links_and_folders_with_other_files_are_not_deleted(ask: Callable[..., str]) -> None:
    make_run("elsewhere/big")
    make_run("elsewhere/two/1-one")
    Path("runs").mkdir()
    Path("runs/big").symlink_to(Path("elsewhere/big").absolute())
    Path("runs/two").symlink_to(Path("elsewhere/two").absolute())
    for name in ("big", "two", "two/1-one"):
        assert "is a link to" in ask("runs", "rm", name, "--yes")
    make_run("elsewhere")
    assert "contains other runs" in ask("runs", "rm", "elsewhere", "--yes")
    make_run(".")
    assert "is not the name of a run" in ask("runs", "rm", ".", "--yes")
    assert "contains the current folder" in ask("runs", "rm", str(Path.cwd()), "--yes")
    assert Path("elsewhere/big/run.json").is_file() and Path("elsewhere/two/1-one/run.json").is_file()

    own = make_run("runs/own")
    (own.path / "data").symlink_to(Path("elsewhere").absolute())
    ask("runs", "rm", "own", "--yes")
    assert not own.path.exists()
    assert Path("elsewhere/big/run.json").is_file(), "the target of a link inside a run is not deleted"


def test_a_run_in_use_is_not_deleted(ask: Callable[..., str]) -> None:
    make_run("runs/a")
    study = Path("runs/search")
    make_run("runs/search/trials/trial-0001")
    (study / "tune.json").write_text("{}")
    program = (
        "from pathlib import Path; from drivetrain.runs import Lock; import sys;"
        "locks = [Lock.acquire(Path(p)) for p in sys.argv[1:]]; print(flush=True); input()"
    )
    for locked, names in (("runs/a", ["a"]), ("runs/search/trials/trial-0001", ["search"]), ("runs/search", ["search/trials/trial-0001"])):
        child = subprocess.Popen([sys.executable, "-c", program, locked], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
        try:
            assert f"in use by process {child.pid}" in ask("runs", "rm", *names, "--yes")
        finally:
            child.communicate(b"\n")
    assert Path("runs/a").is_dir() and study.is_dir()
    ask("runs", "rm", "search", "--yes")
    assert not study.exists()


# --- foreign and broken folders ----------------------------------------------------------------

BROKEN: dict[str, Any] = {
    "a list": "[]",
    "empty": "",
    "not JSON": "{",
    "not text": b"\xff\xfe\x00",
    "deep": "[" * 100_000,
    "another format": '{"format": 7}',
    "no keys": '{"format": 1}',
    "wrong types": json.dumps({"format": 1, "recipe": [], "plan": 3, "status": None}),
    "a wrong plan": {"plan": PLAN | {"world_size": "two"}},
    "no date": {"created": None},
    "no message": {"message": None},
}


@pytest.mark.parametrize("kind", BROKEN)
def test_one_broken_folder_does_not_hide_the_others(kind: str, ask: Callable[..., str]) -> None:
    make_run("runs/good")
    content = BROKEN[kind]
    if isinstance(content, dict):
        make_run("runs/malformed", **content)
    else:
        Path("runs/malformed").mkdir()
        Path("runs/malformed/run.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    for stray in ("metrics.jsonl", "events.jsonl"):
        Path("runs/malformed", stray).write_bytes(b'[1]\n{"step": "x"}\n{"event": 3}\n\xff\n')
    Path("runs/file").write_text("")
    Path("runs/dir.json").mkdir()
    Path("runs/strange").mkdir()
    Path("runs/strange/run.json").mkdir()
    Path("runs/search").mkdir()
    Path("runs/search/tune.json").write_text("[]")
    lines = ask("runs").splitlines()
    assert any(line.startswith("good ") and "finished" in line for line in lines)
    assert any(line.startswith("malformed ") and "unreadable" in line for line in lines)
    assert json.loads(ask("runs", "--json"))
    for verb in ("status", "logs", "resume", "eval"):
        assert ask(verb, "malformed").startswith("error: ")
    assert "skipped malformed" in ask("runs", "prune")
    assert ask("runs", "rm", "malformed", "--yes").endswith("unreadable\n")
    assert not Path("runs/malformed").exists()


def test_status_reads_malformed_rows(ask: Callable[..., str]) -> None:
    run = make_run("runs/a", status="stopped", outcome="nan", message="\n")
    rows = [{"step": 4, "epoch": 1, "train/loss": None, "samples_per_second": None, "eval/accuracy": None}, {"step": "five"}, [1]]
    with open(run.metrics_path, "a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 9, "tr')
    run.events_path.write_text(
        '{"event": "odd", "time": 1e30, "text": ""}\n{"event": "remark", "time": 1, "step": 3, "text": "a\\u001b[2J"}\n{}\n'
    )
    run.time_breakdown_path.parent.mkdir()
    run.time_breakdown_path.write_text('{"ranks": [{}], "steps": "x"}')
    text = ask("status", "a")
    assert "accuracy not a number   (step 4)" in text
    assert "remark       a   (step 3)" in text
    assert "accuracy not a number" in ask("runs")


def test_prune_deletes_only_checkpoints(ask: Callable[..., str]) -> None:
    run = make_run("runs/a")
    for name in ("step-00000001", ".step-00000002", "mine"):
        (run.checkpoints / name).mkdir(parents=True)
    for name in ("step-notes.txt", ".DS_Store", "step-00000007"):
        (run.checkpoints / name).write_text("a stray file")
    (run.checkpoints / "step-00000009").symlink_to(Path.cwd())
    run.model_path.parent.mkdir()
    run.model_path.write_text("weights")
    assert "freed" in ask("runs", "prune")
    remaining = sorted(p.name for p in run.checkpoints.iterdir())
    assert remaining == [".DS_Store", "mine", "step-00000007", "step-00000009", "step-notes.txt"]


def test_names_that_are_too_long_are_refused_in_one_line(folder: Path) -> None:
    long = "x" * 300
    assert "File name too long" in expect_error("train", "digits", "--run-dir", long)
    assert "File name too long" in expect_error("tune", "digits", "--search", "learning_rate=0.1..0.2", "--run-dir", long)


# --- the final weights -----------------------------------------------------------------


def test_all_verbs_and_files_show_the_metrics_of_the_final_weights(folder: Path) -> None:
    """With `best`, the final weights are not those of the last step."""
    write_task()
    text = run_ok("train", "small.py", "--name", "a", "steps=6", "eval_every=1", "best=min:accuracy")
    rows_by_step = {row["step"]: row for row in read_lines(Path("runs/a/metrics.jsonl"))}
    best = min(rows_by_step, key=lambda step: rows_by_step[step]["eval/accuracy"])
    accuracy = rows_by_step[best]["eval/accuracy"]
    assert accuracy < rows_by_step[6]["eval/accuracy"], "the last weights must not be the best, or the test proves nothing"
    card = json.loads(Path("runs/a/model/task.json").read_text())
    assert (card["step"], card["steps"], card["metrics"]["accuracy"]) == (best, 6, accuracy)
    assert f"accuracy {100 * accuracy:.1f} %   (450 samples; weights of step {best}, the best by accuracy)" in text
    status = run_ok("status", "a")
    assert f"eval         accuracy {100 * accuracy:.1f} %   (step {best}, the weights in model/)" in status
    status_facts = json.loads(run_ok("status", "a", "--json"))
    assert status_facts["evaluated"] == {"step": best, "eval/accuracy": accuracy}
    assert (status_facts["weights_step"], status_facts["last"]["step"]) == (best, 6)
    assert f"accuracy {100 * accuracy:.1f} %" in run_ok("runs")
    summary = Path("runs/a/summary.txt").read_text()
    assert f"Test Accuracy:      {100 * accuracy:.2f} %" in summary
    assert f"Weights:            of step {best}, the best by accuracy" in summary
    result = json.loads(run_ok("eval", "a", "--json"))
    assert (result["step"], result["metrics"]["accuracy"]) == (best, pytest.approx(accuracy))
    # A resumed run is unfinished again and has no final weights yet.
    run = Run(Path("runs/a"))
    run.update(status="stopped", outcome="preempted")
    assert json.loads(run_ok("status", "a", "--json"))["evaluated"]["step"] == 6
    assert json.loads(run_ok("eval", "a", "--json"))["step"] == 6


# --- long files --------------------------------------------------------------------------------


class ReadCounter:
    """Counts the bytes that are read from files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_bytes = 0
        backwards = files.lines_backwards

        def count(file: Any, max_bytes: int | None = None) -> Any:
            read = file.read

            class Reader:
                def __getattr__(self, name: str) -> Any:
                    return getattr(file, name)

                @staticmethod
                def read(size: int) -> bytes:
                    data: bytes = read(size)
                    self.num_bytes += len(data)
                    return data

            return backwards(Reader(), max_bytes)  # type: ignore[arg-type]

        monkeypatch.setattr(files, "lines_backwards", count)
        monkeypatch.setattr(layout, "read_lines", lambda path: pytest.fail(f"{path} was read as a whole"))


def long_file(path: Path, rows: int, eval_every: int = 1000) -> int:
    """Writes rows as a training does; returns the file's size."""
    row = '{"step": %d, "epoch": 1, "time": 1.5, "train/loss": 0.25, "samples_per_second": 1000.0%s}\n'
    with open(path, "w") as file:
        for first in range(1, rows + 1, 1000):
            numbers = range(first, min(rows + 1, first + 1000))
            file.write("".join(row % (n, ', "eval/accuracy": 0.5' if n % eval_every == 0 else "") for n in numbers))
    return path.stat().st_size


def test_readers_and_resume_read_only_the_end_of_a_long_file(ask: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run("runs/a", status="stopped", outcome="preempted")
    size = long_file(run.metrics_path, 100_500)
    assert size > 9e6
    run.log_path(0).parent.mkdir()
    long_file(run.log_path(0), 100_000)
    run.events_path.write_text('{"event": "started", "time": 1.0}\n')
    counter = ReadCounter(monkeypatch)
    status = json.loads(ask("status", "a", "--json"))
    assert (status["last"]["step"], status["evaluated"]["step"]) == (100_500, 100_000)
    assert "100,500  accuracy 50.0 %" in ask("runs")
    printed = ask("logs", "a").splitlines()
    assert len(printed) == 1000
    assert '"step": 100000' in printed[-1]
    assert len(ask("logs", "a", "-n", "2").splitlines()) == 2
    assert len(ask("logs", "a", "-n", "0").splitlines()) == 100_000
    assert truncate_rows(run.metrics_path, 100_400) == 100_400
    assert counter.num_bytes < 2e6, "several reads of files of 9 MB"
    assert sum(1 for _ in read_lines(run.metrics_path)) == 100_400


@pytest.mark.parametrize("block", [3, 64, 1 << 16])
def test_lines_of_any_length_are_read_backwards(block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "BLOCK_BYTES", block)
    for text in (b"", b"\n", b"a", b"a\n", b"a\nbb", b"a\n\nbb\r\nccc\x0bd\n" + b"x" * 500 + b"\nlast\n"):
        path = tmp_path / "file"
        path.write_bytes(text)
        with open(path, "rb") as file:
            lines = list(files.lines_backwards(file))
        assert [line for _, line in reversed(lines)] == text.splitlines(keepends=True) or b"\r" in text or b"\x0b" in text
        assert b"".join(line for _, line in reversed(lines)) == text
        assert all(text[:end].endswith(line) for end, line in lines)


CUTS = {
    "beyond": ('{"step": 1}\n{"step": 2}\n{"step": 3}\n', 2, '{"step": 1}\n{"step": 2}\n'),
    "nothing": ('{"step": 1}\n', 5, '{"step": 1}\n'),
    "half a line": ('{"step": 1}\n{"step": 2, "tr', 2, '{"step": 1}\n'),
    "no newline": ('{"step": 1}\n{"step": 2}', 2, '{"step": 1}\n{"step": 2}\n'),
    "no newline, beyond": ('{"step": 1}\n{"step": 2}', 1, '{"step": 1}\n'),
    "zeros of a crash": ('{"step": 1}\n\0\0\0\0', 1, '{"step": 1}\n'),
    "gaps": ('{"step": 1}\n{"step": 5}\n{"step": 9}\n', 7, '{"step": 1}\n{"step": 5}\n'),
    "all": ('{"step": 1}\n', 0, ""),
    "empty": ("", 3, ""),
}


@pytest.mark.parametrize("case", CUTS)
def test_a_resume_deletes_the_rows_it_will_repeat(case: str, tmp_path: Path) -> None:
    before, step, after = CUTS[case]
    path = tmp_path / "metrics.jsonl"
    path.write_text(before)
    inode = path.stat().st_ino
    for _ in range(2):  # the second time, as if a kill had followed the first
        last_step = truncate_rows(path, step)
        assert path.read_text() == after
        assert last_step == (json.loads(after.splitlines()[-1])["step"] if after else 0)
    assert path.stat().st_ino == inode, "truncated in place: a kill leaves the old or the new file"
    assert truncate_rows(tmp_path / "none" / "metrics.jsonl", 3) == 0


def test_a_file_is_on_the_disk_before_it_replaces_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: set[int] = set()
    fsync, replace = os.fsync, os.replace

    def record(handle: int) -> None:
        synced.add(os.fstat(handle).st_ino)
        fsync(handle)

    def check(source: str, target: Path) -> None:
        assert Path(source).stat().st_ino in synced
        replace(source, target)

    monkeypatch.setattr(os, "fsync", record)
    monkeypatch.setattr(os, "replace", check)
    files.write_atomic(tmp_path / "run.json", "{}")
    assert (tmp_path / "run.json").read_text() == "{}"


def test_a_lock_is_never_of_a_directory_that_was_deleted_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, lockf, num_calls = tmp_path / "run", fcntl.lockf, 0

    def delete_first(handle: int, operation: int) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1:
            shutil.rmtree(path)  # `drivetrain runs rm`, between the opening of the file and its lock
        lockf(handle, operation)

    monkeypatch.setattr(fcntl, "lockf", delete_first)
    lock = Lock.acquire(path)
    assert os.path.samestat(os.fstat(lock.handle), (path / "lock").stat())
    lock.release()


def test_a_follower_notices_a_truncation_even_if_the_file_has_grown_since(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    follower = Follower(path)
    assert not follower.was_truncated() and list(follower.new_lines()) == []
    path.write_bytes(b'{"step": 1}\n{"step": 2, "time": 5}\n{"st')
    assert len(list(follower.new_lines())) == 2
    assert not follower.was_truncated()
    truncate_rows(path, 1)
    with open(path, "ab") as file:
        file.write(b'{"step": 2, "time": 6}\n{"step": 3}\n')
    assert follower.was_truncated()
    assert [json.loads(line)["step"] for line in follower.new_lines()] == [1, 2, 3]


def test_a_trial_forgets_the_evaluations_that_a_resume_repeats(tmp_path: Path) -> None:
    run = Run(tmp_path)
    trial = RunningTrial(Proposal(0, {}), run, Request(), "max:accuracy")
    write = lambda rows: run.metrics_path.write_text("".join(json.dumps(row) + "\n" for row in rows))  # noqa: E731
    first = [{"step": n, "time": n, "eval/accuracy": n / 10} for n in (1, 2, 3)]
    write(first)
    trial.read_metrics()
    assert trial.best() == (3, 0.3)
    write([*first[:1], {"step": 2, "time": 7.5, "eval/accuracy": 0.2}, {"step": 4, "time": 9.5}])
    trial.read_metrics()
    assert trial.best() == (2, 0.2)
    assert trial.row["step"] == 4


def test_sizes_of_a_run_whose_files_vanish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_text("12345")
    (tmp_path / "gone").write_text("1")
    real = os.lstat

    def lstat(path: Any) -> os.stat_result:
        if str(path).endswith("gone"):
            raise FileNotFoundError(path)
        return real(path)

    monkeypatch.setattr(os, "lstat", lstat)
    assert Run(tmp_path).disk_bytes() == 5
