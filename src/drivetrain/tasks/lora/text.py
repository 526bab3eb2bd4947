"""Tokenises documents (with a cache) and packs them into rows with little padding."""

from __future__ import annotations

import bisect
import hashlib
import json
from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from drivetrain.outcomes import Problem
from drivetrain.tasks.lora.base_model import tokenizer_hash
from drivetrain.tasks.lora.cache import cache_folder, create_once
from drivetrain.tasks.lora.documents import Notice, Piece, TextSource, documents

CACHE_FORMAT = 2
TEXTS_PER_CALL = 1000
"""Texts that are tokenised in one call."""


@dataclass(frozen=True)
class Tokens:
    """The tokens of all documents in one array: document i is `tokens[starts[i] : starts[i + 1]]`."""

    tokens: np.ndarray
    learned: np.ndarray
    """Whether the model learns each token."""
    starts: np.ndarray

    def __len__(self) -> int:
        return len(self.starts) - 1


# --- tokenising --------------------------------------------------------------------------------


def tokenise(source: TextSource, tokenizer: Any, notice: Notice) -> Tokens:
    """Returns the documents' tokens. Takes them from the cache if the same texts and tokenizer were used before."""
    key = [CACHE_FORMAT, asdict(source), tokenizer_hash(tokenizer), prefix_tokens(tokenizer), source.content_key()]
    folder = cache_folder("tokens") / hashlib.sha256(json.dumps(key).encode()).hexdigest()[:24]
    with create_once(folder) as empty:
        if empty is not None:
            for name, array in asdict(_tokenise_all(source, tokenizer, notice)).items():
                np.save(empty / f"{name}.npy", array)
    return Tokens(*(np.load(folder / f"{name}.npy", mmap_mode="r") for name in Tokens.__dataclass_fields__))


def prefix_tokens(tokenizer: Any) -> list[int]:
    """Returns the tokens that a tokenizer puts before every text, such as Llama's beginning-of-text token."""
    plain, with_special = (list(tokenizer(["a"], add_special_tokens=special)["input_ids"][0]) for special in (False, True))
    return with_special[: next((i for i in range(len(with_special)) if with_special[i : i + len(plain)] == plain), 0)]


def with_prefix(prefix: list[int], ids: list[int]) -> list[int]:
    """Returns the tokens of a text with the prefix before them, unless they already begin with it."""
    return ids if ids[: len(prefix)] == prefix else prefix + ids


def _tokenise_all(source: TextSource, tokenizer: Any, notice: Notice) -> Tokens:
    tokens: list[np.ndarray] = []
    learned: list[np.ndarray] = []
    pending: list[list[Piece]] = []
    num_refused = 0
    for number, document in enumerate(documents(source, notice), 1):
        if isinstance(document[0], dict):
            try:
                ids, is_learned = _tokenise_chat(document, tokenizer)
            except Problem:
                raise
            except Exception as error:  # templates raise errors of any class
                if source.bad_samples == "stop":
                    reason = next(iter(str(error).splitlines()), type(error).__name__)
                    raise Problem(
                        f"data={source.data}, chat {number}: the model's template refuses it ({reason}); bad_samples=skip leaves such out"
                    ) from None
                num_refused += 1
                continue
            tokens.append(np.asarray(ids, np.int32))
            learned.append(np.asarray(is_learned, bool))
        else:
            pending.append(document)
            if len(pending) == TEXTS_PER_CALL:
                _tokenise_texts(pending, tokenizer, tokens, learned)
    _tokenise_texts(pending, tokenizer, tokens, learned)
    if num_refused:
        notice(f"data={source.data}: {num_refused:,} chats that the model's template refuses left out")
    if not any(document.any() for document in learned):
        raise Problem(f"data={source.data} has no text to learn from")
    starts = np.concatenate([[0], np.cumsum([len(ids) for ids in tokens])])
    return Tokens(np.concatenate(tokens), np.concatenate(learned), starts)


def _tokenise_texts(pending: list[list[Piece]], tokenizer: Any, tokens: list[np.ndarray], learned: list[np.ndarray]) -> None:
    """Tokenises the pending documents in one call and appends their tokens."""
    pieces = [piece for document in pending for piece in document]
    ids = iter(tokenizer([text for text, _ in pieces], add_special_tokens=False)["input_ids"] if pieces else [])
    prefix, end = prefix_tokens(tokenizer), tokenizer.eos_token_id
    for document in pending:
        row: list[int] = []
        is_learned: list[bool] = []
        for _, learn in document:
            part = next(ids) if row else with_prefix(prefix, next(ids))
            row, is_learned = row + part, is_learned + [learn] * len(part)
        if end is not None:
            row, is_learned = row + [end], is_learned + [document[-1][1]]
        tokens.append(np.asarray(row, np.int32))
        learned.append(np.asarray(is_learned, bool))
    pending.clear()


