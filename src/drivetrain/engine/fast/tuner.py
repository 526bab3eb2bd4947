"""Measures the first steps and chooses how all others run: eager, replayed as a CUDA graph, or compiled.

The measured steps are steps of the training; only trials between them are undone. A graph replays the same kernels, so
graphs may start at any step. Compiled code rounds differently, so the plan and every checkpoint store the step from
which it runs, and a resumed run does the same.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from drivetrain.engine.data.loader_feed import LoaderFeed
from drivetrain.engine.fast.python_state import first_change, read_python_state
from drivetrain.engine.fast.trial import ExecutionTrial, TrialResults
from drivetrain.engine.group import Group
from drivetrain.engine.log.observe import Observer
from drivetrain.engine.numerics.optim import is_capturable
from drivetrain.engine.step import Form, Inputs, Step
from drivetrain.plan import Plan

WARM_UP_STEPS = 3  # before a timer is started
TIMED_STEPS = 5  # before the choice
REPLAYED_STEPS = 20  # timed after the choice
MIN_SECONDS_TO_COMPILE = 150.0  # left in the run; in a shorter one compiling, which takes tens of seconds, is not tried
MIN_STEPS_TO_TIME_CONVOLUTIONS = 20_000  # left in the run; in a shorter one the second that timing takes is not regained
MAX_RECAPTURES = 10  # because other code changed a value between epochs; after that, steps run eager
LOADER_HEADROOM = 1.25  # times the loader workers that keep up with the step exactly
NEGLIGIBLE_LOADING_SHARE = 0.1  # of the work's time; on a CPU, faster loading needs no loader worker


class StepTimer:
    """Measures the time of steps on the device, with pauses while other code runs."""

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
        self.resume(step)

    def resume(self, step: int) -> None:
        self._running_since, self._first_step = time.perf_counter(), step

    def pause(self, step: int) -> None:
        """Pauses the timer before other code runs."""
        if self._running_since is not None:
            self._sync()
            self._seconds += time.perf_counter() - self._running_since
            self._num_timed += step - self._first_step + 1
            self._running_since = None

    def stop(self, step: int) -> float:
        """Stops the timer; returns the mean seconds of a step since its start."""
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
    """Follows the first steps through a hook, and makes the choice. After other code has run, it checks that graphs are still valid."""

    def __init__(self, step: Step, plan: Plan, group: Group, total_steps: int, observer: Observer, compiled_from: int | None) -> None:
        self.step, self.plan, self.group, self.total_steps, self.observer = step, plan, group, total_steps, observer
        self.is_cuda = group.device.type == "cuda"
        self.compiled_from = compiled_from
        """The step from which compiled code runs; None if it does not."""
        self.results = TrialResults()
        self.timer = StepTimer(step, self.is_cuda)
        self._current_step = -1  # of the training
        self._num_steps = 0  # that this tuner has followed
        self._num_steps_at_choice = 0
        self._assumed_values: dict[str, object] = {}
        self._input_layouts: set[object] = set()
        self._changing_value = ""  # the name of a Python value that changes from step to step
        self._has_tried_compiling = self._is_timing_convolutions = False
        self._num_recaptures = 0

    def attach(self) -> None:
        self.step.micro_batch_hooks.append(self.before_micro_batch)

    def detach(self) -> None:
        self.pause_timer()
        if self.before_micro_batch in self.step.micro_batch_hooks:
            self.step.micro_batch_hooks.remove(self.before_micro_batch)

    def before_micro_batch(self, seed: int, inputs: Inputs, form: Form) -> None:
        """Acts before the first micro-batch of each step."""
        if self.step.number == self._current_step:
            return
        self._current_step = self.step.number
        self._num_steps += 1
        self._time_convolutions(self._num_steps == 1)
        if self.timer.is_paused:
            self.timer.resume(self._num_steps)
        is_full = form.size == self.plan.global_batch  # the last batch of an epoch is not typical
        if is_full:
            self._input_layouts.add(form.layout)
            self._compile_if_required(seed, inputs, form)
        is_to_be_compiled = self.compiled_from is not None and self.step.compiled is None
        is_compiling_decided = self.compiled_from is not None or self.plan.compile != "auto"
        if not self.is_cuda and is_compiling_decided and not is_to_be_compiled:
            self._conclude()
        elif self._num_steps_at_choice:
            self._time_the_choice()
        elif self._num_steps <= WARM_UP_STEPS + 1:
            self._warm_up()
        elif self._num_steps > WARM_UP_STEPS + TIMED_STEPS and is_full and not is_to_be_compiled:
            self._measure_and_choose(seed, inputs, form)

    def _compile_if_required(self, seed: int, inputs: Inputs, form: Form) -> None:
        """Compiles where the plan or a checkpoint requires that this step runs compiled."""
        if self.compiled_from is not None and self.step.compiled is None and self._current_step >= self.compiled_from:
            self._compile(self._trial(seed, inputs, form), is_required=True)

    def _warm_up(self) -> None:
        if self._num_steps == WARM_UP_STEPS - 1:
            self._assumed_values = self.assumed_values()
        elif self._num_steps == WARM_UP_STEPS:
            self._changing_value = first_change(self._assumed_values, self.assumed_values())
        elif self._num_steps == WARM_UP_STEPS + 1:
            self.timer.start(self._num_steps)

    def _measure_and_choose(self, seed: int, inputs: Inputs, form: Form) -> None:
        self.results.step_seconds[self._mode()] = self.timer.stop(self._num_steps)
        self._choose(self._trial(seed, inputs, form))
        self._num_steps_at_choice = self._num_steps
        if not self.is_cuda:
            self._conclude()

    def _time_the_choice(self) -> None:
        num_steps_since = self._num_steps - self._num_steps_at_choice
        if num_steps_since == WARM_UP_STEPS:
            self.timer.start(self._num_steps)
        elif num_steps_since == WARM_UP_STEPS + REPLAYED_STEPS:
            self.results.step_seconds[self._mode()] = self.timer.stop(self._num_steps)
            self._conclude()

    def pause_timer(self) -> None:
        """Call before other code runs, whose time does not belong to steps."""
        self._time_convolutions(False)
        self.timer.pause(self._num_steps)

    def drop_invalid_graphs(self) -> bool:
        """Call after evaluation or collection: drops the graphs if a value that they assume has changed; returns whether it did."""
        if self.step.graphs is None:
            return False
        values = self.assumed_values()
        name = first_change(self._assumed_values, values)
        if not name:
            return False
        self._assumed_values = values
        self._num_recaptures += 1
        self.step.graphs.clear()
        if self._num_recaptures == MAX_RECAPTURES:
            self.step.graphs = None
            self.observer.notice(f"steps are no longer captured: {name} changed again and again between epochs")
        return True

    def _time_convolutions(self, is_first_step: bool) -> None:
        """Lets cuDNN time its algorithms for each convolution in the first step of a long run, and use the fastest from then on.

        Only in the first step: later, cuDNN would time each new shape again. It also remembers algorithms that it chose untimed.
        """
        cudnn = torch.backends.cudnn
        if is_first_step and self.is_cuda and not cudnn.benchmark and self._should_time_convolutions():
            cudnn.benchmark = self._is_timing_convolutions = True
            self.results.reasons["convolutions"] = "the fastest of cuDNN's algorithms for each, timed in the first step"
        elif not is_first_step and self._is_timing_convolutions:
            cudnn.benchmark = self._is_timing_convolutions = False
            torch.cuda.reset_peak_memory_stats(self.group.device)  # timing may have taken more memory than steps do

    def _should_time_convolutions(self) -> bool:
        steps_left = self.total_steps - self._current_step
        is_allowed = self.plan.compile != "off" and not self.plan.deterministic
        has_convolutions = any(isinstance(m, nn.modules.conv._ConvNd) for m in self.step.model.modules())
        return is_allowed and steps_left >= MIN_STEPS_TO_TIME_CONVOLUTIONS and has_convolutions

    # --- the choice ---

    def _trial(self, seed: int, inputs: Inputs, form: Form) -> ExecutionTrial:
        return ExecutionTrial(self.step, self.plan, self.observer, self.results, seed, inputs, form)

    def _choose(self, trial: ExecutionTrial) -> None:
        if self.step.reached is not None:
            self.step.reached("choose")
        # All ranks must choose the same, because a trial may contain collectives.
        self.step.raise_if_any_rank_is_out_of_memory()
        obstacle = next((why for why in self.group.gather_objects(self._obstacle()) if why), "")
        is_off = self.plan.capture == "off" and self._is_pinned("capture")
        captured_seconds = trial.capture("pinned" if is_off else obstacle) if self.is_cuda else None
        if self.compiled_from is None and self._is_compiling_worth_a_trial(captured_seconds, obstacle):
            self._compile(trial, is_required=False)
        if isinstance(self.step.feed, LoaderFeed):
            self._choose_workers(self.step.feed)
        self._assumed_values = self.assumed_values()

    def _obstacle(self) -> str:
        """Returns why steps can be neither captured nor compiled; empty if they can."""
        if self.step.strategy.capture_obstacle:
            return self.step.strategy.capture_obstacle
        if self.step.host_random.is_used:
            return "the loss draws from the host's random generators (Python's, numpy's or torch's CPU generator): draw on the device"
        if any(isinstance(m, nn.SyncBatchNorm) for m in self.step.model.modules()):
            return "SyncBatchNorm communicates with the other processes in the forward pass"
        return f"{self._changing_value} changes from step to step" if self._changing_value else ""

    def _is_pinned(self, key: str) -> bool:
        return self.plan.reasons.get(key) == "pinned"

    def _is_compiling_worth_a_trial(self, captured_seconds: float | None, obstacle: str) -> bool:
        if self.plan.compile != "auto":  # pinned, or decided in an earlier run
            self.results.reasons["compile"] = self.plan.reasons.get("compile", "pinned")
            return False
        eager_seconds = next(iter(self.results.step_seconds.values()))
        step_seconds = eager_seconds if captured_seconds is None else captured_seconds * self.plan.accumulation
        seconds_left = float(self.group.broadcast_object(step_seconds * (self.total_steps - self._current_step)))
        if seconds_left < MIN_SECONDS_TO_COMPILE:
            obstacle = f"the run takes only {max(1.0, seconds_left):,.0f} s more"
        elif not obstacle and max(self.group.gather_objects(len(self._input_layouts))) > 1:
            obstacle = "batches come in several shapes"
        if obstacle:
            self.results.reject("compile=on", f"not tried: {obstacle}")
        return not obstacle

    def _compile(self, trial: ExecutionTrial, is_required: bool) -> None:
        self._has_tried_compiling = True
        first_compiled_step = self._current_step if self.compiled_from is None else self.compiled_from
        self.compiled_from = first_compiled_step if trial.compile(is_required) else None

    def _choose_workers(self, feed: LoaderFeed) -> None:
        """Sets the number of loader workers so that loading keeps up with the steps."""
        if self.plan.reasons.get("workers", "pinned").startswith(("pinned", "measured")):
            return
        load_seconds = feed.measure_loading_seconds()
        if load_seconds is None:
            return
        num_timed_steps = self._num_steps - WARM_UP_STEPS - 1
        wait_seconds = (feed.wait_seconds - self.timer.data_wait_seconds) / num_timed_steps
        eager_seconds = next(iter(self.results.step_seconds.values()))
        micro_batch_seconds = (eager_seconds - wait_seconds) / self.plan.accumulation
        work_seconds = min(self.results.work_seconds.values(), default=micro_batch_seconds)
        num_needed = int(LOADER_HEADROOM * load_seconds / max(1e-6, work_seconds)) + 1
        if self.is_cuda:
            num_workers = max(1, min(num_needed, self.plan.threads))
        elif load_seconds < NEGLIGIBLE_LOADING_SHARE * work_seconds:
            num_workers = 0
        else:  # on a CPU, loader workers and the training share the cores
            num_workers = min(num_needed, self.plan.threads // 2)
        self.results.reasons["workers"] = (
            f"measured: a micro-batch takes {1e3 * load_seconds:.1f} ms to load and {1e3 * work_seconds:.1f} ms to train on"
        )
        feed.set_num_workers(num_workers)

    def assumed_values(self) -> dict[str, object]:
        """Returns the Python values that a graph assumes constant, in a form that can be compared later."""
        step = self.step
        if step.strategy.capture_obstacle:
            return {}
        captures_optimizer = self.is_cuda and is_capturable(step.optimizer, step.loss_scale is not None)
        return read_python_state(step.task, step.model, step.optimizer if captures_optimizer else None)

    # --- the end ---

    def _is_captured(self) -> bool:
        graphs = self.step.graphs
        return graphs is not None and (graphs.has_graph_of("step") or graphs.has_graph_of("micro"))

    def _mode(self) -> str:
        """Returns how steps run now, for example "compiled and captured"."""
        names = ["compiled"] if self.step.compiled is not None else []
        if self._is_captured():
            names.append("captured")
        return " and ".join(names) or "eager"

    def _conclude(self) -> None:
        """Reports the choices, and ends the tuning."""
        if self.is_cuda and self.step.graphs is not None and not self._is_captured():
            self.results.reject("capture=on", self.step.graphs.disabled_reason or "the host waits within the step")
            self.step.graphs = None
        if not self.is_cuda:
            reason = "graphs are a GPU's"
        else:
            reason = "one graph a step" if self.step.strategy.is_one_piece else "a graph a micro-batch"
        self.results.reasons.setdefault("capture", self.step.strategy.capture_obstacle or reason)
        if self.group.is_main:
            self.observer.planned(self.choices())
        self.step.micro_batch_hooks.remove(self.before_micro_batch)

    def choices(self) -> dict[str, Any]:
        """Returns the keys of the plan that this tuner has chosen, with their values."""
        results, feed = self.results, self.step.feed
        choices: dict[str, Any] = {
            "capture": "on" if self._is_captured() else "off",
            "compile": "off" if self.step.compiled is None else "on",
            "compile_from": self.compiled_from,
            "measured": {"step_seconds": results.step_seconds, "work_seconds": results.work_seconds},
            "reasons": results.reasons,
            "rejected": results.rejected,
            "sentence": self.sentence(),
            "data": "device" if feed.is_resident else "loader",
        }
        if isinstance(feed, LoaderFeed):
            choices["workers"] = feed.num_workers
        return choices

    def sentence(self) -> str:
        """Returns what was chosen and why, in lines for the user; an empty string where there was nothing to choose."""
        if not self.is_cuda and not self._has_tried_compiling:
            return ""
        reasons = self.results.reasons
        speeds = ", ".join(f"{1e3 * seconds:.2f} ms {mode}" for mode, seconds in self.results.step_seconds.items())
        lines = [f"steps run {self._mode()}" + (f": {speeds}" if speeds else "")]
        if self.is_cuda and not self._is_captured() and not self._is_pinned("capture"):
            lines.append(f"not captured: {reasons['capture']}")
        if self._has_tried_compiling or (self.is_cuda and self.plan.compile == "auto"):
            lines.append(("compiled: " if self.step.compiled else "not compiled: ") + reasons["compile"])
        if "convolutions" in reasons:
            lines.append(f"convolutions: {reasons['convolutions']}")
        return "\n".join(lines)
