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

from drivetrain.engine.blocks import repeated_blocks
from drivetrain.engine.capture import Graphs, blame, host_waits, opaque
from drivetrain.engine.compiled import Compiled
from drivetrain.engine.group import Group
from drivetrain.engine.loader import LoaderFeed
from drivetrain.engine.observe import Observer
from drivetrain.engine.optim import capturable
from drivetrain.engine.purity import changed, marks
from drivetrain.engine.rand import seed_model
from drivetrain.engine.rehearsal import Aside, apart, pair
from drivetrain.engine.step import Form, Inputs, Step
from drivetrain.plan import Plan

UNTIMED, TIMED, REPLAYED = 3, 5, 20  # steps before the clock, under it, and under it once the choice is made
PAYS = 150.0  # seconds that a run must still take for compiling to be tried: it costs tens of them
BETTER = 0.97  # compiled code must take less than this share of the time
MANY = 20_000  # steps a run must have for its convolutions to be tried out, which takes about a second
RENEWALS = 10  # times that steps are captured anew because something changed between epochs
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


class Pace:
    """Attached to a step until the choice is made; asked again where other code had its turn."""

    def __init__(self, step: Step, plan: Plan, group: Group, total: int, observer: Observer, compiled_from: int | None) -> None:
        self.step, self.plan, self.group, self.total, self.observer = step, plan, group, total, observer
        self.cuda = group.device.type == "cuda"
        self.compiled_from = compiled_from
        """The step from which on compiled code runs; None if it does not."""
        self.found = Findings()
        self._last, self._count, self._chosen_at = -1, 0, 0
        self._clock: float | None = None
        self._since = self._timed = 0  # the count when the clock was set going; steps before that
        self._spent = self._waited = 0.0  # seconds of those; for data, until the clock was started
        self._marks: dict[str, object] = {}
        self._layouts: set[object] = set()
        self._impure = ""
        self._compiling = self._trying = False
        self._renewals = 0

    def __call__(self, seed: int, inputs: Inputs, form: Form) -> None:
        """At the beginning of every micro-batch; acts on the first of a step."""
        if self.step.number == self._last:
            return
        self._last = self.step.number
        self._count += 1
        self._try_convolutions(self._count == 1)
        if self._timed and self._clock is None:
            self._go()
        full = form.size == self.plan.global_batch  # the last batch of an epoch is not what most steps are like
        self._layouts |= {form.given} if full else set()
        if full and self.compiled_from is not None and self.step.compiled is None and self._last >= self.compiled_from:
            self._compile(seed, inputs, form, must=True)
        waiting = self.compiled_from is not None and self.step.compiled is None
        if not self.cuda and not waiting and (self.compiled_from is not None or self.plan.compile != "auto"):
            self._conclude()
        elif self._count == UNTIMED - 1:
            self._marks = self.marked()
        elif self._count == UNTIMED:
            self._impure = changed(self._marks, self.marked())
        elif self._count == UNTIMED + 1:
            self._start_clock()
        elif not self._chosen_at and self._count > UNTIMED + TIMED and full and not waiting:
            self.found.step_seconds[self._kind()] = self._read_clock()
            self._choose(seed, inputs, form)
            self._chosen_at = self._count
            if not self.cuda:
                self._conclude()
        elif self._chosen_at and self._count == self._chosen_at + UNTIMED:
            self._start_clock()
        elif self._chosen_at and self._count == self._chosen_at + UNTIMED + REPLAYED:
            self.found.step_seconds[self._kind()] = self._read_clock()
            self._conclude()

    def look_again(self) -> bool:
        """After evaluation or collecting: if they changed what was captured as fixed, it is captured anew."""
        if self.step.graphs is None:
            return False
        now = self.marked()
        what = changed(self._marks, now)
        if not what:
            return False
        self._marks = now
        self._renewals += 1
        self.step.graphs.forget()
        if self._renewals == RENEWALS:
            self.step.graphs = None
            self.observer.notice(f"steps are no longer captured: {what} changed again and again between epochs")
        return True

    def _try_convolutions(self, begin: bool) -> None:
        """In the first step of a long run, cuDNN times its algorithms for each convolution; they stay with these shapes.

        Only in the first: it would do so for every shape it meets, and it remembers what it took without having timed it.
        """
        cudnn = torch.backends.cudnn
        if begin and self.cuda and not cudnn.benchmark and self._convolves_long():
            cudnn.benchmark = self._trying = True
            self.found.reasons["convolutions"] = "the fastest of cuDNN's algorithms for each, timed in the first step"
        elif not begin and self._trying:
            cudnn.benchmark = self._trying = False
            torch.cuda.reset_peak_memory_stats(self.group.device)  # trying them out may have taken more than steps do

    def _convolves_long(self) -> bool:
        free = self.plan.compile != "off" and not self.plan.deterministic and self.total - self._last >= MANY
        return free and any(isinstance(m, nn.modules.conv._ConvNd) for m in self.step.model.modules())

    # --- the choice ---

    def _choose(self, seed: int, inputs: Inputs, form: Form) -> None:
        if self.step.moment is not None:
            self.step.moment("choose")
        # All ranks take one way, for what is tried out may talk to the others.
        self.step.agree()
        obstacle = next((why for why in self.group.gather(self._obstacle()) if why), "")
        captured = self._capture(seed, inputs, form, obstacle) if self.cuda else None
        if self.compiled_from is None and self._compile_is_worth_it(captured, obstacle):
            self._compile(seed, inputs, form, must=False)
        if isinstance(self.step.feed, LoaderFeed):
            self._choose_workers(self.step.feed)
        self._marks = self.marked()

    def _obstacle(self) -> str:
        """What neither a graph nor a compiler could follow, if there is such a thing."""
        if self.step.strategy.obstacle:
            return self.step.strategy.obstacle
        if self.step.host_random.used:
            return "the loss draws from the host's random generators (Python's, numpy's or torch's for the CPU: draw on the device)"
        if any(isinstance(m, nn.SyncBatchNorm) for m in self.step.model.modules()):
            return "SyncBatchNorm talks to the other processes in the forward pass"
        return f"{self._impure} changes from step to step" if self._impure else ""

    def _pinned(self, key: str) -> bool:
        return self.plan.reasons.get(key) == "pinned"

    def _capture(self, seed: int, inputs: Inputs, form: Form, obstacle: str) -> float | None:
        """Try a graph of forward and backward against the plain call; on success steps are captured from now on."""
        why = obstacle
        if self.plan.capture == "off" and self._pinned("capture"):
            why = "pinned"
        elif not why and self.plan.activation_checkpointing:
            why = "a block that runs again puts the generator back, which a graph cannot"
        elif not why and (kind := opaque(inputs)):
            why = f"batches hold a {kind}, which a graph cannot be handed"
        seconds = 0.0
        if not why:
            memory = torch.cuda.max_memory_allocated(self.group.device) / torch.cuda.get_device_properties(self.group.device).total_memory
            graphs = Graphs(self.group.device, self.observer.notice, tight=memory > TIGHT)
            try:
                with Aside(self.step) as aside:
                    seconds, why = self._prove_graph(graphs, seed, inputs, form, aside)
            except torch.OutOfMemoryError:
                why = "a graph's memory does not fit beside the model's"
            except Exception as error:
                why = blame(error)
        if why:
            self.found.reject("capture=on", why)
            return None
        self.found.work_seconds["captured"] = seconds
        self.step.graphs = graphs
        return seconds

    def _prove_graph(self, graphs: Graphs, seed: int, inputs: Inputs, form: Form, aside: Aside) -> tuple[float, str]:
        """(seconds of a replay, why it is not to be trusted): two seeds, each eager and replayed."""
        other = seed ^ 1
        expected = [self._rehearse(s, inputs, form, aside) for s in (seed, other, seed)]
        with host_waits() as waits:
            self._rehearse(seed, inputs, form, aside, read=False)
        if waits:
            return 0.0, waits[0]
        captured = graphs.capture(self.step.rehearse, inputs, form)

        def replay(s: int) -> list[float]:
            aside.restore()
            seed_model(self.group.device, s)
            captured.graph.replay()
            return self.step.rehearsed()

        got = [replay(s) for s in (seed, other)]
        spread = apart(expected[0], expected[2])  # of kernels that do not repeat
        for mine, eager in zip(got, expected, strict=False):
            if apart(mine, eager) > max(self._tolerance() / 5, 4 * spread):
                return 0.0, f"replayed, the loss and its gradients came out otherwise ({pair(mine)}, not {pair(eager)})"
        return self._median(captured.graph.replay), ""

    def _compile_is_worth_it(self, captured: float | None, obstacle: str) -> bool:
        if self.plan.compile != "auto":  # pinned, or decided before: then it stays so
            self.found.reasons["compile"] = self.plan.reasons.get("compile", "pinned")
            return False
        step = next(iter(self.found.step_seconds.values())) if captured is None else captured * self.plan.accumulation
        left = float(self.group.share(step * (self.total - self._last)))
        if left < PAYS:
            obstacle = f"the run takes only {max(1.0, left):,.0f} s more"
        elif not obstacle and max(self.group.gather(len(self._layouts))) > 1:
            obstacle = "batches come in several shapes"
        if obstacle:
            self.found.reject("compile=on", f"not tried: {obstacle}")
        return not obstacle

    def _compile(self, seed: int, inputs: Inputs, form: Form, must: bool) -> None:
        """Compile for full batches, and go on compiled where that is asked for or faster."""
        step, found = self.step, self.found
        self._compiling = True
        if step.moment is not None:
            step.moment("compile")
        begun = time.perf_counter()
        shape = form._replace(ready=True) if step.has_counts else form
        tries: list[str] = []
        for cunning in (True, False) if self._may_be_cunning() else (False,):
            compiled = Compiled(step.loss_value, step.model, shape, self.plan.deterministic, cunning)
            if self.group.main and not tries:
                self.observer.notice(f"compiling {compiled.kind} (plan.compile=off leaves it out)")
            try:
                why = self._prove_compiled(compiled, seed, inputs, form, must)
            except Exception as error:
                why = f"torch.compile failed: {blame(error)}"
            step.compiled = None
            compiled.switch(False)
            gain = self._gain()
            tries.append(why or (f"it was {gain:.2f} times as fast as without" if gain is not None and gain * BETTER <= 1 else ""))
            if not tries[-1]:
                break
        step.agree()
        why = next((w for w in self.group.gather(why) if w), "")
        gain = self.group.share(gain) if not why else None
        if gain is not None and gain * BETTER <= 1:
            why = f"measured {gain:.2f} times as fast as without"
        if why:
            self.compiled_from = None
            found.reject("compile=on", why)
            return
        step.compiled = compiled
        self.compiled_from = self._last if self.compiled_from is None else self.compiled_from
        faster = "" if gain is None else f", {gain:.2f} times as fast"
        simply = f"; simply, for otherwise {tries[0]}" if tries[0] else ""
        found.reasons["compile"] = f"{compiled.kind}{faster}; it took {time.perf_counter() - begun:.0f} s{simply}"

    def _prove_compiled(self, compiled: Compiled, seed: int, inputs: Inputs, form: Form, must: bool) -> str:
        """Why compiled code is not to be trusted, if so; else it is timed, if there is a choice."""
        step, times = self.step, self.found.work_seconds
        with Aside(step) as aside:
            expected, other, again = (self._rehearse(s, inputs, form, aside) for s in (seed, seed ^ 1, seed))
            draws = apart(other, expected) > 1e-6 + 10 * apart(again, expected)  # more than kernels that do not repeat would do
            if not must and "captured" not in times:
                times["eager"] = self._time(seed, inputs, form, aside)
            step.compiled = compiled
            got = self._rehearse(seed, inputs, form, aside)
            if compiled.failure is not None:
                raise compiled.failure
            if apart(got, expected) > (1e3 if draws else self._tolerance()):  # with dropout it draws other masks; numbers they are
                return f"compiled, the loss and its gradients came out otherwise ({pair(got)}, not {pair(expected)})"
            if must:
                return ""
            self._rehearse(seed, inputs, form, aside)
            if step.graphs is not None:
                captured = step.graphs.capture(step.rehearse, inputs, form)
                times["compiled"] = self._median(captured.graph.replay)
            else:
                times["compiled"] = self._time(seed, inputs, form, aside)
        return ""

    def _may_be_cunning(self) -> bool:
        """It gains where kernels are small. Where runs must repeat, no second try may depend on a clock."""
        return self.cuda and not self.plan.deterministic and not repeated_blocks(self.step.model)

    def _gain(self) -> float | None:
        """How many times as fast compiled code was, where it was timed."""
        times = self.found.work_seconds
        plain, fast = times.get("captured") or times.get("eager"), times.get("compiled")
        return plain / fast if plain and fast else None

    def _tolerance(self) -> float:
        """How far the same mathematics may come out apart."""
        return 5e-2 if self.plan.precision in ("bf16", "fp16") else 1e-3

    # --- trying out ---

    def _rehearse(self, seed: int, inputs: Inputs, form: Form, aside: Aside, read: bool = True) -> list[float]:
        """Forward and backward without an update: the figures and the gradients' norms."""
        aside.restore()
        seed_model(self.group.device, seed)
        self.step.rehearse(tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, inputs), form)
        return self.step.rehearsed() if read else []

    def _time(self, seed: int, inputs: Inputs, form: Form, aside: Aside) -> float:
        return self._median(lambda: self._rehearse(seed, inputs, form, aside, read=False))

    def _median(self, work: Callable[[], object], times: int = 5) -> float:
        seconds = []
        for _ in range(times):
            self._sync()
            begun = time.perf_counter()
            work()
            self._sync()
            seconds.append(time.perf_counter() - begun)
        return statistics.median(seconds)

    def _choose_workers(self, feed: LoaderFeed) -> None:
        """As many loader workers as keep up with the step."""
        if self.plan.reasons.get("workers", "pinned").startswith(("pinned", "measured")):
            return
        load = feed.loading_seconds()
        if load is None:
            return
        waited = (feed.waited - self._waited) / (self._count - UNTIMED - 1)
        per_micro = (next(iter(self.found.step_seconds.values())) - waited) / self.plan.accumulation
        work = min(self.found.work_seconds.values(), default=per_micro)
        needed = int(1.25 * load / max(1e-6, work)) + 1
        if self.cuda:
            workers = max(1, min(needed, self.plan.threads))
        else:  # workers take their time from the training itself
            workers = 0 if load < 0.1 * work else min(needed, self.plan.threads // 2)
        self.found.reasons["workers"] = f"measured: a micro-batch takes {1e3 * load:.1f} ms to load and {1e3 * work:.1f} ms to train on"
        feed.use(workers)

    def marked(self) -> dict[str, object]:
        step = self.step
        if step.strategy.obstacle:
            return {}
        captured = self.cuda and capturable(step.optimizer, step.loss_scale is not None)
        return marks(step.task, step.model, step.optimizer if captured else None)

    # --- the clock, and the end ---

    def _sync(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.group.device)

    def _start_clock(self) -> None:
        self._sync()
        self._waited = self.step.feed.waited if isinstance(self.step.feed, LoaderFeed) else 0.0
        self._timed, self._spent = 0, 0.0
        self._go()

    def _go(self) -> None:
        self._clock, self._since = time.perf_counter(), self._count

    def rest(self) -> None:
        """Other code has its turn, whose time is none of the steps'."""
        self._try_convolutions(False)
        if self._clock is not None:
            self._sync()
            self._spent += time.perf_counter() - self._clock
            self._timed += self._count - self._since + 1
            self._clock = None

    def _read_clock(self) -> float:
        """Seconds of a step since the clock was started."""
        self._sync()
        assert self._clock is not None
        seconds, self._clock = self._spent + time.perf_counter() - self._clock, None
        steps, self._timed = self._timed + self._count - self._since, 0
        return seconds / steps

    def _captures(self) -> bool:
        graphs = self.step.graphs
        return graphs is not None and (graphs.holds("step") or graphs.holds("micro"))

    def _kind(self) -> str:
        names = [n for n, on in (("compiled", self.step.compiled is not None), ("captured", self._captures())) if on]
        return " and ".join(names) or "eager"

    def _conclude(self) -> None:
        if self.cuda and self.step.graphs is not None and not self._captures():
            self.found.reject("capture=on", self.step.graphs.broken or "the host waits within the step")
            self.step.graphs = None
        whole = "one graph a step" if self.step.strategy.whole else "a graph a micro-batch"
        self.found.reasons.setdefault("capture", self.step.strategy.obstacle or (whole if self.cuda else "graphs are a GPU's"))
        if self.group.main:
            self.observer.planned(self.facts())
        self.step.pace = None

    def facts(self) -> dict[str, Any]:
        """The plan's keys that were settled here."""
        found = self.found
        facts: dict[str, Any] = {
            "capture": "on" if self._captures() else "off",
            "compile": "off" if self.step.compiled is None else "on",
            "compile_from": self.compiled_from,
            "measured": {"step_seconds": found.step_seconds, "work_seconds": found.work_seconds},
            "reasons": found.reasons,
            "rejected": found.rejected,
            "sentence": self.sentence(),
        }
        feed = self.step.feed
        facts["data"] = "device" if feed.resident else "loader"
        if isinstance(feed, LoaderFeed):
            facts["workers"] = feed.workers
        return facts

    def sentence(self) -> str:
        """What was chosen and why, for the user, in lines; empty where there was nothing to choose."""
        if not self.cuda and not self._compiling:
            return ""
        speeds = ", ".join(f"{1e3 * seconds:.2f} ms {name}" for name, seconds in self.found.step_seconds.items())
        lines = [f"steps run {self._kind()}" + (f": {speeds}" if speeds else "")]
        if self.cuda and not self._captures() and not self._pinned("capture"):
            lines.append(f"not captured: {self.found.reasons['capture']}")
        if self._compiling or (self.cuda and self.plan.compile == "auto"):
            lines.append(("compiled: " if self.step.compiled else "not compiled: ") + self.found.reasons["compile"])
        if "convolutions" in self.found.reasons:
            lines.append(f"convolutions: {self.found.reasons['convolutions']}")
        return "\n".join(lines)
