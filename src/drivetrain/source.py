"""Where settings come from: a task's source text, read without running it, or its live class.

Both give the same `Setting`s (`read_source` for a front end that must not import torch, `of_class` in
workers), so help, errors and values agree.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import linecache
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Union, get_args, get_origin

from drivetrain.outcomes import Problem
from drivetrain.project import import_roots, package_of
from drivetrain.settings import MISSING, PACKAGE, Duration, Setting, UnknownName, nearest, read_type, type_text

HOOKS = frozenset(
    [
        "model",
        "train_data",
        "eval_data",
        "loss",
        "metrics",
        "counts",
        "summary",
        "augment",
        "collate",
        "optimizer",
        "schedule",
        "predict",
        "exports",
    ]
)


@dataclass(frozen=True)
class TaskSource:
    """What the text of a task's class tells."""

    name: str
    doc: str
    settings: dict[str, Setting]
    hooks: frozenset[str]
    complete: bool
    """False where only importing the file can tell: computed defaults, bases from other modules."""
    search: dict[str, str] | None
    """What `tune` searches; None where only importing the file can tell."""


def read_source(path: Path, class_name: str | None = None) -> TaskSource:
    """Read one task class of a file; Problem when there is none, or several and none was named."""
    module = _module(path)
    tasks = [name for name in module.classes if _reaches_task(module, name)]
    imported = _imported_tasks(module)
    if class_name is None:
        tasks = [t for t in tasks if not t.startswith("_")] or list(imported)
        tasks = [t for t in tasks if t in imported or _reaches_task(module, t, guess=False)] or tasks
        if not tasks:
            raise Problem(f"{path} defines no task: write a class that derives from drivetrain.Task")
        if len(tasks) > 1:
            raise Problem(f"{path} defines {len(tasks)} tasks: name one, as {path}:{tasks[-1]} (of {', '.join(tasks)})")
        class_name = tasks[0]
    elif class_name in imported and class_name not in module.classes:
        pass
    elif class_name not in module.classes:
        hint = nearest(class_name, tasks) or (f" (it has {', '.join(tasks)})" if tasks else "")
        raise Problem(f"{path} has no class {class_name}{hint}")
    elif class_name not in tasks:
        raise Problem(f"{class_name} in {path} is no task: derive it from drivetrain.Task")
    settings: dict[str, Setting] = {}
    hooks: set[str] = set()
    home, name_there = (module, class_name) if class_name in module.classes else imported[class_name]
    complete = _collect(home, name_there, settings, hooks)
    doc = ast.get_docstring(home.classes[name_there]) or ""
    return TaskSource(class_name, doc, settings, frozenset(hooks), complete, _search(home, name_there))


def _imported_tasks(module: _Module) -> dict[str, tuple[_Module, str]]:
    """Returns the tasks that a file imports from modules beside it, by their names here: those are tasks of the file as well."""
    names = [name for name, (where, there) in module.imports.items() if there and _beside(module, where) is not None]
    names += [name for where in module.stars if (other := _beside(module, where)) is not None for name in _public(other)]
    found = {}
    for name in names:
        base = None if name.startswith("_") else _base(module, ast.Name(name, ast.Load()))
        if base is not None and not base[0].path.is_relative_to(PACKAGE) and _reaches_task(*base):
            found[name] = base
    return found


@dataclass(frozen=True)
class _Module:
    path: Path
    classes: dict[str, ast.ClassDef]
    imports: dict[str, tuple[str, str]]
    """local name -> (module, name there); a relative import's module begins with its dots"""
    stars: tuple[str, ...]
    """Modules of which everything is imported (`from x import *`)."""
    exported: tuple[str, ...] | None
    """The module's `__all__`, where it has one."""


