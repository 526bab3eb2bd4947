"""Reads documents (texts, prompts with completions, chats) from files, folders and the hub."""

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
from drivetrain.tasks.lora.base_model import hub_answers
from drivetrain.tasks.lora.cache import cache_folder

PYTHON_TOPICS = "python-topics"

Piece = tuple[str, bool]
"""(a text, whether the model learns it)."""
Notice = Callable[[str], None]


@dataclass(frozen=True)
class TextSource:
    """The origin of documents, and how to read them."""

    data: str
    unit: Literal["file", "paragraphs", "lines"] = "file"
    first: int | None = None
    bad_samples: Literal["stop", "skip"] = "stop"

    @property
    def path(self) -> Path:
        return Path(self.data).expanduser()

    def content_key(self) -> str:
        """Returns a text that changes with the documents' content."""
        if self.data == PYTHON_TOPICS:
            return sys.version
        if self.is_data_set():
            folder = _folder(self.data)
            return _files_key(folder) if folder else str(_data_set(self.data)._fingerprint)  # it includes revision, config and split
        with open(_existing(self.path), "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def is_data_set(self) -> bool:
        """Whether it is a data set, of the hub or in a folder, and not a file."""
        if self.data == PYTHON_TOPICS or self.path.is_file():
            return False
        looks_like_a_file = self.path.is_absolute() or self.path.suffix in (".txt", ".json", ".jsonl") or self.data.startswith((".", "~"))
        return _folder(self.data) is not None or not looks_like_a_file


def documents(source: TextSource, notice: Notice) -> Iterator[list[Piece] | list[dict[str, str]]]:
    """Yields each document: pieces of text, or the messages of a chat."""
    path = source.path
    read = functools.partial(_documents_of_rows, bad_samples=source.bad_samples, notice=notice)
    if source.data == PYTHON_TOPICS:
        all_documents: Iterator[Any] = _python_topics()
    elif source.is_data_set():
        all_documents = read(enumerate(_data_set(source.data), 1), read_row, f"data={source.data}", "row")
    elif path.suffix == ".json" and (rows := _rows_of_json(_existing(path))) is not None:
        all_documents = read(enumerate(rows, 1), read_row, str(path), "row")
    elif path.suffix in (".json", ".jsonl"):
        all_documents = read(_lines(_existing(path)), lambda line: read_row(json.loads(line)), str(path), "line")
    else:
        all_documents = _documents_of_text(_existing(path), source.unit)
    for number, document in enumerate(all_documents):
        if source.first is not None and number >= source.first:
            return
        yield document


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise Problem(f"data={path}: there is no such file")
    return path


def _python_topics() -> Iterator[list[Piece]]:
    """Yields the chapters of Python's language reference, which comes with Python."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield [(topics[name], True)]


def _documents_of_text(path: Path, unit: str) -> Iterator[list[Piece]]:
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


def _rows_of_json(path: Path) -> list[Any] | None:
    """Returns the rows of a JSON list; None where the file has one row a line."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except ValueError:
        return None
    return rows if isinstance(rows, list) else [rows]


def _documents_of_rows(
    rows: Iterable[tuple[int, Any]], read: Callable[[Any], Any], origin: str, unit: str, bad_samples: str, notice: Notice
) -> Iterator[Any]:
    """Yields the documents of numbered rows. Skips empty rows; a malformed row raises Problem or is skipped."""
    skipped: list[int] = []
    for number, row in rows:
        try:
            document = read(row)
        except (ValueError, TypeError) as error:  # JSON's own error is a ValueError
            if bad_samples == "stop":
                raise Problem(f"{origin}, {unit} {number}: {error} (bad_samples=skip leaves such {unit}s out)") from None
            skipped.append(number)
            continue
        if isinstance(document[0], dict) or any(text.strip() for text, _ in document):
            yield document
    if skipped:
        numbers = ", ".join(map(str, skipped[:5])) + (" ..." if len(skipped) > 5 else "")
        notice(f"{origin}: {len(skipped):,} malformed {unit}{'s' * (len(skipped) > 1)} left out ({unit} {numbers})")


def read_row(row: Any) -> Any:
    """Reads a row of JSON or of a data set; raises a ValueError that describes the error."""
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
    """Returns the training part of a data set: a folder or a name on the hub, with one of its configurations after a colon."""
    location, _, config = name.partition(":")
    folder, cache_dir = _folder(name), None
    try:
        import datasets
    except ImportError:
        raise Problem(f"data={name} is neither a file nor {PYTHON_TOPICS}; for a data set: pip install 'drivetrain[lora]'") from None
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    if folder is not None:
        location = str(folder)
        cache_dir = str(cache_folder("sets") / _files_key(folder))  # the own cache of `datasets` misses some changes of files
    elif not hub_answers():
        datasets.config.HF_HUB_OFFLINE = True  # otherwise its client retries for a long time
    try:
        return datasets.load_dataset(location, config or None, split="train", cache_dir=cache_dir)
    except Exception as error:  # datasets, the hub's client and file readers raise a dozen classes
        raise Problem(f"data={name}{_explain(location, config, error)}") from None


def _folder(name: str) -> Path | None:
    path = Path(name.partition(":")[0]).expanduser()
    return path.absolute() if path.is_dir() else None


def _files_key(folder: Path) -> str:
    """Returns a hash of the names, sizes and times of a folder's files."""
    files = [[str(f.relative_to(folder)), f.stat().st_size, f.stat().st_mtime_ns] for f in sorted(folder.rglob("*")) if f.is_file()]
    return hashlib.sha256(json.dumps([str(folder), files]).encode()).hexdigest()[:24]


def _explain(location: str, config: str, error: Exception) -> str:
    """Returns why a data set could not be read, and how to get it."""
    from datasets.exceptions import DatasetNotFoundError

    text = " ".join(str(error).splitlines()[:2]) or type(error).__name__
    if isinstance(error, DatasetNotFoundError) and "gated" in text:
        return " is gated: accept its terms on its hub page and log in (hf auth login, or HF_TOKEN), or give a folder with its files"
    if isinstance(error, DatasetNotFoundError):
        return ": there is no such file or folder here, and no such data set on the hub"
    if isinstance(error, ConnectionError):
        return (
            f" is no file or folder here, could not be fetched from the hub (no network?), and is not in its cache.\nWhere there is a"
            f" network: hf download {location} --repo-type dataset --local-dir DIR; then bring DIR here and give"
            f" data=DIR{':' * bool(config)}{config}"
        )
    return f": {text}"
