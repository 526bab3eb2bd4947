"""Settings are the same when read from source text or from the class; text is converted to their types."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.outcomes import Problem
from drivetrain.recipe import load
from drivetrain.settings import PACKAGE, Length, Setting, read_type, resolve, type_text
from drivetrain.settings_reader.declaration import read_declaration
from drivetrain.settings_reader.live import settings_from_json, settings_of_class, settings_to_json
from drivetrain.task_ref import BUILT_IN, find_task, load_class


@pytest.mark.parametrize("name", BUILT_IN)
def test_text_and_live_class_give_the_same_settings(name: str) -> None:
    task = find_task(name)
    live = settings_of_class(load_class(task))
    assert task.declaration().complete
    assert task.declaration().settings == live
    assert settings_from_json(settings_to_json(live)) == live
    assert all(s.doc for s in live.values()), "every setting is documented"


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("int", "12", 12), ("int", "1e3", 1000), ("float", "1e-3", 0.001), ("float", "3", 3.0), ("bool", "yes", True), ("bool", "off", False),
        ("str", "a=b", "a=b"), ("str | None", "none", None), ("int | None", "5", 5), ("list[int]", "1,2, 3", [1, 2, 3]), ("list[str]", "", []),
        ("Literal['a', 'b']", "b", "b"), ("Literal[1, 2]", "2", 2), ("Annotated[int, Range(1, 5)]", "5", 5), ("Duration", "2ep", "2ep"),
        ("Duration", "10", 10), ("Optional[float]", "0.5", 0.5), ("'int'", "4", 4), ("typing.Literal['x']", "x", "x"),
    ],
)  # fmt: skip
def test_text_becomes_a_value_of_the_type(kind: str, text: str, value: Any) -> None:
    coerced = Setting("s", read_type(kind), None).coerce(text)
    assert (coerced, type(coerced)) == (value, type(value))
    assert type_text(read_type(type_text(read_type(kind)))) == type_text(read_type(kind))


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("int", "1.5", "a whole number"), ("int", "", "a whole number"), ("bool", "maybe", "true or false"), ("float", "fast", "a number"),
        ("Annotated[int, Range(1, 5)]", "6", "a whole number of 1 to 5"), ("Annotated[float, Range(0)]", "-1", "a number of 0 or more"),
        ("Duration", "soon", "a number of steps"), ("Duration", "1.5", "a whole number of steps"), ("list[int]", "1,b", "a whole number"),
    ],
)  # fmt: skip
def test_an_error_names_the_allowed_values(kind: str, text: str, message: str) -> None:
    with pytest.raises(Problem, match=message):
        Setting("s", read_type(kind), None).coerce(text)


def test_annotations_cannot_run_code() -> None:
    for text in ("__import__('os').system('x')", "[c for c in ()]", "lambda: 0", "dict[str, int]", "torch.Tensor"):
        with pytest.raises(ValueError, match=r"."):
            read_type(text)


@given(st.integers(0, 10**6), st.integers(1, 500))
def test_lengths_in_steps(number: int, per_epoch: int) -> None:
    assert Length.parse(number).in_steps(per_epoch) == number
    assert Length.parse(f"{number}ep").in_steps(per_epoch) == max(1, number * per_epoch)
    assert Length.parse(f"{number}min").in_steps(per_epoch) is None
    assert Length.parse(f"{number}min").value == 60 * number


@pytest.mark.parametrize(("text", "seconds"), [("30s", 30), ("10min", 600), ("1.5h", 5400), ("2d", 172_800)])
def test_lengths_in_seconds(text: str, seconds: float) -> None:
    assert Length.parse(text) == Length(seconds, "seconds")


def test_a_missing_required_setting_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "t.py"
    file.write_text("from drivetrain import Task\nclass T(Task):\n    path: str\n    '''Where.'''\n")
    declaration = read_declaration(file)
    with pytest.raises(Problem, match="give path=VALUE"):
        resolve(declaration.settings, {}, "t")


def test_settings_are_inherited_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "t.py"
    file.write_text(
        "import drivetrain as d\nfrom torch import nn\n"
        "class _Base(d.Task):\n    a: int = 1\n    'A.'\n    b: int = 2\n"
        "class T(_Base):\n    a: int = 3\n    b = 4\n    _private: dict = {}\n    c: 'ClassVar[int]' = 5\n"
        "class Net(nn.Module):\n    depth: int = 3\n"
    )
    declaration = read_declaration(file)
    settings = declaration.settings
    assert declaration.name == "T"
    assert declaration.complete
    assert (settings["a"].default, settings["a"].doc, settings["b"].default) == (3, "A.", 4)
    assert "c" not in settings
    assert "depth" not in settings


def test_drivetrain_s_own_variables_are_no_settings() -> None:
    """Whoever names another kubectl, or a longer lease of a bucket, gets no note about an unknown setting."""
    sources = "".join(file.read_text() for file in PACKAGE.rglob("*.py"))
    variables = set(re.findall(r"\bDRIVETRAIN_[A-Z][A-Z_]*", sources))
    assert {"DRIVETRAIN_KUBECTL", "DRIVETRAIN_BUCKET_LEASE"} <= variables
    (recipe,) = load("digits", [], dict.fromkeys(variables, "6"))
    assert recipe.notices == ()
