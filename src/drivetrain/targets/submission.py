"""What is handed to a target: the run's name and request, its code, its environment and the names of its secrets."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from drivetrain.launch.request import Request
from drivetrain.outcomes import Problem
from drivetrain.recipe import Recipe, recipe_words
from drivetrain.runs import Run
from drivetrain.targets.archive import Archive, make_archive
from drivetrain.targets.consent import Consent
from drivetrain.targets.environment import EnvironmentLock
from drivetrain.task_ref import BUILT_IN, TaskRef

RECIPE, PLAN = "recipe.yaml", "plan.json"  # files of the code archive
FIRST_PORT, NUM_PORTS = 20_000, 10_000
MAX_PROJECT_NAME = 40
COMMON_SECRETS = ("WANDB_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "MLFLOW_TRACKING_TOKEN", "COMET_API_KEY", "NEPTUNE_API_TOKEN")
"""Environment variables that are handed to every run, if they are set here."""


@dataclass(frozen=True)
class Submission:
    run: Run
    """The run's folder on this machine."""
    name: str
    """The run's name there: the one it had when it was submitted first."""
    request: Request
    """What to run there: `target` is "" where the code archive has the task."""
    task: str
    """A built-in task's name, or the path of the task or recipe in the code archive."""
    code: Archive | None
    """The user's code; None for a built-in task."""
    lock: EnvironmentLock
    project: str
    """The run's own folder there, as `new_project` names it."""
    secrets: tuple[str, ...] = ()
    """Names of environment variables."""
    token: str = ""
    """The secret with which the machines of the run find each other; never written."""
    consent: Consent | None = None
    """The user's consent to the cost of the machines that the target starts for the run."""

    @property
    def port(self) -> int:
        """The rendezvous port: the same for every command of this run."""
        return FIRST_PORT + int(hashlib.sha256(f"{self.project}/{self.name}".encode()).hexdigest(), 16) % NUM_PORTS

    def words(
        self, python: str, run_dir: str, code_dir: str, rendezvous: str | None = None, node_rank: int | None = None, bucket: str | None = None,
        **changes: Any,
    ) -> list[str]:  # fmt: skip
        """Returns the command of one machine. `bucket`: the run's address in one, if it has one; `run_dir` is then its folder there."""
        task = self.task if self.task in BUILT_IN else f"{code_dir}/{self.task}"
        if self.request.verb == "resume":
            request = replace(self.request, target=bucket or run_dir, **changes)
        else:
            plan_file = f"{code_dir}/{PLAN}" if self.request.plan_file is not None else None
            meeting: dict[str, Any] = {"rendezvous": rendezvous, "node_rank": node_rank, "bucket": bucket}
            request = replace(self.request, target=task, run_dir=run_dir, plan_file=plan_file, **meeting, **changes)
        return [python, "-P", "-m", "drivetrain", *request.command()]


def new_project() -> str:
    """Returns a name for the folder of a new run there, which no other run has: neither one of the same name in another folder here, nor
    one that was deleted here."""
    return _project(secrets.token_hex(5))


def planned_project() -> str:
    """Returns the name that --dry-run shows: always the same."""
    return _project("0" * 10)


def _project(suffix: str) -> str:
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", Path.cwd().name).strip("-")[:MAX_PROJECT_NAME]
    return f"{name or 'project'}-{suffix}"


def make_code(recipes: Sequence[Recipe], request: Request) -> tuple[str, tuple[str, ...], Archive | None]:
    """Returns the task's name or its path in the archive, its settings as key=value words, and the archive."""
    files: dict[str, bytes] = {}
    if request.plan_file is not None:
        files[PLAN] = Path(request.plan_file).read_bytes()
    tasks = [_add_task(recipe.task, files) for recipe in recipes]
    if len(recipes) == 1:
        return tasks[0], tuple(recipe_words(recipes[0])), make_archive(files) if files else None
    stages: list[dict[str, Any]] = []
    for task, recipe in zip(tasks, recipes, strict=True):
        stages.append({"name": recipe.stage, "task": task, **recipe.chosen(), **({"plan": recipe.pins} if recipe.pins else {})})
    files[RECIPE] = yaml.safe_dump({"task": tasks[0], "stages": stages}, sort_keys=False).encode()
    return RECIPE, (), make_archive(files)


def _add_task(task: TaskRef, files: dict[str, bytes]) -> str:
    """Adds a task's code to the files; returns how a command line names the task there."""
    if task.built_in:
        return task.label
    if task.pickled:
        raise Problem("a task that was defined in a notebook cannot travel: put its class into a file")
    for path, file in task.modules().items():
        content = file.read_bytes()
        if files.get(path, content) != content:
            raise Problem(f"two stages have different files {path}: put their tasks into one folder")
        files[path] = content
    return f"{task.path_in_run}:{task.class_name}"


def present_secrets(names: Sequence[str], environment: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the names of the secrets to hand over; raises Problem if one that the target names is not set here."""
    for name in names:
        if name not in environment:
            raise Problem(f"secrets: {name} is not set here: export {name}=..., or remove it from the target")
    return tuple(dict.fromkeys([*names, *(name for name in COMMON_SECRETS if name in environment)]))
