"""How steps run, chosen by measuring the first ones: called plainly, replayed as a CUDA graph, compiled.

The steps that are measured are steps of the training; only what is tried out besides is thrown away. A graph
replays the same kernels, so it may begin at any step. Compiled code rounds otherwise: from which step on it
runs is kept with the plan and in every checkpoint, so that a resumed run does the same.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from drivetrain.engine.capture import Graphs, blame, changed, marks, no_waiting, opaque
from drivetrain.engine.compiled import Compiled
from drivetrain.engine.group import Group
from drivetrain.engine.loader import LoaderFeed
from drivetrain.engine.observe import Observer
from drivetrain.engine.rand import seed_model
from drivetrain.engine.step import Form, Inputs, Step
from drivetrain.plan import Plan

UNTIMED, TIMED, REPLAYED = 3, 5, 20  # steps before the clock, under it, and under it once the choice is made
PAYS = 150.0  # seconds that a run must still take for compiling to be tried: it costs tens of them
BETTER = 0.97  # compiled code must take less than this share of the time


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


class Pace:
    """Attached to a step until the choice is made."""

    def __init__(self, step: Step, plan: Plan, group: Group, total: int, observer: Observer, compiled_from: int | None) -> None:
        self.step, self.plan, self.group, self.total, self.observer = step, plan, group, total, observer
        self.cuda = group.device.type == "cuda"
        self.compiled_from = compiled_from
        """The step from which on compiled code runs; None if it does not."""
        self.found = Findings()
        self._last, self._count, self._clock = -1, 0, 0.0
        self._marks: dict[str, object] = {}
        self._impure = ""
        self._chosen_at = 0
        self._compiling = False

    def __call__(self, seed: int, inputs: Inputs, form: Form) -> None:
        """At the beginning of every micro-batch; acts on the first of a step."""
        if self.step.number == self._last:
            return
        self._last = self.step.number
        self._count += 1
        if self.compiled_from is not None and self.step.compiled is None and self._last >= self.compiled_from:
            self._compile(seed, inputs, form, must=True)
        if not self.cuda and self.plan.compile != "auto":
            self._conclude()
            return
        if self._count == UNTIMED - 1:
            self._marks = marks(self.step.task, self.step.model)
        elif self._count == UNTIMED:
            self._impure = changed(self._marks, marks(self.step.task, self.step.model))
            self._marks = {}
        elif self._count == UNTIMED + 1:
            self._start_clock()
        elif self._count == UNTIMED + 1 + TIMED:
            self.found.step_seconds[self._kind()] = self._read_clock(TIMED)
            self._choose(seed, inputs, form)
            self._chosen_at = self._count
            if not self.cuda:
                self._conclude()
        elif self._chosen_at and self._count == self._chosen_at + UNTIMED:
            self._start_clock()
        elif self._chosen_at and self._count == self._chosen_at + UNTIMED + REPLAYED:
            self.found.step_seconds[self._kind()] = self._read_clock(REPLAYED)
            self._conclude()

    # --- the choice ---

    def _choose(self, seed: int, inputs: Inputs, form: Form) -> None:
        plain = self._capture(seed, inputs, form) if self.cuda else None
        if self.compiled_from is None and self._compile_is_worth_it(plain):
            self._compile(seed, inputs, form, must=False)
        if isinstance(self.step.feed, LoaderFeed):
            self._choose_workers(self.step.feed, form)

    def _capture(self, seed: int, inputs: Inputs, form: Form) -> float | None:
        """Try a graph of forward and backward against the plain call; on success steps are captured from now on."""
        why = "pinned" if self.plan.capture == "off" else self._why_not()
        if not why and (kind := opaque(inputs)):
            why = f"batches hold a {kind}, which a graph cannot be handed"
        if why:
            self.found.reject("capture=on", why)
            return None
        graphs = Graphs(self.group.device, self.observer.notice)
        try:
            with _Aside(self.step):
                expected = self._rehearse(seed, inputs, form)
                with no_waiting():
                    self._rehearse(seed, inputs, form, read=False)
                seconds, got = self._replay(graphs, seed, inputs, form)
        except torch.OutOfMemoryError:
            self.found.reject("capture=on", "a graph's memory does not fit beside the model's")
            return None
        except Exception as error:
            self.found.reject("capture=on", blame(error))
            return None
        if not _close(got, expected, self.plan.precision):
            self.found.reject("capture=on", f"replayed, the loss and its gradient came out as {_pair(got)}, not {_pair(expected)}")
            return None
        self.found.work_seconds["captured"] = seconds
        self.step.graphs = graphs
        return seconds

    def _why_not(self) -> str:
        """What neither a graph nor a compiler could follow, if there is such a thing."""
        if self.step.host_random.used:
            return "the loss draws from Python's or numpy's generators (use torch's)"
        if any(isinstance(m, nn.SyncBatchNorm) for m in self.step.model.modules()):
            return "SyncBatchNorm talks to the other processes in the forward pass"
        return f"{self._impure} changes from step to step" if self._impure else ""

    def _compile_is_worth_it(self, captured: float | None) -> bool:
        if self.plan.compile != "auto":
            if self.plan.compile == "off":
                self.found.reasons["compile"] = "pinned"
            return False
        if why := self._why_not():
            self.found.reject("compile=on", f"not tried: {why}")
            return False
        step = self.found.step_seconds["eager"] if captured is None else captured * self.plan.accumulation
        left = float(self.group.share(step * (self.total - self._last)))
        if left < PAYS:
            self.found.reject("compile=on", f"not tried: the run takes only {max(1.0, left):,.0f} s more")
            return False
        return True

    def _compile(self, seed: int, inputs: Inputs, form: Form, must: bool) -> None:
        """Compile, and go on compiled where that is asked for or faster."""
        step, found = self.step, self.found
        step_form = form._replace(ready=True) if step.has_counts else form
        compiled = Compiled(step.loss_value, step.model, step_form, self.plan.deterministic)
        self._compiling = True
        if self.group.main:
            self.observer.notice(f"compiling {compiled.kind} (plan.compile=off leaves it out)")
        why, plain, fast = "", 0.0, 0.0
        begun = time.perf_counter()
        with _Aside(step):
            expected = self._rehearse(seed, inputs, form)
            draws = self._draws_randomness(seed, inputs, form)
            if not must:
                if "captured" not in found.work_seconds:
                    found.work_seconds["eager"] = self._time(seed, inputs, form)
                plain = found.work_seconds.get("captured") or found.work_seconds["eager"]
            step.compiled = compiled
            try:
                got = self._rehearse(seed, inputs, form)
                if not draws and not _close(got, expected, self.plan.precision):
                    why = f"compiled, the loss and its gradient came out as {_pair(got)}, not {_pair(expected)}"
                elif not must:
                    self._rehearse(seed, inputs, form)
                    fast = self._replay(step.graphs, seed, inputs, form)[0] if step.graphs else self._time(seed, inputs, form)
                    found.work_seconds["compiled"] = fast
            except Exception as error:
                why = f"torch.compile failed: {blame(error)}"
            step.compiled = None
            compiled.switch(False)
        if not why and not must and fast > plain * BETTER:
            why = f"measured {plain / fast:.2f} times as fast as without"
        first = next((w for w in self.group.gather(why) if w), "")
        if first:
            self.compiled_from = None
            found.reject("compile=on", first)
            return
        step.compiled = compiled
        if self.compiled_from is None:
            self.compiled_from = self._last
        cost = time.perf_counter() - begun
        gain = f", {plain / fast:.2f} times as fast" if fast else ""
        found.reasons["compile"] = f"{compiled.kind}{gain}; it took {cost:.0f} s"

    # --- trying out ---

    def _rehearse(self, seed: int, inputs: Inputs, form: Form, read: bool = True) -> Tensor:
        """Forward and backward without an update: the figures and the gradient's norm."""
        seed_model(self.group.device, seed)
        self.step.rehearse(tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, inputs), form)
        return self.step.rehearsed() if read else torch.empty(0)

    def _replay(self, graphs: Graphs, seed: int, inputs: Inputs, form: Form) -> tuple[float, Tensor]:
        captured = graphs.capture(self.step.rehearse, inputs, form)
        seed_model(self.group.device, seed)
        captured.graph.replay()
        got = self.step.rehearsed()
        return self._median(captured.graph.replay), got

    def _time(self, seed: int, inputs: Inputs, form: Form) -> float:
        return self._median(lambda: self._rehearse(seed, inputs, form, read=False))

    def _median(self, work: Callable[[], object], times: int = 5) -> float:
        seconds = []
        for _ in range(times):
            self._sync()
            begun = time.perf_counter()
            work()
            self._sync()
            seconds.append(time.perf_counter() - begun)
        return statistics.median(seconds)

    def _draws_randomness(self, seed: int, inputs: Inputs, form: Form) -> bool:
        """Whether the model draws random numbers of its own: compiled, it draws others."""
        seed_model(self.group.device, seed)
        generator = torch.cuda.default_generators[self.group.device.index or 0] if self.cuda else torch.default_generator
        before = generator.get_state()
        self.step.rehearse(tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, inputs), form)
        return not torch.equal(before, generator.get_state())

    def _choose_workers(self, feed: LoaderFeed, form: Form) -> None:
        """As many loader workers as keep up with the step."""
        if self.plan.reasons.get("workers", "pinned").startswith(("pinned", "measured")):
            return
        load = feed.loading_seconds()
        per_micro = next(iter(self.found.step_seconds.values())) / self.plan.accumulation
        work = min(self.found.work_seconds.values(), default=per_micro)
        needed = int(1.25 * load / max(1e-6, work)) + 1
        if self.cuda:
            workers = max(1, min(needed, self.plan.threads))
        else:  # workers take their time from the training itself
            workers = 0 if load < 0.1 * work else min(needed, self.plan.threads // 2)
        self.found.reasons["workers"] = f"measured: a micro-batch takes {1e3 * load:.1f} ms to load and {1e3 * work:.1f} ms to train on"
        feed.use(workers)

    # --- the clock, and the end ---

    def _sync(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.group.device)

    def _start_clock(self) -> None:
        self._sync()
        self._clock = time.perf_counter()

    def _read_clock(self, steps: int) -> float:
        self._sync()
        return (time.perf_counter() - self._clock) / steps

    def _kind(self) -> str:
        names = [n for n, on in (("captured", self.step.graphs), ("compiled", self.step.compiled)) if on is not None]
        return " and ".join(reversed(names)) or "eager"

    def _conclude(self) -> None:
        self.found.reasons.setdefault("capture", "one graph a step" if self.step.strategy.whole else "a graph a micro-batch")
        if not self.cuda:
            self.found.reasons["capture"] = "no graphs on this device"
        if self.group.main:
            self.observer.planned(self.facts())
        self._settle()

    def _settle(self) -> None:
        self.step.pace = None

    def facts(self) -> dict[str, Any]:
        """The plan's keys that were settled here."""
        found = self.found
        facts: dict[str, Any] = {
            "capture": "off" if self.step.graphs is None else "on",
            "compile": "off" if self.step.compiled is None else "on",
            "compile_from": self.compiled_from,
            "measured": {"step_seconds": found.step_seconds, "work_seconds": found.work_seconds},
            "reasons": found.reasons,
            "rejected": found.rejected,
            "sentence": self.sentence(),
        }
        if isinstance(self.step.feed, LoaderFeed):
            facts |= {"data": "loader", "workers": self.step.feed.workers}
        return facts

    def sentence(self) -> str:
        """What was chosen and why, for the user, in lines; empty where there was nothing to choose."""
        if not self.cuda and not self._compiling:
            return ""
        speeds = ", ".join(f"{1e3 * seconds:.2f} ms {name}" for name, seconds in self.found.step_seconds.items())
        lines = [f"steps run {self._kind()}" + (f": {speeds}" if speeds else "")]
        if self.step.graphs is None and self.cuda and self.plan.capture != "off":
            lines.append(f"not captured: {self.found.reasons['capture']}")
        if self._compiling or self.plan.compile == "auto":
            lines.append(("compiled: " if self.step.compiled else "not compiled: ") + self.found.reasons["compile"])
        return "\n".join(lines)


class _Aside:
    """Inside, work may be tried out: buffers, gradients and figures are as before afterwards."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.buffers = [(b, b.clone()) for b in step.model.buffers()]

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        with torch.no_grad():
            for buffer, kept in self.buffers:
                buffer.copy_(kept)
        self.step.clear()


def _close(got: Tensor, expected: Tensor, precision: str) -> bool:
    tolerance = 2e-2 if precision in ("bf16", "fp16") else 1e-3
    return torch.allclose(got, expected, rtol=tolerance, atol=tolerance * 1e-2, equal_nan=True)


def _pair(figures: Tensor) -> str:
    return " and ".join(f"{value:.5g}" for value in figures.tolist()[:2])