@cache
def _module(path: Path) -> _Module:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise Problem(f"cannot read {path}: {error.strerror}") from None
    except SyntaxError as error:
        line = (error.text or "").rstrip()
        raise Problem(f"{path}, line {error.lineno}: {error.msg}\n    {line.strip()}") from None
    except (UnicodeDecodeError, ValueError):
        raise Problem(f"{path} is not Python source text") from None
    except (RecursionError, MemoryError):
        raise Problem(f"{path} is nested too deeply to be read") from None
    classes = {n.name: n for n in tree.body if isinstance(n, ast.ClassDef)}
    imports: dict[str, tuple[str, str]] = {}
    stars: list[str] = []
    exported: tuple[str, ...] | None = None
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            where = "." * node.level + (node.module or "")
            if node.names[0].name == "*":
                stars.append(where)
            elif node.module:
                imports |= {a.asname or a.name: (where, a.name) for a in node.names}
            else:  # a module, or a name of the package itself
                folder = _above(path, node.level)
                modules = {a.name for a in node.names if _file_in(folder, a.name) is not None}
                imports |= {a.asname or a.name: (where + a.name, "") if a.name in modules else (where, a.name) for a in node.names}
        elif isinstance(node, ast.Import):
            imports |= {a.asname or a.name.split(".")[0]: (a.name, "") for a in node.names}
        elif isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            with contextlib.suppress(ValueError, TypeError):
                exported = tuple(str(name) for name in ast.literal_eval(node.value))
    return _Module(path, classes, imports, tuple(stars), exported)


def _public(module: _Module, seen: frozenset[Path] = frozenset()) -> list[str]:
    """Returns the names that `from module import *` brings along, of classes and of what is imported there."""
    if module.path in seen:
        return []
    if module.exported is not None:
        return list(module.exported)
    others = [other for where in module.stars if (other := _beside(module, where)) is not None]
    names = [*module.classes, *module.imports, *(name for other in others for name in _public(other, seen | {module.path}))]
    return [name for name in names if not name.startswith("_")]


def _file_of(module: _Module, where: str) -> Path | None:
    """Returns the file of a module of the same project, as another one imports it; None where there is none."""
    level = len(where) - len(where.lstrip("."))
    if not where or where.split(".")[0] == PACKAGE.name:
        return None
    roots = (
        [module.path.parents[level - 1]]
        if level
        else [root for near in import_roots(module.path, package_of(module.path)) for root in near]
    )
    return next((file for root in roots if (file := _file_in(root, where.lstrip("."))) is not None), None)


def _above(path: Path, level: int) -> Path:
    """Returns the folder that so many dots of a relative import mean."""
    parents = path.absolute().parents
    return parents[min(level, len(parents)) - 1]


def _file_in(folder: Path, name: str) -> Path | None:
    """Returns the file of a module in a folder; without a name that of the folder itself, which is a package."""
    inside = folder.joinpath(*name.split("."))
    choices = [inside.with_suffix(".py")] if name else []
    return next((file for file in (*choices, inside / "__init__.py") if file.is_file()), None)


def _beside(module: _Module, where: str) -> _Module | None:
    """Returns the module of this name of the same project; None where there is none, or it cannot be read."""
    file = _file_of(module, where)
    try:
        return _module(file) if file is not None else None
    except Problem:
        return None  # importing it will tell


def _base(module: _Module, node: ast.expr, seen: frozenset[tuple[Path, str]] = frozenset()) -> tuple[_Module, str] | None:
    """Where a base class is defined, if here, in a module beside the file or in this package."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        targets = [(module.imports.get(node.value.id, ("", ""))[0], node.attr)]
    elif isinstance(node, ast.Name):
        if node.id in module.classes:
            return module, node.id
        targets = [module.imports[node.id]] if node.id in module.imports else [(where, node.id) for where in reversed(module.stars)]
    else:
        return None
    for where, name in targets:
        if name == "Task" and where in ("drivetrain", "drivetrain.task"):
            return _module(PACKAGE / "task.py"), "Task"
        other = _inside(where) if where.startswith("drivetrain.") else _beside(module, where)
        if other is None or not name or (other.path, name) in seen:  # modules may import each other
            continue
        if found := _base(other, ast.Name(name, ast.Load()), seen | {(other.path, name)}):
            return found
    return None


def _inside(where: str) -> _Module | None:
    """Returns a module of this package."""
    inside = PACKAGE.joinpath(*where.split(".")[1:])
    return next((_module(file) for file in (inside.with_suffix(".py"), inside / "__init__.py") if file.is_file()), None)


def _reaches_task(module: _Module, name: str, guess: bool = True, seen: frozenset[tuple[Path, str]] = frozenset()) -> bool:
    """Whether a class derives from Task; a base in another module of the user's may be one (`guess`)."""
    if name == "Task" and module.path == PACKAGE / "task.py":
        return True
    if (module.path, name) in seen:
        return False
    for node in module.classes[name].bases:
        found = _base(module, node)
        if found is not None and _reaches_task(*found, guess, seen | {(module.path, name)}):
            return True
        if found is None and guess and isinstance(node, (ast.Name, ast.Attribute)) and _imported(module, node):
            return True
    return False


