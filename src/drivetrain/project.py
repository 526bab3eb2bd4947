"""The user's project: which of its modules a task's file imports, found by reading them, and where they are imported from."""

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

MARKERS = (".git", "pyproject.toml", "setup.py", "setup.cfg")  # of a project's top folder
MAX_FILES, MAX_BYTES = 500, 50_000_000  # of the modules that a run keeps
SUFFIXES = (".py", *EXTENSION_SUFFIXES)


def is_users(filename: str) -> bool:
    """Whether a file is the user's own: neither this package's, nor installed, nor Python's."""
    library: list[str | Path] = [PACKAGE, *(sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib"))]
    path = Path(filename)
    if filename.startswith(("<frozen", "<string")) or {"site-packages", "dist-packages"} & set(path.parts):
        return False
    return not any(path.is_relative_to(folder) for folder in library)


def package_of(file: Path) -> str:
    """The dotted name of the package a file is in, as its folders' `__init__.py` files and its own relative imports say; empty for none."""
    parts: list[str] = []
    folder = file.parent
    depth = max((level for level, _ in _imports(file)), default=0)
    while folder.name.isidentifier() and ((folder / "__init__.py").is_file() or len(parts) < depth):
        parts.insert(0, folder.name)
        folder = folder.parent
    return ".".join(parts)


def module_name(file: Path, package: str) -> str:
    return package if file.stem == "__init__" else f"{package}.{file.stem}".lstrip(".")


def import_root(file: Path, package: str) -> Path:
    """The folder that must be on Python's path for a file to be imported as a module of its package."""
    return file.parents[len(package.split(".")) if package else 0]


def import_roots(file: Path, package: str) -> tuple[list[Path], list[Path]]:
    """Folders that a file's absolute imports are looked up in: before what is installed, and after it.

    Before: where its package is, and its own folder, as of a script. After: the folders above, up to the top of the project, and
    their `src`.
    """
    base = import_root(file, package)
    near = list(dict.fromkeys([base, file.parent]))
    if not is_users(str(file)):  # a task that is installed: all of site-packages is not its project
        return near, []
    marked = [folder for folder in (base, *base.parents) if any((folder / marker).exists() for marker in MARKERS)][:1]
    here = [folder for folder in (base, *base.parents) if folder == Path.cwd()]
    depth = min(len(folder.parts) for folder in (base, *marked, *here))
    above = [folder for folder in base.parents if len(folder.parts) >= depth and folder not in (Path.home(), Path(folder.anchor))]
    return near, [*above, *(folder / "src" for folder in (base, *above) if (folder / "src").is_dir())]


def find_module(name: str, folder: Path) -> Path | None:
    """The file of a module that is named as in an import statement, by a user who stands in a folder."""
    near, far = import_roots(folder / "_.py", "")
    top = name.split(".")[0]
    for root in (*near, *far, *_installed_roots(top)):
        files = _find(root, name)
        if files and module_name(files[-1], ".".join(files[-1].parent.relative_to(root).parts)) == name:
            return files[-1]
    return None


def _installed_roots(top: str) -> tuple[Path, ...]:
    """The folders on Python's path that hold a package or module of this name."""
    return _look_up(top, os.getcwd(), tuple(sys.path))


@cache
def _look_up(top: str, here: str, path: tuple[str, ...]) -> tuple[Path, ...]:
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError, AttributeError):
        return ()
    places = [] if spec is None else list(spec.submodule_search_locations or [spec.origin or ""])
    return tuple(Path(place).resolve().parent for place in places if place not in ("built-in", "frozen", ""))


def _is_installed(top: str) -> bool:
    """Whether an import of this name finds something that is not the user's own."""
    return top in sys.stdlib_module_names or any(not is_users(str(root / top)) for root in _installed_roots(top))


def _find(root: Path, name: str) -> list[Path]:
    """The files that importing a dotted name reads below a folder: `__init__.py` of packages, then the module."""
    files: list[Path] = []
    folder = root
    for part in name.split("."):
        inside = folder / part
        module = next((file for suffix in SUFFIXES if (file := folder / f"{part}{suffix}").is_file()), None)
        if (inside / "__init__.py").is_file():
            files.append(inside / "__init__.py")
        elif module is not None:
            return [*files, module]
        elif not inside.is_dir():  # the rest of the name is in the module
            break
        folder = inside
    return files


def modules_of(file: Path, package: str, is_copy: bool = False) -> dict[str, Path]:
    """A task's file and the modules of its project that it imports, and those that they do: path below the import root -> file.

    `is_copy`: the file is a run's copy, and what is beside it all there is.
    """
    base = import_root(file, package)
    near, far = ([base], []) if is_copy else import_roots(file, package)
    found: dict[str, Path] = {}
    waiting = [(base, one) for one in (*_find(base, module_name(file, package)), file)]
    size = 0
    while waiting:
        root, one = waiting.pop()
        place = one.relative_to(root).as_posix()
        if place in found:
            continue
        found[place] = one
        size += one.stat().st_size
        if len(found) > MAX_FILES or size > MAX_BYTES:
            raise Problem(
                f"{file.name} imports more of its project than a run keeps ({MAX_FILES} modules, {MAX_BYTES / 1e6:.0f} MB):"
                f" install what changes seldom as a package (pip install), or import less (the last one was {one})"
            )
        for level, name in _imports(one):
            waiting += _resolve(level, name, one, root, near, far)
    return dict(sorted(found.items()))


def _resolve(level: int, name: str, file: Path, root: Path, near: list[Path], far: list[Path]) -> list[tuple[Path, Path]]:
    """(import root, file) of each file that an import statement reads in the project."""
    any_module = name.endswith("*")
    name = name.removesuffix("*").rstrip(".")
    package = file.parent.relative_to(root).parts
    if level > len(package):
        return []
    if level or (any_module and not name and package):
        name = ".".join([*package[: len(package) - max(0, level - 1)], *filter(None, [name])])
        places = [root]
    elif any_module and not name:
        return [(root, module) for module in sorted(file.parent.glob("*.py"))]
    else:
        places = _places(name.split(".")[0], file, root, near, far)
    for place in places:
        if any_module and place.joinpath(*name.split(".")).is_dir():
            modules = sorted(place.joinpath(*name.split(".")).rglob("*.py"))
            return [(place, module) for module in modules if not any(p.startswith(".") for p in module.relative_to(place).parts)]
        if files := _find(place, name):
            return [(place, module) for module in files]
    return []


def _places(top: str, file: Path, root: Path, near: list[Path], far: list[Path]) -> list[Path]:
    """The folders of the project that an absolute import of this name may be found in."""
    if top == PACKAGE.name:
        return []
    if not is_users(str(file)) and file.relative_to(root).parts[0].removesuffix(".py") != top:
        return []  # of an installed task its own package alone
    if regular := [one for one in near if _find(one, top)]:
        return regular
    if _is_installed(top):
        return []
    by_path = [one for one in _installed_roots(top) if any(one.is_relative_to(folder) for folder in (*near, *far))]  # PYTHONPATH
    return [*near, *far, *by_path]


def _imports(file: Path) -> Iterator[tuple[int, str]]:
    """(level, dotted name) of all that a file imports: statements anywhere in it, and calls of `import_module`. A name that ends
    with * is a package of which any module may be meant."""
    if file.suffix != ".py":
        return
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return  # perhaps never imported; where it is, Python will tell
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = f"{node.module}." if node.module else ""
            if module:
                yield node.level, str(node.module)
            yield from ((node.level, f"{module}{alias.name}") for alias in node.names if alias.name != "*")
        elif isinstance(node, ast.Call) and node.args and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            name = _beginning(node.args[0])
            level = len(name) - len(name.lstrip("."))
            yield level, name.lstrip(".")


def _beginning(node: ast.expr) -> str:
    """The name that a call imports; of a computed one its beginning, up to a dot, and *."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    first = node.values[0] if isinstance(node, ast.JoinedStr) and node.values else node.left if isinstance(node, ast.BinOp) else None
    known = first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else ""
    dots = len(known) - len(known.lstrip("."))
    return "." * dots + known.lstrip(".").rpartition(".")[0] + "*"
