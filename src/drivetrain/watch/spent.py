"""Where the time of a training goes, by rank and part, and what to do about the part that is too large."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from drivetrain.plan import HOST_SYNC_REASON, Plan
from drivetrain.watch.pulse import PARTS

ENOUGH = 2.0  # seconds of training before anything is said
TOO_MUCH = {"data": 0.25, "copy": 0.2, "communication": 0.35, "saving": 0.15, "evaluation": 0.5}
TINY = 2e-3  # seconds: of a step that takes less, most is spent on beginning it
FEW = 16  # samples a process


@dataclass(frozen=True)
class Spent:
    """Seconds by part, for each rank; and the steps they were spent on."""

    ranks: list[dict[str, float]]
    steps: int

    @property
    def shares(self) -> dict[str, float]:
        """Of the whole time after the start, over all ranks."""
        sums = {part: sum(rank[part] for rank in self.ranks) for part in PARTS if part != "start"}
        whole = sum(sums.values()) or 1.0
        return {part: seconds / whole for part, seconds in sums.items()}

    @property
    def seconds(self) -> float:
        return max((sum(s for part, s in rank.items() if part != "start") for rank in self.ranks), default=0.0)

    def __add__(self, other: Spent) -> Spent:
        """Of one attempt and the next."""
        if len(self.ranks) != len(other.ranks):
            return other
        both = [{part: a[part] + b[part] for part in PARTS} for a, b in zip(self.ranks, other.ranks, strict=True)]
        return Spent(both, self.steps + other.steps)

    def beside(self, other: Spent) -> Spent:
        """Of the ranks of one machine and the next."""
        return Spent(self.ranks + other.ranks, max(self.steps, other.steps))

    @staticmethod
    def unknown(ranks: int) -> Spent:
        return Spent([dict.fromkeys(PARTS, 0.0) for _ in range(ranks)], 0)

    def to_json(self) -> dict[str, Any]:
        return {"ranks": self.ranks, "steps": self.steps}

    def sentence(self) -> str:
        """The parts in one line, the largest first."""
        told = sorted(((share, part) for part, share in self.shares.items() if share >= 0.005), reverse=True)
        return ", ".join(f"{part} {100 * share:.0f} %" for share, part in told)

    def bottleneck(self, plan: Plan, threads: int) -> str:
        """What holds the training up and what would help, in one sentence; empty where nothing does."""
        if self.seconds < ENOUGH or not self.steps:
            return ""
        shares = self.shares
        if late := self._late_rank():
            return late
        worst = max(TOO_MUCH, key=lambda part: shares.get(part, 0.0) / TOO_MUCH[part])
        share = f"{100 * shares[worst]:.0f} % of the time"
        if shares[worst] < TOO_MUCH[worst]:
            return _host_waits(plan) or self._tiny(plan)
        if worst == "data":
            more = max(plan.workers + 1, min(threads, 4 * max(1, plan.workers)))
            how = f"raise plan.workers from {plan.workers} to {more}, or " if plan.data == "loader" else ""
            return f"data loading is {share}: {how}do less for each sample (augment() works on whole batches, on the device)"
        if worst == "copy":
            return f"copying batches to the GPU is {share}: give them smaller (uint8 images, made floats in augment()), or as Tensors that fit there"
        if worst == "communication":
            return f"summing gradients over processes is {share}: raise global_batch, so that there are fewer steps, or use fewer processes"
        if worst == "saving":
            return f"saving is {share}: raise save_every, or put the run on a faster disk (--run-dir)"
        return f"evaluation is {share}: raise eval_every, or evaluate on fewer samples"

    def _late_rank(self) -> str:
        """The rank that all others wait for, if there is one: it waits least, and its own work takes longest."""
        if len(self.ranks) < 2:
            return ""
        waits = [rank["communication"] for rank in self.ranks]
        work = [rank["compute"] + rank["data"] for rank in self.ranks]
        slow = max(range(len(work)), key=work.__getitem__)
        others = [w for i, w in enumerate(waits) if i != slow]
        typical = sorted(w for i, w in enumerate(work) if i != slow)[(len(work) - 1) // 2]
        if min(others) < TOO_MUCH["communication"] * self.seconds or work[slow] < 1.5 * typical:
            return ""
        where = "loading data" if self.ranks[slow]["data"] > self.ranks[slow]["compute"] else "computing"
        return (
            f"rank {slow} is slow: its {where} takes {work[slow] / max(1e-9, typical):.1f} times as long as the others', which wait for it"
            f" {100 * min(others) / self.seconds:.0f} % of the time: look for other programs on its cores or GPU"
        )

    def _tiny(self, plan: Plan) -> str:
        step = self.seconds / self.steps
        share = plan.global_batch / max(1, plan.world_size)
        if step > TINY or share > FEW:
            return ""
        return (
            f"a step has only {share:.0f} samples a process and takes {1e3 * step:.1f} ms, most of it to begin and end:"
            " raise global_batch (and learning_rate with it)"
        )


def _host_waits(plan: Plan) -> str:
    """The line of the task at which the host waits for the GPU in every step, if that kept steps from being replayed."""
    why = plan.reasons.get("capture", "")
    if plan.capture != "off" or HOST_SYNC_REASON not in why:
        return ""
    return f"{why} in every step, so steps are called one by one: keep values on the device there (no item(), no `if` on a tensor)"
