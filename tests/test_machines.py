"""Several nodes, simulated by commands on this machine: all name the rank that hangs, and the first records the times of all."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drivetrain.supervise.verdicts import LEADER, LeaderVerdicts, MemberVerdicts, RankReport, Verdict
from tests.hanging_tasks import write_hanging_task
from tests.launching import StartedCommand, events, free_port, info, run, start
from tests.waiting import wait_until

HANG_LIMIT_SECONDS, MAX_EXTRA_SECONDS = 2.0, 10.0


@contextlib.contextmanager
def start_two_machines(folder: Path, *words: str, **variables: object) -> Iterator[tuple[StartedCommand, StartedCommand]]:
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


@pytest.mark.system  # slow
@pytest.mark.parametrize(
    ("hang", "hook", "rank"), [("sleep", "forward", 1), ("sleep", "forward", 0), ("receive", "loss", 1), ("receive", "loss", 0)]
)
def test_all_machines_name_the_rank_that_hangs(hang: str, hook: str, rank: int, folder: Path) -> None:
    """Even if all ranks wait in collectives, so that no machine can decide on its own."""
    line = write_hanging_task(hang, hook, rank)
    with start_two_machines(folder, "stuck.py", "--restarts", "0", "--hang-after", f"{HANG_LIMIT_SECONDS:.0f}s") as machines:
        assert [machine.wait(120) for machine in machines] == [202, 202]
        for machine in machines:
            assert f"rank {rank} hangs in step" in machine.output and f"stuck.py:{line} in stick" in machine.output, machine.output
            assert f"rank {1 - rank} waits in all_reduce" in machine.output, machine.output
    run_folder = folder / "runs" / "both"
    (event,) = events(run_folder, "hang")
    assert event["ranks"] == [rank] and info(run_folder)["outcome"] == "hang"
    seconds = event["time"] - (folder / "stuck").stat().st_mtime
    print(f"{hang} on rank {rank}: {seconds:.1f} s")
    assert seconds < HANG_LIMIT_SECONDS + MAX_EXTRA_SECONDS, f"{seconds:.1f} s"
    stacks = (run_folder / "logs" / "hang-1.txt").read_text()
    assert "--- rank 0, " in stacks and "--- rank 1, " in stacks
    assert stacks.count("from torch's flight recorder") == 2 and "gloo:all_reduce" in stacks


@pytest.mark.system  # slow by design
def test_slow_work_on_one_machine_is_no_hang(folder: Path) -> None:
    """The second machine has a slow first step, the first has slow evaluations and saves: each takes longer than the hang limit."""
    write_hanging_task("sleep", "forward", rank=-1)
    slow = {
        'reached("loss")': "globals().setdefault('first', os.environ['RANK'] != '1' or time.sleep(5))",
        'reached("metrics")': "time.sleep(4 * (os.environ['RANK'] == '0'))",
    }
    text = (folder / "stuck.py").read_text()
    for old, new in slow.items():
        text = text.replace(old, new)
    (folder / "stuck.py").write_text(text)
    words = ["stuck.py", "steps=12", "eval_every=6", "save_every=4", "--hang-after", f"{HANG_LIMIT_SECONDS:.0f}s"]
    with start_two_machines(folder, *words, DRIVETRAIN_FAULTS=",".join(["slow@save:2:rank=0"] * 4)) as (first, second):
        first.succeed(120)
        second.succeed(120)
    both = folder / "runs" / "both"
    assert events(both, "injected") and not events(both, "hang") and not events(both, "restarted")


@pytest.mark.system  # slow
def test_after_a_hang_all_machines_restart(folder: Path) -> None:
    write_hanging_task("sleep", "forward", rank=-1)
    words = ["stuck.py", "steps=30", "save_every=5", "--hang-after", f"{HANG_LIMIT_SECONDS:.0f}s"]
    with start_two_machines(folder, *words, DRIVETRAIN_FAULTS="hang@step:12:rank=1") as (first, second):
        assert "rank 1 hangs in step 12" in first.succeed(120) and "rank 1 hangs in step 12" in second.succeed(120)
    assert [event["why"] for event in events(folder / "runs" / "both", "restarted")] == ["hang"]


@pytest.mark.system  # slow
def test_the_first_machine_has_the_time_breakdown_of_all(folder: Path) -> None:
    """Both could write the file; the first machine does, with all ranks."""
    write_hanging_task("sleep", "forward", rank=-1)
    slow = (folder / "stuck.py").read_text().replace("time.sleep(0.01)", "time.sleep(0.03 + 0.06 * int(os.environ['RANK']))")
    (folder / "stuck.py").write_text(slow)
    with start_two_machines(folder, "stuck.py", "steps=120", "eval_every=1000") as (first, second):
        wait_until(
            lambda: len(ranks := time_breakdown(folder).get("ranks", [])) == 2 and ranks[1]["compute"] > ranks[0]["compute"],
            "both",
            process=first.process,
        )
        output = first.succeed(120)
        second.succeed(120)
    assert "rank 1 is slow: its computing takes" in output
    breakdown = time_breakdown(folder)
    assert len(breakdown["ranks"]) == 2 and breakdown["steps"] == 119
    assert breakdown["ranks"][1]["compute"] > 1.5 * breakdown["ranks"][0]["compute"] and breakdown["ranks"][0]["communication"] > 2.0
    assert "rank 1 is slow" in run("drivetrain", "status", "both", folder=folder)


def time_breakdown(folder: Path) -> dict[str, Any]:
    file = folder / "runs" / "both" / "logs" / "time.json"
    return dict(json.loads(file.read_text())) if file.exists() else {}


# --- when a verdict is reached ---------------------------------------------------------------------


def rank_report(rank: int, **other: Any) -> RankReport:
    """Returns the report of a rank that has waited in a collective for longer than its limit."""
    report = RankReport(
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
    return replace(report, **other)


class ThreeMachines:
    """The leading machine with rank 0, and the machines b and c with ranks 1 and 2."""

    def __init__(self) -> None:
        self.num_requests = 0
        self.published: list[Verdict] = []
        self.excluded: list[Any] = []
        self.verdicts = LeaderVerdicts(
            lambda: ["b", "c"], self._request_reports, self.published.append, self.excluded.append, answer_seconds=30.0
        )

    def _request_reports(self) -> None:
        self.num_requests += 1


def test_no_verdict_while_one_machine_may_still_make_progress() -> None:
    machines = ThreeMachines()
    machines.verdicts.receive("b", [rank_report(1)])
    assert machines.verdicts([rank_report(0)]) is None, "c has not reported: it may be saving"
    machines.verdicts.receive("c", [rank_report(2, is_over_limit=False, is_waiting=False)])
    assert machines.verdicts([rank_report(0)]) is None and not machines.published, "c is not over its limit"
    machines.verdicts.receive("c", [rank_report(2, since=120.0)])
    machines.verdicts.receive("b", [])
    assert machines.verdicts([rank_report(0)]) is None, "b makes progress again"


def test_all_ranks_must_have_waited_at_the_same_time() -> None:
    machines = ThreeMachines()
    machines.verdicts.receive("b", [rank_report(1, line="task.py:3 in loss", is_users_line=True)])
    machines.verdicts.receive("c", [rank_report(2)])
    assert machines.verdicts([rank_report(0)]) is None, "b and c may have made progress since they reported"
    machines.verdicts.receive("b", [rank_report(1, line="task.py:3 in loss", is_users_line=True)])
    machines.verdicts.receive("c", [rank_report(2)])
    verdict = machines.verdicts(None)
    assert verdict is not None and verdict.ranks == [1] and machines.published == [verdict]
    assert "ranks 0, 2 wait in all_reduce" in verdict.message


def test_the_leader_asks_the_others_where_they_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    machines = ThreeMachines()
    machines.verdicts.receive("b", [rank_report(1, is_waiting=False, line="task.py:3 in loss", location=" at task.py:3 in loss")])
    assert machines.verdicts([]) is None and machines.verdicts.wants_reports and machines.num_requests == 1
    assert (
        machines.verdicts([rank_report(0, is_over_limit=False)]) is None
        and not machines.verdicts.wants_reports
        and machines.num_requests == 1
    )
    monkeypatch.setattr("drivetrain.supervise.verdicts.time.monotonic", lambda at=machines.verdicts._decide_at: at + 1)
    verdict = machines.verdicts([])
    assert verdict is not None, "c does not answer"
    assert "rank 1 hangs in step 7" in verdict.message and "rank 0 waits in all_reduce" in verdict.message
    assert LEADER in machines.verdicts._latest


def test_a_machine_that_sends_no_reports_is_excluded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader's rank waits beyond its limit, b is not over its limit, and c sends only heartbeats."""
    machines = ThreeMachines()
    assert machines.verdicts([rank_report(0)]) is None and machines.num_requests == 1
    machines.verdicts.receive("b", [rank_report(1, is_over_limit=False, is_waiting=False)])
    now = machines.verdicts._requested_at
    monkeypatch.setattr("drivetrain.supervise.verdicts.time.monotonic", lambda: now + 29)
    assert machines.verdicts([rank_report(0)]) is None and not machines.excluded
    monkeypatch.setattr("drivetrain.supervise.verdicts.time.monotonic", lambda: now + 31)
    assert machines.verdicts([rank_report(0)]) is None and machines.excluded == ["c"]


def test_a_member_sends_a_report_and_withdraws_it() -> None:
    sent_ranks: list[list[int]] = []
    verdicts = MemberVerdicts(lambda reports: sent_ranks.append([report.rank for report in reports]))
    for reports in ([], [rank_report(1)], None, [], [], None):
        assert verdicts(reports) is None
    assert sent_ranks == [[1], []]
