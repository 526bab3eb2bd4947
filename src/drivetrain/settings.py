"""Settings: the annotated fields of a task class, read from its source without running it.

The same `Setting` comes from the source text (`read_source`, for a front end that must not import
torch) and from a live class (`of_class`, in workers), so help, errors and values agree.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import linecache
import math
import re
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

from drivetrain.outcomes import Problem

PACKAGE = Path(__file__).parent
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
        "export_inputs",
    ]
)


@dataclass(frozen=True)
class Range:
    """Inclusive bounds of a number: `Annotated[int, Range(1, 64)]`."""

    low: float
    high: float = float("inf")

    def __repr__(self) -> str:
        return f"Range({self.low})" if self.high == float("inf") else f"Range({self.low}, {self.high})"


@dataclass(frozen=True)
class Length:
    """A count of optimizer steps, of epochs (`2ep`) or a wall-clock time (`10min`)."""

    value: float
    unit: Literal["steps", "epochs", "seconds"]

    @staticmethod
    def parse(text: object) -> Length:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ep|epochs?|s|sec|min|h|d)?", str(text).strip())
        if match is None:
            raise ValueError("a number of steps, of epochs (2ep) or a time (30s, 10min, 4h)")
        number, unit = float(match[1]), match[2]
        if unit is None:
            if number != int(number):
                raise ValueError("a whole number of steps, or epochs as 0.5ep")
            return Length(int(number), "steps")
        if unit.startswith("ep"):
            return Length(number, "epochs")
        return Length(number * {"s": 1, "sec": 1, "min": 60, "h": 3600, "d": 86400}[unit], "seconds")

    def in_steps(self, steps_per_epoch: int) -> int | None:
        """The same as whole steps, or None for a wall-clock time."""
        if self.unit == "seconds":
            return None
        return int(self.value) if self.unit == "steps" else max(1, round(self.value * steps_per_epoch))


class _IsDuration:
    def __repr__(self) -> str:
        return "Duration"


Duration = Annotated[int | str, _IsDuration()]
_MISSING = inspect.Parameter.empty
_NAMES: dict[str, Any] = {
    **{t.__name__: t for t in (int, float, str, bool, list, Range)},
    "Literal": Literal,
    "Annotated": Annotated,
    "Duration": Duration,
    "Optional": typing.Optional,
    "Union": Union,
    "List": list,
    "ClassVar": ClassVar,
    "inf": float("inf"),
}


@dataclass(frozen=True)
class Setting:
    name: str
    type: Any
    default: Any
    doc: str = ""
    owner: str = "Task"

    @property
    def required(self) -> bool:
        return self.default is _MISSING

    @property
    def type_text(self) -> str:
        return type_text(self.type)

    def coerce(self, value: object) -> Any:
        """The value in the setting's type; text is read as on a command line."""
        try:
            return _coerce(self.type, value)
        except ValueError as error:
            doc = f" ({self.doc.splitlines()[0]})" if self.doc else ""
            raise Problem(f"{self.name}={value} does not fit: {self.name} is {error}{doc}") from None


