"""Makes the choice: takes a `Rater`, returns the fastest candidate that fits, with its reasons and the rejected ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from drivetrain.hardware import format_gib, format_need
from drivetrain.plan import reasons
from drivetrain.plan.candidates import Candidate, min_speedup
from drivetrain.plan.predict_memory import host_memory, state_by_part
from drivetrain.plan.rating import RatedCandidate, Rater

SAME_SPEED_SHARE = 0.98  # from this share of the best rate on, candidates count as equally fast
EVALUATION_FACTORS = (8, 4, 2)  # evaluation tries these multiples of the micro-batch
EVALUATION_MEMORY_SHARE = 0.8  # the share of usable memory that evaluation may take


@dataclass(frozen=True)
class Choice:
    best: RatedCandidate
    reasons: dict[str, str]
    rejected: list[dict[str, Any]]
    eval_micro_batch: int


def choose_fastest(rater: Rater, pins: Mapping[str, Any], deepspeed: bool) -> Choice:
    """Returns the fastest candidate that fits; a less simple one must be clearly faster. On a CPU, returns the first that fits."""
    candidates = rater.candidates(pins, deepspeed)
    best: RatedCandidate | None = None
    rated: list[tuple[Candidate, RatedCandidate | None]] = []
    for candidate in candidates:
        fastest = best_micro_batch(rater, candidate, pins)
        rated.append((candidate, fastest))
        if fastest is not None and (best is None or _replaces(rater, fastest, best)):
            best = fastest
    if best is None:
        raise reasons.fits_nowhere(rater, candidates, pins)
    rejected = [reasons.why_lost(rater, candidate, fastest, best) for candidate, fastest in rated if fastest is not best]
    eval_micro_batch, why_evaluation = _evaluation_micro_batch(rater, best)
    return Choice(best, _reasons(rater, best, rated, pins) | {"eval_micro_batch": why_evaluation}, rejected, eval_micro_batch)


def _replaces(rater: Rater, later: RatedCandidate, best: RatedCandidate) -> bool:
    """Returns whether a candidate that is less simple than the best one so far replaces it."""
    if not rater.machine.on_gpu:  # the first candidate that fits is taken, as in a run without a profile
        return False
    if later.candidate.offload != "none" and best.candidate.offload == "none":  # offload's speed is the hardest to predict
        return False
    return later.samples_per_second > min_speedup(best.candidate, later.candidate) * best.samples_per_second


def best_micro_batch(rater: Rater, candidate: Candidate, pins: Mapping[str, Any]) -> RatedCandidate | None:
    """Returns a candidate at its fastest micro-batch that fits; among equally fast ones, the one that needs the least memory.

    On a CPU a process takes its full share at once if that fits, as a run without a profile does.
    """
    fitting = [r for r in (rater.rate(candidate, size) for size in rater.micro_batches(pins)) if r.fits]
    if not rater.machine.on_gpu and fitting and fitting[0].candidate.micro_batch == rater.share:
        return fitting[0]
    fastest = max((r.samples_per_second for r in fitting), default=0.0)
    return min((r for r in fitting if r.samples_per_second >= SAME_SPEED_SHARE * fastest), key=lambda r: r.needed_bytes, default=None)


def _reasons(
    rater: Rater, best: RatedCandidate, rated: list[tuple[Candidate, RatedCandidate | None]], pins: Mapping[str, Any]
) -> dict[str, str]:
    strategy = reasons.why_strategy(rater, best, rated)
    texts = {"strategy": strategy, "micro_batch": reasons.why_micro_batch(rater, best, pins)}
    if best.candidate.zero_stage:
        texts["zero_stage"] = strategy
    if best.candidate.checkpointing:
        without = next((c for c, fitting in rated if fitting is None and not c.checkpointing and c.offload == "none"), None)
        texts["activation_checkpointing"] = strategy if without is None else f"without it {reasons.shortage(rater, without, pins)}"
    else:
        texts["activation_checkpointing"] = f"activations take {format_gib(best.memory['activations'])} and fit"
    texts["offload"] = "state fits the device" if best.candidate.offload == "none" else strategy
    return texts


def _evaluation_micro_batch(rater: Rater, best: RatedCandidate) -> tuple[int, str]:
    """Returns the micro-batch of evaluations and its reason: without gradients more samples fit."""
    micro_batch, lines = best.candidate.micro_batch, rater.profile.evaluated
    if not lines or not rater.machine.on_gpu:
        return micro_batch, "as in training"
    other_bytes = sum(size for name, size in best.memory.items() if name != "activations")
    for factor in EVALUATION_FACTORS:
        needed = other_bytes + max(line.at(factor * micro_batch) for line in lines)
        if needed <= EVALUATION_MEMORY_SHARE * best.usable_bytes:
            return factor * micro_batch, f"{factor} times the micro-batch: without gradients that takes {format_gib(needed)}"
    return micro_batch, "as in training"


def choose_by_state(rater: Rater, pins: Mapping[str, Any], deepspeed: bool) -> tuple[Candidate, dict[str, str], list[dict[str, Any]]]:
    """Returns the first candidate whose state alone fits, its reasons, and the rejected ones, for a task whose passes were not traced."""
    candidates = rater.candidates({k: v for k, v in pins.items() if k != "activation_checkpointing"}, deepspeed)
    usable = rater.machine.usable_bytes
    rejected: list[dict[str, Any]] = []
    for candidate in candidates:
        need, host = sum(state_by_part(rater.profile, candidate).values()), host_memory(rater.profile, candidate)
        if need <= usable and host <= rater.usable_host_bytes:
            lost = f"{rejected[0]['choice']} does not fit ({rejected[0]['why']}); with this " if rejected else ""
            why = f"{lost}its state alone needs {format_need(need, usable)} on each {rater.machine.card.name}"
            return candidate, dict.fromkeys(("strategy", "zero_stage", "offload"), why), rejected
        lack = format_need(need, usable) if need > usable else f"{format_need(host, rater.usable_host_bytes)} of the host's memory"
        rejected.append({"choice": candidate.name(), "why": f"its state alone needs {lack}"})
    raise reasons.fits_nowhere(rater, candidates, pins)
