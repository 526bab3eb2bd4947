"""`--plan FILE`: what a saved plan, an accelerate or a DeepSpeed file asks for, under what the user says here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from drivetrain.launch.start import Request
from drivetrain.outcomes import Problem
from drivetrain.plan.imported import Imported, read
from drivetrain.recipe import Recipe
from drivetrain.watch.screen import Screen


def apply(path: str, recipes: list[Recipe], request: Request, screen: Screen) -> tuple[list[Recipe], Request]:
    """Recipes and request with the file's wishes; the command line wins over the file, the file over a recipe's defaults."""
    found = read(path)
    for key, why in found.unused:
        if found.kind != "plan":
            screen.notice(f"{path}: {key} is not used: {why}")
    for note in found.notes:
        screen.notice(f"{path}: {note}")
    return [_recipe(recipe, found, path) for recipe in recipes], _request(request, found)


def _recipe(recipe: Recipe, found: Imported, path: str) -> Recipe:
    if found.task and found.task != recipe.task.label:
        raise Problem(
            f"--plan {path} is for {found.task}, not for {recipe.task.label}: make one with drivetrain plan {recipe.task.label} --json"
        )
    settings, origin = dict(recipe.settings), dict(recipe.origin)
    for key, value in found.settings.items():
        if key not in settings:
            continue
        if (
            origin[key] == "command line"
            and found.kind == "plan"
            and settings[key] != value
            and not (key == "precision" and settings[key] == "auto")
        ):
            raise Problem(f"--plan {path} was made with {key}={value}: it does not go with {key}={settings[key]}; make it anew")
        if origin[key] != "command line":
            settings[key], origin[key] = value, path
    return replace(recipe, settings=settings, origin=origin, pins=found.pins | recipe.pins)


def _request(request: Request, found: Imported) -> Request:
    given: dict[str, Any] = {}
    for key, value in found.request.items():
        now = getattr(request, key)
        if now is None or (key == "nodes" and now == 1):
            given[key] = value
    return replace(request, **given, saved=found.plan)
