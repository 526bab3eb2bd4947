"""The data set that a model trains on: a sample is one image of a study with K of its questions.

An epoch visits every question once. Of a study's images the one with the preferred view is used (PA before AP, frontal before lateral), of
those that `views` allows. A study with q questions gives m = ceil(q / K) samples; sample j has the questions j, j + m, j + 2m, ..., so that
the questions of a sample are of different types. Which questions a sample has depends on the index and the settings alone, never on a worker.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from drivetrain.outcomes import Outcome, Problem
from drivetrain.tasks.cxr.data.columns import BOX_UNIT, NO_LOCATION, CxrIndex, MappedArray
from drivetrain.tasks.cxr.data.images import BadImages, ImageReader, Pixels, cache_key
from drivetrain.tasks.cxr.data.index import print_notice
from drivetrain.tasks.cxr.vocabulary import GRADES, HEADS, QUESTION_TYPES, SPLITS, Grade, Label, ViewFilter, allowed_views, type_id
from drivetrain.tasks.lora.cache import create_once

CHUNK = 1 << 22
"""Questions that are selected at a time."""
MANY_TEXTS = 20_000
"""Texts whose tokens take seconds to make."""
Sample = dict[str, Tensor]
Array = np.ndarray[Any, Any]


class QuestionTokenizer(Protocol):
    """Turns questions into token ids; id 0 is padding."""

    @property
    def key(self) -> str:
        """A text that changes when the tokens change: the name of the token cache."""
        ...

    def encode(self, texts: list[str]) -> list[list[int]]: ...


@dataclass(frozen=True)
class Selection:
    """The questions of a data set, by study."""

    study: Array
    """The study of each group of questions."""
    image: Array
    """The image of each of these studies."""
    first_row: Array
    """Where the questions of each group begin in `rows`; one entry more than groups."""
    mapped_rows: MappedArray

    @property
    def rows(self) -> Array:
        """The questions' rows in the index."""
        return self.mapped_rows.array


