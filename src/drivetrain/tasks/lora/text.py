"""Texts as tokens: tokenised once and kept, and packed into rows without padding."""

from __future__ import annotations

import bisect
import hashlib
import json
from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from drivetrain.outcomes import Problem
from drivetrain.tasks.lora.base import cache, made_once, vocabulary
from drivetrain.tasks.lora.documents import Notice, Piece, Reading, documents

FORMAT = 2
TOGETHER = 1000  # texts that are tokenised in one call


@dataclass(frozen=True)
class Tokens:
    """Documents one after the other: document i is `tokens[starts[i] : starts[i + 1]]`."""

    tokens: np.ndarray
    learned: np.ndarray
    starts: np.ndarray

    def __len__(self) -> int:
        return len(self.starts) - 1


# --- tokenising --------------------------------------------------------------------------------


def tokenised(reading: Reading, tokenizer: Any, notice: Notice) -> Tokens:
    """The documents' tokens, from the cache where these texts were seen with this tokenizer."""
    told = [FORMAT, asdict(reading), vocabulary(tokenizer), opening(tokenizer), reading.content()]
    folder = cache("tokens") / hashlib.sha256(json.dumps(told).encode()).hexdigest()[:24]
    with made_once(folder) as empty:
        if empty is not None:
            for name, array in asdict(_tokenise(reading, tokenizer, notice)).items():
                np.save(empty / f"{name}.npy", array)
    return Tokens(*(np.load(folder / f"{name}.npy", mmap_mode="r") for name in Tokens.__dataclass_fields__))


def opening(tokenizer: Any) -> list[int]:
    """What a tokenizer puts before every text: with Llama's, the mark of a beginning."""
    plain, whole = (list(tokenizer(["a"], add_special_tokens=marked)["input_ids"][0]) for marked in (False, True))
    return whole[: next((at for at in range(len(whole)) if whole[at : at + len(plain)] == plain), 0)]


def begun(first: list[int], ids: list[int]) -> list[int]:
    """The tokens of a text with the mark before it, once."""
    return ids if ids[: len(first)] == first else first + ids


def _tokenise(reading: Reading, tokenizer: Any, notice: Notice) -> Tokens:
    tokens: list[np.ndarray] = []
    learned: list[np.ndarray] = []
    waiting: list[list[Piece]] = []
    refused = 0
    for number, document in enumerate(documents(reading, notice), 1):
        if isinstance(document[0], dict):
            try:
                ids, marks = _of_chat(document, tokenizer)
            except Problem:
                raise
            except Exception as error:  # the template's own words, of a class that it chooses
                if reading.bad == "stop":
                    why = next(iter(str(error).splitlines()), type(error).__name__)
                    raise Problem(
                        f"data={reading.data}, chat {number}: the model's template refuses it ({why}); bad_samples=skip leaves such out"
                    ) from None
                refused += 1
                continue
            tokens.append(np.asarray(ids, np.int32))
            learned.append(np.asarray(marks, bool))
        else:
            waiting.append(document)
            if len(waiting) == TOGETHER:
                _take(waiting, tokenizer, tokens, learned)
    _take(waiting, tokenizer, tokens, learned)
    if refused:
        notice(f"data={reading.data}: {refused:,} chats that the model's template refuses left out")
    if not any(marks.any() for marks in learned):
        raise Problem(f"data={reading.data} has no text to learn from")
    starts = np.concatenate([[0], np.cumsum([len(ids) for ids in tokens])])
    return Tokens(np.concatenate(tokens), np.concatenate(learned), starts)


def _take(waiting: list[list[Piece]], tokenizer: Any, tokens: list[np.ndarray], learned: list[np.ndarray]) -> None:
    pieces = [piece for document in waiting for piece in document]
    ids = iter(tokenizer([text for text, _ in pieces], add_special_tokens=False)["input_ids"] if pieces else [])
    first, end = opening(tokenizer), tokenizer.eos_token_id
    for document in waiting:
        row: list[int] = []
        marks: list[bool] = []
        for _, learn in document:
            part = next(ids) if row else begun(first, next(ids))
            row, marks = row + part, marks + [learn] * len(part)
        if end is not None:
            row, marks = row + [end], marks + [document[-1][1]]
        tokens.append(np.asarray(row, np.int32))
        learned.append(np.asarray(marks, bool))
    waiting.clear()


