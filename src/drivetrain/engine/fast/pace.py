"""How steps run, chosen by measuring the first ones: called plainly, replayed as a CUDA graph, compiled.

The steps that are measured are steps of the training; only what is tried out besides is thrown away. A graph
replays the same kernels, so it may begin at any step. Compiled code rounds otherwise: from which step on it
runs is kept with the plan and in every checkpoint, so that a resumed run does the same.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from drivetrain.engine.data.loader_feed import LoaderFeed
from drivetrain.engine.fast.python_state import first_change, read_python_state
from drivetrain.engine.fast.trial import Findings, Trial
from drivetrain.engine.group import Group
from drivetrain.engine.log.observe import Observer
from drivetrain.engine.numerics.optim import is_capturable
from drivetrain.engine.step import Form, Inputs, Step
from drivetrain.plan import Plan

UNTIMED, TIMED, REPLAYED = 3, 5, 20  # steps before the clock, under it, and under it once the choice is made
PAYS = 150.0  # seconds that a run must still take for compiling to be tried: it costs tens of them
MANY = 20_000  # steps a run must have for its convolutions to be tried out, which takes about a second
RENEWALS = 10  # times that steps are captured anew because something changed between epochs


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
            self._compile(self._trial(seed, inputs, form), must=True)
        waiting = self.compiled_from is not None and self.step.compiled is None
        if not self.cuda and not waiting and (self.compiled_from is not None or self.plan.compile != "auto"):
            self._conclude()
        elif self._count == UNTIMED - 1:
            self._marks = self.marked()
        elif self._count == UNTIMED:
            self._impure = first_change(self._marks, self.marked())
        elif self._count == UNTIMED + 1:
            self._start_clock()
        elif not self._chosen_at and self._count > UNTIMED + TIMED and full and not waiting:
            self.found.step_seconds[self._kind()] = self._read_clock()
            self._choose(self._trial(seed, inputs, form))
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
        what = first_change(self._marks, now)
        if not what:
            return False
        self._marks = now
        self._renewals += 1
        self.step.graphs.clear()
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

    def _trial(self, seed: int, inputs: Inputs, form: Form) -> Trial:
        return Trial(self.step, self.plan, self.observer, self.found, seed, inputs, form)

    def _choose(self, trial: Trial) -> None:
        if self.step.moment is not None:
            self.step.moment("choose")
        # All ranks take one way, for what is tried out may talk to the others.
        self.step.agree()
        obstacle = next((why for why in self.group.gather_objects(self._obstacle()) if why), "")
        off = self.plan.capture == "off" and self._pinned("capture")
        captured = trial.capture("pinned" if off else obstacle) if self.cuda else None
        if self.compiled_from is None and self._compile_is_worth_it(captured, obstacle):
            self._compile(trial, must=False)
        if isinstance(self.step.feed, LoaderFeed):
            self._choose_workers(self.step.feed)
        self._marks = self.marked()

    def _obstacle(self) -> str:
        """What neither a graph nor a compiler could follow, if there is such a thing."""
        if self.step.strategy.capture_obstacle:
            return self.step.strategy.capture_obstacle
        if self.step.host_random.is_used:
            return "the loss draws from the host's random generators (Python's, numpy's or torch's for the CPU: draw on the device)"
        if any(isinstance(m, nn.SyncBatchNorm) for m in self.step.model.modules()):
            return "SyncBatchNorm talks to the other processes in the forward pass"
        return f"{self._impure} changes from step to step" if self._impure else ""

    def _pinned(self, key: str) -> bool:
        return self.plan.reasons.get(key) == "pinned"

    def _compile_is_worth_it(self, captured: float | None, obstacle: str) -> bool:
        if self.plan.compile != "auto":  # pinned, or decided before: then it stays so
            self.found.reasons["compile"] = self.plan.reasons.get("compile", "pinned")
            return False
        step = next(iter(self.found.step_seconds.values())) if captured is None else captured * self.plan.accumulation
        left = float(self.group.broadcast_object(step * (self.total - self._last)))
        if left < PAYS:
            obstacle = f"the run takes only {max(1.0, left):,.0f} s more"
        elif not obstacle and max(self.group.gather_objects(len(self._layouts))) > 1:
            obstacle = "batches come in several shapes"
        if obstacle:
            self.found.reject("compile=on", f"not tried: {obstacle}")
        return not obstacle

    def _compile(self, trial: Trial, must: bool) -> None:
        self._compiling = True
        first = self._last if self.compiled_from is None else self.compiled_from
        self.compiled_from = first if trial.compile(must) else None

    def _choose_workers(self, feed: LoaderFeed) -> None:
        """As many loader workers as keep up with the step."""
        if self.plan.reasons.get("workers", "pinned").startswith(("pinned", "measured")):
            return
        load = feed.measure_loading_seconds()
        if load is None:
            return
        waited = (feed.wait_seconds - self._waited) / (self._count - UNTIMED - 1)
        per_micro = (next(iter(self.found.step_seconds.values())) - waited) / self.plan.accumulation
        work = min(self.found.work_seconds.values(), default=per_micro)
        needed = int(1.25 * load / max(1e-6, work)) + 1
        if self.cuda:
            workers = max(1, min(needed, self.plan.threads))
        else:  # workers take their time from the training itself
            workers = 0 if load < 0.1 * work else min(needed, self.plan.threads // 2)
        self.found.reasons["workers"] = f"measured: a micro-batch takes {1e3 * load:.1f} ms to load and {1e3 * work:.1f} ms to train on"
        feed.set_num_workers(workers)

    def marked(self) -> dict[str, object]:
        step = self.step
        if step.strategy.capture_obstacle:
            return {}
        captured = self.cuda and is_capturable(step.optimizer, step.loss_scale is not None)
        return read_python_state(step.task, step.model, step.optimizer if captured else None)

    # --- the clock, and the end ---

    def _sync(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.group.device)

    def _start_clock(self) -> None:
        self._sync()
        self._waited = self.step.feed.wait_seconds if isinstance(self.step.feed, LoaderFeed) else 0.0
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
        return graphs is not None and (graphs.has_graph_of("step") or graphs.has_graph_of("micro"))

    def _kind(self) -> str:
        names = [n for n, on in (("compiled", self.step.compiled is not None), ("captured", self._captures())) if on]
        return " and ".join(names) or "eager"

    def _conclude(self) -> None:
        if self.cuda and self.step.graphs is not None and not self._captures():
            self.found.reject("capture=on", self.step.graphs.disabled_reason or "the host waits within the step")
            self.step.graphs = None
        whole = "one graph a step" if self.step.strategy.is_one_piece else "a graph a micro-batch"
        self.found.reasons.setdefault("capture", self.step.strategy.capture_obstacle or (whole if self.cuda else "graphs are a GPU's"))
        if self.group.is_main:
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
        facts["data"] = "device" if feed.is_resident else "loader"
        if isinstance(feed, LoaderFeed):
            facts["workers"] = feed.num_workers
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
