"""Chooses how steps run by measuring the first ones: eager, replayed as a CUDA graph, or compiled.

The measured steps are steps of the training; only what is tried besides is thrown away. A graph replays the same
kernels, so it may begin at any step. Compiled code rounds differently: the step from which it runs is kept with the
plan and in every checkpoint, so that a resumed run does the same.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from drivetrain.engine.data.loader_feed import LoaderFeed
from drivetrain.engine.fast.python_state import first_change, read_python_state
from drivetrain.engine.fast.trial import ExecutionTrial, Findings
from drivetrain.engine.group import Group
from drivetrain.engine.log.observe import Observer
from drivetrain.engine.numerics.optim import is_capturable
from drivetrain.engine.step import Form, Inputs, Step
from drivetrain.plan import Plan

WARM_UP_STEPS, TIMED_STEPS, REPLAYED_STEPS = 3, 5, 20  # before the timer, under it, and under it after the choice
MIN_SECONDS_TO_COMPILE = 150.0  # that a run must still take for compiling to be tried: it costs tens of them
MIN_STEPS_TO_TRY_CONVOLUTIONS = 20_000  # that a run must still take: trying them costs about a second
MAX_RECAPTURES = 10  # times that steps are captured again because other code changed something between epochs


class StepTimer:
    """Times steps on the device; pauses while other code runs."""

    def __init__(self, step: Step, is_cuda: bool) -> None:
        self.step, self.is_cuda = step, is_cuda
        self.data_wait_seconds = 0.0
        """Seconds that steps had waited for data when the timer was started."""
        self._running_since: float | None = None
        self._first_step = self._num_timed = 0
        self._seconds = 0.0

    @property
    def is_paused(self) -> bool:
        return self._num_timed > 0 and self._running_since is None

    def start(self, step: int) -> None:
        self._sync()
        self.data_wait_seconds = self.step.feed.wait_seconds if isinstance(self.step.feed, LoaderFeed) else 0.0
        self._num_timed, self._seconds = 0, 0.0
        self.go_on(step)

    def go_on(self, step: int) -> None:
        self._running_since, self._first_step = time.perf_counter(), step

    def pause(self, step: int) -> None:
        """Stops the timer before other code runs."""
        if self._running_since is not None:
            self._sync()
            self._seconds += time.perf_counter() - self._running_since
            self._num_timed += step - self._first_step + 1
            self._running_since = None

    def stop(self, step: int) -> float:
        """Returns the seconds of a step since the timer was started."""
        self._sync()
        assert self._running_since is not None
        seconds = self._seconds + time.perf_counter() - self._running_since
        num_steps = self._num_timed + step - self._first_step
        self._running_since, self._num_timed = None, 0
        return seconds / num_steps

    def _sync(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.step.group.device)


class ExecutionTuner:
    """Attached to a step until the choice is made; asked again after other code ran."""

    def __init__(self, step: Step, plan: Plan, group: Group, total_steps: int, observer: Observer, compiled_from: int | None) -> None:
        self.step, self.plan, self.group, self.total_steps, self.observer = step, plan, group, total_steps, observer
        self.is_cuda = group.device.type == "cuda"
        self.compiled_from = compiled_from
        """The step from which compiled code runs; None if it does not."""
        self.findings = Findings()
        self.timer = StepTimer(step, self.is_cuda)
        self._last_step, self._num_steps, self._chosen_at = -1, 0, 0
        self._marks: dict[str, object] = {}
        self._input_layouts: set[object] = set()
        self._impurity = ""
        self._tried_compiling = self._tries_convolutions = False
        self._num_recaptures = 0

    def attach(self) -> None:
        self.step.micro_batch_hooks.append(self.before_micro_batch)

    def detach(self) -> None:
        self.pause_timer()
        if self.before_micro_batch in self.step.micro_batch_hooks:
            self.step.micro_batch_hooks.remove(self.before_micro_batch)

    def before_micro_batch(self, seed: int, inputs: Inputs, form: Form) -> None:
        """Acts before the first micro-batch of each step."""
        if self.step.number == self._last_step:
            return
        self._last_step = self.step.number
        self._num_steps += 1
        self._try_convolutions(self._num_steps == 1)
        if self.timer.is_paused:
            self.timer.go_on(self._num_steps)
        is_full = form.size == self.plan.global_batch  # the last batch of an epoch is not typical
        if is_full:
            self._input_layouts.add(form.given)
            self._start_compiled_code(seed, inputs, form)
        waits_for_compiled = self.compiled_from is not None and self.step.compiled is None
        if not self.is_cuda and not waits_for_compiled and (self.compiled_from is not None or self.plan.compile != "auto"):
            self._conclude()
        elif self._chosen_at:
            self._time_the_choice()
        elif self._num_steps <= WARM_UP_STEPS + 1:
            self._warm_up()
        elif self._num_steps > WARM_UP_STEPS + TIMED_STEPS and is_full and not waits_for_compiled:
            self._measure_and_choose(seed, inputs, form)

    def _start_compiled_code(self, seed: int, inputs: Inputs, form: Form) -> None:
        """Compiles where the plan or a checkpoint says that this step runs compiled."""
        if self.compiled_from is not None and self.step.compiled is None and self._last_step >= self.compiled_from:
            self._compile(self._trial(seed, inputs, form), must=True)

    def _warm_up(self) -> None:
        if self._num_steps == WARM_UP_STEPS - 1:
            self._marks = self.marks()
        elif self._num_steps == WARM_UP_STEPS:
            self._impurity = first_change(self._marks, self.marks())
        elif self._num_steps == WARM_UP_STEPS + 1:
            self.timer.start(self._num_steps)

    def _measure_and_choose(self, seed: int, inputs: Inputs, form: Form) -> None:
        self.findings.step_seconds[self._kind()] = self.timer.stop(self._num_steps)
        self._choose(self._trial(seed, inputs, form))
        self._chosen_at = self._num_steps
        if not self.is_cuda:
            self._conclude()

    def _time_the_choice(self) -> None:
        steps_since = self._num_steps - self._chosen_at
        if steps_since == WARM_UP_STEPS:
            self.timer.start(self._num_steps)
        elif steps_since == WARM_UP_STEPS + REPLAYED_STEPS:
            self.findings.step_seconds[self._kind()] = self.timer.stop(self._num_steps)
            self._conclude()

    def pause_timer(self) -> None:
        """Before other code runs, whose time is not that of steps."""
        self._try_convolutions(False)
        self.timer.pause(self._num_steps)

    def recheck(self) -> bool:
        """After evaluation or collection: returns whether they changed something captured as fixed; steps are then captured again."""
        if self.step.graphs is None:
            return False
        marks = self.marks()
        name = first_change(self._marks, marks)
        if not name:
            return False
        self._marks = marks
        self._num_recaptures += 1
        self.step.graphs.clear()
        if self._num_recaptures == MAX_RECAPTURES:
            self.step.graphs = None
            self.observer.notice(f"steps are no longer captured: {name} changed again and again between epochs")
        return True

    def _try_convolutions(self, is_first: bool) -> None:
        """In the first step of a long run, cuDNN times its algorithms for each convolution and keeps the fastest for these shapes.

        Only in the first step: it would do so for every shape it meets, and it also keeps what it took without timing.
        """
        cudnn = torch.backends.cudnn
        if is_first and self.is_cuda and not cudnn.benchmark and self._is_long_with_convolutions():
            cudnn.benchmark = self._tries_convolutions = True
            self.findings.reasons["convolutions"] = "the fastest of cuDNN's algorithms for each, timed in the first step"
        elif not is_first and self._tries_convolutions:
            cudnn.benchmark = self._tries_convolutions = False
            torch.cuda.reset_peak_memory_stats(self.group.device)  # trying may have taken more memory than steps do

    def _is_long_with_convolutions(self) -> bool:
        steps_left = self.total_steps - self._last_step
        is_free = self.plan.compile != "off" and not self.plan.deterministic and steps_left >= MIN_STEPS_TO_TRY_CONVOLUTIONS
        return is_free and any(isinstance(m, nn.modules.conv._ConvNd) for m in self.step.model.modules())

    # --- the choice ---

    def _trial(self, seed: int, inputs: Inputs, form: Form) -> ExecutionTrial:
        return ExecutionTrial(self.step, self.plan, self.observer, self.findings, seed, inputs, form)

    def _choose(self, trial: ExecutionTrial) -> None:
        if self.step.reached is not None:
            self.step.reached("choose")
        # All ranks choose the same, since a trial may communicate.
        self.step.raise_if_any_rank_is_out_of_memory()
        obstacle = next((why for why in self.group.gather_objects(self._obstacle()) if why), "")
        is_off = self.plan.capture == "off" and self._is_pinned("capture")
        captured_seconds = trial.capture("pinned" if is_off else obstacle) if self.is_cuda else None
        if self.compiled_from is None and self._is_compiling_worth_a_trial(captured_seconds, obstacle):
            self._compile(trial, must=False)
        if isinstance(self.step.feed, LoaderFeed):
            self._choose_workers(self.step.feed)
        self._marks = self.marks()

    def _obstacle(self) -> str:
        """Returns what neither a graph nor a compiler could follow, if there is such a thing."""
        if self.step.strategy.capture_obstacle:
            return self.step.strategy.capture_obstacle
        if self.step.host_random.is_used:
            return "the loss draws from the host's random generators (Python's, numpy's or torch's for the CPU: draw on the device)"
        if any(isinstance(m, nn.SyncBatchNorm) for m in self.step.model.modules()):
            return "SyncBatchNorm talks to the other processes in the forward pass"
        return f"{self._impurity} changes from step to step" if self._impurity else ""

    def _is_pinned(self, key: str) -> bool:
        return self.plan.reasons.get(key) == "pinned"

    def _is_compiling_worth_a_trial(self, captured_seconds: float | None, obstacle: str) -> bool:
        if self.plan.compile != "auto":  # pinned, or decided in an earlier run
            self.findings.reasons["compile"] = self.plan.reasons.get("compile", "pinned")
            return False
        eager_seconds = next(iter(self.findings.step_seconds.values()))
        step_seconds = eager_seconds if captured_seconds is None else captured_seconds * self.plan.accumulation
        seconds_left = float(self.group.broadcast_object(step_seconds * (self.total_steps - self._last_step)))
        if seconds_left < MIN_SECONDS_TO_COMPILE:
            obstacle = f"the run takes only {max(1.0, seconds_left):,.0f} s more"
        elif not obstacle and max(self.group.gather_objects(len(self._input_layouts))) > 1:
            obstacle = "batches come in several shapes"
        if obstacle:
            self.findings.reject("compile=on", f"not tried: {obstacle}")
        return not obstacle

    def _compile(self, trial: ExecutionTrial, must: bool) -> None:
        self._tried_compiling = True
        first = self._last_step if self.compiled_from is None else self.compiled_from
        self.compiled_from = first if trial.compile(must) else None

    def _choose_workers(self, feed: LoaderFeed) -> None:
        """Uses as many loader workers as keep up with the step."""
        if self.plan.reasons.get("workers", "pinned").startswith(("pinned", "measured")):
            return
        load_seconds = feed.measure_loading_seconds()
        if load_seconds is None:
            return
        wait_seconds = (feed.wait_seconds - self.timer.data_wait_seconds) / (self._num_steps - WARM_UP_STEPS - 1)
        micro_seconds = (next(iter(self.findings.step_seconds.values())) - wait_seconds) / self.plan.accumulation
        work_seconds = min(self.findings.work_seconds.values(), default=micro_seconds)
        needed = int(1.25 * load_seconds / max(1e-6, work_seconds)) + 1
        if self.is_cuda:
            workers = max(1, min(needed, self.plan.threads))
        else:  # workers take their time from the training itself
            workers = 0 if load_seconds < 0.1 * work_seconds else min(needed, self.plan.threads // 2)
        self.findings.reasons["workers"] = (
            f"measured: a micro-batch takes {1e3 * load_seconds:.1f} ms to load and {1e3 * work_seconds:.1f} ms to train on"
        )
        feed.set_num_workers(workers)

    def marks(self) -> dict[str, object]:
        """Returns what a graph takes as fixed, in a form that can be compared later."""
        step = self.step
        if step.strategy.capture_obstacle:
            return {}
        captures_optimizer = self.is_cuda and is_capturable(step.optimizer, step.loss_scale is not None)
        return read_python_state(step.task, step.model, step.optimizer if captures_optimizer else None)

    # --- the end ---

    def _is_captured(self) -> bool:
        graphs = self.step.graphs
        return graphs is not None and (graphs.has_graph_of("step") or graphs.has_graph_of("micro"))

    def _kind(self) -> str:
        names = [n for n, on in (("compiled", self.step.compiled is not None), ("captured", self._is_captured())) if on]
        return " and ".join(names) or "eager"

    def _conclude(self) -> None:
        if self.is_cuda and self.step.graphs is not None and not self._is_captured():
            self.findings.reject("capture=on", self.step.graphs.disabled_reason or "the host waits within the step")
            self.step.graphs = None
        pieces = "one graph a step" if self.step.strategy.is_one_piece else "a graph a micro-batch"
        self.findings.reasons.setdefault(
            "capture", self.step.strategy.capture_obstacle or (pieces if self.is_cuda else "graphs are a GPU's")
        )
        if self.group.is_main:
            self.observer.planned(self.choices())
        self.step.micro_batch_hooks.remove(self.before_micro_batch)

    def choices(self) -> dict[str, Any]:
        """Returns the plan's keys that were settled here."""
        findings, feed = self.findings, self.step.feed
        choices: dict[str, Any] = {
            "capture": "on" if self._is_captured() else "off",
            "compile": "off" if self.step.compiled is None else "on",
            "compile_from": self.compiled_from,
            "measured": {"step_seconds": findings.step_seconds, "work_seconds": findings.work_seconds},
            "reasons": findings.reasons,
            "rejected": findings.rejected,
            "sentence": self.sentence(),
            "data": "device" if feed.is_resident else "loader",
        }
        if isinstance(feed, LoaderFeed):
            choices["workers"] = feed.num_workers
        return choices

    def sentence(self) -> str:
        """Returns what was chosen and why, in lines for the user; an empty string where there was nothing to choose."""
        if not self.is_cuda and not self._tried_compiling:
            return ""
        reasons = self.findings.reasons
        speeds = ", ".join(f"{1e3 * seconds:.2f} ms {name}" for name, seconds in self.findings.step_seconds.items())
        lines = [f"steps run {self._kind()}" + (f": {speeds}" if speeds else "")]
        if self.is_cuda and not self._is_captured() and not self._is_pinned("capture"):
            lines.append(f"not captured: {reasons['capture']}")
        if self._tried_compiling or (self.is_cuda and self.plan.compile == "auto"):
            lines.append(("compiled: " if self.step.compiled else "not compiled: ") + reasons["compile"])
        if "convolutions" in reasons:
            lines.append(f"convolutions: {reasons['convolutions']}")
        return "\n".join(lines)
