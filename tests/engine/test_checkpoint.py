"""Checkpoints are verified before they are used, and cannot run code."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.engine.state import shards
from drivetrain.engine.state.checkpoint import CheckpointWriter, Damaged, newest_good, verify
from drivetrain.engine.state.tensors import load_model, model_tensors, read_weights, write_weights
from drivetrain.outcomes import Problem
from drivetrain.runs import Run

TENSORS = {"model/w": torch.arange(12.0).reshape(3, 4), "optimizer/w/step": torch.tensor(3.0), "b": torch.ones(2, dtype=torch.bfloat16)}


def writer(folder: Path, keep: int = 2) -> tuple[CheckpointWriter, list[str]]:
    notices: list[str] = []
    return CheckpointWriter(Run(folder), keep, lambda name: None, notices.append), notices


def save(folder: Path, step: int, keep: int = 2, best: int | None = None) -> None:
    checkpoint_writer, _ = writer(folder, keep)
    checkpoint_writer.save(step, TENSORS, {"time": 1.5}, best)
    checkpoint_writer.wait()


def test_saved_tensors_are_loaded_unchanged(tmp_path: Path) -> None:
    save(tmp_path, 7)
    checkpoint = newest_good(Run(tmp_path), pytest.fail)
    assert checkpoint is not None
    assert (checkpoint.step, checkpoint.extra) == (7, {"time": 1.5})
    loaded = checkpoint.tensors()
    assert loaded.keys() == TENSORS.keys()
    assert all(torch.equal(loaded[k], TENSORS[k]) and loaded[k].dtype == TENSORS[k].dtype for k in TENSORS)


def test_a_change_after_the_copy_is_not_saved(tmp_path: Path) -> None:
    checkpoint_writer, _ = writer(tmp_path)
    tensor = torch.zeros(100_000)
    checkpoint_writer.save(1, {"w": tensor}, {}, None)
    tensor.fill_(1.0)
    checkpoint_writer.wait()
    assert verify(tmp_path / "checkpoints/step-00000001").tensors()["w"].sum() == 0


def test_retention_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 5):
        save(tmp_path, step, keep=2, best=2)
    assert Run(tmp_path).checkpoint_steps() == [2, 4, 5]
    assert not list((tmp_path / "checkpoints").glob(".*"))


@pytest.mark.parametrize("file_name", ["__0_0.distcp", ".metadata", "manifest.json"])
def test_any_flipped_byte_is_noticed(file_name: str, tmp_path: Path) -> None:
    save(tmp_path, 1)
    file = tmp_path / "checkpoints/step-00000001" / file_name
    data = file.read_bytes()
    for position in range(0, len(data), max(1, len(data) // 40)):
        file.write_bytes(data[:position] + bytes([data[position] ^ 0x10]) + data[position + 1 :])
        with pytest.raises(Damaged):
            verify(file.parent)
    file.unlink()
    with pytest.raises(Damaged):
        verify(file.parent)


def test_a_planted_pickle_is_refused_without_running(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.system, (f"touch '{tmp_path}/owned'",)

    save(tmp_path, 1)
    save(tmp_path, 2)
    path = tmp_path / "checkpoints/step-00000002"
    (path / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(shards.Refused, match="refused, not run"):
        shards.read(path)
    # An attacker would also correct the manifest.
    from drivetrain.engine.state.checkpoint import _digest, _hash

    manifest = json.loads((path / "manifest.json").read_text())
    manifest.pop("digest")
    manifest["files"][".metadata"] = {"bytes": (path / ".metadata").stat().st_size, "sha256": _hash(path / ".metadata")}
    (path / "manifest.json").write_text(json.dumps(manifest | {"digest": _digest(manifest)}))
    reports: list[str] = []
    checkpoint = newest_good(Run(tmp_path), reports.append)
    assert checkpoint is not None
    assert checkpoint.step == 1
    assert "refused, not run" in reports[0]
    assert not (tmp_path / "owned").exists()


def test_all_is_on_the_disk_before_a_checkpoint_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: set[int] = set()
    missing: list[str] = []
    fsync, rename = os.fsync, os.rename

    def record(handle: int) -> None:
        synced.add(os.fstat(handle).st_ino)
        fsync(handle)

    def check(source: Path, target: Path) -> None:
        if Path(target).name == "step-00000001":
            missing.extend(path.name for path in (Path(source), *Path(source).iterdir()) if path.stat().st_ino not in synced)
            synced.clear()
        rename(source, target)

    monkeypatch.setattr(os, "fsync", record)
    monkeypatch.setattr(os, "rename", check)
    save(tmp_path, 1)
    assert not missing
    assert (tmp_path / "checkpoints").stat().st_ino in synced, "the name, too"


@pytest.mark.parametrize("path", ["../step-00000002/__0_0.distcp", "/etc/passwd"])
def test_an_index_that_points_outside_is_refused(path: str, tmp_path: Path) -> None:
    save(tmp_path, 1)
    folder = tmp_path / "checkpoints/step-00000001"
    index = shards.read_index(folder)
    for storage in index.storage_data.values():
        storage.relative_path = path
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(shards.Refused, match=f"points to a file outside of the checkpoint: {path}"):
        shards.read(folder)


def test_a_failed_save_is_reported_and_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 1)
    blocked = tmp_path / "checkpoints" / ".step-00000002"
    blocked.write_text("a file where the folder should go")
    checkpoint_writer, notices = writer(tmp_path)  # it tries to remove what a killed save left, but `blocked` is a file
    blocked.write_text("a file where the folder should go")
    checkpoint_writer.save(2, TENSORS, {}, None)
    checkpoint_writer.wait()
    assert checkpoint_writer.failure
    assert "was not saved" in notices[0]
    assert "training goes on" in notices[0]
    assert Run(tmp_path).checkpoint_steps() == [1]


def test_tied_weights_are_stored_once_and_loaded_tied(tmp_path: Path) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(5, 3)
            self.head = torch.nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight

    saved_model, loaded_model = Tied(), Tied()
    tensors, aliases = model_tensors(saved_model)
    assert len(tensors) == 1
    assert len(aliases) == 1
    write_weights(tmp_path / "model.safetensors", tensors, aliases)
    load_model(loaded_model, *read_weights(tmp_path / "model.safetensors"), "the file")
    assert torch.equal(loaded_model.head.weight, saved_model.embed.weight)
    assert loaded_model.head.weight is loaded_model.embed.weight


def test_weights_of_another_model_are_refused_with_the_difference() -> None:
    with pytest.raises(Problem, match=r"it lacks 1\.bias, 1\.weight; other shapes: 0\.weight"):
        load_model(
            torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)),
            {"0.weight": torch.zeros(3, 3), "0.bias": torch.zeros(2)},
            {},
            "x",
        )