class CxrDataset(Dataset[Sample]):
    """Images with K questions each. `counts` says what the settings leave out."""

    def __init__(
        self,
        index: CxrIndex,
        split: str,
        *,
        tokenizer: QuestionTokenizer | None = None,
        views: ViewFilter = "frontal_only",
        grade: Grade = "A",
        types: Sequence[str] | None = None,
        questions_per_image: int = 1,
        size: int = 224,
        max_nodes: int = 64,
        max_tokens: int = 128,
        bad_images: BadImages = "error",
        cache_images: bool = True,
        max_studies: int | None = None,
    ) -> None:
        if split not in SPLITS:
            raise Problem(f"there is no split {split!r}: write one of {', '.join(SPLITS)}")
        self.index, self.split, self.size, self.max_tokens = index, split, size, max_tokens
        self.questions_per_image, self.max_nodes = questions_per_image, max_nodes
        self.counts: Counter[str] = Counter()
        self.images = ImageReader(index, size, bad_images, cache_images)
        self._views = allowed_views(views)
        studies, images = self._choose_images(self._views, bad_images)
        if max_studies is not None:
            studies, images = studies[:max_studies], images[:max_studies]
        self.selection = self._select(studies, images, GRADES.index(grade), _type_ids(types))
        self.num_nodes = min(max(index.largest_graph, 1), max_nodes)
        self.counts["studies whose scene graph is cut"] = int((np.diff(index.study["first_node"])[self.selection.study] > max_nodes).sum())
        per_study = -(-np.diff(self.selection.first_row) // questions_per_image)
        self._first_sample: Array = np.concatenate([[0], np.cumsum(per_study)])
        self._tokens = _read_tokens(index, tokenizer, max_tokens) if tokenizer else None
        if not len(self):
            raise Problem(
                f"the split {split} has no questions of grade {grade} or better in {views} images: {self._reasons()}", Outcome.DATA
            )

    # --- selection -------------------------------------------------------------------------------

    def _choose_images(self, views: tuple[int, ...], bad_images: str) -> tuple[Array, Array]:
        """Returns the studies of the split with an allowed image, and the preferred image of each."""
        image = self.index.image
        usable = (np.asarray(image["split"]) == SPLITS.index(self.split)) & np.isin(image["view"], views)
        missing = np.flatnonzero(usable & ~np.asarray(image["is_present"]))
        self.counts["missing images"] = len(missing)
        if len(missing) and bad_images == "error":
            path = self.index.image_path(int(missing[0]))
            others = f" and {len(missing) - 1:,} other images of this split are missing" if len(missing) > 1 else " is missing"
            raise Problem(f"{path}{others}: copy them there, or leave such images out with bad_images=skip", Outcome.DATA)
        rows = np.flatnonzero(usable & np.asarray(image["is_present"]))  # of a study, the preferred view comes first
        studies, first = np.unique(np.asarray(image["study"])[rows], return_index=True)
        in_split = np.unique(np.asarray(image["study"])[np.asarray(image["split"]) == SPLITS.index(self.split)])
        self.counts["studies without an allowed image"] = len(in_split) - len(studies)
        return studies, rows[first]

    def _select(self, studies: Array, images: Array, grade: int, types: tuple[int, ...]) -> Selection:
        """Selects the questions that have a target; the rows are kept in a file beside the index."""
        settings = f"{len(studies)} {cache_key(str(studies.tolist()))} {grade} {types}"
        folder = _cache_parent(self.index) / f"{self.index.folder.name}-selection-{cache_key(settings)}"
        with create_once(folder) as empty:
            if empty is not None:
                _write_selection(empty, self.index, studies, grade, types)
        counts, left_out = (np.load(folder / f"{name}.npy", allow_pickle=False) for name in ("counts", "left_out"))
        self.counts["questions below the grade or of other types"] = int(left_out[0])
        self.counts["questions without a target"] = int(left_out[1])
        has_questions = counts > 0
        self.counts["studies without a selected question"] = int((~has_questions).sum())
        first_row = np.concatenate([[0], np.cumsum(counts[has_questions])])
        return Selection(studies[has_questions], images[has_questions], first_row, MappedArray(folder / "rows.npy"))

    def _reasons(self) -> str:
        return "; ".join(f"{count:,} {reason}" for reason, count in self.counts.items() if count) or "the index has none"

    # --- samples ---------------------------------------------------------------------------------

    def __len__(self) -> int:
        return int(self._first_sample[-1])

    @property
    def num_questions(self) -> int:
        """The number of questions of an epoch."""
        return int(self.selection.first_row[-1])

    def question_rows(self, index: int) -> tuple[int, Array]:
        """Returns the group of a sample, and its questions' rows in the index."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        group = int(np.searchsorted(self._first_sample, index, side="right")) - 1
        first, last = self.selection.first_row[group : group + 2]
        num_samples = math.ceil((last - first) / self.questions_per_image)
        return group, np.asarray(self.selection.rows[first:last])[index - self._first_sample[group] :: num_samples]

    def __getitem__(self, index: int) -> Sample:
        group, rows = self.question_rows(index)
        study = int(self.selection.study[group])
        image, pixels = self._read_image(study, int(self.selection.image[group]))
        sample = self._graph(study, image) | self._questions(study, image, rows if pixels is not None else rows[:0])
        labels = np.asarray(self.index.study["chexpert"][study], np.int8)
        if pixels is None:  # a sample without weight: every sample's place in the epoch is kept
            pixels = np.zeros((self.size, self.size), np.uint8)
            labels = np.full(len(labels), Label.MISSING, np.int8)
        sample["image"] = torch.from_numpy(pixels if pixels.flags.writeable else pixels.copy())[None]
        sample["chexpert"] = torch.from_numpy(labels.copy())
        sample["image_row"] = torch.tensor(image)
        return sample

    def _read_image(self, study: int, preferred: int) -> tuple[int, Pixels | None]:
        """Returns the preferred image of a study or, where that cannot be read, its next one with an allowed view; None if none can be read."""
        columns = self.index.image
        for image in range(preferred, self.index.images_of(study).stop):
            is_usable = columns["is_present"][image] and columns["view"][image] in self._views
            if is_usable and columns["split"][image] == SPLITS.index(self.split) and (pixels := self.images.read(image)) is not None:
                return image, pixels
        return preferred, None

    def _graph(self, study: int, image: int) -> Sample:
        """Returns the nodes of a study, with their boxes in this image."""
        nodes = self.index.nodes_of(study)
        count = min(nodes.stop - nodes.start, self.num_nodes)
        position = image - self.index.images_of(study).start
        boxes = np.zeros((self.num_nodes, 4), np.float32)
        region, entity, is_node = (np.zeros(self.num_nodes, kind) for kind in (np.int16, np.int16, np.bool_))
        boxes[:count] = self.index.boxes_of_nodes(study)[:count, position] / np.float32(BOX_UNIT)
        region[:count] = self.index.node["region"][nodes][:count]
        entity[:count] = self.index.node["entity"][nodes][:count]
        is_node[:count] = True
        arrays = {"boxes": boxes, "has_box": boxes[:, 2] > 0, "node_region": region, "node_entity": entity, "is_node": is_node}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def _questions(self, study: int, image: int, rows: Array) -> Sample:
        """Returns the questions of a sample; what is missing to K is padding without weight."""
        size, count = self.questions_per_image, len(rows)
        arrays: dict[str, Array] = {name: np.full(size, -1, np.int16) for name in HEADS}
        arrays |= {"type": np.full(size, -1, np.int8), "question": np.full(size, -1, np.int64)}
        arrays["answer_boxes"] = np.zeros((size, 4), np.float32)
        columns = self.index.question
        arrays["question"][:count] = rows
        for name in ("type", *HEADS):
            arrays[name][:count] = columns[name][rows]
        locations = columns["location"][rows]
        has_location = np.flatnonzero(locations != NO_LOCATION)
        if len(has_location):
            position = image - self.index.images_of(study).start
            boxes = self.index.boxes_of_answers(study)[locations[has_location], position]
            arrays["answer_boxes"][has_location] = boxes / np.float32(BOX_UNIT)
        arrays["has_answer_box"] = arrays["answer_boxes"][:, 2] > 0
        arrays["tokens"], arrays["num_tokens"] = np.zeros((size, self.max_tokens), np.int32), np.zeros(size, np.int16)
        if self._tokens and count:
            texts = columns["text"][rows]
            tokens, lengths = self._tokens
            arrays["tokens"][:count] = tokens.array[texts]
            arrays["num_tokens"][:count] = lengths.array[texts]
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    # --- names and texts -------------------------------------------------------------------------

    @property
    def region_names(self) -> tuple[str, ...]:
        return self.index.region_names

    @property
    def entity_names(self) -> tuple[str, ...]:
        return self.index.entity_names

    @property
    def num_regions(self) -> int:
        return len(self.index.region_names)

    @property
    def num_entities(self) -> int:
        return len(self.index.entity_names)

    def question_text(self, row: int) -> str:
        return self.index.question_texts[int(self.index.question["text"][row])]

    def answer_text(self, row: int) -> str:
        return self.index.answer_texts[int(self.index.question["answer"][row])]

    def image_path(self, row: int) -> Path:
        return self.index.image_path(row)


def collate(samples: Sequence[Sample]) -> Sample:
    """Returns a batch of samples."""
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def _type_ids(names: Sequence[str] | None) -> tuple[int, ...]:
    if not names:
        return tuple(range(len(QUESTION_TYPES)))
    ids = []
    for name in names:
        number = type_id(name)
        if number is None:
            raise Problem(f"there is no question type {name!r}: write names such as D02_has_finding or D02 ({', '.join(QUESTION_TYPES)})")
        ids.append(number)
    return tuple(sorted(set(ids)))


def _cache_parent(index: CxrIndex) -> Path:
    """Returns a folder for files that are made from the index: its own parent or, if that is not writable, the user's cache folder."""
    if os.access(index.folder.parent, os.W_OK):
        return index.folder.parent
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "drivetrain" / "cxr"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _write_selection(folder: Path, index: CxrIndex, studies: Array, grade: int, types: tuple[int, ...]) -> None:
    """Writes the rows of the selected questions, their number in each study, and how many were left out."""
    wanted = np.zeros(index.num_studies, bool)
    wanted[studies] = True
    counts = np.zeros(index.num_studies, np.int64)
    left_out = np.zeros(2, np.int64)
    rows = []
    if index.num_questions > CHUNK:
        print_notice(f"questions: selecting those of grade {GRADES[grade]} or better from {index.num_questions:,}")
    for begin in range(0, index.num_questions, CHUNK):
        part = {
            name: np.asarray(column[begin : begin + CHUNK]) for name, column in index.question.items() if name not in ("text", "answer")
        }
        in_studies = wanted[part["study"]]
        fits = in_studies & (part["grade"] >= grade) & np.isin(part["type"], types)
        has_target = np.logical_or.reduce([part[name] >= 0 for name in HEADS])
        left_out += int((in_studies & ~fits).sum()), int((fits & ~has_target).sum())
        selected = np.flatnonzero(fits & has_target)
        counts += np.bincount(part["study"][selected], minlength=len(counts))
        rows.append((selected + begin).astype(np.int32))
    np.save(folder / "rows.npy", np.concatenate(rows) if rows else np.zeros(0, np.int32))
    np.save(folder / "counts.npy", counts[studies])
    np.save(folder / "left_out.npy", left_out)


def _read_tokens(index: CxrIndex, tokenizer: QuestionTokenizer, max_tokens: int) -> tuple[MappedArray, MappedArray]:
    """Returns the tokens [texts, max_tokens] of all question texts and their numbers, from files made once for each tokenizer."""
    folder = _cache_parent(index) / f"{index.folder.name}-tokens-{max_tokens}-{cache_key(tokenizer.key)}"
    with create_once(folder) as empty:
        if empty is not None:
            texts = index.question_texts.all()
            if len(texts) > MANY_TEXTS:
                print_notice(f"questions: making the tokens of {len(texts):,} texts")
            tokens, lengths = np.zeros((len(texts), max_tokens), np.int32), np.zeros(len(texts), np.int16)
            for number, ids in enumerate(tokenizer.encode(texts)):
                lengths[number] = min(len(ids), max_tokens)
                tokens[number, : lengths[number]] = ids[:max_tokens]
            np.save(empty / "tokens.npy", tokens)
            np.save(empty / "lengths.npy", lengths)
    return MappedArray(folder / "tokens.npy"), MappedArray(folder / "lengths.npy")
