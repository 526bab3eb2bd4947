"""Submissions that overlap with other commands, and submissions of which only a part succeeds."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from drivetrain.cli.submitted import agree_on
from drivetrain.launch.request import Request
from drivetrain.outcomes import Outcome, Problem
from drivetrain.recipe import load
from drivetrain.runs import Run
from drivetrain.targets import submit
from drivetrain.targets.config import find_target, make_target
from drivetrain.targets.errors import Unsure
from drivetrain.targets.host.connection import ReachableHost
from drivetrain.targets.local import LocalTarget
from drivetrain.targets.record import Record, is_being_submitted, read_record, submission_lock
from drivetrain.targets.ssh import SshTarget
from drivetrain.targets.submission import Submission
from drivetrain.watch.screen import Screen
from tests.command import expect_error, run_ok, write_task
from tests.waiting import wait_until

FAST = ("plan.threads=1", "plan.compile=off")
SLOW = ("return F.cross", "import time; time.sleep(0.05 * model.training)\n        return F.cross")
AGREE = agree_on(False, Screen(quiet=True))


def record_of(name: str) -> Record:
    record = read_record(Run(f"runs/{name}"))
    assert record is not None
    return record


def submission(target: Any, name: str, steps: int = 400, nodes: int = 1) -> Submission:
    words = (f"steps={steps}", *FAST)
    return submit.prepare(target, load("small.py", list(words), {}), Request(name=name, settings=words, nodes=nodes), Run(f"runs/{name}"))


def ended(record: Record) -> Record:
    for newest in submit.follow(record):
        record = newest
    return record


@dataclass(frozen=True)
class NearHost(ReachableHost):
    """This machine in the place of one behind SSH."""

    address: str = ""

    @property
    def name(self) -> str:
        return self.address


@pytest.fixture
def boxes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> SshTarget:
    """A target with two machines, which are this one."""
    target = make_target("boxes", "ssh", {"hosts": ["box1", "box2"], "dir": str(folder / "there"), "python": sys.executable}, Path("x"))
    assert isinstance(target, SshTarget)
    monkeypatch.setattr(
        SshTarget, "hosts", lambda self, number=None: [NearHost(sys.executable, name) for name in ("box1", "box2")[:number]]
    )
    monkeypatch.setattr(
        SshTarget, "recorded_hosts", lambda self, record: [NearHost(sys.executable, name) for name in record.handle["hosts"]]
    )
    monkeypatch.setattr(SshTarget, "leader_address", lambda self: "127.0.0.1")
    return target


# --- two commands ------------------------------------------------------------------------------


@dataclass
class SlowSubmission:
    """A submission to the target local that has written its record, and waits before it starts the run."""

    thread: threading.Thread
    go_on: Callable[[], None]

    def finish(self) -> Record:
        self.go_on()
        self.thread.join(60)
        return record_of("one")


@pytest.fixture(params=["the handle is known before", "the handle is not known before"])
def is_known(request: pytest.FixtureRequest) -> bool:
    return str(request.param) == "the handle is known before"


@pytest.fixture
def slow(folder: Path, is_known: bool, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[], Any]], SlowSubmission]]:
    """Starts a command in a thread, and returns when its submission has written the record."""
    write_task(change=SLOW)
    begun, go_on, start, known_handle = threading.Event(), threading.Event(), LocalTarget.submit, LocalTarget.known_handle

    def wait_and_start(target: LocalTarget, submission: Submission, *rest: Any) -> dict[str, Any]:
        begun.set()
        go_on.wait(600)
        start(target, submission, *rest)
        return known_handle(target, submission)

    def begin(command: Callable[[], Any]) -> SlowSubmission:
        monkeypatch.setattr(LocalTarget, "submit", wait_and_start)
        if not is_known:
            monkeypatch.setattr(LocalTarget, "known_handle", lambda target, submission: {})
        thread = threading.Thread(target=command)
        thread.start()
        assert begun.wait(60)
        return SlowSubmission(thread, go_on.set)

    try:
        yield begin
    finally:
        go_on.set()
        if Path("runs/one/target.json").exists():
            run_ok("stop", "one", "--within", "1s")


def check_that_others_wait(before: str) -> None:
    """No other command touches the run while it is being submitted."""
    assert "one is queued on local already" in run_ok("train", "small.py", "steps=400", *FAST, "--on", "local", "--name", "one")
    assert "queued" in run_ok("status", "one", "--json")
    for words in (("resume", "one"), ("stop", "one"), ("pull", "one"), ("runs", "rm", "one", "--yes")):
        assert "one is " in expect_error(*words), words
    assert Path("runs/one/target.json").read_text() == before


def test_a_new_run_is_left_alone_while_it_is_being_submitted(slow: Callable[[Callable[[], Any]], SlowSubmission]) -> None:
    target = find_target("local")
    begun = slow(lambda: submit.submit(target, submission(target, "one"), AGREE, print))
    check_that_others_wait(Path("runs/one/target.json").read_text())
    record = begun.finish()
    assert submit.refresh(record).phase == "running"
    assert record.handle and not record.facts["pulled"]
    assert not is_being_submitted(record.run) and not list(Path("runs/one").glob("*.submission"))


def test_a_resumed_run_is_left_alone_while_it_is_being_submitted(slow: Callable[[Callable[[], Any]], SlowSubmission]) -> None:
    run_ok("train", "small.py", "steps=400", *FAST, "--on", "local", "--name", "one")
    run_ok("stop", "one")
    begun = slow(lambda: submit.resubmit(record_of("one"), (), Request(), AGREE, print))
    check_that_others_wait(Path("runs/one/target.json").read_text())
    record = begun.finish()
    assert (submit.refresh(record).phase, record.facts["submissions"]) == ("running", 2)


def test_a_run_that_another_command_has_resumed_is_not_resumed_again(folder: Path) -> None:
    """As two `resume` commands, of which the second asked for the state before the first had submitted the run."""
    write_task(change=SLOW)
    run_ok("train", "small.py", "steps=400", *FAST, "--on", "local", "--name", "one")
    run_ok("stop", "one")
    before = record_of("one")
    submit.resubmit(before, (), Request(), AGREE, print)
    with pytest.raises(Problem, match="another command has submitted one again meanwhile: drivetrain status one"):
        submit.resubmit(before, (), Request(), AGREE, print)
    assert submit.refresh(record_of("one")).phase == "running"
    run_ok("stop", "one")


def test_a_run_that_is_being_submitted_can_be_followed(slow: Callable[[Callable[[], Any]], SlowSubmission], is_known: bool) -> None:
    target = find_target("local")
    begun = slow(lambda: submit.submit(target, submission(target, "one"), AGREE, print))
    records = submit.follow(submit.refresh(record_of("one")))
    assert next(records).phase == "queued"
    begun.finish()
    assert any(record.phase == "running" for record in records)


def test_a_run_may_begin_before_the_command_that_submits_it_has_ended(folder: Path) -> None:
    """A job may start so early in the folder that the target shares with this machine."""
    write_task()
    Path("runs/one").mkdir(parents=True)
    with submission_lock(Run("runs/one")):
        run_ok("train", "small.py", "steps=2", *FAST, "--name", "one")
    assert Run("runs/one").status == "finished"


def test_a_killed_submission_is_lost_and_can_be_repeated(folder: Path) -> None:
    """The record is as it was before the run started, and no command holds the run."""
    write_task()
    train = ("train", "small.py", "steps=2", *FAST, "--on", "local", "--name", "one")
    target = find_target("local")
    with ExitStack() as locks:
        submit.begin_record(target, submission(target, "one", steps=2), locks)
    assert submit.refresh(record_of("one")).phase == "lost"
    run_ok(*train, "--wait")
    assert record_of("one").facts["exit_code"] == 0


@pytest.mark.system  # rsync
def test_a_run_that_began_after_it_was_taken_for_lost_comes_home(boxes: SshTarget) -> None:
    """As of a command that was killed while its request was on the way."""
    write_task()
    submitted = submission(boxes, "one", steps=2)
    with ExitStack() as locks:
        submit.begin_record(boxes, submitted, locks)
    assert submit.refresh(record_of("one")).phase == "lost"
    boxes.submit(submitted, boxes.render(submitted), print)
    record = ended(record_of("one"))
    assert (record.phase, record.facts["exit_code"]) == ("ended", 0)
    assert record.run.model_path.is_file()


# --- a part of a submission fails --------------------------------------------------------------


def test_what_has_started_is_kept_when_another_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_task(change=SLOW)
    start = LocalTarget.submit

    def refuse_b(target: LocalTarget, submission: Submission, *rest: Any) -> dict[str, Any]:
        if submission.name == "b":
            raise Problem("no room for b")
        return start(target, submission, *rest)

    monkeypatch.setattr(LocalTarget, "submit", refuse_b)
    target = find_target("local")
    with pytest.raises(Problem, match="no room for b"):
        submit.submit_array(target, [submission(target, name) for name in "abc"], print)
    assert [path.name for path in Path("runs").iterdir()] == ["a"]
    assert submit.refresh(record_of("a")).phase == "running"
    assert "stopped" in run_ok("stop", "a")


def test_nothing_is_left_when_a_name_of_several_is_taken(folder: Path) -> None:
    write_task()
    target = find_target("local")
    Path("runs/b").mkdir(parents=True)
    Path("runs/b/run.json").write_text("{}")
    with pytest.raises(Problem, match="b is a run of this machine"):
        submit.submit_array(target, [submission(target, name) for name in "ab"], print)
    assert [path.name for path in Path("runs").iterdir()] == ["b"]


@pytest.mark.parametrize("refusal", [Problem("box2: it is running already", Outcome.INFRA), Unsure("box2: it is silent", Outcome.INFRA)])
def test_only_machines_that_started_here_are_stopped(refusal: Problem, boxes: SshTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that refuses the run may be running it for another command."""
    write_task(change=SLOW)
    call, calls = ReachableHost.call, []

    def answer(host: NearHost, verb: str, *rest: Any, **arguments: Any) -> dict[str, Any]:
        calls.append((verb, host.name))
        if (verb, host.name) == ("start", "box2"):
            raise refusal
        return call(host, verb, *rest, **arguments)

    monkeypatch.setattr(ReachableHost, "call", answer)
    with pytest.raises(Unsure, match=str(refusal)):
        submit.submit(boxes, submission(boxes, "one", nodes=2), AGREE, print)
    assert ("stop", "box1") in calls and ("stop", "box2") not in calls
    assert record_of("one").handle["hosts"] == ["box1", "box2"], "what has started is not forgotten"
    wait_until(
        lambda: submit.target_of(record_of("one")).state(record_of("one")).phase in ("ended", "lost"), "the end of what has started", 60
    )


