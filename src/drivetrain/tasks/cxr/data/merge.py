"""Joins the parts of an index: copies columns one part at a time, and replaces each part's own numbers by those of the whole index."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from drivetrain.tasks.cxr.data.columns import FORMAT, IMAGE_COLUMNS, META, NODE_COLUMNS, QUESTION_COLUMNS, UNKNOWN, Array, file_of
from drivetrain.tasks.cxr.data.parts import ANSWERS, FACTS, write_texts
from drivetrain.tasks.cxr.data.studies import MAX_EXAMPLES

Change = Callable[[Array, int], Array]
"""Changes the values of a column of the part with this number."""


def merge_parts(
    folders: Sequence[Path], target: Path, regions: Sequence[str], entities: Sequence[str], without_images: Sequence[str]
) -> None:
    """Writes the files of an index. `regions` and `entities` are known names; others that parts have follow in the order of the alphabet."""
    facts = [json.loads((folder / FACTS).read_text(encoding="utf-8")) for folder in folders]
    region_names, region_ids = _number_names(regions, [part["regions"] for part in facts])
    entity_names, entity_ids = _number_names(entities, [part["entities"] for part in facts])
    texts, text_ids = _number_texts([part["texts"] for part in facts])
    columns = _Columns(folders, target)
    first_study, first_answer = columns.offsets("study", "number"), columns.offsets("texts", f"{ANSWERS}_ends")
    changes: dict[tuple[str, str], Change] = {
        ("question", "study"): lambda values, part: values + first_study[part],
        ("image", "study"): lambda values, part: values + first_study[part],
        ("question", "text"): lambda values, part: text_ids[part][values],
        ("question", "answer"): lambda values, part: values + first_answer[part],
        ("question", "region"): lambda values, part: np.where(values < 0, values, region_ids[part][np.maximum(values, 0)]),
        ("node", "region"): lambda values, part: region_ids[part][values],
        ("node", "entity"): lambda values, part: entity_ids[part][values],
    }
    tables = {"question": QUESTION_COLUMNS, "image": IMAGE_COLUMNS, "node": NODE_COLUMNS, "study": ("patient", "number", "chexpert")}
    for table, names in tables.items():
        for name in names:
            columns.copy(table, name, changes.get((table, name)))
    for name in ("node", "answer"):
        columns.copy(name, "boxes", None)
    _write_starts(columns, target)
    first_byte = columns.offsets("texts", ANSWERS)
    columns.copy("texts", ANSWERS, None)
    columns.copy("texts", f"{ANSWERS}_ends", lambda values, part: values + first_byte[part])
    write_texts(target, "questions", texts)
    _write_meta(target, facts, region_names, entity_names, without_images)


def _number_names(known: Sequence[str], names_of_parts: Sequence[Sequence[str]]) -> tuple[list[str], list[Array]]:
    """Returns all names, the unknown one first, and for each part the number of each of its own numbers."""
    first = [name for name in known if name != UNKNOWN]
    others = sorted({name for names in names_of_parts for name in names} - {*first, UNKNOWN})
    all_names = [UNKNOWN, *first, *others]
    numbers = {name: number for number, name in enumerate(all_names)}
    return all_names, [np.array([0, *(numbers[name] for name in names)], np.int16) for names in names_of_parts]


def _number_texts(texts_of_parts: Sequence[Sequence[str]]) -> tuple[list[str], list[Array]]:
    numbers: dict[str, int] = {}
    ids = [np.array([numbers.setdefault(text, len(numbers)) for text in texts], np.int32) for texts in texts_of_parts]
    return list(numbers), ids


class _Columns:
    """The columns of the parts, and the files into which they are joined."""

    def __init__(self, folders: Sequence[Path], target: Path) -> None:
        self.folders, self.target = folders, target

    def load(self, folder: Path, table: str, name: str) -> Array:
        array: Array = np.load(folder / file_of(table, name), mmap_mode="r", allow_pickle=False)
        return array

    def lengths(self, table: str, name: str) -> list[int]:
        return [len(self.load(folder, table, name)) for folder in self.folders]

    def offsets(self, table: str, name: str) -> list[int]:
        """Returns the row at which each part begins."""
        return [0, *np.cumsum(self.lengths(table, name))[:-1].tolist()]

    def copy(self, table: str, name: str, change: Change | None) -> None:
        first = self.load(self.folders[0], table, name)
        shape = (sum(self.lengths(table, name)), *first.shape[1:])
        with open(self.target / file_of(table, name), "wb") as file:
            header = {"descr": np.lib.format.dtype_to_descr(first.dtype), "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
            for part, folder in enumerate(self.folders):
                values = self.load(folder, table, name)
                file.write((values if change is None else change(values, part)).astype(first.dtype, copy=False).tobytes())

    def join(self, table: str, name: str) -> Array:
        return np.concatenate([self.load(folder, table, name) for folder in self.folders]).astype(np.int64)


def _write_starts(columns: _Columns, target: Path) -> None:
    """Writes where the images, questions, nodes and boxes of each study begin."""
    images, questions, nodes, locations = (columns.join("study", f"num_{name}") for name in ("images", "questions", "nodes", "locations"))
    lengths = {
        "first_image": images,
        "first_question": questions,
        "first_node": nodes,
        "first_node_box": nodes * images,
        "first_answer_box": locations * images,
    }
    for name, values in lengths.items():
        np.save(target / file_of("study", name), np.concatenate([[0], np.cumsum(values)]).astype(np.int64))


def _write_meta(
    target: Path, facts: Sequence[dict[str, Any]], regions: Sequence[str], entities: Sequence[str], without_images: Sequence[str]
) -> None:
    counts: Counter[str] = Counter()
    examples: dict[str, list[str]] = {}
    for part in facts:
        counts.update(part["counts"])
        for fault, names in part["examples"].items():
            examples[fault] = [*examples.get(fault, []), *names][:MAX_EXAMPLES]
    meta = {
        "format": FORMAT,
        "regions": list(regions),
        "entities": list(entities),
        "counts": dict(sorted(counts.items())),
        "examples": dict(sorted(examples.items())),
        "studies_without_images": len(without_images),
        "files": {path.name: path.stat().st_size for path in sorted(target.iterdir())},
    }
    (target / META).write_text(json.dumps(meta, indent=1), encoding="utf-8")
