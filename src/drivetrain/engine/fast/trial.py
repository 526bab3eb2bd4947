"""One micro-batch taken in several ways: called plainly, replayed as a CUDA graph, compiled. Do they give the same, and how soon?

What is tried is thrown away: the model, the figures and the generators are then as they were.
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

BETTER = 0.97  # compiled code must take less than this share of the time
TIGHT = 0.4  # share of the GPU's memory from which on nothing runs beside the graphs


@dataclass
class Findings:
    """What was measured and why the choice fell as it did: a part of the plan."""

    step_seconds: dict[str, float] = field(default_factory=dict)
    work_seconds: dict[str, float] = field(default_factory=dict)
    """Forward and backward of one micro-batch."""
    reasons: dict[str, str] = field(default_factory=dict)
    rejected: list[dict[str, str]] = field(default_factory=list)

    def reject(self, choice: str, why: str) -> None:
        key, _, _ = choice.partition("=")
        self.reasons[key] = why
        self.rejected.append({"choice": choice, "why": why})


class Trial:
    def __init__(self, step: Step, plan: Plan, observer: Observer, found: Findings, seed: int, inputs: Inputs, form: Form) -> None:
        self.step, self.plan, self.observer, self.found = step, plan, observer, found
        self.group, self.cuda = step.group, step.group.device.type == "cuda"
        self.seed, self.inputs, self.form = seed, inputs, form

    # --- a graph ---

    def capture(self, obstacle: str) -> float | None:
        """Seconds of a graph of forward and backward, if it can be trusted: then steps are captured from now on."""
        why, seconds = obstacle or self._uncapturable(), 0.0
        if not why:
            memory = torch.cuda.max_memory_allocated(self.group.device) / torch.cuda.get_device_properties(self.group.device).total_memory
            graphs = Graphs(self.group.device, self.observer.notice, tight_memory=memory > TIGHT)
            try:
                with Sandbox(self.step) as sandbox:
                    seconds, why = self._prove_graph(graphs, sandbox)
            except torch.OutOfMemoryError:
                why = "a graph's memory does not fit beside the model's"
            except Exception as error:
                why = explain_failure(error)
        if why:
            self.found.reject("capture=on", why)
            return None
        self.found.work_seconds["captured"] = seconds
        self.step.graphs = graphs
        return seconds

    def _uncapturable(self) -> str:
        if self.plan.activation_checkpointing:
            return "a block that runs again puts the generator back, which a graph cannot"
        kind = uncapturable_kind(self.inputs)
        return f"batches hold a {kind}, which a graph cannot be handed" if kind else ""

    def _prove_graph(self, graphs: Graphs, sandbox: Sandbox) -> tuple[float, str]:
        """(seconds of a replay, why it is not to be trusted): two seeds, each eager and replayed."""
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
            return self.step.rehearsed()

        got = [replay(seed) for seed in seeds]
        spread = relative_difference(expected[0], expected[2])  # of kernels that do not repeat
        for mine, eager in zip(got, expected, strict=False):
            if relative_difference(mine, eager) > max(self._tolerance() / 5, 4 * spread):
                return (
                    0.0,
                    f"replayed, the loss and its gradients came out otherwise ({describe_metrics(mine)}, not {describe_metrics(eager)})",
                )
        return self._median(captured.graph.replay), ""

    # --- compiled code ---

    def compile(self, must: bool) -> bool:
        """Compile for full batches; whether steps run compiled from now on, since that is asked for or faster."""
        step, found = self.step, self.found
        if step.moment is not None:
            step.moment("compile")
        begun = time.perf_counter()
        shape = self.form._replace(ready=True) if step.has_counts else self.form
        tries: list[str] = []
        for custom_passes in (True, False) if self._may_use_custom_passes() else (False,):
            compiled = Compiled(step.loss_value, step.model, shape, self.plan.deterministic, custom_passes)
            if self.group.is_main and not tries:
                self.observer.notice(f"compiling {compiled.description} (plan.compile=off leaves it out)")
            try:
                why = self._prove_compiled(compiled, must)
            except Exception as error:
                why = f"torch.compile failed: {explain_failure(error)}"
            step.compiled = None
            compiled.set_enabled(False)
            gain = self._gain()
            tries.append(why or (f"it was {gain:.2f} times as fast as without" if gain is not None and gain * BETTER <= 1 else ""))
            if not tries[-1]:
                break
        step.agree()
        why = next((w for w in self.group.gather_objects(why) if w), "")
        gain = self.group.broadcast_object(gain) if not why else None
        if gain is not None and gain * BETTER <= 1:
            why = f"measured {gain:.2f} times as fast as without"
        if why:
            found.reject("compile=on", why)
            return False
        step.compiled = compiled
        faster = "" if gain is None else f", {gain:.2f} times as fast"
        simply = f"; simply, for otherwise {tries[0]}" if tries[0] else ""
        found.reasons["compile"] = f"{compiled.description}{faster}; it took {time.perf_counter() - begun:.0f} s{simply}"
        return True

    def _prove_compiled(self, compiled: Compiled, must: bool) -> str:
        """Why compiled code is not to be trusted, if so; else it is timed, if there is a choice."""
        step, times = self.step, self.found.work_seconds
        with Sandbox(step) as sandbox:
            expected, other, again = (self._rehearse(seed, sandbox) for seed in (self.seed, self.seed ^ 1, self.seed))
            draws = relative_difference(other, expected) > 1e-6 + 10 * relative_difference(
                again, expected
            )  # more than kernels that do not repeat would do
            if not must and "captured" not in times:
                times["eager"] = self._time(sandbox)
            step.compiled = compiled
            got = self._rehearse(self.seed, sandbox)
            if compiled.failure is not None:
                raise compiled.failure
            if relative_difference(got, expected) > (
                1e3 if draws else self._tolerance()
            ):  # with dropout it draws other masks; numbers they are
                return (
                    f"compiled, the loss and its gradients came out otherwise ({describe_metrics(got)}, not {describe_metrics(expected)})"
                )
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
        """It gains where kernels are small. Where runs must repeat, no second try may depend on a clock."""
        return self.cuda and not self.plan.deterministic and not repeated_blocks(self.step.model)

    def _gain(self) -> float | None:
        """How many times as fast compiled code was, where it was timed."""
        times = self.found.work_seconds
        plain, fast = times.get("captured") or times.get("eager"), times.get("compiled")
        return plain / fast if plain and fast else None

    # --- taking and timing it ---

    def _tolerance(self) -> float:
        """How far the same mathematics may come out apart."""
        return 5e-2 if self.plan.precision in ("bf16", "fp16") else 1e-3

    def _rehearse(self, seed: int, sandbox: Sandbox, read: bool = True) -> list[float]:
        """Forward and backward without an update: the figures and the gradients' norms."""
        sandbox.restore()
        seed_model(self.group.device, seed)
        self.step.rehearse(tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, self.inputs), self.form)
        return self.step.rehearsed() if read else []

    def _time(self, sandbox: Sandbox) -> float:
        return self._median(lambda: self._rehearse(self.seed, sandbox, read=False))

    def _median(self, work: Callable[[], object], times: int = 5) -> float:
        seconds = []
        for _ in range(times):
            self._sync()
            begun = time.perf_counter()
            work()
            self._sync()
            seconds.append(time.perf_counter() - begun)
        return statistics.median(seconds)

    def _sync(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.group.device)
