"""Turns the JSON files of a study into rows: targets by question type, boxes in units of the image, and counts of what was left out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from drivetrain.tasks.cxr.data.columns import BOX_UNIT, NO_LOCATION, NO_TARGET
from drivetrain.tasks.cxr.vocabulary import (
    INVERTED,
    MAIN_ANSWER,
    NO_FINDING,
    QUESTION_TYPES,
    Head,
    chexpert_match,
    head_of_type,
    is_positive,
    names_of,
    question_grade,
    severity_level,
    type_id,
)

QuantisedBox = tuple[int, int, int, int]
NO_BOX: QuantisedBox = (0, 0, 0, 0)
MAX_EXAMPLES = 5
MAX_LOCATIONS = 32_000
"""Answer locations of a study that a column of 16 bits can number."""


@dataclass(frozen=True)
class StudyImage:
    """An image of a study, and its size in pixels."""

    name: str
    width: int
    height: int


class Names:
    """Numbers names in the order in which they are met; 0 is no name."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}

    def id(self, name: str | None) -> int:
        return 0 if name is None else self.ids.setdefault(name, len(self.ids) + 1)


@dataclass
class Faults:
    """Counts of what was read and left out, with a few examples of each fault."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def add(self, fault: str, example: str, number: int = 1) -> None:
        self.counts[fault] += number
        examples = self.examples.setdefault(fault, [])
        if len(examples) < MAX_EXAMPLES and example not in examples:
            examples.append(example)


@dataclass
class QuestionRow:
    """The columns of a question; texts and names are still text."""

    type: int
    grade: int
    text: str
    answer: str
    location: int
    binary: int = NO_TARGET
    category: int = NO_TARGET
    region: str | None = None
    severity: int = NO_TARGET


@dataclass
class StudyRows:
    """All rows of a study."""

    questions: list[QuestionRow] = field(default_factory=list)
    nodes: list[tuple[str | None, str | None]] = field(default_factory=list)
    """Region and entity of each node."""
    node_boxes: list[QuantisedBox] = field(default_factory=list)
    """The first box of each node in every image: [nodes, images]."""
    locations: dict[tuple[QuantisedBox, ...], int] = field(default_factory=dict)
    """The boxes of answers in all images, with their number."""


class StudyReader:
    """Reads the content of the files of one study. `label` names the study in examples of faults."""

    def __init__(self, images: Sequence[StudyImage], label: str, faults: Faults) -> None:
        self.images, self.label, self.faults, self.rows = images, label, faults, StudyRows()
        self._boxes: dict[tuple[int, tuple[float, ...]], QuantisedBox] = {}

    def fault(self, text: str) -> None:
        self.faults.add(text, self.label)

    # --- boxes -----------------------------------------------------------------------------------

    def first_boxes(self, localization: Any) -> tuple[QuantisedBox, ...]:
        """Returns the first valid box in each image of the study."""
        if not isinstance(localization, dict) or not localization:
            return (NO_BOX,) * len(self.images)
        return tuple(self._first_box(number, localization.get(image.name)) for number, image in enumerate(self.images))

    def _first_box(self, number: int, entry: Any) -> QuantisedBox:
        boxes = entry.get("bboxes") if isinstance(entry, dict) else None
        if not isinstance(boxes, list):
            return NO_BOX
        for box in boxes:
            try:
                key = (number, tuple(box))
                quantised = self._boxes.get(key)
            except TypeError:
                quantised, key = NO_BOX, None
                self.fault("boxes that are no four numbers")
            if quantised is None and key is not None:
                quantised = self._boxes[key] = self._quantise(self.images[number], box)
            if quantised != NO_BOX and quantised is not None:
                return quantised
        return NO_BOX

    def _quantise(self, image: StudyImage, box: Sequence[Any]) -> QuantisedBox:
        """Returns a box in units of the image; boxes that leave the image are clipped and counted, empty ones are no boxes."""
        try:
            x1, y1, x2, y2 = (float(value) for value in box)
        except (TypeError, ValueError, OverflowError):
            x1 = math.nan
        if not image.width or not image.height:
            self.fault("boxes in images of unknown size")
            return NO_BOX
        if not (math.isfinite(x1) and math.isfinite(y1) and math.isfinite(x2) and math.isfinite(y2)):
            self.fault("boxes that are no four numbers")
            return NO_BOX
        left, right = (min(max(x, 0.0), image.width) for x in (x1, x2))
        top, bottom = (min(max(y, 0.0), image.height) for y in (y1, y2))
        x_unit, y_unit = BOX_UNIT / image.width, BOX_UNIT / image.height
        quantised = (round(left * x_unit), round(top * y_unit), round(right * x_unit), round(bottom * y_unit))
        if quantised[2] <= quantised[0] or quantised[3] <= quantised[1]:
            self.fault("boxes that are empty or outside the image")
            return NO_BOX
        if (left, top, right, bottom) != (x1, y1, x2, y2):
            self.fault("boxes clipped to the image")
        return quantised

    # --- scene graph -----------------------------------------------------------------------------

    def read_graph(self, content: Any) -> None:
        """Adds a node for each finding: its first region, its first entity, its first box in every image. What the report denies is none."""
        observations = content.get("observations") if isinstance(content, dict) else None
        if not isinstance(observations, dict):
            self.fault("scene graphs without observations")
            return
        for observation in observations.values():
            if not isinstance(observation, dict):
                self.fault("scene graphs without observations")
                continue
            if is_positive(observation.get("positiveness")) is False:
                continue
            regions, entities = names_of(observation.get("regions"), "region"), names_of(observation.get("obs_entities"), "name")
            self.rows.nodes.append((regions[0] if regions else None, entities[0] if entities else None))
            self.rows.node_boxes += self.first_boxes(observation.get("localization"))

    # --- questions -------------------------------------------------------------------------------

    def read_questions(self, content: Any) -> None:
        questions = content.get("questions") if isinstance(content, dict) else None
        if not isinstance(questions, list):
            self.fault("question files without questions")
            return
        for question in questions:
            if isinstance(question, dict):
                self._read_question(question)
            else:
                self.fault("questions that are no objects")

    def _read_question(self, question: dict[str, Any]) -> None:
        name, text, answers = question.get("question_type"), question.get("question"), question.get("answers")
        kind = type_id(str(name), str(question.get("question_strategy") or ""))
        if kind is None:
            self.fault(f"questions of the unknown type {name}")
            return
        if not isinstance(text, str) or not text.strip():
            self.fault("questions without a text")
            return
        answers = [answer for answer in answers if isinstance(answer, dict)] if isinstance(answers, list) else []
        main = [answer for answer in answers if answer.get("answer_type") == MAIN_ANSWER]
        if not main:
            self.fault("questions without an answer")
            return
        qualities = [question.get("extraction_quality"), *(answer.get("answer_quality") for answer in answers)]
        row = QuestionRow(
            type=kind,
            grade=question_grade(question.get("question_quality"), qualities),
            text=text.strip(),
            answer=" ".join(str(answer.get("text") or "").strip() for answer in main).strip(),
            location=self._location(main),
        )
        if not _set_target(row, main):
            self.fault(f"answers without a target for {QUESTION_TYPES[kind]}")
        self.rows.questions.append(row)

    def _location(self, main: list[dict[str, Any]]) -> int:
        """Returns the number of the boxes of the first main answer that has any."""
        for answer in main:
            boxes = self.first_boxes(answer.get("localization"))
            if any(box != NO_BOX for box in boxes):
                number = self.rows.locations.setdefault(boxes, len(self.rows.locations))
                return number if number < MAX_LOCATIONS else NO_LOCATION
        return NO_LOCATION


def _set_target(row: QuestionRow, main: list[dict[str, Any]]) -> bool:
    """Sets the target of the head that answers this type; returns whether the answers have one."""
    head = head_of_type(row.type)
    if head is Head.BINARY:
        row.binary = _binary(main, row.type in INVERTED)
        return row.binary != NO_TARGET
    if head is Head.CATEGORY:
        row.category = _category(main)
        return row.category != NO_TARGET
    if head is Head.SEVERITY:
        row.severity = _severity(main)
        return row.severity != NO_TARGET
    row.region = next((regions[0] for answer in main if (regions := names_of(answer.get("regions"), "region"))), None)
    return row.region is not None


def _binary(main: list[dict[str, Any]], is_inverted: bool) -> int:
    """Returns whether the answer is yes: some main answer reports a finding; for is_normal questions, none does."""
    reports = [report for answer in main if (report := is_positive(answer.get("positiveness"))) is not None]
    return int(any(reports) != is_inverted) if reports else NO_TARGET


def _category(main: list[dict[str, Any]]) -> int:
    """Returns the CheXpert label of the first entity that a positive main answer names; No Finding if all are negative."""
    reports = [is_positive(answer.get("positiveness")) for answer in main]
    for answer, report in zip(main, reports, strict=True):
        if report and (entities := names_of(answer.get("obs_entities"), "name")):
            match = chexpert_match(entities[0])
            return NO_TARGET if match is None else match
    return NO_FINDING if reports and all(report is False for report in reports) else NO_TARGET


def _severity(main: list[dict[str, Any]]) -> int:
    """Returns the first severity level of a main answer; none if all report an absence."""
    for answer in main:
        modifiers = answer.get("modifiers")
        pairs = modifiers.items() if isinstance(modifiers, dict) else modifiers if isinstance(modifiers, list) else ()
        for pair in pairs:
            if isinstance(pair, (list, tuple)) and len(pair) == 2 and pair[0] == "severity":
                values = pair[1] if isinstance(pair[1], list) else [pair[1]]
                levels = [level for value in values if (level := severity_level(value)) is not None]
                if levels:
                    return levels[0]
    return 0 if all(is_positive(answer.get("positiveness")) is False for answer in main) else NO_TARGET
