"""Keyed randomness: numbers that are a pure function of (seed, epoch, sample), never of rank or worker."""

from __future__ import annotations

import math
import random

import numpy as np
import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_GOLDEN, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def key(*parts: int, after: int = 0) -> int:
    """Mix whole numbers into one 64-bit key (splitmix64 over the parts); `after` the key of those that come before."""
    state = after
    for part in parts:
        state = (state ^ (part & _MASK)) + _GOLDEN & _MASK
        state = (state ^ (state >> 30)) * _MIX1 & _MASK
        state = (state ^ (state >> 27)) * _MIX2 & _MASK
        state ^= state >> 31
    return state


def generator_of(device: torch.device) -> torch.Generator:
    """The generator that dropout draws from; to seed it by itself is far cheaper than torch.manual_seed."""
    return torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator


def seed_model(device: torch.device, value: int) -> None:
    generator_of(device).manual_seed(value)


def seed_host(value: int) -> None:
    """Seed Python's and numpy's generators."""
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)


def seed_everything(value: int) -> None:
    """Seed Python's, numpy's and torch's generators, as user code in a data set uses them."""
    seed_host(value)
    torch.default_generator.manual_seed(value)


class HostRandom:
    """Whether a task's loss or model draws from the host's generators: Python's, numpy's, and on a GPU torch's own for
    the CPU. Seeding them for every micro-batch costs as much as all else in a small step, so it is done only for
    tasks that need it."""

    def __init__(self, device: torch.device) -> None:
        self._torchs = device.type != "cpu"  # on a CPU the model's own randomness comes from it, and is seeded anyway
        self.used = True  # until the first step has shown otherwise
        self._first = True
        self._mark: object = None

    def begin(self, seed: int, check: bool) -> None:
        """Before a micro-batch's forward pass."""
        if self.used:
            seed_host(seed)
            if self._torchs:
                torch.default_generator.manual_seed(seed)
        if self._first or (check and not self.used):
            self._mark = host_state(self._torchs)

    def end(self) -> None:
        """After the last micro-batch of a step."""
        if self._mark is not None:
            self.used, self._first, self._mark = self._mark != host_state(self._torchs), False, None


def host_state(torchs: bool) -> object:
    _, words, position, *rest = np.random.get_state()
    return random.getstate(), words[0], position, rest, torch.default_generator.get_state().numpy().tobytes() if torchs else b""


def permutation(length: int, *parts: int) -> Tensor:
    generator = torch.Generator()
    generator.manual_seed(key(*parts))
    return torch.randperm(length, generator=generator)


class KeyedRand:
    """`uniform` and `normal` numbers for a set of sample ids; each call is a stream of its own."""

    def __init__(self, ids: Tensor, *parts: int) -> None:
        self.ids = ids
        self._parts = parts
        self._calls = 0

    def __len__(self) -> int:
        return len(self.ids)

    def uniform(self, k: int = 1) -> Tensor:
        self._calls += 1
        return _uniform(self.ids, k, key(*self._parts, self._calls))

    def normal(self, k: int = 1) -> Tensor:
        return _normal(self.uniform(2 * k))


TABLE = 1 << 24  # numbers that are drawn for a whole epoch at once


class Draws:
    """The keyed numbers of all samples of a data set, epoch by epoch.

    Numbers are drawn for the whole epoch at once as far as there is room: a step then looks its
    rows up with one kernel. They stay at their place in memory, where a captured step finds the next epoch's.
    """

    def __init__(self, length: int, device: torch.device, seed: int, stream: int, room: int = TABLE) -> None:
        self.length, self.device, self.seed, self.stream = length, device, seed, stream
        self._epoch = -1
        self._tables: dict[tuple[int, int, bool], Tensor] = {}
        self._streams: dict[int, Tensor] = {}
        self._room = room

    def begin(self, epoch: int) -> None:
        """Move on to an epoch."""
        if epoch == self._epoch:
            return
        self._epoch = epoch
        for (call, k, normal), table in self._tables.items():
            table.copy_(self._draw(call, k, normal))
        for call, stream in self._streams.items():
            stream.fill_(signed(self._key(call)))

    def of(self, ids: Tensor) -> BatchRand:
        return BatchRand(ids, self)

    def look_up(self, ids: Tensor, call: int, k: int, normal: bool) -> Tensor:
        table = self._tables.get((call, k, normal))
        if table is None and self._room >= self.length * k:
            self._room -= self.length * k
            table = self._tables[call, k, normal] = self._draw(call, k, normal)
        if table is not None:
            return table.index_select(0, ids)
        if self.device.type == "cpu":
            drawn = _uniform(ids, k * (1 + normal), self._key(call))
        else:
            if call not in self._streams:
                self._streams[call] = torch.tensor(signed(self._key(call)), device=self.device)
            drawn = _uniform(ids, k * (1 + normal), self._streams[call])
        return _normal(drawn) if normal else drawn

    def _draw(self, call: int, k: int, normal: bool) -> Tensor:
        drawn = _uniform(torch.arange(self.length, device=self.device), k * (1 + normal), self._key(call))
        return _normal(drawn) if normal else drawn

    def _key(self, call: int) -> int:
        return key(self.seed, self._epoch, self.stream, call)


class BatchRand:
    """What `augment` gets: the numbers of one batch's samples; each call is a stream of its own."""

    def __init__(self, ids: Tensor, draws: Draws) -> None:
        self.ids = ids
        self._draws = draws
        self._calls = 0

    def __len__(self) -> int:
        return len(self.ids)

    def uniform(self, k: int = 1) -> Tensor:
        self._calls += 1
        return self._draws.look_up(self.ids, self._calls, k, False)

    def normal(self, k: int = 1) -> Tensor:
        self._calls += 1
        return self._draws.look_up(self.ids, self._calls, k, True)


def _normal(uniform: Tensor) -> Tensor:
    k = uniform.shape[1] // 2
    radius = torch.sqrt(-2.0 * torch.log1p(-uniform[:, :k]))
    return radius * torch.cos(2.0 * math.pi * uniform[:, k:])


def _uniform(ids: Tensor, k: int, stream: int | Tensor) -> Tensor:
    """The same splitmix64 on both paths, so that a CPU and a GPU draw equal numbers."""
    if ids.device.type == "cpu":
        with np.errstate(over="ignore"):
            h = ids.numpy().astype(np.uint64)[:, None] * np.uint64(_MIX2) + np.arange(k, dtype=np.uint64) * np.uint64(_GOLDEN)
            h += np.uint64(int(stream))
            for shift, factor in ((30, _MIX1), (27, _MIX2)):
                h ^= h >> np.uint64(shift)
                h *= np.uint64(factor)
            h ^= h >> np.uint64(31)
        return torch.from_numpy((h >> np.uint64(40)).astype(np.float32) * np.float32(2**-24))
    x = ids[:, None] * signed(_MIX2) + torch.arange(k, device=ids.device) * signed(_GOLDEN)
    x = x + (signed(stream) if isinstance(stream, int) else stream)
    for shift, factor in ((30, _MIX1), (27, _MIX2)):
        x = (x ^ _shift(x, shift)) * signed(factor)
    return _shift(x ^ _shift(x, 31), 40).float() * 2**-24


def signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift (int64 shifts arithmetically)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
