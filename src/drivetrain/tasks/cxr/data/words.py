"""The words of questions, for text=small."""

from __future__ import annotations

import re

from drivetrain.tasks.cxr.data.columns import Texts

WORD = re.compile(r"[a-z0-9]+|[^\sa-z0-9]")


def words_of(text: str) -> list[str]:
    """Returns the words and signs of a text, in lower case."""
    return WORD.findall(text.lower())


def all_words(texts: Texts) -> list[str]:
    """Returns the words of all texts in alphabetical order. They depend on the index alone, so that each stage of a recipe has the same."""
    return sorted({word for number in range(len(texts)) for word in words_of(texts[number])})
