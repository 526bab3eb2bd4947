"""Texts are read, tokenised once, and packed into rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.outcomes import Problem
from drivetrain.tasks.lora import text
from drivetrain.tasks.lora.base_model import ByteTokenizer
from drivetrain.tasks.lora.documents import TextSource, _data_set, documents, read_row
from drivetrain.tasks.lora.text import Tokens, pack, prefix_tokens, tokenise, with_prefix
from tests.lora.models import TEMPLATE, write_jsonl, write_model
from tests.waiting import Stopwatch

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=60)


def documents_of(lengths: list[int]) -> Tokens:
    """Returns documents of these lengths, whose tokens are all different."""
    starts = np.concatenate([[0], np.cumsum(lengths)])
    return Tokens(np.arange(starts[-1], dtype=np.int32), np.ones(starts[-1], bool), starts)


@settings(max_examples=200, deadline=None)
@given(LENGTHS, st.integers(2, 40), st.booleans())
def test_packing_keeps_every_token_once_and_in_order(lengths: list[int], length: int, together: bool) -> None:
    all_documents = documents_of(lengths)
    rows = pack(all_documents, np.arange(len(lengths)), length, together, "split", padding=-1)
    packed_tokens = rows.tokens[rows.document > 0]
    left_out = {int(all_documents.starts[i]) + k for i, n in enumerate(lengths) for k in range(0, n, length) if min(length, n - k) == 1}
    assert sorted(packed_tokens.tolist()) == [t for t in range(int(all_documents.starts[-1])) if t not in left_out]
    assert (rows.tokens[rows.document == 0] == -1).all()
    for row, document in zip(rows.tokens, rows.document, strict=True):
        inside = document > 0
        assert not inside[int(inside.sum()) :].any(), "padding comes last"
        follows = (document[1:] == document[:-1]) & inside[1:]
        assert (np.diff(row)[follows] == 1).all(), "the tokens of a document stay in order"
    assert rows.num_split == sum(n > length for n in lengths)
    if not together:
        assert rows.has_single_documents or not len(rows.tokens)


@settings(max_examples=100, deadline=None)
@given(LENGTHS)
def test_no_two_rows_could_have_been_one(lengths: list[int]) -> None:
    rows = pack(documents_of(lengths), np.arange(len(lengths)), 64, True, "split", 0)
    filled = sorted((rows.document > 0).sum(1).tolist())
    assert len(filled) < 2 or filled[0] + filled[1] > 64


def test_the_first_token_of_a_piece_is_not_learned() -> None:
    rows = pack(documents_of([5, 3]), np.arange(2), 4, True, "split", 0)
    assert rows.learned.sum() == (4 - 1) + (3 - 1)  # the fifth token of the first document would be alone in a row, and is left out
    rows = pack(documents_of([5, 3]), np.arange(2), 4, True, "truncate", 0)
    assert rows.learned.sum() == (4 - 1) + (3 - 1) and (rows.num_split, rows.num_truncated) == (0, 1)


def test_a_completion_stays_with_its_prompt() -> None:
    """The documents are a text, a prompt of two tokens with a completion of six, and a prompt that fills its row."""
    all_documents = documents_of([7, 8, 6])
    all_documents.learned[7:9] = all_documents.learned[15:20] = False
    rows = pack(all_documents, np.arange(3), 4, True, "split", -1)
    assert sorted(rows.tokens.tolist()) == [[0, 1, 2, 3], [4, 5, 6, -1], [7, 8, 9, 10]]
    assert (rows.num_split, rows.num_truncated, rows.num_dropped) == (1, 2, 1) and rows.learned.sum() == 3 + 2 + 2


def test_texts_are_split_as_asked(tmp_path: Path) -> None:
    path = tmp_path / "a text.txt"
    path.write_text("one\ntwo\n\nthree\n\n\n")

    def read(unit: Any, **options: Any) -> list[Any]:
        return [d[0][0] for d in documents(TextSource(str(path), unit, **options), print)]  # type: ignore[index]

    assert read("file") == ["one\ntwo\n\nthree\n\n\n"]
    assert read("lines") == ["one", "two", "three"]
    assert read("paragraphs") == ["one\ntwo", "three"]
    assert read("lines", first=2) == ["one", "two"]


def test_a_malformed_line_is_named_or_left_out(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "good"}\n\n{"text": \n{"txt": "bad"}\n{"text": 3}\n{"prompt": "a", "completion": "b"}\n')
    with pytest.raises(Problem, match=r"line 3: .*bad_samples=skip"):
        list(documents(TextSource(str(path)), print))
    notices: list[str] = []
    rows = list(documents(TextSource(str(path), bad_samples="skip"), notices.append))
    assert rows == [[("good", True)], [("a", False), ("b", True)]]
    assert notices == [f"{path}: 3 malformed lines left out (line 3, 4, 5)"]


def test_json_is_a_list_of_rows_or_a_row_a_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"text": "one"}, {"text": ""}, {"prompt": "a", "completion": "b"}], indent=1))
    assert list(documents(TextSource(str(path)), print)) == [[("one", True)], [("a", False), ("b", True)]]
    write_jsonl(path, [{"text": "one"}, {"text": "two"}])
    assert list(documents(TextSource(str(path)), print)) == [[("one", True)], [("two", True)]]
    path.write_text('{"data": []}')
    with pytest.raises(Problem, match="row 1: it has data, but neither text"):
        list(documents(TextSource(str(path)), print))
    (tmp_path / "rows.parquet").write_bytes(b"PAR1\0\1")
    with pytest.raises(Problem, match=r"is no text: give a .txt, .json or .jsonl file, or a folder"):
        list(documents(TextSource(str(tmp_path / "rows.parquet")), print))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([], "a list instead of an object"),
        ({"txt": "x"}, "it has txt, but neither text"),
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": "user"}]}, "needs a role and a content"),
        ({"prompt": 1, "completion": "x"}, "must be text"),
    ],
)
def test_malformed_rows_are_refused(row: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
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
    tokenised = tokenise(TextSource(str(path)), tokenizer, print)
    assert tokenizer.decode(tokenised.tokens[tokenised.learned]) == "sat on <|end|> and saw <|end|>"
    assert tokenizer.decode(tokenised.tokens).startswith("<|user|> the cat <|end|>")
    tokenizer.chat_template = None
    with pytest.raises(Problem, match="no chat template"):
        tokenise(TextSource(str(path)), tokenizer, print)


def test_rows_of_a_data_set_and_chats_that_do_not_fit_are_named_or_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Path("set").mkdir()
    write_jsonl(Path("set/train.jsonl"), [{"text": "the cat"}, {"text": None}, {"text": "a mat"}])
    with pytest.raises(Problem, match="data=set, row 2: text, prompt and completion must be text"):
        list(documents(TextSource("set", "file", None, "stop"), print))
    notices: list[str] = []
    assert len(list(documents(TextSource("set", "file", None, "skip"), notices.append))) == 2
    assert notices == ["data=set: 1 malformed row left out (row 2)"]

    class Strict:
        chat_template, eos_token_id = "strict", 1

        def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> Any:
            if messages and messages[0]["role"] != "user":
                raise RuntimeError("a chat begins with the user")
            return {"input_ids": [2, 3][: len(messages)]}

        def __call__(self, texts: list[str], **options: Any) -> Any:
            return {"input_ids": [[5] for _ in texts]}

    valid, invalid = [{"role": r, "content": "x"} for r in ("user", "assistant")], [{"role": "assistant", "content": "x"}]
    write_jsonl(Path("chats.jsonl"), [{"messages": valid}, {"messages": invalid}])
    with pytest.raises(Problem, match=r"chat 2: the model's template refuses it .a chat begins with the user"):
        text._tokenise_all(TextSource("chats.jsonl", "file", None, "stop"), Strict(), print)
    assert len(text._tokenise_all(TextSource("chats.jsonl", "file", None, "skip"), Strict(), print)) == 1


def test_texts_are_tokenised_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "text.txt"
    path.write_text("abc\nde\n")
    calls = []

    class Counting(ByteTokenizer):
        def __call__(self, texts: Any, **options: Any) -> Any:
            calls.extend([texts] if texts != ["a"] else [])  # "a" is tokenised only to find the begin token
            return super().__call__(texts, **options)

    first = tokenise(TextSource(str(path), "lines"), Counting(), print)
    assert first.tokens.tolist() == [97, 98, 99, 256, 100, 101, 256] and first.starts.tolist() == [0, 4, 7]
    second = tokenise(TextSource(str(path), "lines"), Counting(), print)
    assert isinstance(second.tokens, np.memmap) and np.array_equal(first.tokens, second.tokens) and len(calls) == 1
    path.write_text("abc\ndf\n")
    assert tokenise(TextSource(str(path), "lines"), Counting(), print).tokens[5] == 102 and len(calls) == 2


def test_nothing_to_learn_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "empty.txt").write_text("\n \n")
    with pytest.raises(Problem, match="no text to learn from"):
        tokenise(TextSource(str(tmp_path / "empty.txt")), ByteTokenizer(), print)
    with pytest.raises(Problem, match="there is no such file"):
        tokenise(TextSource(str(tmp_path / "missing.jsonl")), ByteTokenizer(), print)
    assert not list((tmp_path / "cache" / "drivetrain" / "tokens").iterdir()), "no half-written file is left"


def test_a_text_begins_in_training_as_in_predict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoTokenizer

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    chat = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat on"}]
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": "the cat"}, {"prompt": "a mat", "completion": "and saw"}, {"messages": chat}])
    template = "{{ bos_token }}" + TEMPLATE
    for begins in (False, True):
        tokenizer = AutoTokenizer.from_pretrained(write_model(tmp_path / f"model-{begins}", template, begins=begins))
        tokenised = tokenise(TextSource(str(path)), tokenizer, print)
        chats, texts, pairs = (tokenised.tokens[a:b].tolist() for a, b in zip(tokenised.starts, tokenised.starts[1:], strict=False))
        prefix = [tokenizer.bos_token_id] if begins else []
        assert prefix_tokens(tokenizer) == prefix
        assert texts == tokenizer("the cat")["input_ids"] + [tokenizer.eos_token_id], "the same tokens as from transformers"
        assert pairs == tokenizer("a mat and saw")["input_ids"] + [tokenizer.eos_token_id]
        assert chats.count(tokenizer.bos_token_id) == 1, "only the begin token of the template"
        prompt = tokenizer(["<s> the cat"], add_special_tokens=False)["input_ids"][0]
        assert with_prefix(prefix, prompt) == prompt, "a prompt with a begin token gets no second one"


HOLDER = """
import sys, time
from pathlib import Path
from drivetrain.tasks.lora.base_model import ByteTokenizer
from drivetrain.tasks.lora.text import TextSource, tokenise
class Slow(ByteTokenizer):
    def __call__(self, texts, **options):
        if len(texts) > 1:
            with open(sys.argv[2], "a") as file:
                file.write("tokenised")
            time.sleep(float(sys.argv[3]))
        return super().__call__(texts, **options)
