"""Reads the classes and imports of a Python file from its text, and finds where base classes are defined."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from drivetrain.outcomes import Problem
from drivetrain.project import import_roots, package_of
from drivetrain.settings import PACKAGE

TASK_FILE = PACKAGE / "task.py"


@dataclass
class Module:
    """A Python file's classes and imports."""

    path: Path
    classes: dict[str, ast.ClassDef] = field(default_factory=dict)
    imports: dict[str, tuple[str, str]] = field(default_factory=dict)
    """local name -> (module, original name). The original name is empty for `import module`; a relative module begins with dots."""
    star_imports: list[str] = field(default_factory=list)
    """Modules of which everything is imported (`from x import *`)."""
    exported: list[str] | None = None
    """The module's `__all__`, if it has one."""


@dataclass(frozen=True)
class ClassDefinition:
    """A class, and the module that defines it."""

    module: Module
    name: str

    @property
    def node(self) -> ast.ClassDef:
        return self.module.classes[self.name]

    @property
    def is_task(self) -> bool:
        """Whether it is `drivetrain.Task` itself."""
        return self.name == "Task" and self.module.path == TASK_FILE


@cache
def read_module(path: Path) -> Module:
    """Returns a file's module; raises Problem if the file is not Python source text."""
    module = Module(path)
    for node in _parse(path).body:
        if isinstance(node, ast.ClassDef):
            module.classes[node.name] = node
        elif isinstance(node, ast.Import):
            module.imports |= {a.asname or a.name.split(".")[0]: (a.name, "") for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            _add_import_from(module, node)
        elif isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            with contextlib.suppress(ValueError, TypeError):
                module.exported = [str(name) for name in ast.literal_eval(node.value)]
    return module


def _parse(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise Problem(f"cannot read {path}: {error.strerror}") from None
    except SyntaxError as error:
        line = (error.text or "").strip()
        raise Problem(f"{path}, line {error.lineno}: {error.msg}\n    {line}") from None
    except (UnicodeDecodeError, ValueError):
        raise Problem(f"{path} is not Python source text") from None
    except (RecursionError, MemoryError):
        raise Problem(f"{path} is nested too deeply to be read") from None


def _add_import_from(module: Module, node: ast.ImportFrom) -> None:
    dotted = "." * node.level + (node.module or "")
    if node.names[0].name == "*":
        module.star_imports.append(dotted)
    elif node.module:
        module.imports |= {a.asname or a.name: (dotted, a.name) for a in node.names}
    else:  # `from . import x`: x is a module, or a name of the package itself
        folder = _parent_folder(module.path, node.level)
        for alias in node.names:
            is_module = _module_file(folder, alias.name) is not None
            module.imports[alias.asname or alias.name] = (dotted + alias.name, "") if is_module else (dotted, alias.name)


def public_names(module: Module, visited: frozenset[Path] = frozenset()) -> list[str]:
    """Returns the names of classes and imports that `from module import *` imports."""
    if module.path in visited:
        return []
    if module.exported is not None:
        return module.exported
    others = [other for name in module.star_imports if (other := imported_module(module, name)) is not None]
    names = [*module.classes, *module.imports, *(name for other in others for name in public_names(other, visited | {module.path}))]
    return [name for name in names if not name.startswith("_")]


def imported_module(module: Module, name: str) -> Module | None:
    """Returns a module of the same project, by the name that `module` imports; None if there is none, or it cannot be read."""
    file = _file_of_import(module, name)
    try:
        return read_module(file) if file is not None else None
    except Problem:
        return None  # the import reports the reason later


def _file_of_import(module: Module, name: str) -> Path | None:
    level = len(name) - len(name.lstrip("."))
    if not name or name.split(".")[0] == PACKAGE.name:
        return None
    if level:
        roots = [module.path.parents[level - 1]]
    else:
        roots = [root for folders in import_roots(module.path, package_of(module.path)) for root in folders]
    return next((file for root in roots if (file := _module_file(root, name.lstrip("."))) is not None), None)


def _parent_folder(path: Path, level: int) -> Path:
    """Returns the folder that a relative import with `level` dots refers to."""
    parents = path.absolute().parents
    return parents[min(level, len(parents)) - 1]


def _module_file(folder: Path, name: str) -> Path | None:
    """Returns the file of a module in a folder. An empty name means the folder itself, as a package."""
    path = folder.joinpath(*name.split("."))
    candidates = [path.with_suffix(".py")] if name else []
    return next((file for file in (*candidates, path / "__init__.py") if file.is_file()), None)


def find_class(module: Module, node: ast.expr, visited: frozenset[tuple[Path, str]] = frozenset()) -> ClassDefinition | None:
    """Returns the class that an expression names; None unless the module, its project or this package defines it."""
    if isinstance(node, ast.Name) and node.id in module.classes:
        return ClassDefinition(module, node.id)
    for module_name, name in _import_candidates(module, node):
        if (module_name, name) == (PACKAGE.name, "Task"):
            return ClassDefinition(read_module(TASK_FILE), "Task")
        other = _own_module(module_name) if module_name.startswith(f"{PACKAGE.name}.") else imported_module(module, module_name)
        if other is None or not name or (other.path, name) in visited:  # modules may import each other
            continue
        if definition := find_class(other, ast.Name(name, ast.Load()), visited | {(other.path, name)}):
            return definition
    return None


def _import_candidates(module: Module, node: ast.expr) -> list[tuple[str, str]]:
    """Returns (module, original name) of each import that an expression may refer to."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return [(module.imports.get(node.value.id, ("", ""))[0], node.attr)]
    if not isinstance(node, ast.Name):
        return []
    if node.id in module.imports:
        return [module.imports[node.id]]
    return [(name, node.id) for name in reversed(module.star_imports)]


def _own_module(dotted: str) -> Module | None:
    """Returns a module of this package."""
    file = _module_file(PACKAGE, dotted.partition(".")[2])
    return read_module(file) if file is not None else None


def base_classes(definition: ClassDefinition) -> Iterator[tuple[ast.expr, ClassDefinition | None]]:
    """Yields each base of a class: its expression, and its definition if that can be read."""
    for node in definition.node.bases:
        yield node, find_class(definition.module, node)


def derives_from_task(definition: ClassDefinition, guess: bool = True, visited: frozenset[tuple[Path, str]] = frozenset()) -> bool:
    """Whether a class derives from Task. With `guess`, an unreadable base from the user's project counts as a task."""
    if definition.is_task:
        return True
    if (definition.module.path, definition.name) in visited:
        return False
    for node, base in base_classes(definition):
        if base is not None and derives_from_task(base, guess, visited | {(definition.module.path, definition.name)}):
            return True
        if base is None and guess and isinstance(node, (ast.Name, ast.Attribute)) and _is_from_project(definition.module, node):
            return True
    return False


def _is_from_project(module: Module, node: ast.expr) -> bool:
    """Whether an expression refers to a module of the user's project."""
    name = module.imports.get(ast.unparse(node).split(".")[0], ("", ""))[0]
    if _file_of_import(module, name) is not None:
        return True
    return not name.startswith(".") and _file_of_import(module, name.split(".")[0]) is not None
