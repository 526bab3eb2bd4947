"""Which rank hangs, and where: judged by pulses that stop, and by what the processes' stacks say then."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from drivetrain.hardware.activity import activity
from drivetrain.supervise.stacks import Stack, ask, ask_about_collectives, children_of, state_of
from drivetrain.watch.pulse import Beat

FLOOR = 30.0
"""Seconds without a sign of life that are never called a hang."""
TIMES = 10.0  # as long as the longest that was seen
UNKNOWN = 3600.0  # seconds for what was not seen yet: loading data, the first step, a compiler
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
    _looked: float = 0.0
    _seen: float = field(default_factory=time.monotonic)
    _excused: float = 0.0

    def limit(self, beat: Beat) -> float:
        return max(self.floor, TIMES * beat.longest) if beat.longest else max(self.floor, UNKNOWN)

    def look(self, ranks: list[Rank], alone: bool) -> Verdict | None:
        """Judge the ranks of this machine; `alone` where there are no others."""
        now = time.monotonic()
        if now - self._seen > ASLEEP:
            self._excused = now
        self._seen = now
        silent = {r.rank: now - max(r.beat.since, self._excused) for r in ranks}
        stopped = [r for r in ranks if state_of(r.pid) == "T"]
        over = [r for r in ranks if silent[r.rank] > (self.floor if r in stopped else self.limit(r.beat))]
        if not over or now - self._looked < AGAIN or any(r not in over for r in stopped):
            return None
        self._looked = now
        # Those that are stopped come last: to be asked, they must go on, which they do only once it is settled that they hang.
        stacks = _asked([r for r in ranks if r not in stopped]) | _asked(stopped)
        stuck = stopped or [r for r in over if not stacks[r.rank].waits]
        if not stuck:
            if len(over) < len(ranks) or not alone:
                return None  # they wait for a rank that has its reasons
            stuck = _odd(over, stacks)
        if any(not stacks[r.rank].stopped and r.again() != r.beat for r in stuck):
            return None  # it lives after all
        loaders = {r.rank: self._loaders(r) for r in stuck if stacks[r.rank].loads}
        return _verdict(stuck, ranks, stacks, loaders, now)

    def _loaders(self, rank: Rank) -> dict[int, Stack]:
        return {pid: ask(pid, rank.answers) for pid in children_of(rank.pid)}


def _asked(ranks: list[Rank]) -> dict[int, Stack]:
    """All at once: one that does not answer costs as much as many."""
    with ThreadPoolExecutor(max(1, len(ranks))) as pool:
        return dict(zip((r.rank for r in ranks), pool.map(lambda r: ask(r.pid, r.answers), ranks), strict=True))


def _odd(ranks: list[Rank], stacks: dict[int, Stack]) -> list[Rank]:
    """All wait for each other: those whose place in the code is not the others', or who are behind."""
    places = {r.rank: str(stacks[r.rank].line) for r in ranks}
    count = Counter(places.values())
    if len(count) > 1:
        rare = min(count.values())
        odd = [r for r in ranks if count[places[r.rank]] == rare]
        theirs = [r for r in odd if stacks[r.rank].users is not None]  # of two that disagree, the user's own call
        return theirs or odd
    behind = min(r.beat.step for r in ranks)
    return [r for r in ranks if r.beat.step == behind]


def _verdict(stuck: list[Rank], ranks: list[Rank], stacks: dict[int, Stack], loaders: dict[int, dict[int, Stack]], now: float) -> Verdict:
    first = stuck[0]
    stack, line = stacks[first.rank], stacks[first.rank].line
    names = _names([r.rank for r in stuck])
    one = len(stuck) == 1
    how = f"{'is' if one else 'are'} stopped (state T)" if stack.stopped else "hangs" if one else "hang"
    where = f" at {line}" if line else ", and does not say where"
    deeper = next((s for s in loaders.get(first.rank, {}).values() if s.users is not None), None)
    if deeper is not None and stack.users is None:
        line, where = deeper.users, f": it waits for a loader's worker, at {deeper.users}"
    elif loaders.get(first.rank) is not None and stack.users is None:
        where = f": it waits for its loader's workers, at {line}"
    text = f"{names} {how} in step {first.beat.step:,} ({first.beat}), {now - first.beat.since:.0f} s without a sign of life{where}"
    waiting = [r for r in ranks if r not in stuck]
    if waiting:
        operation = stacks[waiting[0].rank].operation
        text += f"; {_names([r.rank for r in waiting])} wait{'s' if len(waiting) == 1 else ''}{f' in {operation}' if operation else ''}"
    cards = activity()
    evidence = [str(gpu) for gpu in cards]
    text += "".join(f"; {gpu}" for gpu in cards if gpu.spins)
    for rank in ranks:
        evidence.append(f"--- rank {rank.rank}, pid {rank.pid}, step {rank.beat.step}, {rank.beat} for {now - rank.beat.since:.1f} s ---")
        evidence.append(stacks[rank.rank].text)
        if last := ask_about_collectives(rank.answers.parent, rank.rank):
            evidence.append(f"its last collectives, as torch's flight recorder has them:\n{last}")
        for pid, inner in loaders.get(rank.rank, {}).items():
            evidence += [f"--- a process of rank {rank.rank}, pid {pid} ---", inner.text]
    return Verdict([r.rank for r in stuck], first.beat.step, text, "\n".join(evidence) + "\n", str(line or ""))


def _names(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
