"""Reads a file for `--plan`: takes its path, returns `Imported`. Every key of the file is used or gets a reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from drivetrain.outcomes import Problem
from drivetrain.plan.imported import accelerate, deepspeed, guide
from drivetrain.plan.imported.keys import Draft, Key
from drivetrain.plan.plan import Plan
from drivetrain.structured import parse_json, parse_yaml, read_text

KINDS = "a plan (drivetrain plan TASK --json, or a run.json), accelerate's default_config.yaml, a DeepSpeed JSON, or guide 004's YAML"
REQUIRED_KEYS = ("strategy", "device", "world_size", "global_batch", "micro_batch", "accumulation", "precision")


FileKind = Literal["plan", "accelerate", "deepspeed", "guide"]


@dataclass(frozen=True)
class Imported:
    """The result of reading a file: a saved plan, or pins, settings and flags."""

    kind: FileKind
    plan: Plan | None = None
    task: str = ""
    """The label of the task that the file is for, if it says so."""
    pins: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    request: dict[str, Any] = field(default_factory=dict)
    used: tuple[tuple[str, str], ...] = ()
    """(key of the file, what it became: plan.KEY, a setting, or a flag)."""
    unused: tuple[tuple[str, str], ...] = ()
    """(key of the file, why it is not used)."""
    notes: tuple[str, ...] = ()


def read(path: str | Path) -> Imported:
    path = Path(path).expanduser()
    values = _load(path)
    plan = values["plan"] if isinstance(values.get("plan"), Mapping) else values
    if isinstance(values.get("task"), str) and "world_size" not in plan:
        raise Problem(f"{path} is a recipe: drivetrain train {path}; --plan takes {KINDS}")
    if plan is not values or {"strategy", "world_size"} <= values.keys():
        return _read_saved_plan(path, values)
    draft = Draft(str(path))
    if guide.is_guide(values):
        name = guide.deepspeed_file(values)
        guide.read_into(draft, values, _load(_named_file(path, name)) if name else None, name)
        return _imported("guide", draft, guide.TASK)
    num_known = {"accelerate": _num_known_keys(values, accelerate.KEYS), "deepspeed": _num_known_keys(values, deepspeed.KEYS)}
    kind: FileKind = "accelerate" if num_known["accelerate"] >= num_known["deepspeed"] else "deepspeed"
    if not num_known[kind]:
        raise Problem(f"{path} is no file that --plan knows: it takes {KINDS}")
    if kind == "deepspeed":
        deepspeed.read_into(draft, values)
    else:
        name = accelerate.deepspeed_file(values)
        accelerate.read_into(draft, values, _load(path.parent / Path(name).expanduser()) if name else None, name)
    return _imported(kind, draft)


def _imported(kind: FileKind, draft: Draft, task: str = "") -> Imported:
    return Imported(
        kind, task=task, pins=draft.pins, settings=draft.settings, request=draft.request,
        used=tuple(draft.used), unused=tuple(draft.unused), notes=tuple(draft.notes),
    )  # fmt: skip


def _named_file(path: Path, name: str) -> Path:
    """Returns a file that another one names: relative to its folder, or to a folder above, as from a project's top."""
    places = [folder / Path(name).expanduser() for folder in path.absolute().parents]
    return next((place for place in places if place.is_file()), places[0])


def _num_known_keys(values: Mapping[Any, Any], keys: list[Key]) -> int:
    """Returns how many top-level keys of a file belong to a program; a group counts as one."""
    groups = {key.name.partition(".")[0] for key in keys if "." in key.name}
    names = groups | {key.name for key in keys}
    return sum(key in (groups if isinstance(value, Mapping) and value else names) for key, value in values.items())


def _load(path: Path) -> dict[Any, Any]:
    try:
        text = read_text(path, "--plan")
    except Problem as problem:
        raise Problem(f"{problem}; it takes {KINDS}") from None
    is_json = path.suffix == ".json" or text.lstrip()[:2] in ('{"', "{\n")
    values = parse_json(text, path) if is_json else parse_yaml(text, path)
    if not isinstance(values, dict):
        raise Problem(f"{path} holds a {type(values).__name__}, not a mapping of keys; --plan takes {KINDS}")
    return values


# --- saved plans --------------------------------------------------------------------------------


def _read_saved_plan(path: Path, values: Mapping[Any, Any]) -> Imported:
    """Reads a plan, or a file such as run.json with a plan under the key `plan`."""
    is_nested = isinstance(values.get("plan"), Mapping)
    saved: Mapping[str, Any] = values["plan"] if is_nested else values
    version = values.get("format", saved.get("format", 1))
    if version != 1:
        raise Problem(f"{path} is a plan of format {version}, and this version reads 1: create a new one with drivetrain plan TASK --json")
    missing = [key for key in REQUIRED_KEYS if key not in saved]
    if missing:
        raise Problem(f"{path} is no complete plan, it lacks {', '.join(missing)}: create a new one with drivetrain plan TASK --json")
    try:
        plan = Plan.from_json(saved)
    except Problem as problem:
        raise Problem(f"{path}: {problem}") from None
    _check_sizes(path, plan)
    known = {f.name for f in fields(Plan)}
    unused = [(str(key), "no key of a plan") for key in saved if key not in known and key not in ("format", "task")]
    unused += [(str(key), "not of the plan itself") for key in values if is_nested and key not in ("plan", "format", "task")]
    return Imported(
        "plan",
        plan,
        task=_task_label(values),
        settings={"global_batch": plan.global_batch, "precision": plan.precision, "deterministic": plan.deterministic},
        request={"procs": plan.world_size // plan.nodes, "nodes": plan.nodes, "device": plan.device},
        used=tuple((key, f"plan.{key}") for key in saved if key in known),
        unused=tuple(unused),
    )


def _task_label(values: Mapping[Any, Any]) -> str:
    """Returns the label of a plan's task, from run.json or from `plan --json`."""
    recipe = values.get("recipe")
    task = recipe.get("task") if isinstance(recipe, Mapping) else values.get("task", "")
    return str(task.get("label", "") if isinstance(task, Mapping) else task or "")


def _check_sizes(path: Path, plan: Plan) -> None:
    """Raises Problem if the batch sizes of a plan do not agree, as after an edit by hand."""
    if plan.world_size % plan.nodes:
        raise Problem(f"{path}: {plan.world_size} processes do not divide by {plan.nodes} machines")
    share = -(-plan.global_batch // plan.world_size)
    if -(-share // plan.micro_batch) != plan.accumulation:
        raise Problem(
            f"{path}: micro_batch {plan.micro_batch} x accumulation {plan.accumulation} x {plan.world_size} processes do not make"
            f" global_batch {plan.global_batch}: accumulation must be {-(-share // plan.micro_batch)}"
        )


def mapping_table() -> str:
    """Returns Markdown tables for the docs: every key of accelerate, DeepSpeed and guide 004, and what it becomes."""
    lines = []
    tables = (("accelerate's default_config.yaml", accelerate.KEYS), ("DeepSpeed's JSON", deepspeed.KEYS), ("guide 004's YAML", guide.KEYS))
    for title, keys in tables:
        lines += [f"| {title} | becomes |", "|---|---|", *(f"| `{key.name}` | {key.becomes} |" for key in keys), ""]
    return "\n".join(lines)
