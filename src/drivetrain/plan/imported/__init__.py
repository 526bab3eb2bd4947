"""Files for `--plan`: a saved plan, accelerate's default_config.yaml, DeepSpeed's JSON. Every key is taken or named."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from drivetrain.outcomes import Problem
from drivetrain.plan import Plan
from drivetrain.plan.imported import accelerate, deepspeed
from drivetrain.plan.imported.keys import Draft, Key
from drivetrain.structured import parse_json, parse_yaml, read_text

KINDS = "a plan (drivetrain plan TASK --json, or a run.json), accelerate's default_config.yaml, or a DeepSpeed JSON"
NEEDED = ("strategy", "device", "world_size", "global_batch", "micro_batch", "accumulation", "precision")


@dataclass(frozen=True)
class Imported:
    """What a file asks for."""

    kind: Literal["plan", "accelerate", "deepspeed"]
    plan: Plan | None = None
    task: str = ""
    """The task that a saved plan is for, where its file says one."""
    pins: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    request: dict[str, Any] = field(default_factory=dict)
    used: tuple[tuple[str, str], ...] = ()
    """Key of the file -> what it became: plan.KEY, a setting, or a flag."""
    unused: tuple[tuple[str, str], ...] = ()
    """Key of the file -> why nothing came of it."""
    notes: tuple[str, ...] = ()


def read(path: str | Path) -> Imported:
    """The file's wishes, whichever of the three kinds it is."""
    path = Path(path).expanduser()
    values = _load(path)
    inside = values["plan"] if isinstance(values.get("plan"), Mapping) else values
    if isinstance(values.get("task"), str) and "world_size" not in inside:
        raise Problem(f"{path} is a recipe: drivetrain train {path}; --plan takes {KINDS}")
    if inside is not values or {"strategy", "world_size"} <= values.keys():
        return _saved(path, values)
    draft = Draft(str(path))
    theirs = {"accelerate": _known(values, accelerate.KEYS), "deepspeed": _known(values, deepspeed.KEYS)}
    kind: Literal["accelerate", "deepspeed"] = "accelerate" if theirs["accelerate"] >= theirs["deepspeed"] else "deepspeed"
    if not theirs[kind]:
        raise Problem(f"{path} is no file that --plan knows: it takes {KINDS}")
    if kind == "deepspeed":
        deepspeed.take(draft, values)
    else:
        name = accelerate.deepspeed_file(values)
        accelerate.take(draft, values, _load(path.parent / Path(name).expanduser()) if name else None, name)
    return Imported(kind, None, "", draft.pins, draft.settings, draft.request, tuple(draft.used), tuple(draft.unused), tuple(draft.notes))


def _known(values: Mapping[Any, Any], keys: list[Key]) -> int:
    """How many of a file's keys are those of a program; a group counts as one."""
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


# --- plans of drivetrain's own -----------------------------------------------------------------


def _saved(path: Path, values: Mapping[Any, Any]) -> Imported:
    around = isinstance(values.get("plan"), Mapping)
    told: Mapping[str, Any] = values["plan"] if around else values
    version = values.get("format", told.get("format", 1))
    if version != 1:
        raise Problem(f"{path} is a plan of format {version}, and this version reads 1: make it anew with drivetrain plan TASK --json")
    missing = [key for key in NEEDED if key not in told]
    if missing:
        raise Problem(f"{path} is no whole plan, it lacks {', '.join(missing)}: make it anew with drivetrain plan TASK --json")
    known = {f.name for f in fields(Plan)}
    try:
        plan = Plan.from_json(told)
    except Problem as problem:
        raise Problem(f"{path}: {problem}") from None
    _check(path, plan)
    why = "not of the plan itself" if around else "no key of a plan"
    unused = [(str(key), "no key of a plan") for key in told if key not in known and key not in ("format", "task")]
    outside = [(str(key), why) for key in values if key not in ("plan", "format", "task")] if around else []
    return Imported(
        "plan",
        plan,
        _task(values),
        {},
        {"global_batch": plan.global_batch, "precision": plan.precision, "deterministic": plan.deterministic},
        {"procs": plan.world_size // plan.nodes, "nodes": plan.nodes, "device": plan.device},
        tuple((key, f"plan.{key}") for key in told if key in known),
        tuple(unused + outside),
    )


def _task(values: Mapping[Any, Any]) -> str:
    """The label of a plan's task, as run.json or `plan --json` has it."""
    recipe = values.get("recipe")
    task = recipe.get("task") if isinstance(recipe, Mapping) else values.get("task", "")
    return str(task.get("label", "") if isinstance(task, Mapping) else task or "")


def _check(path: Path, plan: Plan) -> None:
    """A plan that was edited by hand must still add up."""
    if plan.world_size % plan.nodes:
        raise Problem(f"{path}: {plan.world_size} processes do not divide by {plan.nodes} machines")
    share = -(-plan.global_batch // plan.world_size)
    if -(-share // plan.micro_batch) != plan.accumulation:
        raise Problem(
            f"{path}: micro_batch {plan.micro_batch} x accumulation {plan.accumulation} x {plan.world_size} processes do not make"
            f" global_batch {plan.global_batch}: accumulation must be {-(-share // plan.micro_batch)}"
        )


def mapping_table() -> str:
    """What every key of accelerate and DeepSpeed becomes, for the docs."""
    lines = []
    for title, keys in (("accelerate's default_config.yaml", accelerate.KEYS), ("DeepSpeed's JSON", deepspeed.KEYS)):
        lines += [f"| {title} | becomes |", "|---|---|", *(f"| `{key.name}` | {key.becomes} |" for key in keys), ""]
    return "\n".join(lines)
