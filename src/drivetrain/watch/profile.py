"""A profile of a few steps: a trace for a browser, the twenty dearest operations, and what they say."""

from __future__ import annotations

from typing import Any

from drivetrain.engine.log.observe import Observer
from drivetrain.runs import Run

AFTER = 12  # steps that come before: the first ones set things up


class Profile(Observer):
    """Watches `steps` steps of this rank, then writes logs/profile.json (chrome://tracing, Perfetto) and logs/profile.txt."""

    def __init__(self, run: Run, steps: int, say: Any, cuda: bool) -> None:
        self.run, self.steps, self.say, self.cuda = run, steps, say, cuda
        self._seen = 0
        self._profiler: Any = None

    def moment(self, name: str) -> None:
        if name in ("step", "finish") and self.steps:
            self._seen += 1
            if self._seen == AFTER:
                self._begin()
            elif self._profiler is not None and (self._seen == AFTER + self.steps or name == "finish"):
                self._end()
            elif name == "finish":
                self.say(f"no profile: it begins with step {AFTER}, and there were {self._seen - 1}")

    def _begin(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.cuda else [])]
        self._profiler = profile(activities=activities)
        self._profiler.__enter__()

    def _end(self) -> None:
        profiler, self._profiler, taken = self._profiler, None, self._seen - AFTER
        self.steps = 0
        profiler.__exit__(None, None, None)
        trace, table = (self.run.path / "logs" / f"profile.{kind}" for kind in ("json", "txt"))
        trace.parent.mkdir(parents=True, exist_ok=True)  # another launcher may keep its logs elsewhere
        profiler.export_chrome_trace(str(trace))
        key = "self_device_time_total" if self.cuda else "self_cpu_time_total"
        rows = profiler.key_averages()
        table.write_text(rows.table(sort_by=key, row_limit=20))
        whole = sum(getattr(row, key) for row in rows) or 1.0
        top = sorted(rows, key=lambda row: getattr(row, key), reverse=True)[:3]
        told = ", ".join(f"{row.key} {100 * getattr(row, key) / whole:.0f} %" for row in top)
        per_step = whole / taken / 1e3
        self.say(
            f"profile of {taken} steps: {per_step:,.2f} ms of work a step on the {'GPU' if self.cuda else 'CPU'}; most of it {told} ({trace}, {table})"
        )
