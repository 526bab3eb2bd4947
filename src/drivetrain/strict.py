"""Reads plain JSON values as typed ones. A value of the wrong type, an unknown field and a missing field are errors."""

from __future__ import annotations

import math
import types
import typing
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

T = TypeVar("T")


class Mismatch(ValueError):
    """A value has the wrong type; the message says where it is."""


def read(kind: type[T], value: object, where: str = "value") -> T:
    """Returns the value as a `kind`: a dataclass, an enum, or a type of plain values. `where` is the value's name in errors."""
    return typing.cast(T, _read(kind, value, where))


def _read(kind: Any, value: Any, where: str) -> Any:
    origin = get_origin(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        return _read_union(kind, value, where)
    if origin is Literal:
        types_of_choices = {type(choice) for choice in get_args(kind)}  # because True == 1
        return _checked(value in get_args(kind) and type(value) in types_of_choices, value, kind, where)
    if origin is list:
        _checked(isinstance(value, list), value, kind, where)
        return [_read(get_args(kind)[0], item, f"{where}[{i}]") for i, item in enumerate(value)]
    if origin is tuple:
        return _read_tuple(get_args(kind), value, kind, where)
    if origin is dict:
        _checked(isinstance(value, dict) and all(isinstance(key, str) for key in value), value, kind, where)
        return {key: _read(get_args(kind)[1], item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(kind, type) and issubclass(kind, Enum):
        _checked(value in [member.value for member in kind], value, kind, where)
        return kind(value)
    if is_dataclass(kind):
        return _read_dataclass(kind, value, where)
    return _read_plain(kind, value, where)


def _read_plain(kind: Any, value: Any, where: str) -> Any:
    if kind is float:
        _checked(isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value), value, kind, where)
        return float(value)
    exact_type = type(None) if kind is None else kind
    return _checked(type(value) is exact_type, value, kind, where)


def _read_union(kind: Any, value: Any, where: str) -> Any:
    for choice in get_args(kind):
        try:
            return _read(choice, value, where)
        except Mismatch:
            continue
    raise _mismatch(value, kind, where)


def _read_tuple(kinds: tuple[Any, ...], value: Any, kind: Any, where: str) -> Any:
    _checked(isinstance(value, (list, tuple)), value, kind, where)
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        kinds = (kinds[0],) * len(value)
    _checked(len(value) == len(kinds), value, kind, where)
    return tuple(_read(k, item, f"{where}[{i}]") for i, (k, item) in enumerate(zip(kinds, value, strict=True)))


def _read_dataclass(kind: Any, value: Any, where: str) -> Any:
    _checked(isinstance(value, dict), value, kind, where)
    known = {field.name: field for field in fields(kind) if field.init}
    if unknown := sorted(str(key) for key in value if key not in known):
        raise Mismatch(f"{where}: {kind.__name__} has no field {unknown[0]!r}")
    required = [name for name, field in known.items() if field.default is MISSING and field.default_factory is MISSING]
    if missing := [name for name in required if name not in value]:
        raise Mismatch(f"{where}: {kind.__name__} lacks {missing[0]!r}")
    hints = _hints(kind)
    return kind(**{name: _read(hints[name], item, f"{where}.{name}") for name, item in value.items()})


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _checked(fits: bool, value: Any, kind: Any, where: str) -> Any:
    """Returns the value; raises Mismatch unless it fits."""
    if not fits:
        raise _mismatch(value, kind, where)
    return value


def _mismatch(value: Any, kind: Any, where: str) -> Mismatch:
    name = kind.__name__ if isinstance(kind, type) and get_origin(kind) is None else str(kind)
    return Mismatch(f"{where} is {repr(value)[:60]}, not {name}")
