"""How much time a training spends on each part, by rank, and what helps if a part takes too much."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from drivetrain.plan import HOST_SYNC_REASON, Plan
from drivetrain.watch.heartbeat import PARTS

MIN_TRAINING_SECONDS = 2.0  # shorter trainings get no advice
# A part that takes a larger share of the time is a bottleneck.
MAX_SHARE = {"data": 0.25, "copy": 0.2, "communication": 0.35, "saving": 0.15, "evaluation": 0.5}
SHORT_STEP_SECONDS = 2e-3  # most of a shorter step is overhead
FEW_SAMPLES = 16  # in one step of one process
SLOW_RANK_FACTOR = 1.5  # a rank is slow if its work takes this many times the median of the others


@dataclass(frozen=True)
class TimeBreakdown:
    """The time that each rank spent on each part."""

    ranks: list[dict[str, float]]
    """For each rank: part -> seconds."""
    steps: int
    """The number of steps that took this time."""

    @property
    def shares(self) -> dict[str, float]:
        """Each part's share of the time, over all ranks. The part "start" does not count."""
        sums = {part: sum(rank[part] for rank in self.ranks) for part in PARTS if part != "start"}
        total = sum(sums.values()) or 1.0
        return {part: seconds / total for part, seconds in sums.items()}

    @property
    def seconds(self) -> float:
        """The longest time of a rank, without the part "start"."""
        totals = [sum(seconds for part, seconds in rank.items() if part != "start") for rank in self.ranks]
        return max(totals, default=0.0)

    def __add__(self, other: TimeBreakdown) -> TimeBreakdown:
        """Returns the sum of two attempts of the same ranks, one after the other."""
        if len(self.ranks) != len(other.ranks):
            return other
        pairs = zip(self.ranks, other.ranks, strict=True)
        sums = [{part: own[part] + added[part] for part in PARTS} for own, added in pairs]
        return TimeBreakdown(sums, self.steps + other.steps)

    def with_ranks_of(self, other: TimeBreakdown) -> TimeBreakdown:
        """Returns the breakdown of both machines' ranks."""
        return TimeBreakdown(self.ranks + other.ranks, max(self.steps, other.steps))

    @staticmethod
    def unknown(ranks: int) -> TimeBreakdown:
        return TimeBreakdown([dict.fromkeys(PARTS, 0.0) for _ in range(ranks)], 0)

    def to_json(self) -> dict[str, Any]:
        return {"ranks": self.ranks, "steps": self.steps}

    def sentence(self) -> str:
        """Returns the parts in one line, the largest first."""
        largest_first = sorted(((share, part) for part, share in self.shares.items() if share >= 0.005), reverse=True)
        return ", ".join(f"{part} {100 * share:.0f} %" for share, part in largest_first)

    def bottleneck(self, plan: Plan, threads: int) -> str:
        """Returns a sentence with what slows the training down and what helps; "" if nothing does."""
        if self.seconds < MIN_TRAINING_SECONDS or not self.steps:
            return ""
        if slow_rank := self._slow_rank():
            return slow_rank
        shares = self.shares
        worst_part = max(MAX_SHARE, key=lambda part: shares.get(part, 0.0) / MAX_SHARE[part])
        if shares[worst_part] < MAX_SHARE[worst_part]:
            return _host_sync(plan) or self._short_steps(plan)
        return _advice(worst_part, f"{100 * shares[worst_part]:.0f} % of the time", plan, threads)

    def _slow_rank(self) -> str:
        """Returns a sentence about the rank that all others wait for; "" if there is none."""
        if len(self.ranks) < 2:
            return ""
        waits = [rank["communication"] for rank in self.ranks]
        work = [rank["compute"] + rank["data"] for rank in self.ranks]
        slow = max(range(len(work)), key=work.__getitem__)
        others_waits = [seconds for rank, seconds in enumerate(waits) if rank != slow]
        others_work = sorted(seconds for rank, seconds in enumerate(work) if rank != slow)
        typical = others_work[(len(work) - 1) // 2]
        if min(others_waits) < MAX_SHARE["communication"] * self.seconds or work[slow] < SLOW_RANK_FACTOR * typical:
            return ""
        activity = "loading data" if self.ranks[slow]["data"] > self.ranks[slow]["compute"] else "computing"
        return (
            f"rank {slow} is slow: its {activity} takes {work[slow] / max(1e-9, typical):.1f} times as long as the others', which wait for it"
            f" {100 * min(others_waits) / self.seconds:.0f} % of the time: look for other programs on its cores or GPU"
        )

    def _short_steps(self, plan: Plan) -> str:
        step_seconds = self.seconds / self.steps
        samples = plan.global_batch / max(1, plan.world_size)
        if step_seconds > SHORT_STEP_SECONDS or samples > FEW_SAMPLES:
            return ""
        return (
            f"a step has only {samples:.0f} samples a process and takes {1e3 * step_seconds:.1f} ms, most of it overhead:"
            " raise global_batch (and learning_rate with it)"
        )


def _advice(part: str, share: str, plan: Plan, threads: int) -> str:
    """Returns what helps if a part takes too much time."""
    if part == "data":
        more = max(plan.workers + 1, min(threads, 4 * max(1, plan.workers)))
        how = f"raise plan.workers from {plan.workers} to {more}, or " if plan.data == "loader" else ""
        return f"data loading is {share}: {how}do less for each sample (augment() works on whole batches, on the device)"
    if part == "copy":
        return f"copying batches to the GPU is {share}: give them smaller (uint8 images, made floats in augment()), or as Tensors that fit there"
    if part == "communication":
        return f"summing gradients over processes is {share}: raise global_batch, so that there are fewer steps, or use fewer processes"
    if part == "saving":
        return f"saving is {share}: raise save_every, or put the run on a faster disk (--run-dir)"
    return f"evaluation is {share}: raise eval_every, or evaluate on fewer samples"


def _host_sync(plan: Plan) -> str:
    """Returns a sentence about the line of the task that waits for the GPU in every step, if that prevented CUDA graphs; else ""."""
    why = plan.reasons.get("capture", "")
    if plan.capture != "off" or HOST_SYNC_REASON not in why:
        return ""
    return f"{why} in every step, so steps are called one by one: keep values on the device there (no item(), no `if` on a tensor)"
