"""Random numbers that are a pure function of (seed, epoch, sample), never of rank, loader worker or micro-batch.

A counter-based generator: splitmix64 turns the parts into one 64-bit key, and mixes (key, sample number, column) into a
number. A CPU and a GPU draw equal numbers.
"""

from __future__ import annotations

import math
import random
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

# The constants of splitmix64.
_MASK = (1 << 64) - 1
_GOLDEN, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

MAX_TABLE_NUMBERS = 1 << 24
"""The most random numbers that are drawn for an epoch at once."""


class RandomStream(IntEnum):
    """The use of random numbers. It is part of their key, so that numbers of different uses are independent."""

    TRAIN = 1
    EVAL = 2
    ORDER = 3
    GROUP = 4
    """The groups of a Source."""


def key(*parts: int, after: int = 0) -> int:
    """Mixes integers into one 64-bit key; `after` is the key of earlier parts, to which these are added."""
    state = after
    for part in parts:
        state = (state ^ (part & _MASK)) + _GOLDEN & _MASK
        state = (state ^ (state >> 30)) * _MIX1 & _MASK
        state = (state ^ (state >> 27)) * _MIX2 & _MASK
        state ^= state >> 31
    return state


# --- seeding the usual generators ---


def model_generator(device: torch.device) -> torch.Generator:
    """Returns the generator that dropout draws from; seeding it directly is far cheaper than torch.manual_seed."""
    return torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator


def seed_model(device: torch.device, value: int) -> None:
    model_generator(device).manual_seed(value)


def seed_host(value: int) -> None:
    """Seeds Python's and numpy's generators."""
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)


def seed_everything(value: int) -> None:
    """Seeds Python's, numpy's and torch's CPU generators, as the code of a data set uses them."""
    seed_host(value)
    torch.default_generator.manual_seed(value)


class HostRandom:
    """Seeds the host's generators (Python's, numpy's, and on a GPU torch's CPU generator), for tasks that draw from them.

    Seeding them for every micro-batch costs as much as the rest of a small step, so it stops where a check finds that the
    task's loss and model leave them unchanged.
    """

    def __init__(self, device: torch.device) -> None:
        self._with_torch = device.type != "cpu"  # on a CPU the model itself draws from torch's generator, which is always seeded
        self.is_used = True
        """Whether the task draws from the host's generators; True until the first step has shown it."""
        self._is_first_step = True
        self._state_before: object = None

    def begin(self, seed: int, check: bool) -> None:
        """Seeds the generators before a micro-batch's forward pass; with `check`, it watches whether they are used."""
        if self.is_used:
            seed_host(seed)
            if self._with_torch:
                torch.default_generator.manual_seed(seed)
        if self._is_first_step or (check and not self.is_used):
            self._state_before = host_generator_state(self._with_torch)

    def end(self) -> None:
        """Finishes a check after the last micro-batch of a step."""
        if self._state_before is not None:
            self.is_used = self._state_before != host_generator_state(self._with_torch)
            self._is_first_step, self._state_before = False, None


def host_generator_state(with_torch: bool) -> object:
    """Returns the state of the host's generators; two states are equal if nothing was drawn between them."""
    _, words, position, *rest = np.random.get_state()
    torch_state = torch.default_generator.get_state().numpy().tobytes() if with_torch else b""
    return random.getstate(), words[0], position, rest, torch_state


def permutation(length: int, *parts: int) -> Tensor:
    """Returns a random order of `length` samples; `parts` key it."""
    generator = torch.Generator()
    generator.manual_seed(key(*parts))
    return torch.randperm(length, generator=generator)


# --- numbers keyed by sample ---


class KeyedRand:
    """Draws `uniform` and `normal` numbers keyed by sample number; each call draws from a separate stream."""

    def __init__(self, ids: Tensor, *parts: int) -> None:
        self.ids = ids
        self._parts = parts
        self._num_calls = 0

    def __len__(self) -> int:
        return len(self.ids)

    def uniform(self, k: int = 1) -> Tensor:
        self._num_calls += 1
        return _uniform(self.ids, k, key(*self._parts, self._num_calls))

    def normal(self, k: int = 1) -> Tensor:
        return _to_normal(self.uniform(2 * k))


