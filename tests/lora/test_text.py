"""Reading texts, tokenising them once, and packing them into rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.outcomes import Problem
from drivetrain.tasks.lora import text
from drivetrain.tasks.lora.base import Bytes
from drivetrain.tasks.lora.text import Reading, Tokens, documents, pack, read_row, tokenised
from tests.lora.models import write_jsonl, write_model

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=60)


def some(lengths: list[int]) -> Tokens:
    """Documents whose tokens are all different."""
    starts = np.concatenate([[0], np.cumsum(lengths)])
    return Tokens(np.arange(starts[-1], dtype=np.int32), np.ones(starts[-1], bool), starts)


@settings(max_examples=200, deadline=None)
@given(LENGTHS, st.integers(2, 40), st.booleans())
def test_packing_keeps_every_token_once_and_in_order(lengths: list[int], length: int, together: bool) -> None:
    found = some(lengths)
    rows = pack(found, np.arange(len(lengths)), length, together, "split", padding=-1)
    kept = rows.tokens[rows.document > 0]
    single = {int(found.starts[i]) + k for i, n in enumerate(lengths) for k in range(0, n, length) if min(length, n - k) == 1}
    assert sorted(kept.tolist()) == [t for t in range(int(found.starts[-1])) if t not in single]
    assert (rows.tokens[rows.document == 0] == -1).all()
    for row, document in zip(rows.tokens, rows.document, strict=True):
        inside = document > 0
        assert not inside[int(inside.sum()) :].any(), "padding comes last"
        follows = (document[1:] == document[:-1]) & inside[1:]
        assert (np.diff(row)[follows] == 1).all(), "a document's tokens stand side by side"
    assert rows.split == sum(n > length for n in lengths)
    if not together:
        assert rows.alone or not len(rows.tokens)


@settings(max_examples=100, deadline=None)
@given(LENGTHS)
def test_no_two_rows_could_have_been_one(lengths: list[int]) -> None:
    rows = pack(some(lengths), np.arange(len(lengths)), 64, True, "split", 0)
    filled = sorted((rows.document > 0).sum(1).tolist())
    assert len(filled) < 2 or filled[0] + filled[1] > 64


def test_the_first_token_of_a_piece_is_not_learned() -> None:
    rows = pack(some([5, 3]), np.arange(2), 4, True, "split", 0)
    assert rows.learned.sum() == (4 - 1) + (3 - 1)  # the fifth token of the first stands alone, and is left out
    rows = pack(some([5, 3]), np.arange(2), 4, True, "truncate", 0)
    assert rows.learned.sum() == (4 - 1) + (3 - 1) and rows.split == 1


def test_texts_are_split_as_asked(tmp_path: Path) -> None:
    path = tmp_path / "a text.txt"
    path.write_text("one\ntwo\n\nthree\n\n\n")

    def read(unit: Any, **more: Any) -> list[Any]:
        return [d[0][0] for d in documents(Reading(str(path), unit, **more), print)]  # type: ignore[index]

    assert read("file") == ["one\ntwo\n\nthree\n\n\n"]
    assert read("lines") == ["one", "two", "three"]
    assert read("paragraphs") == ["one\ntwo", "three"]
    assert read("lines", first=2) == ["one", "two"]


def test_a_malformed_line_is_named_or_left_out(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "good"}\n\n{"text": \n{"txt": "bad"}\n{"text": 3}\n{"prompt": "a", "completion": "b"}\n')
    with pytest.raises(Problem, match=r"line 3: .*bad_samples=skip"):
        list(documents(Reading(str(path)), print))
    told: list[str] = []
    found = list(documents(Reading(str(path), bad="skip"), told.append))
    assert found == [[("good", True)], [("a", False), ("b", True)]]
    assert told == [f"{path}: 3 malformed lines left out (line 3, 4, 5)"]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ([], "a list instead of an object"),
        ({"txt": "x"}, "it has txt, but neither text"),
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": "user"}]}, "needs a role and a content"),
        ({"prompt": 1, "completion": "x"}, "must be text"),
    ],
)
def test_rows_that_are_none(row: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        read_row(row)


def test_only_what_the_assistant_says_is_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoTokenizer

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tokenizer = AutoTokenizer.from_pretrained(write_model(tmp_path / "model"))
    chat = [
        {"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat on"},
        {"role": "user", "content": "a mat"}, {"role": "assistant", "content": "and saw"},
    ]  # fmt: skip
    path = write_jsonl(tmp_path / "chats.jsonl", [{"messages": chat}])
    found = tokenised(Reading(str(path)), tokenizer, print)
    assert tokenizer.decode(found.tokens[found.learned]) == "sat on <|end|> and saw <|end|>"
    assert tokenizer.decode(found.tokens).startswith("<|user|> the cat <|end|>")
    tokenizer.chat_template = None
    with pytest.raises(Problem, match="no chat template"):
        tokenised(Reading(str(path)), tokenizer, print)


def test_rows_of_a_data_set_and_chats_that_do_not_fit_are_named_or_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Path("set").mkdir()
    write_jsonl(Path("set/train.jsonl"), [{"text": "the cat"}, {"text": None}, {"text": "a mat"}])
    with pytest.raises(Problem, match="data=set, row 2: text, prompt and completion must be text"):
        list(documents(Reading("set", "file", None, "stop"), print))
    said: list[str] = []
    assert len(list(documents(Reading("set", "file", None, "skip"), said.append))) == 2
    assert "1 rows" in said[0]

    class Strict:
        chat_template, eos_token_id = "strict", 1

        def apply_chat_template(self, some: list[dict[str, str]], **options: Any) -> Any:
            if some and some[0]["role"] != "user":
                raise RuntimeError("a chat begins with the user")
            return {"input_ids": [2, 3][: len(some)]}

        def __call__(self, texts: list[str], **options: Any) -> Any:
            return {"input_ids": [[5] for _ in texts]}

    good, odd = [{"role": r, "content": "x"} for r in ("user", "assistant")], [{"role": "assistant", "content": "x"}]
    write_jsonl(Path("chats.jsonl"), [{"messages": good}, {"messages": odd}])
    with pytest.raises(Problem, match=r"chat 2: the model's template refuses it .a chat begins with the user"):
        text._tokenise(Reading("chats.jsonl", "file", None, "stop"), Strict(), print)
    assert len(text._tokenise(Reading("chats.jsonl", "file", None, "skip"), Strict(), print)) == 1


def test_texts_are_tokenised_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "text.txt"
    path.write_text("abc\nde\n")
    calls = []

    class Counting(Bytes):
        def __call__(self, texts: Any, **options: Any) -> Any:
            calls.append(texts)
            return super().__call__(texts, **options)

    first = tokenised(Reading(str(path), "lines"), Counting(), print)
    assert first.tokens.tolist() == [97, 98, 99, 256, 100, 101, 256] and first.starts.tolist() == [0, 4, 7]
    again = tokenised(Reading(str(path), "lines"), Counting(), print)
    assert isinstance(again.tokens, np.memmap) and np.array_equal(first.tokens, again.tokens) and len(calls) == 1
    path.write_text("abc\ndf\n")
    assert tokenised(Reading(str(path), "lines"), Counting(), print).tokens[5] == 102 and len(calls) == 2


def test_nothing_to_learn_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "empty.txt").write_text("\n \n")
    with pytest.raises(Problem, match="no text to learn from"):
        tokenised(Reading(str(tmp_path / "empty.txt")), Bytes(), print)
    with pytest.raises(Problem, match="there is no such file"):
        tokenised(Reading(str(tmp_path / "missing.jsonl")), Bytes(), print)
    assert not list((tmp_path / "cache" / "drivetrain" / "tokens").iterdir()), "nothing half made is left behind"
