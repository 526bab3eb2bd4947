"""drivetrain: write the training code once, run it on one CPU or many GPUs, and never lose a run."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from drivetrain.api import evaluate, load, resume, train
    from drivetrain.data import Picture, Rand, Source, Tensors
    from drivetrain.outcomes import Outcome, Problem
    from drivetrain.runs import Run
    from drivetrain.settings import Duration, Range
    from drivetrain.task import Task
    from drivetrain.tasks import datasets

__all__ = [
    "Duration", "Outcome", "Picture", "Problem", "Rand", "Range", "Run", "Source", "Task", "Tensors", "datasets", "evaluate", "load",
    "resume", "train",
]  # fmt: skip

_MODULE_OF = {
    "Task": "task", "Source": "data", "Tensors": "data", "Rand": "data", "Picture": "data", "Range": "settings", "Duration": "settings",
    "Run": "runs", "Problem": "outcomes", "Outcome": "outcomes", "train": "api", "resume": "api",
    "evaluate": "api", "load": "api",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Imports a public name on first use, so that the package imports (and the command line starts) fast."""
    if name == "datasets":
        return importlib.import_module("drivetrain.tasks.datasets")
    if name in _MODULE_OF:
        return getattr(importlib.import_module(f"drivetrain.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module 'drivetrain' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
