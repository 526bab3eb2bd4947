"""Each room imports only those before it; only engine and tasks import torch at module level."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import drivetrain

ROOT = Path(drivetrain.__file__).parent
LAYERS = [
    {"outcomes", "strict", "terminal"}, {"names", "structured"}, {"settings"}, {"project"}, {"source", "importing"}, {"task"}, {"runs", "recipe", "hardware"}, {"plan"}, {"engine", "tasks"}, {"watch"},
    {"supervise"}, {"rendezvous", "targets"}, {"doctor", "tune", "export", "play", "serve", "bench", "chaos"}, {"cli"}, {"__main__"},
]  # fmt: skip
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
FILES = sorted(ROOT.rglob("*.py"))


def imports(path: Path, everywhere: bool) -> Iterator[str]:
    tree = ast.parse(path.read_text())
    hidden = {id(n) for i in ast.walk(tree) if isinstance(i, ast.If) and "TYPE_CHECKING" in ast.unparse(i.test) for n in ast.walk(i)}
    nodes = ast.walk(tree) if everywhere else iter(tree.body)
    for node in nodes:
        if id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            if node.module == "drivetrain":
                yield from (f"drivetrain.{a.name}" for a in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_rooms(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0].removesuffix(".py")
    if room == "__init__":
        return  # resolves names lazily
    assert room in LEVEL, f"which room is {room}?"
    for name in imports(path, everywhere=True):
        parts = name.split(".")
        if parts[0] == "drivetrain" and len(parts) > 1 and parts[1] in LEVEL and parts[1] != room:
            allowed = LEVEL[parts[1]] < LEVEL[room] or {room, parts[1]} <= {"runs", "recipe", "hardware"}
            assert allowed, f"{path.name} ({room}) imports {name}"
    if room not in ("engine", "tasks"):
        assert not any(n.split(".")[0] == "torch" for n in imports(path, everywhere=False)), f"{path} imports torch"


def test_no_file_is_too_long() -> None:
    long = {p.name: n for p in FILES if (n := len(p.read_text().splitlines())) > 800}
    assert not long
