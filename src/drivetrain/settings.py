"""Settings: the types that a task's annotated fields may have, and the conversion of text to their values."""

from __future__ import annotations

import ast
import difflib
import inspect
import math
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

from drivetrain.outcomes import Problem

PACKAGE = Path(__file__).parent
"""The folder of this package."""


@dataclass(frozen=True)
class Range:
    """Inclusive bounds of a number: `Annotated[int, Range(1, 64)]`."""

    low: float
    high: float = float("inf")

    def __repr__(self) -> str:
        """Returns the text for --help and run.json, from which `read_type` makes the range again."""
        return f"Range({self.low})" if self.high == float("inf") else f"Range({self.low}, {self.high})"


@dataclass(frozen=True)
class Length:
    """A count of optimizer steps, of epochs (`2ep`) or a wall-clock time (`10min`)."""

    value: float
    unit: Literal["steps", "epochs", "seconds"]

    @staticmethod
    def parse(text: object) -> Length:
        """Reads `10`, `2ep` or `10min`; otherwise raises a ValueError that describes valid text."""
        match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)\s*(ep|epochs?|s|sec|min|h|d)?", str(text)[:80].strip())
        if match is None:
            raise ValueError("a number of steps, of epochs (2ep) or a time (30s, 10min, 4h)")
        number, unit = float(match[1]), match[2]
        if unit is None:
            if number != int(number):
                raise ValueError("a whole number of steps, or epochs as 0.5ep")
            return Length(int(number), "steps")
        if unit.startswith("ep"):
            return Length(number, "epochs")
        return Length(number * {"s": 1, "sec": 1, "min": 60, "h": 3600, "d": 86400}[unit], "seconds")

    def in_steps(self, steps_per_epoch: int) -> int | None:
        """Returns the number of whole steps; None for a wall-clock time."""
        if self.unit == "seconds":
            return None
        return int(self.value) if self.unit == "steps" else max(1, round(self.value * steps_per_epoch))


class _DurationMark:
    """Marks the annotation of a duration."""

    def __repr__(self) -> str:
        return "Duration"


Duration = Annotated[int | str, _DurationMark()]
"""The type of a setting that `Length` reads: steps, epochs or a time."""
MISSING = inspect.Parameter.empty
"""The default of a setting without a default."""
_NAMES_IN_ANNOTATIONS: dict[str, Any] = {
    **{t.__name__: t for t in (int, float, str, bool, list, Range)},
    "Literal": Literal,
    "Annotated": Annotated,
    "Duration": Duration,
    "Optional": typing.Optional,
    "Union": Union,
    "List": list,
    "ClassVar": ClassVar,
    "inf": float("inf"),
}


@dataclass(frozen=True)
class Setting:
    """A task's annotated field, which a recipe or the command line may set."""

    name: str
    type: Any
    default: Any
    doc: str = ""
    owner: str = "Task"
    """The class that declares it."""

    @property
    def required(self) -> bool:
        return self.default is MISSING

    @property
    def type_text(self) -> str:
        return type_text(self.type)

    def coerce(self, value: object) -> Any:
        """Returns a value converted to the setting's type; text is read as on a command line. Raises Problem if it does not fit."""
        try:
            has_infinite_default = isinstance(self.default, float) and math.isinf(self.default)
            if has_infinite_default and str(value).strip().lower() in ("inf", "infinity"):
                return math.inf  # allowed only here: `coerce` refuses infinite numbers
            return coerce(self.type, value)
        except ValueError as error:
            doc = f" ({self.doc.splitlines()[0]})" if self.doc else ""
            raise Problem(f"{self.name}={shortened(str(value))} does not fit: {self.name} is {error}{doc}") from None


def shortened(text: str, length: int = 80) -> str:
    """Returns text for an error message; if it is long, only its beginning."""
    return text if len(text) <= length else f"{text[:length]}... ({len(text):,} characters)"


def brief(value: object) -> str:
    """Returns a value's repr, shortened for an error message."""
    return shortened(repr(value))


