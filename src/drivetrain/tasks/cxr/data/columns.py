"""The index of the questions: columns in memory-mapped files, so that 38 million questions need disk, not memory.

A question has 21 bytes: study 4, type 1, grade 1, text 4, answer 4, binary 1, category 1, region 2, severity 1, location 2.
38 million questions are 0.8 GB of columns. Their share of a study (185 questions, 1.7 images, about 25 nodes and 30 different answer
locations; a box has 8 bytes) is about 5 bytes more. Texts are stored once: each question text in the whole index, each answer text in
its part. A process reads the pages that it needs through the page cache, which all processes of a machine share.

`study-first_*` have one entry more than there are studies: where the images, questions, nodes and boxes of a study begin. Boxes have 16 bits
a coordinate, in units of the image, and are zero where an image has none. Those of a study's nodes form a table [nodes, images], those of
its answer locations a table [locations, images]; a location is the first box of an answer in every image.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from drivetrain.outcomes import Problem

FORMAT = 2
META = "index.json"
"""The file of names and counts. It is written last."""
UNKNOWN = "unknown"
"""The region and the entity with id 0."""
NO_TARGET, NO_LOCATION = -1, -1
MISSING_IMAGES = "missing image files"
"""The fault of images in the tables whose files did not exist when the index was built."""
BOX_UNIT = 65535
"""Value of a box coordinate at the right or lower edge of the image."""
QUESTION_COLUMNS: Mapping[str, Any] = {
    "study": np.int32, "type": np.int8, "grade": np.int8, "text": np.int32, "answer": np.int32,
    "binary": np.int8, "category": np.int8, "region": np.int16, "severity": np.int8, "location": np.int16,
}  # fmt: skip
IMAGE_COLUMNS: Mapping[str, Any] = {"study": np.int32, "view": np.int8, "split": np.int8, "is_present": np.bool_, "name": "S44"}
NODE_COLUMNS: Mapping[str, Any] = {"region": np.int16, "entity": np.int16}
STARTS = ("first_image", "first_question", "first_node", "first_node_box", "first_answer_box")
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Texts:
    """Texts one after another in a file, with the position at which each ends."""

    data: Array
    ends: Array

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> str:
        begin = int(self.ends[index - 1]) if index else 0
        return bytes(self.data[begin : int(self.ends[index])]).decode()

    def all(self) -> list[str]:
        return [self[index] for index in range(len(self))]


def map_array(path: Path) -> Array:
    """Returns the array in a file, through a memory map; a plain array is indexed several times faster than numpy's memmap class."""
    return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))


@dataclass(frozen=True)
class MappedArray:
    """An array in a file, read through a memory map. Only its path is pickled."""

    path: Path

    @cached_property
    def array(self) -> Array:
        return map_array(self.path)

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path}


