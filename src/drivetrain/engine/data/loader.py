"""Map-style data sets, read by loader workers ahead of the step."""

from __future__ import annotations

import contextlib
import gc
import json
import mmap
import multiprocessing
import os
import signal
import struct
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate

from drivetrain.engine.data import signature
from drivetrain.engine.data.base import Micro, OrderedFeed, placed, tensors_in, to_device
from drivetrain.engine.data.rand import key, seed_everything
from drivetrain.engine.fast.graphs import uncapturable_kind
from drivetrain.outcomes import Problem
from drivetrain.plan import Plan
from drivetrain.runs import die_with_parent


class LoaderFeed(OrderedFeed):
    """A map-style data set, read by loader workers ahead of the step."""

    resident = False

    def __init__(self, data: Any, collate: Callable[[list[Any]], Any] | None, plan: Plan, stream: int, *order: Any, seed: int) -> None:
        super().__init__(len(data), *order)
        self.plan, self.workers = plan, plan.workers
        self._reading = _Reading()
        self._samples = _KeyedSamples(data, key(seed, stream), self._reading)
        self._collate = _Collate(collate or default_collate)
        self._batches: Iterator[Any] | None = None
        self._next = 0
        self._reopen = False
        self.waited = 0.0
        """Seconds that steps have waited for batches so far."""
        self._signed: dict[str, Any] | None = None
        self._signer: Connection | None = None
        """Where the signature of its samples comes from."""
        self._side = torch.cuda.Stream(self.group.device) if self.group.device.type == "cuda" else None

    def open(self, step: int) -> None:
        self.close()
        self._next, self._reopen = step, False
        workers = self.workers
        sign = self._sign(workers)
        loader: DataLoader[Any] = DataLoader(
            self._samples,  # type: ignore[arg-type]
            batch_sampler=_Schedule(self, step),
            num_workers=workers,
            collate_fn=self._collate,
            pin_memory=self.plan.pin_memory,
            prefetch_factor=self.plan.prefetch if workers else None,
            worker_init_fn=partial(_begin_worker, self._reading, sign) if workers else None,
            multiprocessing_context="fork" if workers else None,  # the data set need not be picklable
            generator=torch.Generator(),
        )
        before = signal.getsignal(signal.SIGCHLD)
        self._batches = iter(loader)
        if workers:
            _hear_of_deaths(before)

    # --- what the samples are ---

    def _sign(self, workers: int) -> Callable[[], None] | None:
        """Have the signature made where samples are read: here, or by the first loader worker, which gets what is given back."""
        if not self.signs or self._signed is not None:
            return None
        expected = (self.expected or {}).get("samples")
        make = partial(signature.of_samples, lambda index: self._samples[0, index], self.length, expected)
        if not workers:
            with contextlib.suppress(SampleError, Problem):  # which the training will meet, if it needs that sample
                self._learn_signature(make())
            return None
        self._signer, there = multiprocessing.Pipe(duplex=False)

        def send() -> None:
            with contextlib.suppress(SampleError, Problem, OSError):
                there.send_bytes(json.dumps(make()).encode())

        return send

    def _learn_signature(self, samples: dict[str, Any]) -> None:
        self._signed = samples
        self.compare()

    def _hear_signature(self) -> None:
        if self._signer is not None and self._signer.poll():
            with contextlib.suppress(EOFError, OSError):
                self._learn_signature(json.loads(self._signer.recv_bytes()))
            self._signer = None

    def signature(self) -> dict[str, Any]:
        return super().signature() | {"samples": self._signed}

    # --- batches ---

    def micro_batches(self, epoch: int, index: int) -> Iterator[Micro]:
        step = epoch * self.steps_per_epoch + index
        if self._batches is None or step != self._next or self._reopen:
            self.open(step)
        self._next = step + 1
        for ids, weight, position in self.spans(epoch, index):
            begun = time.perf_counter()
            batch = self._take()
            self.waited += time.perf_counter() - begun
            check_batch(batch, len(ids))
            self.moment("copy")
            yield Micro(self._arrive(batch), placed(ids, self.group.device), weight, position)

    def _take(self) -> Any:
        """The next batch. Raises LoaderDied where a loader worker has ended: it had no reason to."""
        global _waits
        assert self._batches is not None
        if not self.workers:
            return next(self._batches)
        try:
            _waits = self
            self.raise_death()
            batch = next(self._batches)
        except (SampleError, Problem, LoaderDied):
            raise
        except Exception:  # of a pipe or a handle whose other end is gone; the process itself is known to be so a moment later
            _waits = None
            deadline = time.monotonic() + DYING_SECONDS
            while time.monotonic() < deadline:
                self.raise_death()
                time.sleep(0.01)
            raise
        finally:
            _waits = None
        self._hear_signature()
        return batch

    def raise_death(self) -> None:
        """Raise LoaderDied where a loader worker has ended."""
        workers = getattr(self._batches, "_workers", ())
        for number, process in enumerate(workers):
            if (code := process.exitcode) is not None:
                for other in workers:
                    other.kill()  # else they tell at length that nobody listens any more
                sample = self._reading.sample(number)
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
                where = "" if sample is None else f" while it read sample {sample:,} of the data set"
                memory = f"\nIf memory ran out: lower plan.workers (now {self.workers}) or plan.prefetch"
                hint = memory if code in (-signal.SIGKILL, -signal.SIGBUS) else ""
                raise LoaderDied(f"loader worker {number} of rank {self.group.rank} (pid {process.pid}) {how}{where}{hint}")

    def _arrive(self, batch: Any) -> Any:
        """The batch on the device, copied beside the step that is still running there."""
        if self._side is None or uncapturable_kind(
            batch
        ):  # what is inside of other libraries' batches cannot be guarded on a second stream
            return to_device(batch, self.group.device)
        now = torch.cuda.current_stream()
        with torch.cuda.stream(self._side):
            moved = to_device(batch, self.group.device)
        now.wait_stream(self._side)
        for tensor in tensors_in(moved):
            tensor.record_stream(now)
        return moved

    def loading_seconds(self, limit: float = 0.25) -> float | None:
        """How long one process takes to make a micro-batch, measured on a few of its samples; in a process of its own,
        because files that a data set opens at its first read must not be shared with the workers to come."""
        context = multiprocessing.get_context("fork")
        here, there = context.Pipe(duplex=False)
        child = context.Process(target=self._load_some, args=(limit, there), daemon=True)
        child.start()
        there.close()
        try:
            return float(here.recv()) if here.poll(20 * limit) else None
        except EOFError:
            return None
        finally:
            child.kill()
            child.join()

    def _load_some(self, limit: float, answer: Any) -> None:
        _begin_worker(_Reading(), None, 0)
        torch.set_num_threads(1)
        wanted = min(self.micro, self.length)
        self._samples[0, 0]  # what is read for the first time is slow
        samples: list[Any] = []
        begun = time.perf_counter()
        while len(samples) < wanted and (not samples or time.perf_counter() - begun < limit):
            samples.append(self._samples[0, len(samples)])
        self._collate(samples)
        answer.send((time.perf_counter() - begun) / len(samples) * wanted)

    def use(self, workers: int) -> None:
        """Go on with another number of workers from the next step on; what they load stays the same."""
        self.workers, self._reopen = workers, workers != self.workers

    def cut(self, micro: int) -> None:
        super().cut(micro)
        self.close()  # what workers hold ready is cut the old way
        self._reopen = True

    def close(self) -> None:
        self._batches = self._signer = None


