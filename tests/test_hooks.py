"""The table of hooks is complete, and no setting may have the name of one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from drivetrain.hooks import HOOKS, RESERVED
from drivetrain.outcomes import Problem
from drivetrain.settings_reader.declaration import read_declaration
from drivetrain.settings_reader.live import settings_of_class
from drivetrain.task import Task, overrides

TASKS_PAGE = Path(__file__).parent.parent / "docs" / "tasks.md"


def test_the_table_has_every_public_name_of_a_task() -> None:
    public = {name for name in vars(Task) if not name.startswith("_")}
    methods = {name for name in public if callable(vars(Task)[name])}
    assert methods - RESERVED.keys() == HOOKS.keys()
    assert public <= HOOKS.keys() | RESERVED.keys() | settings_of_class(Task).keys()
    assert all(getattr(Task, name).__doc__ for name in methods)


def test_the_page_about_tasks_explains_every_hook() -> None:
    section = TASKS_PAGE.read_text().split("## Hooks")[1].split("\n## ")[0]
    explained = {name for row in section.splitlines() if row.startswith("| `") for name in re.findall(r"`(\w+)\(", row.split(" | ")[0])}
    assert explained == HOOKS.keys()


@pytest.mark.parametrize("name", [*HOOKS, *RESERVED])
@pytest.mark.parametrize("annotation", ["bool", "int", "'str'"])
def test_a_setting_with_a_hooks_name_is_refused_in_one_line(name: str, annotation: str, tmp_path: Path) -> None:
    file = tmp_path / "shadow.py"
    file.write_text(f"from drivetrain import Task\nclass Shadow(Task):\n    {name}: {annotation} = 1\n")
    with pytest.raises(Problem) as from_text:
        read_declaration(file)
    live = type("Shadow", (Task,), {"__annotations__": {name: annotation}, name: 1})
    with pytest.raises(Problem) as from_class:
        settings_of_class(live)
    meaning = f"the name of a hook ({HOOKS[name]})" if name in HOOKS else RESERVED[name]
    assert str(from_text.value) == str(from_class.value) == f"Shadow.{name}: {name} is {meaning}; give the setting another name"


def test_a_hook_may_be_a_method_an_object_of_the_class_or_of_the_instance() -> None:
    class CollatingTask(Task):
        def collate(self, samples: list[object]) -> object:
            return samples

    assert not overrides(Task(), "collate")
    assert overrides(CollatingTask(), "collate")
    task = Task()
    task.collate = len  # type: ignore[method-assign, assignment]
    assert overrides(task, "collate")
