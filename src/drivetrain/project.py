"""The user's project: finds the modules that a task's file imports, and their folders, by reading source text."""

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
"""Files that mark a project's top folder."""
MAX_FILES, MAX_BYTES = 500, 50_000_000
"""Limits of the modules that are copied into a run."""
MODULE_SUFFIXES = (".py", *EXTENSION_SUFFIXES)


def is_users(filename: str) -> bool:
    """Whether a file belongs to the user: not to this package, an installed package or Python."""
    library_folders: list[str | Path] = [PACKAGE, *(sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib"))]
    path = Path(filename)
    if filename.startswith(("<frozen", "<string")) or {"site-packages", "dist-packages"} & set(path.parts):
        return False
    if path.parts[-2:] == ("bin", PACKAGE.name):
        return False  # the command itself: in a worker of another launcher it is the outermost frame
    return not any(path.is_relative_to(folder) for folder in library_folders)


def package_of(file: Path) -> str:
    """Returns the dotted name of the package that contains a file; empty if there is none.

    A folder belongs to the package if it has an `__init__.py`, or if a relative import of the file refers to it.
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
    """Returns the folders to search for a file's absolute imports: those before installed packages, and those after them.

    Before: the folder that contains its package, and its own folder, as for a script. After: the parent folders up to the
    project's top folder, and their `src`.
    """
    base = import_root(file, package)
    near = list(dict.fromkeys([base, file.parent]))
    if not is_users(str(file)):  # for an installed task, the parent folder is site-packages
        return near, []
    marked = [folder for folder in (base, *base.parents) if any((folder / marker).exists() for marker in PROJECT_MARKERS)][:1]
    current = [folder for folder in (base, *base.parents) if folder == Path.cwd()]
    depth = min(len(folder.parts) for folder in (base, *marked, *current))
    above = [folder for folder in base.parents if len(folder.parts) >= depth and folder not in (Path.home(), Path(folder.anchor))]
    return near, [*above, *(folder / "src" for folder in (base, *above) if (folder / "src").is_dir())]


def find_module(name: str, folder: Path) -> Path | None:
    """Returns the file of a module, as an import statement in a file of this folder would find it; None if there is none."""
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
    """Searches Python's path. The other arguments only make the cache's key complete: the result depends on them."""
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError, AttributeError):
        return ()
    locations = [] if spec is None else list(spec.submodule_search_locations or [spec.origin or ""])
    return tuple(Path(location).resolve().parent for location in locations if location not in ("built-in", "frozen", ""))


def _is_installed(top: str) -> bool:
    """Whether an import of this name finds a module that is not the user's."""
    return top in sys.stdlib_module_names or any(not is_users(str(root / top)) for root in _installed_roots(top))


def _files_of_module(root: Path, name: str) -> list[Path]:
    """Returns the files below a folder that Python reads to import a dotted name: each package's `__init__.py`, then the module."""
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

    `is_copy`: the file is a run's copy, in the same folder as copies of its project's modules.
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
                f"{file.name} imports more of its project than a run copies ({MAX_FILES} modules, {MAX_BYTES / 1e6:.0f} MB):"
                f" install stable parts as a package (pip install), or import less (the last module was {module})"
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
    """Yields (level, dotted name) of each import statement and each call of `import_module` in a file.

    `package.*` stands for a name that is computed at run time: any module of the package.
    """
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
    """Returns the name that a call imports; for a name that is computed at run time, its constant packages and *."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    first: ast.expr | None = None
    if isinstance(node, ast.JoinedStr) and node.values:
        first = node.values[0]
    elif isinstance(node, ast.BinOp):
        first = node.left
    constant_part = first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else ""
    num_dots = len(constant_part) - len(constant_part.lstrip("."))
    return "." * num_dots + constant_part.lstrip(".").rpartition(".")[0] + "*"