class EpochRand:
    """The keyed random numbers of all samples of a data set, epoch by epoch.

    Up to `max_table_numbers` are drawn for all samples of an epoch at once, and a step selects its rows with one kernel.
    Tables and keys stay in the same memory, where a captured step also reads the numbers of later epochs.
    """

    def __init__(self, length: int, device: torch.device, seed: int, stream: int, max_table_numbers: int = MAX_TABLE_NUMBERS) -> None:
        self.length, self.device, self.seed, self.stream = length, device, seed, stream
        self._epoch = -1
        self._tables: dict[tuple[int, int, bool], Tensor] = {}
        self._device_keys: dict[int, Tensor] = {}
        self._free_numbers = max_table_numbers

    def begin_epoch(self, epoch: int) -> None:
        """Draws the tables and keys of an epoch."""
        if epoch == self._epoch:
            return
        self._epoch = epoch
        for (call, k, normal), table in self._tables.items():
            table.copy_(self._draw_table(call, k, normal))
        for call, device_key in self._device_keys.items():
            device_key.fill_(to_int64(self._key(call)))

    def for_samples(self, ids: Tensor) -> BatchRand:
        """Returns the numbers of one batch's samples."""
        return BatchRand(ids, self)

    def numbers(self, ids: Tensor, call: int, k: int, normal: bool) -> Tensor:
        """Returns `k` numbers for each sample, in the stream of the batch's n-th call."""
        table = self._tables.get((call, k, normal))
        if table is None and self._free_numbers >= self.length * k:
            self._free_numbers -= self.length * k
            table = self._tables[call, k, normal] = self._draw_table(call, k, normal)
        if table is not None:
            return table.index_select(0, ids)
        if self.device.type == "cpu":
            drawn = _uniform(ids, k * (1 + normal), self._key(call))
        else:
            if call not in self._device_keys:
                self._device_keys[call] = torch.tensor(to_int64(self._key(call)), device=self.device)
            drawn = _uniform(ids, k * (1 + normal), self._device_keys[call])
        return _to_normal(drawn) if normal else drawn

    def _draw_table(self, call: int, k: int, normal: bool) -> Tensor:
        drawn = _uniform(torch.arange(self.length, device=self.device), k * (1 + normal), self._key(call))
        return _to_normal(drawn) if normal else drawn

    def _key(self, call: int) -> int:
        return key(self.seed, self._epoch, self.stream, call)


class BatchRand:
    """The `rand` of `augment`: the random numbers of one batch's samples; each call draws from a separate stream."""

    def __init__(self, ids: Tensor, epoch_rand: EpochRand) -> None:
        self.ids = ids
        self._epoch_rand = epoch_rand
        self._num_calls = 0

    def __len__(self) -> int:
        return len(self.ids)

    def uniform(self, k: int = 1) -> Tensor:
        self._num_calls += 1
        return self._epoch_rand.numbers(self.ids, self._num_calls, k, False)

    def normal(self, k: int = 1) -> Tensor:
        self._num_calls += 1
        return self._epoch_rand.numbers(self.ids, self._num_calls, k, True)


# --- the generator ---


def _to_normal(uniform: Tensor) -> Tensor:
    """Turns [n, 2k] uniform numbers into [n, k] normal ones (Box-Muller)."""
    k = uniform.shape[1] // 2
    radius = torch.sqrt(-2.0 * torch.log1p(-uniform[:, :k]))
    return radius * torch.cos(2.0 * math.pi * uniform[:, k:])


def _uniform(ids: Tensor, k: int, stream_key: int | Tensor) -> Tensor:
    """Draws [samples, k] numbers in [0, 1), by numpy on a CPU and by torch on a GPU: both compute the same splitmix64."""
    if ids.device.type == "cpu":
        with np.errstate(over="ignore"):
            h = ids.numpy().astype(np.uint64)[:, None] * np.uint64(_MIX2) + np.arange(k, dtype=np.uint64) * np.uint64(_GOLDEN)
            h += np.uint64(int(stream_key))
            for shift, factor in ((30, _MIX1), (27, _MIX2)):
                h ^= h >> np.uint64(shift)
                h *= np.uint64(factor)
            h ^= h >> np.uint64(31)
        return torch.from_numpy((h >> np.uint64(40)).astype(np.float32) * np.float32(2**-24))
    x = ids[:, None] * to_int64(_MIX2) + torch.arange(k, device=ids.device) * to_int64(_GOLDEN)
    x = x + (to_int64(stream_key) if isinstance(stream_key, int) else stream_key)
    for shift, factor in ((30, _MIX1), (27, _MIX2)):
        x = (x ^ _logical_shift_right(x, shift)) * to_int64(factor)
    return _logical_shift_right(x ^ _logical_shift_right(x, 31), 40).float() * 2**-24


def to_int64(value: int) -> int:
    """Returns the signed integer with the same 64 bits."""
    return value - (1 << 64) if value >= 1 << 63 else value


def _logical_shift_right(x: Tensor, bits: int) -> Tensor:
    """Shifts in zeros; torch's own shift of int64 copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
