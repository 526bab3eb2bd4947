"""The synthetic twin: generated studies in the very folders and files of MIMIC-CXR-JPG and MIMIC-Ext-CXR-QBA. No patient's data.

    drivetrain data cxr-synthetic --studies 1000 --to cxr-twin

writes `cxr-twin/mimic-cxr-jpg` and `cxr-twin/mimic-ext-cxr-qba`. Study k depends on the seed and k alone.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from drivetrain.outcomes import Problem
from drivetrain.tasks.cxr.twin.images import Box, PlantedFinding, heart_scale, make_chest, paint, region_boxes
from drivetrain.tasks.cxr.twin.plan import DEVICES, FINDINGS, REGIONS, SUBCATEGORIES, StudyPlan, plan_study, random_of
from drivetrain.tasks.cxr.twin.questions import Boxes, StudyTexts
from drivetrain.tasks.cxr.vocabulary import CHEXPERT, QUESTION_TYPES, SEVERITIES, Label

MIMIC, QBA = "mimic-cxr-jpg", "mimic-ext-cxr-qba"
MARK = "synthetic-twin.json"
"""A file that says that a folder holds generated data, and how it was made. It is written last."""
IMAGE_SIZE = 256
CHEXPERT_COLUMNS = tuple(sorted(CHEXPERT))
"""The order of the columns in MIMIC-CXR-JPG's file."""
Progress = Callable[[str], None]


def write_twin(folder: Path, studies: int, seed: int = 0, progress: Progress | None = None) -> tuple[Path, Path]:
    """Writes `studies` studies; returns the folders of the images and of the questions. A finished twin of the same kind is reused."""
    folder = Path(folder)
    mimic, qba = folder / MIMIC, folder / QBA
    facts = {"format": 1, "studies": studies, "seed": seed, "image_size": IMAGE_SIZE}
    if (folder / MARK).is_file() and json.loads((folder / MARK).read_text()) == facts:
        return mimic, qba
    _remove_older(folder)
    begin = last_line = time.monotonic()
    plans = []
    for number in range(studies):
        plan = plan_study(seed, number)
        plans.append((plan, *_write_study(mimic, qba, plan, seed)))
        if progress and time.monotonic() - last_line > 2:
            last_line = time.monotonic()
            progress(f"{number + 1:,} of {studies:,} studies written, {(number + 1) / (last_line - begin):.1f} a second")
    write_tables(mimic, qba, plans)
    (folder / MARK).write_text(json.dumps(facts))
    return mimic, qba


def _remove_older(folder: Path) -> None:
    """Removes an earlier twin; refuses a folder with other content."""
    known = {MIMIC, QBA, MARK}
    content = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if content - known or ((MIMIC in content or QBA in content) and not _is_twin(folder)):
        raise Problem(f"{folder} holds other files than a synthetic twin: give an empty folder, or one that does not exist (--to)")
    (folder / MARK).unlink(missing_ok=True)
    for name in (MIMIC, QBA):
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in (MIMIC, QBA):
        (folder / name).mkdir(parents=True)
        (folder / name / MARK).write_text("{}")


def _is_twin(folder: Path) -> bool:
    return all(not (folder / name).exists() or (folder / name / MARK).is_file() for name in (MIMIC, QBA))


def study_files(
    plan: StudyPlan, seed: int, with_images: bool = True
) -> tuple[dict[str, bytes], dict[str, Any], dict[str, Any], tuple[int, int]]:
    """Returns a study's JPEGs by image, its questions, its scene graph, and the size (rows, columns) of its images."""
    rng = random_of(seed, 1, plan.number)
    columns = IMAGE_SIZE - 8 * int(rng.integers(0, 5))
    size = (IMAGE_SIZE, columns)
    boxes: dict[PlantedFinding, Boxes] = {finding: {} for finding in plan.planted}
    regions: dict[str, Boxes] = {}
    images = {}
    for view, image in zip(plan.views, plan.images, strict=True):
        chest = make_chest(rng, view == "LATERAL", plan.has_low_volumes, heart_scale(plan.findings))
        painted = size if with_images else (32, 32)
        images[image], painted_boxes = paint(chest, plan.planted, plan.has_artifact, painted, rng)
        for number, finding in enumerate(plan.planted):
            boxes[finding][image] = [_pixels(box, size) for box in painted_boxes[number]]
        for name, box in region_boxes(chest).items():
            regions.setdefault(name, {})[image] = [_pixels(box, size)]
    texts = StudyTexts(plan, boxes, regions, random_of(seed, 2, plan.number))
    return (images if with_images else {}), texts.questions(), texts.scene_graph(), size


