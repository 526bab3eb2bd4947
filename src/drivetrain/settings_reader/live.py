"""Reads settings from a live class."""

from __future__ import annotations

import ast
import inspect
import linecache
import textwrap
import types
import typing
from collections.abc import Mapping
from typing import Any

from drivetrain.settings import MISSING, Setting, UnknownName, read_type, type_text
from drivetrain.settings_reader.fields import annotated_fields, inherit_range, setting_type

_settings_of_classes: dict[type, dict[str, Setting]] = {}


def settings_of_class(cls: type) -> dict[str, Setting]:
    """Returns the settings of a class and its bases, with their docstrings from the source text."""
    if cls not in _settings_of_classes:
        _settings_of_classes[cls] = _read_settings(cls)
    return _settings_of_classes[cls]


def _read_settings(cls: type) -> dict[str, Setting]:
    settings: dict[str, Setting] = {}
    for owner in reversed(cls.__mro__):
        annotations = owner.__dict__.get("__annotations__", {})
        docs = field_docs(owner) if annotations else {}
        for name in annotations:
            inherited = settings.get(name)
            kind = _type_of_field(owner, name)
            if kind is not None:
                doc = docs.get(name) or (inherited.doc if inherited else "")
                settings[name] = Setting(name, inherit_range(kind, inherited), owner.__dict__.get(name, MISSING), doc, owner.__name__)
        for name, old in settings.items():
            if name in owner.__dict__ and name not in annotations:
                settings[name] = Setting(name, old.type, owner.__dict__[name], old.doc, owner.__name__)
    return settings


def _type_of_field(owner: type, name: str) -> Any | None:
    annotation = owner.__dict__["__annotations__"][name]
    try:
        return setting_type(owner.__name__, name, annotation if isinstance(annotation, str) else type_text(annotation))
    except UnknownName:  # an alias in the class's module
        return setting_type(owner.__name__, name, type_text(typing.get_type_hints(owner, include_extras=True)[name]))


def class_text(cls: type) -> str | None:
    """Returns the source text of a live class, which may be in a notebook's cell; None if there is none."""
    try:
        return textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError):
        pass
    for member in vars(cls).values():  # in a notebook, functions have the file name by which linecache stores the cell's text
        if isinstance(member, types.FunctionType):
            text = "".join(linecache.getlines(member.__code__.co_filename))
            try:
                nodes = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.ClassDef) and n.name == cls.__name__]
            except SyntaxError:
                return None
            return ast.get_source_segment(text, nodes[-1]) if nodes else None
    return None


def field_docs(owner: type) -> dict[str, str]:
    text = class_text(owner)
    if text is None:
        return {}
    return {field.name: field.doc for field in annotated_fields(typing.cast(ast.ClassDef, ast.parse(text).body[0]))}


def settings_to_json(settings: Mapping[str, Setting]) -> list[dict[str, Any]]:
    return [
        {"name": s.name, "type": s.type_text, "doc": s.doc, "owner": s.owner} | ({} if s.required else {"default": s.default})
        for s in settings.values()
    ]


def settings_from_json(rows: list[dict[str, Any]]) -> dict[str, Setting]:
    return {
        row["name"]: Setting(row["name"], read_type(row["type"]), row.get("default", MISSING), row["doc"], row["owner"]) for row in rows
    }
