"""Answers as text: the words of the predicted class, compared with those of the right class and with the written answer."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from drivetrain.tasks.cxr.scoring import scores
from drivetrain.tasks.cxr.scoring.answers import ClassNames

Array = np.ndarray


class AnswerTexts:
    """Scores answers as text. Each pair of a question and an answer is compared once, also over many resamples."""

    def __init__(self, names: ClassNames, written: Callable[[int], str]) -> None:
        """`written` returns the written answer of a question, by its row."""
        self.names, self.written = names, written
        self._rows: dict[tuple[int, int], int] = {}
        self._values: list[Array] = []

    def table(self, question: Array, head: Array, target: Array, answer: Array) -> dict[str, float]:
        """Returns exact match and token F1 with the right class, ROUGE-L and BLEU-4 with the written answer."""
        if not len(question):
            return {}
        columns = zip(question.tolist(), head.tolist(), target.tolist(), answer.tolist(), strict=True)
        rows = np.array([self._row(*entry) for entry in columns])
        values = np.stack(self._values)[rows]
        exact, f1, rouge = values[:, :3].mean(0).tolist()
        return {"exact match": exact, "token F1": f1, "ROUGE-L": rouge, "BLEU-4": scores.bleu_of_counts(values[:, 3:].sum(0))}

    def _row(self, question: int, head: int, target: int, answer: int) -> int:
        row = self._rows.get((question, answer))
        if row is None:
            said, right, written = self.names.answer(head, answer), self.names.answer(head, target), self.written(question)
            single = scores.exact_match(said, right), scores.token_f1(said, right), scores.rouge_l(said, written)
            row = self._rows[question, answer] = len(self._values)
            self._values.append(np.concatenate([single, scores.bleu_counts(said, written)]))
        return row
