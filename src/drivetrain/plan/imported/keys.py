"""Rules for the keys of other programs' files, and the `Draft` that applies them: every key is either used or gets a reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, TypeVar

from drivetrain.outcomes import Problem
from drivetrain.plan.choices import Device
from drivetrain.plan.pins import PINNABLE
from drivetrain.settings import Range, coerce, nearest
from drivetrain.settings_reader.live import settings_of_class
from drivetrain.task import Task

T = TypeVar("T")
Kind = Literal["pins", "settings", "request"]
REQUEST: dict[str, Any] = {
    "procs": Annotated[int, Range(1)],
    "nodes": Annotated[int, Range(1)],
    "rendezvous": str,
    "node_rank": Annotated[int, Range(0)],
    "gpus": str,
    "device": Device,
}
"""Flag of the command line -> type of its value."""
LEFT_OPEN = {"auto": "left open (auto): the recipe and the plan decide", "": "left empty"}


@dataclass(frozen=True)
class Destination:
    """What a key becomes: a pin of the plan, a setting of the recipe or a flag of the command line."""

    kind: Kind
    name: str
    value: Any

    def label(self) -> str:
        return {"pins": f"plan.{self.name}", "settings": self.name, "request": f"--{self.name.replace('_', '-')}"}[self.kind]


Values = Mapping[str, Any]
"""Dotted key -> value, without the keys that a file leaves open. A key with the value auto is noted, see `is_auto`."""
Rule = Callable[[Any, Values], "Destination | str"]
"""Takes a key's value and all values; returns what the key becomes, or why it is not used. ValueError names the values that fit."""


@dataclass(frozen=True)
class Key:
    name: str
    """Dotted; a last part `*` stands for every key below."""
    becomes: str
    """For the docs."""
    rule: Rule


def pin(key: str, name: str) -> Key:
    return Key(key, f"`plan.{name}`", lambda value, _: Destination("pins", name, value))


def setting(key: str, name: str) -> Key:
    return Key(key, f"`{name}`", lambda value, _: Destination("settings", name, value))


def unused_keys(why: str, *keys: str) -> list[Key]:
    return [Key(key, f"not used: {why}", lambda value, _: why) for key in keys]


def as_bool(value: Any) -> bool:
    return bool(coerce(bool, value))


def as_int(value: Any) -> int:
    return int(coerce(int, value))


def is_auto(values: Values, key: str) -> bool:
    """Returns whether a file sets a key to auto (a missing key is not auto)."""
    return f"{key}: auto" in values


class OtherKeyError(ValueError):
    """A rule read another key, whose value does not fit."""

    def __init__(self, key: str, value: Any, text: str) -> None:
        super().__init__(text)
        self.key, self.value = key, value


def value_of(values: Values, key: str, convert: Callable[[Any], T], default: Any) -> T:
    """Returns another key's value, converted."""
    value = values.get(key, default)
    try:
        return convert(value)
    except ValueError as error:
        raise OtherKeyError(key, value, str(error)) from None


def flatten(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, value) for every key of a nested mapping."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


@dataclass
class Draft:
    """Collects what the keys of a file become."""

    file: str
    pins: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    request: dict[str, Any] = field(default_factory=dict)
    used: list[tuple[str, str]] = field(default_factory=list)
    """(key, what it became)."""
    unused: list[tuple[str, str]] = field(default_factory=list)
    """(key, why it is not used)."""
    notes: list[str] = field(default_factory=list)
    _first_key_of: dict[str, str] = field(default_factory=dict)
    """Label of a destination -> the key that set it."""

    def read(self, content: Mapping[Any, Any], keys: Sequence[Key], prefix: str = "", also: Values | None = None) -> Values:
        """Applies the rules to every key of a file and returns the values that are not left open. `also`: values from another file."""
        flat = dict(flatten(content))
        values = {key: value for key, value in flat.items() if _why_open(value) is None} | dict(also or {})
        values |= {f"{key}: auto": True for key, value in flat.items() if value == "auto"}
        table = {key.name: key for key in keys}
        groups = {name.rpartition(".")[0] for name in table if "." in name}
        for key, value in flat.items():
            if key in groups and key not in table and value not in (None, {}):
                raise Problem(f"{self.file}: {prefix}{key} is a group of keys, not {value!r}: write {key}: {{...}}, or leave it out")
            try:
                result = _why_open(value) or _rule(key, table)(value, values)
                destination = replace(result, value=_checked(result)) if isinstance(result, Destination) else None
            except ValueError as error:
                wrong_key, wrong = (error.key, error.value) if isinstance(error, OtherKeyError) else (key, value)
                raise Problem(f"{self.file}: {prefix}{wrong_key}: {wrong!r} does not fit: it is {error}") from None
            if destination is not None:
                self.add(prefix + key, destination)
            else:
                self.unused.append((prefix + key, str(result)))
        return values

    def add(self, key: str, destination: Destination) -> None:
        """Records what a key becomes; raises Problem if another key already set the same destination to another value."""
        collected: dict[str, Any] = getattr(self, destination.kind)
        name, label = destination.name, destination.label()
        self.used.append((key, label))
        if name == "deepspeed_config":
            collected[name] = merged(collected.get(name, {}), destination.value)
            return
        if name in collected and collected[name] != destination.value:
            other = self._first_key_of[label]
            raise Problem(
                f"{self.file}: {other} and {key} disagree on {label} ({collected[name]} and {destination.value}): leave one of them out"
            )
        collected[name] = destination.value
        self._first_key_of.setdefault(label, key)


def merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Returns two nested mappings as one; the second wins."""
    both = dict(one)
    for key, value in other.items():
        both[key] = merged(both[key], value) if isinstance(both.get(key), Mapping) and isinstance(value, Mapping) else value
    return both


def nested(key: str, value: Any) -> dict[str, Any]:
    """Returns a dotted key's value as nested dicts, as in its file."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return dict(value)


def _why_open(value: Any) -> str | None:
    """Returns the reason if a value leaves a key open (auto, or empty); else None."""
    if value is None or (isinstance(value, (dict, list)) and not value):
        return LEFT_OPEN[""]
    return LEFT_OPEN.get(value) if isinstance(value, str) else None


def _rule(key: str, table: Mapping[str, Key]) -> Rule:
    """Returns the rule of a key, or of its innermost group with a rule for all keys (`GROUP.*`)."""
    parts = key.split(".")
    for name in (key, *(".".join([*parts[:i], "*"]) for i in range(len(parts) - 1, 0, -1))):
        if name in table:
            return table[name].rule
    return lambda value, values: f"no key that is known here{nearest(key, table)}"


def _checked(destination: Destination) -> Any:
    """Returns the value in the type of its destination."""
    if destination.name == "deepspeed_config":
        return destination.value
    if destination.kind == "settings":
        known = settings_of_class(Task).get(destination.name)  # a setting of one task only is checked with its recipe
        return destination.value if known is None else coerce(known.type, destination.value)
    return coerce((PINNABLE if destination.kind == "pins" else REQUEST)[destination.name], destination.value)