def check_batch(batch: Any, samples: int) -> None:
    """A batch without anything in it can only come of a collate() that forgot to return it, or dropped all samples."""
    if batch is None:
        raise Problem("collate(samples) gave None: return the batch")
    tensors = tensors_in(batch)
    if tensors and all(tensor.dim() and not len(tensor) for tensor in tensors):
        raise Problem(f"collate(samples) gave an empty batch for {samples} samples: drop samples in the data set, where they are counted")


class _Schedule:
    """The sampler of a loader: (epoch, sample) pairs of every micro-batch from a step on, without end."""

    def __init__(self, feed: LoaderFeed, step: int) -> None:
        self.feed, self.step = feed, step

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        step = self.step
        while True:
            epoch, index = divmod(step, self.feed.steps_per_epoch)
            for ids, _, _ in self.feed.spans(epoch, index):
                yield [(epoch, i) for i in ids.tolist()]
            step += 1


# --- loader workers that end ---

DYING_SECONDS = 2.0  # from a loader worker's last word to its end
_waits: LoaderFeed | None = None
"""The feed that waits for a batch now."""


class LoaderDied(Exception):
    """A loader worker ended, which one and how; the text is for the user."""


class _Reading:
    """Which sample each loader worker reads, in memory that it shares with the rank."""

    ROOM = struct.Struct("<q")

    def __init__(self) -> None:
        self._page = mmap.mmap(-1, 4 * mmap.PAGESIZE)
        self.number: int | None = None
        """Of the loader worker that this process is."""

    def note(self, sample: int | None) -> None:
        if self.number is not None and self.number < len(self._page) // self.ROOM.size:
            self.ROOM.pack_into(self._page, self.number * self.ROOM.size, 0 if sample is None else sample + 1)

    def sample(self, number: int) -> int | None:
        known = number < len(self._page) // self.ROOM.size
        [value] = self.ROOM.unpack_from(self._page, number * self.ROOM.size) if known else (0,)
        return value - 1 if value else None


