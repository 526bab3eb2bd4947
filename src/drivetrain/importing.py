"""Imports a task's module: from the user's own files, or from the copies that a run keeps of them."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType

from drivetrain.outcomes import Problem
from drivetrain.project import import_root, import_roots, is_users, module_name, modules_of

ORIGINS = "origins.json"  # beside a run's copies: which file each is a copy of


def read_origins(folder: Path) -> dict[Path, str]:
    """A run's copies of modules, and the user's own file of each."""
    try:
        told = json.loads((folder / ORIGINS).read_text())["files"]
        return {folder / place: str(file) for place, file in told.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def import_module(file: Path, package: str, is_copy: bool) -> ModuleType:
    """Imports a task's file as the module it is, so that relative imports and imports of its project work.

    `is_copy`: the file is a run's copy. Modules of the same names that were imported from elsewhere, such as by a notebook or from
    another run's copies, stay as they are for whoever imported them.
    """
    root, name = import_root(file, package), module_name(file, package)
    near, far = ([root], []) if is_copy else import_roots(file, package)
    places = modules_of(file, package, is_copy)
    names = {module_name(root / place, ".".join(Path(place).parts[:-1])): place for place in places}
    before = {n: m for n in _with_parents(names) if (m := sys.modules.get(n)) is not None and not _is_of(m, near)}
    if package and (strange := next((m for n, m in before.items() if n == name.split(".")[0] and not is_users(_place_of(m))), None)):
        raise Problem(f"{file}: its package {strange.__name__} has the name of an installed one ({_place_of(strange)}): rename the folder")
    before = {n: m for n, m in before.items() if is_users(_place_of(m)) and n not in sys.stdlib_module_names}
    for displaced in before:
        del sys.modules[displaced]
    sys.path[:0] = [str(folder) for folder in near]
    sys.path += [str(folder) for folder in far if str(folder) not in sys.path]
    if is_copy and (origins := read_origins(root)):
        sys.meta_path.insert(0, _Copies(root, names, {str(copy): file for copy, file in origins.items() if Path(file).is_file()}))
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name) if package else _import_script(file, name, before)
    finally:
        if before:
            for n in _with_parents(names):
                sys.modules.pop(n, None)
            sys.modules.update(before)


def _import_script(file: Path, name: str, before: dict[str, ModuleType]) -> ModuleType:
    """A file that is in no package, whatever its name."""
    if name in before or name in sys.modules or name in sys.stdlib_module_names:
        name = f"task_{name}"
    spec = next((s for finder in sys.meta_path[:1] if isinstance(finder, _Copies) and (s := finder.script(name, file))), None)
    spec = spec or importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise Problem(f"{file} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _with_parents(names: dict[str, str]) -> list[str]:
    """The modules of these names and their packages, which may have no file."""
    return list(dict.fromkeys(".".join(name.split(".")[: i + 1]) for name in names for i in range(name.count(".") + 1)))


def _place_of(module: ModuleType) -> str:
    spec = getattr(module, "__spec__", None)
    places = list(getattr(module, "__path__", None) or [])
    return str(
        (spec.origin if spec and spec.has_location else None) or getattr(module, "__file__", None) or (places[0] if places else "<frozen")
    )


def _is_of(module: ModuleType, folders: Sequence[Path]) -> bool:
    return any(Path(_place_of(module)).resolve().is_relative_to(folder) for folder in folders)


class _Copies(MetaPathFinder):
    """Finds a run's copies of modules; `__file__` of each is the user's own file, so that files beside that are found."""

    def __init__(self, root: Path, names: dict[str, str], origins: dict[str, str]) -> None:
        self.root, self.names, self.origins = root, names, origins

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname not in self.names:
            return None
        return self._with_origin(PathFinder.find_spec(fullname, path if path is not None else [str(self.root)], target))

    def script(self, name: str, file: Path) -> ModuleSpec | None:
        return self._with_origin(importlib.util.spec_from_file_location(name, file))

    def _with_origin(self, spec: ModuleSpec | None) -> ModuleSpec | None:
        if spec is not None and spec.origin in self.origins and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _CopyLoader(spec.name, str(spec.origin), self.origins[str(spec.origin)])
        return spec


class _CopyLoader(SourceFileLoader):
    def __init__(self, name: str, path: str, origin: str) -> None:
        super().__init__(name, path)
        self.users_file = origin

    def exec_module(self, module: ModuleType) -> None:
        module.__file__ = self.users_file
        super().exec_module(module)
