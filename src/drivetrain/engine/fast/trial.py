"""Runs one micro-batch eager, as a CUDA graph and compiled: compares the results and the times.

The results are thrown away: model, metrics and generators are restored.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

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

MAX_COMPILED_SHARE = 0.97  # compiled code must take less than this share of the time without it
TIGHT_MEMORY_SHARE = 0.4  # of the GPU's memory: above it, graphs run no kernels side by side


@dataclass
class Findings:
    """What was measured, and the reason of each choice: a part of the plan."""

    step_seconds: dict[str, float] = field(default_factory=dict)
    work_seconds: dict[str, float] = field(default_factory=dict)
    """Of forward and backward of one micro-batch."""
    reasons: dict[str, str] = field(default_factory=dict)
    rejected: list[dict[str, str]] = field(default_factory=list)

    def reject(self, choice: str, why: str) -> None:
        key, _, _ = choice.partition("=")
        self.reasons[key] = why
        self.rejected.append({"choice": choice, "why": why})


class ExecutionTrial:
    """Tries one micro-batch with its seed in several ways."""

    def __init__(self, step: Step, plan: Plan, observer: Observer, findings: Findings, seed: int, inputs: Inputs, form: Form) -> None:
        self.step, self.plan, self.observer, self.findings = step, plan, observer, findings
        self.group, self.is_cuda = step.group, step.group.device.type == "cuda"
        self.seed, self.inputs, self.form = seed, inputs, form

    # --- a graph ---

    def capture(self, obstacle: str) -> float | None:
        """Captures forward and backward; returns the seconds of a replay if the graph can be trusted: then steps are captured from now on."""
        why, seconds = obstacle or self._uncapturable(), 0.0
        if not why:
            memory = torch.cuda.max_memory_allocated(self.group.device) / torch.cuda.get_device_properties(self.group.device).total_memory
            graphs = Graphs(self.group.device, self.observer.notice, tight_memory=memory > TIGHT_MEMORY_SHARE)
            try:
                with Sandbox(self.step) as sandbox:
                    seconds, why = self._prove_graph(graphs, sandbox)
            except torch.OutOfMemoryError:
                why = "a graph's memory does not fit beside the model's"
            except Exception as error:
                why = explain_failure(error)
        if why:
            self.findings.reject("capture=on", why)
            return None
        self.findings.work_seconds["captured"] = seconds
        self.step.graphs = graphs
        return seconds

    def _uncapturable(self) -> str:
        if self.plan.activation_checkpointing:
            return "a block that runs again puts the generator back, which a graph cannot"
        kind = uncapturable_kind(self.inputs)
        return f"batches hold a {kind}, which a graph cannot be handed" if kind else ""

    def _prove_graph(self, graphs: Graphs, sandbox: Sandbox) -> tuple[float, str]:
        """Returns (seconds of a replay, why it is not to be trusted): two seeds, each eager and replayed."""
        seeds = self.seed, self.seed ^ 1
        expected = [self._rehearse(seed, sandbox) for seed in (*seeds, self.seed)]
        with watch_host_syncs() as waits:
            self._rehearse(self.seed, sandbox, read=False)
        if waits:
            return 0.0, waits[0]
        captured = graphs.capture(self.step.rehearse, self.inputs, self.form)

        def replay(seed: int) -> list[float]:
            sandbox.restore()
            seed_model(self.group.device, seed)
            captured.graph.replay()
            return self.step.rehearsal_result()

        results = [replay(seed) for seed in seeds]
        spread = relative_difference(expected[0], expected[2])  # between two eager runs, whose kernels may not repeat bit for bit
        for replayed, eager in zip(results, expected, strict=False):
            if relative_difference(replayed, eager) > max(self._tolerance() / 5, 4 * spread):
                return (
                    0.0,
                    f"replayed, the loss and its gradients came out otherwise ({describe_metrics(replayed)}, not {describe_metrics(eager)})",
                )
        return self._median(captured.graph.replay), ""

    # --- compiled code ---

    def compile(self, must: bool) -> bool:
        """Compiles for full batches; returns whether steps run compiled from now on, because that is required or faster."""
        step, findings = self.step, self.findings
        if step.reached is not None:
            step.reached("compile")
        start = time.perf_counter()
        form = self.form._replace(ready=True) if step.objective.has_counts else self.form
        failures: list[str] = []
        for custom_passes in (True, False) if self._may_use_custom_passes() else (False,):
            compiled = Compiled(step.loss_value, step.model, form, self.plan.deterministic, custom_passes)
            if self.group.is_main and not failures:
                self.observer.notice(f"compiling {compiled.description} (plan.compile=off leaves it out)")
            try:
                why = self._prove_compiled(compiled, must)
            except Exception as error:
                why = f"torch.compile failed: {explain_failure(error)}"
            step.compiled = None
            compiled.set_enabled(False)
            gain = self._gain()
            failures.append(
                why or (f"it was {gain:.2f} times as fast as without" if gain is not None and gain * MAX_COMPILED_SHARE <= 1 else "")
            )
            if not failures[-1]:
                break
        step.raise_if_any_rank_is_out_of_memory()
        why = next((w for w in self.group.gather_objects(why) if w), "")
        gain = self.group.broadcast_object(gain) if not why else None
        if gain is not None and gain * MAX_COMPILED_SHARE <= 1:
            why = f"measured {gain:.2f} times as fast as without"
        if why:
            findings.reject("compile=on", why)
            return False
        step.compiled = compiled
        faster = "" if gain is None else f", {gain:.2f} times as fast"
        simply = f"; simply, for otherwise {failures[0]}" if failures[0] else ""
        findings.reasons["compile"] = f"{compiled.description}{faster}; it took {time.perf_counter() - start:.0f} s{simply}"
        return True

    def _prove_compiled(self, compiled: Compiled, must: bool) -> str:
        """Returns why compiled code is not to be trusted, if so; else times it, if there is a choice."""
        step, times = self.step, self.findings.work_seconds
        with Sandbox(step) as sandbox:
            expected, other, again = (self._rehearse(seed, sandbox) for seed in (self.seed, self.seed ^ 1, self.seed))
            is_random = relative_difference(other, expected) > 1e-6 + 10 * relative_difference(
                again, expected
            )  # more than kernels that do not repeat would give
            if not must and "captured" not in times:
                times["eager"] = self._time(sandbox)
            step.compiled = compiled
            result = self._rehearse(self.seed, sandbox)
            if compiled.failure is not None:
                raise compiled.failure
            if relative_difference(result, expected) > (
                1e3 if is_random else self._tolerance()
            ):  # with dropout it draws other masks: finite is enough
                return f"compiled, the loss and its gradients came out otherwise ({describe_metrics(result)}, not {describe_metrics(expected)})"
            if must:
                return ""
            self._rehearse(self.seed, sandbox)
            if step.graphs is not None:
                captured = step.graphs.capture(step.rehearse, self.inputs, self.form)
                times["compiled"] = self._median(captured.graph.replay)
            else:
                times["compiled"] = self._time(sandbox)
        return ""

    def _may_use_custom_passes(self) -> bool:
        """Custom passes help where kernels are small. A deterministic run does without: whether they are used depends on a timer."""
        return self.is_cuda and not self.plan.deterministic and not repeated_blocks(self.step.model)

    def _gain(self) -> float | None:
        """Returns how many times as fast compiled code was, where it was timed."""
        times = self.findings.work_seconds
        plain, fast = times.get("captured") or times.get("eager"), times.get("compiled")
        return plain / fast if plain and fast else None

    # --- running and timing it ---

    def _tolerance(self) -> float:
        """Returns the relative difference that rounding may cause."""
        return 5e-2 if self.plan.precision in ("bf16", "fp16") else 1e-3

    def _rehearse(self, seed: int, sandbox: Sandbox, read: bool = True) -> list[float]:
        """Runs forward and backward without an update; returns the metrics and the norms of the gradients."""
        sandbox.restore()
        seed_model(self.group.device, seed)
        self.step.rehearse(tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, self.inputs), self.form)
        return self.step.rehearsal_result() if read else []

    def _time(self, sandbox: Sandbox) -> float:
        return self._median(lambda: self._rehearse(self.seed, sandbox, read=False))

    def _median(self, work: Callable[[], object], times: int = 5) -> float:
        seconds = []
        for _ in range(times):
            self._sync()
            start = time.perf_counter()
            work()
            self._sync()
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds)

    def _sync(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.group.device)
