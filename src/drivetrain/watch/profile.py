"""`--profile`: writes a trace of a few steps and a table of the slowest operations, and prints a summary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from drivetrain.engine.log.observe import Observer
from drivetrain.runs import Run

NUM_SKIPPED_STEPS = 12  # the first steps include set-up, such as compiling


class StepProfiler(Observer):
    """Profiles `steps` steps of this rank, then writes logs/profile.json (chrome://tracing, Perfetto) and logs/profile.txt."""

    def __init__(self, run: Run, steps: int, notice: Callable[[str], None], cuda: bool) -> None:
        self.run, self.steps, self.notify, self.cuda = run, steps, notice, cuda
        self._num_steps_begun = 0
        self._profiler: Any = None

    def reached(self, name: str) -> None:
        if name in ("step", "finish") and self.steps:
            self._num_steps_begun += 1
            if self._num_steps_begun == NUM_SKIPPED_STEPS:
                self._begin()
            elif self._profiler is not None and (self._num_steps_begun == NUM_SKIPPED_STEPS + self.steps or name == "finish"):
                self._end()
            elif name == "finish":
                self.notify(f"no profile: it begins with step {NUM_SKIPPED_STEPS}, and there were {self._num_steps_begun - 1}")

    def _begin(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.cuda else [])]
        self._profiler = profile(activities=activities)
        self._profiler.__enter__()

    def _end(self) -> None:
        profiler, self._profiler = self._profiler, None
        num_profiled = self._num_steps_begun - NUM_SKIPPED_STEPS
        self.steps = 0  # profile no further steps
        profiler.__exit__(None, None, None)
        trace, table = self.run.path / "logs" / "profile.json", self.run.path / "logs" / "profile.txt"
        trace.parent.mkdir(parents=True, exist_ok=True)  # workers of another launcher have no logs folder yet
        profiler.export_chrome_trace(str(trace))
        key = "self_device_time_total" if self.cuda else "self_cpu_time_total"
        rows = profiler.key_averages()
        table.write_text(rows.table(sort_by=key, row_limit=20))
        total = sum(getattr(row, key) for row in rows) or 1.0
        top = sorted(rows, key=lambda row: getattr(row, key), reverse=True)[:3]
        largest = ", ".join(f"{row.key} {100 * getattr(row, key) / total:.0f} %" for row in top)
        ms_per_step = total / num_profiled / 1e3
        self.notify(
            f"profile of {num_profiled} steps: {ms_per_step:,.2f} ms of work a step on the {'GPU' if self.cuda else 'CPU'};"
            f" most of it {largest} ({trace}, {table})"
        )
