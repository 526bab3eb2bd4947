"""Tokenizers of questions: words of the training questions, or those of a Hugging Face model."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Any

UNKNOWN_WORD = 1
"""The id of a word that no training question has; 0 is padding."""
FIRST_WORD = 2
WORD = re.compile(r"[a-z0-9]+|[^\sa-z0-9]")


def split_words(text: str) -> list[str]:
    """Returns the words and punctuation marks of a text, in lower case."""
    return WORD.findall(text.lower())


class WordTokenizer:
    """One id for each word of a vocabulary."""

    def __init__(self, vocabulary: Sequence[str]) -> None:
        self.vocabulary = list(vocabulary)
        self._ids = {word: FIRST_WORD + place for place, word in enumerate(self.vocabulary)}
        self.name = "words-" + hashlib.sha256("\n".join(self.vocabulary).encode()).hexdigest()[:12]

    @property
    def num_tokens(self) -> int:
        return FIRST_WORD + len(self.vocabulary)

    def __call__(self, texts: Sequence[str], max_tokens: int) -> list[list[int]]:
        return [[self._ids.get(word, UNKNOWN_WORD) for word in split_words(text)[:max_tokens]] for text in texts]


class PretrainedTokenizer:
    """The tokenizer of a Hugging Face model."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        digest = hashlib.sha256(repr(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()[:12]
        self.name = f"{type(tokenizer).__name__}-{digest}"

    def __call__(self, texts: Sequence[str], max_tokens: int) -> list[list[int]]:
        rows = self._tokenizer(list(texts), truncation=True, max_length=max_tokens)["input_ids"]
        return [list(row) for row in rows]
