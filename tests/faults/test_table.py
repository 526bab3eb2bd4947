"""The table of one-line faults fits the source and the tests."""

from __future__ import annotations

import ast
from collections import Counter

import pytest

from tests.faults.one_line_faults import PACKAGE, ROOT, occurrences
from tests.faults.table import FAULTS, Fault


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_each_fault_changes_one_line_that_is_in_the_source_once(fault: Fault) -> None:
    assert occurrences(fault) == 1
    faulty = (PACKAGE / fault.file).read_text().replace(fault.old, fault.new)
    before, after = (PACKAGE / fault.file).read_text().splitlines(), faulty.splitlines()
    assert len(before) == len(after) and sum(a != b for a, b in zip(before, after, strict=True)) == 1
    ast.parse(faulty)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_each_fault_names_tests_that_exist(fault: Fault) -> None:
    for node in fault.tests:
        file, _, name = node.partition("::")
        assert f"def {name.partition('[')[0]}(" in (ROOT / file).read_text()


def test_names_are_given_once() -> None:
    assert not [name for name, times in Counter(fault.name for fault in FAULTS).items() if times > 1]