def nearest(name: str, names: typing.Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


def resolve(settings: Mapping[str, Setting], given: Mapping[str, object], owner: str) -> dict[str, Any]:
    """Every setting's value: the given ones checked, the rest by default."""
    for name in given:
        if name not in settings:
            raise Problem(f"{owner} has no setting {name!r}{nearest(name, settings)} (all: --help)")
    missing = [s.name for s in settings.values() if s.required and s.name not in given]
    if missing:
        raise Problem(f"{owner} needs a value for {', '.join(missing)}: say {missing[0]}=VALUE")
    return {s.name: s.coerce(given[s.name]) if s.name in given else s.default for s in settings.values()}


# --- types -------------------------------------------------------------------------------------


def _coerce(kind: Any, value: object) -> Any:
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _coerce_annotated(args, value)
    if origin in (Union, types.UnionType):
        if value is None or (type(None) in args and str(value).lower() in ("none", "null")):
            if type(None) in args:
                return None
            raise ValueError(f"{type_text(kind)}, not empty")
        problems = []
        for option in args:
            if option is not type(None):
                try:
                    return _coerce(option, value)
                except ValueError as error:
                    problems.append(str(error))
        raise ValueError(" or ".join(problems))
    if origin is Literal:
        for choice in args:
            if value == choice or str(value) == str(choice):
                return choice
        raise ValueError(f"one of {', '.join(map(str, args))}{nearest(str(value), map(str, args))}")
    if origin is list or kind is list:
        parts = value.split(",") if isinstance(value, str) else value
        if not isinstance(parts, (list, tuple)):
            parts = [parts]
        item = args[0] if args else str
        return [_coerce(item, p.strip() if isinstance(p, str) else p) for p in parts if p != ""]
    return _coerce_plain(kind, value)


def _coerce_annotated(args: tuple[Any, ...], value: object) -> Any:
    if any(isinstance(mark, _IsDuration) for mark in args[1:]):
        Length.parse(value)
        return int(str(value)) if str(value).isdigit() else str(value)
    number = _coerce(args[0], value)
    for mark in args[1:]:
        if isinstance(mark, Range) and number is not None and not mark.low <= number <= mark.high:
            upper = f" to {mark.high:g}" if mark.high != float("inf") else " or more"
            raise ValueError(f"{_article(args[0])} of {mark.low:g}{upper}")
    return number


def _coerce_plain(kind: Any, value: object) -> Any:
    text = str(value).strip()
    if kind is bool:
        if text.lower() in ("true", "yes", "on", "1"):
            return True
        if text.lower() in ("false", "no", "off", "0"):
            return False
        raise ValueError("true or false")
    if kind in (int, float) and not isinstance(value, bool):
        try:
            number = float(text.replace("_", "")) if kind is float or "e" in text.lower() else int(text)
        except ValueError:
            raise ValueError(_article(kind)) from None
        if kind is int and (not math.isfinite(number) or number != int(number)):
            raise ValueError(_article(int))
        return kind(number)
    if kind is str and isinstance(value, (str, int, float)) and not isinstance(value, bool):
        return text if isinstance(value, str) else str(value)
    raise ValueError(_article(kind))


def _article(kind: Any) -> str:
    return {int: "a whole number", float: "a number", str: "text", bool: "true or false"}.get(kind, type_text(kind))


def type_text(kind: Any) -> str:
    """The annotation as one would write it; `read_type` reads it back."""
    origin, args = get_origin(kind), get_args(kind)
    if kind is type(None):
        return "None"
    if origin is Annotated:
        if isinstance(args[1], _IsDuration):
            return "Duration"
        return f"Annotated[{type_text(args[0])}, {', '.join(map(repr, args[1:]))}]"
    if origin in (Union, types.UnionType):
        return " | ".join(type_text(a) for a in args)
    if origin is Literal:
        return f"Literal[{', '.join(map(repr, args))}]"
    if origin is list:
        return f"list[{type_text(args[0])}]"
    return str(getattr(kind, "__name__", kind))


class _Flatten(ast.NodeTransformer):
    """`typing.Literal` and `drivetrain.Range` become plain names; anything else unusual is refused."""

    allowed = (ast.Expression, ast.Name, ast.Subscript, ast.Constant, ast.Tuple, ast.List, ast.BinOp, ast.BitOr,
               ast.Call, ast.Load, ast.UnaryOp, ast.USub, ast.keyword, ast.Add, ast.Sub, ast.Mult, ast.Pow)  # fmt: skip

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.Attribute):
            return ast.copy_location(ast.Name(node.attr, ast.Load()), node)
        if not isinstance(node, self.allowed):
            raise ValueError(ast.unparse(node))
        if isinstance(node, ast.Call) and not (isinstance(node.func, (ast.Name, ast.Attribute))):
            raise ValueError(ast.unparse(node))
        return self.generic_visit(node)


class UnknownName(ValueError):
    """An annotation uses a name that its text alone does not explain."""


def read_type(text: str) -> Any:
    """The type an annotation's text names; ValueError where it is none that a setting can have."""
    tree = ast.fix_missing_locations(_Flatten().visit(ast.parse(text, mode="eval")))
    if isinstance(tree.body, ast.Constant) and isinstance(tree.body.value, str):
        return read_type(tree.body.value)
    try:
        kind = eval(compile(tree, "<annotation>", "eval"), {"__builtins__": {}}, _NAMES)
    except NameError as error:
        raise UnknownName(text) from error
    except TypeError as error:
        raise ValueError(text) from error
    if get_origin(kind) is not ClassVar and kind is not ClassVar:
        _check_type(kind, text)
    return kind


def _check_type(kind: Any, text: str) -> None:
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType, list):
        for arg in args:
            _check_type(arg, text)
    elif origin is Annotated:
        _check_type(args[0], text)
    elif origin is not Literal and kind not in (int, float, str, bool, list, type(None)):
        raise ValueError(text)


