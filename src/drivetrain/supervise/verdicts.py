"""The verdict on a hang: which ranks hang, decided from reports of all ranks; with several nodes, by the leader."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

LEADER = None
"""The leader's own node, among those that report."""
REPORT_SECONDS = 2.0  # what other nodes get to report their ranks before the verdict is given without them


@dataclass(frozen=True)
class RankReport:
    """What one node saw of one of its ranks; plain values, to be sent to the leader."""

    rank: int
    step: int
    doing: str
    since: float
    """The last heartbeat, on the clock of its node."""
    silent: float
    """Seconds since the last heartbeat."""
    over: bool
    """Whether it is silent beyond its limit."""
    stopped: bool
    """Whether the process is stopped (state T)."""
    waits: bool
    """Whether it waits for other ranks, or for the device."""
    operation: str
    """What it waits in."""
    line: str
    users: bool
    """Whether that line is the user's own."""
    where: str
    spins: str
    """GPUs of its node that are busy with waiting."""
    evidence: str
    """Its stacks, for the log."""


@dataclass(frozen=True)
class Verdict:
    ranks: list[int]
    """The ranks that hang; all others wait for them."""
    step: int
    message: str
    evidence: str
    """The stacks of all ranks, for the log."""
    line: str = ""


def find_hang(reports: list[RankReport], all_ranks: bool) -> Verdict | None:
    """Returns which ranks hang, if any do. `all_ranks`: whether the reports are those of all ranks at one moment."""
    over = [report for report in reports if report.over]
    hung = [report for report in over if report.stopped] or [report for report in over if not report.waits]
    if not hung:
        if not over or len(over) < len(reports) or not all_ranks:
            return None  # they wait for a rank that still works
        hung = _odd_ones(over)
    return _verdict(hung, reports)


def _odd_ones(reports: list[RankReport]) -> list[RankReport]:
    """All ranks wait for each other: returns those at the rarest line of code, or, at the same line, at the lowest step."""
    count = Counter(report.line for report in reports)
    if len(count) > 1:
        rarest = min(count.values())
        odd = [report for report in reports if count[report.line] == rarest]
        return [report for report in odd if report.users] or odd  # of two that disagree, the user's own call
    lowest = min(report.step for report in reports)
    return [report for report in reports if report.step == lowest]


def _verdict(hung: list[RankReport], reports: list[RankReport]) -> Verdict:
    first, is_one = hung[0], len(hung) == 1
    how = f"{'is' if is_one else 'are'} stopped (state T)" if first.stopped else "hangs" if is_one else "hang"
    text = f"{_names(hung)} {how} in step {first.step:,} ({first.doing}), {first.silent:.0f} s without a sign of life{first.where}"
    waiting = [report for report in reports if report not in hung]
    if waiting:
        operation = waiting[0].operation
        text += f"; {_names(waiting)} wait{'s' if len(waiting) == 1 else ''}{f' in {operation}' if operation else ''}"
    text += "".join(dict.fromkeys(report.spins for report in reports))
    evidence = "\n".join(report.evidence for report in reports) + "\n"
    return Verdict([report.rank for report in hung], first.step, text, evidence, first.line)


def _names(reports: list[RankReport]) -> str:
    return f"rank {reports[0].rank}" if len(reports) == 1 else f"ranks {', '.join(str(report.rank) for report in reports)}"


# --- who decides -------------------------------------------------------------------------------


class LocalVerdicts:
    """Decides by this node's ranks, where there are no others."""

    wants_reports = False
    """Whether the ranks are to be examined though none is silent beyond its limit."""

    def __call__(self, reports: list[RankReport] | None) -> Verdict | None:
        """Returns a verdict, if the reports (None: no new ones) give one."""
        return find_hang(reports or [], all_ranks=True)


class MemberVerdicts(LocalVerdicts):
    """Sends this node's reports to the leader, which decides."""

    def __init__(self, send: Callable[[list[RankReport]], None]) -> None:
        self._send = send
        self._had_silent_ranks = False

    def __call__(self, reports: list[RankReport] | None) -> Verdict | None:
        if reports is None:
            return None
        if reports or self._had_silent_ranks:
            self._send(reports)
            self.wants_reports = False
        self._had_silent_ranks = any(report.over for report in reports)
        return None


@dataclass(frozen=True)
class _NodeReports:
    """A node's latest reports, and when the first and the last that said the same came."""

    reports: list[RankReport]
    first: float
    last: float


class LeaderVerdicts(LocalVerdicts):
    """Decides by the reports of all nodes."""

    def __init__(
        self,
        others: Callable[[], Sequence[Hashable]],
        request_reports: Callable[[], None],
        broadcast: Callable[[Verdict], None],
        exclude: Callable[[Hashable], None],
        answer_seconds: float,
    ) -> None:
        """`others` returns the other nodes that take part, `request_reports` asks them for reports at once, `broadcast` sends them
        the verdict, `exclude` removes a node that does not answer within `answer_seconds` while others wait."""
        self._others, self._request_reports, self._broadcast = others, request_reports, broadcast
        self._exclude, self._answer_seconds = exclude, answer_seconds
        self._latest: dict[Hashable, _NodeReports] = {}
        self._received_at: dict[Hashable, float] = {}
        self._decide_at = math.inf
        self._requested_at = math.inf

    def receive(self, node: Hashable, reports: list[RankReport]) -> None:
        """Takes in a node's reports; an empty list says that no rank of it is silent beyond its limit any more."""
        before, now = self._latest.get(node), time.monotonic()
        self._received_at[node] = now
        if not reports:
            if before is not None and any(report.over for report in before.reports):
                del self._latest[node]
            return
        is_same = before is not None and _silence(before.reports) == _silence(reports)
        self._latest[node] = _NodeReports(reports, before.first if is_same and before is not None else now, now)

    def __call__(self, reports: list[RankReport] | None) -> Verdict | None:
        if reports is not None:
            self.receive(LEADER, reports)
        nodes = [LEADER, *self._others()]
        latest = [self._latest[node] for node in nodes if node in self._latest]
        has_all = len(latest) == len(nodes)
        # All ranks wait for each other only if there was a moment at which all of them waited.
        at_one_moment = has_all and max(node.first for node in latest) <= min(node.last for node in latest)
        all_reports = sorted((report for node in latest for report in node.reports), key=lambda report: report.rank)
        verdict = find_hang(all_reports, all_ranks=at_one_moment)
        self.wants_reports = verdict is not None and LEADER not in self._latest
        if verdict is None:
            self._decide_at = math.inf
            self._exclude_silent_nodes(any(report.over for report in all_reports))
            return None
        if not has_all and time.monotonic() < self._decide_at:
            if self._decide_at == math.inf:
                self._decide_at = time.monotonic() + REPORT_SECONDS
                self._request_reports()
            return None
        self._broadcast(verdict)
        return verdict

    def _exclude_silent_nodes(self, is_rank_silent: bool) -> None:
        """While ranks are silent beyond their limit, excludes every node that does not report on its own ranks in time."""
        now = time.monotonic()
        if not is_rank_silent:
            self._requested_at = math.inf
        elif self._requested_at == math.inf:
            self._requested_at = now
            self._request_reports()
        elif now - self._requested_at > self._answer_seconds:
            for node in [node for node in self._others() if self._received_at.get(node, -math.inf) < self._requested_at]:
                self._exclude(node)
            self._requested_at = math.inf


def _silence(reports: list[RankReport]) -> list[tuple[int, bool, float]]:
    return [(report.rank, report.over, report.since) for report in reports]
