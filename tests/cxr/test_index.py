"""The index: a killed build loses nothing, parts and processes change no byte, faults in files are named."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import psutil
import pytest

from drivetrain.outcomes import Problem
from drivetrain.tasks.cxr.data import index as index_module
from drivetrain.tasks.cxr.data import layout
from drivetrain.tasks.cxr.data.check import check_data, report_text
from drivetrain.tasks.cxr.data.columns import CxrIndex
from drivetrain.tasks.cxr.data.index import find_or_build
from tests.cxr.conftest import TWIN_STUDIES
from tests.cxr.small_data import PATIENT, STUDY, answer, build, question, quiet, write_data, write_table

BUILD = "import sys; from drivetrain.tasks.cxr.data.index import find_or_build; find_or_build(sys.argv[1], sys.argv[2], processes=1)"


def contents(index: CxrIndex) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(index.folder.iterdir())}


def test_a_killed_build_goes_on_where_it_was(twin: tuple[Path, Path], twin_index: CxrIndex, tmp_path: Path) -> None:
    mimic, qba = twin[0], tmp_path / "qba"
    shutil.copytree(twin[1], qba, ignore=shutil.ignore_patterns(".drivetrain-cache"))
    slow = f"import time; from drivetrain.tasks.cxr.data import parts; one = parts.build_part\nparts.build_part = lambda s: (time.sleep(0.1), one(s))[1]\n{BUILD}"
    process = subprocess.Popen([sys.executable, "-c", slow, str(mimic), str(qba)], stderr=subprocess.DEVNULL)
    cache = qba / ".drivetrain-cache"
    deadline = time.monotonic() + 30
    while len(list(cache.glob(".cxr-*.parts/p*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    published = {path.name: path.stat().st_ino for path in cache.glob(".cxr-*.parts/p*")}
    assert 2 <= len(published) < 10
    assert not list(cache.glob("cxr-*")), "the kill came before the end, or the test proves nothing"
    lines: list[str] = []
    index = find_or_build(mimic, qba, processes=1, notice=lines.append)
    assert f"index: {len(published)} of 10 parts exist already" in lines
    built, expected = contents(index), contents(twin_index)
    assert built == expected
    assert not list(cache.glob(".cxr-*.parts")), "the parts are removed in the end"


def test_several_processes_write_the_same_bytes(
    twin: tuple[Path, Path], twin_index: CxrIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "STUDIES_PER_PART", 2)  # so that the twin is large enough for processes
    index = find_or_build(*twin, folder=tmp_path, processes=2, notice=quiet)
    built, expected = contents(index), contents(twin_index)
    names = set(built) - {"index.json", "texts-answers.npy", "texts-answers_ends.npy", "question-answer.npy"}  # answers are stored by part
    assert {name: built[name] for name in names} == {name: expected[name] for name in names}
    answers, other_answers = ([i.answer_texts[int(a)] for a in i.question["answer"][:200]] for i in (index, twin_index))
    assert answers == other_answers


def test_workers_end_with_a_killed_build(twin: tuple[Path, Path], tmp_path: Path) -> None:
    program = (
        "import sys, pathlib; from drivetrain.tasks.cxr.data import index; index.STUDIES_PER_PART = 1; "
        "index.find_or_build(sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3]), processes=2)"
    )
    process = subprocess.Popen([sys.executable, "-c", program, *map(str, twin), str(tmp_path)], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".cxr-*.parts/p*")) and time.monotonic() < deadline:
        time.sleep(0.01)
    workers = psutil.Process(process.pid).children()
    process.kill()
    process.wait()
    assert len(workers) == 2
    assert not psutil.wait_procs(workers, timeout=60)[1], "they are still alive"
    assert find_or_build(*twin, folder=tmp_path, processes=1, notice=quiet).num_studies == TWIN_STUDIES


def test_a_damaged_part_is_built_again(twin: tuple[Path, Path], twin_index: CxrIndex, tmp_path: Path) -> None:
    specs, _ = index_module.part_specs(*twin, tmp_path / f".{twin_index.folder.name}.parts")
    from drivetrain.tasks.cxr.data import parts

    for spec in specs[:3]:
        parts.build_part(spec)
    with open(Path(specs[0]["folder"]) / "question-type.npy", "ab") as file:
        file.truncate(100)
    lines: list[str] = []
    index = find_or_build(*twin, folder=tmp_path, processes=1, notice=lines.append)
    assert "index: 2 of 10 parts exist already" in lines
    assert contents(index) == contents(twin_index)


def test_a_second_call_opens_the_index(twin: tuple[Path, Path], twin_index: CxrIndex) -> None:
    lines: list[str] = []
    assert find_or_build(*twin, notice=lines.append).folder == twin_index.folder
    assert not lines


def test_columns_take_at_most_40_bytes_a_question(twin_index: CxrIndex) -> None:
    row_bytes = sum(column.dtype.itemsize for column in twin_index.question.values())
    assert row_bytes == 21
    shared = sum(array.nbytes for array in (twin_index.node_boxes, twin_index.answer_boxes, *twin_index.node.values()))
    assert row_bytes + shared / twin_index.num_questions < 40
    assert all(isinstance(column.base, np.memmap) for column in twin_index.question.values())


def test_a_pickled_index_holds_no_columns(twin_index: CxrIndex) -> None:
    data = pickle.dumps(twin_index)
    assert len(data) < 1000
    assert pickle.loads(data).num_questions == twin_index.num_questions


def test_zips_give_the_same_index_as_folders(twin: tuple[Path, Path], twin_index: CxrIndex, tmp_path: Path) -> None:
    qba = tmp_path / "qba"
    shutil.copytree(twin[1] / "metadata", qba / "metadata")
    for kind, prefix in (("qa", "qa/"), ("scene_data", "")):
        with zipfile.ZipFile(qba / f"{kind}.zip", "w", zipfile.ZIP_DEFLATED if prefix else zipfile.ZIP_STORED) as archive:
            for path in sorted((twin[1] / kind).rglob("*.json")):
                archive.write(path, prefix + str(path.relative_to(twin[1] / kind)))
    assert contents(build(twin[0], qba)) == contents(twin_index)


# --- faults --------------------------------------------------------------------------------------

ASKED = [question("D02_has_finding", answer("pos"))]


def test_a_study_without_images_is_counted(tmp_path: Path) -> None:
    mimic, qba = write_data(tmp_path, ASKED)
    other = qba / "qa" / "p11" / "p11000001"
    other.mkdir(parents=True)
    (other / "s50000001.qa.json").write_text(json.dumps({"questions": ASKED}))
    index = build(mimic, qba)
    assert index.counts == {"studies without images": 1}
    assert index.examples == {"studies without images": ["p11000001/s50000001"]}
    assert index.num_studies == 1


@pytest.mark.parametrize("content", ["{", "", '{"questions": [{}', "\x00\xff"])
def test_invalid_json_is_named_and_counted(content: str, tmp_path: Path) -> None:
    mimic, qba = write_data(tmp_path, ASKED)
    path = qba / "scene_data" / "p10" / f"p{PATIENT}" / f"s{STUDY}.scene_graph.json"
    path.write_text(content)
    index = build(mimic, qba)
    assert index.counts == {"files that cannot be read as JSON": 1}
    assert index.examples["files that cannot be read as JSON"][0].startswith(str(path))
    assert index.num_questions == 1


@pytest.mark.parametrize(
    ("content", "fault"), [("[]", "question files without questions"), ('{"questions": {}}', "question files without questions")]
)
def test_json_of_another_form_is_counted(content: str, fault: str, tmp_path: Path) -> None:
    mimic, qba = write_data(tmp_path, ASKED)
    (qba / "qa" / "p10" / f"p{PATIENT}" / f"s{STUDY}.qa.json").write_text(content)
    assert build(mimic, qba).counts == {fault: 1}


def test_a_study_without_a_graph_or_labels_is_counted(tmp_path: Path) -> None:
    mimic, qba = write_data(tmp_path, ASKED)
    shutil.rmtree(qba / "scene_data")
    write_table(mimic / "mimic-cxr-2.0.0-chexpert.csv.gz", ("subject_id", "study_id", *layout.CHEXPERT), [])
    assert build(mimic, qba).counts == {"studies without a scene graph": 1, "studies without CheXpert labels": 1}


def remove_images_table(mimic: Path, qba: Path) -> None:
    (mimic / "mimic-cxr-2.0.0-metadata.csv.gz").unlink()


def rename_a_column(mimic: Path, qba: Path) -> None:
    write_table(mimic / "mimic-cxr-2.0.0-metadata.csv.gz", ("dicom_id", "subject_id", "study_id", "View", "Rows", "Columns"), [])


def cut_a_table(mimic: Path, qba: Path) -> None:
    path = mimic / "mimic-cxr-2.0.0-split.csv.gz"
    path.write_bytes(path.read_bytes()[:-12])


def write_an_odd_label(mimic: Path, qba: Path) -> None:
    write_table(mimic / "mimic-cxr-2.0.0-chexpert.csv.gz", ("subject_id", "study_id", *layout.CHEXPERT), [(PATIENT, STUDY, *["2.0"] * 14)])


def write_a_short_row(mimic: Path, qba: Path) -> None:
    write_table(mimic / "mimic-cxr-2.0.0-split.csv.gz", ("dicom_id", "study_id", "subject_id", "split"), [("image-a", STUDY)])


def write_a_word_for_a_number(mimic: Path, qba: Path) -> None:
    header = ("dicom_id", "subject_id", "study_id", "ViewPosition", "Rows", "Columns")
    write_table(mimic / "mimic-cxr-2.0.0-metadata.csv.gz", header, [("image-a", PATIENT, STUDY, "PA", "high", "wide")])


def remove_questions(mimic: Path, qba: Path) -> None:
    shutil.rmtree(qba)
    qba.mkdir()


def empty_questions(mimic: Path, qba: Path) -> None:
    shutil.rmtree(qba / "qa" / "p10")


def damage_the_zip(mimic: Path, qba: Path) -> None:
    shutil.rmtree(qba / "qa")
    (qba / "qa.zip").write_bytes(b"PK\x03\x04 cut")


def other_patients(mimic: Path, qba: Path) -> None:
    (qba / "qa" / "p10" / f"p{PATIENT}").rename(qba / "qa" / "p10" / "p10999999")


FAULTS = {
    remove_images_table: "has no mimic-cxr-2.0.0-metadata.csv.gz: copy it there",
    rename_a_column: "mimic-cxr-2.0.0-metadata.csv.gz has no column ViewPosition (it has dicom_id, subject_id, study_id, View",
    cut_a_table: "mimic-cxr-2.0.0-split.csv.gz cannot be read to its end",
    write_an_odd_label: "line 2: '2' is no label (1.0, 0.0, -1.0 or empty)",
    write_a_short_row: "line 2: 2 values instead of 4",
    write_a_word_for_a_number: "line 2: could not convert string to float: 'wide'",
    remove_questions: "has neither qa.zip nor a folder qa/",
    empty_questions: "holds no p10/p10000032/s50414267.qa.json",
    damage_the_zip: "qa.zip cannot be read (File is not a zip file)",
    other_patients: "none of the 1 studies",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_wrong_folders_and_tables_are_named_with_the_fix(fault: object, tmp_path: Path) -> None:
    mimic, qba = write_data(tmp_path, ASKED)
    assert callable(fault)
    fault(mimic, qba)
    with pytest.raises(Problem, match=re.escape(FAULTS[fault])) as raised:  # type: ignore[index]
        build(mimic, qba)
    assert str(tmp_path) in str(raised.value)
    assert len(str(raised.value).splitlines()) <= 2


def test_folders_that_do_not_exist(tmp_path: Path) -> None:
    mimic, qba = write_data(tmp_path, ASKED)
    with pytest.raises(Problem, match=r"there is no folder .*nowhere"):
        build(tmp_path / "nowhere", qba)
    with pytest.raises(Problem, match=r"there is no folder .*nowhere"):
        build(mimic, tmp_path / "nowhere")


def test_a_changed_table_gives_a_new_index(tmp_path: Path) -> None:
    mimic, qba = write_data(tmp_path, ASKED)
    first = build(mimic, qba)
    os.utime(mimic / "mimic-cxr-2.0.0-split.csv.gz", (1, 1))
    assert build(mimic, qba).folder != first.folder


def test_images_that_were_copied_later_are_used(tmp_path: Path) -> None:
    mimic, qba = write_data(tmp_path, ASKED, images=(("image-a", "PA"), ("image-b", "AP")))
    path = next(mimic.rglob("image-a.jpg"))
    path.rename(tmp_path / "later.jpg")
    first = build(mimic, qba)
    assert first.image["is_present"].tolist() == [False, True]
    assert check_data(first)["left_out"] == {"missing image files": 1}
    assert build(mimic, qba).image["is_present"].tolist() == [False, True]
    (tmp_path / "later.jpg").rename(path)
    lines: list[str] = []
    second = find_or_build(mimic, qba, notice=lines.append)
    assert lines == ["index: 1 of 1 missing images exist now"]
    assert second.folder == first.folder
    assert second.image["is_present"].tolist() == [True, True]
    assert check_data(second)["left_out"] == {}


def test_without_any_image_the_report_is_an_error(tmp_path: Path) -> None:
    mimic, qba = write_data(tmp_path, ASKED)
    shutil.rmtree(mimic / "files")
    report = check_data(build(mimic, qba))
    assert any("no image file exists" in error for error in report["errors"])
    assert "the data cannot be trained on" in report_text(report)
