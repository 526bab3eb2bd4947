"""Detects ranks whose heartbeat has stopped, and then examines the stacks of all ranks of this node."""

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
"""Default of --hang-after: no limit is lower."""
# Limits for the time without a heartbeat:
LIMIT_FACTOR = 10.0  # this many times the longest duration of the phase so far
UNKNOWN_LIMIT_SECONDS = 3600.0  # in a phase of unknown duration: loading data, the first step, compiling
FIRST_STEP_FACTOR = 4.0  # in the first step at least this many times the lowest limit: its duration varies much between starts
# Limits for the time in which a rank does not even compute, read or write, in a phase of unknown duration:
IDLE_FACTOR = 10.0  # at least this many times the lowest limit
IDLE_SLOWEST_FACTOR = 3.0  # and at least this many times the longest duration of any phase so far
STACKS_SECONDS = 5.0  # between two examinations of stacks
SUSPENDED_SECONDS = 5.0  # after a longer pause this process was itself stopped: the pause does not count for the ranks


@dataclass(frozen=True)
class WatchedRank:
    """A worker of this node, as the detector sees it."""

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
    """Phase -> seconds that it took in the first step of earlier starts on this machine."""
    _busy: BusyTimes = field(default_factory=BusyTimes)
    _examined_at: float = 0.0
    _checked_at: float = field(default_factory=time.monotonic)
    _resumed_at: float = 0.0

    def limit(self, heartbeat: WorkerHeartbeat) -> float:
        """Returns how many seconds a rank may be without a heartbeat."""
        if heartbeat.longest:
            return max(self.min_limit, LIMIT_FACTOR * heartbeat.longest)
        earlier_seconds = self.first_step.get(heartbeat.phase_name)
        if earlier_seconds is None:
            return max(self.min_limit, UNKNOWN_LIMIT_SECONDS)
        return max(FIRST_STEP_FACTOR * self.min_limit, LIMIT_FACTOR * earlier_seconds)

    def idle_limit(self, heartbeat: WorkerHeartbeat) -> float:
        """Returns how many seconds a rank may be idle in a phase of unknown duration."""
        return max(IDLE_FACTOR * self.min_limit, IDLE_SLOWEST_FACTOR * heartbeat.slowest)

    def _is_over_limit(self, rank: WatchedRank, is_stopped: bool, now: float) -> bool:
        heartbeat, since = rank.heartbeat, max(rank.heartbeat.since, self._resumed_at)
        if now - since > (self.min_limit if is_stopped else self.limit(heartbeat)):
            return True
        if not heartbeat.has_begun or heartbeat.longest or now - since < usage.WINDOW_SECONDS:
            return False  # before the first step a task may wait for anything, such as a download
        return now - max(since, self._busy.last_busy(rank.rank, rank.pid, now)) > self.idle_limit(heartbeat)

    def _is_building(self, rank: WatchedRank, stack: Stack, now: float) -> bool:
        """Returns whether a rank imports or compiles, and is busy."""
        if not stack.is_building or now - rank.heartbeat.since > max(self.min_limit, UNKNOWN_LIMIT_SECONDS):
            return False
        return now - self._busy.last_busy(rank.rank, rank.pid, now) < 2 * usage.WINDOW_SECONDS

    def check(self, ranks: list[WatchedRank], at_once: bool = False) -> list[RankReport] | None:
        """Returns reports of this node's ranks if one is over its limit, or if `at_once`.

        Returns an empty list if none is over its limit, and None if the stacks were examined a moment ago.
        """
        now = time.monotonic()
        if now - self._checked_at > SUSPENDED_SECONDS:
            self._resumed_at = now
        self._checked_at = now
        stopped = [rank for rank in ranks if process_state(rank.pid) == "T"]
        over_limit = [rank for rank in ranks if self._is_over_limit(rank, rank in stopped, now)]
        if not (over_limit or at_once):
            return []
        if any(rank not in over_limit for rank in stopped) or (now - self._examined_at < STACKS_SECONDS and not at_once):
            return None
        self._examined_at = now
        # Stopped ranks come last, because they run for a moment to write their stacks.
        stacks = _stacks_of([rank for rank in ranks if rank not in stopped]) | _stacks_of(stopped)
        over_limit = [rank for rank in over_limit if rank in stopped or not self._is_building(rank, stacks[rank.rank], now)]
        gpus = gpu_activity()
        with ThreadPoolExecutor(max(1, len(ranks))) as pool:
            return list(pool.map(lambda rank: _report(rank, stacks[rank.rank], rank in over_limit, gpus, now), ranks))


def _stacks_of(ranks: list[WatchedRank]) -> dict[int, Stack]:
    """Returns rank -> stack. Requests all stacks at the same time, so that several ranks without an answer cost one timeout."""
    with ThreadPoolExecutor(max(1, len(ranks))) as pool:
        stacks = pool.map(lambda rank: request_stack(rank.pid, rank.stacks), ranks)
        return {rank.rank: stack for rank, stack in zip(ranks, stacks, strict=True)}


def _report(rank: WatchedRank, stack: Stack, is_over: bool, gpus: list[Activity], now: float) -> RankReport:
    line = stack.line
    location = f" at {line}" if line else ", at an unknown line"
    waits_for_loader = is_over and stack.is_loading and not stack.is_waiting
    loaders = {pid: request_stack(pid, rank.stacks) for pid in descendants(rank.pid)} if waits_for_loader else {}
    loader_line = next((loader.users_line for loader in loaders.values() if loader.users_line is not None), None)
    if loader_line is not None and stack.users_line is None:
        line, location = loader_line, f": it waits for a loader worker, at {loader_line}"
    elif waits_for_loader and stack.users_line is None:
        location = f": it waits for its loader workers, at {line}"
    heartbeat, silent_seconds = rank.heartbeat, now - rank.heartbeat.since
    evidence = [f"--- rank {rank.rank}, pid {rank.pid}, step {heartbeat.step}, {heartbeat} for {silent_seconds:.1f} s ---", stack.text]
    if collectives := request_collectives(rank.stacks.parent, rank.rank):
        evidence.append(f"its last collectives, from torch's flight recorder:\n{collectives}")
    for pid, loader in loaders.items():
        evidence += [f"--- a process of rank {rank.rank}, pid {pid} ---", loader.text]
    return RankReport(
        rank.rank, heartbeat.step, str(heartbeat), heartbeat.since, silent_seconds,
        is_over and (stack.is_stopped or rank.read_heartbeat() == heartbeat),  # a rank with a new heartbeat does not hang
        stack.is_stopped, stack.is_waiting, stack.operation, str(line or ""), stack.users_line is not None, location,
        "".join(f"; {gpu}" for gpu in gpus if gpu.is_spinning), "\n".join([*map(str, gpus), *evidence]),
    )  # fmt: skip
