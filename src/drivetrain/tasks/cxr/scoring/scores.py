"""Metrics of answers, labels and boxes, computed with numpy."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

Array = np.ndarray


def macro_f1(target: Array, predicted: Array) -> float:
    """Returns the mean F1 of all classes that are a target or a prediction; NaN without samples."""
    return float(np.mean(per_class_f1(target, predicted))) if len(target) else math.nan


def per_class_f1(target: Array, predicted: Array) -> Array:
    """Returns the F1 of each class that is a target or a prediction, in the order of the classes."""
    classes = int(max(target.max(initial=0), predicted.max(initial=0))) + 1
    hits = np.bincount(target[target == predicted], minlength=classes)
    total = np.bincount(target, minlength=classes) + np.bincount(predicted, minlength=classes)
    return 2 * hits[total > 0] / total[total > 0]


def auroc(target: Array, score: Array, weight: Array | None = None) -> float:
    """Returns the area under the ROC curve (ties count one half); NaN if all targets are equal.

    `target` are bools; `weight` says how often each sample counts.
    """
    weight = np.ones(len(score)) if weight is None else weight
    order = np.argsort(score, kind="stable")
    target, score, weight = target[order].astype(bool), score[order], weight[order]
    negatives, positives = weight * ~target, weight * target
    starts = np.flatnonzero(np.diff(score, prepend=-np.inf) != 0)  # samples of one score form a group
    if not (len(starts) and negatives.sum() > 0 and positives.sum() > 0):
        return math.nan
    positives, negatives = np.add.reduceat(positives, starts), np.add.reduceat(negatives, starts)
    below = np.cumsum(negatives) - negatives
    return float((positives * (below + negatives / 2)).sum() / (positives.sum() * negatives.sum()))


def rates(target: Array, predicted: Array) -> dict[str, float]:
    """Returns sensitivity, specificity, PPV, NPV and MCC of yes-or-no answers; NaN where a rate has no samples."""
    target, predicted = target.astype(bool), predicted.astype(bool)
    tp, tn = float((target & predicted).sum()), float((~target & ~predicted).sum())
    fp, fn = float((~target & predicted).sum()), float((target & ~predicted).sum())
    spread = math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    return {
        "sensitivity": _ratio(tp, tp + fn), "specificity": _ratio(tn, tn + fp), "ppv": _ratio(tp, tp + fp), "npv": _ratio(tn, tn + fn),
        "mcc": (tp * tn - fp * fn) / spread if spread else 0.0,
    }  # fmt: skip


def _ratio(part: float, total: float) -> float:
    return part / total if total else math.nan


# --- texts -------------------------------------------------------------------------------------


def words(text: str) -> list[str]:
    """Returns the words of a text in lower case, without punctuation."""
    return re.findall(r"[a-z0-9]+", text.lower())


def exact_match(answer: str, reference: str) -> float:
    return float(words(answer) == words(reference))


def token_f1(answer: str, reference: str) -> float:
    """Returns the harmonic mean of precision and recall over the words of two texts, as SQuAD defines it."""
    one, other = words(answer), words(reference)
    common = sum((Counter(one) & Counter(other)).values())
    if not one or not other:
        return float(one == other)
    return 2 * common / (len(one) + len(other))


def bleu4(answers: Sequence[str], references: Sequence[str]) -> float:
    """Returns the corpus BLEU-4 with one reference each, from 0 to 1: n-grams of 1 to 4 words, with the brevity penalty, unsmoothed."""
    return bleu_of_counts(np.sum([bleu_counts(*pair) for pair in zip(answers, references, strict=True)], axis=0))


def bleu_counts(answer: str, reference: str) -> Array:
    """Returns what BLEU-4 adds up over a corpus: matching n-grams and n-grams for n = 1 to 4, and both lengths."""
    one, other = words(answer), words(reference)
    own = [_ngrams(one, n) for n in range(1, 5)]
    matches = [sum((counts & _ngrams(other, n)).values()) for n, counts in enumerate(own, 1)]
    return np.array([*matches, *(sum(counts.values()) for counts in own), len(one), len(other)], float)


def bleu_of_counts(counts: Array) -> float:
    """Returns BLEU-4 from the sums of `bleu_counts`."""
    matches, totals, (length, reference_length) = counts[:4], counts[4:8], counts[8:]
    if not matches.all():
        return 0.0
    penalty = min(1.0, math.exp(1 - reference_length / length))
    return float(penalty * np.exp(np.log(matches / totals).mean()))


def _ngrams(sequence: Sequence[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(sequence[start : start + n]) for start in range(len(sequence) - n + 1))


def rouge_l(answer: str, reference: str) -> float:
    """Returns the F1 of the longest common subsequence of words."""
    one, other = words(answer), words(reference)
    if not one or not other:
        return 0.0
    lengths = [0] * (len(other) + 1)
    for word in one:
        diagonal = 0
        for place, own in enumerate(other, 1):
            diagonal, lengths[place] = lengths[place], diagonal + 1 if word == own else max(lengths[place], lengths[place - 1])
    return 2 * lengths[-1] / (len(one) + len(other))
