"""A request can be written as a command line, and the parser reads the same request from it."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain import Problem
from drivetrain.cli.train import read_request
from drivetrain.launch.request import Request

NAMES = st.from_regex(r"[A-Za-z0-9][\w.-]{0,20}", fullmatch=True)
WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
SECONDS = st.one_of(st.integers(1, 10**7).map(float), st.floats(0.001, 1e7).map(lambda value: round(value, 6)))
PLACEMENT = {
    "procs": st.none() | st.integers(1, 4096),
    "rendezvous": st.none() | WORDS,
    "node_rank": st.none() | st.integers(0, 100_000),
    "gpus": st.none() | WORDS,
    "device": st.none() | st.sampled_from(["cuda", "cpu", "mps"]),
}
OTHER = {
    "planner": st.sampled_from(["auto", "table", "off"]),
    "restarts": st.integers(0, 100),
    "hang_after": SECONDS,
    "time_limit": st.none() | SECONDS,
    "find_nan": st.booleans(),
    "profile": st.integers(0, 1000),
    "check_collectives": st.booleans(),
    "quiet": st.booleans(),
    "verbose": st.booleans(),
    "upload": st.none() | NAMES.map("s3://team/{}".format),
}
TRAIN_ONLY = {
    "plan_file": st.none() | WORDS,
    "dry_run": st.booleans(),
    "smoke": st.booleans(),
}


@st.composite
def requests(draw: st.DrawFn) -> Request:
    verb = draw(st.sampled_from(["train", "resume"]))
    values: dict[str, Any] = {name: draw(strategy) for name, strategy in (PLACEMENT | OTHER).items()}
    low = draw(st.integers(1, 1000))
    high = draw(st.integers(low, 1000))
    values |= {"nodes": high, "min_nodes": None if low == high else low}
    if verb == "train":
        values |= {name: draw(strategy) for name, strategy in TRAIN_ONLY.items()}
        name = draw(NAMES)
        in_bucket = {"bucket": f"s3://team/runs/{name}", "run_dir": f"runs/{name}"}
        values |= draw(st.sampled_from([{}, {"name": name}, {"run_dir": f"/tmp/{name}"}, {"run_dir": f"-{name}"}, in_bucket]))
    settings = draw(st.lists(st.tuples(NAMES, WORDS).map("=".join), max_size=3))
    return Request(verb=verb, target=draw(NAMES), settings=tuple(settings), **values)


@given(requests())
def test_the_parser_reads_a_written_request_back(request: Request) -> None:
    assert read_request(request.command()) == request


def test_the_test_above_uses_every_field_of_a_request() -> None:
    used_fields = {*PLACEMENT, *OTHER, *TRAIN_ONLY, "verb", "target", "settings", "nodes", "min_nodes", "name", "run_dir", "bucket"}
    assert used_fields == {field.name for field in fields(Request) if field.compare}


def test_a_request_is_written_as_a_short_command() -> None:
    request = Request(target="digits.py", settings=("hidden=512",), procs=4, nodes=3, min_nodes=1, time_limit=14400.0, smoke=True)
    expected = ["train", "digits.py", "hidden=512", "--procs", "4", "--nodes", "1:3", "--time-limit", "14400s", "--smoke"]
    assert request.command() == expected
    assert read_request(["train", "digits.py", "--time-limit", "4h"]).time_limit == 14400.0


def test_a_time_limit_counts_from_the_time_of_the_request() -> None:
    request = Request(time_limit=60.0, asked_at=1000.0)
    assert request.deadline == 1060.0 and replace(request, name="later").deadline == 1060.0
    assert Request().deadline is None


def test_a_request_with_a_name_and_a_run_directory_is_refused() -> None:
    with pytest.raises(Problem, match="give one"):
        Request(name="a", run_dir="b")
