"""Metrics equal those of scikit-learn, sacrebleu and rouge-score on random inputs, and small cases by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import sacrebleu
from rouge_score import rouge_scorer
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


WORDS = ["there", "is", "no", "a", "small", "large", "pleural", "effusion", "in", "the", "left", "right", "lung", "heart", "enlarged"]


def random_texts(rng: np.random.Generator, count: int) -> list[str]:
    """Returns sentences of few different words, so that many n-grams repeat; with capitals and punctuation."""
    return [" ".join(rng.choice(WORDS, rng.integers(1, 15))).capitalize() + "." for _ in range(count)]


@pytest.mark.parametrize("seed", range(5))
def test_bleu_and_rouge_equal_sacrebleu_and_rouge_score(seed: int) -> None:
    rng = np.random.default_rng(seed)
    answers, references = random_texts(rng, 40), random_texts(rng, 40)
    references[:10] = [f"{answer[:-1]} in the left lung" for answer in answers[:10]]
    rouge = rouge_scorer.RougeScorer(["rougeL"], use_stemmer=False)
    for answer, reference in zip(answers, references, strict=True):
        assert scores.rouge_l(answer, reference) == pytest.approx(rouge.score(reference, answer)["rougeL"].fmeasure)
    plain = [[" ".join(scores.words(text)) for text in texts] for texts in (answers, references)]
    expected = sacrebleu.corpus_bleu(plain[0], [plain[1]], smooth_method="none", tokenize="none").score / 100
    assert expected > 0 and scores.bleu4(answers, references) == pytest.approx(expected)


def test_texts_by_hand() -> None:
    assert scores.exact_match("No, effusion.", "no effusion") == 1 and scores.exact_match("effusion", "no effusion") == 0
    assert scores.token_f1("left lung", "the left lung") == pytest.approx(0.8)
    assert scores.token_f1("", "no") == 0 and scores.token_f1("", "") == 1
    assert scores.rouge_l("a b c d", "a x c d") == 0.75 and scores.rouge_l("", "a") == 0
    assert scores.bleu4(["a b c d e"], ["a b c d e"]) == pytest.approx(1)
    assert scores.bleu4(["a b c d"], ["a b c d e"]) == pytest.approx(math.exp(-0.25))
    assert scores.bleu4(["a b"], ["a b"]) == 0  # no four-gram
