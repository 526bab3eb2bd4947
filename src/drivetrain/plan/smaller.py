"""Makes a smaller plan after out of memory: takes the plan, returns the changed keys for a micro-batch of half the size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from drivetrain.plan.plan import Plan


@dataclass(frozen=True)
class PlanChange:
    """A change of the plan to a smaller micro-batch, in training or in evaluation."""

    old_size: int
    """Samples that ran at a time."""
    new_size: int
    changes: dict[str, Any]
    """The plan's keys that change."""

    def sizes(self) -> dict[str, int]:
        return {k: v for k, v in self.changes.items() if k in ("micro_batch", "eval_micro_batch", "accumulation")}

    def sentence(self) -> str:
        name = "micro-batch" if "micro_batch" in self.changes else "evaluation's micro-batch"
        return f"{name} {self.old_size} -> {self.new_size}"

    def restart_facts(self, step: int, rank: int, during: str) -> dict[str, Any]:
        """Returns what the supervisor needs to restart the run with the smaller plan."""
        text = f"out of memory at step {step:,} on rank {rank}: {self.sentence()}"
        oom = {"step": step, "rank": rank, "was": self.old_size, "now": self.new_size, "during": during}
        return {"plan": self.changes, "sizes": self.sizes(), "oom": oom, "sentence": text}


def halve(plan: Plan, step: int, share: int, evaluation: bool) -> PlanChange | None:
    """Returns the change after out of memory at a step; None if the micro-batch already has only one sample.

    `share`: the samples of a full global batch that one process takes.
    """
    old_size, new_size = halved_size(share, plan.eval_micro_batch if evaluation else plan.micro_batch)
    if old_size == 1:
        return None
    why = f"halved from {old_size}: out of memory {'in the evaluation ' if evaluation else ''}at step {step:,}"
    if evaluation:
        return PlanChange(old_size, new_size, {"eval_micro_batch": new_size, "reasons": plan.reasons | {"eval_micro_batch": why}})
    reasons = plan.reasons | {"micro_batch": why, "accumulation": f"{share} samples a process in micro-batches of at most {new_size}"}
    changes: dict[str, Any] = {"micro_batch": new_size, "accumulation": -(-share // new_size), "measured": {}, "reasons": reasons}
    # The run again measures whether capture and compile are faster, unless the user pinned them.
    for key, undecided in (("capture", "auto" if plan.device == "cuda" else "off"), ("compile", "auto")):
        if plan.reasons.get(key) != "pinned":
            changes[key] = undecided
    if "compile" in changes:
        changes["compile_from"] = None
    return PlanChange(old_size, new_size, changes)


def halved_size(share: int, micro_batch: int) -> tuple[int, int]:
    """Returns the present size of micro-batches (the share in equal pieces of at most `micro_batch`), and half of it."""
    size = -(-share // -(-share // micro_batch))
    return size, -(-size // 2)
