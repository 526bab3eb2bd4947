"""Texts, prompts with completions, and chats: from files, folders and the hub."""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from drivetrain.outcomes import Problem
from drivetrain.tasks.lora.base import cache, hub_answers

TOPICS = "python-topics"

Piece = tuple[str, bool]  # a text, and whether it is to be learned
Notice = Callable[[str], None]


@dataclass(frozen=True)
class Reading:
    """How texts are read."""

    data: str
    unit: Literal["file", "paragraphs", "lines"] = "file"
    first: int | None = None
    bad: Literal["stop", "skip"] = "stop"

    @property
    def path(self) -> Path:
        return Path(self.data).expanduser()

    def content(self) -> str:
        """Tells these texts from others of the same name."""
        if self.data == TOPICS:
            return sys.version
        if self._on_hub():
            folder = _folder(self.data)
            return _listed(folder) if folder else str(_data_set(self.data)._fingerprint)  # of its revision, config and split
        with open(_existing(self.path), "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def _on_hub(self) -> bool:
        """Whether it is a data set: of the hub, or in a folder."""
        if self.data == TOPICS or self.path.is_file():
            return False
        looks_like_a_file = self.path.is_absolute() or self.path.suffix in (".txt", ".json", ".jsonl") or self.data.startswith((".", "~"))
        return _folder(self.data) is not None or not looks_like_a_file


def documents(reading: Reading, notice: Notice) -> Iterator[list[Piece] | list[dict[str, str]]]:
    """Each document: pieces of text, or the messages of a chat."""
    path = reading.path
    read = functools.partial(_of_rows, bad=reading.bad, notice=notice)
    if reading.data == TOPICS:
        found: Iterator[Any] = _topics()
    elif reading._on_hub():
        found = read(enumerate(_data_set(reading.data), 1), read_row, f"data={reading.data}", "row")
    elif path.suffix == ".json" and (rows := _of_json(_existing(path))) is not None:
        found = read(enumerate(rows, 1), read_row, str(path), "row")
    elif path.suffix in (".json", ".jsonl"):
        found = read(_lines(_existing(path)), lambda line: read_row(json.loads(line)), str(path), "line")
    else:
        found = _of_text(_existing(path), reading.unit)
    for number, document in enumerate(found):
        if reading.first is not None and number >= reading.first:
            return
        yield document


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise Problem(f"data={path}: there is no such file")
    return path


def _topics() -> Iterator[list[Piece]]:
    """Python's language reference, which comes with Python."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield [(topics[name], True)]


def _of_text(path: Path, unit: str) -> Iterator[list[Piece]]:
    data = path.read_bytes()
    if b"\0" in data[:4096]:
        raise Problem(f"data={path} is no text: give a .txt, .json or .jsonl file, or a folder that datasets reads (parquet, csv)")
    text = data.decode("utf-8", errors="replace")
    parts = [text] if unit == "file" else text.split("\n\n") if unit == "paragraphs" else text.splitlines()
    for part in parts:
        if part.strip():
            yield [(part.strip() if unit != "file" else part, True)]


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, line


def _of_json(path: Path) -> list[Any] | None:
    """The rows of one list; None where the file has a row a line."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except ValueError:
        return None
    return rows if isinstance(rows, list) else [rows]


def _of_rows(rows: Iterable[tuple[int, Any]], read: Callable[[Any], Any], where: str, word: str, bad: str, notice: Notice) -> Iterator[Any]:
    """Documents of numbered rows, of which those that are none stop all or are left out, and empty ones are nothing."""
    skipped: list[int] = []
    for number, row in rows:
        try:
            document = read(row)
        except (ValueError, TypeError) as error:  # JSON's own error is a ValueError
            if bad == "stop":
                raise Problem(f"{where}, {word} {number}: {error} (bad_samples=skip leaves such {word}s out)") from None
            skipped.append(number)
            continue
        if isinstance(document[0], dict) or any(text.strip() for text, _ in document):
            yield document
    if skipped:
        which = ", ".join(map(str, skipped[:5])) + (" ..." if len(skipped) > 5 else "")
        notice(f"{where}: {len(skipped):,} malformed {word}{'s' * (len(skipped) > 1)} left out ({word} {which})")


def read_row(row: Any) -> Any:
    """A row of JSON or of a data set; ValueError says what is wrong with it."""
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


# --- data sets ---------------------------------------------------------------------------------


@functools.cache
def _data_set(name: str) -> Any:
    """The training part of a data set: a folder or a name on the hub, and after a colon one of its configurations."""
    place, _, config = name.partition(":")
    folder, kept = _folder(name), None
    try:
        import datasets
    except ImportError:
        raise Problem(f"data={name} is neither a file nor {TOPICS}; for a data set: pip install 'drivetrain[lora]'") from None
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    if folder is not None:
        place, kept = str(folder), str(cache("sets") / _listed(folder))  # datasets itself would miss some changes of files
    elif not hub_answers():
        datasets.config.HF_HUB_OFFLINE = True  # its client would try again and again
    try:
        return datasets.load_dataset(place, config or None, split="train", cache_dir=kept)
    except Exception as error:  # of a dozen classes: what datasets, the hub's client and readers of files raise
        raise Problem(f"data={name}{_why(place, config, error)}") from None


def _folder(name: str) -> Path | None:
    path = Path(name.partition(":")[0]).expanduser()
    return path.absolute() if path.is_dir() else None


def _listed(folder: Path) -> str:
    """Tells a folder's files from others'."""
    files = [[str(f.relative_to(folder)), f.stat().st_size, f.stat().st_mtime_ns] for f in sorted(folder.rglob("*")) if f.is_file()]
    return hashlib.sha256(json.dumps([str(folder), files]).encode()).hexdigest()[:24]


def _why(place: str, config: str, error: Exception) -> str:
    """What could not be had, and how to bring it."""
    from datasets.exceptions import DatasetNotFoundError

    text = " ".join(str(error).splitlines()[:2]) or type(error).__name__
    if isinstance(error, DatasetNotFoundError) and "gated" in text:
        return " is gated: accept its terms on its hub page and log in (hf auth login, or HF_TOKEN), or give a folder with its files"
    if isinstance(error, DatasetNotFoundError):
        return ": there is no such file or folder here, and no such data set on the hub"
    if isinstance(error, ConnectionError):
        return (
            f" is no file or folder here, could not be fetched from the hub (no network?), and is not in its cache.\nWhere there is a"
            f" network: hf download {place} --repo-type dataset --local-dir DIR; then bring DIR here and give"
            f" data=DIR{':' * bool(config)}{config}"
        )
    return f": {text}"
