"""Runs one micro-batch eager, as a CUDA graph and compiled, and compares results and times.

The results are then thrown away: model, metrics and generators are restored.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from drivetrain.engine.data.keyed_random import seed_model
from drivetrain.engine.fast.blocks import repeated_blocks
from drivetrain.engine.fast.compiled import Compiled
from drivetrain.engine.fast.graphs import Graphs, explain_failure, uncapturable_kind, watch_host_syncs
from drivetrain.engine.fast.rehearsal import Sandbox, describe_metrics, relative_difference
from drivetrain.engine.log.observe import Observer
from drivetrain.engine.step import Form, Inputs, Step
from drivetrain.plan import Plan

MAX_COMPILED_SHARE = 0.97  # of the time without compiling: compiled code must take less
TIGHT_MEMORY_SHARE = 0.4  # of the GPU's memory: above it, the graphs use `tight_memory`
NUM_TIMED_RUNS = 5  # of a micro-batch; their median counts
ANY_FINITE_RESULT = 1e3  # a tolerance that every result passes, unless one is finite and the other is not


@dataclass
class TrialResults:
    """What was measured, and the reason of each choice; both become a part of the plan."""

    step_seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of a step, by how steps ran: "eager", "captured", "compiled and captured"."""
    work_seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of forward and backward of one micro-batch, by how they ran."""
    reasons: dict[str, str] = field(default_factory=dict)
    rejected: list[dict[str, str]] = field(default_factory=list)

    def reject(self, choice: str, why: str) -> None:
        """Records why a choice, such as "compile=on", was not made."""
        key, _, _ = choice.partition("=")
        self.reasons[key] = why
        self.rejected.append({"choice": choice, "why": why})


class _GraphCheck(NamedTuple):
    seconds: float
    """Of a replay."""
    problem: str
    """Why the graph must not be used; empty if it may."""


class ExecutionTrial:
    """Tries one micro-batch, with its seed, in several ways."""

    def __init__(self, step: Step, plan: Plan, observer: Observer, results: TrialResults, seed: int, inputs: Inputs, form: Form) -> None:
        self.step, self.plan, self.observer, self.results = step, plan, observer, results
        self.group, self.is_cuda = step.group, step.group.device.type == "cuda"
        self.seed, self.inputs, self.form = seed, inputs, form

    # --- a micro-batch as a CUDA graph ---

    def capture(self, obstacle: str) -> float | None:
        """Captures forward and backward. If the graph is correct, steps are captured from now on, and the seconds of a replay are returned."""
        problem, seconds = obstacle or self._uncapturable_reason(), 0.0
        if not problem:
            total_memory = torch.cuda.get_device_properties(self.group.device).total_memory
            used_share = torch.cuda.max_memory_allocated(self.group.device) / total_memory
            graphs = Graphs(self.group.device, self.observer.notice, tight_memory=used_share > TIGHT_MEMORY_SHARE)
            try:
                with Sandbox(self.step) as sandbox:
                    seconds, problem = self._check_graph(graphs, sandbox)
            except torch.OutOfMemoryError:
                problem = "a graph's memory does not fit beside the model's"
            except Exception as error:
                problem = explain_failure(error)
        if problem:
            self.results.reject("capture=on", problem)
            return None
        self.results.work_seconds["captured"] = seconds
        self.step.graphs = graphs
        return seconds

    def _uncapturable_reason(self) -> str:
        if self.plan.activation_checkpointing:
            return "activation checkpointing resets the random generator, which a graph cannot do"
        kind = uncapturable_kind(self.inputs)
        return f"batches hold a {kind}, which cannot be a graph's input" if kind else ""

    def _check_graph(self, graphs: Graphs, sandbox: Sandbox) -> _GraphCheck:
        """Compares eager runs and replays for two seeds, and times a replay."""
        seeds = self.seed, self.seed ^ 1
        expected = [self._rehearse(seed, sandbox) for seed in seeds]
        repeated = self._rehearse(self.seed, sandbox)
        with watch_host_syncs() as waits:
            self._rehearse(self.seed, sandbox, read=False)
        if waits:
            return _GraphCheck(0.0, waits[0])
        captured = graphs.capture(self.step.rehearse, self.inputs, self.form)

        def replay(seed: int) -> list[float]:
            sandbox.restore()
            seed_model(self.group.device, seed)
            captured.graph.replay()
            return self.step.rehearsal_result()

        replays = [replay(seed) for seed in seeds]
        noise = relative_difference(expected[0], repeated)  # between equal eager runs: some kernels do not repeat bit for bit
        for replayed, eager in zip(replays, expected, strict=True):
            if relative_difference(replayed, eager) > max(self._tolerance() / 5, 4 * noise):
                values = f"{describe_metrics(replayed)}, not {describe_metrics(eager)}"
                return _GraphCheck(0.0, f"replayed, the loss or its gradients differ ({values})")
        return _GraphCheck(self._median_seconds(captured.graph.replay), "")

    # --- compiled code ---

    def compile(self, is_required: bool) -> bool:
        """Compiles for full batches; returns whether steps run compiled from now on, because that is required or faster."""
        step, results = self.step, self.results
        if step.reached is not None:
            step.reached("compile")
        start = time.perf_counter()
        form = self.form._replace(is_assembled=True) if step.objective.has_counts else self.form
        failures: list[str] = []  # of each attempt; empty text for a success
        for custom_passes in (True, False) if self._may_use_custom_passes() else (False,):
            compiled = Compiled(step.loss_value, step.model, form, self.plan.deterministic, custom_passes)
            if self.group.is_main and not failures:
                self.observer.notice(f"compiling {compiled.description} (plan.compile=off leaves it out)")
            try:
                problem = self._check_compiled(compiled, is_required)
            except Exception as error:
                problem = f"torch.compile failed: {explain_failure(error)}"
            step.compiled = None
            compiled.set_enabled(False)
            speedup = self._speedup()
            slowness = f"it was {speedup:.2f} times as fast as without" if speedup is not None and _is_too_slow(speedup) else ""
            failures.append(problem or slowness)
            if not failures[-1]:
                break
        step.raise_if_any_rank_is_out_of_memory()
        problem = next((p for p in self.group.gather_objects(problem) if p), "")
        speedup = self.group.broadcast_object(speedup) if not problem else None
        if speedup is not None and _is_too_slow(speedup):
            problem = f"measured {speedup:.2f} times as fast as without"
        if problem:
            results.reject("compile=on", problem)
            return False
        step.compiled = compiled
        speed = "" if speedup is None else f", {speedup:.2f} times as fast"
        first_failure = f"; without custom passes, because with them {failures[0]}" if failures[0] else ""
        results.reasons["compile"] = f"{compiled.description}{speed}; it took {time.perf_counter() - start:.0f} s{first_failure}"
        return True

    def _check_compiled(self, compiled: Compiled, is_required: bool) -> str:
        """Returns why compiled code must not be used, else an empty string; times it unless it is required."""
        step, times = self.step, self.results.work_seconds
        with Sandbox(step) as sandbox:
            expected, other_seed, repeated = (self._rehearse(seed, sandbox) for seed in (self.seed, self.seed ^ 1, self.seed))
            noise = relative_difference(repeated, expected)  # of kernels that do not repeat bit for bit
            is_random = relative_difference(other_seed, expected) > 1e-6 + 10 * noise
            if not is_required and "captured" not in times:
                times["eager"] = self._rehearsal_seconds(sandbox)
            step.compiled = compiled
            result = self._rehearse(self.seed, sandbox)
            if compiled.failure is not None:
                raise compiled.failure
            # Compiled dropout draws other masks, so random results cannot be compared.
            tolerance = ANY_FINITE_RESULT if is_random else self._tolerance()
            if relative_difference(result, expected) > tolerance:
                return f"compiled, the loss or its gradients differ ({describe_metrics(result)}, not {describe_metrics(expected)})"
            if is_required:
                return ""
            self._rehearse(self.seed, sandbox)
            if step.graphs is not None:
                captured = step.graphs.capture(step.rehearse, self.inputs, self.form)
                times["compiled"] = self._median_seconds(captured.graph.replay)
            else:
                times["compiled"] = self._rehearsal_seconds(sandbox)
        return ""

    def _may_use_custom_passes(self) -> bool:
        """Custom passes help where kernels are small. A deterministic run never uses them, because the choice depends on a timer."""
        return self.is_cuda and not self.plan.deterministic and not repeated_blocks(self.step.model)

    def _speedup(self) -> float | None:
        """Returns how many times as fast compiled code was; None where it was not timed."""
        times = self.results.work_seconds
        uncompiled, compiled = times.get("captured") or times.get("eager"), times.get("compiled")
        return uncompiled / compiled if uncompiled and compiled else None

    # --- running and timing a micro-batch ---

    def _tolerance(self) -> float:
        """Returns the relative difference that rounding may cause."""
        return 5e-2 if self.plan.precision in ("bf16", "fp16") else 1e-3

    def _rehearse(self, seed: int, sandbox: Sandbox, read: bool = True) -> list[float]:
        """Runs forward and backward without an update; returns the metrics and the norms of the gradients."""
        sandbox.restore()
        seed_model(self.group.device, seed)
        self.step.rehearse(tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, self.inputs), self.form)
        return self.step.rehearsal_result() if read else []

    def _rehearsal_seconds(self, sandbox: Sandbox) -> float:
        return self._median_seconds(lambda: self._rehearse(self.seed, sandbox, read=False))

    def _median_seconds(self, work: Callable[[], object]) -> float:
        seconds = []
        for _ in range(NUM_TIMED_RUNS):
            self._sync()
            start = time.perf_counter()
            work()
            self._sync()
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds)

    def _sync(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.group.device)


def _is_too_slow(speedup: float) -> bool:
    return speedup * MAX_COMPILED_SHARE <= 1
