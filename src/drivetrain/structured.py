"""Reads YAML and JSON from untrusted files. Limits their size, depth and aliases, and refuses repeated keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from drivetrain.outcomes import Problem

MAX_BYTES = 4 << 20
MAX_YAML_BYTES = 1 << 18  # YAML is slow to read
MAX_DEPTH = 50
MAX_VALUES = 20_000
"""The limit for values in a YAML file. An alias counts as the values that it repeats."""


def read_text(path: Path, purpose: str) -> str:
    """Returns a small text file's content; `purpose` names the file in an error, such as "the recipe"."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise Problem(f"{purpose} {path} is larger than {MAX_BYTES >> 20} MiB: it holds something else")
        return data.decode("utf-8-sig")
    except OSError as error:
        raise Problem(f"cannot read {purpose} {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise Problem(f"{purpose} {path} is no text") from None


def parse_json(text: str, path: Path) -> Any:
    """Returns the value that JSON text holds; raises Problem for a key that stands twice, and for deep nesting."""
    try:
        values = json.loads(text, object_pairs_hook=_dict_without_duplicates)
        if _depth(values) > MAX_DEPTH:
            raise RecursionError
    except RecursionError:
        raise Problem(f"{path} is nested deeper than {MAX_DEPTH} levels: it holds something else") from None
    except ValueError as error:
        raise Problem(f"{path} is not valid JSON: {error}") from None
    return values


def parse_yaml(text: str, path: Path) -> Any:
    """Returns the value that YAML text holds, read with a safe loader that also bounds it."""
    import yaml

    if len(text) > MAX_YAML_BYTES:
        raise Problem(f"{path} is larger than {MAX_YAML_BYTES >> 10} KiB: it holds something else")
    try:
        return yaml.load(text, Loader=_loader())
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        reason = getattr(error, "problem", None) or str(error).partition("\n")[0]
        raise Problem(f"{path}{line}: not valid YAML: {reason}") from None


def _dict_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        duplicate = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {duplicate[:80]!r} stands there twice")
    return values


def _depth(values: Any) -> int:
    """Returns how deeply a value is nested, at most MAX_DEPTH + 1."""
    level, depth = [values], 0
    while level and depth <= MAX_DEPTH:
        inner = [v.values() if isinstance(v, dict) else v for v in level if isinstance(v, (dict, list))]
        level, depth = [item for items in inner for item in items], depth + 1
    return depth


def _loader() -> Any:
    """Returns the class that loads YAML; a function, because yaml is imported late."""
    import yaml

    class Loader(yaml.SafeLoader):
        """A safe loader that refuses a key that stands twice, deep nesting, and aliases that multiply."""

        def __init__(self, stream: Any) -> None:
            super().__init__(stream)
            self.depth, self.num_values = 0, 0
            self.num_values_of_node: dict[int, int] = {}

        def compose_node(self, parent: Any, index: Any) -> Any:
            event: Any = self.peek_event()  # type: ignore[no-untyped-call]
            is_alias = isinstance(event, yaml.AliasEvent)  # an alias gives the same node object as its anchor: hence id(node)
            self.depth += 1
            if self.depth > MAX_DEPTH:
                raise self.error(f"nested deeper than {MAX_DEPTH} levels", event)
            before = self.num_values
            node = super().compose_node(parent, index)
            if is_alias and id(node) not in self.num_values_of_node:
                raise self.error(f"the alias *{event.anchor} is inside the value that it names", event)
            self.num_values += self.num_values_of_node[id(node)] if is_alias else 1
            self.num_values_of_node[id(node)] = self.num_values - before
            if self.num_values > MAX_VALUES:
                raise self.error(f"more than {MAX_VALUES:,} values (an alias counts as what it stands for)", event)
            self.depth -= 1
            return node

        def compose_mapping_node(self, anchor: Any) -> Any:
            node = super().compose_mapping_node(anchor)
            names = set()
            for key, _ in node.value:
                name = (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else id(key)
                if name in names:
                    raise self.error(f"the key {str(key.value)[:80]!r} stands there twice: leave one of them out", key)
                names.add(name)
            return node

        def error(self, reason: str, node: Any) -> Exception:
            return yaml.composer.ComposerError(None, None, reason, node.start_mark)

    return Loader