print(len(tokenise(TextSource(sys.argv[1], "lines"), Slow(), print)))
"""


def test_of_several_processes_one_tokenises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("abc\nde\n")
    log = tmp_path / "log"

    def start(seconds: float) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-c", HOLDER, str(tmp_path / "text.txt"), str(log), str(seconds)]
        return subprocess.Popen(words, stdout=subprocess.PIPE)

    holder = start(600)
    while not log.exists():
        time.sleep(0.05)
    waiting = [start(1), start(1)]
    time.sleep(1)
    holder.kill()
    holder.wait()
    assert [process.communicate(timeout=60)[0] for process in waiting] == [b"2\n", b"2\n"]
    assert log.read_text() == "tokenised" * 2, "once by the killed process, and once by one of the others"
    assert [p.name.startswith(".") for p in (tmp_path / "cache" / "drivetrain" / "tokens").iterdir() if p.suffix == ".lock"] == []


# --- data sets ---


def test_a_downloaded_folder_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is as `hf download --local-dir` writes it, with configurations; it is tokenised again after a change."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "set"
    (folder / "one").mkdir(parents=True)
    configs = "".join(f"- config_name: {n}\n  data_files:\n  - split: train\n    path: {n}/*.jsonl\n" for n in ("one", "two"))
    (folder / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    write_jsonl(folder / "one" / "train.jsonl", [{"text": "abc"}])
    reading = TextSource(f"{folder}:one", "file")
    assert tokenise(reading, ByteTokenizer(), print).tokens.tolist() == [97, 98, 99, 256]
    write_jsonl(folder / "one" / "train.jsonl", [{"text": "abd"}])
    _data_set.cache_clear()  # as in a new process
    assert tokenise(reading, ByteTokenizer(), print).tokens.tolist() == [97, 98, 100, 256]
    with pytest.raises(Problem, match=r"pick one among the available configs: .*one"):
        tokenise(TextSource(str(folder), "file"), ByteTokenizer(), print)


def test_without_a_network_a_data_set_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("drivetrain.tasks.lora.documents.hub_answers", lambda: False)
    stopwatch = Stopwatch()
    with pytest.raises(Problem, match=r"(?s)could not be fetched from the hub.*hf download some/set --repo-type dataset .*data=DIR:one"):
        TextSource("some/set:one").content_key()
    assert stopwatch.seconds < 5
    with pytest.raises(Problem, match="there is no such file"):
        TextSource("/nowhere/set").content_key()


class Hub(BaseHTTPRequestHandler):
    """A hub with one gated repository of each kind and no other repository."""

    def do_GET(self) -> None:
        code = (403, "GatedRepo") if "closed" in self.path else (401, "RepoNotFound")
        self.send_response(code[0])
        self.send_header("X-Error-Code", code[1])
        self.send_header("X-Error-Message", "as the hub says it")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *_: Any) -> None:
        pass


FETCH_FROM_HUB = """
from drivetrain.outcomes import Problem
from drivetrain.tasks.lora.base_model import find_base
from drivetrain.tasks.lora.documents import TextSource
for kind in (lambda name: find_base(name).tokenizer(), lambda name: find_base(name).model(None), lambda name: TextSource(name).content_key()):
    for name in ("some/closed", "some/missing"):
        try:
            kind(name)
        except Problem as problem:
            print(problem)
"""


@pytest.mark.system
def test_gated_and_missing_repositories_are_distinguished(tmp_path: Path) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, daemon=True).start()
    variables = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path)}
    process = subprocess.run(
        [sys.executable, "-c", FETCH_FROM_HUB], env=os.environ | variables, capture_output=True, text=True, timeout=120
    )
    server.shutdown()
    gated = "is gated: accept its terms on its hub page and log in (hf auth login, or HF_TOKEN), or give a folder with its files"
    assert process.stdout.splitlines() == [
        *[f"base=some/closed {gated}", "base=some/missing: the hub has no such model, and there is no such folder"] * 2,
        f"data=some/closed {gated}",
        "data=some/missing: there is no such file or folder here, and no such data set on the hub",
    ]
