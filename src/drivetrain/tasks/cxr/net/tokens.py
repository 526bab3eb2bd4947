"""Tokenizers of questions: words of the questions, or those of a Hugging Face model."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from drivetrain.tasks.cxr.data.words import words_of

UNKNOWN_WORD = 1
"""The id of a word that no question of the data has; 0 is padding."""
FIRST_WORD = 2


class WordTokenizer:
    """One id for each word of a vocabulary."""

    def __init__(self, vocabulary: Sequence[str]) -> None:
        self.vocabulary = list(vocabulary)
        self._ids = {word: FIRST_WORD + place for place, word in enumerate(self.vocabulary)}
        self.key = "words-" + hashlib.sha256("\n".join(self.vocabulary).encode()).hexdigest()[:12]

    @property
    def num_tokens(self) -> int:
        return FIRST_WORD + len(self.vocabulary)

    def encode(self, texts: list[str]) -> list[list[int]]:
        return [[self._ids.get(word, UNKNOWN_WORD) for word in words_of(text)] for text in texts]


class PretrainedTokenizer:
    """The tokenizer of a Hugging Face model; a text keeps its last special token when it is cut."""

    def __init__(self, tokenizer: Any, max_tokens: int) -> None:
        self._tokenizer, self._max_tokens = tokenizer, max_tokens
        digest = hashlib.sha256(repr(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()[:12]
        self.key = f"{type(tokenizer).__name__}-{max_tokens}-{digest}"

    def encode(self, texts: list[str]) -> list[list[int]]:
        rows = self._tokenizer(texts, truncation=True, max_length=self._max_tokens)["input_ids"]
        return [list(row) for row in rows]
