"""The search space: `1e-4..1e-1,log` is a range, `64|128|256` are choices; the setting's type checks them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from drivetrain.outcomes import Problem
from drivetrain.settings import Setting, as_text, nearest

EXAMPLE = "--search learning_rate=1e-4..1e-1,log"


@dataclass(frozen=True)
class Dimension:
    """A setting that is searched: a range of numbers, or choices."""

    setting: Setting
    text: str
    low: float = 0.0
    high: float = 0.0
    is_whole: bool = False
    is_log: bool = False
    choices: tuple[Any, ...] = ()


Space = dict[str, Dimension]


def make_space(
    settings: Mapping[str, Setting], task_search: Mapping[str, str], words: list[str], fixed: Mapping[str, str], label: str
) -> Space:
    """Returns the search space of the command line, else that of the task without the settings in `fixed`.

    `words` are the arguments of `--search`, `label` is the task's name.
    """
    requested = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise Problem(f"--search {word}: write it as key=range, such as {EXAMPLE}")
        requested[key.replace("-", "_")] = text
    for key in requested:
        if key in fixed:
            raise Problem(f"{key} is searched and also has the value {fixed[key]}: give only one of them")
    texts = requested or {key: text for key, text in task_search.items() if key not in fixed}
    for key in texts:
        if key not in settings:
            raise Problem(f"--search {key}: {label} has no setting {key!r}{nearest(key, settings)} (all: drivetrain tune {label} --help)")
    if not texts:
        raise Problem(f'nothing to search: write {EXAMPLE} or similar (or search = {{"learning_rate": "1e-4..1e-1,log"}} in the task)')
    return {key: _dimension(settings[key], str(text)) for key, text in texts.items()}


def _dimension(setting: Setting, text: str) -> Dimension:
    if "|" in text:
        choices = tuple(_plain(setting.coerce(part.strip())) for part in text.split("|"))
        if len(set(choices)) < len(choices):
            raise Problem(f"--search {setting.name}={text}: a choice is repeated")
        return Dimension(setting, text, choices=choices)
    first, dots, rest = text.partition("..")
    last, comma, scale = rest.partition(",")
    if not dots or (comma and scale.strip() != "log"):
        raise Problem(f"--search {setting.name}={text}: write LOW..HIGH, LOW..HIGH,log or 'A|B|C'")
    low, high = setting.coerce(first.strip()), setting.coerce(last.strip())
    if not all(type(end) in (int, float) for end in (low, high)):
        raise Problem(f"--search {setting.name}={text}: {setting.name} is not a number: write its choices, as '{setting.name}=A|B'")
    if not low < high:
        raise Problem(f"--search {setting.name}={text}: write the lower end of the range first")
    if comma and low <= 0:
        raise Problem(f"--search {setting.name}={text}: a range with log must begin above 0")
    return Dimension(setting, text, low, high, isinstance(low, int) and isinstance(high, int), bool(comma))


def _plain(value: Any) -> Any:
    """Converts a choice for the journal, which stores no lists: they become text, which the setting parses again."""
    return as_text(value) if isinstance(value, list) else value


def short(value: Any) -> str:
    """Returns a value as a table shows it."""
    return f"{value:.4g}" if isinstance(value, float) else as_text(value)
