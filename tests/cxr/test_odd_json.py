"""Whatever a JSON file holds, reading it raises nothing: what does not fit is left out and counted."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.tasks.cxr.data.studies import Faults, StudyImage, StudyReader
from tests.cxr.small_data import answer, boxes, question

JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats() | st.text(max_size=5),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=3), children, max_size=3),
    max_leaves=5,
)
QUESTIONS = {
    "questions": [
        question("D03_where_is_finding", answer("pos", ["edema"], ["lungs"], localization=boxes("image-a", (1, 2, 30, 40)))),
        question("D04_how_severe_is_finding", answer(modifiers=[["severity", "mild"]]), extraction_quality={"general_issue_level": 3}),
        question(
            "D02_has_finding", answer("neg"), answer("pos", answer_quality={"clarity": "OPTIMAL"}), question_quality={"clarity": "OPTIMAL"}
        ),
    ]
}
GRAPH = {
    "observations": {"O01": {"regions": [{"region": "heart"}], "obs_entities": ["edema"], "localization": boxes("image-a", (1, 2, 30, 40))}}
}


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Returns the path of every value inside a value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, child in items for place in places(child, (*path, key)))]


def replaced(value: Any, path: tuple[Any, ...], junk: Any) -> Any:
    if not path:
        return junk
    value = copy.deepcopy(value)
    parent = value
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = junk
    return value


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(places(QUESTIONS)), st.sampled_from(places(GRAPH)), JUNK)
def test_any_value_may_stand_anywhere(question_place: tuple[Any, ...], graph_place: tuple[Any, ...], junk: Any) -> None:
    reader = StudyReader([StudyImage("image-a", 100, 100), StudyImage("image-b", 0, 0)], "p1/s1", Faults())
    reader.read_graph(replaced(GRAPH, graph_place, junk))
    reader.read_questions(replaced(QUESTIONS, question_place, junk))
    assert len(reader.rows.node_boxes) == 2 * len(reader.rows.nodes)
    for row in reader.rows.questions:
        assert sum(target not in (-1, None) for target in (row.binary, row.category, row.region, row.severity)) <= 1
    assert all(0 <= value <= 65535 for boxes in reader.rows.locations for box in boxes for value in box)
