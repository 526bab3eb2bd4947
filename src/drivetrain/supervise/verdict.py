"""Which rank hangs, and where: judged by pulses that stop, and by what the processes' stacks say then."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from drivetrain.hardware.activity import Activity, gpu_activity
from drivetrain.processes.procfs import descendants, process_state
from drivetrain.supervise import usage
from drivetrain.supervise.stacks import Stack, ask, ask_about_collectives
from drivetrain.supervise.usage import Busy
from drivetrain.watch.pulse import Beat

FLOOR = 30.0
"""Seconds without a sign of life that are never called a hang."""
TIMES = 10.0  # as long as the longest that was seen
UNKNOWN = 3600.0  # seconds for what was not seen yet: loading data, the first step, a compiler
FIRST_FLOOR = 4.0  # as long as FLOOR: what sets things up differs more from start to start than steps do
UNSEEN_FLOOR = 10.0  # as long as FLOOR, for what was not seen yet, where the rank does not even compute, read or write
UNSEEN_TIMES = 3.0  # as long as the longest of anything that was seen in this start
AGAIN = 5.0  # seconds between two looks at stacks
ASLEEP = 5.0  # a watcher that was away longer than this was itself stopped: nobody is judged by that time


@dataclass(frozen=True)
class Rank:
    """What the watcher knows of one local worker."""

    rank: int
    pid: int
    beat: Beat
    answers: Path
    """Where it writes its stack."""
    again: Callable[[], Beat]
    """Its pulse by now."""


@dataclass(frozen=True)
class Sight:
    """What was seen of one rank; in plain values, for the machine that judges may be another."""

    rank: int
    step: int
    doing: str
    since: float
    """Its last sign of life, on its machine's clock."""
    silent: float
    """Seconds without one."""
    over: bool
    """Whether that is beyond its limit."""
    stopped: bool
    waits: bool
    """Whether it waits for other ranks, or for the device."""
    operation: str
    """What it waits in."""
    line: str
    users: bool
    """Whether that line is the user's own."""
    where: str
    spins: str
    """GPUs of its machine that are busy with waiting."""
    evidence: str
    """Its stacks, for the log."""


@dataclass(frozen=True)
class Verdict:
    ranks: list[int]
    """That hang; all others wait for them."""
    step: int
    message: str
    evidence: str
    """The stacks of all, for the log."""
    line: str = ""


@dataclass
class Watchman:
    floor: float = FLOOR
    first: dict[str, float] = field(default_factory=dict)
    """Seconds that first steps took here in earlier starts, by place."""
    _busy: Busy = field(default_factory=Busy)
    _looked: float = 0.0
    _seen: float = field(default_factory=time.monotonic)
    _excused: float = 0.0

    def limit(self, beat: Beat) -> float:
        if beat.longest:
            return max(self.floor, TIMES * beat.longest)
        before = self.first.get(beat.name)
        return max(self.floor, UNKNOWN) if before is None else max(FIRST_FLOOR * self.floor, TIMES * before)

    def quiet_limit(self, beat: Beat) -> float:
        """Seconds that a rank may do nothing at all at a place whose duration is not known yet."""
        return max(UNSEEN_FLOOR * self.floor, UNSEEN_TIMES * beat.slowest)

    def _is_over(self, rank: Rank, stopped: bool, now: float) -> bool:
        beat, since = rank.beat, max(rank.beat.since, self._excused)
        if now - since > (self.floor if stopped else self.limit(beat)):
            return True
        if not beat.begun or beat.longest or now - since < usage.WINDOW:
            return False  # before its first step a task may wait for whatever it likes
        return now - max(since, self._busy.last(rank.rank, rank.pid, now)) > self.quiet_limit(beat)

    def _builds(self, rank: Rank, stack: Stack, now: float) -> bool:
        """Whether it imports or compiles, and gets on with it."""
        if not stack.builds or now - rank.beat.since > max(self.floor, UNKNOWN):
            return False
        return now - self._busy.last(rank.rank, rank.pid, now) < 2 * usage.WINDOW

    def look(self, ranks: list[Rank], at_once: bool = False) -> list[Sight] | None:
        """What is seen of this machine's ranks once one is silent beyond its limit, or `at_once`; nothing where none is; None between two looks."""
        now = time.monotonic()
        if now - self._seen > ASLEEP:
            self._excused = now
        self._seen = now
        stopped = [r for r in ranks if process_state(r.pid) == "T"]
        over = [r for r in ranks if self._is_over(r, r in stopped, now)]
        if not (over or at_once):
            return []
        if any(r not in over for r in stopped) or (now - self._looked < AGAIN and not at_once):
            return None
        self._looked = now
        # Those that are stopped come last: to be asked, they must go on, which they do only once it is settled that they hang.
        stacks = _asked([r for r in ranks if r not in stopped]) | _asked(stopped)
        over = [r for r in over if r in stopped or not self._builds(r, stacks[r.rank], now)]
        cards = gpu_activity()
        with ThreadPoolExecutor(max(1, len(ranks))) as pool:
            return list(pool.map(lambda r: _sight(r, stacks[r.rank], r in over, cards, now), ranks))


