"""Texts as tokens: read, tokenised once and kept, and packed into rows without padding."""

from __future__ import annotations

import bisect
import hashlib
import json
import os
import shutil
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from drivetrain.outcomes import Problem
from drivetrain.tasks.lora.base import cache, hub_answers, vocabulary

FORMAT = 1
TOGETHER = 1000  # texts that are tokenised in one call
TOPICS = "python-topics"

Piece = tuple[str, bool]  # a text, and whether it is to be learned
Notice = Callable[[str], None]


@dataclass(frozen=True)
class Reading:
    """How a file of texts is read."""

    data: str
    unit: Literal["file", "paragraphs", "lines"] = "file"
    first: int | None = None
    bad: Literal["stop", "skip"] = "stop"


@dataclass(frozen=True)
class Tokens:
    """Documents one after the other: document i is `tokens[starts[i] : starts[i + 1]]`."""

    tokens: np.ndarray
    learned: np.ndarray
    starts: np.ndarray

    def __len__(self) -> int:
        return len(self.starts) - 1


# --- reading -----------------------------------------------------------------------------------


def documents(reading: Reading, notice: Notice) -> Iterator[list[Piece] | list[dict[str, str]]]:
    """Each document: pieces of text, or the messages of a chat."""
    path = Path(reading.data).expanduser()
    if reading.data == TOPICS:
        found: Iterator[Any] = _topics()
    elif path.suffix == ".jsonl":
        found = _of_lines(_existing(path), reading.bad, notice)
    elif path.is_file():
        found = _of_text(path.read_text(encoding="utf-8", errors="replace"), reading.unit)
    elif path.is_absolute() or path.suffix or reading.data.startswith("."):
        raise Problem(f"data={reading.data}: there is no such file")
    else:
        found = _of_hub(reading.data, reading.bad, notice)
    for number, document in enumerate(found):
        if reading.first is not None and number >= reading.first:
            return
        yield document


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise Problem(f"data={path}: there is no such file")
    return path


def _of_text(text: str, unit: str) -> Iterator[list[Piece]]:
    parts = [text] if unit == "file" else text.split("\n\n") if unit == "paragraphs" else text.splitlines()
    for part in parts:
        if part.strip():
            yield [(part.strip() if unit != "file" else part, True)]


def _topics() -> Iterator[list[Piece]]:
    """Python's language reference, which comes with Python."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield [(topics[name], True)]


def _of_lines(path: Path, bad: str, notice: Notice) -> Iterator[Any]:
    skipped: list[int] = []
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield read_row(json.loads(line))
            except (ValueError, TypeError) as error:  # JSON's own error is a ValueError
                if bad == "stop":
                    raise Problem(f"{path}, line {number}: {error} (bad_samples=skip leaves such lines out)") from None
                skipped.append(number)
    if skipped:
        which = ", ".join(map(str, skipped[:5])) + (" ..." if len(skipped) > 5 else "")
        notice(f"{path}: {len(skipped)} malformed line{'s' * (len(skipped) > 1)} left out (line {which})")


def read_row(row: Any) -> Any:
    """A row of JSONL or of a hub's data set; ValueError says what is wrong with it."""
    if not isinstance(row, dict):
        raise ValueError(f"a {type(row).__name__} instead of an object with text, prompt and completion, or messages")
    if "messages" in row:
        messages = row["messages"]
        if not isinstance(messages, list) or not messages:
            raise ValueError("messages must be a list with at least one message")
        for message in messages:
            if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
                raise ValueError("each message needs a role and a content, both text")
        return [{"role": m["role"], "content": m["content"]} for m in messages]
    if "prompt" in row and "completion" in row:
        parts = [(row["prompt"], False), (row["completion"], True)]
    elif "text" in row:
        parts = [(row["text"], True)]
    else:
        raise ValueError(f"it has {', '.join(row) or 'nothing'}, but neither text, nor prompt and completion, nor messages")
    if not all(isinstance(text, str) for text, _ in parts):
        raise ValueError("text, prompt and completion must be text")
    return parts


