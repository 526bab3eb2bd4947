"""The user's project: which of its modules a task's file imports, as their text says, and the folders they are imported from."""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from drivetrain.outcomes import Problem
from drivetrain.settings import PACKAGE

PROJECT_MARKERS = (".git", "pyproject.toml", "setup.py", "setup.cfg")
"""Files of a project's top folder."""
MAX_FILES, MAX_BYTES = 500, 50_000_000
"""Limits of the modules that are copied into a run."""
MODULE_SUFFIXES = (".py", *EXTENSION_SUFFIXES)


def is_users(filename: str) -> bool:
    """Whether a file is the user's own: not this package's, not installed, not Python's."""
    library_folders: list[str | Path] = [PACKAGE, *(sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib"))]
    path = Path(filename)
    if filename.startswith(("<frozen", "<string")) or {"site-packages", "dist-packages"} & set(path.parts):
        return False
    return not any(path.is_relative_to(folder) for folder in library_folders)


def package_of(file: Path) -> str:
    """Returns the dotted name of a file's package; empty where it is in none.

    A folder belongs to the package if it has an `__init__.py`, or if the file's relative imports reach it.
    """
    parts: list[str] = []
    folder = file.parent
    levels = max((level for level, _ in _imports(file)), default=0)
    while folder.name.isidentifier() and ((folder / "__init__.py").is_file() or len(parts) < levels):
        parts.insert(0, folder.name)
        folder = folder.parent
    return ".".join(parts)


def module_name(file: Path, package: str) -> str:
    """Returns the dotted name of a file of a package."""
    return package if file.stem == "__init__" else f"{package}.{file.stem}".lstrip(".")


def import_root(file: Path, package: str) -> Path:
    """Returns the folder that must be on Python's path for a file to be imported as a module of its package."""
    return file.parents[len(package.split(".")) if package else 0]


def import_roots(file: Path, package: str) -> tuple[list[Path], list[Path]]:
    """Returns the folders where a file's absolute imports are looked up: those before installed packages, and those after them.

    Before: the folder that holds its package, and its own folder, as for a script. After: the folders above, up to the project's
    top folder, and their `src`.
    """
    base = import_root(file, package)
    near = list(dict.fromkeys([base, file.parent]))
    if not is_users(str(file)):  # an installed task: its project is not all of site-packages
        return near, []
    marked = [folder for folder in (base, *base.parents) if any((folder / marker).exists() for marker in PROJECT_MARKERS)][:1]
    current = [folder for folder in (base, *base.parents) if folder == Path.cwd()]
    depth = min(len(folder.parts) for folder in (base, *marked, *current))
    above = [folder for folder in base.parents if len(folder.parts) >= depth and folder not in (Path.home(), Path(folder.anchor))]
    return near, [*above, *(folder / "src" for folder in (base, *above) if (folder / "src").is_dir())]


def find_module(name: str, folder: Path) -> Path | None:
    """Returns the file of a module named as in an import statement, looked up from a folder; None where there is none."""
    near, far = import_roots(folder / "_.py", "")
    top = name.split(".")[0]
    for root in (*near, *far, *_installed_roots(top)):
        files = _files_of_module(root, name)
        if files and module_name(files[-1], ".".join(files[-1].parent.relative_to(root).parts)) == name:
            return files[-1]
    return None


def _installed_roots(top: str) -> tuple[Path, ...]:
    """Returns the folders on Python's path that hold a package or module of this name."""
    return _search_path(top, os.getcwd(), tuple(sys.path))


@cache
def _search_path(top: str, current_folder: str, python_path: tuple[str, ...]) -> tuple[Path, ...]:
    """Searches Python's path; the other arguments are only keys of the cache, because the result depends on them."""
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError, AttributeError):
        return ()
    locations = [] if spec is None else list(spec.submodule_search_locations or [spec.origin or ""])
    return tuple(Path(location).resolve().parent for location in locations if location not in ("built-in", "frozen", ""))


def _is_installed(top: str) -> bool:
    """Whether an import of this name finds something that is not the user's own."""
    return top in sys.stdlib_module_names or any(not is_users(str(root / top)) for root in _installed_roots(top))


def _files_of_module(root: Path, name: str) -> list[Path]:
    """Returns the files below a folder that an import of a dotted name reads: `__init__.py` of its packages, then the module."""
    files: list[Path] = []
    folder = root
    for part in name.split("."):
        inside = folder / part
        module = next((file for suffix in MODULE_SUFFIXES if (file := folder / f"{part}{suffix}").is_file()), None)
        if (inside / "__init__.py").is_file():
            files.append(inside / "__init__.py")
        elif module is not None:
            return [*files, module]
        elif not inside.is_dir():  # the rest of the name is defined in the module
            break
        folder = inside
    return files


def modules_of(file: Path, package: str, is_copy: bool = False) -> dict[str, Path]:
    """Returns a task's file and all modules of its project that it imports, directly or not: path below the import root -> file.

    `is_copy`: the file is a run's copy, and all of its project is beside it.
    """
    base = import_root(file, package)
    near, far = ([base], []) if is_copy else import_roots(file, package)
    modules: dict[str, Path] = {}
    to_visit = [(base, module) for module in (*_files_of_module(base, module_name(file, package)), file)]
    size = 0
    while to_visit:
        root, module = to_visit.pop()
        path = module.relative_to(root).as_posix()
        if path in modules:
            continue
        modules[path] = module
        size += module.stat().st_size
        if len(modules) > MAX_FILES or size > MAX_BYTES:
            raise Problem(
                f"{file.name} imports more of its project than a run keeps ({MAX_FILES} modules, {MAX_BYTES / 1e6:.0f} MB):"
                f" install what changes seldom as a package (pip install), or import less (the last one was {module})"
            )
        for level, name in _imports(module):
            to_visit += _resolve_import(level, name, module, root, near, far)
    return dict(sorted(modules.items()))


def _resolve_import(level: int, name: str, file: Path, root: Path, near: list[Path], far: list[Path]) -> list[tuple[Path, Path]]:
    """Returns (import root, file) of each file of the project that an import reads. The name is one that `_imports` yields."""
    any_module = name.endswith("*")
    name = name.removesuffix("*").rstrip(".")
    package = file.parent.relative_to(root).parts
    if level > len(package):
        return []
    if level or (any_module and not name and package):
        name = ".".join([*package[: len(package) - max(0, level - 1)], *filter(None, [name])])
        folders = [root]
    elif any_module and not name:
        return [(root, module) for module in sorted(file.parent.glob("*.py"))]
    else:
        folders = _import_folders(name.split(".")[0], file, root, near, far)
    for folder in folders:
        if any_module and folder.joinpath(*name.split(".")).is_dir():
            modules = sorted(folder.joinpath(*name.split(".")).rglob("*.py"))
            return [(folder, module) for module in modules if not any(p.startswith(".") for p in module.relative_to(folder).parts)]
        if files := _files_of_module(folder, name):
            return [(folder, module) for module in files]
    return []


def _import_folders(top: str, file: Path, root: Path, near: list[Path], far: list[Path]) -> list[Path]:
    """Returns the project's folders where an absolute import of this name may be found."""
    if top == PACKAGE.name:
        return []
    if not is_users(str(file)) and file.relative_to(root).parts[0].removesuffix(".py") != top:
        return []  # the project of an installed task is its own package
    if first := [folder for folder in near if _files_of_module(folder, top)]:
        return first
    if _is_installed(top):
        return []
    from_pythonpath = [root for root in _installed_roots(top) if any(root.is_relative_to(folder) for folder in (*near, *far))]
    return [*near, *far, *from_pythonpath]


def _imports(file: Path) -> Iterator[tuple[int, str]]:
    """Yields (level, dotted name) of each import statement and each call of `import_module` in a file. After a name that is computed
    at run time stands *: any module that begins with it may be meant."""
    if file.suffix != ".py":
        return
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return  # if it is imported, Python reports the error
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = f"{node.module}." if node.module else ""
            if module:
                yield node.level, str(node.module)
            yield from ((node.level, f"{module}{alias.name}") for alias in node.names if alias.name != "*")
        elif isinstance(node, ast.Call) and node.args and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            name = _name_or_prefix(node.args[0])
            level = len(name) - len(name.lstrip("."))
            yield level, name.lstrip(".")


def _name_or_prefix(node: ast.expr) -> str:
    """Returns the name that a call imports; of one that is computed at run time, what is before its last known dot, and *."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    first = node.values[0] if isinstance(node, ast.JoinedStr) and node.values else node.left if isinstance(node, ast.BinOp) else None
    known = first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else ""
    dots = len(known) - len(known.lstrip("."))
    return "." * dots + known.lstrip(".").rpartition(".")[0] + "*"
