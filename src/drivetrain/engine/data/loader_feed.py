"""Feed of a map-style data set: loader workers read the samples ahead of the step."""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate

from drivetrain.engine.data import signature
from drivetrain.engine.data.batches import batch_to_device, tensor_to_device, tensors_in
from drivetrain.engine.data.feed import MicroBatch, OrderedFeed
from drivetrain.engine.data.keyed_random import key
from drivetrain.engine.data.loader_workers import (
    Collate,
    CurrentSamples,
    KeyedSamples,
    LoaderDied,
    SampleError,
    interrupt_wait_on_death,
    start_loader_worker,
    waiting_for_batch,
)
from drivetrain.engine.fast.graphs import uncapturable_kind
from drivetrain.outcomes import Problem
from drivetrain.plan import Plan

DEATH_TIMEOUT_SECONDS = 2.0
"""How long to wait for a loader worker's exit code after its pipe has failed."""


class LoaderFeed(OrderedFeed):
    """Reads a map-style data set with loader workers."""

    is_resident = False

    def __init__(self, data: Any, collate: Callable[[list[Any]], Any] | None, plan: Plan, stream: int, *order: Any, seed: int) -> None:
        super().__init__(len(data), *order)
        self.plan, self.num_workers = plan, plan.workers
        self._current_samples = CurrentSamples()
        self._samples = KeyedSamples(data, key(seed, stream), self._current_samples)
        self._collate = Collate(collate or default_collate)
        self._batches: Iterator[Any] | None = None
        self._next_step = 0
        self._must_reopen = False
        self.wait_seconds = 0.0
        """How long steps have waited for batches so far."""
        self._sample_digests: dict[str, Any] | None = None
        self._digests_pipe: Connection | None = None
        """Where a loader worker sends the digests of samples."""
        self._copy_stream = torch.cuda.Stream(self.group.device) if self.group.device.type == "cuda" else None

    def open(self, step: int) -> None:
        self.close()
        self._next_step, self._must_reopen = step, False
        workers = self.num_workers
        sign = self._start_signature(workers)
        loader: DataLoader[Any] = DataLoader(
            self._samples,  # type: ignore[arg-type]
            batch_sampler=_MicroBatchSampler(self, step),
            num_workers=workers,
            collate_fn=self._collate,
            pin_memory=self.plan.pin_memory,
            prefetch_factor=self.plan.prefetch if workers else None,
            worker_init_fn=partial(start_loader_worker, self._current_samples, sign) if workers else None,
            multiprocessing_context="fork" if workers else None,  # the data set need not be picklable
            generator=torch.Generator(),
        )
        handler = signal.getsignal(signal.SIGCHLD)
        if workers and torch.cuda.is_initialized():
            gc.collect()  # a forked worker that collected an earlier training's graphs or events would call CUDA, and abort
        self._batches = iter(loader)
        if workers:
            interrupt_wait_on_death(handler)

    # --- signature ---

    def _start_signature(self, workers: int) -> Callable[[], None] | None:
        """Makes the signature of the samples here, or returns a function that makes it in the first loader worker."""
        if not self.records_signature or self._sample_digests is not None:
            return None
        expected = (self.expected_signature or {}).get("samples")
        make = partial(signature.of_samples, lambda index: self._samples[0, index], self.length, expected)
        if not workers:
            with contextlib.suppress(SampleError, Problem):  # a step that needs this sample will raise the error
                self._set_signature(make())
            return None
        self._digests_pipe, worker_end = multiprocessing.Pipe(duplex=False)

        def send() -> None:
            with contextlib.suppress(SampleError, Problem, OSError):
                worker_end.send_bytes(json.dumps(make()).encode())

        return send

    def _set_signature(self, digests: dict[str, Any]) -> None:
        self._sample_digests = digests
        self.check_signature()

    def _receive_signature(self) -> None:
        if self._digests_pipe is not None and self._digests_pipe.poll():
            with contextlib.suppress(EOFError, OSError):
                self._set_signature(json.loads(self._digests_pipe.recv_bytes()))
            self._digests_pipe = None

    def signature(self) -> dict[str, Any]:
        return super().signature() | {"samples": self._sample_digests}

    # --- batches ---

    def micro_batches(self, epoch: int, index: int) -> Iterator[MicroBatch]:
        step = epoch * self.steps_per_epoch + index
        if self._batches is None or step != self._next_step or self._must_reopen:
            self.open(step)
        self._next_step = step + 1
        for ids, num_real, position in self.spans(epoch, index):
            begin = time.perf_counter()
            batch = self._next_batch()
            self.wait_seconds += time.perf_counter() - begin
            check_batch(batch, len(ids))
            self.reached("copy")
            yield MicroBatch(self._copy_to_device(batch), tensor_to_device(ids, self.group.device), num_real, position)

    def _next_batch(self) -> Any:
        """Returns the next batch; raises LoaderDied if a loader worker has ended, which is always a fault."""
        assert self._batches is not None
        if not self.num_workers:
            return next(self._batches)
        try:
            with waiting_for_batch(self.raise_death):
                self.raise_death()
                batch = next(self._batches)
        except (SampleError, Problem, LoaderDied):
            raise
        except Exception:  # a pipe or handle lost its other end; the worker's exit code becomes known a moment later
            deadline = time.monotonic() + DEATH_TIMEOUT_SECONDS
            while time.monotonic() < deadline:
                self.raise_death()
                time.sleep(0.01)
            raise
        self._receive_signature()
        return batch

    def raise_death(self) -> None:
        """Raises LoaderDied where a loader worker has ended."""
        processes = getattr(self._batches, "_workers", ())
        for number, process in enumerate(processes):
            if (code := process.exitcode) is not None:
                for other in processes:
                    other.kill()  # else each prints a long error, as its pipe has no reader any more
                sample = self._current_samples.read(number)
                end = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
                during = "" if sample is None else f" while it read sample {sample:,} of the data set"
                memory = f"\nIf memory ran out: lower plan.workers (now {self.num_workers}) or plan.prefetch"
                hint = memory if code in (-signal.SIGKILL, -signal.SIGBUS) else ""
                raise LoaderDied(f"loader worker {number} of rank {self.group.rank} (pid {process.pid}) {end}{during}{hint}")

    def _copy_to_device(self, batch: Any) -> Any:
        """Copies a batch on a separate stream, while the step before it still runs."""
        # Tensors inside other libraries' batch objects cannot be recorded on a second stream.
        if self._copy_stream is None or uncapturable_kind(batch):
            return batch_to_device(batch, self.group.device)
        step_stream = torch.cuda.current_stream()
        with torch.cuda.stream(self._copy_stream):
            copied = batch_to_device(batch, self.group.device)
        step_stream.wait_stream(self._copy_stream)
        for tensor in tensors_in(copied):
            tensor.record_stream(step_stream)
        return copied

    # --- loader workers ---

    def measure_loading_seconds(self, limit_seconds: float = 0.25) -> float | None:
        """Returns how long one process takes to load a micro-batch, measured on a few samples; None where that fails.

        It runs in a child process: files that a data set opens at its first read must not be shared with later workers.
        """
        context = multiprocessing.get_context("fork")
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=self._time_loading, args=(limit_seconds, sender), daemon=True)
        child.start()
        sender.close()
        try:
            return float(receiver.recv()) if receiver.poll(20 * limit_seconds) else None
        except EOFError:
            return None
        finally:
            child.kill()
            child.join()

    def _time_loading(self, limit_seconds: float, sender: Any) -> None:
        start_loader_worker(CurrentSamples(), None, 0)
        torch.set_num_threads(1)
        micro_batch = min(self.micro, self.length)
        self._samples[0, 0]  # not timed, because the first read is slow
        samples: list[Any] = []
        start = time.perf_counter()
        while len(samples) < micro_batch and (not samples or time.perf_counter() - start < limit_seconds):
            samples.append(self._samples[0, len(samples)])
        self._collate(samples)
        sender.send((time.perf_counter() - start) / len(samples) * micro_batch)

    def set_num_workers(self, workers: int) -> None:
        """Uses another number of loader workers from the next step on; the batches stay the same."""
        self.num_workers, self._must_reopen = workers, workers != self.num_workers

    def set_micro_batch(self, size: int) -> None:
        super().set_micro_batch(size)
        self.close()  # prefetched batches have the old size
        self._must_reopen = True

    def close(self) -> None:
        self._batches = self._digests_pipe = None


def check_batch(batch: Any, num_samples: int) -> None:
    """Refuses an empty batch: `collate` forgot to return it, or dropped all samples."""
    if batch is None:
        raise Problem("collate(samples) gave None: return the batch")
    tensors = tensors_in(batch)
    if tensors and all(tensor.dim() and not len(tensor) for tensor in tensors):
        raise Problem(
            f"collate(samples) gave an empty batch for {num_samples} samples: drop samples in the data set, where they are counted"
        )


class _MicroBatchSampler:
    """Yields the (epoch, sample) pairs of every micro-batch from a step on; it never ends."""

    def __init__(self, feed: LoaderFeed, step: int) -> None:
        self.feed, self.step = feed, step

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        step = self.step
        while True:
            epoch, index = divmod(step, self.feed.steps_per_epoch)
            for ids, _, _ in self.feed.spans(epoch, index):
                yield [(epoch, i) for i in ids.tolist()]
            step += 1
