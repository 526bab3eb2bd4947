"""The fixed words of the data sets: CheXpert labels, views, quality grades, question types and severities.

Names are matched without regard to case. What a table does not know has no id: callers count it and never guess.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import Any, Literal

CHEXPERT = (
    "Atelectasis", "Cardiomegaly", "Consolidation", "Edema", "Enlarged Cardiomediastinum", "Fracture", "Lung Lesion",
    "Lung Opacity", "Pleural Effusion", "Pneumonia", "Pneumothorax", "Pleural Other", "Support Devices", "No Finding",
)  # fmt: skip
"""The labels, in the order of targets and scores."""
NO_FINDING = CHEXPERT.index("No Finding")
SUPPORT_DEVICES = CHEXPERT.index("Support Devices")


class Label(IntEnum):
    """A CheXpert label of a study."""

    POSITIVE = 1
    NEGATIVE = 0
    UNCERTAIN = -1
    MISSING = -2


SPLITS = ("train", "validate", "test")

# --- views ---------------------------------------------------------------------------------------

FRONTAL_VIEWS = ("PA", "AP", "AP AXIAL", "PA LLD")
LATERAL_VIEWS = ("LATERAL", "LL", "LAO", "RAO", "SWIMMERS", "XTABLE LATERAL")
VIEWS = (*FRONTAL_VIEWS, *LATERAL_VIEWS, "other")
"""All view positions; the earlier one is preferred where a study has several images."""
OTHER_VIEW = VIEWS.index("other")
ViewFilter = Literal["frontal_only", "lateral_only", "all"]


def view_id(name: str) -> int:
    """Returns the id of a view position; an empty or unknown one is `other`."""
    try:
        return VIEWS.index(name.strip().upper())
    except ValueError:
        return OTHER_VIEW


def allowed_views(views: ViewFilter) -> tuple[int, ...]:
    """Returns the ids of the views that a filter allows."""
    names = {"frontal_only": FRONTAL_VIEWS, "lateral_only": LATERAL_VIEWS, "all": VIEWS}[views]
    return tuple(VIEWS.index(name) for name in names)


# --- quality -------------------------------------------------------------------------------------

GRADES = ("unrated", "D", "C", "B", "A", "A+", "A++")
"""Quality grades, from worst to best. A question whose evaluation failed is unrated, which is no grade D."""
UNRATED = 0
Grade = Literal["unrated", "D", "C", "B", "A", "A+", "A++"]

CRITERIA = MappingProxyType(
    {
        "region_extract_quality": ("B", "B", "A", "A", "A++"),
        "entity_extract_quality": ("B", "A", "A++"),
        "sentence_name_quality": ("B", "A", "A++"),
        "change_quality": ("B", "A", "A", "A++"),
        "general_issue_level": ("D", "C", "B", "A", "A+", "A++"),
        "localization_quality": ("B", "B", "A", "A++", "A++"),
    }
)
"""The best grade that each value of a criterion of the extraction allows, for values from 0 up."""
CRITERION_ALIASES = MappingProxyType(
    {"region_quality": "region_extract_quality", "entity_quality": "entity_extract_quality", "issue_level": "general_issue_level"}
)
VALUE_GRADES = MappingProxyType(
    {
        value: grade
        for grade, values in {
            "A++": "RESOLVED_REGIONS_ONLY RESOLVED_ENTITIES_ONLY NO_ISSUES BBOX_LOCALIZATION BBOX_AND_MASK_LOCALIZATION ALIGNED_MENTIONED "
            "ALIGNED_INFERABLE RELEVANT_MAIN_ANSWER RELATED_INFO FULLY_COMPLETE OPTIMAL",
            "A+": "FIXABLE DETAILS_MISSING",
            "A": "CONTAINS_DEFAULT_REGIONS CONTAINS_NON_RESOLVED_REGIONS CONTAINS_NON_RESOLVED_ENTITIES UNDERSCORES_IN_SENTENCE_OR_NAME "
            "UNDERSCORES_IN_CHANGE_SENTENCE CONTAINS_NON_RESOLVED_CHANGES IGNORABLE INCOMPLETE_LOCALIZATION ALIGNED_NEGATIVE_NOT_MENTIONED "
            "ALIGNED_GENERAL_STATEMENT REDUNDANT_INFO IRRELEVANT_INFO UNUSUAL_SENTENCE_STRUCTURE GRAMMATICAL_ERRORS",
            "B": "NO_REGIONS DEFAULT_REGIONS_ONLY NO_ENTITIES CHANGE_IN_SENTENCE_OR_NAME CHANGE_SENTENCE_REMOVED MOSTLY_INTERPRETABLE "
            "NO_LOCALIZATION FALLBACK_LOCALIZATION NON_ALIGNED_NON_INFERABLE NOT_ANSWERED INCOMPLETE_NON_MISLEADING UNCLEAR_QUESTION "
            "UNRELATED_TO_CHEST_XRAY UNCLEAR_ANSWER",
            "C": "NON_INTERPRETABLE NON_ALIGNED_MISLEADING INCOMPLETE_MISLEADING UNANSWERABLE NOT_UNDERSTANDABLE",
            "D": "DISCARDED NON_ALIGNED_CONTRADICTING",
        }.items()
        for value in values.split()
    }
)
"""The best grade that each named value of a criterion allows."""
RATING_KEYS = ("rating", "overall", "grade", "quality")


def grade_id(name: object) -> int | None:
    """Returns the id of a grade by name; None if it is no grade."""
    text = str(name).strip()
    if text.lower() in ("unrated", "u", "none", ""):
        return UNRATED
    try:
        return GRADES.index(text.upper())
    except ValueError:
        return None


def question_grade(quality: object, other_qualities: Iterable[object] = ()) -> int:
    """Returns the grade of a question: its rating, or else the worst grade that its criteria and `other_qualities` allow.

    A question whose own quality is empty was not evaluated: it is unrated.
    """
    if isinstance(quality, str):
        return grade_id(quality) or UNRATED
    if isinstance(quality, Mapping):
        if not quality:
            return UNRATED
        for key in RATING_KEYS:
            if key in quality and not isinstance(quality[key], (int, float)):
                return grade_id(quality[key]) or UNRATED
    worst = [grade for entry in (quality, *other_qualities) if (grade := _worst_grade(entry)) is not None]
    return min(worst, default=UNRATED)


def _worst_grade(quality: object) -> int | None:
    if not isinstance(quality, Mapping):
        return None
    grades = []
    for name, value in quality.items():
        allowed = CRITERIA.get(CRITERION_ALIASES.get(name, name))
        if isinstance(value, str) and value in VALUE_GRADES:
            grades.append(GRADES.index(VALUE_GRADES[value]))
        elif isinstance(value, int) and not isinstance(value, bool) and allowed and 0 <= value < len(allowed):
            grades.append(GRADES.index(allowed[value]))
    return min(grades, default=None)


# --- questions -----------------------------------------------------------------------------------


class Head(IntEnum):
    """The part of the model that answers a question."""

    BINARY = 0
    CATEGORY = 1
    REGION = 2
    SEVERITY = 3


HEADS = tuple(head.name.lower() for head in Head)
_B, _C, _R, _S = Head.BINARY, Head.CATEGORY, Head.REGION, Head.SEVERITY
ROUTES = MappingProxyType(
    {
        "A_indication": _C,
        "B01_describe_all": _C, "B02_describe_abnormal": _C, "B03_is_abnormal": _B, "B04_is_normal": _B,
        "B08_describe_subcat": _C, "B09_describe_abnormal_subcat": _C, "B10_is_abnormal_subcat": _B, "B11_is_normal_subcat": _B,
        "B12_describe_device": _C, "B13_has_devices": _B, "B14_describe_acquisition": _B, "B15_describe_imaging_artifacts": _B,
        "B16_has_imaging_artifacts": _B,
        "C01_describe_region": _R, "C02_describe_abnormal_region": _R, "C03_is_abnormal_region": _B, "C04_is_normal_region": _B,
        "C07_describe_region_device": _C, "C08_has_region_device": _B,
        "D01_describe_finding": _C, "D02_has_finding": _B, "D03_where_is_finding": _R, "D04_how_severe_is_finding": _S,
        "D05_describe_device": _C, "D06_has_device": _B, "D07_where_is_device": _R,
    }
)  # fmt: skip
"""Each documented question type and its head. Acquisition and artifacts have no CheXpert label, so their descriptions are
answered by the binary head: whether the answer reports one."""
QUESTION_TYPES = tuple(ROUTES)
INVERTED = frozenset(index for index, name in enumerate(QUESTION_TYPES) if "_is_normal" in name)
"""Types that ask whether something is normal: a positive answer, which reports a finding, means no."""
ABNORMAL_STRATEGY = "abnormal"


@functools.cache
def type_id(name: str, strategy: str = "") -> int | None:
    """Returns the id of a question type by its long name, its code or its short name; None if it is unknown.

    The short name `describe_device` belongs to two types, which `strategy` tells apart.
    """
    text = name.strip().lower()
    if text == "describe_device":
        text = "b12" if strategy.strip().lower() == ABNORMAL_STRATEGY else "d05"
    for index, long_name in enumerate(QUESTION_TYPES):
        code, _, short_name = long_name.lower().partition("_")
        if text in (long_name.lower(), short_name) or (text == code and len(code) > 1):
            return index
    return None


def head_of_type(index: int) -> Head:
    """Returns the head that answers the questions of a type."""
    return ROUTES[QUESTION_TYPES[index]]


# --- answers -------------------------------------------------------------------------------------

MAIN_ANSWER = "main_answer"
ANSWER_TYPES = (MAIN_ANSWER, "details", "related_information")
POSITIVENESS: Mapping[str, bool] = MappingProxyType(
    {"pos": True, "positive": True, "yes": True, "true": True, "neg": False, "negative": False, "no": False, "false": False}
)
"""Whether an answer reports a finding (`pos`) or its absence (`neg`)."""


def is_positive(value: object) -> bool | None:
    """Returns whether an answer reports a finding; None if it does not say."""
    return value if isinstance(value, bool) else POSITIVENESS.get(str(value).strip().lower())


SEVERITIES = ("none", "mild", "moderate", "severe")
SEVERITY_WORDS: Mapping[str, int] = MappingProxyType(
    {
        word: level
        for level, words in enumerate(
            (
                "none, no, absent, normal",
                "mild, minimal, slight, slightly, mildly, minor, small, tiny, trace, subtle, low, borderline, very mild, mild-to-minimal",
                "moderate, moderately, medium, mild to moderate, mild-to-moderate, intermediate, moderate-sized",
                "severe, severely, marked, markedly, large, extensive, massive, significant, substantial, critical, high, "
                "moderate to severe, moderate-to-severe, very severe, profound",
            )
        )
        for word in words.split(", ")
    }
)
"""Words of the severity modifier, with their level in SEVERITIES."""


def severity_level(value: object) -> int | None:
    """Returns the severity level of a modifier's value; None if it is unknown."""
    return SEVERITY_WORDS.get(" ".join(str(value).lower().replace("_", " ").split()))


