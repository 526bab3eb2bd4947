"""Finds ranks whose heartbeat stops, and examines the stacks of all ranks of this node then."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from drivetrain.hardware.activity import Activity, gpu_activity
from drivetrain.processes.procfs import descendants, process_state
from drivetrain.supervise import usage
from drivetrain.supervise.stacks import Stack, request_collectives, request_stack
from drivetrain.supervise.usage import BusyTimes
from drivetrain.supervise.verdicts import RankReport
from drivetrain.watch.heartbeat import WorkerHeartbeat

MIN_LIMIT_SECONDS = 30.0
"""Seconds without a heartbeat that are never called a hang."""
LIMIT_FACTOR = 10.0  # times the longest duration seen of a phase
UNKNOWN_LIMIT_SECONDS = 3600.0  # for a phase not seen yet: loading data, the first step, a compiler
FIRST_STEP_FACTOR = 4.0  # times the least limit: the first step's duration differs more between starts than a step's
IDLE_FACTOR = 10.0  # times the least limit, for a phase not seen yet in which the rank does not even compute, read or write
IDLE_SLOWEST_FACTOR = 3.0  # times the longest duration seen of any phase in this start
STACKS_SECONDS = 5.0  # between two examinations of stacks
SUSPENDED_SECONDS = 5.0  # a supervisor that was away longer than this was itself stopped: that time is not held against a rank


@dataclass(frozen=True)
class WatchedRank:
    """What the detector knows of one local worker."""

    rank: int
    pid: int
    heartbeat: WorkerHeartbeat
    stacks: Path
    """The file to which it writes its stacks."""
    read_heartbeat: Callable[[], WorkerHeartbeat]


@dataclass
class HangDetector:
    min_limit: float = MIN_LIMIT_SECONDS
    first_step: dict[str, float] = field(default_factory=dict)
    """Seconds that the first step took here in earlier starts, by phase."""
    _busy: BusyTimes = field(default_factory=BusyTimes)
    _examined_at: float = 0.0
    _checked_at: float = field(default_factory=time.monotonic)
    _resumed_at: float = 0.0

    def limit(self, heartbeat: WorkerHeartbeat) -> float:
        """Returns how many seconds a rank may go without a heartbeat."""
        if heartbeat.longest:
            return max(self.min_limit, LIMIT_FACTOR * heartbeat.longest)
        before = self.first_step.get(heartbeat.phase_name)
        if before is None:
            return max(self.min_limit, UNKNOWN_LIMIT_SECONDS)
        return max(FIRST_STEP_FACTOR * self.min_limit, LIMIT_FACTOR * before)

    def idle_limit(self, heartbeat: WorkerHeartbeat) -> float:
        """Returns how many seconds a rank may do nothing at all in a phase whose duration is not known yet."""
        return max(IDLE_FACTOR * self.min_limit, IDLE_SLOWEST_FACTOR * heartbeat.slowest)

    def _is_over_limit(self, rank: WatchedRank, is_stopped: bool, now: float) -> bool:
        heartbeat, since = rank.heartbeat, max(rank.heartbeat.since, self._resumed_at)
        if now - since > (self.min_limit if is_stopped else self.limit(heartbeat)):
            return True
        if not heartbeat.has_begun or heartbeat.longest or now - since < usage.WINDOW_SECONDS:
            return False  # before its first step a task may wait for anything
        return now - max(since, self._busy.last_busy(rank.rank, rank.pid, now)) > self.idle_limit(heartbeat)

    def _is_building(self, rank: WatchedRank, stack: Stack, now: float) -> bool:
        """Returns whether a rank imports or compiles, and makes progress."""
        if not stack.is_building or now - rank.heartbeat.since > max(self.min_limit, UNKNOWN_LIMIT_SECONDS):
            return False
        return now - self._busy.last_busy(rank.rank, rank.pid, now) < 2 * usage.WINDOW_SECONDS

    def check(self, ranks: list[WatchedRank], at_once: bool = False) -> list[RankReport] | None:
        """Returns reports of this node's ranks if one is silent beyond its limit, or `at_once`; an empty list if none is;
        None between two examinations."""
        now = time.monotonic()
        if now - self._checked_at > SUSPENDED_SECONDS:
            self._resumed_at = now
        self._checked_at = now
        stopped = [r for r in ranks if process_state(r.pid) == "T"]
        over = [r for r in ranks if self._is_over_limit(r, r in stopped, now)]
        if not (over or at_once):
            return []
        if any(r not in over for r in stopped) or (now - self._examined_at < STACKS_SECONDS and not at_once):
            return None
        self._examined_at = now
        # Stopped ranks come last: to write their stacks they must continue, which they may only once they are known to hang.
        stacks = _stacks_of([r for r in ranks if r not in stopped]) | _stacks_of(stopped)
        over = [r for r in over if r in stopped or not self._is_building(r, stacks[r.rank], now)]
        gpus = gpu_activity()
        with ThreadPoolExecutor(max(1, len(ranks))) as pool:
            return list(pool.map(lambda r: _report(r, stacks[r.rank], r in over, gpus, now), ranks))


def _stacks_of(ranks: list[WatchedRank]) -> dict[int, Stack]:
    """Requests all stacks at once: one rank that does not answer costs as much time as many."""
    with ThreadPoolExecutor(max(1, len(ranks))) as pool:
        return dict(zip((r.rank for r in ranks), pool.map(lambda r: request_stack(r.pid, r.stacks), ranks), strict=True))


def _report(rank: WatchedRank, stack: Stack, is_over: bool, gpus: list[Activity], now: float) -> RankReport:
    line = stack.line
    where = f" at {line}" if line else ", and does not say where"
    waits_for_loader = is_over and stack.is_loading and not stack.is_waiting
    loaders = {pid: request_stack(pid, rank.stacks) for pid in descendants(rank.pid)} if waits_for_loader else {}
    loader_line = next((s.users_line for s in loaders.values() if s.users_line is not None), None)
    if loader_line is not None and stack.users_line is None:
        line, where = loader_line, f": it waits for a loader's worker, at {loader_line}"
    elif waits_for_loader and stack.users_line is None:
        where = f": it waits for its loader's workers, at {line}"
    heartbeat, silent = rank.heartbeat, now - rank.heartbeat.since
    evidence = [f"--- rank {rank.rank}, pid {rank.pid}, step {heartbeat.step}, {heartbeat} for {silent:.1f} s ---", stack.text]
    if collectives := request_collectives(rank.stacks.parent, rank.rank):
        evidence.append(f"its last collectives, as torch's flight recorder has them:\n{collectives}")
    for pid, loader in loaders.items():
        evidence += [f"--- a process of rank {rank.rank}, pid {pid} ---", loader.text]
    return RankReport(
        rank.rank, heartbeat.step, str(heartbeat), heartbeat.since, silent,
        is_over and (stack.is_stopped or rank.read_heartbeat() == heartbeat),  # a heartbeat meanwhile: it does not hang
        stack.is_stopped, stack.is_waiting, stack.operation, str(line or ""), stack.users_line is not None, where,
        "".join(f"; {gpu}" for gpu in gpus if gpu.is_spinning), "\n".join([*map(str, gpus), *evidence]),
    )  # fmt: skip