def _of_chat(messages: list[dict[str, str]], tokenizer: Any) -> tuple[list[int], list[bool]]:
    """A chat by the model's template: what the assistant says is learned, with the mark that ends it."""
    if not getattr(tokenizer, "chat_template", None):
        raise Problem(
            "the data are chats, but the base model's tokenizer has no chat template: take an instruct model, or prompt/completion rows"
        )

    def render(some: list[dict[str, str]], begin: bool) -> list[int]:
        found = tokenizer.apply_chat_template(some, tokenize=True, add_generation_prompt=begin, return_dict=True)
        return list(found["input_ids"])

    ids = render(messages, False)
    marks = [False] * len(ids)
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            before, after = render(messages[:place], True), render(messages[: place + 1], False)
            if ids[: len(after)] != after or after[: len(before)] != before:
                raise Problem(
                    "the chat template writes earlier messages otherwise once later ones follow: give prompt/completion rows instead"
                )
            marks[len(before) : len(after)] = [True] * (len(after) - len(before))
    return ids, marks


# --- rows --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """Rows of one length: tokens, the number of the document each belongs to (0 is padding), and which are learned."""

    tokens: np.ndarray
    document: np.ndarray
    learned: np.ndarray
    split: int
    """Texts longer than a row, which are in several."""
    cut: int
    """Documents longer than a row, of which only the beginning is in it."""
    dropped: int
    """Documents without a token to learn, in what a row holds of them."""

    @property
    def alone(self) -> bool:
        """Whether no row holds more than one document: then attention need not tell them apart."""
        return int(self.document.max(initial=0)) <= 1

    def fill(self) -> float:
        return float((self.document > 0).mean())


def pack(found: Tokens, which: np.ndarray, length: int, together: bool, long: Literal["split", "truncate"], padding: int) -> Rows:
    """Documents in rows of `length` tokens; together, the fullest row that still has room takes the next longest document.
    Only a text that is all learned is split: a later piece of a completion or a chat would lack what it answers."""
    pieces: list[tuple[int, int]] = []
    split = cut = dropped = 0
    for number in which:
        start, end = int(found.starts[number]), int(found.starts[number + 1])
        longer, splits = end - start > length, long == "split" and bool(found.learned[start:end].all())
        split, cut = split + (longer and splits), cut + (longer and not splits)
        stop = end if splits else min(end, start + length)
        if not found.learned[start + 1 : stop].any():
            dropped += 1
            continue
        # A piece of one token has nothing to predict.
        pieces += [(low, min(low + length, stop)) for low in range(start, stop, length) if min(low + length, stop) - low > 1]
    rows = _fit(pieces, length) if together else [[piece] for piece in pieces]
    tokens = np.full((len(rows), length), padding, np.int32)
    document = np.zeros((len(rows), length), np.int32)
    learned = np.zeros((len(rows), length), bool)
    for row, members in enumerate(rows):
        place = 0
        for number, (low, high) in enumerate(members, 1):
            part = slice(place, place + high - low)
            tokens[row, part], document[row, part], learned[row, part] = found.tokens[low:high], number, found.learned[low:high]
            learned[row, place] = False  # nothing comes before a piece's first token
            place += high - low
    return Rows(tokens, document, learned, split, cut, dropped)


def _fit(pieces: list[tuple[int, int]], length: int) -> list[list[tuple[int, int]]]:
    """Best fit, longest first: rows by the room they have left."""
    rows: list[list[tuple[int, int]]] = []
    by_room: dict[int, list[int]] = defaultdict(list)
    rooms: list[int] = []  # those that some row has, sorted
    for low, high in sorted(pieces, key=lambda piece: piece[0] - piece[1]):
        size = high - low
        at = bisect.bisect_left(rooms, size)
        if at < len(rooms):
            room = rooms[at]
            row = by_room[room].pop()
            if not by_room[room]:
                rooms.pop(at)
        else:
            room, row = length, len(rows)
            rows.append([])
        rows[row].append((low, high))
        if room > size:
            if not by_room[room - size]:
                bisect.insort(rooms, room - size)
            by_room[room - size].append(row)
    return rows