_ENTITY_PATTERNS = tuple(
    (re.compile(rf"\b(?:{pattern})\b"), CHEXPERT.index(label))
    for pattern, label in (
        (r"no finding|no abnormality|normal", "No Finding"),
        (r"(?:hydro)?pneumothora(?:x|ces)", "Pneumothorax"),
        (r"(?:tension )?pneumomediastinum|(?:enlarged|widened|wide) (?:cardio)?mediastin(?:um|al contour|al contours)|"
         r"mediastinal (?:widening|enlargement)|cardiomediastin(?:um|al) enlargement", "Enlarged Cardiomediastinum"),
        (r"cardiomegaly|enlarged (?:heart|cardiac silhouette)|(?:heart|cardiac|cardiac silhouette) enlargement", "Cardiomegaly"),
        (r"(?:pleural )?effusions?|hemothorax|hydrothorax|empyema|pleural fluid", "Pleural Effusion"),
        (r"pleural (?:thickening|plaques?|scarring|calcifications?|other|mass|lesion|abnormality)|fibrothorax", "Pleural Other"),
        (r"(?:bronchop|p)neumonia|(?:lung|pulmonary) infection", "Pneumonia"),
        (r"consolidations?", "Consolidation"),
        (r"atelectas[ie]s|(?:lung|lobar) collapse|volume loss", "Atelectasis"),
        (r"(?:pulmonary |interstitial |alveolar )?o?edema|(?:pulmonary )?vascular congestion|chf|kerley b? ?lines", "Edema"),
        (r"(?:lung |pulmonary )?(?:lesions?|nodules?|mass(?:es)?|tumou?rs?|granulomas?|metastas[ie]s)|lung cancer|cavit(?:y|ation)",
         "Lung Lesion"),
        (r"fractures?", "Fracture"),
        (r"support devices?|devices?|tubes?|catheters?|pacemakers?|icd|defibrillators?|lines?|picc|ports?|wires?|leads?|stents?|"
         r"(?:prosthetic|mechanical|artificial) valves?|valve replacement|prosthes[ie]s|clips?|sutures?|sternotomy|cabg|drains?|iabp|hardware|implants?|coils?|pumps?|electrodes?|staples?",
         "Support Devices"),
        (r"(?:lung |pulmonary )?(?:opacit(?:y|ies)|opacification|infiltrat(?:e|es|ion)|airspace disease|haziness)", "Lung Opacity"),
    )
)  # fmt: skip


@functools.cache
def chexpert_match(entity: str) -> int | None:
    """Returns the CheXpert label that an entity belongs to; None if none does."""
    text = " ".join(entity.lower().replace("_", " ").split())
    for index, label in enumerate(CHEXPERT):
        if text == label.lower():
            return index
    for pattern, index in _ENTITY_PATTERNS:
        if pattern.search(text):
            return index
    return None


def names_of(values: Any, key: str) -> list[str]:
    """Returns the names in a list of texts, or of objects that hold the name under `key`."""
    if not isinstance(values, list):
        return []
    names = [value.get(key) if isinstance(value, dict) else value for value in values]
    return [name.strip().lower() for name in names if isinstance(name, str) and name.strip()]
