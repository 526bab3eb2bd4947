"""Annotated fields of a task's class: decides which are settings, and of which type."""

from __future__ import annotations

import ast
import inspect
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Union, get_args, get_origin

from drivetrain.hooks import HOOKS, RESERVED
from drivetrain.outcomes import Problem
from drivetrain.settings import Duration, Setting, UnknownName, read_type

NEVER_SETTINGS = ("dict", "Dict", "tuple", "Tuple", "set", "Callable", "Any", "Tensor", "Path")
"""Types that no setting can have."""


@dataclass(frozen=True)
class Field:
    """An annotated field in the source text of a class."""

    name: str
    annotation: str
    default: ast.expr | None
    doc: str
    """The string literal below the field."""


def annotated_fields(node: ast.ClassDef) -> Iterator[Field]:
    """Yields the annotated fields of a class."""
    for statement, following in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            doc = ""
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant) and isinstance(following.value.value, str):
                doc = inspect.cleandoc(following.value.value)
            yield Field(statement.target.id, ast.unparse(statement.annotation), statement.value, doc)


def plain_assignments(node: ast.ClassDef) -> Iterator[tuple[str, ast.expr]]:
    """Yields (name, value) of the assignments without an annotation in a class's body."""
    for statement in node.body:
        if isinstance(statement, ast.Assign):
            for target in statement.targets:
                if isinstance(target, ast.Name):
                    yield target.id, statement.value


def setting_type(owner: str, field: str, annotation: str) -> Any | None:
    """Returns a field's type; None if it is no setting (private, ClassVar). Raises Problem if its type or name is not allowed."""
    if field.startswith("_"):
        return None
    if field in HOOKS:
        raise Problem(f"{owner}.{field}: {field} is the name of a hook ({HOOKS[field]}); give the setting another name")
    if _last_name(annotation) == "ClassVar":
        return None
    if field in RESERVED:
        raise Problem(f"{owner}.{field}: {field} is {RESERVED[field]}; give the setting another name")
    try:
        kind = read_type(annotation)
    except UnknownName:
        if _last_name(annotation) in NEVER_SETTINGS:
            raise _not_a_setting(owner, field, annotation) from None
        raise
    except ValueError:
        raise _not_a_setting(owner, field, annotation) from None
    return None if get_origin(kind) is ClassVar or kind is ClassVar else kind


def _last_name(annotation: str) -> str:
    """Returns `Literal` for `typing.Literal["a"]`."""
    return annotation.split("[")[0].split(".")[-1]


def _not_a_setting(owner: str, field: str, annotation: str) -> Problem:
    return Problem(
        f"{owner}.{field}: {annotation} cannot be a setting (int, float, str, bool, list, Literal, None can); "
        f"assign it without an annotation, or name it _{field}"
    )


def inherit_range(kind: Any, inherited: Setting | None) -> Any:
    """Returns the type of a field that overrides one of a base class.

    A plain type, as in `epochs: int = 10`, inherits the range or unit of the base's type.
    """
    if inherited is None or get_origin(kind) is Annotated:
        return kind
    plain_types = (int, str, int | str) if inherited.type == Duration else (_without_ranges(inherited.type),)
    return inherited.type if kind in plain_types else kind


def _without_ranges(kind: Any) -> Any:
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return args[0]
    if origin in (Union, types.UnionType):
        return Union[tuple(_without_ranges(a) for a in args)]  # noqa: UP007 (built at run time)
    return kind
