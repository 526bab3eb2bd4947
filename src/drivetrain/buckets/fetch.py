"""Copies a run from its bucket to this machine: small files, and the newest checkpoint that is complete and undamaged."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from drivetrain.buckets.layout import (
    LINK,
    MARK,
    STATE,
    RemoteCheckpoint,
    check_folder_of,
    complete_checkpoints,
    is_small,
    read_link,
    read_mark,
    stage_number,
    stages_in,
    stages_of_names,
)
from drivetrain.buckets.store import Store
from drivetrain.buckets.url import BucketUrl
from drivetrain.outcomes import Problem
from drivetrain.runs import FORMAT, Run, parse_row, sha256_of, write_atomic

Report = Callable[[str], None]


class Extent(NamedTuple):
    """How far the copy of a run goes. A later one is greater."""

    stage: int = -1
    """The number of the stage; 0: it has no stages; -1: there is no run."""
    step: int = 0
    """The step of the newest complete checkpoint of that stage."""
    is_finished: bool = False


def link(folder: Path, url: BucketUrl) -> str:
    """Records in a run's folder which bucket it belongs to; returns the identity with which this folder owns the run there."""
    check_folder_of(folder, url)
    known = read_link(folder)
    owner = str(known.get("owner") or uuid.uuid4().hex)
    write_atomic(folder / LINK, json.dumps({"format": FORMAT, "url": str(url), "owner": owner}) + "\n")
    return owner


def fetch(store: Store, folder: Path, report: Report, may_write: bool = False) -> bool:
    """Copies a run here, if the bucket has more of it than this machine. Returns whether anything was copied.

    `may_write`: this process owns the run, so that it may declare a damaged checkpoint incomplete."""
    names = store.list()
    stages = stages_of_names(names)
    if not stages or _remote_position(store, names, stages[-1]) <= _local_position(folder):
        return False
    copy_small_files(store, folder, names)
    checkpoint = _fetch_checkpoints(store, folder, stages[-1], names, report, may_write)
    step = f"step {checkpoint.step:,}" if checkpoint else "no checkpoint"
    report(f"copied from {store.url} ({step})")
    return True


def copy_small_files(store: Store, folder: Path, names: dict[str, int] | None = None) -> None:
    """Copies all of a run but its checkpoints; run.json last."""
    small = [name for name in (store.list() if names is None else names) if is_small(name)]
    for name in sorted(small, key=lambda name: name.rpartition("/")[2] == "run.json"):
        _copy_file(store, name, folder / name)


def _fetch_checkpoints(
    store: Store, folder: Path, stage: str, names: dict[str, int], report: Report, may_write: bool
) -> RemoteCheckpoint | None:
    """Copies the newest good checkpoint of a stage, and the best one, which a training with `best` needs at its end."""
    newest: RemoteCheckpoint | None = None
    last_row = int(Run(folder / stage).last_row().get("step", 0))
    for checkpoint in reversed([found for found in complete_checkpoints(names) if found.stage == stage]):
        if newest is not None and checkpoint.step != _best_step(folder / newest.prefix):
            continue
        try:
            try:
                _fetch_one(store, folder, checkpoint, last_row)
            except _Damaged:  # or only its copy is
                _fetch_one(store, folder, checkpoint, last_row)
        except _Damaged as damage:
            report(f"{store.url}: checkpoint step-{checkpoint.step:08d} is damaged and not used: {damage}")
            if may_write:
                store.delete(checkpoint.prefix + MARK)
            continue
        newest = newest or checkpoint
    return newest


class _Damaged(Exception):
    """A checkpoint in a bucket cannot be used; the text says why."""


def _fetch_one(store: Store, folder: Path, checkpoint: RemoteCheckpoint, last_row: int) -> None:
    """Copies a checkpoint into a hidden folder, compares all hashes, and gives it its name."""
    mark = read_mark(store.read(checkpoint.prefix + MARK))
    if not mark.files:
        raise _Damaged("its list of files cannot be read")
    if mark.last_row > last_row:  # the training went back to an earlier step since then
        raise _Damaged("the metrics up to it are not there any more")
    final = folder / checkpoint.prefix
    hidden = final.with_name(f".fetched-{final.name}")
    shutil.rmtree(hidden, ignore_errors=True)
    hidden.mkdir(parents=True)
    try:
        for name, entry in mark.files.items():
            _fetch_file(store, checkpoint.prefix + name, hidden / name, entry)
        if final.exists():
            shutil.rmtree(final)
        os.rename(hidden, final)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def _fetch_file(store: Store, name: str, file: Path, entry: dict[str, Any]) -> None:
    try:
        store.download(name, file)
    except FileNotFoundError:
        raise _Damaged(f"{file.name} is missing") from None
    if file.stat().st_size != entry["bytes"] or sha256_of(file) != entry["sha256"]:
        raise _Damaged(f"{file.name} differs from what was written")


def _copy_file(store: Store, name: str, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f".{file.name}-{uuid.uuid4().hex[:8]}")
    try:
        store.download(name, part)
        os.replace(part, file)
    except FileNotFoundError:
        pass  # deleted since it was listed
    finally:
        part.unlink(missing_ok=True)


def _best_step(checkpoint: Path) -> int | None:
    """Returns the step of the best evaluation that a checkpoint remembers."""
    try:
        step = json.loads((checkpoint / "manifest.json").read_text())["extra"]["best"]["step"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return step if isinstance(step, int) else None


def _remote_position(store: Store, names: dict[str, int], stage: str) -> Extent:
    steps = [checkpoint.step for checkpoint in complete_checkpoints(names) if checkpoint.stage == stage]
    return Extent(stage_number(stage), max(steps, default=0), _is_finished(store.read(f"{stage}run.json")))


def _local_position(folder: Path) -> Extent:
    stages = stages_in(folder)
    if not stages:
        return Extent()
    run = Run(folder / stages[-1])
    return Extent(stage_number(stages[-1]), run.last_checkpoint_step, _is_finished(run.json_path.read_bytes()))


def _is_finished(content: bytes | None) -> bool:
    info: dict[str, Any] = parse_row(content or b"") or {}
    return info.get("status") == "finished"


def copy_run(store: Store, folder: Path, report: Report) -> None:
    """Copies a run here, with its newest good checkpoint; raises Problem if there is no run at the address."""
    link(folder, store.url)
    if not stages_of_names(store.list()):
        shutil.rmtree(folder / STATE, ignore_errors=True)
        raise Problem(f"there is no run at {store.url}")
    fetch(store, folder, report)
