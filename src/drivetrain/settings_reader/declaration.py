"""Reads a task's declaration from the source text of its class, without running it."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivetrain.hooks import TUNE_FACTS
from drivetrain.outcomes import Problem
from drivetrain.settings import MISSING, PACKAGE, Setting, UnknownName, nearest
from drivetrain.settings_reader.fields import Field, annotated_fields, inherit_range, plain_assignments, setting_type
from drivetrain.settings_reader.modules import (
    ClassDefinition,
    Module,
    base_classes,
    derives_from_task,
    find_class,
    imported_module,
    public_names,
    read_module,
)

WITHOUT_SETTINGS = ("object", "Generic", "ABC", "abc.ABC")
"""Base classes that define no settings."""
UNKNOWN = object()
"""A value that the source text does not show: only importing the file can tell it."""


@dataclass
class TaskDeclaration:
    """A task's name, docstring and settings, read from the source text of its class."""

    name: str
    doc: str
    settings: dict[str, Setting]
    complete: bool
    """Whether the text shows all settings; not with computed defaults or bases in unreadable modules."""
    tune_facts: dict[str, Any]
    """The class's own or inherited values of TUNE_FACTS; MISSING if no class sets one, or UNKNOWN."""


def read_declaration(path: Path, class_name: str | None = None) -> TaskDeclaration:
    """Reads a task class of a file; raises Problem if the file has none, or has several and `class_name` is None."""
    definition, name = _find_task(read_module(path), class_name)
    tune_facts = {fact: _read_class_value(definition, fact) for fact in TUNE_FACTS}
    declaration = TaskDeclaration(name, ast.get_docstring(definition.node) or "", {}, True, tune_facts)
    _add_class(declaration, definition)
    return declaration


def _find_task(module: Module, class_name: str | None) -> tuple[ClassDefinition, str]:
    """Returns the task's class and its name in this module."""
    own = [name for name in module.classes if derives_from_task(ClassDefinition(module, name))]
    imported = _imported_tasks(module)
    if class_name is None:
        class_name = _only_task(module, own, imported)
    if class_name in own:
        return ClassDefinition(module, class_name), class_name
    if class_name in module.classes:
        raise Problem(f"{class_name} in {module.path} is no task: derive it from drivetrain.Task")
    if class_name in imported:
        return imported[class_name], class_name
    hint = nearest(class_name, own) or (f" (it has {', '.join(own)})" if own else "")
    raise Problem(f"{module.path} has no class {class_name}{hint}")


def _only_task(module: Module, own: list[str], imported: dict[str, ClassDefinition]) -> str:
    """Returns the file's only task. Ignores imported tasks if it defines its own, and guessed ones if there are certain ones."""
    tasks = [name for name in own if not name.startswith("_")] or list(imported)
    certain = [name for name in tasks if name in imported or derives_from_task(ClassDefinition(module, name), guess=False)]
    tasks = certain or tasks
    if not tasks:
        raise Problem(f"{module.path} defines no task: write a class that derives from drivetrain.Task")
    if len(tasks) > 1:
        raise Problem(f"{module.path} defines {len(tasks)} tasks: name one, as {module.path}:{tasks[-1]} (of {', '.join(tasks)})")
    return tasks[0]


def _imported_tasks(module: Module) -> dict[str, ClassDefinition]:
    """Returns the tasks that a file imports from its project, by their names in the file: they count as tasks of the file."""
    names = [
        name
        for name, (module_name, original_name) in module.imports.items()
        if original_name and imported_module(module, module_name) is not None
    ]
    for star_import in module.star_imports:
        if (other := imported_module(module, star_import)) is not None:
            names += public_names(other)
    tasks = {}
    for name in names:
        definition = None if name.startswith("_") else find_class(module, ast.Name(name, ast.Load()))
        if definition is not None and not definition.module.path.is_relative_to(PACKAGE) and derives_from_task(definition):
            tasks[name] = definition
    return tasks


def _add_class(declaration: TaskDeclaration, definition: ClassDefinition) -> None:
    """Adds the settings of the bases, then those of the class itself."""
    for node, base in reversed(list(base_classes(definition))):
        if base is not None:
            _add_class(declaration, base)
        elif ast.unparse(node) not in WITHOUT_SETTINGS:
            declaration.complete = False
    for field in annotated_fields(definition.node):
        _add_field(declaration, definition.name, field)
    for name, value in plain_assignments(definition.node):
        if old := declaration.settings.get(name):
            try:
                declaration.settings[name] = Setting(name, old.type, ast.literal_eval(value), old.doc, definition.name)
            except ValueError:
                declaration.complete = False


def _add_field(declaration: TaskDeclaration, owner: str, field: Field) -> None:
    try:
        kind = setting_type(owner, field.name, field.annotation)
    except UnknownName:
        kind, declaration.complete = str, False  # an alias: importing the file tells its type
    if kind is None:
        return
    try:
        default = MISSING if field.default is None else ast.literal_eval(field.default)
    except ValueError:
        default, declaration.complete = ast.unparse(field.default) if field.default else MISSING, False
    inherited = declaration.settings.get(field.name)
    doc = field.doc or (inherited.doc if inherited else "")
    declaration.settings[field.name] = Setting(field.name, inherit_range(kind, inherited), default, doc, owner)


def _read_class_value(definition: ClassDefinition, name: str) -> Any:
    """Returns the value that a class or its bases assign to a name; MISSING if none does, or UNKNOWN."""
    values = dict(plain_assignments(definition.node)) | {f.name: f.default for f in annotated_fields(definition.node) if f.default}
    if expression := values.get(name):
        try:
            return ast.literal_eval(expression)
        except (ValueError, TypeError):
            return UNKNOWN
    for node, base in base_classes(definition):
        if base is not None and not base.is_task:
            value = _read_class_value(base, name)
        else:
            value = MISSING if base is not None or ast.unparse(node) in WITHOUT_SETTINGS else UNKNOWN
        if value is not MISSING:
            return value
    return MISSING
