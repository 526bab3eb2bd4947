"""Uploads a finished run's model and its card to URL/models/RUN/ and URL/models/latest/."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from drivetrain.buckets.layout import LATEST, MARK, check_uploadable, is_safe
from drivetrain.buckets.store import Store
from drivetrain.buckets.url import BucketUrl
from drivetrain.outcomes import Problem
from drivetrain.runs import FORMAT, Run, sha256_of


def upload_model(run: Run, url: BucketUrl, patience: float) -> list[str]:
    """Uploads the model; returns the addresses of both copies. Files that are there already are not sent again."""
    check_uploadable(run.path.name)
    files = {name: run.path / "model" / name for name in sorted(_files(run.path / "model"))}
    if run.card_path.name not in files:
        raise Problem(f"{run.name} has no model yet: only finished runs have one (drivetrain resume {run.name})")
    sums = {name: {"bytes": file.stat().st_size, "sha256": sha256_of(file)} for name, file in files.items()}
    mark = json.dumps({"format": FORMAT, "run": run.path.name, "files": sums}, indent=1).encode()
    return [str(_upload(files, mark, Store(url.child("models", name), patience))) for name in (run.path.name, LATEST)]


def _upload(files: dict[str, Path], mark: bytes, store: Store) -> BucketUrl:
    """Uploads the files, and last the list of them: where it is missing, or does not fit, the copy is not complete."""
    if store.read(MARK) == mark:
        return store.url
    store.delete(MARK)
    for name, file in files.items():
        store.upload(file, name)
    store.write(MARK, mark)
    store.delete(*[name for name in store.list() if name != MARK and name not in files])
    return store.url


def _files(folder: Path) -> Iterator[str]:
    for parent, folders, names in os.walk(folder):
        folders.sort()
        for name in names:
            relative = os.path.relpath(os.path.join(parent, name), folder)
            if is_safe(relative) and not os.path.islink(os.path.join(parent, name)):
                yield relative