def _pixels(box: Box, size: tuple[int, int]) -> list[float]:
    rows, columns = size
    x1, x2 = (round(min(max(x, 0), 1) * columns, 1) for x in (box[0], box[2]))
    y1, y2 = (round(min(max(y, 0), 1) * rows, 1) for y in (box[1], box[3]))
    return [x1, y1, x2, y2]


def _write_study(mimic: Path, qba: Path, plan: StudyPlan, seed: int) -> tuple[tuple[int, int], int]:
    """Writes the files of a study; returns the size of its images and its number of questions."""
    images, questions, graph, size = study_files(plan, seed)
    patient = Path(f"p{plan.patient // 1_000_000}") / f"p{plan.patient}"
    folder = mimic / "files" / patient / f"s{plan.study}"
    folder.mkdir(parents=True)
    for image, data in images.items():
        (folder / f"{image}.jpg").write_bytes(data)
    for kind, name, content in (("qa", "qa", questions), ("scene_data", "scene_graph", graph)):
        (qba / kind / patient).mkdir(parents=True, exist_ok=True)
        (qba / kind / patient / f"s{plan.study}.{name}.json").write_text(json.dumps(content, separators=(",", ":")))
    return size, len(questions["questions"])


def write_tables(mimic: Path, qba: Path, plans: Sequence[tuple[StudyPlan, tuple[int, int], int]]) -> None:
    """Writes the CSV files of both data sets, and the vocabularies."""
    images = [(plan, size, view, image) for plan, size, _ in plans for view, image in zip(plan.views, plan.images, strict=True)]
    _write_csv(
        mimic / "mimic-cxr-2.0.0-metadata.csv.gz",
        ("dicom_id", "subject_id", "study_id", "PerformedProcedureStepDescription", "ViewPosition", "Rows", "Columns", "StudyDate", "StudyTime"),
        ((image, p.patient, p.study, "CHEST (PA AND LAT)", view, *size, 21800101 + p.number % 28, 120000) for p, size, view, image in images),
    )  # fmt: skip
    _write_csv(
        mimic / "mimic-cxr-2.0.0-split.csv.gz",
        ("dicom_id", "study_id", "subject_id", "split"),
        ((image, plan.study, plan.patient, plan.split) for plan, _, _, image in images),
    )
    texts = {Label.POSITIVE: "1.0", Label.NEGATIVE: "0.0", Label.UNCERTAIN: "-1.0", Label.MISSING: ""}
    _write_csv(
        mimic / "mimic-cxr-2.0.0-chexpert.csv.gz",
        ("subject_id", "study_id", *CHEXPERT_COLUMNS),
        ((p.patient, p.study, *(texts[Label(p.labels[CHEXPERT.index(name)])] for name in CHEXPERT_COLUMNS)) for p, _, _ in plans),
    )
    metadata = qba / "metadata"
    metadata.mkdir(exist_ok=True)
    studies_of: dict[int, int] = {}
    for plan, _, _ in plans:
        studies_of[plan.patient] = studies_of.get(plan.patient, 0) + 1
    _write_csv(metadata / "patient_metadata.csv.gz", ("patient_id", "total_studies"), ((f"p{p}", count) for p, count in studies_of.items()))
    _write_csv(
        metadata / "study_metadata.csv.gz",
        ("patient_id", "study_id", "num_observations", "num_questions"),
        ((f"p{plan.patient}", f"s{plan.study}", len(plan.planted), count) for plan, _, count in plans),
    )
    _write_csv(
        metadata / "image_metadata.csv.gz",
        ("patient_id", "study_id", "image_id", "view_position"),
        ((f"p{plan.patient}", f"s{plan.study}", image, view) for plan, _, view, image in images),
    )
    info = {
        "regions": list(REGIONS),
        "finding_entities": [*FINDINGS, *DEVICES, "low lung volumes", "motion artifact"],
        "finding_subcategories": [*SUBCATEGORIES, "DEVICE"],
        "question_types": list(QUESTION_TYPES),
        "answer_types": ["main_answer", "details", "related_information"],
        "modifiers": {"severity": list(SEVERITIES[1:])},
    }
    (metadata / "dataset_info.json").write_text(json.dumps(info, indent=1))


def _write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Writes a compressed table; the bytes depend on its content alone."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    path.write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))


def default_folder(studies: int) -> Path:
    """Returns the folder of a twin that nobody named."""
    return Path("data") / f"cxr-synthetic-{studies}"
