"""Code of loader workers: seeds each sample, reports errors with the user's frames, and detects workers that died."""

from __future__ import annotations

import gc
import mmap
import multiprocessing
import os
import signal
import struct
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

from drivetrain.engine.data.keyed_random import key, seed_everything
from drivetrain.outcomes import Problem
from drivetrain.runs import die_with_parent


class LoaderDied(Exception):
    """A loader worker ended; the text tells the user which one and how."""


class SampleError(Exception):
    """A data set could not return a sample, or collate a batch; the text holds the user's frames."""


def _sample_error(failed: str, error: Exception) -> SampleError:
    frames = traceback.extract_tb(error.__traceback__)[1:]
    user_frames = [f for f in frames if not f.filename.startswith(os.path.dirname(torch.__file__))]
    text = "".join(traceback.format_list(user_frames)) + "".join(traceback.format_exception_only(error))
    return SampleError(f"{failed} failed:\n{text.rstrip()}")


class Collate:
    """Calls the task's `collate`; its errors become SampleError."""

    def __init__(self, function: Callable[[list[Any]], Any]) -> None:
        self.function = function

    def __call__(self, samples: list[Any]) -> Any:
        try:
            return self.function(samples)
        except Exception as error:
            raise _sample_error("collating the data set's samples to a batch", error) from None


class CurrentSamples:
    """Records which sample each loader worker reads at this moment, in memory that is shared with the rank."""

    ENTRY = struct.Struct("<q")

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 4 * mmap.PAGESIZE)
        self.number: int | None = None
        """The number of this loader worker; None in the rank."""

    def write(self, sample: int | None) -> None:
        """Records the sample that this loader worker begins to read; None once it is read."""
        if self.number is not None and self._has_entry(self.number):
            self.ENTRY.pack_into(self._memory, self.number * self.ENTRY.size, 0 if sample is None else sample + 1)

    def read(self, number: int) -> int | None:
        """Returns the sample that a loader worker was reading."""
        [value] = self.ENTRY.unpack_from(self._memory, number * self.ENTRY.size) if self._has_entry(number) else (0,)
        return value - 1 if value else None

    def _has_entry(self, number: int) -> bool:
        return number < len(self._memory) // self.ENTRY.size


class KeyedSamples:
    """A data set that seeds Python's, numpy's and torch's generators from (seed, epoch, sample) before every read."""

    def __init__(self, data: Any, base_key: int, current_samples: CurrentSamples) -> None:
        self.data, self.base_key, self.current_samples = data, base_key, current_samples

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, epoch_and_index: tuple[int, int]) -> Any:
        epoch, index = epoch_and_index
        seed_everything(key(self.base_key, epoch, index))
        self.current_samples.write(index)
        try:
            sample = self.data[index]
        except Problem:
            raise
        except Exception as error:
            raise _sample_error(f"sample {index} of the data set", error) from None
        self.current_samples.write(None)
        return sample


def start_loader_worker(current_samples: CurrentSamples, sign: Callable[[], None] | None, number: int) -> None:
    """Prepares a loader worker; the first one also makes the signature of the data."""
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        die_with_parent(parent.pid)  # the parent is the rank itself
    gc.freeze()  # objects of the rank, CUDA graphs among them, must not be freed in this process
    for kind in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(kind, signal.SIG_IGN)  # the rank decides when to stop
    current_samples.number = number
    if sign is not None and number == 0:
        sign()


# --- loader workers that die ---

_raise_death: Callable[[], None] | None = None
"""The check of the feed that waits for a batch now."""


@contextmanager
def waiting_for_batch(raise_death: Callable[[], None]) -> Iterator[None]:
    """A context in which the death of a loader worker calls `raise_death`."""
    global _raise_death
    _raise_death = raise_death
    try:
        yield
    finally:
        _raise_death = None


def interrupt_wait_on_death(previous_handler: Any) -> None:
    """Makes the death of a loader worker interrupt the wait for a batch, and nothing else.

    torch's own handler raises its error wherever the main thread is, even inside the user's code.
    """
    if threading.current_thread() is not threading.main_thread() or getattr(previous_handler, "is_of_loaders", False):
        return  # in other threads torch itself checks every few seconds
    is_torchs_handler = "torch.utils.data" in str(getattr(previous_handler, "__module__", ""))
    users_handler = previous_handler if callable(previous_handler) and not is_torchs_handler else None

    def on_child_exit(number: int, frame: FrameType | None) -> None:
        if _raise_death is not None:
            _raise_death()
        if users_handler is not None:
            users_handler(number, frame)

    on_child_exit.is_of_loaders = True  # type: ignore[attr-defined]
    signal.signal(signal.SIGCHLD, on_child_exit)
