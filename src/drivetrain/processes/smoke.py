"""`--smoke`: limits a task to a few samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from drivetrain.processes.job import SmokeJob

if TYPE_CHECKING:
    from drivetrain.plan import Plan
    from drivetrain.task import Task

SMOKE_STEPS, SMOKE_BATCH = 4, 16


def smoke_task(task: Task, job: SmokeJob) -> tuple[Task, Plan]:
    """Returns the task and plan of a smoke run: a few samples of a data set, or two full epochs of a Source, which cannot be shortened."""
    from drivetrain.data import Source
    from drivetrain.task_ref import instantiate

    full_task = instantiate(job.task, job.settings | {"global_batch": job.full_global_batch, "steps": None, "epochs": 2})
    if isinstance(full_task.train_data(), Source):
        return full_task, job.full_plan
    _limit_data(task, job.max_samples)
    return task, job.plan


def _limit_data(task: Any, max_samples: int) -> None:
    """Limits the task's data sets to their first samples."""
    from torch.utils.data import Subset

    from drivetrain.data import Source, Tensors

    def limited(make_data: Callable[[], Any]) -> Callable[[], Any]:
        def few_samples() -> Any:
            data = make_data()
            if data is None or isinstance(data, Source) or not hasattr(data, "__len__"):
                return data
            if isinstance(data, Tensors):
                columns = [column[:max_samples] for column in data.columns]
                return Tensors(*columns) if data.names is None else Tensors(**dict(zip(data.names, columns, strict=True)))
            return Subset(data, range(min(max_samples, len(data))))

        return few_samples

    task.train_data, task.eval_data = limited(task.train_data), limited(task.eval_data)
