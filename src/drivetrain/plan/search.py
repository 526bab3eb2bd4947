"""The way to run that is fastest among those that fit, and why the others lost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from drivetrain.hardware import format_gib, format_need
from drivetrain.outcomes import Outcome, Problem
from drivetrain.plan.fit import Fit
from drivetrain.plan.predict import Candidate, Machine, host_memory, memory, named_gigabytes, smallest, state, step_seconds
from drivetrain.plan.profile import Profile

WORTH, SHARDED_WORTH = 1.05, 1.25  # how much faster a later, more laborious way must be, and one that shards what fits whole
AS_FAST = 0.98  # of the best rate: the difference is below what predictions can tell
HOST_SHARE = 0.8  # of a process's RAM that offloaded state may take
RESIDENT = 0.5  # share of a device's memory that a data set may take there
EVALUATION = (8, 4, 2)  # times the micro-batch that evaluation tries to take at once
EVALUATION_SHARE = 0.8


@dataclass(frozen=True)
class Rated:
    """A candidate with what it needs and takes."""

    candidate: Candidate
    memory: dict[str, int]
    seconds: dict[str, float]
    usable: int
    host: int
    host_usable: int
    global_batch: int
    measured: bool = False

    @property
    def bytes(self) -> int:
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        return self.bytes <= self.usable and self.host <= self.host_usable

    @property
    def step(self) -> float:
        return sum(self.seconds.values())

    @property
    def rate(self) -> float:
        return self.global_batch / self.step

    def lack(self) -> str:
        if self.bytes > self.usable:
            return f"needs {format_need(self.bytes, self.usable)}"
        return f"needs {format_need(self.host, self.host_usable)} of the host's memory"


@dataclass(frozen=True)
class Choice:
    best: Rated
    reasons: dict[str, str]
    rejected: list[dict[str, Any]]
    eval_micro_batch: int
    resident: bool


class Search:
    """Every way to run a task on one machine."""

    def __init__(self, profile: Profile, machine: Machine, global_batch: int, world_size: int, nodes: int, fit: Fit | None = None) -> None:
        self.profile, self.machine, self.fit = profile, machine, fit
        self.global_batch, self.world_size, self.nodes = global_batch, world_size, nodes
        self.share = -(-global_batch // world_size)
        self.host_usable = int(machine.host_bytes * HOST_SHARE)
        whole = profile.parameter_bytes + profile.trained_bytes + profile.optimizer_bytes
        self.resident = bool(profile.data_bytes) and profile.data_bytes <= RESIDENT * max(0, machine.usable_bytes - whole)

    # --- candidates ---

    def ways(self, pin: Mapping[str, Any], deepspeed: bool) -> list[Candidate]:
        """From the plain one to the most laborious: each frees memory that the one before lacks."""
        plain = Candidate("single" if self.world_size == 1 else "ddp", 1, self.share, self.world_size, self.nodes)
        sharded = [replace(plain, strategy="fsdp", zero_stage=stage) for stage in (2, 3)]
        bare = [plain, *(sharded if self.world_size > 1 or pin.get("strategy") == "fsdp" else [])]
        if pin.get("strategy") == "deepspeed":
            bare = [replace(plain, strategy="deepspeed", zero_stage=stage) for stage in ((2, 3, 1) if "zero_stage" in pin else (2, 3))]
        found = [*bare]
        if self.profile.checkpointed is not None:
            found += [replace(way, checkpointing=True) for way in bare]
        again = self.profile.checkpointed is not None
        if not self.machine.on_gpu:  # there is no other memory to move to
            deepspeed = False
        elif pin.get("strategy") != "deepspeed":
            found += [replace(sharded[1], offload="all", checkpointing=c) for c in ([False, True] if again else [False])]
        if deepspeed:
            moved = [("optimizer", 2), ("all", 3)] + ([("optimizer", 3), ("optimizer", 1)] if "zero_stage" in pin else [])
            found += [replace(plain, strategy="deepspeed", zero_stage=s, offload=o, checkpointing=again) for o, s in moved]
        names = {"strategy": "strategy", "zero_stage": "zero_stage", "offload": "offload", "activation_checkpointing": "checkpointing"}
        return [w for w in found if all(getattr(w, names[k]) == v for k, v in pin.items() if k in names)]

    def micro_batches(self, pin: Mapping[str, Any]) -> Iterator[int]:
        """Sizes worth a look: the share cut into 1, 2, 3 ... equal pieces."""
        if "micro_batch" in pin:
            yield min(self.share, pin["micro_batch"])
            return
        seen: set[int] = set()
        pieces = [*range(1, 17), *(a * 2**k for k in range(4, 16) for a in (1, 1.5))]
        for count in (int(p) for p in pieces):
            size = -(-self.share // count)
            if size in seen or (size == 1 < self.share and self.profile.batchnorm):
                continue
            seen.add(size)
            yield size

    def rate(self, way: Candidate, micro_batch: int) -> Rated:
        candidate = replace(way, micro_batch=micro_batch, accumulation=-(-self.share // micro_batch))
        parts = memory(self.profile, candidate, self.machine.on_gpu, self.resident)
        seconds = step_seconds(self.profile, candidate, self.machine)
        measured = self.fit is not None and not candidate.sharded and not candidate.checkpointing
        if self.fit is not None and measured:
            seconds = self._fitted_seconds(self.fit, candidate, seconds)
            one = replace(candidate, world_size=1, accumulation=1, strategy="single")
            ratio = self.fit.peak_bytes(micro_batch, lambda m: self._predicted_bytes(one, m)) / self._predicted_bytes(one, micro_batch)
            if ratio:  # a CPU's memory is not measured
                parts = {name: int(size * ratio) for name, size in parts.items()}
        return Rated(
            candidate, parts, seconds, self.machine.usable_bytes, host_memory(self.profile, candidate),
            self.host_usable, self.global_batch, measured,
        )  # fmt: skip

    def _predicted_bytes(self, way: Candidate, micro_batch: int) -> float:
        at = replace(way, micro_batch=micro_batch)
        return float(sum(memory(self.profile, at, self.machine.on_gpu, self.resident).values()))

    def _fitted_seconds(self, fit: Fit, candidate: Candidate, predicted: dict[str, float]) -> dict[str, float]:
        def one(micro_batch: int) -> float:
            return step_seconds(self.profile, replace(candidate, micro_batch=micro_batch, accumulation=1), self.machine)["work"]

        work = candidate.accumulation * fit.work_seconds(candidate.micro_batch, one)
        return predicted | {"work": work, "update": fit.update_seconds()}

    # --- the choice ---

    def best_of(self, way: Candidate, pin: Mapping[str, Any]) -> Rated | None:
        """The fastest micro-batch of a way that fits; of those about as fast, the one that needs the least memory. On a CPU a process's
        whole share if it fits, as a training there takes it without a look at the task."""
        fitting = [r for r in (self.rate(way, size) for size in self.micro_batches(pin)) if r.fits]
        if not self.machine.on_gpu and fitting and fitting[0].candidate.micro_batch == self.share:
            return fitting[0]
        fastest = max((r.rate for r in fitting), default=0.0)
        return min((r for r in fitting if r.rate >= AS_FAST * fastest), key=lambda r: r.bytes, default=None)

    def choose(self, pin: Mapping[str, Any], deepspeed: bool) -> Choice:
        ways = self.ways(pin, deepspeed)
        best: Rated | None = None
        rated: list[tuple[Candidate, Rated | None]] = []
        for way in ways:
            found = self.best_of(way, pin)
            rated.append((way, found))
            # The host's memory is the last resort: its speed is the least sure to be as predicted. On a CPU the first way that fits
            # is taken, as by a training that does not look at the task.
            last_resort = not self.machine.on_gpu or (best is not None and way.offload != "none" and best.candidate.offload == "none")
            if found is not None and (best is None or (not last_resort and found.rate > _worth(best.candidate, way) * best.rate)):
                best = found
        if best is None:
            raise self._fits_nowhere(ways, pin)
        rejected = [self._lost(way, found, best) for way, found in rated if found is not best]
        reasons = {"strategy": self._why_strategy(best, rated), "micro_batch": self._why_micro_batch(best, pin)}
        if best.candidate.zero_stage:
            reasons["zero_stage"] = reasons["strategy"]
        lost = next((w for w, f in rated if f is None and not w.checkpointing and w.offload == "none"), None)
        if best.candidate.checkpointing:
            reasons["activation_checkpointing"] = reasons["strategy"] if lost is None else f"without it {self._lack(lost, pin)}"
        else:
            reasons["activation_checkpointing"] = f"activations take {format_gib(best.memory['activations'])} and fit"
        reasons["offload"] = "state fits the device" if best.candidate.offload == "none" else reasons["strategy"]
        size, reasons["eval_micro_batch"] = self._evaluation(best)
        return Choice(best, reasons, rejected, size, self.resident)

    def choose_by_state(self, pin: Mapping[str, Any], deepspeed: bool) -> tuple[Candidate, dict[str, str], list[dict[str, Any]]]:
        """The first way on whose devices the model's state alone fits, its reasons and the ways that lost: all that can be known of a
        task whose passes were not traced."""
        ways = self.ways({k: v for k, v in pin.items() if k != "activation_checkpointing"}, deepspeed)
        usable = self.machine.usable_bytes
        rejected: list[dict[str, Any]] = []
        for way in ways:
            need, host = sum(state(self.profile, way).values()), host_memory(self.profile, way)
            if need <= usable and host <= self.host_usable:
                lost = f"{rejected[0]['choice']} does not fit ({rejected[0]['why']}); with this " if rejected else ""
                why = f"{lost}its state alone needs {format_need(need, usable)} on each {self.machine.card.name}"
                return way, dict.fromkeys(("strategy", "zero_stage", "offload"), why), rejected
            lack = format_need(need, usable) if need > usable else f"{format_need(host, self.host_usable)} of the host's memory"
            rejected.append({"choice": way.name(), "why": f"its state alone needs {lack}"})
        raise self._fits_nowhere(ways, pin)

    def _lack(self, way: Candidate, pin: Mapping[str, Any]) -> str:
        size = min(self.micro_batches(pin))
        return f"micro-batch {size} {self.rate(way, size).lack()}"

    def _lost(self, way: Candidate, found: Rated | None, best: Rated) -> dict[str, Any]:
        if found is None:
            return {"choice": way.name(), "why": self._lack(way, {}) if self.profile.plain else ""}
        percent = 100 * (1 - found.rate / best.rate)
        why = f"{percent:.0f} % slower" if percent >= 1 else "as fast, and more laborious"
        if percent <= -1:
            why = (
                f"{-percent:.0f} % faster, less than the {100 * (_worth(best.candidate, way) - 1):.0f} % from which its labour is worth it"
            )
        if not self.machine.on_gpu:
            why = f"not needed: {best.candidate.name()} fits, which on CPUs decides"
        elif way.offload != "none" and best.candidate.offload == "none":
            why = "a last resort, whose rate is the least sure" if percent < 1 else f"not needed, and {why}"
        size = found.candidate.micro_batch
        return {"choice": way.name(), "why": f"{why}: {rate_text(found.rate)}, {format_gib(found.bytes)} at micro-batch {size}"}

    def _why_strategy(self, best: Rated, rated: list[tuple[Candidate, Rated | None]]) -> str:
        room = f"needs {format_need(best.bytes, best.usable)} on each {self.machine.card.name}"
        first, found = rated[0]
        if best is found:
            return room if self.world_size > 1 else f"one process; {room}"
        if found is None:
            return f"{first.name()} does not fit ({self._lack(first, {})}); this {room}"
        return f"{100 * (best.rate / found.rate - 1):.0f} % faster than {first.name()} ({rate_text(found.rate)}); {room}"

    def _why_micro_batch(self, best: Rated, pin: Mapping[str, Any]) -> str:
        sizes = sorted(self.micro_batches(pin))
        at = sizes.index(best.candidate.micro_batch)
        how = "measured and fitted" if best.measured else "predicted"
        words = [f"{how}: {best.step * 1e3:,.1f} ms a step, {rate_text(best.rate)}"]
        for place in (at + 1, at - 1):
            if 0 <= place < len(sizes):
                other = self.rate(best.candidate, sizes[place])
                words.append(f"{sizes[place]} {other.lack() if not other.fits else f'gives {rate_text(other.rate)}'}")
        if at == len(sizes) - 1:
            words.append("it is all of a process's share")
        return "; ".join(words)

    def _evaluation(self, best: Rated) -> tuple[int, str]:
        micro, lines = best.candidate.micro_batch, self.profile.evaluated
        if not lines or not self.machine.on_gpu:
            return micro, "as in training"
        held = sum(size for name, size in best.memory.items() if name != "activations")
        for times in EVALUATION:
            needed = held + max(line.at(times * micro) for line in lines)
            if needed <= EVALUATION_SHARE * best.usable:
                return times * micro, f"{times} times the micro-batch: without gradients that takes {format_gib(needed)}"
        return micro, "as in training"

    def _fits_nowhere(self, ways: list[Candidate], pin: Mapping[str, Any]) -> Problem:
        """The smallest memory that would do, and three ways to get there."""
        if not ways:
            asked = ", ".join(f"plan.{k}={v}" for k, v in pin.items())
            return Problem(f"no way to run goes with {asked} on {self.world_size} process{'es' if self.world_size > 1 else ''}")
        on_gpu, traced = self.machine.on_gpu, self.profile.plain is not None
        pinned = pin.get("micro_batch") if traced else None

        def bytes_of(way: Candidate) -> int:
            return self._least_bytes(way) if pinned is None else self.rate(way, pinned).bytes

        least = min(ways, key=bytes_of)
        need = bytes_of(least)
        on_device = self.rate(least, min(self.micro_batches(pin))).bytes if traced else need
        where = f"each {self.machine.card.name} has {format_gib(self.machine.usable_bytes)} to use"
        larger = min((w for w in ways if w.offload == "none"), key=bytes_of, default=least)
        ways_out = [f"a GPU with {named_gigabytes(bytes_of(larger)):,} GB or more" if on_gpu else f"{format_gib(need)} of RAM"]
        if on_device <= self.machine.usable_bytes:
            need, where = host_memory(self.profile, least), f"{format_gib(self.host_usable)} of the host's memory can be used"
            ways_out.insert(0, f"{format_gib(need / HOST_SHARE)} of RAM for each process")
        freer = min(self.ways({}, deepspeed=False), key=self._least_bytes)
        more = self._more_processes(freer)
        ways_out += [f"{more} GPUs with plan.strategy=fsdp"] if more else []
        ways_out += [f"leave out plan.micro_batch={pinned}"] if pinned is not None else []
        if self._least_bytes(freer) < self._least_bytes(least):
            ways_out.append(f"leave out the pinned choices: {freer.name()} needs {format_gib(self._least_bytes(freer))}")
        if self.profile.precision == "fp32" and traced:
            ways_out.append("precision=bf16, which halves activations")
        ways_out += ["shorter or smaller samples"] if traced else []
        ways_out += ["a smaller model"]
        numbered = "; ".join(f"({i}) {text}" for i, text in enumerate(ways_out[:3], 1))
        what = (
            f"{least.name()} at micro-batch {pinned or (2 if self.profile.batchnorm else 1)}"
            if traced
            else f"the state alone of {least.name()}"
        )
        return Problem(f"the model fits nowhere: {what} needs {format_gib(need)}, {where}.\nWays out: {numbered}", Outcome.USAGE)

    def _least_bytes(self, way: Candidate) -> int:
        """Bytes that a way needs on each device with one sample at a time; of its state alone, where no pass was traced."""
        traced = self.profile.plain is not None
        return smallest(self.profile, way, self.machine.on_gpu) if traced else sum(state(self.profile, way).values())

    def _more_processes(self, way: Candidate) -> int | None:
        """The number of processes over which sharded state would fit."""
        for count in (2, 4, 8, 16, 32, 64, 128):
            if count > self.world_size:
                shared = replace(way, strategy="fsdp", zero_stage=3, offload="none", world_size=count)
                if self._least_bytes(shared) <= self.machine.usable_bytes:
                    return count
        return None


def _worth(best: Candidate, way: Candidate) -> float:
    return SHARDED_WORTH if way.sharded and not best.sharded else WORTH


def rate_text(rate: float) -> str:
    return f"{rate:,.0f} samples/s" if rate >= 100 else f"{rate:.3g} samples/s"
