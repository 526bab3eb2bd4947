"""What the keys of other programs' files become: tables of rules, and the walk over a file that leaves none out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from drivetrain.outcomes import Problem
from drivetrain.plan import PINNABLE
from drivetrain.settings import coerce, nearest, read_type
from drivetrain.settings_reader.live import settings_of_class
from drivetrain.task import Task

T = TypeVar("T")
Kind = Literal["pins", "settings", "request"]
REQUEST = {
    "procs": "Annotated[int, Range(1)]",
    "nodes": "Annotated[int, Range(1)]",
    "rendezvous": "str",
    "node_rank": "Annotated[int, Range(0)]",
    "gpus": "str",
    "device": "Literal['cuda', 'cpu', 'mps']",
}
LEFT_OPEN = {"auto": "left open (auto): the recipe and the plan decide", "": "left empty"}


@dataclass(frozen=True)
class Use:
    """What a key becomes: a pin of the plan, a setting of the recipe or a request of the command line."""

    kind: Kind
    name: str
    value: Any

    def words(self) -> str:
        return {"pins": f"plan.{self.name}", "settings": self.name, "request": f"--{self.name.replace('_', '-')}"}[self.kind]


Values = Mapping[str, Any]
"""A file's dotted keys, without those it leaves open (see `left_open`)."""
Rule = Callable[[Any, Values], "Use | str"]
"""From a key's value to its use, or to the reason why it has none; ValueError says what it should have been."""


@dataclass(frozen=True)
class Key:
    name: str
    """Dotted; a last part `*` stands for all below."""
    becomes: str
    """In words: what a reader of the docs is told."""
    rule: Rule


def pin(key: str, name: str) -> Key:
    return Key(key, f"`plan.{name}`", lambda value, _: Use("pins", name, value))


def setting(key: str, name: str) -> Key:
    return Key(key, f"`{name}`", lambda value, _: Use("settings", name, value))


def unused(why: str, *keys: str) -> list[Key]:
    return [Key(key, f"not used: {why}", lambda value, _: why) for key in keys]


def flag(value: Any) -> bool:
    return bool(coerce(bool, value))


def number(value: Any) -> int:
    return int(coerce(int, value))


def left_open(said: Values, key: str) -> bool:
    """Whether a file says auto for a key, which is not the same as not having it."""
    return f"{key}: auto" in said


class Elsewhere(ValueError):
    """A rule met a value of another key that does not fit."""

    def __init__(self, key: str, value: Any, words: str) -> None:
        super().__init__(words)
        self.key, self.value = key, value


def look(said: Values, key: str, form: Callable[[Any], T], default: Any) -> T:
    """The value of another key in its form."""
    value = said.get(key, default)
    try:
        return form(value)
    except ValueError as error:
        raise Elsewhere(key, value, str(error)) from None


def flatten(values: Mapping[Any, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Every key with a value of its own, dotted."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


@dataclass
class Draft:
    """What has been made of a file so far."""

    file: str
    pins: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    request: dict[str, Any] = field(default_factory=dict)
    used: list[tuple[str, str]] = field(default_factory=list)
    unused: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _owner: dict[str, str] = field(default_factory=dict)

    def walk(self, values: Mapping[Any, Any], keys: Sequence[Key], prefix: str = "", also: Values | None = None) -> Values:
        """Take every key of a file; gives the dotted ones that say something. `also` is known from elsewhere."""
        flat = dict(flatten(values))
        said = {key: value for key, value in flat.items() if _open(value) is None} | dict(also or {})
        said |= {f"{key}: auto": True for key, value in flat.items() if value == "auto"}
        table = {key.name: key for key in keys}
        sections = {name.rpartition(".")[0] for name in table if "." in name}
        for key, value in flat.items():
            if key in sections and key not in table and value not in (None, {}):
                raise Problem(f"{self.file}: {prefix}{key} is a group of keys, not {value!r}: write {key}: {{...}}, or leave it out")
            try:
                found = _open(value) or _rule(key, table)(value, said)
                use = replace(found, value=_checked(found)) if isinstance(found, Use) else None
            except ValueError as error:
                at, wrong = (error.key, error.value) if isinstance(error, Elsewhere) else (key, value)
                raise Problem(f"{self.file}: {prefix}{at}: {wrong!r} does not fit: it is {error}") from None
            if use is not None:
                self.use(prefix + key, use)
            else:
                self.unused.append((prefix + key, str(found)))
        return said

    def use(self, key: str, use: Use) -> None:
        """Put a value where it goes; two keys that say different things are refused."""
        place: dict[str, Any] = getattr(self, use.kind)
        self.used.append((key, use.words()))
        if use.name == "deepspeed_config":
            place[use.name] = merged(place.get(use.name, {}), use.value)
            return
        if use.name in place and place[use.name] != use.value:
            other = self._owner[use.words()]
            raise Problem(
                f"{self.file}: {other} and {key} disagree on {use.words()} ({place[use.name]} and {use.value}): leave one of them out"
            )
        place[use.name] = use.value
        self._owner.setdefault(use.words(), key)


def merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Two nested mappings as one; the second wins."""
    both = dict(one)
    for key, value in other.items():
        both[key] = merged(both[key], value) if isinstance(both.get(key), Mapping) and isinstance(value, Mapping) else value
    return both


def nested(key: str, value: Any) -> dict[str, Any]:
    """A dotted key's value in the form of its file."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return dict(value)


def _open(value: Any) -> str | None:
    """Why a value says nothing, if it does not."""
    if value is None or (isinstance(value, (dict, list)) and not value):
        return LEFT_OPEN[""]
    return LEFT_OPEN.get(value) if isinstance(value, str) else None


def _rule(key: str, table: Mapping[str, Key]) -> Rule:
    """The rule of a key, or of the nearest group above it that has one for all."""
    above = key.split(".")
    for name in (key, *(".".join([*above[:i], "*"]) for i in range(len(above) - 1, 0, -1))):
        if name in table:
            return table[name].rule
    return lambda value, said: f"no key that is known here{nearest(key, table)}"


def _checked(use: Use) -> Any:
    """The value in the type of what it becomes."""
    if use.name == "deepspeed_config":
        return use.value
    if use.kind == "settings":
        return coerce(settings_of_class(Task)[use.name].type, use.value)
    return coerce(read_type((PINNABLE if use.kind == "pins" else REQUEST)[use.name]), use.value)
