"""Files of histories: what is written is read again, and what is not complete or does not fit is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from drivetrain.outcomes import Problem
from drivetrain.tasks.distill import histories
from drivetrain.tasks.distill.histories import FIELDS, INDEX, Histories, noisy_histories


@pytest.fixture
def recorded() -> Histories:
    return noisy_histories("darkroom", 9, None, streams=3, episodes=8, region=80, num_tasks=11, seed=1)


def test_noise_falls_from_random_to_optimal(recorded: Histories) -> None:
    env = recorded.facts.env()
    returns = recorded.returns()
    assert returns.shape == (11, 8)
    assert returns[:, 0].mean() < 0.3 * returns[:, -1].mean()
    optimum = env.optimum(torch.tensor(recorded.facts.tasks))
    assert returns[:, -1].mean() > 0.8 * optimum.mean()
    assert not torch.equal(recorded.action, noisy_histories("darkroom", 9, None, 3, 8, 80, 11, seed=2).action)


def test_a_folder_has_the_fields_of_guide_002(recorded: Histories, tmp_path: Path) -> None:
    histories.write(tmp_path / "data", recorded)
    arrays = {name: np.load(tmp_path / "data" / f"{name}.npy") for name in FIELDS}
    assert arrays["states"].shape == arrays["next_states"].shape == (11, 3, 160, 2)
    assert arrays["actions"].shape == arrays["rewards"].shape == arrays["dones"].shape == (11, 3, 160)
    markers = arrays["compress_markers"][4, 2]
    assert [markers[i] for i in (0, 1, 78, 79, 80, 81, 158, 159)] == [1, 0, 0, 2, 1, 0, 0, 2]
    assert np.flatnonzero(arrays["dones"][0, 0]).tolist() == list(range(19, 160, 20))
    assert (arrays["states"][:, :, 0] == 4).all()  # an episode begins in the centre
    inside = arrays["dones"][:, :, :-1] == 0
    assert np.array_equal(arrays["next_states"][:, :, :-1][inside], arrays["states"][:, :, 1:][inside])
    again = histories.read(str(tmp_path / "data"))
    assert again.facts == recorded.facts
    for name in ("place", "action", "reward", "next_place"):
        assert torch.equal(getattr(again, name).double(), getattr(recorded, name).double())


def test_the_split_gives_rows_of_the_arrays(recorded: Histories) -> None:
    train, held_out = recorded.split()
    assert [recorded.facts.env().label(recorded.facts.tasks[row]) for row in held_out[:2]] == ["(4,2)", "(5,6)"]
    assert len(train) == 3
    assert len(held_out) == 8


def test_an_interrupted_write_leaves_the_earlier_folder(recorded: Histories, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    histories.write(tmp_path / "data", recorded)

    def full_disk(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full_disk)
    with pytest.raises(OSError, match="No space"):
        histories.write(tmp_path / "data", recorded)
    assert histories.read(str(tmp_path)).facts == recorded.facts


def test_a_folder_that_cannot_take_its_name_leaves_the_earlier_one(
    recorded: Histories, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    histories.write(tmp_path / "data", recorded)
    rename = Path.rename

    def fail_once(path: Path, target: Path) -> Path:
        if (path / INDEX).is_file() and target == tmp_path / "data":
            assert (tmp_path / "data").exists() is False
            assert any((other / INDEX).is_file() for other in tmp_path.iterdir() if other != path), "the earlier histories must still exist"
            monkeypatch.setattr(Path, "rename", rename)
            raise OSError(5, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail_once)
    with pytest.raises(OSError, match="Input/output"):
        histories.write(tmp_path / "data", recorded)
    assert histories.read(str(tmp_path)).facts == recorded.facts
    histories.write(tmp_path / "data", recorded)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


CHANGES: dict[str, Any] = {
    "other steps": {"steps": 170},
    "a later format": {"format": 2},
    "another environment": {"size": 5, "tasks": [*range(11)]},
    "another limit": {"limit": 16},
    "a larger room": {"size": 11},
    "another world": {"world": "darkroom-permuted"},
    "no limit": {"limit": 0},
    "a negative limit": {"limit": -5},
    "a negative size": {"size": -5},
    "a list as a seed": {"split_seed": [1]},
    "a list of files": {"files": []},
    "a task twice": {"tasks": [1] * 11},
    "a task that does not exist": {"tasks": [*range(10), 81]},
    "tasks as text": {"tasks": "abc"},
    "an unknown key": {"author": "me"},
    "an unknown world": {"world": "maze"},
}


def damage(folder: Path, kind: str) -> None:
    index = folder / INDEX
    if kind == "half an array":
        file = folder / "rewards.npy"
        file.write_bytes(file.read_bytes()[:5000])
    elif kind == "a missing array":
        (folder / "compress_markers.npy").unlink()
    elif kind == "no index":
        index.unlink()
    elif kind == "half an index":
        index.write_text(index.read_text()[:60])
    elif kind in CHANGES:
        index.write_text(json.dumps(json.loads(index.read_text()) | CHANGES[kind]))
    elif kind == "an index that is a list":
        index.write_text("[1, 2]")
    elif kind == "pickled objects":
        array = np.array([{"a": 1}] * 40, dtype=object)
        np.save(folder / "actions.npy", array, allow_pickle=True)
        values = json.loads(index.read_text())
        values["files"]["actions"] = (folder / "actions.npy").stat().st_size
        index.write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("half an array", r"rewards\.npy has 5,000 bytes of 21,248: it was not written or copied to its end\. Collect again"),
        ("a missing array", r"compress_markers\.npy has 0 bytes"),
        ("no index", r"is not complete: it has no histories\.json, which is written last"),
        ("half an index", r"histories\.json cannot be read"),
        ("other steps", r"has the shape \(11, 3, 160\), not \(11, 3, 170\)"),
        ("a later format", r"format 2; this version reads format 1"),
        ("another environment", r"actions or places that darkroom does not have"),
        (
            "another limit",
            r"was not recorded in darkroom with size=9 and limit=16, .*: step 16 of task \(4,2\) goes otherwise\. Collect again",
        ),
        ("a larger room", r"was not recorded in darkroom with size=11 and limit=20, .*: step 0 of task"),
        ("another world", r"was not recorded in darkroom-permuted with size=9 and limit=20"),
        ("no limit", r"histories\.json cannot be read \(limit is 0, not a whole number from 1"),
        ("a negative limit", r"limit is -5, not a whole number from 1"),
        ("a negative size", r"size is -5, not a whole number from 2 to 181"),
        ("a list as a seed", r"split_seed is \[1\], not a whole number"),
        ("a list of files", r"files is \[\], not the sizes of files"),
        ("a task twice", r"tasks is \[1, .*, not a list of different numbers from 0 to 80"),
        ("a task that does not exist", r"tasks is .*, not a list of different numbers from 0 to 80"),
        ("tasks as text", r"tasks is 'abc', not a list of whole numbers"),
        ("an unknown key", r"its keys are not world, size"),
        ("an unknown world", r"there is no world 'maze'"),
        ("an index that is a list", r"index is \[1, 2\], not an object with format and files"),
        ("pickled objects", r"actions\.npy cannot be read"),
    ],
)
def test_damaged_histories_are_refused(recorded: Histories, tmp_path: Path, kind: str, message: str) -> None:
    histories.write(tmp_path / "data", recorded)
    damage(tmp_path / "data", kind)
    with pytest.raises(Problem, match=message):
        histories.read(str(tmp_path / "data"))


def test_a_folder_without_histories_is_named(tmp_path: Path) -> None:
    with pytest.raises(Problem, match=r"has no histories .*: give a run of the task `histories`, or data=noise"):
        histories.read(str(tmp_path))
