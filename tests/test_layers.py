"""The structure of `src/drivetrain`: packages in layers, no import circle, no long file, no class name defined twice."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import drivetrain

ROOT = Path(drivetrain.__file__).parent
LAYERS = [
    {"outcomes", "strict", "terminal", "confidential"}, {"data", "hooks", "names", "structured"}, {"settings"}, {"project"}, {"settings_reader", "importing"}, {"task"}, {"task_ref"}, {"describe", "stages"},
    {"runs", "recipe", "hardware"}, {"buckets"},
    {"plan"}, {"engine", "tasks"}, {"watch"}, {"processes"}, {"supervise"}, {"launch"}, {"targets"},
    {"doctor", "tune", "export", "play", "serve", "bench", "chaos"}, {"api"}, {"cli"}, {"__main__"},
]  # fmt: skip
"""A package may import packages of the sets before its own, and none of its own set or after."""
LEVEL = {package: level for level, packages in enumerate(LAYERS) for package in packages}
FILES = sorted(ROOT.rglob("*.py"))
MAX_LINES = 400


def module_name(path: Path) -> str:
    parts = ["drivetrain", *path.relative_to(ROOT).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in FILES}


@cache
def syntax(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported_names(nodes: Iterator[ast.AST]) -> Iterator[str]:
    """Yields all imported names, and modules of this package that a string names (`python -m drivetrain.processes.worker`)."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"drivetrain(\.\w+)+", node.value):
            yield node.value


def imported_modules(path: Path) -> set[str]:
    """Returns the modules of this package that a file imports, at its top or inside functions."""
    modules = set()
    for name in imported_names(ast.walk(syntax(path))):
        module = name if name in MODULES else name.rpartition(".")[0]
        if module in MODULES and module not in ("drivetrain", module_name(path)):
            modules.add(module)
    return modules


def package_of(module: str) -> str:
    return module.split(".")[1]


@pytest.mark.parametrize("module", [name for name in MODULES if name != "drivetrain"])
def test_a_package_imports_only_packages_below_it(module: str) -> None:
    package = package_of(module)
    assert package in LEVEL, f"in which layer is {package}?"
    for name in imported_modules(MODULES[module]):
        below = LEVEL[package_of(name)] < LEVEL[package] or {package, package_of(name)} <= {"runs", "recipe", "hardware"}
        assert package_of(name) == package or below, f"{module} ({package}) imports {name}"


def test_only_the_engine_and_tasks_import_torch_when_they_are_imported() -> None:
    for path in FILES:
        if path.relative_to(ROOT).parts[0] not in ("engine", "tasks"):
            names = imported_names(iter(syntax(path).body))
            assert not any(name.split(".")[0] == "torch" for name in names), f"{path} imports torch"


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Returns the modules of an import circle, or an empty list if there is none."""
    visited: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in visited:
            return []
        for name in sorted(graph[module]):
            if modules := visit(name, [*path, module]):
                return modules
        visited.add(module)
        return []

    for module in sorted(graph):
        if modules := visit(module, []):
            return modules
    return []


def test_no_import_circle() -> None:
    """Lazy imports, imports for type checkers and the names of modules in strings count."""
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"], "a known circle must be found, or this test proves nothing"
    modules = circle({module: imported_modules(path) for module, path in MODULES.items()})
    assert not modules, " -> ".join(modules)


def test_no_file_is_too_long() -> None:
    long = {str(p.relative_to(ROOT)): n for p in FILES if (n := len(p.read_text().splitlines())) > MAX_LINES}
    assert not long


def test_no_public_class_name_is_defined_twice() -> None:
    names = Counter(
        node.name for path in FILES for node in syntax(path).body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert not sorted(name for name, times in names.items() if times > 1)