@dataclass(frozen=True)
class CxrIndex:
    """All studies, images, nodes and questions of the data sets."""

    folder: Path
    mimic: Path
    meta: Mapping[str, Any]
    question: Mapping[str, Array]
    """Columns of the questions, which are sorted by study."""
    image: Mapping[str, Array]
    node: Mapping[str, Array]
    study: Mapping[str, Array]
    """patient, number, chexpert [studies, 14], and the STARTS."""
    node_boxes: Array
    answer_boxes: Array
    question_texts: Texts
    answer_texts: Texts
    region_names: tuple[str, ...]
    entity_names: tuple[str, ...]
    counts: Mapping[str, int] = field(default_factory=dict)
    """What was read, and what was left out."""
    examples: Mapping[str, list[str]] = field(default_factory=dict)
    """A few names for each kind of fault in `counts`."""

    def __reduce__(self) -> tuple[Any, ...]:
        return open_index, (self.folder, self.mimic)  # a loader worker maps the files itself

    @property
    def num_questions(self) -> int:
        return len(self.question["type"])

    @property
    def num_studies(self) -> int:
        return len(self.study["number"])

    @property
    def num_images(self) -> int:
        return len(self.image["study"])

    @cached_property
    def largest_graph(self) -> int:
        """The largest number of nodes of a study."""
        return int(np.diff(self.study["first_node"]).max(initial=0))

    def images_of(self, study: int) -> range:
        return range(int(self.study["first_image"][study]), int(self.study["first_image"][study + 1]))

    def questions_of(self, study: int) -> range:
        return range(int(self.study["first_question"][study]), int(self.study["first_question"][study + 1]))

    def nodes_of(self, study: int) -> slice:
        return slice(int(self.study["first_node"][study]), int(self.study["first_node"][study + 1]))

    def boxes_of_nodes(self, study: int) -> Array:
        """Returns the boxes [nodes, images, 4] of a study."""
        return self._boxes(self.node_boxes, "first_node_box", study)

    def boxes_of_answers(self, study: int) -> Array:
        """Returns the boxes [locations, images, 4] of a study."""
        return self._boxes(self.answer_boxes, "first_answer_box", study)

    def _boxes(self, boxes: Array, start: str, study: int) -> Array:
        begin, end = (int(self.study[start][study + i]) for i in (0, 1))
        rows: Array = boxes[begin:end].reshape(-1, max(len(self.images_of(study)), 1), 4)
        return rows

    def image_path(self, row: int) -> Path:
        study = int(self.image["study"][row])
        patient, number = int(self.study["patient"][study]), int(self.study["number"][study])
        return self.mimic / "files" / f"p{str(patient)[:2]}" / f"p{patient}" / f"s{number}" / f"{self.image_name(row)}.jpg"

    def image_name(self, row: int) -> str:
        return bytes(self.image["name"][row]).decode()

    def bytes_by_kind(self) -> dict[str, int]:
        """Returns the bytes of the index by kind: question columns, texts, and the rest."""
        sizes = {path.name: path.stat().st_size for path in self.folder.iterdir()}
        questions = sum(size for name, size in sizes.items() if name.startswith("question-"))
        texts = sum(size for name, size in sizes.items() if name.startswith("texts-"))
        return {"questions": questions, "texts": texts, "studies": sum(sizes.values()) - questions - texts}


def file_of(table: str, column: str) -> str:
    return f"{table}-{column}.npy"


def replace_column(folder: Path, table: str, column: str, values: Array) -> None:
    """Replaces a column by another one of the same length and type; a process that reads the old one keeps it."""
    hidden = folder / f".{file_of(table, column)}.{os.getpid()}"
    with open(hidden, "wb") as file:
        np.save(file, values)
    hidden.replace(folder / file_of(table, column))


def open_index(folder: Path, mimic: Path) -> CxrIndex | None:
    """Opens an index; returns None if there is none, or if it is not complete."""
    try:
        meta = json.loads((folder / META).read_text(encoding="utf-8"))
        if meta["format"] != FORMAT or any((folder / name).stat().st_size != size for name, size in meta["files"].items()):
            return None

        def load(name: str) -> Array:
            return map_array(folder / name)

        def table(name: str, columns: Any) -> dict[str, Array]:
            return {column: load(file_of(name, column)) for column in columns}

        def texts(name: str) -> Texts:
            return Texts(load(file_of("texts", name)), load(file_of("texts", f"{name}_ends")))

        return CxrIndex(
            folder=folder,
            mimic=mimic,
            meta=meta,
            question=table("question", QUESTION_COLUMNS),
            image=table("image", IMAGE_COLUMNS),
            node=table("node", NODE_COLUMNS),
            study=table("study", ("patient", "number", "chexpert", *STARTS)),
            node_boxes=load(file_of("node", "boxes")),
            answer_boxes=load(file_of("answer", "boxes")),
            question_texts=texts("questions"),
            answer_texts=texts("answers"),
            region_names=tuple(meta["regions"]),
            entity_names=tuple(meta["entities"]),
            counts=meta["counts"],
            examples=meta["examples"],
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Problem(f"the index {folder} cannot be read ({error}): remove this folder, and it is built again") from None
