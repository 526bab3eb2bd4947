"""Reads YAML and JSON that anybody may have written: small files, each key once, bounded depth, bounded aliases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from drivetrain.outcomes import Problem

MAX_BYTES = 4 << 20
MAX_YAML_BYTES = 1 << 18  # people write YAML, and it is slow to read
MAX_DEPTH = 50
MAX_VALUES = 20_000  # of YAML, aliases counted as what they stand for


def read_text(path: Path, what: str) -> str:
    """Returns a small text file's content; `what` names the file's purpose in an error."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise Problem(f"{what} {path} is larger than {MAX_BYTES >> 20} MiB: it holds something else")
        return data.decode("utf-8-sig")
    except OSError as error:
        raise Problem(f"cannot read {what} {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise Problem(f"{what} {path} is no text") from None


def parse_json(text: str, path: Path) -> Any:
    """Returns the value that JSON text holds; a key that stands twice, or 51 levels, are a Problem."""
    try:
        values = json.loads(text, object_pairs_hook=_each_once)
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
        where = f", line {mark.line + 1}" if mark else ""
        why = getattr(error, "problem", None) or str(error).partition("\n")[0]
        raise Problem(f"{path}{where}: not valid YAML: {why}") from None


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice[:80]!r} stands there twice")
    return values


def _depth(values: Any) -> int:
    level, depth = [values], 0
    while level and depth <= MAX_DEPTH:
        inner = [v.values() if isinstance(v, dict) else v for v in level if isinstance(v, (dict, list))]
        level, depth = [item for items in inner for item in items], depth + 1
    return depth


def _loader() -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """A safe loader that refuses a key that stands twice, deep nesting, and aliases that multiply."""

        def __init__(self, stream: Any) -> None:
            super().__init__(stream)
            self.depth, self.count = 0, 0
            self.sizes: dict[int, int] = {}

        def compose_node(self, parent: Any, index: Any) -> Any:
            event: Any = self.peek_event()  # type: ignore[no-untyped-call]
            is_alias = isinstance(event, yaml.AliasEvent)
            self.depth += 1
            if self.depth > MAX_DEPTH:
                raise self.refused(f"nested deeper than {MAX_DEPTH} levels", event)
            before = self.count
            node = super().compose_node(parent, index)
            if is_alias and id(node) not in self.sizes:
                raise self.refused(f"the alias *{event.anchor} stands within what it names", event)
            self.count += self.sizes[id(node)] if is_alias else 1
            self.sizes[id(node)] = self.count - before
            if self.count > MAX_VALUES:
                raise self.refused(f"more than {MAX_VALUES:,} values (an alias counts as what it stands for)", event)
            self.depth -= 1
            return node

        def compose_mapping_node(self, anchor: Any) -> Any:
            node = super().compose_mapping_node(anchor)
            seen = set()
            for key, _ in node.value:
                name = (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else id(key)
                if name in seen:
                    raise self.refused(f"the key {str(key.value)[:80]!r} stands there twice: leave one of them out", key)
                seen.add(name)
            return node

        def refused(self, why: str, at: Any) -> Exception:
            return yaml.composer.ComposerError(None, None, why, at.start_mark)

    return Loader
