"""A resume detects changed data: another length is refused, other values are reported, random samples are not reported."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.engine.data import signature
from drivetrain.engine.group import Group
from drivetrain.engine.log.observe import Observer
from drivetrain.outcomes import Outcome, Problem
from drivetrain.runs import Run
from tests.sample_tasks import TASKS, DictDataset, LoaderTask, Plain, blobs, training

ALONE = Group(0, 1, torch.device("cpu"))


class Notices(Observer):
    """Never asks for a stop."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def notice(self, text: str) -> None:
        self.texts.append(text)

    def __bool__(self) -> bool:
        return False


def train_or_resume(
    name: str, folder: Path, stop_after: int | None = None, pins: dict[str, Any] | None = None, **settings: Any
) -> list[str]:
    """Trains or resumes in a folder; returns the notices."""
    notices = Notices()
    job = training(name, str(folder), ALONE, settings, pins, notices)
    try:
        job.run_to_end(stop_after)
    finally:
        if job.saver.writer is not None:
            job.saver.writer.wait()
        job.setup.observer.close()
    return notices.texts


def test_another_number_of_samples_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_or_resume("Plain", tmp_path, stop_after=3)
    with pytest.raises(Problem, match=r"train_data\(\) gives 90 samples now, and gave 101 .*\n.*start=.* --name NEW") as refused:
        train_or_resume("Plain", tmp_path, samples=90)
    assert refused.value.outcome is Outcome.USAGE
    monkeypatch.setattr(Plain, "eval_data", lambda task: torch.utils.data.TensorDataset(*blobs(36, seed=1)))
    with pytest.raises(Problem, match=r"eval_data\(\) gives 36 samples now, and gave 37"):
        train_or_resume("Plain", tmp_path)


@pytest.mark.parametrize(("name", "pins"), [("Plain", {}), ("LoaderTask", {"workers": 0}), ("LoaderTask", {"workers": 2})])
def test_changed_values_are_reported_once(name: str, pins: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_or_resume(name, tmp_path, stop_after=3, pins=pins)
    assert not train_or_resume(name, tmp_path, stop_after=5, pins=pins), "the same data, with keyed randomness"
    task = TASKS[name]
    original = task.train_data

    def with_one_changed_label(self: Any) -> Any:
        data = original(self)
        columns = data.columns if name == "Plain" else [data.x, data.y]
        columns[1][-1] = (columns[1][-1] + 1) % 4
        return data

    monkeypatch.setattr(task, "train_data", with_one_changed_label)
    [notice] = train_or_resume(name, tmp_path, stop_after=8, pins=pins)
    assert (
        notice.startswith("train_data() is not what it was when ")
        and ("values of its tensors" if name == "Plain" else "sample 100") in notice
    )
    [event] = [e for e in Run(tmp_path).events() if e["event"] == "data-changed"]
    assert event["data"] == "train_data()" and event["step"] == 5
    assert not train_or_resume(name, tmp_path, stop_after=10, pins=pins), "the next checkpoint has the signature of the changed data"


class UnseededDataset(DictDataset):
    """Samples with random values that no seed controls, a list of changing length, and an object that is no data."""

    def __getitem__(self, i: int) -> Any:
        unseeded = random.SystemRandom()
        return super().__getitem__(i) | {"coin": unseeded.randrange(2), "some": [0] * unseeded.randrange(3), "task": object()}


class UnseededTask(LoaderTask):
    def train_data(self) -> Any:
        return UnseededDataset(self.samples, self.noise)

    def collate(self, samples: list[Any]) -> Any:
        return torch.utils.data.default_collate([{k: s[k] for k in ("inputs", "y")} for s in samples])

    def eval_data(self) -> Any:
        return None


def test_random_samples_are_not_reported_as_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "UnseededTask", UnseededTask)
    for stop in (2, 4, 6, 8, 10):
        assert not train_or_resume("UnseededTask", tmp_path, stop_after=stop)


def test_only_the_first_of_slow_samples_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(signature.time, "monotonic", lambda: float(next(clock)))
    hashes = signature.of_samples(lambda i: (torch.ones(2), i), 30)
    assert list(hashes) == ["0"] and all(hashes["0"])
    assert not signature.describe_difference({"samples": hashes}, {"samples": {}}), "samples without a hash are not compared"
    assert signature.describe_difference({"samples": hashes}, {"samples": {"0": ["0" * 16, hashes["0"][1]]}}) == "sample 0"


def test_large_empty_and_sparse_columns_have_signatures() -> None:
    wide = torch.zeros(1000, 1 << 18, dtype=torch.bfloat16).as_strided((1000, 1 << 18), (0, 1))
    assert len(signature.of_columns([wide, torch.arange(3), torch.ones(1, 0), torch.eye(3).to_sparse()])) == 4
    assert signature.of_columns([torch.arange(100)]) != signature.of_columns([torch.arange(100).int()])
