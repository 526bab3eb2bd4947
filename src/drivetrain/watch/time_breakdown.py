"""Where the time of a training goes, by rank and part, and what to do about the part that is too large."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from drivetrain.plan import HOST_SYNC_REASON, Plan
from drivetrain.watch.heartbeat import PARTS

MIN_TRAINING_SECONDS = 2.0  # before a bottleneck is named
MAX_SHARE = {"data": 0.25, "copy": 0.2, "communication": 0.35, "saving": 0.15, "evaluation": 0.5}
SHORT_STEP_SECONDS = 2e-3  # most of a shorter step is overhead
FEW_SAMPLES = 16  # a process
SLOW_RANK_FACTOR = 1.5  # times the work of a typical rank


@dataclass(frozen=True)
class TimeBreakdown:
    """Seconds by part, for each rank; and the steps that took them."""

    ranks: list[dict[str, float]]
    steps: int

    @property
    def shares(self) -> dict[str, float]:
        """Each part's share of the time after the start, over all ranks."""
        sums = {part: sum(rank[part] for rank in self.ranks) for part in PARTS if part != "start"}
        total = sum(sums.values()) or 1.0
        return {part: seconds / total for part, seconds in sums.items()}

    @property
    def seconds(self) -> float:
        return max((sum(s for part, s in rank.items() if part != "start") for rank in self.ranks), default=0.0)

    def __add__(self, other: TimeBreakdown) -> TimeBreakdown:
        """Returns the sum over two attempts, one after the other."""
        if len(self.ranks) != len(other.ranks):
            return other
        both = [{part: a[part] + b[part] for part in PARTS} for a, b in zip(self.ranks, other.ranks, strict=True)]
        return TimeBreakdown(both, self.steps + other.steps)

    def beside(self, other: TimeBreakdown) -> TimeBreakdown:
        """Returns the breakdown of the ranks of two machines."""
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
        """Returns, in one sentence, what slows the training down and what would help; empty if nothing does."""
        if self.seconds < MIN_TRAINING_SECONDS or not self.steps:
            return ""
        if slow_rank := self._slow_rank():
            return slow_rank
        shares = self.shares
        part = max(MAX_SHARE, key=lambda part: shares.get(part, 0.0) / MAX_SHARE[part])
        if shares[part] < MAX_SHARE[part]:
            return _host_sync(plan) or self._short_steps(plan)
        return _advice(part, f"{100 * shares[part]:.0f} % of the time", plan, threads)

    def _slow_rank(self) -> str:
        """Names the rank that all others wait for, if there is one: it waits least, and its own work takes longest."""
        if len(self.ranks) < 2:
            return ""
        waits = [rank["communication"] for rank in self.ranks]
        work = [rank["compute"] + rank["data"] for rank in self.ranks]
        slow = max(range(len(work)), key=work.__getitem__)
        others_waits = [w for i, w in enumerate(waits) if i != slow]
        typical = sorted(w for i, w in enumerate(work) if i != slow)[(len(work) - 1) // 2]
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
            f"a step has only {samples:.0f} samples a process and takes {1e3 * step_seconds:.1f} ms, most of it to begin and end:"
            " raise global_batch (and learning_rate with it)"
        )


def _advice(part: str, share: str, plan: Plan, threads: int) -> str:
    """Returns what helps against a part that is too large."""
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
    """Returns the line of the task at which the host waits for the GPU in every step, if that prevented CUDA graphs."""
    why = plan.reasons.get("capture", "")
    if plan.capture != "off" or HOST_SYNC_REASON not in why:
        return ""
    return f"{why} in every step, so steps are called one by one: keep values on the device there (no item(), no `if` on a tensor)"