# --- reading source ----------------------------------------------------------------------------


@dataclass(frozen=True)
class TaskSource:
    """What the text of a task's class tells."""

    name: str
    doc: str
    settings: dict[str, Setting]
    hooks: frozenset[str]
    complete: bool
    """False where only importing the file can tell: computed defaults, bases from other modules."""


def read_source(path: Path, class_name: str | None = None) -> TaskSource:
    """Read one task class of a file; Problem when there is none, or several and none was named."""
    module = _module(path)
    tasks = [name for name in module.classes if _reaches_task(module, name)]
    if class_name is None:
        tasks = [t for t in tasks if not t.startswith("_")]
        tasks = [t for t in tasks if _reaches_task(module, t, guess=False)] or tasks
        if not tasks:
            raise Problem(f"{path} defines no task: write a class that derives from drivetrain.Task")
        if len(tasks) > 1:
            raise Problem(f"{path} defines {len(tasks)} tasks: name one, as {path}:{tasks[-1]} (of {', '.join(tasks)})")
        class_name = tasks[0]
    elif class_name not in module.classes:
        hint = nearest(class_name, tasks) or (f" (it has {', '.join(tasks)})" if tasks else "")
        raise Problem(f"{path} has no class {class_name}{hint}")
    elif class_name not in tasks:
        raise Problem(f"{class_name} in {path} is no task: derive it from drivetrain.Task")
    settings: dict[str, Setting] = {}
    hooks: set[str] = set()
    complete = _collect(module, class_name, settings, hooks)
    doc = ast.get_docstring(module.classes[class_name]) or ""
    return TaskSource(class_name, doc, settings, frozenset(hooks), complete)


@dataclass(frozen=True)
class _Module:
    path: Path
    classes: dict[str, ast.ClassDef]
    imports: dict[str, tuple[str, str]]
    """local name -> (module, name there)"""


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
    classes = {n.name: n for n in tree.body if isinstance(n, ast.ClassDef)}
    imports: dict[str, tuple[str, str]] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module:
            imports |= {a.asname or a.name: (node.module, a.name) for a in node.names}
        elif isinstance(node, ast.Import):
            imports |= {a.asname or a.name.split(".")[0]: (a.name, "") for a in node.names}
    return _Module(path, classes, imports)


def _base(module: _Module, node: ast.expr) -> tuple[_Module, str] | None:
    """Where a base class is defined, if here or in this package."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        target = (module.imports.get(node.value.id, ("", ""))[0], node.attr)
    elif isinstance(node, ast.Name):
        if node.id in module.classes:
            return module, node.id
        target = module.imports.get(node.id, ("", ""))
    else:
        return None
    where, name = target
    if name == "Task" and where in ("drivetrain", "drivetrain.task"):
        return _module(PACKAGE / "task.py"), "Task"
    if where.startswith("drivetrain."):
        inside = PACKAGE.joinpath(*where.split(".")[1:])
        for file in (inside.with_suffix(".py"), inside / "__init__.py"):
            if file.is_file():
                other = _module(file)
                if name in other.classes:
                    return other, name
                if name in other.imports:
                    return _base(other, ast.Name(name, ast.Load()))
    return None


def _reaches_task(module: _Module, name: str, guess: bool = True) -> bool:
    """Whether a class derives from Task; a base in another module of the user's may be one (`guess`)."""
    if name == "Task" and module.path == PACKAGE / "task.py":
        return True
    for node in module.classes[name].bases:
        found = _base(module, node)
        if found is not None and _reaches_task(*found, guess):
            return True
        if found is None and guess and isinstance(node, (ast.Name, ast.Attribute)) and _imported(module, node):
            return True
    return False


def _imported(module: _Module, node: ast.expr) -> bool:
    """Whether a base comes from a module of the user's own."""
    where = module.imports.get(ast.unparse(node).split(".")[0], ("", ""))[0].split(".")[0]
    folder = module.path.parent
    return bool(where) and ((folder / f"{where}.py").is_file() or (folder / where / "__init__.py").is_file())


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
            default = _MISSING if value is None else ast.literal_eval(value)
        except ValueError:
            default, complete = ast.unparse(value) if value else _MISSING, False
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
                settings[field] = Setting(field, kind, owner.__dict__.get(field, _MISSING), doc, owner.__name__)
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
        row["name"]: Setting(row["name"], read_type(row["type"]), row.get("default", _MISSING), row["doc"], row["owner"]) for row in rows
    }