def _hear_of_deaths(before: Any) -> None:
    """From now on a loader worker's end interrupts the wait for a batch, and nothing else. (torch's own handler raises its
    error wherever the main thread is, inside of the user's code too.)"""
    if threading.current_thread() is not threading.main_thread() or getattr(before, "of_loaders", False):
        return  # elsewhere torch looks every few seconds
    users = before if callable(before) and "torch.utils.data" not in str(getattr(before, "__module__", "")) else None

    def ended(number: int, frame: FrameType | None) -> None:
        if _waits is not None:
            _waits.raise_death()
        if users is not None:
            users(number, frame)

    ended.of_loaders = True  # type: ignore[attr-defined]
    signal.signal(signal.SIGCHLD, ended)


class SampleError(Exception):
    """A data set could not give a sample, or collate a batch; the text holds the user's frames."""


def _failed(what: str, error: Exception) -> SampleError:
    frames = traceback.extract_tb(error.__traceback__)[1:]
    own = [f for f in frames if not f.filename.startswith(os.path.dirname(torch.__file__))]
    text = "".join(traceback.format_list(own)) + "".join(traceback.format_exception_only(error))
    return SampleError(f"{what} failed:\n{text.rstrip()}")


class _Collate:
    def __init__(self, function: Callable[[list[Any]], Any]) -> None:
        self.function = function

    def __call__(self, samples: list[Any]) -> Any:
        try:
            return self.function(samples)
        except Exception as error:
            raise _failed("collating the data set's samples to a batch", error) from None


class _KeyedSamples:
    """A data set whose every read first seeds the usual generators from (seed, epoch, sample)."""

    def __init__(self, data: Any, base: int, reading: _Reading) -> None:
        self.data, self.base, self.reading = data, base, reading

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, place: tuple[int, int]) -> Any:
        epoch, index = place
        seed_everything(key(self.base, epoch, index))
        self.reading.note(index)
        try:
            sample = self.data[index]
        except Problem:
            raise
        except Exception as error:
            raise _failed(f"sample {index} of the data set", error) from None
        self.reading.note(None)
        return sample


def _begin_worker(reading: _Reading, sign: Callable[[], None] | None, number: int) -> None:
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        die_with_parent(parent.pid)  # forked from the rank itself
    gc.freeze()  # what the rank holds, graphs of a GPU among it, is not this process's to free
    for kind in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(kind, signal.SIG_IGN)  # the rank decides when to stop
    reading.number = number
    if sign is not None and number == 0:
        sign()
