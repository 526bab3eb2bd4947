"""The words of the data sets: question types, grades, views, severities and CheXpert labels."""

from __future__ import annotations

import pytest

from drivetrain.tasks.cxr.vocabulary import (
    CHEXPERT,
    GRADES,
    INVERTED,
    QUESTION_TYPES,
    VIEWS,
    Head,
    allowed_views,
    chexpert_match,
    head_of_type,
    question_grade,
    severity_level,
    type_id,
    view_id,
)

HEADS_OF_CODES = {
    Head.BINARY: "B03 B04 B10 B11 B13 B14 B15 B16 C03 C04 C08 D02 D06",
    Head.CATEGORY: "A B01 B02 B08 B09 B12 C07 D01 D05",
    Head.REGION: "C01 C02 D03 D07",
    Head.SEVERITY: "D04",
}


def test_every_documented_type_has_a_head() -> None:
    heads = {name.split("_")[0]: head_of_type(number) for number, name in enumerate(QUESTION_TYPES)}
    assert heads == {code: head for head, codes in HEADS_OF_CODES.items() for code in codes.split()}
    assert {QUESTION_TYPES[number] for number in INVERTED} == {"B04_is_normal", "B11_is_normal_subcat", "C04_is_normal_region"}


def test_long_names_codes_and_short_names_are_the_same_type() -> None:
    for number, name in enumerate(QUESTION_TYPES):
        code, _, short_name = name.partition("_")
        assert type_id(name) == type_id(name.upper()) == number
        assert type_id(short_name, "abnormal" if code == "B12" else "finding") == number
        assert code == "A" or type_id(code) == number
    assert type_id("describe_device", "abnormal") == QUESTION_TYPES.index("B12_describe_device")
    assert type_id("describe_device", "finding") == QUESTION_TYPES.index("D05_describe_device")
    assert type_id("compare") is None
    assert type_id("a") is None


@pytest.mark.parametrize(
    ("quality", "others", "grade"),
    [
        ({"rating": "A++"}, [{"general_issue_level": 0}], "A++"),
        ("B", [], "B"),
        ({}, [{"general_issue_level": 5}], "unrated"),
        ({"rating": None}, [], "unrated"),
        (None, [], "unrated"),
        (None, [{"region_extract_quality": 4, "entity_extract_quality": 1}], "A"),
        ({"completeness": "FULLY_COMPLETE"}, [{"clarity": "UNCLEAR_ANSWER"}], "B"),
        ({"general_issue_level": 0}, [], "D"),
        ({"general_issue_level": 99}, [], "unrated"),
    ],
)
def test_the_grade_is_the_rating_or_the_worst_that_criteria_allow(quality: object, others: list[object], grade: str) -> None:
    assert GRADES[question_grade(quality, others)] == grade


def test_grade_d_is_better_than_unrated() -> None:
    assert GRADES.index("unrated") < GRADES.index("D") < GRADES.index("A") < GRADES.index("A++")


def test_views() -> None:
    assert VIEWS[view_id(" pa ")] == "PA"
    assert VIEWS[view_id("")] == VIEWS[view_id("UPSIDE DOWN")] == "other"
    assert [VIEWS[i] for i in allowed_views("frontal_only")] == ["PA", "AP", "AP AXIAL", "PA LLD"]
    assert "LATERAL" in [VIEWS[i] for i in allowed_views("lateral_only")]
    assert len(allowed_views("all")) == len(VIEWS)


@pytest.mark.parametrize(
    ("word", "level"),
    [
        ("mild", 1),
        ("Minimal", 1),
        ("trace", 1),
        ("moderate", 2),
        ("mild to moderate", 2),
        ("marked", 3),
        ("moderate-to-severe", 3),
        ("none", 0),
    ],
)
def test_severity_words(word: str, level: int) -> None:
    assert severity_level(word) == level
    assert severity_level("purple") is None


@pytest.mark.parametrize(
    ("entity", "label"),
    [
        ("cardiomegaly", "Cardiomegaly"), ("enlarged cardiac silhouette", "Cardiomegaly"), ("pleural effusion", "Pleural Effusion"),
        ("Pulmonary Edema", "Edema"), ("lung nodule", "Lung Lesion"), ("rib fracture", "Fracture"), ("hydropneumothorax", "Pneumothorax"),
        ("pneumonia", "Pneumonia"), ("pleural thickening", "Pleural Other"), ("endotracheal tube", "Support Devices"),
        ("widened mediastinum", "Enlarged Cardiomediastinum"), ("opacity", "Lung Opacity"), ("enlarged_cardiomediastinum", "Enlarged Cardiomediastinum"),
        ("scoliosis", None), ("midline shift", None),
    ],
)  # fmt: skip
def test_entities_belong_to_chexpert_labels(entity: str, label: str | None) -> None:
    match = chexpert_match(entity)
    assert (None if match is None else CHEXPERT[match]) == label