def _tokenise_chat(messages: list[dict[str, str]], tokenizer: Any) -> tuple[list[int], list[bool]]:
    """Tokenises a chat by the model's template. The assistant's messages are learned, with the token that ends them."""
    if not getattr(tokenizer, "chat_template", None):
        raise Problem(
            "the data are chats, but the base model's tokenizer has no chat template: take an instruct model, or prompt/completion rows"
        )

    def render(part: list[dict[str, str]], with_generation_prompt: bool) -> list[int]:
        output = tokenizer.apply_chat_template(part, tokenize=True, add_generation_prompt=with_generation_prompt, return_dict=True)
        return list(output["input_ids"])

    ids = render(messages, False)
    is_learned = [False] * len(ids)
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            before, after = render(messages[:index], True), render(messages[: index + 1], False)
            if ids[: len(after)] != after or after[: len(before)] != before:
                raise Problem(
                    "the chat template writes earlier messages otherwise once later ones follow: give prompt/completion rows instead"
                )
            is_learned[len(before) : len(after)] = [True] * (len(after) - len(before))
    return ids, is_learned


# --- rows --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PackedRows:
    """Rows of equal length: tokens, each token's document number in the row (0: padding), and whether it is learned."""

    tokens: np.ndarray
    document: np.ndarray
    learned: np.ndarray
    num_split: int
    """Texts longer than a row, which were split into several."""
    num_truncated: int
    """Documents longer than a row, of which only the beginning is used."""
    num_dropped: int
    """Documents left out because they have no token to learn within a row."""

    @property
    def has_single_documents(self) -> bool:
        """Whether no row holds more than one document, so that attention needs no mask."""
        return int(self.document.max(initial=0)) <= 1

    def fill_ratio(self) -> float:
        """Returns the share of tokens that are not padding."""
        return float((self.document > 0).mean())


def pack(
    documents: Tokens, selected: np.ndarray, length: int, share_rows: bool, long: Literal["split", "truncate"], padding: int
) -> PackedRows:
    """Packs documents into rows of `length` tokens; with `share_rows`, several documents share a row.

    Only a text that is learned entirely is split: a later piece of a completion or a chat would lack its prompt.
    """
    pieces: list[tuple[int, int]] = []
    num_split = num_truncated = num_dropped = 0
    for number in selected:
        start, end = int(documents.starts[number]), int(documents.starts[number + 1])
        is_longer, can_split = end - start > length, long == "split" and bool(documents.learned[start:end].all())
        num_split, num_truncated = num_split + (is_longer and can_split), num_truncated + (is_longer and not can_split)
        stop = end if can_split else min(end, start + length)
        if not documents.learned[start + 1 : stop].any():
            num_dropped += 1
            continue
        # A piece of one token has nothing to predict.
        pieces += [(low, min(low + length, stop)) for low in range(start, stop, length) if min(low + length, stop) - low > 1]
    rows = _best_fit(pieces, length) if share_rows else [[piece] for piece in pieces]
    tokens = np.full((len(rows), length), padding, np.int32)
    document = np.zeros((len(rows), length), np.int32)
    learned = np.zeros((len(rows), length), bool)
    for row, members in enumerate(rows):
        offset = 0
        for number, (low, high) in enumerate(members, 1):
            part = slice(offset, offset + high - low)
            tokens[row, part], document[row, part], learned[row, part] = documents.tokens[low:high], number, documents.learned[low:high]
            learned[row, offset] = False  # no token before it predicts a piece's first token
            offset += high - low
    return PackedRows(tokens, document, learned, num_split, num_truncated, num_dropped)


def _best_fit(pieces: list[tuple[int, int]], length: int) -> list[list[tuple[int, int]]]:
    """Puts each piece, longest first, into the fullest row that still has space for it (best fit)."""
    rows: list[list[tuple[int, int]]] = []
    rows_by_space: dict[int, list[int]] = defaultdict(list)
    spaces: list[int] = []  # the numbers of free tokens that any row has, sorted, each value once
    for low, high in sorted(pieces, key=lambda piece: piece[0] - piece[1]):
        size = high - low
        index = bisect.bisect_left(spaces, size)
        if index < len(spaces):
            space = spaces[index]
            row = rows_by_space[space].pop()
            if not rows_by_space[space]:
                spaces.pop(index)
        else:
            space, row = length, len(rows)
            rows.append([])
        rows[row].append((low, high))
        if space > size:
            if not rows_by_space[space - size]:
                bisect.insort(spaces, space - size)
            rows_by_space[space - size].append(row)
    return rows
