"""The verdict on a hang: which ranks hang, decided from reports of all ranks; with several nodes, by the leader."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

LEADER = None
"""The key of the leader's own node; other nodes have their connection as the key."""
REPORT_SECONDS = 2.0  # other nodes may take this long to report before the leader decides without them


@dataclass(frozen=True)
class RankReport:
    """The state of one rank, examined by its node and sent to the leader."""

    rank: int
    step: int
    phase: str
    since: float
    """The time of the last heartbeat, on the clock of its node."""
    silent_seconds: float
    """Seconds since the last heartbeat."""
    is_over_limit: bool
    """Whether it is silent beyond its limit."""
    is_stopped: bool
    """Whether the process is stopped (state T)."""
    is_waiting: bool
    """Whether it waits for other ranks, or for the device."""
    operation: str
    """What it waits in."""
    line: str
    """The line that it executes."""
    is_users_line: bool
    """Whether the line is in the user's own code."""
    location: str
    """The line as the message shows it."""
    spinning_gpus: str
    """The GPUs of its node that are busy only because they wait."""
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
    """Returns which ranks hang, if any. `all_ranks`: whether the reports show all ranks at the same moment."""
    over_limit = [report for report in reports if report.is_over_limit]
    stopped = [report for report in over_limit if report.is_stopped]
    hung = stopped or [report for report in over_limit if not report.is_waiting]
    if not hung:
        if not over_limit or len(over_limit) < len(reports) or not all_ranks:
            return None  # they wait for a rank that still works
        hung = _different_ranks(over_limit)
    return _verdict(hung, reports)


def _different_ranks(reports: list[RankReport]) -> list[RankReport]:
    """Returns the ranks at the rarest line of code; if all are at one line, those at the lowest step. All ranks wait for each other."""
    count = Counter(report.line for report in reports)
    if len(count) > 1:
        rarest = min(count.values())
        different = [report for report in reports if count[report.line] == rarest]
        in_users_code = [report for report in different if report.is_users_line]
        return in_users_code or different  # with two ranks at two lines, the one in the user's code is to blame
    lowest = min(report.step for report in reports)
    return [report for report in reports if report.step == lowest]


def _verdict(hung: list[RankReport], reports: list[RankReport]) -> Verdict:
    first, is_single = hung[0], len(hung) == 1
    if first.is_stopped:
        predicate = f"{'is' if is_single else 'are'} stopped (state T)"
    else:
        predicate = "hangs" if is_single else "hang"
    text = f"{_names(hung)} {predicate} in step {first.step:,} ({first.phase}), {first.silent_seconds:.0f} s without a heartbeat{first.location}"
    waiting = [report for report in reports if report not in hung]
    if waiting:
        operation = waiting[0].operation
        text += f"; {_names(waiting)} wait{'s' if len(waiting) == 1 else ''}{f' in {operation}' if operation else ''}"
    text += "".join(dict.fromkeys(report.spinning_gpus for report in reports))
    evidence = "\n".join(report.evidence for report in reports) + "\n"
    return Verdict([report.rank for report in hung], first.step, text, evidence, first.line)


def _names(reports: list[RankReport]) -> str:
    return f"rank {reports[0].rank}" if len(reports) == 1 else f"ranks {', '.join(str(report.rank) for report in reports)}"


# --- who decides -------------------------------------------------------------------------------


class LocalVerdicts:
    """Decides from the ranks of this node, if it is the only one."""

    wants_reports = False
    """Whether to examine the ranks although none is over its limit."""

    def __call__(self, reports: list[RankReport] | None) -> Verdict | None:
        """Returns the verdict, if there is one. `reports` is None if there are no new ones."""
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
        self._had_silent_ranks = any(report.is_over_limit for report in reports)
        return None


@dataclass(frozen=True)
class _NodeReports:
    """A node's newest reports."""

    reports: list[RankReport]
    first_time: float
    """When the first of a series of equal reports came."""
    last_time: float
    """When the last of them came."""


class LeaderVerdicts(LocalVerdicts):
    """Decides from the reports of all nodes."""

    def __init__(
        self,
        others: Callable[[], Sequence[Hashable]],
        request_reports: Callable[[], None],
        broadcast: Callable[[Verdict], None],
        exclude: Callable[[Hashable], None],
        answer_seconds: float,
    ) -> None:
        """`others` returns the other nodes of the attempt, `request_reports` asks them for reports, `broadcast` sends them the verdict,
        and `exclude` removes a node that does not report within `answer_seconds`."""
        self._others, self._request_reports, self._broadcast = others, request_reports, broadcast
        self._exclude, self._answer_seconds = exclude, answer_seconds
        self._latest: dict[Hashable, _NodeReports] = {}
        self._received_at: dict[Hashable, float] = {}
        self._decide_at = math.inf
        """When to decide without the missing reports."""
        self._requested_at = math.inf
        """When reports were requested because a rank was over its limit."""

    def receive(self, node: Hashable, reports: list[RankReport]) -> None:
        """Stores a node's reports. An empty list means that no rank of the node is over its limit any more."""
        previous, now = self._latest.get(node), time.monotonic()
        self._received_at[node] = now
        if not reports:
            if previous is not None and any(report.is_over_limit for report in previous.reports):
                del self._latest[node]
            return
        first_time = now
        if previous is not None and _heartbeats(previous.reports) == _heartbeats(reports):
            first_time = previous.first_time
        self._latest[node] = _NodeReports(reports, first_time, now)

    def __call__(self, reports: list[RankReport] | None) -> Verdict | None:
        if reports is not None:
            self.receive(LEADER, reports)
        nodes = [LEADER, *self._others()]
        latest = [self._latest[node] for node in nodes if node in self._latest]
        has_all = len(latest) == len(nodes)
        # All ranks wait for each other only if all of them waited at the same moment.
        at_one_moment = has_all and max(node.first_time for node in latest) <= min(node.last_time for node in latest)
        all_reports = sorted((report for node in latest for report in node.reports), key=lambda report: report.rank)
        verdict = find_hang(all_reports, all_ranks=at_one_moment)
        self.wants_reports = verdict is not None and LEADER not in self._latest
        if verdict is None:
            self._decide_at = math.inf
            self._exclude_silent_nodes(any(report.is_over_limit for report in all_reports))
            return None
        if not has_all and time.monotonic() < self._decide_at:
            if self._decide_at == math.inf:
                self._decide_at = time.monotonic() + REPORT_SECONDS
                self._request_reports()
            return None
        self._broadcast(verdict)
        return verdict

    def _exclude_silent_nodes(self, is_any_over_limit: bool) -> None:
        """While a rank is over its limit, excludes every node that does not report in time."""
        now = time.monotonic()
        if not is_any_over_limit:
            self._requested_at = math.inf
        elif self._requested_at == math.inf:
            self._requested_at = now
            self._request_reports()
        elif now - self._requested_at > self._answer_seconds:
            for node in list(self._others()):
                if self._received_at.get(node, -math.inf) < self._requested_at:
                    self._exclude(node)
            self._requested_at = math.inf


def _heartbeats(reports: list[RankReport]) -> list[tuple[int, bool, float]]:
    """Returns what differs between two reports only if a rank made progress."""
    return [(report.rank, report.is_over_limit, report.since) for report in reports]