def _imported(module: _Module, node: ast.expr) -> bool:
    """Whether a base comes from a module of the user's own."""
    where = module.imports.get(ast.unparse(node).split(".")[0], ("", ""))[0]
    return _file_of(module, where) is not None or (not where.startswith(".") and _file_of(module, where.split(".")[0]) is not None)


def _collect(module: _Module, name: str, settings: dict[str, Setting], hooks: set[str]) -> bool:
    """Gather base fields first, then the class's own, as inheritance does."""
    node, complete = module.classes[name], True
    for base in reversed(node.bases):
        found = _base(module, base)
        if found is None:
            complete = complete and ast.unparse(base) in ("object", "Generic", "ABC", "abc.ABC")
        else:
            complete = _collect(found[0], found[1], settings, hooks) and complete
    for field, annotation, value, doc in _fields(node):
        try:
            kind = _field_type(name, field, annotation)
        except UnknownName:
            kind, complete = str, False  # an alias: importing the file will tell
        if kind is None:
            continue
        try:
            default = MISSING if value is None else ast.literal_eval(value)
        except ValueError:
            default, complete = ast.unparse(value) if value else MISSING, False
        previous = settings.get(field)
        kind = _keep_marks(kind, previous)
        settings[field] = Setting(field, kind, default, doc or (previous.doc if previous else ""), name)
    for field, value in _plain_assignments(node):
        if field in settings:
            try:
                old = settings[field]
                settings[field] = Setting(field, old.type, ast.literal_eval(value), old.doc, name)
            except ValueError:
                complete = False
    hooks |= {n.name for n in node.body if isinstance(n, ast.FunctionDef)} & HOOKS
    return complete


def _search(module: _Module, name: str) -> dict[str, str] | None:
    """The value of `search`: the class's own, else the first base's that has one."""
    node = module.classes[name]
    annotated = [(field, value) for field, _, value, _ in _fields(node) if value is not None]
    for field, value in [*_plain_assignments(node), *annotated]:
        if field == "search":
            try:
                return dict(ast.literal_eval(value))
            except (ValueError, TypeError):
                return None
    for base in node.bases:
        found = _base(module, base)
        inherited = None if found is None else _search(*found)
        if inherited is None or inherited:
            return inherited
    return {}


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, str, ast.expr | None, str]]:
    """(name, annotation, default, the string under it) of each annotated field."""
    for here, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(here, ast.AnnAssign) and isinstance(here.target, ast.Name):
            doc = ""
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
                doc = inspect.cleandoc(after.value.value)
            yield here.target.id, ast.unparse(here.annotation), here.value, doc


def _plain_assignments(node: ast.ClassDef) -> Iterator[tuple[str, ast.expr]]:
    for statement in node.body:
        if isinstance(statement, ast.Assign):
            for target in statement.targets:
                if isinstance(target, ast.Name):
                    yield target.id, statement.value


def _field_type(owner: str, field: str, annotation: str) -> Any | None:
    """The field's type, or None where it is no setting (private, ClassVar)."""
    if field.startswith("_"):
        return None
    if field in HOOKS:
        raise Problem(f"{owner}.{field}: {field} is the name of a hook; give the setting another name")
    if annotation.split("[")[0].split(".")[-1] == "ClassVar":
        return None
    if field == "search":
        raise Problem(
            f"{owner}.search: search is what `tune` searches: assign a dict without an annotation, or give the setting another name"
        )
    try:
        kind = read_type(annotation)
    except UnknownName as error:
        if annotation.split("[")[0].split(".")[-1] in ("dict", "Dict", "tuple", "Tuple", "set", "Callable", "Any", "Tensor", "Path"):
            raise _not_a_setting(owner, field, annotation) from None
        raise error
    except ValueError:
        raise _not_a_setting(owner, field, annotation) from None
    return None if get_origin(kind) is ClassVar or kind is ClassVar else kind


