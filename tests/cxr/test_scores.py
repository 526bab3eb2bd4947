"""Metrics equal those of scikit-learn on random inputs, values of sacrebleu and rouge-score, and small cases by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from sklearn import metrics

from drivetrain.tasks.cxr.scoring import scores


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("with_ties", [False, True])
def test_auroc_equals_scikit_learn(seed: int, with_ties: bool) -> None:
    rng = np.random.default_rng(seed)
    target, score, weight = rng.random(200) < 0.3, rng.normal(size=200), rng.integers(1, 4, 200).astype(float)
    score = np.round(score) if with_ties else score
    assert scores.auroc(target, score) == pytest.approx(metrics.roc_auc_score(target, score))
    assert scores.auroc(target, score, weight) == pytest.approx(metrics.roc_auc_score(target, score, sample_weight=weight))


@pytest.mark.parametrize("seed", range(5))
def test_macro_f1_and_rates_equal_scikit_learn(seed: int) -> None:
    rng = np.random.default_rng(seed)
    target, answer = rng.integers(0, 6, 50), rng.integers(0, 7, 50)
    assert scores.macro_f1(target, answer) == pytest.approx(metrics.f1_score(target, answer, average="macro"))
    yes, said = rng.random(80) < 0.4, rng.random(80) < 0.5
    found = scores.rates(yes, said)
    assert found["mcc"] == pytest.approx(metrics.matthews_corrcoef(yes, said))
    assert found["sensitivity"] == pytest.approx(metrics.recall_score(yes, said))
    assert found["specificity"] == pytest.approx(metrics.recall_score(~yes, ~said))
    assert found["ppv"] == pytest.approx(metrics.precision_score(yes, said))
    assert found["npv"] == pytest.approx(metrics.precision_score(~yes, ~said))


def test_auroc_by_hand() -> None:
    target = np.array([True, False, True, False])
    assert scores.auroc(target, np.array([0.9, 0.1, 0.8, 0.2])) == 1
    assert scores.auroc(target, np.array([0.9, 0.8, 0.1, 0.2])) == 0.5
    assert scores.auroc(target, np.zeros(4)) == 0.5
    assert math.isnan(scores.auroc(np.ones(4, bool), np.arange(4.0)))
    assert scores.auroc(target, np.array([0.9, 0.8, 0.1, 0.2]), np.array([3.0, 1.0, 1.0, 1.0])) == 0.75


def test_macro_f1_by_hand() -> None:
    assert scores.macro_f1(np.array([0, 0, 1]), np.array([0, 1, 1])) == pytest.approx(2 / 3)
    assert scores.macro_f1(np.array([0, 0]), np.array([0, 3])) == pytest.approx(1 / 3)  # class 3 is predicted, never right


PAIRS = (
    ("there is a small effusion in the left lung", "there is a small pleural effusion in the left lung", 0.9473684210526316),
    ("no effusion", "there is no effusion in the right lung", 0.4),
    ("the heart is enlarged and there is an opacity in the left lower lobe", "the heart is enlarged with an opacity in the left lower lobe",
     0.8461538461538461),
    ("left lung left lung", "the left lung and the right lung", 0.5454545454545454),
)  # fmt: skip
"""Answer, reference, and ROUGE-L (F1) of rouge-score 0.1.2."""
BLEU = 0.4781983913053312
"""Of all these pairs, by sacrebleu 2.6.0: corpus_bleu(..., smooth_method="none", tokenize="none")."""


def test_bleu_and_rouge_equal_sacrebleu_and_rouge_score() -> None:
    for answer, reference, rouge in PAIRS:
        assert scores.rouge_l(answer, reference) == pytest.approx(rouge)
    assert scores.bleu4([answer for answer, _, _ in PAIRS], [reference for _, reference, _ in PAIRS]) == pytest.approx(BLEU)


def test_texts_by_hand() -> None:
    assert scores.exact_match("No, effusion.", "no effusion") == 1 and scores.exact_match("effusion", "no effusion") == 0
    assert scores.token_f1("left lung", "the left lung") == pytest.approx(0.8)
    assert scores.token_f1("", "no") == 0 and scores.token_f1("", "") == 1
    assert scores.rouge_l("a b c d", "a x c d") == 0.75 and scores.rouge_l("", "a") == 0
    assert scores.bleu4(["a b c d e"], ["a b c d e"]) == pytest.approx(1)
    assert scores.bleu4(["a b c d"], ["a b c d e"]) == pytest.approx(math.exp(-0.25))
    assert scores.bleu4(["a b"], ["a b"]) == 0  # no four-gram
