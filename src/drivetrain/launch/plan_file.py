"""`--plan FILE`: a saved plan, an accelerate file, a DeepSpeed file or guide 004's configuration.

The command line overrides the file, and the file overrides a recipe's defaults.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from drivetrain.describe import task_settings
from drivetrain.launch.request import Request
from drivetrain.outcomes import Problem
from drivetrain.plan.imported import Imported, read
from drivetrain.recipe import Recipe
from drivetrain.watch.screen import Screen


def apply_plan_file(recipes: list[Recipe], request: Request, screen: Screen) -> tuple[list[Recipe], Request]:
    """Returns the recipes and the request, completed from the plan file; unchanged if there is none."""
    if request.plan_file is None:
        return recipes, request
    path = request.plan_file
    imported = read(path)
    for key, why in imported.unused:
        if imported.kind != "plan":
            screen.notice(f"{path}: {key} is not used: {why}")
    for note in imported.notes:
        screen.notice(f"{path}: {note}")
    return [_add_to_recipe(recipe, imported, path) for recipe in recipes], _add_to_request(request, imported)


def _add_to_recipe(recipe: Recipe, imported: Imported, path: str) -> Recipe:
    if imported.task and imported.task != recipe.task.label:
        advice = "train that task" if imported.plan is None else f"make one with drivetrain plan {recipe.task.label} --json"
        raise Problem(f"--plan {path} is for {imported.task}, not for {recipe.task.label}: {advice}")
    settings, origin = dict(recipe.settings), dict(recipe.origin)
    known = task_settings(recipe.task)
    for key, value in imported.settings.items():
        if key not in settings:
            continue
        if origin[key] != "command line":
            settings[key], origin[key] = known[key].coerce(value), path
            continue
        is_undecided = key == "precision" and settings[key] == "auto"
        if imported.kind == "plan" and settings[key] != value and not is_undecided:
            raise Problem(f"--plan {path} was made with {key}={value}, not with {key}={settings[key]}: make a new plan")
    return replace(recipe, settings=settings, origin=origin, pins=imported.pins | recipe.pins)


def _add_to_request(request: Request, imported: Imported) -> Request:
    added: dict[str, Any] = {}
    for key, value in imported.request.items():
        requested = getattr(request, key)
        if requested is None or (key == "nodes" and requested == 1):
            added[key] = value
    return replace(request, **added, saved_plan=imported.plan)
