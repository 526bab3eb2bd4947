"""Checkpoints that are proven before they are trusted.

Written by torch.distributed.checkpoint into a hidden folder, hashed into a manifest, published by one
rename, and verified on load: a torn or changed one is reported and the one before it is used. They hold
tensors and JSON only; DCP's pickled index is read through an allow-list, so that a run directory of
somebody else cannot run code.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain.engine.state.tensors import Part
from drivetrain.outcomes import Problem
from drivetrain.runs import FORMAT, Run

MANIFEST = "manifest.json"
PATIENCE = 7200  # seconds that a write may take


class NoRoom(Exception):
    """Less room on the disk than a checkpoint takes."""


class Damaged(Exception):
    """A checkpoint that must not be used, and why."""


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    step: int
    extra: dict[str, Any]

    def tensors(self) -> dict[str, Tensor]:
        """All its tensors, on the CPU."""
        from drivetrain.engine.state import shards

        return shards.read(self.path)


def verify(path: Path) -> Checkpoint:
    """The checkpoint at a path, every byte of it checked; Damaged where one is wrong."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        listed, digest = manifest["files"], manifest.pop("digest")
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise Damaged(f"its manifest cannot be read ({type(error).__name__})") from None
    if digest != _digest(manifest):
        raise Damaged("its manifest was changed")
    if manifest["format"] != FORMAT:
        raise Damaged(f"it has format {manifest['format']}")
    for name, known in listed.items():
        try:
            size, found = (path / name).stat().st_size, _hash(path / name)
        except OSError as error:
            raise Damaged(f"{name}: {error.strerror}") from None
        if size != known["bytes"]:
            raise Damaged(f"{name} has {size:,} of {known['bytes']:,} bytes")
        if found != known["sha256"]:
            raise Damaged(f"{name} differs from what was written")
    from drivetrain.engine.state import shards

    try:
        shards.read_index(path)
    except (shards.Refused, OSError) as error:
        raise Damaged(str(error)) from None
    return Checkpoint(path, int(manifest["step"]), dict(manifest["extra"]))


def newest_good(run: Run, report: Callable[[str], None]) -> Checkpoint | None:
    """The latest checkpoint that proves whole; each damaged one is reported."""
    for step in reversed(run.checkpoint_steps()):
        path = run.checkpoints / folder(step)
        try:
            return verify(path)
        except Damaged as damage:
            report(f"checkpoint {path.name} is damaged and not used: {damage}")
    return None


def folder(step: int) -> str:
    return f"step-{step:08d}"


def _hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


