"""The texts of a search's reasons: why a candidate and its micro-batch won, why the others lost, what to do if nothing fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from drivetrain.hardware import format_gib, format_need
from drivetrain.outcomes import Outcome, Problem
from drivetrain.plan.candidates import Candidate, min_speedup
from drivetrain.plan.capacity import gigabytes_to_buy
from drivetrain.plan.predict_memory import host_memory
from drivetrain.plan.rating import HOST_SHARE, RatedCandidate, Rater, format_rate


def why_strategy(rater: Rater, best: RatedCandidate, rated: Sequence[tuple[Candidate, RatedCandidate | None]]) -> str:
    need = f"needs {format_need(best.needed_bytes, best.usable_bytes)} on each {rater.machine.card.name}"
    simplest, rated_simplest = rated[0]
    if best is rated_simplest:
        return need if rater.world_size > 1 else f"one process; {need}"
    if rated_simplest is None:
        return f"{simplest.name()} does not fit ({shortage(rater, simplest, {})}); this {need}"
    percent = 100 * (best.samples_per_second / rated_simplest.samples_per_second - 1)
    return f"{percent:.0f} % faster than {simplest.name()} ({format_rate(rated_simplest.samples_per_second)}); {need}"


def why_micro_batch(rater: Rater, best: RatedCandidate, pins: Mapping[str, Any]) -> str:
    sizes = sorted(rater.micro_batches(pins))
    index = sizes.index(best.candidate.micro_batch)
    source = "measured and fitted" if best.is_measured else "predicted"
    parts = [f"{source}: {best.step_seconds * 1e3:,.1f} ms a step, {format_rate(best.samples_per_second)}"]
    for neighbour in (index + 1, index - 1):
        if 0 <= neighbour < len(sizes):
            other = rater.rate(best.candidate, sizes[neighbour])
            parts.append(f"{sizes[neighbour]} {f'gives {format_rate(other.samples_per_second)}' if other.fits else other.shortage()}")
    if index == len(sizes) - 1:
        parts.append("it is all of a process's share")
    return "; ".join(parts)


def why_lost(rater: Rater, candidate: Candidate, rated: RatedCandidate | None, best: RatedCandidate) -> dict[str, Any]:
    """Returns an entry of the plan's `rejected`. `rated`: the candidate at its best micro-batch; None if none fits."""
    if rated is None:
        return {"choice": candidate.name(), "why": shortage(rater, candidate, {}) if rater.profile.plain else ""}
    percent = 100 * (1 - rated.samples_per_second / best.samples_per_second)
    why = f"{percent:.0f} % slower" if percent >= 1 else "as fast, but less simple"
    if percent <= -1:
        threshold = 100 * (min_speedup(best.candidate, candidate) - 1)
        why = f"{-percent:.0f} % faster, but a less simple plan must be {threshold:.0f} % faster"
    if not rater.machine.on_gpu:
        why = f"not needed: {best.candidate.name()} fits, and on CPUs the first plan that fits is taken"
    elif candidate.offload != "none" and best.candidate.offload == "none":
        why = "a last resort: its speed is hard to predict" if percent < 1 else f"not needed, and {why}"
    facts = f"{format_rate(rated.samples_per_second)}, {format_gib(rated.needed_bytes)} at micro-batch {rated.candidate.micro_batch}"
    return {"choice": candidate.name(), "why": f"{why}: {facts}"}


def shortage(rater: Rater, candidate: Candidate, pins: Mapping[str, Any]) -> str:
    """Returns the memory that a candidate needs and does not have with the smallest micro-batch, as text."""
    size = min(rater.micro_batches(pins))
    return f"micro-batch {size} {rater.rate(candidate, size).shortage()}"


# --- nothing fits -------------------------------------------------------------------------------


def fits_nowhere(rater: Rater, candidates: Sequence[Candidate], pins: Mapping[str, Any]) -> Problem:
    """Returns the error that names the smallest sufficient memory, and three ways out."""
    if not candidates:
        pinned = ", ".join(f"plan.{k}={v}" for k, v in pins.items())
        return Problem(f"no way to run goes with {pinned} on {rater.world_size} process{'es' if rater.world_size > 1 else ''}")
    is_traced = rater.profile.plain is not None
    pinned_size = pins.get("micro_batch") if is_traced else None

    def bytes_of(candidate: Candidate) -> int:
        return rater.least_bytes(candidate) if pinned_size is None else rater.rate(candidate, pinned_size).needed_bytes

    least = min(candidates, key=bytes_of)
    need = bytes_of(least)
    device_need = rater.rate(least, min(rater.micro_batches(pins))).needed_bytes if is_traced else need
    limit = f"each {rater.machine.card.name} has {format_gib(rater.machine.usable_bytes)} to use"
    on_device = min((c for c in candidates if c.offload == "none"), key=bytes_of, default=least)
    larger_gpu = f"a GPU with {gigabytes_to_buy(bytes_of(on_device)):,} GB or more"
    ways_out = [larger_gpu if rater.machine.on_gpu else f"{format_gib(need)} of RAM"]
    if device_need <= rater.machine.usable_bytes:  # only the host's memory is too small
        need, limit = host_memory(rater.profile, least), f"{format_gib(rater.usable_host_bytes)} of the host's memory can be used"
        ways_out.insert(0, f"{format_gib(need / HOST_SHARE)} of RAM for each process")
    ways_out += _further_ways_out(rater, least, pinned_size)
    numbered = "; ".join(f"({i}) {text}" for i, text in enumerate(ways_out[:3], 1))
    size = pinned_size or (2 if rater.profile.batchnorm else 1)
    subject = f"{least.name()} at micro-batch {size}" if is_traced else f"the state alone of {least.name()}"
    return Problem(f"the model fits nowhere: {subject} needs {format_gib(need)}, {limit}.\nWays out: {numbered}", Outcome.USAGE)


def _further_ways_out(rater: Rater, least: Candidate, pinned_size: int | None) -> list[str]:
    is_traced = rater.profile.plain is not None
    unpinned = min(rater.candidates({}, deepspeed=False), key=rater.least_bytes)
    num_processes = _processes_that_fit(rater, unpinned)
    ways_out = [f"{num_processes} GPUs with plan.strategy=fsdp"] if num_processes else []
    ways_out += [f"leave out plan.micro_batch={pinned_size}"] if pinned_size is not None else []
    if rater.least_bytes(unpinned) < rater.least_bytes(least):
        ways_out.append(f"leave out the pinned choices: {unpinned.name()} needs {format_gib(rater.least_bytes(unpinned))}")
    if rater.profile.precision == "fp32" and is_traced:
        ways_out.append("precision=bf16, which halves activations")
    ways_out += ["shorter or smaller samples"] if is_traced else []
    return [*ways_out, "a smaller model"]


def _processes_that_fit(rater: Rater, candidate: Candidate) -> int | None:
    """Returns the number of processes over which sharded state would fit."""
    for world_size in (2, 4, 8, 16, 32, 64, 128):
        if world_size > rater.world_size:
            sharded = replace(candidate, strategy="fsdp", zero_stage=3, offload="none", world_size=world_size)
            if rater.least_bytes(sharded) <= rater.machine.usable_bytes:
                return world_size
    return None
