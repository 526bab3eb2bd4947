"""Imports a task's module: from the user's own files, or from a run's copies of them."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType

from drivetrain.outcomes import Problem
from drivetrain.project import import_root, import_roots, is_users, module_name, modules_of

ORIGINS = "origins.json"
"""A file in the folder of a run's copies: it maps each copy to the user's own file."""


def read_origins(folder: Path) -> dict[Path, str]:
    """Returns the user's own file for each copy of a module in a run's folder."""
    try:
        files = json.loads((folder / ORIGINS).read_text())["files"]
        return {folder / path: str(file) for path, file in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def import_module(file: Path, package: str, is_copy: bool) -> ModuleType:
    """Imports a task's file as a module of its package, so that its relative imports and its imports of the project work.

    `is_copy`: the file is a run's copy. Modules of the same names may be imported already: by a notebook, or from another run's
    copies. They are taken out of `sys.modules` during the import and put back afterwards.
    """
    root, name = import_root(file, package), module_name(file, package)
    near, far = ([root], []) if is_copy else import_roots(file, package)
    names = [module_name(root / path, ".".join(Path(path).parts[:-1])) for path in modules_of(file, package, is_copy)]
    displaced = _modules_from_elsewhere(_with_packages(names), near)
    if package and (installed := displaced.get(name.split(".")[0])) and not is_users(_origin_of(installed)):
        raise Problem(
            f"{file}: its package {installed.__name__} has the same name as an installed package ({_origin_of(installed)}): rename the folder"
        )
    displaced = {n: m for n, m in displaced.items() if is_users(_origin_of(m)) and n not in sys.stdlib_module_names}
    for displaced_name in displaced:
        del sys.modules[displaced_name]
    sys.path[:0] = [str(folder) for folder in near]
    sys.path += [str(folder) for folder in far if str(folder) not in sys.path]
    if is_copy and (origins := read_origins(root)):
        origins_of_copies = {str(copy): origin for copy, origin in origins.items() if Path(origin).is_file()}
        sys.meta_path.insert(0, _CopyFinder(root, set(names), origins_of_copies))
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name) if package else _import_script(file, name, displaced)
    finally:
        if displaced:
            for imported in _with_packages(names):
                sys.modules.pop(imported, None)
            sys.modules.update(displaced)


def _modules_from_elsewhere(names: Iterable[str], folders: Sequence[Path]) -> dict[str, ModuleType]:
    """Returns the modules of these names that were imported from other folders than these."""
    modules = {name: module for name in names if (module := sys.modules.get(name)) is not None}
    return {name: module for name, module in modules.items() if not _is_from(module, folders)}


def _import_script(file: Path, name: str, displaced: dict[str, ModuleType]) -> ModuleType:
    """Imports a file that is in no package, under its own name if no other module has it."""
    if name in displaced or name in sys.modules or name in sys.stdlib_module_names:
        name = f"task_{name}"
    finder = sys.meta_path[0]
    spec = finder.script_spec(name, file) if isinstance(finder, _CopyFinder) else None
    spec = spec or importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise Problem(f"{file} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _with_packages(names: Iterable[str]) -> list[str]:
    """Returns the names of these modules and of all packages that contain them."""
    return list(dict.fromkeys(".".join(name.split(".")[: i + 1]) for name in names for i in range(name.count(".") + 1)))


def _origin_of(module: ModuleType) -> str:
    """Returns a module's file, or the folder of a package without a file."""
    spec = getattr(module, "__spec__", None)
    if spec and spec.has_location and spec.origin:
        return str(spec.origin)
    folders = list(getattr(module, "__path__", None) or [])
    return str(getattr(module, "__file__", None) or (folders[0] if folders else "<frozen"))


def _is_from(module: ModuleType, folders: Sequence[Path]) -> bool:
    return any(Path(_origin_of(module)).resolve().is_relative_to(folder) for folder in folders)


class _CopyFinder(MetaPathFinder):
    """Finds a run's copies of modules. Their `__file__` is the user's own file, so that code finds data files in its folder."""

    def __init__(self, root: Path, names: set[str], origins: dict[str, str]) -> None:
        self.root, self.names, self.origins = root, names, origins

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname not in self.names:
            return None
        return self._with_origin(PathFinder.find_spec(fullname, path if path is not None else [str(self.root)], target))

    def script_spec(self, name: str, file: Path) -> ModuleSpec | None:
        """Returns the spec of a file that is in no package."""
        return self._with_origin(importlib.util.spec_from_file_location(name, file))

    def _with_origin(self, spec: ModuleSpec | None) -> ModuleSpec | None:
        if spec is not None and spec.origin in self.origins and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _CopyLoader(spec.name, str(spec.origin), self.origins[str(spec.origin)])
        return spec


class _CopyLoader(SourceFileLoader):
    """Loads a run's copy of a module, and sets its `__file__` to the user's own file."""

    def __init__(self, name: str, path: str, origin: str) -> None:
        super().__init__(name, path)
        self.users_file = origin

    def exec_module(self, module: ModuleType) -> None:
        module.__file__ = self.users_file
        super().exec_module(module)
