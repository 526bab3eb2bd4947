"""Reads the folders of MIMIC-CXR-JPG and MIMIC-Ext-CXR-QBA: tables, and JSON files in folders or in the zips they come in.

MIMIC-CXR-JPG        mimic-cxr-2.0.0-{metadata,split,chexpert}.csv[.gz]   files/p10/p10000032/s50414267/IMAGE.jpg
MIMIC-Ext-CXR-QBA    qa.zip or qa/, scene_data.zip or scene_data/ (or an export: scene_graph.zip), metadata/dataset_info.json
                     with p10/p10000032/s50414267.qa.json and .scene_graph.json, each below a folder or not
"""

from __future__ import annotations

import csv
import gzip
import json
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from drivetrain.outcomes import Outcome, Problem
from drivetrain.tasks.cxr.vocabulary import CHEXPERT, SPLITS, Label, view_id

MEMBER = re.compile(r"(?:^|/)p(\d+)/s(\d+)\.(qa|scene_graph)\.json$")
QA_NAMES = ("qa", "qa.zip")
GRAPH_NAMES = ("scene_data", "scene_graphs", "scene_graph", "scene_data.zip", "scene_graph.zip", "scene_graphs.zip")
INFO_NAMES = ("metadata/dataset_info.json", "dataset_info.json")
SPLIT_WORDS = {"train": 0, "validate": 1, "val": 1, "valid": 1, "test": 2}
NO_SPLIT = -1
Array = np.ndarray[Any, Any]


# --- tables --------------------------------------------------------------------------------------


def find_table(folder: Path, kind: str) -> Path:
    """Returns the table `mimic-cxr-VERSION-KIND.csv`, compressed or not; raises Problem if it is missing."""
    if not folder.is_dir():
        raise Problem(
            f"there is no folder {folder}: give the folder of MIMIC-CXR-JPG, which holds files/ and mimic-cxr-2.0.0-{kind}.csv.gz"
        )
    tables = sorted(path for path in folder.iterdir() if re.fullmatch(rf"mimic-cxr-[\d.]+-{kind}\.csv(\.gz)?", path.name))
    if not tables:
        raise Problem(f"{folder} has no mimic-cxr-2.0.0-{kind}.csv.gz: copy it there from MIMIC-CXR-JPG")
    return tables[0]


def _open_table(path: Path) -> TextIO:
    return gzip.open(path, "rt", encoding="utf-8", newline="") if path.suffix == ".gz" else open(path, encoding="utf-8", newline="")


def read_table(path: Path, columns: Iterable[str]) -> Iterator[list[str]]:
    """Yields the given columns of each row; raises Problem if a column is missing or the file is damaged."""
    columns = list(columns)
    try:
        with _open_table(path) as file:
            reader = csv.reader(file)
            header = next(reader, [])
            missing = [name for name in columns if name not in header]
            if missing:
                have = ", ".join(header[:8]) or "nothing"
                raise Problem(
                    f"{path} has no column {', '.join(missing)} (it has {have}): it is not the file of this name of MIMIC-CXR-JPG"
                )
            positions = [header.index(name) for name in columns]
            for number, row in enumerate(reader, 2):
                if len(row) < len(header):
                    raise Problem(f"{path}, line {number}: {len(row)} values instead of {len(header)}: copy the file again", Outcome.DATA)
                yield [row[i] for i in positions]
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise Problem(f"{path} cannot be read to its end ({error}): copy it again", Outcome.DATA) from None


@dataclass(frozen=True)
class ImageTable:
    """All images of MIMIC-CXR-JPG, sorted by patient, study, view (the preferred one first) and name."""

    patient: Array
    study: Array
    name: Array
    """The image's identifier, as bytes."""
    view: Array
    split: Array
    """The split's number in SPLITS, or NO_SPLIT."""
    size: Array
    """[images, 2]: width and height in pixels."""

    def __len__(self) -> int:
        return len(self.study)


def read_images(mimic: Path) -> ImageTable:
    """Reads the metadata and split tables."""
    split_path, metadata_path = find_table(mimic, "split"), find_table(mimic, "metadata")
    splits = {image: SPLIT_WORDS.get(split.strip().lower(), NO_SPLIT) for image, split in read_table(split_path, ("dicom_id", "split"))}
    rows = []
    columns = ("dicom_id", "subject_id", "study_id", "ViewPosition", "Columns", "Rows")
    for number, (image, patient, study, view, width, height) in enumerate(read_table(metadata_path, columns), 2):
        try:
            sizes = (int(float(width)), int(float(height)))
            row = (
                int(patient.lstrip("p")),
                int(study.lstrip("s")),
                view_id(view),
                image.encode("ascii"),
                splits.get(image, NO_SPLIT),
                *sizes,
            )
        except ValueError as error:
            raise Problem(f"{metadata_path}, line {number}: {error}: copy the file again", Outcome.DATA) from None
        rows.append(row)
    if not rows:
        raise Problem(f"{metadata_path} has no images: copy it again from MIMIC-CXR-JPG", Outcome.DATA)
    rows.sort()
    patients, studies, view_ids, names, split_ids, widths, heights = (list(column) for column in zip(*rows, strict=True))
    return ImageTable(
        patient=np.array(patients, np.int32),
        study=np.array(studies, np.int32),
        name=np.array(names, "S"),
        view=np.array(view_ids, np.int8),
        split=np.array(split_ids, np.int8),
        size=np.stack([np.array(widths, np.int32), np.array(heights, np.int32)], 1),
    )