class Writer:
    """Stages tensors at once and writes them behind the training's back, one checkpoint at a time."""

    def __init__(
        self, run: Run, keep: int, moment: Callable[[str], None], notice: Callable[[str], None], group: Any = None, main: bool = True
    ) -> None:
        """With a process group every rank has a writer, and writes its own parts; rank 0 proves and publishes them."""
        self.run, self.keep, self.group, self.main = run, keep, group, main
        self.moment, self.notice = moment, notice
        self.failure: str | None = None
        self.newest: int | None = None
        self._thread: threading.Thread | None = None
        if main:
            self._clean()

    def _clean(self, besides: Path | None = None) -> None:
        """Remove what saves left behind that were interrupted, or ended by a disk that was read-only then."""
        for path in self.run.checkpoints.glob(".*"):
            if path != besides:
                shutil.rmtree(path, ignore_errors=True)

    def save(self, step: int, tensors: dict[str, Tensor | Part], extra: dict[str, Any], best: int | None) -> None:
        self.wait()
        self.moment("save")
        staged = {name: _staged(tensor) for name, tensor in tensors.items() if self.main or isinstance(tensor, Part)}
        self._thread = threading.Thread(target=self._write, args=(step, staged, extra, best), name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Until what is being written is on the disk: a slow one is no hang, unless it takes hours."""
        if self._thread is not None:
            for _ in range(PATIENCE):
                self._thread.join(1.0)
                if not self._thread.is_alive():
                    break
                self.moment("saving")
            self._thread.join()
            self._thread = None

    def _write(self, step: int, staged: dict[str, Tensor | Part], extra: dict[str, Any], best: int | None) -> None:
        hidden = self.run.checkpoints / f".{folder(step)}"
        need = _bytes(staged)
        if self.main:
            self._clean(besides=hidden)
        try:
            need, free = self._open(hidden, need)
            if free < need:  # said before the save fails in the middle
                raise NoRoom(f"the disk is full: {(need - free) / 1e6:,.1f} MB are missing ({free / 1e6:,.1f} MB free)")
            from drivetrain.engine.state import shards

            shards.write(hidden, staged, self.group)
            self.moment("written")
            if not self.main:
                self.failure = None
                return
            self._publish(hidden, step, extra)
            self.moment("published")
            self.failure, self.newest = None, step
            self.run.log_event("checkpoint", step=step)
            self._retire(best)
        except BaseException as error:  # DCP's own error is no Exception; and nothing here may end the training
            self.failure = _cause(error)
            if not self.main:
                return
            shutil.rmtree(hidden, ignore_errors=True)
            self.run.log_event("save-failed", step=step, reason=self.failure)
            self.notice(f"the checkpoint at step {step:,} ({need / 1e6:,.1f} MB) was not saved: {self.failure}; training goes on")

    def _open(self, hidden: Path, mine: int) -> tuple[int, int]:
        """Make the folder; gives the bytes that all ranks will write and those that are free: the same on each, for all write or none."""
        free, failure = 0, None
        try:
            hidden.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(hidden).free
        except OSError as error:
            failure = error  # the others wait to be told
        told = torch.tensor([mine, free if self.main else 0])
        if self.group is not None:
            dist.all_reduce(told, group=self.group)
        if failure is not None:
            raise failure
        need, free = told.tolist()
        return need, free

    def _publish(self, hidden: Path, step: int, extra: dict[str, Any]) -> None:
        files = {f.name: {"bytes": f.stat().st_size, "sha256": _hash(f)} for f in sorted(hidden.iterdir())}
        manifest: dict[str, Any] = {"format": FORMAT, "step": step, "files": files, "extra": extra}
        text = json.dumps(manifest | {"digest": _digest(json.loads(json.dumps(manifest)))}, indent=1)
        with open(hidden / MANIFEST, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(hidden)
        final = self.run.checkpoints / folder(step)
        if final.exists():  # a damaged one of the same step
            os.rename(final, self.run.checkpoints / f".old-{folder(step)}")
        self.moment("rename")
        os.rename(hidden, final)
        _sync_folder(self.run.checkpoints)
        shutil.rmtree(self.run.checkpoints / f".old-{folder(step)}", ignore_errors=True)

    def _retire(self, best: int | None) -> None:
        """Delete the oldest beyond `keep`, never the best and never the newest (just proven by writing it)."""
        steps = [s for s in self.run.checkpoint_steps() if s != best]
        for step in steps[: -self.keep]:
            path = self.run.checkpoints / folder(step)
            gone = self.run.checkpoints / f".gone-{folder(step)}"
            os.rename(path, gone)  # never a half-deleted folder under a published name
            shutil.rmtree(gone, ignore_errors=True)


def _bytes(staged: dict[str, Tensor | Part]) -> int:
    return sum((t.plain if isinstance(t, Part) else t).nbytes for t in staged.values())


def _staged(tensor: Tensor | Part) -> Tensor | Part:
    """A copy in the host's memory."""
    if isinstance(tensor, Part):
        return tensor._replace(plain=tensor.plain.to("cpu", copy=True))
    return tensor.detach().to("cpu", copy=True)


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _cause(error: BaseException) -> str:
    """One line about a failed save; DCP wraps the real error."""
    for inner in (error, *(getattr(error, "failures", None) or {}).values()):
        inner = inner[0] if isinstance(inner, tuple) else inner
        if isinstance(inner, OSError) and inner.errno:
            return "the disk is full" if inner.errno == errno.ENOSPC else f"{inner.strerror} ({inner.filename or ''})"
    text = str(error)
    if any(sign in text for sign in ("No space left", "PytorchStreamWriter", "iostream error", "inline_container", "unexpected pos")):
        return "the disk is full"
    lines = [line for line in re.split(r"\n+", text) if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__


def must_exist(checkpoint: Checkpoint | None, run: Run) -> Checkpoint:
    if checkpoint is None:
        raise Problem(f"{run.name} has no good checkpoint and no final weights yet: drivetrain resume {run.name}")
    return checkpoint
