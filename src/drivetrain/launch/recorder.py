"""Keeps the plan in run.json true where no supervisor does: in rank 0 of a foreign launcher's workers."""

from __future__ import annotations

from typing import Any

from drivetrain.engine.log.observe import Observer
from drivetrain.runs import Run, record_plan


class Recorder(Observer):
    def __init__(self, run: Run) -> None:
        self.run = run

    def planned(self, facts: dict[str, Any]) -> None:
        record_plan(self.run, facts)