def _asked(ranks: list[Rank]) -> dict[int, Stack]:
    """All at once: one that does not answer costs as much as many."""
    with ThreadPoolExecutor(max(1, len(ranks))) as pool:
        return dict(zip((r.rank for r in ranks), pool.map(lambda r: ask(r.pid, r.answers), ranks), strict=True))


def _sight(rank: Rank, stack: Stack, over: bool, cards: list[Activity], now: float) -> Sight:
    line = stack.line
    where = f" at {line}" if line else ", and does not say where"
    loaders = {pid: ask(pid, rank.answers) for pid in descendants(rank.pid)} if over and stack.loads and not stack.waits else None
    deeper = next((s.users for s in (loaders or {}).values() if s.users is not None), None)
    if deeper is not None and stack.users is None:
        line, where = deeper, f": it waits for a loader's worker, at {deeper}"
    elif loaders is not None and stack.users is None:
        where = f": it waits for its loader's workers, at {line}"
    silent = now - rank.beat.since
    evidence = [f"--- rank {rank.rank}, pid {rank.pid}, step {rank.beat.step}, {rank.beat} for {silent:.1f} s ---", stack.text]
    if last := ask_about_collectives(rank.answers.parent, rank.rank):
        evidence.append(f"its last collectives, as torch's flight recorder has them:\n{last}")
    for pid, inner in (loaders or {}).items():
        evidence += [f"--- a process of rank {rank.rank}, pid {pid} ---", inner.text]
    return Sight(
        rank.rank, rank.beat.step, str(rank.beat), rank.beat.since, silent,
        over and (stack.stopped or rank.again() == rank.beat),  # else it lives after all
        stack.stopped, stack.waits, stack.operation, str(line or ""), stack.users is not None, where,
        "".join(f"; {gpu}" for gpu in cards if gpu.is_spinning), "\n".join([*map(str, cards), *evidence]),
    )  # fmt: skip


def judge(sights: list[Sight], whole: bool) -> Verdict | None:
    """Who hangs, if anybody does; `whole` where these are all ranks there are."""
    over = [s for s in sights if s.over]
    stuck = [s for s in over if s.stopped] or [s for s in over if not s.waits]
    if not stuck:
        if not over or len(over) < len(sights) or not whole:
            return None  # they wait for a rank that has its reasons
        stuck = _odd(over)
    return _verdict(stuck, sights)


def _odd(sights: list[Sight]) -> list[Sight]:
    """All wait for each other: those whose place in the code is not the others', or who are behind."""
    count = Counter(s.line for s in sights)
    if len(count) > 1:
        rare = min(count.values())
        odd = [s for s in sights if count[s.line] == rare]
        theirs = [s for s in odd if s.users]  # of two that disagree, the user's own call
        return theirs or odd
    behind = min(s.step for s in sights)
    return [s for s in sights if s.step == behind]


def _verdict(stuck: list[Sight], sights: list[Sight]) -> Verdict:
    first, one = stuck[0], len(stuck) == 1
    how = f"{'is' if one else 'are'} stopped (state T)" if first.stopped else "hangs" if one else "hang"
    text = f"{_names(stuck)} {how} in step {first.step:,} ({first.doing}), {first.silent:.0f} s without a sign of life{first.where}"
    waiting = [s for s in sights if s not in stuck]
    if waiting:
        operation = waiting[0].operation
        text += f"; {_names(waiting)} wait{'s' if len(waiting) == 1 else ''}{f' in {operation}' if operation else ''}"
    text += "".join(dict.fromkeys(s.spins for s in sights))
    return Verdict([s.rank for s in stuck], first.step, text, "\n".join(s.evidence for s in sights) + "\n", first.line)


def _names(sights: list[Sight]) -> str:
    return f"rank {sights[0].rank}" if len(sights) == 1 else f"ranks {', '.join(str(s.rank) for s in sights)}"
