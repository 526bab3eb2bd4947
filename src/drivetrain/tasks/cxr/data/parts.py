"""Builds one part of the index: the rows of up to a thousand studies, in a folder that is published when it is complete.

    python -m drivetrain.tasks.cxr.data.parts

is a worker of the build: it reads one part a line from its input, as JSON, and writes a line for each that is done. It ends with its input,
so that it does not outlive a killed build.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from drivetrain.tasks.cxr.data.columns import IMAGE_COLUMNS, MISSING_IMAGES, NODE_COLUMNS, QUESTION_COLUMNS, file_of
from drivetrain.tasks.cxr.data.layout import JsonFile, image_path
from drivetrain.tasks.cxr.data.studies import Faults, Names, StudyImage, StudyReader, StudyRows

FACTS = "part.json"
"""The file of names, counts and sizes of a part. It is written last."""
COUNTS = ("num_images", "num_questions", "num_nodes", "num_locations")
Spec = dict[str, Any]
"""A part: `mimic`, `folder` and `studies`. A study: patient, study, chexpert, images (name, view, split, width, height), qa, graph."""
ANSWERS = "answers"


def digest(spec: Spec) -> str:
    """Returns a hash of what a part is made from."""
    return hashlib.sha256(json.dumps(spec["studies"]).encode()).hexdigest()[:24]


def read_facts(folder: Path) -> dict[str, Any] | None:
    """Returns the facts of a complete part; None if the folder is no complete part."""
    try:
        facts: dict[str, Any] = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        is_complete = all((folder / name).stat().st_size == size for name, size in facts["files"].items())
        return facts if is_complete else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def build_part(spec: Spec) -> int:
    """Builds and publishes a part; returns its number of questions."""
    part = _PartBuilder(Path(spec["mimic"]))
    for study in spec["studies"]:
        part.add_study(study)
    folder = Path(spec["folder"])
    hidden = folder.with_name(f".{folder.name}")
    shutil.rmtree(hidden, ignore_errors=True)
    hidden.mkdir(parents=True)
    part.write(hidden, digest(spec))
    shutil.rmtree(folder, ignore_errors=True)
    hidden.rename(folder)
    return len(part.question["type"])


class _PartBuilder:
    def __init__(self, mimic: Path) -> None:
        self.mimic, self.faults = mimic, Faults()
        self.texts, self.answers, self.regions, self.entities = Names(), Names(), Names(), Names()
        self.question: dict[str, list[Any]] = {name: [] for name in QUESTION_COLUMNS}
        self.image: dict[str, list[Any]] = {name: [] for name in IMAGE_COLUMNS}
        self.node: dict[str, list[Any]] = {name: [] for name in NODE_COLUMNS}
        self.study: dict[str, list[Any]] = {name: [] for name in ("patient", "number", "chexpert", *COUNTS)}
        self.node_boxes: list[tuple[int, ...]] = []
        self.answer_boxes: list[tuple[int, ...]] = []

    def add_study(self, spec: dict[str, Any]) -> None:
        label = f"p{spec['patient']}/s{spec['study']}"
        images = [StudyImage(name, width, height) for name, _, _, width, height in spec["images"]]
        reader = StudyReader(images, label, self.faults)
        if not images:
            reader.fault("studies without images")
            return
        if spec["chexpert"] is None:
            reader.fault("studies without CheXpert labels")
        for kind, read in (("graph", reader.read_graph), ("qa", reader.read_questions)):
            if spec[kind] is None:
                reader.fault("studies without a scene graph" if kind == "graph" else "studies without questions")
                continue
            file = JsonFile(*spec[kind])
            try:
                content = file.read()
            except (OSError, ValueError, EOFError, RecursionError) as error:
                self.faults.add("files that cannot be read as JSON", f"{file.label}: {' '.join(str(error).split())[:120]}")
                continue
            read(content)
        self._add_rows(spec, reader.rows)

    def _add_rows(self, spec: dict[str, Any], rows: StudyRows) -> None:
        study = len(self.study["number"])
        present = [image_path(self.mimic, spec["patient"], spec["study"], image[0]).is_file() for image in spec["images"]]
        for (name, view, split, _, _), is_present in zip(spec["images"], present, strict=True):
            self._append(self.image, study=study, view=view, split=split, is_present=is_present, name=name.encode())
            if not is_present:
                self.faults.add(MISSING_IMAGES, f"p{spec['patient']}/s{spec['study']}/{name}.jpg")
        for region, entity in rows.nodes:
            self._append(self.node, region=self.regions.id(region), entity=self.entities.id(entity))
        for row in rows.questions:
            self._append(
                self.question, study=study, type=row.type, grade=row.grade, text=self.texts.id(row.text) - 1,
                answer=self.answers.id(row.answer) - 1, binary=row.binary, category=row.category, severity=row.severity,
                region=-1 if row.region is None else self.regions.id(row.region), location=row.location,
            )  # fmt: skip
        self.node_boxes += rows.node_boxes
        self.answer_boxes += [box for boxes in rows.locations for box in boxes]
        self._append(
            self.study, patient=spec["patient"], number=spec["study"], chexpert=spec["chexpert"] or [-2] * 14,
            num_images=len(present), num_questions=len(rows.questions), num_nodes=len(rows.nodes), num_locations=len(rows.locations),
        )  # fmt: skip

    @staticmethod
    def _append(table: dict[str, list[Any]], **values: Any) -> None:
        for name, value in values.items():
            table[name].append(value)

    def write(self, folder: Path, key: str) -> None:
        for table, rows, types in (
            ("question", self.question, QUESTION_COLUMNS),
            ("image", self.image, IMAGE_COLUMNS),
            ("node", self.node, NODE_COLUMNS),
        ):
            for name, values in rows.items():
                np.save(folder / file_of(table, name), np.array(values, types[name]))
        for name, values in self.study.items():
            shape = (-1, 14) if name == "chexpert" else (-1,)
            np.save(folder / file_of("study", name), np.array(values, np.int8 if name == "chexpert" else np.int32).reshape(shape))
        for name, boxes in (("node", self.node_boxes), ("answer", self.answer_boxes)):
            np.save(folder / file_of(name, "boxes"), np.array(boxes, np.uint16).reshape(-1, 4))
        write_texts(folder, ANSWERS, list(self.answers.ids))
        facts = {
            "digest": key,
            "texts": list(self.texts.ids),
            "regions": list(self.regions.ids),
            "entities": list(self.entities.ids),
            "counts": dict(self.faults.counts),
            "examples": self.faults.examples,
            "files": {path.name: path.stat().st_size for path in sorted(folder.iterdir())},
        }
        (folder / FACTS).write_text(json.dumps(facts), encoding="utf-8")


def write_texts(folder: Path, name: str, texts: Sequence[str]) -> None:
    """Writes texts one after another, and where each ends."""
    data = [text.encode(errors="replace") for text in texts]
    np.save(folder / file_of("texts", name), np.frombuffer(b"".join(data), np.uint8))
    np.save(folder / file_of("texts", f"{name}_ends"), np.cumsum([len(text) for text in data], dtype=np.int64))


def main() -> None:
    """Builds the parts that the input names."""
    for line in sys.stdin:
        try:
            answer: dict[str, Any] = {"questions": build_part(json.loads(line))}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        try:
            print(json.dumps(answer), flush=True)
        except BrokenPipeError:  # the build was killed
            os._exit(1)


if __name__ == "__main__":
    main()
