"""Hand-computed targets: which head answers a question, and with what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drivetrain.tasks.cxr.vocabulary import CHEXPERT, HEADS
from tests.cxr.small_data import answer, boxes, build, question, write_data

DETAIL = answer("pos", ["cardiomegaly"], ["heart"], answer_type="details")
CASES: list[tuple[dict[str, Any], str, str | int | None]] = [
    (question("D02_has_finding", answer("pos", ["pneumonia"])), "binary", 1),
    (question("has_finding", answer("neg", ["pneumonia"]), DETAIL), "binary", 0),
    (question("C03_is_abnormal_region", answer("pos")), "binary", 1),
    (question("C04_is_normal_region", answer("pos")), "binary", 0),
    (question("C04_is_normal_region", answer("neg")), "binary", 1),
    (question("B04_is_normal", answer("neg"), answer("pos")), "binary", 0),
    (question("B15_describe_imaging_artifacts", answer("neg")), "binary", 0),
    (question("D06_has_device", answer(None)), "binary", None),
    (question("B01_describe_all", answer("neg", ["edema"]), answer("pos", ["pleural effusion"])), "category", "Pleural Effusion"),
    (question("D01_describe_finding", answer("neg", ["edema"])), "category", "No Finding"),
    (question("D01_describe_finding", answer("pos", ["scoliosis"])), "category", None),
    (question("D05_describe_device", answer("pos", ["pacemaker"])), "category", "Support Devices"),
    (question("A_indication", answer("pos", ["pneumonia", "edema"])), "category", "Pneumonia"),
    (question("D03_where_is_finding", answer("pos", regions=["right lung", "lungs"])), "region", "right lung"),
    (question("C01_describe_region", answer("neg", regions=[]), answer("neg", regions=["Region 300"])), "region", "region 300"),
    (question("D03_where_is_finding", answer("neg")), "region", None),
    (question("D04_how_severe_is_finding", answer(modifiers=[["spread", "focal"], ["severity", "marked"]])), "severity", 3),
    (question("D04_how_severe_is_finding", answer(modifiers={"severity": ["small"], "spread": []})), "severity", 1),
    (question("D04_how_severe_is_finding", answer("neg")), "severity", 0),
    (question("D04_how_severe_is_finding", answer("pos", modifiers=[["severity", "purple"]])), "severity", None),
]


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return build(*write_data(tmp_path_factory.mktemp("data"), [case[0] for case in CASES]))


@pytest.mark.parametrize("row", range(len(CASES)))
def test_targets(index: Any, row: int) -> None:
    _, head, expected = CASES[row]
    names = {"category": CHEXPERT, "region": index.region_names}
    for name in HEADS:
        target = int(index.question[name][row])
        if name != head or expected is None:
            assert target == -1
        else:
            assert (names[name][target] if name in names else target) == expected


def test_answers_without_a_target_are_counted(index: Any) -> None:
    assert index.counts == {
        "answers without a target for D01_describe_finding": 1,
        "answers without a target for D03_where_is_finding": 1,
        "answers without a target for D04_how_severe_is_finding": 1,
        "answers without a target for D06_has_device": 1,
    }


def test_regions_are_not_clamped(tmp_path: Path) -> None:
    asked = [question("D03_where_is_finding", answer(regions=[f"region {number}"])) for number in range(310)]
    index = build(*write_data(tmp_path, asked))
    assert len(index.region_names) == 311
    assert index.region_names[0] == "unknown"
    assert {index.region_names[i] for i in index.question["region"]} == {f"region {number}" for number in range(310)}


def test_boxes_are_those_of_each_image(tmp_path: Path) -> None:
    """Images are 200 x 100; the first box of the first main answer that has one counts."""
    places = boxes("image-a", (20, 10, 100, 50), (0, 0, 1, 1)) | boxes("image-b", (0, 0, 50, 100))
    asked = [question("D02_has_finding", answer("pos"), answer("pos", localization=places)), question("D02_has_finding", answer("neg"))]
    node = {"regions": [{"region": "heart"}], "obs_entities": ["cardiomegaly"], "localization": boxes("image-b", (100, 50, 200, 100))}
    plain = {"regions": [], "obs_entities": []}
    index = build(*write_data(tmp_path, asked, {"O01": node, "O02": plain}, images=(("image-b", "LATERAL"), ("image-a", "PA"))))
    assert [index.image_name(row) for row in range(2)] == ["image-a", "image-b"], "PA is preferred"
    units = index.boxes_of_answers(0) / 65535
    assert index.question["location"].tolist() == [0, -1]
    assert np.allclose(units[0], [[0.1, 0.1, 0.5, 0.5], [0, 0, 0.25, 1]], atol=1e-4)
    assert np.allclose(index.boxes_of_nodes(0) / 65535, [[[0] * 4, [0.5, 0.5, 1, 1]], [[0] * 4] * 2], atol=1e-4)
    assert [index.region_names[i] for i in index.node["region"]] == ["heart", "unknown"]
    assert [index.entity_names[i] for i in index.node["entity"]] == ["cardiomegaly", "unknown"]


def test_what_a_report_denies_is_no_node(tmp_path: Path) -> None:
    graph = {
        "O01": {"regions": [], "obs_entities": ["atelectasis"], "positiveness": "neg"},
        "O02": {"regions": [], "obs_entities": ["cardiomegaly"], "positiveness": "pos"},
    }
    index = build(*write_data(tmp_path, [question("D02_has_finding", answer("pos"))], graph))
    assert [index.entity_names[i] for i in index.node["entity"]] == ["cardiomegaly"]


BAD_BOXES = {
    "boxes clipped to the image": ((-10, 10, 100, 200), (0, 0.1, 0.5, 1)),
    "boxes that are empty or outside the image": ((300, 10, 400, 50), None),
    "boxes that are no four numbers": ((1, 2, 3), None),
}


@pytest.mark.parametrize("fault", BAD_BOXES)
def test_a_box_outside_the_image_is_clipped_or_left_out_and_counted(fault: str, tmp_path: Path) -> None:
    box, expected = BAD_BOXES[fault]
    index = build(*write_data(tmp_path, [question("D02_has_finding", answer(localization=boxes("image-a", box)))]))
    assert index.counts == {fault: 1}
    assert index.examples == {fault: ["p10000032/s50414267"]}
    if expected is None:
        assert index.question["location"].tolist() == [-1]
    else:
        assert np.allclose(index.boxes_of_answers(0)[0, 0] / 65535, expected, atol=1e-4)


LEFT_OUT = {
    "questions without an answer": question("D02_has_finding"),
    "questions without a text": question("D02_has_finding", answer(), question=" "),
    "questions of the unknown type E99_guess": question("E99_guess", answer()),
    "questions that are no objects": "text",
}


@pytest.mark.parametrize("fault", LEFT_OUT)
def test_questions_that_cannot_be_used_are_left_out_and_counted(fault: str, tmp_path: Path) -> None:
    index = build(*write_data(tmp_path, [question("D02_has_finding", answer()), LEFT_OUT[fault]]))  # type: ignore[list-item]
    assert index.num_questions == 1
    assert index.counts == {fault: 1}