def nearest(name: str, names: typing.Iterable[str]) -> str:
    """Returns "; did you mean NAME?" with the most similar name; empty if none is similar."""
    close = difflib.get_close_matches(name[:80], list(names), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


def resolve(settings: Mapping[str, Setting], values: Mapping[str, object], owner: str) -> dict[str, Any]:
    """Returns the value of every setting: the checked one of `values`, or the default. `owner` names the task in errors."""
    for name in values:
        if name not in settings:
            raise Problem(f"{owner} has no setting {brief(name)}{nearest(name, settings)} (all: --help)")
    missing = [s.name for s in settings.values() if s.required and s.name not in values]
    if missing:
        raise Problem(f"{owner} needs a value for {', '.join(missing)}: give {missing[0]}=VALUE")
    return {s.name: s.coerce(values[s.name]) if s.name in values else s.default for s in settings.values()}


# --- values ------------------------------------------------------------------------------------


def coerce(kind: Any, value: object) -> Any:
    """Returns a value converted to a setting's type; text is read as on a command line. A ValueError describes the values that fit."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _coerce_annotated(args, value)
    if origin in (Union, types.UnionType):
        return _coerce_union(kind, value)
    if origin is Literal:
        return _coerce_literal(args, value)
    if origin is list or kind is list:
        return _coerce_list(args[0] if args else str, value)
    if kind is bool:
        return _coerce_bool(value)
    if kind in (int, float) and not isinstance(value, bool):
        return _coerce_number(kind, value)
    if kind is str and isinstance(value, (str, int, float)) and not isinstance(value, bool):
        return str(value).strip()
    raise ValueError(_type_in_words(kind))


def _coerce_annotated(args: tuple[Any, ...], value: object) -> Any:
    kind, *marks = args
    if any(isinstance(mark, _DurationMark) for mark in marks):
        Length.parse(value)
        return int(str(value)) if str(value).isdigit() else str(value)
    number = coerce(kind, value)
    for mark in marks:
        if isinstance(mark, Range) and number is not None and not mark.low <= number <= mark.high:
            high = f"{mark.high:g}" if mark.high < 1e6 else f"{mark.high:,}"
            is_open = mark.high == float("inf") or (mark.high >= 2**31 - 1 and number < mark.low)
            raise ValueError(f"{_type_in_words(kind)} of {mark.low:g}{' or more' if is_open else f' to {high}'}")
    return number


def _coerce_union(kind: Any, value: object) -> Any:
    options = get_args(kind)
    if value is None or (type(None) in options and str(value).lower() in ("none", "null")):
        if type(None) in options:
            return None
        raise ValueError(f"{type_text(kind)}, not empty")
    problems = []
    for option in options:
        if option is not type(None):
            try:
                return coerce(option, value)
            except ValueError as error:
                problems.append(str(error))
    raise ValueError(" or ".join(problems))


def _coerce_literal(choices: tuple[Any, ...], value: object) -> Any:
    for choice in choices:
        if value == choice or str(value) == str(choice):
            return choice
    raise ValueError(f"one of {', '.join(map(str, choices))}{nearest(str(value), map(str, choices))}")


def _coerce_list(kind: Any, value: object) -> list[Any]:
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, (list, tuple)):
        items = [items]
    return [coerce(kind, item.strip() if isinstance(item, str) else item) for item in items if item != ""]


def _coerce_bool(value: object) -> bool:
    text = str(value).strip().lower()
    if text in ("true", "yes", "on", "1"):
        return True
    if text in ("false", "no", "off", "0"):
        return False
    raise ValueError(_type_in_words(bool))


def _coerce_number(kind: type[int] | type[float], value: object) -> int | float:
    text, name = str(value).strip(), _type_in_words(kind)
    try:
        number = float(text.replace("_", "")) if kind is float or "e" in text.lower() else int(text)
    except ValueError:
        raise ValueError(name) from None
    if isinstance(number, float) and not math.isfinite(number):
        raise ValueError(f"{name} that is finite" if kind is float else name)
    if kind is int and number != int(number):
        raise ValueError(name)
    if kind is int and abs(number) >= 2**63:
        raise ValueError(f"{name} of at most 63 bits")
    return kind(number)


def as_text(value: Any) -> str:
    """Returns a value as it is written on a command line."""
    if isinstance(value, list):
        return ",".join(map(as_text, value))
    if value is None or isinstance(value, bool):
        return {True: "true", False: "false", None: "none"}[value]
    return str(value)


# --- types -------------------------------------------------------------------------------------


def _type_in_words(kind: Any) -> str:
    """Returns the words for a type's values in an error message."""
    return {int: "a whole number", float: "a number", str: "text", bool: "true or false"}.get(kind, type_text(kind))


def type_text(kind: Any) -> str:
    """Returns a type as an annotation's text; `read_type` reads it back."""
    origin, args = get_origin(kind), get_args(kind)
    if kind is type(None):
        return "None"
    if origin is Annotated:
        if isinstance(args[1], _DurationMark):
            return "Duration"
        return f"Annotated[{type_text(args[0])}, {', '.join(map(repr, args[1:]))}]"
    if origin in (Union, types.UnionType):
        return " | ".join(type_text(a) for a in args)
    if origin is Literal:
        return f"Literal[{', '.join(map(repr, args))}]"
    if origin is list:
        return f"list[{type_text(args[0])}]"
    return str(getattr(kind, "__name__", kind))


class _PlainNames(ast.NodeTransformer):
    """Turns `typing.Literal` and `drivetrain.Range` into plain names; refuses syntax that no type needs."""

    allowed = (ast.Expression, ast.Name, ast.Subscript, ast.Constant, ast.Tuple, ast.List, ast.BinOp, ast.BitOr,
               ast.Call, ast.Load, ast.UnaryOp, ast.USub, ast.keyword, ast.Add, ast.Sub, ast.Mult, ast.Pow)  # fmt: skip

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.Attribute):
            return ast.copy_location(ast.Name(node.attr, ast.Load()), node)
        if not isinstance(node, self.allowed):
            raise ValueError(ast.unparse(node))
        if isinstance(node, ast.Call) and not (isinstance(node.func, (ast.Name, ast.Attribute))):
            raise ValueError(ast.unparse(node))
        return self.generic_visit(node)


class UnknownName(ValueError):
    """An annotation uses a name that only its file defines, such as an alias of a type."""


@cache
def read_type(text: str) -> Any:
    """Returns the type that an annotation's text names; raises ValueError if no setting can have it."""
    tree = ast.fix_missing_locations(_PlainNames().visit(ast.parse(text, mode="eval")))
    if isinstance(tree.body, ast.Constant) and isinstance(tree.body.value, str):
        return read_type(tree.body.value)
    try:
        kind = eval(compile(tree, "<annotation>", "eval"), {"__builtins__": {}}, _NAMES_IN_ANNOTATIONS)
    except NameError as error:
        raise UnknownName(text) from error
    except TypeError as error:
        raise ValueError(text) from error
    if get_origin(kind) is not ClassVar and kind is not ClassVar:
        _check_type(kind, text)
    return kind


def _check_type(kind: Any, text: str) -> None:
    """Raises ValueError if no setting can have this type."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType, list):
        for arg in args:
            _check_type(arg, text)
    elif origin is Annotated:
        _check_type(args[0], text)
    elif origin is not Literal and kind not in (int, float, str, bool, list, type(None)):
        raise ValueError(text)
