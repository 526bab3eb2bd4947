"""Map-style data sets, read by loader workers ahead of the step."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate

from drivetrain.engine.capture import opaque
from drivetrain.engine.feed import Micro, OrderedFeed, placed, tensors_in, to_device
from drivetrain.engine.rand import key, seed_everything
from drivetrain.outcomes import Problem
from drivetrain.plan import Plan
from drivetrain.runs import die_with_parent


class LoaderFeed(OrderedFeed):
    """A map-style data set, read by loader workers ahead of the step."""

    resident = False

    def __init__(self, data: Any, collate: Callable[[list[Any]], Any] | None, plan: Plan, stream: int, *order: Any, seed: int) -> None:
        super().__init__(len(data), *order)
        self.plan, self.workers = plan, plan.workers
        self._samples = _KeyedSamples(data, key(seed, stream))
        self._collate = _Collate(collate or default_collate)
        self._batches: Iterator[Any] | None = None
        self._next = 0
        self._reopen = False
        self.waited = 0.0
        """Seconds that steps have waited for batches so far."""
        self._side = torch.cuda.Stream(self.group.device) if self.group.device.type == "cuda" else None

    def open(self, step: int) -> None:
        self.close()
        self._next, self._reopen = step, False
        workers = self.workers
        loader: DataLoader[Any] = DataLoader(
            self._samples,  # type: ignore[arg-type]
            batch_sampler=_Schedule(self, step),
            num_workers=workers,
            collate_fn=self._collate,
            pin_memory=self.plan.pin_memory,
            prefetch_factor=self.plan.prefetch if workers else None,
            worker_init_fn=_begin_worker if workers else None,
            multiprocessing_context="fork" if workers else None,  # the data set need not be picklable
            generator=torch.Generator(),
        )
        self._batches = iter(loader)

    def micro_batches(self, epoch: int, index: int) -> Iterator[Micro]:
        step = epoch * self.steps_per_epoch + index
        if self._batches is None or step != self._next or self._reopen:
            self.open(step)
        assert self._batches is not None
        self._next = step + 1
        for ids, weight, position in self.spans(epoch, index):
            begun = time.perf_counter()
            batch = next(self._batches)
            self.waited += time.perf_counter() - begun
            self.moment("copy")
            yield Micro(self._arrive(batch), placed(ids, self.group.device), weight, position)

    def _arrive(self, batch: Any) -> Any:
        """The batch on the device, copied beside the step that is still running there."""
        if self._side is None or opaque(batch):  # what is inside of other libraries' batches cannot be guarded on a second stream
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
        _begin_worker(0)
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
        self._batches = None


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

    def __init__(self, data: Any, base: int) -> None:
        self.data, self.base = data, base

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, place: tuple[int, int]) -> Any:
        epoch, index = place
        seed_everything(key(self.base, epoch, index))
        try:
            return self.data[index]
        except Problem:
            raise
        except Exception as error:
            raise _failed(f"sample {index} of the data set", error) from None


def _begin_worker(_: int) -> None:
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        die_with_parent(parent.pid)  # forked from the rank itself
    gc.freeze()  # what the rank holds, graphs of a GPU among it, is not this process's to free
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # the rank decides when to stop
