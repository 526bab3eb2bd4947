"""A child process that imports the task: it traces the task's memory and work, or measures its steps."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from drivetrain.outcomes import Outcome, Problem
from drivetrain.plan import Plan
from drivetrain.processes.job import TaskJob, write
from drivetrain.recipe import Recipe

# The task's code counts as hung after this much CPU time of its busiest thread, or after this much wall-clock time.
WORK_LIMIT_SECONDS, WALL_LIMIT_SECONDS = 300.0, 3600.0
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


class SurveyProcess:
    """Runs `drivetrain.processes.survey` in a child process, so that a crash or a lack of memory ends only the child."""

    def __init__(self, kind: type[TaskJob], recipe: Recipe, plan: Plan, environment: dict[str, str], **fields: Any) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="drivetrain-")
        base = Path(self._folder.name)
        self._result_file, self._log_file = base / "result.json", base / "log"
        self._last_log_line = ""
        job_file = base / "job.json"
        job = kind(run=str(base), task=recipe.task, settings=recipe.settings, plan=plan, folder=os.getcwd(), **fields)
        write(job, job_file)
        command = [sys.executable, "-P", "-m", "drivetrain.processes.survey", str(job_file), str(self._result_file), str(os.getpid())]
        inherited = {k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES}
        with open(self._log_file, "wb") as log:
            self.process = subprocess.Popen(command, env=inherited | environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def wait(self, seconds: float | None) -> bool:
        """Returns whether the process has ended."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def sizes(self) -> dict[str, Any] | None:
        """Returns the sizes of the model, which the process writes first; None if they are not there yet."""
        with contextlib.suppress(OSError, ValueError):
            return json.loads(self._result_file.with_name("first.json").read_text())  # type: ignore[no-any-return]
        return None

    def work_seconds(self) -> float:
        """Returns the CPU seconds of the busiest thread. Unlike wall-clock time, they do not depend on other programs."""
        import psutil

        with contextlib.suppress(psutil.Error, OSError):
            process = psutil.Process(self.process.pid)
            processes = (process, *process.children(recursive=True))
            threads = [thread for process in processes for thread in process.threads()]
            return float(max((thread.user_time + thread.system_time for thread in threads), default=0.0))
        return 0.0

    def seems_to_hang(self, waited_seconds: float) -> bool:
        if waited_seconds > WALL_LIMIT_SECONDS:
            return True
        return waited_seconds > WORK_LIMIT_SECONDS and self.work_seconds() > WORK_LIMIT_SECONDS

    @property
    def was_killed(self) -> bool:
        """Whether another process killed it, as the system does when memory runs out."""
        return self.process.returncode == -signal.SIGKILL

    def failure(self) -> str:
        """Returns how the process ended without a result."""
        code = self.process.returncode
        if code < 0:
            return f"died of {signal.Signals(-code).name}"
        return f"exited with code {code}" + (f" ({self._last_log_line})" if self._last_log_line else "")

    def result(self) -> Any:
        """Returns the result, and removes the files; None if there is no result. Raises Problem if the task's code failed."""
        if not self._result_file.is_file():
            self._last_log_line = next(reversed(self._log_file.read_text(errors="replace").strip().splitlines()), "")[:200]
            self._folder.cleanup()
            return None
        answer = json.loads(self._result_file.read_text())
        self._folder.cleanup()
        if answer["outcome"] != Outcome.OK:
            raise Problem(answer["message"], Outcome(answer["outcome"]))
        return answer["result"]

    def finish_in_background(self, store: Callable[[Any], None]) -> None:
        """Lets the process run on; when it has ended, calls `store` with its result."""

        def wait() -> None:
            with contextlib.suppress(Problem, OSError):  # the training itself reports what is wrong
                self.wait(WALL_LIMIT_SECONDS)
                if (result := self.result()) is not None:
                    store(result)

        threading.Thread(target=wait, daemon=True).start()