def _not_a_setting(owner: str, field: str, annotation: str) -> Problem:
    return Problem(
        f"{owner}.{field}: {annotation} cannot be a setting (int, float, str, bool, list, Literal, None can); "
        f"assign it without an annotation, or name it _{field}"
    )


def _keep_marks(kind: Any, previous: Setting | None) -> Any:
    """A field written anew with the plain type of its base (`epochs: int = 10`) keeps the base's range or unit."""
    if previous is None or get_origin(kind) is Annotated:
        return kind
    plain = {Duration: (int, str, int | str)}.get(previous.type) or (_plain_form(previous.type),)
    return previous.type if kind in plain else kind


def _plain_form(kind: Any) -> Any:
    """A type without ranges."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return args[0]
    if origin in (Union, types.UnionType):
        return Union[tuple(_plain_form(a) for a in args)]  # noqa: UP007 (built at run time)
    return kind


# --- live classes ------------------------------------------------------------------------------


_OF_CLASS: dict[type, dict[str, Setting]] = {}


def of_class(cls: type) -> dict[str, Setting]:
    """The settings of a live class: its own and its bases', docstrings from the source where there is one."""
    if cls in _OF_CLASS:
        return _OF_CLASS[cls]
    settings: dict[str, Setting] = {}
    for owner in reversed(cls.__mro__):
        annotations = owner.__dict__.get("__annotations__", {})
        docs = _docs(owner) if annotations else {}
        hints = _hints(owner) if annotations else {}
        for field in annotations:
            text = annotations[field] if isinstance(annotations[field], str) else type_text(hints[field])
            try:
                kind = _field_type(owner.__name__, field, text)
            except UnknownName:  # an alias in the class's module
                kind = _field_type(owner.__name__, field, type_text(typing.get_type_hints(owner, include_extras=True)[field]))
            if kind is not None:
                kind = _keep_marks(kind, settings.get(field))
                doc = docs.get(field) or (settings[field].doc if field in settings else "")
                settings[field] = Setting(field, kind, owner.__dict__.get(field, MISSING), doc, owner.__name__)
        for field in settings:
            if field in owner.__dict__ and field not in annotations:
                old = settings[field]
                settings[field] = Setting(field, old.type, owner.__dict__[field], old.doc, owner.__name__)
    _OF_CLASS[cls] = settings
    return settings


def _hints(owner: type) -> dict[str, Any]:
    return {k: v for k, v in owner.__dict__["__annotations__"].items() if not isinstance(v, str)}


def class_source(cls: type) -> str | None:
    """The text of a live class, also of one in a notebook's cell; None where there is none."""
    try:
        return textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError):
        pass
    for member in vars(cls).values():  # a cell is no module, but its functions know the text they came from
        if isinstance(member, types.FunctionType):
            text = "".join(linecache.getlines(member.__code__.co_filename))
            try:
                nodes = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.ClassDef) and n.name == cls.__name__]
            except SyntaxError:
                return None
            return ast.get_source_segment(text, nodes[-1]) if nodes else None
    return None


def _docs(owner: type) -> dict[str, str]:
    text = class_source(owner)
    if text is None:
        return {}
    return {name: doc for name, _, _, doc in _fields(typing.cast(ast.ClassDef, ast.parse(text).body[0]))}


def to_json(settings: Mapping[str, Setting]) -> list[dict[str, Any]]:
    return [
        {"name": s.name, "type": s.type_text, "doc": s.doc, "owner": s.owner} | ({} if s.required else {"default": s.default})
        for s in settings.values()
    ]


def from_json(rows: list[dict[str, Any]]) -> dict[str, Setting]:
    return {
        row["name"]: Setting(row["name"], read_type(row["type"]), row.get("default", MISSING), row["doc"], row["owner"]) for row in rows
    }
