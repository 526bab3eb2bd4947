"""Writes checkpoints, and verifies them before they are used.

A checkpoint is written into a hidden folder, hashed into a manifest, and published by one rename. If it is incomplete or
changed, this is reported, and the checkpoint before it is used. It holds only tensors and JSON: the pickled index of
torch.distributed.checkpoint (DCP) is read through an allow-list, so that a run directory of somebody else cannot run code.
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

from drivetrain.engine.state.tensors import is_sharded, local_tensor
from drivetrain.outcomes import Problem
from drivetrain.runs import FORMAT, Run

MANIFEST = "manifest.json"
WRITE_TIMEOUT_SECONDS = 7200  # how long a slow save counts as progress
# Parts of the messages with which torch reports a failed write; the disk is full in practice.
FULL_DISK_ERRORS = ("No space left", "PytorchStreamWriter", "iostream error", "inline_container", "unexpected pos")


class NotEnoughSpace(Exception):
    """The disk has less free space than a checkpoint takes."""


class Damaged(Exception):
    """A checkpoint must not be used; the text says why."""


@dataclass(frozen=True)
class Checkpoint:
    """A published checkpoint that was verified."""

    path: Path
    step: int
    extra: dict[str, Any]
    """The part of the state that is JSON."""

    def tensors(self) -> dict[str, Tensor]:
        """Returns all its tensors, on the CPU."""
        from drivetrain.engine.state import shards

        return shards.read(self.path)


def verify(path: Path) -> Checkpoint:
    """Returns the checkpoint at a path after checking every byte of it; raises Damaged if one is wrong."""
    manifest = _read_manifest(path)
    for name, expected in manifest["files"].items():
        _verify_file(path / name, expected)
    from drivetrain.engine.state import shards

    try:
        shards.read_index(path)
    except (shards.Refused, OSError) as error:
        raise Damaged(str(error)) from None
    return Checkpoint(path, int(manifest["step"]), dict(manifest["extra"]))


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads((path / MANIFEST).read_text())
        digest, _ = manifest.pop("digest"), manifest["files"]
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise Damaged(f"its manifest cannot be read ({type(error).__name__})") from None
    if digest != _digest(manifest):
        raise Damaged("its manifest was changed")
    if manifest["format"] != FORMAT:
        raise Damaged(f"it has format {manifest['format']}")
    return manifest


def _verify_file(path: Path, expected: dict[str, Any]) -> None:
    try:
        size, sha256 = path.stat().st_size, _hash(path)
    except OSError as error:
        raise Damaged(f"{path.name}: {error.strerror}") from None
    if size != expected["bytes"]:
        raise Damaged(f"{path.name} has {size:,} of {expected['bytes']:,} bytes")
    if sha256 != expected["sha256"]:
        raise Damaged(f"{path.name} differs from what was written")


def newest_good(run: Run, report: Callable[[str], None]) -> Checkpoint | None:
    """Returns the latest checkpoint that is not damaged; reports each damaged one."""
    for step in reversed(run.checkpoint_steps()):
        path = run.checkpoints / folder_name(step)
        try:
            return verify(path)
        except Damaged as damage:
            report(f"checkpoint {path.name} is damaged and not used: {damage}")
    return None


def require_checkpoint(checkpoint: Checkpoint | None, run: Run) -> Checkpoint:
    """Returns the checkpoint; raises Problem where there is none."""
    if checkpoint is None:
        raise Problem(f"{run.name} has no good checkpoint and no final weights yet: drivetrain resume {run.name}")
    return checkpoint


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def _hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


class CheckpointWriter:
    """Copies tensors to the host's memory, then writes them in a background thread: one checkpoint at a time.

    With a process group each rank has a writer and writes its own shards; rank 0 hashes and publishes them."""

    def __init__(
        self,
        run: Run,
        keep: int,
        reached: Callable[[str], None],
        notice: Callable[[str], None],
        group: dist.ProcessGroup | None = None,
        is_main: bool = True,
    ) -> None:
        """`reached` is called with the name of each observation point."""
        self.run, self.keep, self.group, self.is_main = run, keep, group, is_main
        self.reached, self.notice = reached, notice
        self.failure: str | None = None
        """Why the last save failed; None if it did not."""
        self.newest: int | None = None
        self._thread: threading.Thread | None = None
        if is_main:
            self._remove_hidden()

    def _remove_hidden(self, except_for: Path | None = None) -> None:
        """Removes the folders of saves that were interrupted, or that failed on a read-only disk."""
        for path in self.run.checkpoints.glob(".*"):
            if path != except_for:
                shutil.rmtree(path, ignore_errors=True)

    def save(self, step: int, tensors: dict[str, Tensor], extra: dict[str, Any], best: int | None) -> None:
        """Starts to save a step. `best` is the step that is never deleted."""
        self.wait()
        self.reached("save")
        # A tensor that is not sharded is written by rank 0 alone.
        copies = {name: t.detach().to("cpu", copy=True) for name, t in tensors.items() if self.is_main or is_sharded(t)}
        self._thread = threading.Thread(target=self._write, args=(step, copies, extra, best), name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Waits until the current save has ended. Reports an observation point each second, so that a slow save is no hang, for two hours."""
        if self._thread is not None:
            for _ in range(WRITE_TIMEOUT_SECONDS):
                self._thread.join(1.0)
                if not self._thread.is_alive():
                    break
                self.reached("saving")
            self._thread.join()
            self._thread = None

    def _write(self, step: int, tensors: dict[str, Tensor], extra: dict[str, Any], best: int | None) -> None:
        hidden = self.run.checkpoints / f".{folder_name(step)}"
        needed = sum(local_tensor(t).nbytes for t in tensors.values())
        if self.is_main:
            self._remove_hidden(except_for=hidden)
        try:
            needed, free = self._make_folder(hidden, needed)
            if free < needed:  # better than an error in the middle of a file
                raise NotEnoughSpace(f"the disk is full: {(needed - free) / 1e6:,.1f} MB are missing ({free / 1e6:,.1f} MB free)")
            from drivetrain.engine.state import shards

            shards.write(hidden, tensors, self.group)
            self.reached("written")
            if not self.is_main:
                self.failure = None
                return
            self._publish(hidden, step, extra)
            self.reached("published")
            self.failure, self.newest = None, step
            self.run.log_event("checkpoint", step=step)
            self._delete_old(best)
        except BaseException as error:  # DCP's own error is no Exception, and a failed save must not end the training
            self.failure = _cause(error)
            if not self.is_main:
                return
            shutil.rmtree(hidden, ignore_errors=True)
            self.run.log_event("save-failed", step=step, reason=self.failure)
            self.notice(f"the checkpoint at step {step:,} ({needed / 1e6:,.1f} MB) was not saved: {self.failure}; training goes on")

    def _make_folder(self, hidden: Path, own_bytes: int) -> tuple[int, int]:
        """Makes the folder; returns the bytes that all ranks will write and the free bytes, equal on all ranks: all of them write, or none."""
        free, failure = 0, None
        try:
            hidden.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(hidden).free
        except OSError as error:
            failure = error  # raised after the all-reduce, in which the other ranks wait
        sums = torch.tensor([own_bytes, free if self.is_main else 0])
        if self.group is not None:
            dist.all_reduce(sums, group=self.group)
        if failure is not None:
            raise failure
        needed, free = sums.tolist()
        return needed, free

    def _publish(self, hidden: Path, step: int, extra: dict[str, Any]) -> None:
        """Writes the manifest, then renames the folder, so that a crash never leaves an incomplete checkpoint under the final name."""
        files = {f.name: {"bytes": f.stat().st_size, "sha256": _hash(f)} for f in sorted(hidden.iterdir())}
        manifest: dict[str, Any] = {"format": FORMAT, "step": step, "files": files, "extra": extra}
        text = json.dumps(manifest | {"digest": _digest(json.loads(json.dumps(manifest)))}, indent=1)
        with open(hidden / MANIFEST, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(hidden)
        final = self.run.checkpoints / folder_name(step)
        if final.exists():  # a damaged one of the same step
            os.rename(final, self.run.checkpoints / f".old-{folder_name(step)}")
        self.reached("rename")
        os.rename(hidden, final)
        _sync_folder(self.run.checkpoints)
        shutil.rmtree(self.run.checkpoints / f".old-{folder_name(step)}", ignore_errors=True)

    def _delete_old(self, best: int | None) -> None:
        """Deletes the oldest checkpoints, except for the newest `keep` and the best."""
        steps = [s for s in self.run.checkpoint_steps() if s != best]
        for step in steps[: -self.keep]:
            path = self.run.checkpoints / folder_name(step)
            to_delete = self.run.checkpoints / f".gone-{folder_name(step)}"
            os.rename(path, to_delete)  # a published name must never belong to a partly deleted folder
            shutil.rmtree(to_delete, ignore_errors=True)


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _cause(error: BaseException) -> str:
    """Returns one line about a failed save. DCP's error holds the real errors of all ranks."""
    for failure in (error, *(getattr(error, "failures", None) or {}).values()):
        inner = failure[0] if isinstance(failure, tuple) else failure
        if isinstance(inner, OSError) and inner.errno:
            return "the disk is full" if inner.errno == errno.ENOSPC else f"{inner.strerror} ({inner.filename or ''})"
    text = str(error)
    if any(message in text for message in FULL_DISK_ERRORS):
        return "the disk is full"
    lines = [line for line in re.split(r"\n+", text) if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__
