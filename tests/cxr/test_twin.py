"""The synthetic twin: it depends on its seed alone, has all that the real data have, and its images show what its texts say."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from drivetrain.outcomes import Problem
from drivetrain.tasks.cxr.data.check import check_data, report_text
from drivetrain.tasks.cxr.data.columns import CxrIndex
from drivetrain.tasks.cxr.data.images import decode
from drivetrain.tasks.cxr.data.layout import read_chexpert, read_images
from drivetrain.tasks.cxr.twin.images import heart_scale, make_chest, paint
from drivetrain.tasks.cxr.twin.plan import DEVICES, FINDINGS, plan_study, random_of
from drivetrain.tasks.cxr.twin.write import study_files, write_twin
from drivetrain.tasks.cxr.vocabulary import CHEXPERT, GRADES, QUESTION_TYPES, Label, chexpert_match
from tests.command import expect_error, run_ok


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_twin_depends_on_its_seed_alone(tmp_path: Path) -> None:
    for name, seed, studies in (("a", 0, 4), ("b", 0, 4), ("c", 1, 4), ("d", 0, 6)):
        write_twin(tmp_path / name, studies, seed)
    a, b, c, d = (files_of(tmp_path / name) for name in "abcd")
    assert a == b
    assert a != c
    studies = [name for name in a if "/files/" in name or (name.endswith(".json") and "p1" in name)]
    assert studies
    assert all(a[name] == d[name] for name in studies), "study k is the same, however many there are"


def test_a_twin_is_not_written_twice_nor_over_other_files(tmp_path: Path) -> None:
    mimic, _ = write_twin(tmp_path / "a", 2)
    (mimic / "mark").touch()
    write_twin(tmp_path / "a", 2)
    assert (mimic / "mark").exists()
    write_twin(tmp_path / "a", 3)
    assert not (mimic / "mark").exists()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "notes.txt").touch()
    with pytest.raises(Problem, match="holds other files"):
        write_twin(tmp_path / "b", 2)
    (tmp_path / "c" / "mimic-cxr-jpg").mkdir(parents=True)
    with pytest.raises(Problem, match="holds other files"):
        write_twin(tmp_path / "c", 2)


def test_every_type_grade_and_label_value_occurs(twin: tuple[Path, Path], twin_index: CxrIndex) -> None:
    report = check_data(twin_index)
    assert all(report["types"][name]["with a target"] for name in QUESTION_TYPES)
    assert all(report["grades"][name] for name in GRADES)
    values = {value for labels in read_chexpert(twin[0]).values() for value in labels}
    assert values == {int(label) for label in Label}
    assert {"PA", "AP", "LATERAL"} == {name for name, count in report["views"].items() if count}
    assert all(report["splits"][split]["studies"] for split in ("train", "validate", "test"))
    assert report["totals"]["patients"] < report["totals"]["studies"] < report["totals"]["images"]
    assert not report["errors"]
    images = read_images(twin[0])
    assert len(images) == report["totals"]["images"]


def test_labels_and_answers_follow_from_what_is_planted() -> None:
    for number in range(20):
        plan = plan_study(0, number)
        planted = {chexpert_match(finding.entity) for finding in plan.planted}
        positive = {i for i, label in enumerate(plan.labels) if label in (Label.POSITIVE, Label.UNCERTAIN)}
        assert positive == (planted if plan.findings else planted | {CHEXPERT.index("No Finding")})
        _, questions, graph, _ = study_files(plan, 0, with_images=False)
        names = {finding.entity for finding in plan.planted}
        reported = {o["obs_entities"][0] for o in graph["observations"].values() if o["positiveness"] == "pos"}
        assert reported == names
        for asked in questions["questions"]:
            if asked["question_type"] in ("D02_has_finding", "D06_has_device"):
                entity = next(iter(asked["variables"].values()))
                assert (asked["answers"][0]["positiveness"] == "pos") == (entity in names)


@pytest.mark.parametrize("entity", [*FINDINGS, *DEVICES])
def test_a_planted_finding_changes_its_box_and_little_else(entity: str) -> None:
    """The same image with and without the finding: the difference lies in the box, apart from noise."""
    plan = next(p for p in (plan_study(5, n) for n in range(400)) if any(f.entity == entity and f.severity > 1 for f in p.planted))
    finding = next(f for f in plan.planted if f.entity == entity)
    images = []
    for findings in ((), (finding,)):
        chest = make_chest(random_of(0, 1), False, False, heart_scale(findings))
        data, boxes = paint(chest, findings, False, (256, 256), random_of(0, 2))
        images.append(np.asarray(Image.open(io.BytesIO(data)), np.float32))
    change = np.abs(images[1] - images[0])
    inside = np.zeros((256, 256), bool)
    for x1, y1, x2, y2 in boxes[0]:
        inside[int(y1 * 256) : int(y2 * 256) + 1, int(x1 * 256) : int(x2 * 256) + 1] = True
    strong = change > 25
    assert strong[inside].sum() > 40, "it is visible"
    assert strong[inside].sum() > 0.7 * strong.sum(), "it is where the box is"


def test_the_files_are_those_of_the_real_data(twin: tuple[Path, Path]) -> None:
    mimic, qba = twin
    pattern = r"files/p1\d/p1\d{7}/s5\d{7}/[0-9a-f]{8}(-[0-9a-f]{8}){4}\.jpg"
    images = [str(path.relative_to(mimic)) for path in mimic.rglob("*.jpg")]
    assert images and all(re.fullmatch(pattern, name) for name in images)
    assert decode(mimic / images[0], 64).std() > 20
    path = next((qba / "qa").rglob("*.qa.json"))
    assert re.fullmatch(r"qa/p1\d/p1\d{7}/s5\d{7}\.qa\.json", str(path.relative_to(qba)))
    asked = json.loads(path.read_text())["questions"][0]
    assert {"question_id", "question_type", "question_strategy", "variables", "obs_ids", "question", "answers", "question_quality"} <= set(
        asked
    )
    assert {
        "answer_type", "answer_level", "text", "name_tag", "laterality", "regions", "obs_entities", "obs_categories", "certainty",
        "positiveness", "modifiers", "localization", "sub_answers", "answer_quality",
    } <= set(asked["answers"][0])  # fmt: skip
    graph = json.loads(next((qba / "scene_data").rglob("*.scene_graph.json")).read_text())
    assert {"sentences", "observations", "regions", "located_at_relations"} <= set(graph)


def test_the_report_warns_and_its_text_has_every_part(twin_index: CxrIndex) -> None:
    report = check_data(twin_index, decode_images=5)
    text = report_text(report)
    assert all(name in text for name in (*QUESTION_TYPES, *CHEXPERT[:3], "grades", "views", "the data can be trained on"))
    assert any("fewer than 10 positive studies" in warning for warning in report["warnings"])
    assert json.loads(json.dumps(report)) == report


def test_the_verb_writes_and_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "next: drivetrain data cxr-check --mimic twin/mimic-cxr-jpg" in run_ok("data", "cxr-synthetic", "--studies", "5", "--to", "twin")
    words = ["data", "cxr-check", "--mimic", "twin/mimic-cxr-jpg", "--qba", "twin/mimic-ext-cxr-qba", "--json"]
    report = json.loads(run_ok(*words))
    assert report["totals"]["studies"] == 5
    assert "needs both folders" in expect_error("data", "cxr-check", "--qba", "twin")
    assert "--studies says how many" in expect_error("data", "cxr-synthetic")
