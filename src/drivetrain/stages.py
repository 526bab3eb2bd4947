"""Stages of a recipe: the settings that each takes, and `${STAGE.path}`, the run directory of an earlier one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from drivetrain.outcomes import Problem
from drivetrain.settings import Setting, as_text, nearest

REFERENCE = re.compile(r"\$\{([^{}]*)\}")
PLAN = "plan."
"""Begins the keys of the plan's choices, so that no stage has this name."""


def share_out(
    values: Mapping[str, object], names: Sequence[str], settings: Sequence[Mapping[str, Setting]], label: str
) -> list[dict[str, object]]:
    """Returns the values of each stage: `STAGE.key` is for one stage, `plan.key` for all, and `key` for those whose task has that setting."""
    shared: list[dict[str, object]] = [{} for _ in names]
    own: list[dict[str, object]] = [{} for _ in names]
    for key, value in values.items():
        if "." in key and not key.startswith(PLAN):
            stage = _stage_of(key, names, label)
            own[names.index(stage)][key.removeprefix(f"{stage}.")] = value
            continue
        takers = [part for part, known in zip(shared, settings, strict=True) if key.startswith(PLAN) or key in known]
        if not takers:
            raise Problem(
                f"no stage of {label} has a setting {key[:80]!r}{nearest(key, {k for known in settings for k in known})} (all: --help)"
            )
        for part in takers:
            part[key] = value
    return [everywhere | here for everywhere, here in zip(shared, own, strict=True)]


def _stage_of(key: str, names: Sequence[str], label: str) -> str:
    """Returns the stage that a key such as `pretrain.epochs` names."""
    matches = [name for name in names if key.startswith(f"{name}.")]
    if not matches:
        name = key.rpartition(".")[0].removesuffix(".plan")
        raise Problem(f"{key}: {label} has no stage {name!r}{nearest(name, names)} (its stages: {', '.join(names)})")
    stage = max(matches, key=len)  # a name may contain a dot
    if names.count(stage) > 1:
        raise Problem(f"{key}: {label} has several stages {stage!r}: give each a name of its own")
    return stage


def references_in(settings: Mapping[str, object]) -> dict[str, Any]:
    """Returns the settings whose text contains `${...}`."""
    return {name: value for name, value in settings.items() if isinstance(value, (str, list)) and REFERENCE.search(as_text(value))}


def check_references(references: Mapping[str, object], earlier: Sequence[str], label: str) -> None:
    """Raises Problem unless each `${...}` is `${STAGE.path}` of an earlier stage."""
    for key, value in references.items():
        for text in REFERENCE.findall(as_text(value)):
            name, _, field = text.rpartition(".")
            if field != "path" or not name:
                raise Problem(f"{label}: {key}: ${{{text}}} is unknown: write ${{STAGE.path}}, the run directory of an earlier stage")
            if name not in earlier:
                choices = f"earlier stages: {', '.join(earlier)}" if earlier else "no stage comes before"
                raise Problem(f"{label}: {key}: ${{{text}}} names no earlier stage{nearest(name, earlier)} ({choices})")


def with_paths(value: Any, paths: Mapping[str, Path]) -> Any:
    """Returns a setting's value with the stages' run directories in place of `${STAGE.path}`."""
    if isinstance(value, list):
        return [with_paths(item, paths) for item in value]
    return REFERENCE.sub(lambda match: str(paths[match[1].removesuffix(".path")]), value) if isinstance(value, str) else value