def test_nothing_starts_where_a_machine_cannot_be_reached(boxes: SshTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    write_task()
    call, calls = ReachableHost.call, []

    def answer(host: NearHost, verb: str, *rest: Any, **arguments: Any) -> dict[str, Any]:
        calls.append(verb)
        if host.name == "box2":
            raise Problem("box2: it cannot be reached", Outcome.INFRA)
        return call(host, verb, *rest, **arguments)

    monkeypatch.setattr(ReachableHost, "call", answer)
    with pytest.raises(Problem, match="cannot be reached"):
        submit.submit(boxes, submission(boxes, "one", nodes=2), AGREE, print)
    assert "start" not in calls
    assert not Path("runs/one").exists()


# --- a machine that is lost --------------------------------------------------------------------


@pytest.mark.system  # rsync
def test_a_lost_machine_does_not_keep_the_run_away(boxes: SshTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that finished without its second machine is finished, and its files come here."""
    write_task()
    boxes.submit(one := submission(boxes, "one", steps=2), boxes.render(one), print)
    leader = boxes.hosts(1)[0]
    with ExitStack() as locks:
        record = submit.begin_record(boxes, one, locks)
    job = str(record.handle["jobs"][0])
    record.update(handle=record.handle | {"hosts": ["box1", "box2"], "jobs": [job, job.removesuffix("0") + "1"]}, phase="running")

    def refuse(*arguments: object, **named: object) -> Any:
        raise Problem("box2: it cannot be reached", Outcome.INFRA)

    def break_connection(*arguments: object, **named: object) -> Iterator[str]:
        raise ConnectionError("box2: it cannot be reached")
        yield ""

    lost = type("LostHost", (NearHost,), {"call": refuse, "mirror": break_connection, "copy_from": refuse})(address="box2")
    monkeypatch.setattr(SshTarget, "recorded_hosts", lambda self, record: [leader, lost])
    record = ended(record_of("one"))
    assert (record.phase, record.facts["exit_code"], record.facts["pulled"]) == ("ended", 0, True)
    assert record.run.model_path.is_file()
    assert record.facts["reason"] == "box2: it cannot be reached (the logs of its processes are missing)"
    assert submit.pull(record).facts["pulled"]
    assert submit.stop(record, 1.0).phase == "ended"
