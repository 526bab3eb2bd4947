"""Checks the data before a training: what there is, how it is distributed, what is missing, and what a model could learn by a short cut."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from drivetrain.tasks.cxr.data.columns import MISSING_IMAGES, Array, CxrIndex
from drivetrain.tasks.cxr.data.images import BadImageError, bad_images, decode
from drivetrain.tasks.cxr.data.layout import split_name
from drivetrain.tasks.cxr.vocabulary import CHEXPERT, GRADES, HEADS, QUESTION_TYPES, SEVERITIES, SPLITS, VIEWS, Label

Report = dict[str, Any]
SHOWN = 12
"""The most frequent values of a distribution that the text shows."""
CHUNK = 1 << 20
"""Questions that are counted at a time, so that memory does not grow with their number."""
MAX_ROWS = 2_000_000
"""Questions from which short cuts are estimated."""
ONE_SIDED, MANY = 0.95, 0.05
MIN_POSITIVES = 10
"""Positive labels below which a score means nothing."""


@dataclass(frozen=True)
class QuestionCounts:
    """Numbers of questions."""

    grades: Array
    kinds: Array
    """[4, types]: all questions, those with a target, those answered yes, those answered no."""
    targets: dict[str, Array]
    """Head -> questions of each class."""


def is_checking_process() -> bool:
    """Returns whether this process checks the data of a training: rank 0 does, because all ranks read the same index."""
    return os.environ.get("RANK", "0") == "0"


def check_data(index: CxrIndex, decode_images: int = 0, notice: Callable[[str], None] | None = None) -> Report:
    """Returns counts, distributions, faults, `errors` that make a training impossible and `warnings`.

    `decode_images` images, spread evenly, are read from their JPEG (-1: all).
    """
    questions = _count_questions(index)
    report: Report = {
        "totals": _totals(index),
        "splits": _splits(index),
        "views": _named(_counts(index.image["view"], len(VIEWS)), VIEWS),
        "grades": _named(questions.grades, GRADES),
        "types": _types(questions),
        "targets": _targets(index, questions),
        "chexpert": _chexpert(index),
        "question_alone": _question_alone(index),
        "left_out": _left_out(index),
        "examples": {fault: list(names) for fault, names in index.examples.items()},
        "unreadable_images": bad_images(index) | _decode(index, decode_images, notice),
    }
    report["errors"] = list(_errors(index, report))
    report["warnings"] = list(_warnings(index, report))
    return report


def _totals(index: CxrIndex) -> dict[str, int]:
    return {
        "patients": len(np.unique(index.study["patient"])),
        "studies": index.num_studies,
        "images": index.num_images,
        "missing images": int((~np.asarray(index.image["is_present"])).sum()),
        "questions": index.num_questions,
        "question texts": len(index.question_texts),
        "regions": len(index.region_names) - 1,
        "entities": len(index.entity_names) - 1,
    }


def _left_out(index: CxrIndex) -> dict[str, int]:
    """Returns the faults of the build; images that were missing then and exist now do not count."""
    missing = int((~index.image["is_present"]).sum())
    others = {fault: count for fault, count in index.counts.items() if fault != MISSING_IMAGES}
    return others | ({MISSING_IMAGES: missing} if missing else {})


def _split_of_studies(index: CxrIndex) -> Array:
    """Returns the split of each study: that of its first image."""
    splits: Array = np.asarray(index.image["split"])[np.asarray(index.study["first_image"][:-1])]
    return splits


def _splits(index: CxrIndex) -> dict[str, dict[str, int]]:
    splits, questions = _split_of_studies(index), np.diff(index.study["first_question"])
    return {
        split_name(number): {
            "patients": len(np.unique(np.asarray(index.study["patient"])[splits == number])),
            "studies": int((splits == number).sum()),
            "images": int((np.asarray(index.image["split"]) == number).sum()),
            "questions": int(questions[splits == number].sum()),
        }
        for number in (*range(len(SPLITS)), -1)
        if number >= 0 or (splits == number).any()
    }


def _count_questions(index: CxrIndex) -> QuestionCounts:
    """Counts the questions in one pass over the columns, a chunk at a time."""
    columns = index.question
    result = QuestionCounts(
        np.zeros(len(GRADES), np.int64),
        np.zeros((4, len(QUESTION_TYPES)), np.int64),
        {head: np.zeros(size, np.int64) for head, size in _classes(index).items()},
    )
    for begin in range(0, index.num_questions, CHUNK):
        rows = slice(begin, begin + CHUNK)
        targets = {head: np.asarray(columns[head][rows]) for head in HEADS}
        kinds = np.asarray(columns["type"][rows])
        has_target = np.logical_or.reduce([target >= 0 for target in targets.values()])
        masks = (kinds >= 0, has_target, targets["binary"] == 1, targets["binary"] == 0)
        result.grades[:] += _counts(columns["grade"][rows], len(GRADES))
        result.kinds[:] += np.stack([_counts(kinds[mask], len(QUESTION_TYPES)) for mask in masks])
        for head, target in targets.items():
            result.targets[head][:] += _counts(target[target >= 0], len(result.targets[head]))
    return result


def _classes(index: CxrIndex) -> dict[str, int]:
    """Returns the number of classes of each head."""
    return {"binary": 2, "category": len(CHEXPERT), "region": len(index.region_names), "severity": len(SEVERITIES)}


def _counts(column: Array, size: int) -> Array:
    """Returns how often each of the numbers 0 to size - 1 is in a column."""
    counts: Array = np.bincount(np.asarray(column), minlength=size)[:size]
    return counts


def _named(counts: Array, names: Sequence[str]) -> dict[str, int]:
    return {name: int(count) for name, count in zip(names, counts, strict=True)}


def _types(questions: QuestionCounts) -> dict[str, dict[str, int]]:
    """Returns for each question type: questions, those with a target and, for yes-no questions, those with a positive finding."""
    total, targets, yes, no = questions.kinds
    return {
        name: {"questions": int(total[i]), "with a target": int(targets[i]), "yes": int(yes[i]), "no": int(no[i])}
        for i, name in enumerate(QUESTION_TYPES)
    }


def _targets(index: CxrIndex, questions: QuestionCounts) -> dict[str, dict[str, int]]:
    names = {"binary": ("no", "yes"), "category": CHEXPERT, "region": index.region_names, "severity": SEVERITIES}
    return {head: _named(questions.targets[head], names[head]) for head in HEADS}


def _chexpert(index: CxrIndex) -> dict[str, dict[str, dict[str, int]]]:
    """Returns the studies of each split with each value of each label."""
    labels, splits = np.asarray(index.study["chexpert"]), _split_of_studies(index)
    return {
        split: {
            name: {value.name.lower(): int((labels[splits == number, i] == value).sum()) for value in Label}
            for i, name in enumerate(CHEXPERT)
        }
        for number, split in enumerate(SPLITS)
    }


def _question_alone(index: CxrIndex) -> dict[str, dict[str, float]]:
    """Returns for each head the accuracy of the most frequent answer, and of the most frequent answer to the same question text."""
    step = max(-(-index.num_questions // MAX_ROWS), 1)
    texts = np.asarray(index.question["text"][::step], np.int64)
    result = {}
    for head in HEADS:
        targets = np.asarray(index.question[head][::step])
        used = targets >= 0
        if not used.any():
            continue
        values, counts = np.unique(texts[used] * (1 << 16) + targets[used], return_counts=True)
        best = np.zeros(int(texts.max()) + 1, np.int64)
        np.maximum.at(best, values >> 16, counts)
        result[head] = {"most frequent": float(np.bincount(targets[used]).max() / used.sum()), "by text": float(best.sum() / used.sum())}
    return result


def _decode(index: CxrIndex, number: int, notice: Callable[[str], None] | None) -> dict[str, str]:
    """Decodes images from their files; returns those that cannot be read, and why."""
    present = np.flatnonzero(index.image["is_present"])
    rows = (
        present
        if number < 0
        else present[np.unique(np.linspace(0, len(present) - 1, min(number, len(present))).astype(int))]
        if number
        else []
    )
    unreadable, last_notice = {}, time.monotonic()
    for position, row in enumerate(rows):
        path = index.image_path(int(row))
        try:
            decode(path, 64)
        except BadImageError as error:
            unreadable[str(path)] = str(error)
        if notice and time.monotonic() - last_notice > 2:
            last_notice = time.monotonic()
            notice(f"check: {position + 1:,} of {len(rows):,} images read, {len(unreadable):,} cannot be read")
    return unreadable


# --- verdicts ------------------------------------------------------------------------------------


def _errors(index: CxrIndex, report: Report) -> Iterator[str]:
    train = report["splits"]["train"]
    if not train["questions"]:
        yield "the train split has no questions: the tables and the questions do not belong together"
    if report["totals"]["missing images"] == report["totals"]["images"]:
        yield f"no image file exists, such as {index.image_path(0)}: give the folder that holds files/"
    elif len(report["unreadable_images"]) > MANY * index.num_images:
        yield f"{len(report['unreadable_images']):,} image files cannot be read: copy them again"


def _warnings(index: CxrIndex, report: Report) -> Iterator[str]:
    yield from _fault_warnings(index, report)
    yield from _balance_warnings(report)
    yield from _label_warnings(report)
    yield from _view_warnings(index)


def _fault_warnings(index: CxrIndex, report: Report) -> Iterator[str]:
    for fault, count in report["left_out"].items():
        if not fault.startswith("answers without a target"):
            examples = ", ".join(report["examples"].get(fault, [])[:3])
            yield f"{count:,} {fault}{f', such as {examples}' if examples else ''}"
    for path, reason in list(report["unreadable_images"].items())[:3]:
        yield f"{path} cannot be read ({reason})"
    splits, patients = _split_of_studies(index), np.asarray(index.study["patient"])
    for a in range(len(SPLITS)):
        for b in range(a + 1, len(SPLITS)):
            shared = np.intersect1d(patients[splits == a], patients[splits == b])
            if len(shared):
                yield f"{len(shared):,} patients are in {SPLITS[a]} and in {SPLITS[b]}, such as p{shared[0]}: scores would be too good"
    unrated = report["grades"][GRADES[0]]
    if unrated > index.num_questions / 2:
        yield f"{unrated:,} questions are unrated, so that a grade leaves them out; of an export, use grade=unrated"


def _balance_warnings(report: Report) -> Iterator[str]:
    for name, counts in report["types"].items():
        answered = counts["yes"] + counts["no"]
        if answered and max(counts["yes"], counts["no"]) > ONE_SIDED * answered:
            yield f"{name}: {max(counts['yes'], counts['no']) / answered:.0%} have the same answer, so accuracy says little"
    absent = [name for name, counts in report["types"].items() if not counts["questions"]]
    if absent:
        yield f"no questions of {len(absent)} types: {', '.join(absent[:SHOWN])}"
    for head, scores in report["question_alone"].items():
        if scores["by text"] > ONE_SIDED:
            yield f"{head}: the question's text alone gives {scores['by text']:.0%} of the answers; compare with a model that sees no image"


def _label_warnings(report: Report) -> Iterator[str]:
    for split, labels in report["chexpert"].items():
        rare = [name for name, counts in labels.items() if counts["positive"] < MIN_POSITIVES]
        if rare and report["splits"][split]["studies"]:
            yield f"{split}: fewer than {MIN_POSITIVES} positive studies of {', '.join(rare)}"
        one_sided = [name for name, counts in labels.items() if counts["positive"] >= MIN_POSITIVES and not counts["negative"]]
        if one_sided:
            yield f"{split}: no negative study of {', '.join(one_sided)}, so there is no AUROC (empty labels are missing, not negative)"


def _view_warnings(index: CxrIndex) -> Iterator[str]:
    """Yields labels whose prevalence differs much between PA and AP images: a model could learn the view instead of the finding."""
    labels, views = np.asarray(index.study["chexpert"]), np.asarray(index.image["view"])[np.asarray(index.study["first_image"][:-1])]
    for i, name in enumerate(CHEXPERT):
        shares = {}
        for view in ("PA", "AP"):
            known = labels[(views == VIEWS.index(view)) & (labels[:, i] >= 0), i]
            if len(known) >= 100 and known.sum() >= MIN_POSITIVES:
                shares[view] = float(known.mean())
        if len(shares) == 2 and max(shares.values()) > 2 * min(shares.values()):
            yield f"{name} is positive in {shares['PA']:.0%} of PA and {shares['AP']:.0%} of AP studies: a model can learn the view instead"


# --- text ----------------------------------------------------------------------------------------


def report_text(report: Report) -> str:
    """Returns the report as lines for people."""
    lines = ["totals     " + "   ".join(f"{name} {count:,}" for name, count in report["totals"].items())]
    for split, counts in report["splits"].items():
        lines.append(f"{split:<10} " + "   ".join(f"{name} {count:,}" for name, count in counts.items()))
    lines += ["", f"views      {_shares(report['views'])}", f"grades     {_shares(report['grades'])}"]
    lines += ["", f"{'type':<32}{'questions':>12}{'with a target':>15}{'yes':>8}"]
    for name, counts in report["types"].items():
        answered = counts["yes"] + counts["no"]
        share = f"{counts['yes'] / answered:.0%}" if answered else ""
        lines.append(f"{name:<32}{counts['questions']:>12,}{counts['with a target']:>15,}{share:>8}")
    lines.append("")
    for head in HEADS:
        alone = report["question_alone"].get(head)
        chance = f"   (most frequent {alone['most frequent']:.0%}, from the text alone {alone['by text']:.0%})" if alone else ""
        lines.append(f"{head:<10} {_shares(report['targets'][head])}{chance}")
    lines += ["", f"{'train':<28}{'positive':>10}{'negative':>10}{'uncertain':>11}{'missing':>10}"]
    for name, counts in report["chexpert"]["train"].items():
        lines.append(f"{name:<28}{counts['positive']:>10,}{counts['negative']:>10,}{counts['uncertain']:>11,}{counts['missing']:>10,}")
    lines += ["", *(f"note     {count:,} {fault}" for fault, count in report["left_out"].items() if fault.startswith("answers without"))]
    lines += [*(f"warning  {text}" for text in report["warnings"]), *(f"error    {text}" for text in report["errors"])]
    lines.append("the data can be trained on" if not report["errors"] else "the data cannot be trained on")
    return "\n".join(lines)


def _shares(counts: dict[str, int]) -> str:
    total = sum(counts.values())
    ordered = sorted(((name, count) for name, count in counts.items() if count), key=lambda item: -item[1])
    more = f"   and {len(ordered) - SHOWN} more" if len(ordered) > SHOWN else ""
    return "   ".join(f"{name} {count / total:.1%}" for name, count in ordered[:SHOWN]) + more if total else "none"
