"""Several machines, as commands that meet on this one: all name the rank that hangs, and the first has the time breakdown of all."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drivetrain.supervise.verdicts import LEADER, LeaderVerdicts, MemberVerdicts, RankReport, Verdict
from tests.hangs import write
from tests.launching import Started, events, free_port, info, run, start
from tests.patience import until

LIMIT, WITHIN = 2.0, 10.0


@contextlib.contextmanager
def start_two_machines(folder: Path, *words: str, **variables: object) -> Iterator[tuple[Started, Started]]:
    command = [
        "drivetrain",
        "train",
        *words,
        "plan.threads=1",
        "--nodes",
        "2",
        "--rendezvous",
        f"127.0.0.1:{free_port()}",
        "--name",
        "both",
    ]
    with (
        start(*command, "--node-rank", "0", folder=folder, **variables) as first,
        start(*command, "--node-rank", "1", folder=folder, **variables) as second,
    ):
        yield first, second


@pytest.mark.system  # it takes its time
@pytest.mark.parametrize(
    ("way", "place", "rank"), [("sleep", "forward", 1), ("sleep", "forward", 0), ("receive", "loss", 1), ("receive", "loss", 0)]
)
def test_all_machines_name_the_rank_that_hangs(way: str, place: str, rank: int, folder: Path) -> None:
    """Even if all wait in collectives, so that no machine can decide alone."""
    line = write(way, place, rank)
    with start_two_machines(folder, "stuck.py", "--restarts", "0", "--hang-after", f"{LIMIT:.0f}s") as machines:
        assert [machine.wait(120) for machine in machines] == [202, 202]
        for machine in machines:
            assert f"rank {rank} hangs in step" in machine.output and f"stuck.py:{line} in stick" in machine.output, machine.output
            assert f"rank {1 - rank} waits in all_reduce" in machine.output, machine.output
    both = folder / "runs" / "both"
    (event,) = events(both, "hang")
    assert event["ranks"] == [rank] and info(both)["outcome"] == "hang"
    took = event["time"] - (folder / "stuck").stat().st_mtime
    print(f"{way} on rank {rank}: {took:.1f} s")
    assert took < LIMIT + WITHIN, f"{took:.1f} s"
    stacks = (both / "logs" / "hang-1.txt").read_text()
    assert "--- rank 0, " in stacks and "--- rank 1, " in stacks
    assert stacks.count("from torch's flight recorder") == 2 and "gloo:all_reduce" in stacks


@pytest.mark.system  # slow by design
def test_slow_work_on_one_machine_is_no_hang(folder: Path) -> None:
    """A slow first step of the second, slow evaluations and a slow save of the first: each longer than the shortest hang."""
    write("sleep", "forward", rank=-1)
    slow = {
        'at("loss")': "globals().setdefault('first', os.environ['RANK'] != '1' or time.sleep(5))",
        'at("metrics")': "time.sleep(4 * (os.environ['RANK'] == '0'))",
    }
    text = (folder / "stuck.py").read_text()
    for old, new in slow.items():
        text = text.replace(old, new)
    (folder / "stuck.py").write_text(text)
    words = ["stuck.py", "steps=12", "eval_every=6", "save_every=4", "--hang-after", f"{LIMIT:.0f}s"]
    with start_two_machines(folder, *words, DRIVETRAIN_FAULTS=",".join(["slow@save:2:rank=0"] * 4)) as (first, second):
        first.succeed(120)
        second.succeed(120)
    both = folder / "runs" / "both"
    assert events(both, "injected") and not events(both, "hang") and not events(both, "restarted")


@pytest.mark.system  # it takes its time
def test_after_a_hang_all_machines_restart(folder: Path) -> None:
    write("sleep", "forward", rank=-1)
    words = ["stuck.py", "steps=30", "save_every=5", "--hang-after", f"{LIMIT:.0f}s"]
    with start_two_machines(folder, *words, DRIVETRAIN_FAULTS="hang@step:12:rank=1") as (first, second):
        assert "rank 1 hangs in step 12" in first.succeed(120) and "rank 1 hangs in step 12" in second.succeed(120)
    assert [event["why"] for event in events(folder / "runs" / "both", "restarted")] == ["hang"]


@pytest.mark.system  # it takes its time
def test_the_first_machine_has_the_time_breakdown_of_all(folder: Path) -> None:
    """Both could write the file; the first machine does, with all ranks."""
    write("sleep", "forward", rank=-1)
    slow = (folder / "stuck.py").read_text().replace("time.sleep(0.01)", "time.sleep(0.03 + 0.06 * int(os.environ['RANK']))")
    (folder / "stuck.py").write_text(slow)
    with start_two_machines(folder, "stuck.py", "steps=120", "eval_every=1000") as (first, second):
        until(
            lambda: len(ranks := spent(folder).get("ranks", [])) == 2 and ranks[1]["compute"] > ranks[0]["compute"],
            "both",
            of=first.process,
        )
        output = first.succeed(120)
        second.succeed(120)
    assert "rank 1 is slow: its computing takes" in output
    told = spent(folder)
    assert len(told["ranks"]) == 2 and told["steps"] == 119
    assert told["ranks"][1]["compute"] > 1.5 * told["ranks"][0]["compute"] and told["ranks"][0]["communication"] > 2.0
    assert "rank 1 is slow" in run("drivetrain", "status", "both", folder=folder)


def spent(folder: Path) -> dict[str, Any]:
    file = folder / "runs" / "both" / "logs" / "time.json"
    return dict(json.loads(file.read_text())) if file.exists() else {}


# --- when a verdict is given ---------------------------------------------------------------------


def seen(rank: int, **other: Any) -> RankReport:
    """A rank that has waited in a collective for longer than its limit."""
    sight = RankReport(
        rank,
        7,
        "summing gradients over ranks",
        100.0,
        31.0,
        True,
        False,
        True,
        "all_reduce",
        "step.py:9 in reduce",
        False,
        " there",
        "",
        "",
    )
    return replace(sight, **other)


class Room:
    """The leading machine with rank 0, and the machines b and c with ranks 1 and 2."""

    def __init__(self) -> None:
        self.asked = 0
        self.told: list[Verdict] = []
        self.excluded: list[Any] = []
        self.verdicts = LeaderVerdicts(lambda: ["b", "c"], self._ask, self.told.append, self.excluded.append, answer_seconds=30.0)

    def _ask(self) -> None:
        self.asked += 1


def test_no_verdict_while_a_machine_has_its_reasons() -> None:
    room = Room()
    room.verdicts.receive("b", [seen(1)])
    assert room.verdicts([seen(0)]) is None, "of c nothing is heard: it may be saving"
    room.verdicts.receive("c", [seen(2, is_over_limit=False, is_waiting=False)])
    assert room.verdicts([seen(0)]) is None and not room.told, "c is not over its limit"
    room.verdicts.receive("c", [seen(2, since=120.0)])
    room.verdicts.receive("b", [])
    assert room.verdicts([seen(0)]) is None, "b goes on"


def test_all_must_have_waited_at_one_time() -> None:
    room = Room()
    room.verdicts.receive("b", [seen(1, line="task.py:3 in loss", is_users_line=True)])
    room.verdicts.receive("c", [seen(2)])
    assert room.verdicts([seen(0)]) is None, "b and c may have gone on since they were seen"
    room.verdicts.receive("b", [seen(1, line="task.py:3 in loss", is_users_line=True)])
    room.verdicts.receive("c", [seen(2)])
    verdict = room.verdicts(None)
    assert verdict is not None and verdict.ranks == [1] and room.told == [verdict]
    assert "ranks 0, 2 wait in all_reduce" in verdict.message


def test_others_are_asked_what_they_wait_in(monkeypatch: pytest.MonkeyPatch) -> None:
    room = Room()
    room.verdicts.receive("b", [seen(1, is_waiting=False, line="task.py:3 in loss", location=" at task.py:3 in loss")])
    assert room.verdicts([]) is None and room.verdicts.wants_reports and room.asked == 1
    assert room.verdicts([seen(0, is_over_limit=False)]) is None and not room.verdicts.wants_reports and room.asked == 1
    monkeypatch.setattr("drivetrain.supervise.verdicts.time.monotonic", lambda at=room.verdicts._decide_at: at + 1)
    verdict = room.verdicts([])
    assert verdict is not None, "c does not answer"
    assert "rank 1 hangs in step 7" in verdict.message and "rank 0 waits in all_reduce" in verdict.message
    assert LEADER in room.verdicts._latest


def test_a_machine_that_does_not_say_what_its_ranks_do_is_excluded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader's rank waits beyond its limit, b has its reasons, and of c there are only beats."""
    room = Room()
    assert room.verdicts([seen(0)]) is None and room.asked == 1
    room.verdicts.receive("b", [seen(1, is_over_limit=False, is_waiting=False)])
    now = room.verdicts._requested_at
    monkeypatch.setattr("drivetrain.supervise.verdicts.time.monotonic", lambda: now + 29)
    assert room.verdicts([seen(0)]) is None and not room.excluded
    monkeypatch.setattr("drivetrain.supervise.verdicts.time.monotonic", lambda: now + 31)
    assert room.verdicts([seen(0)]) is None and room.excluded == ["c"]


def test_what_is_seen_is_reported_and_taken_back() -> None:
    told: list[list[int]] = []
    verdicts = MemberVerdicts(lambda sights: told.append([s.rank for s in sights]))
    for sights in ([], [seen(1)], None, [], [], None):
        assert verdicts(sights) is None
    assert told == [[1], []]