def read_chexpert(mimic: Path) -> dict[int, tuple[int, ...]]:
    """Returns the labels of each study, in the order of CHEXPERT."""
    path = find_table(mimic, "chexpert")
    labels = {}
    values = {"": Label.MISSING, "1": Label.POSITIVE, "0": Label.NEGATIVE, "-1": Label.UNCERTAIN}
    for number, (study, *row) in enumerate(read_table(path, ("study_id", *CHEXPERT)), 2):
        try:
            labels[int(study.lstrip("s"))] = tuple(int(values[text.strip().removesuffix(".0")]) for text in row)
        except (KeyError, ValueError) as error:
            raise Problem(
                f"{path}, line {number}: {error} is no label (1.0, 0.0, -1.0 or empty): copy the file again", Outcome.DATA
            ) from None
    return labels


def image_path(mimic: Path, patient: int, study: int, name: str) -> Path:
    """Returns where MIMIC-CXR-JPG has an image."""
    return mimic / "files" / f"p{str(patient)[:2]}" / f"p{patient}" / f"s{study}" / f"{name}.jpg"


# --- JSON files ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class JsonFile:
    """Where one JSON file is: a file of its own (then `method` is -1), or a part of a zip."""

    path: str
    offset: int = 0
    length: int = 0
    method: int = -1

    def read(self) -> Any:
        """Returns the content; raises OSError or ValueError if it cannot be read."""
        if self.method < 0:
            return json.loads(Path(self.path).read_bytes())
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            header = file.read(30)
            if len(header) < 30 or not header.startswith(b"PK\x03\x04"):
                raise ValueError("the zip is damaged")
            name_length, extra_length = struct.unpack("<HH", header[26:30])
            file.seek(name_length + extra_length, os.SEEK_CUR)
            data = file.read(self.length)
        if self.method == zipfile.ZIP_STORED:
            return json.loads(data)
        try:
            return json.loads(zlib.decompress(data, -15))
        except zlib.error as error:
            raise ValueError(f"the zip is damaged ({error})") from None

    @property
    def label(self) -> str:
        return self.path if self.method < 0 else f"{self.path} (at byte {self.offset:,})"


Listing = dict[tuple[int, int], JsonFile]
"""JSON files by (patient, study)."""


def find_source(qba: Path, names: Iterable[str]) -> Path | None:
    """Returns the first folder or zip of these names; `qba` itself if it holds p10, p11, ..."""
    for name in names:
        if (qba / name).exists():
            return qba / name
    return qba if any(re.fullmatch(r"p1\d", path.name) for path in qba.iterdir()) else None


def find_questions(qba: Path) -> Path:
    """Returns the folder or zip of the questions; raises Problem if there is none."""
    if not qba.is_dir():
        raise Problem(f"there is no folder {qba}: give the folder of MIMIC-Ext-CXR-QBA, which holds qa.zip or qa/")
    source = find_source(qba, QA_NAMES)
    if source is None:
        raise Problem(f"{qba} has neither qa.zip nor a folder qa/: give the folder of MIMIC-Ext-CXR-QBA, or one of its exports")
    return source


def find_graphs(qba: Path) -> Path | None:
    return find_source(qba, GRAPH_NAMES)


def list_json(source: Path, kind: str) -> Listing:
    """Lists the files of a kind (qa, scene_graph) in a folder or a zip."""
    return _list_zip(source, kind) if source.is_file() else _list_folder(source, kind)


def _list_zip(path: Path, kind: str) -> Listing:
    listing = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                match = MEMBER.search(info.filename)
                if match and match[3] == kind:
                    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                        raise Problem(
                            f"{path} is compressed by method {info.compress_type}: unpack it, so that {path.with_suffix('')} is a folder"
                        )
                    file = JsonFile(str(path), info.header_offset, info.compress_size, info.compress_type)
                    listing[int(match[1]), int(match[2])] = file
    except (OSError, zipfile.BadZipFile) as error:
        raise Problem(f"{path} cannot be read ({error}): copy it again, or unpack it into {path.with_suffix('')}/", Outcome.DATA) from None
    return listing


def _list_folder(folder: Path, kind: str) -> Listing:
    listing = {}
    suffix = f".{kind}.json"
    for directory, folders, files in os.walk(folder):
        folders.sort()
        for name in files:
            if name.endswith(suffix) and (match := MEMBER.search(f"/{os.path.basename(directory)}/{name}")):
                listing[int(match[1]), int(match[2])] = JsonFile(os.path.join(directory, name))
    return listing


def read_info(qba: Path) -> dict[str, Any]:
    """Returns dataset_info.json: the vocabularies; empty if there is none."""
    for name in INFO_NAMES:
        path = qba / name
        if path.is_file():
            try:
                info = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise Problem(f"{path} is no JSON ({error}): copy it again", Outcome.DATA) from None
            return info if isinstance(info, dict) else {}
    return {}


def info_names(info: dict[str, Any], *keys: str) -> list[str]:
    """Returns the names of the first of these vocabularies that exists: a list of names, of objects with a name, or a dict."""
    for key in keys:
        values = info.get(key)
        if isinstance(values, (list, dict)):
            entries = [v.get("name", "") if isinstance(v, dict) else v for v in values] if isinstance(values, list) else list(values)
            return list(dict.fromkeys(entry.strip().lower() for entry in entries if isinstance(entry, str) and entry.strip()))
    return []


def split_name(number: int) -> str:
    return SPLITS[number] if number >= 0 else "none"