def _of_hub(name: str, bad: str, notice: Notice) -> Iterator[Any]:
    repository, _, config = name.partition(":")
    try:
        from datasets import DownloadConfig, load_dataset
    except ImportError:
        raise Problem(f"data={name} is neither a file nor {TOPICS}; for a data set of the hub: pip install 'drivetrain[lora]'") from None
    try:
        rows = load_dataset(repository, config or None, split="train", download_config=DownloadConfig(local_files_only=not hub_answers()))
    except Exception as error:
        raise Problem(
            f"data={name}: neither a file here nor a data set that could be fetched from the hub"
            f" ({next(iter(str(error).splitlines()), type(error).__name__)}).\nWhere there is a network: hf download {repository}"
            f" --repo-type dataset --local-dir DIR; then give a .txt or .jsonl file (text, prompt/completion or messages)"
        ) from None
    skipped = 0
    for number, row in enumerate(rows, 1):
        try:
            read = read_row(row)
        except ValueError as error:
            if bad == "stop":
                raise Problem(f"data={name}, row {number}: {error} (bad_samples=skip leaves such rows out)") from None
            skipped += 1
            continue
        if isinstance(read[0], dict) or any(text.strip() for text, _ in read):
            yield read
    if skipped:
        notice(f"data={name}: {skipped:,} rows without text, prompt and completion, or messages left out")


# --- tokenising --------------------------------------------------------------------------------


def tokenised(reading: Reading, tokenizer: Any, notice: Notice) -> Tokens:
    """The documents' tokens, from the cache where these texts were seen with this tokenizer."""
    key = hashlib.sha256(json.dumps([FORMAT, asdict(reading), vocabulary(tokenizer), _content(reading)]).encode()).hexdigest()[:24]
    folder = cache("tokens") / key
    if not folder.is_dir():
        hidden = folder.with_name(f".{key}.{os.getpid()}")
        hidden.mkdir()
        try:
            for name, array in asdict(_tokenise(reading, tokenizer, notice)).items():
                np.save(hidden / f"{name}.npy", array)
            hidden.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster
                raise
        finally:
            shutil.rmtree(hidden, ignore_errors=True)
    return Tokens(*(np.load(folder / f"{name}.npy", mmap_mode="r") for name in Tokens.__dataclass_fields__))


def _content(reading: Reading) -> str:
    path = Path(reading.data).expanduser()
    if reading.data == TOPICS:
        return sys.version
    if path.is_dir():
        return json.dumps([[str(f.relative_to(path)), f.stat().st_size, f.stat().st_mtime_ns] for f in sorted(path.rglob("*"))])
    if not path.is_file():
        return ""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
    end = tokenizer.eos_token_id
    first = getattr(tokenizer, "bos_token_id", None) if getattr(tokenizer, "add_bos_token", False) else None
    for document in waiting:
        row, marks = ([first], [False]) if first is not None else ([], [])
        for _, learn in document:
            part = next(ids)
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
    """Documents longer than a row."""

    @property
    def alone(self) -> bool:
        """Whether no row holds more than one document: then attention need not tell them apart."""
        return int(self.document.max(initial=0)) <= 1

    def fill(self) -> float:
        return float((self.document > 0).mean())


def pack(found: Tokens, which: np.ndarray, length: int, together: bool, long: Literal["split", "truncate"], padding: int) -> Rows:
    """Documents in rows of `length` tokens; together, the fullest row that still has room takes the next longest document."""
    pieces: list[tuple[int, int]] = []
    split = 0
    for number in which:
        start, end = int(found.starts[number]), int(found.starts[number + 1])
        split += end - start > length
        stop = end if long == "split" else min(end, start + length)
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
    return Rows(tokens, document, learned, split)


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
