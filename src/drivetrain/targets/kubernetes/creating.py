"""Creates the objects of a run: all of them, or none, or says that it cannot know."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from drivetrain.outcomes import Problem
from drivetrain.targets.errors import Unsure
from drivetrain.targets.kubernetes.kubectl import AlreadyExists, Kubectl

NUM_QUESTIONS, PAUSE_SECONDS = 3, 2.0
"""How often, and with which pauses, the cluster is asked for a job that it may have created."""


@contextlib.contextmanager
def nothing_started() -> Iterator[None]:
    """Turns the doubt whether a request was carried out into a plain Problem: no request of the block starts a run."""
    try:
        yield
    except Unsure as problem:
        raise Problem(str(problem), problem.outcome) from None


def create_all(kubectl: Kubectl, objects: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Creates objects with their API paths, the job last; if one cannot be created, removes those before it. Returns the job.

    If the connection breaks while the job is created, it may run: then nothing is removed that it needs, unless the cluster says that there is none."""
    *others, (path, job) = objects
    created: list[str] = []
    try:
        with nothing_started():
            for other_path, value in others:
                created.append(_path_of(other_path, value))
                try:
                    kubectl.create(other_path, value)
                except AlreadyExists:
                    created.pop()
                    if value["kind"] != "ConfigMap":  # another command has brought the same code at the same time
                        raise
        return kubectl.create(path, job)
    except Unsure as problem:
        return _find_again(kubectl, _path_of(path, job), problem)
    except Problem:
        for name in reversed(created):
            with contextlib.suppress(Problem):
                kubectl.delete(name)
        raise


def _path_of(path: str, value: Mapping[str, Any]) -> str:
    return f"{path}/{value['metadata']['name']}"


def _find_again(kubectl: Kubectl, path: str, problem: Unsure) -> dict[str, Any]:
    """Returns the job that the cluster has created, although its answer was lost; else raises Unsure."""
    for number in range(NUM_QUESTIONS):
        time.sleep(PAUSE_SECONDS if number else 0.0)
        with contextlib.suppress(Problem):
            if (job := kubectl.find(path)) is not None and "deletionTimestamp" not in job["metadata"]:
                return job
    raise Unsure(
        f"{problem}: it is not known whether the cluster has taken the job; the same command with the same --name finds it, or starts it",
        problem.outcome,
    ) from None
