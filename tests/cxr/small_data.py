"""Writes small data sets by hand, in the layout of MIMIC-CXR-JPG and MIMIC-Ext-CXR-QBA."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from drivetrain.tasks.cxr.data.columns import CxrIndex
from drivetrain.tasks.cxr.data.index import find_or_build
from drivetrain.tasks.cxr.vocabulary import CHEXPERT

PATIENT, STUDY = 10000032, 50414267
WIDTH, HEIGHT = 200, 100


def answer(positiveness: str | None = "pos", entities: Iterable[str] = (), regions: Iterable[str] = (), **more: Any) -> dict[str, Any]:
    return {
        "answer_type": "main_answer", "text": "An answer.", "positiveness": positiveness, "obs_entities": list(entities),
        "regions": list(regions), "modifiers": [], "localization": {}, **more,
    }  # fmt: skip


def boxes(image: str, *values: Sequence[float]) -> dict[str, Any]:
    return {image: {"image_id": image, "bboxes": [list(box) for box in values]}}


def question(kind: str, *answers: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"question_type": kind, "question": f"Text of {kind}?", "answers": list(answers), "question_quality": {"rating": "A"}, **more}


def write_table(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    with gzip.open(path, "wt", newline="") as file:
        csv.writer(file).writerows([header, *rows])


def write_data(
    folder: Path,
    questions: Sequence[dict[str, Any]],
    observations: dict[str, Any] | None = None,
    images: Sequence[tuple[str, str]] = (("image-a", "PA"),),
    labels: dict[str, str] | None = None,
    split: str = "train",
) -> tuple[Path, Path]:
    """Writes a data set of one study. `images` are names with their views; the first rows of the tables."""
    mimic, qba = folder / "mimic", folder / "qba"
    files = mimic / "files" / "p10" / f"p{PATIENT}" / f"s{STUDY}"
    files.mkdir(parents=True)
    for name, _ in images:
        Image.linear_gradient("L").resize((WIDTH, HEIGHT)).save(files / f"{name}.jpg")
    rows = [(name, PATIENT, STUDY, view, HEIGHT, WIDTH) for name, view in images]
    header = ("dicom_id", "subject_id", "study_id", "ViewPosition", "Rows", "Columns")
    write_table(mimic / "mimic-cxr-2.0.0-metadata.csv.gz", header, rows)
    write_table(
        mimic / "mimic-cxr-2.0.0-split.csv.gz",
        ("dicom_id", "study_id", "subject_id", "split"),
        [(name, STUDY, PATIENT, split) for name, _ in images],
    )
    values = [(labels or {}).get(name, "") for name in CHEXPERT]
    write_table(mimic / "mimic-cxr-2.0.0-chexpert.csv.gz", ("subject_id", "study_id", *CHEXPERT), [(PATIENT, STUDY, *values)])
    for kind, name, content in (
        ("qa", "qa", {"questions": list(questions)}),
        ("scene_data", "scene_graph", {"observations": observations or {}}),
    ):
        path = qba / kind / "p10" / f"p{PATIENT}"
        path.mkdir(parents=True)
        (path / f"s{STUDY}.{name}.json").write_text(json.dumps(content))
    return mimic, qba


def quiet(text: str) -> None:
    pass


def build(mimic: Path, qba: Path) -> CxrIndex:
    return find_or_build(mimic, qba, processes=1, notice=quiet)
