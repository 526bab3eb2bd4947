"""Machines that are not here, from words: "4xL4-24GB", "2 nodes x 8xA100-40GB, 100Gb/s", "cpu, 16 cores, 64GB RAM"."""

from __future__ import annotations

import re
from dataclasses import dataclass

from drivetrain.hardware import Gpu, Hardware
from drivetrain.hardware.cards import Card, find, generic, other_size, split_memory, unknown
from drivetrain.outcomes import Problem

FORM = '"4xL4-24GB", "2 nodes x 8xA100-40GB, 100Gb/s", "1x6GB", or "cpu, 16 cores, 64GB RAM"'
CORES_A_GPU, RAM_A_GPU = 8, 64 * 2**30  # of a described machine that does not say
MOST_NODES, MOST_GPUS, MOST_CORES = 100_000, 1_024, 100_000  # of a description that is meant
MOST_GPU_GB, MOST_RAM_GB, MOST_GBPS = 10_000, 10_000_000, 1_000_000

_NUMBER = r"(\d+(?:\.\d+)?)"
_NODES = re.compile(r"(\d+)\s*(?:(?:nodes?|machines?|hosts?)\s*(?:[x×*]|of)|[x×*](?=\s*\d+\s*[x×*]))\s*", re.I)
_COUNT = re.compile(r"(\d+)\s*[x×*]\s*", re.I)
_CPU = re.compile(r"(?:cpu|no gpu|none)\b[\s:]*", re.I)
_CORES = re.compile(r"(\d+)[\s-]*(?:v?cpus?|cores?)\b\s*", re.I)
_RAM = re.compile(_NUMBER + r"\s*(G|T)i?B\s*(?:of\s*)?RAM\b\s*", re.I)
_SPEED = re.compile(_NUMBER + r"\s*([MGTmgt])(?:(?:b/s|bps|bits?/s|[bB]E)|(B/s|Bps|[bB]ytes?/s))\s*$")
_SCALE = {"M": 1e-3, "G": 1.0, "T": 1e3}


@dataclass
class _Said:
    """What was said of a machine beside its GPUs."""

    cores: int | None = None
    ram: int | None = None
    network_gbps: float | None = None

    def read(self, text: str) -> str:
        """Take in what stands at the beginning of a text, and return the rest."""
        while text:
            if match := _CORES.match(text):
                self.cores = _count(match[1], MOST_CORES, "cores")
            elif match := _RAM.match(text):
                gigabytes = float(match[1]) * (1 if match[2].upper() == "G" else 1024)
                self.ram = int(_limited(gigabytes, MOST_RAM_GB, "GB of RAM") * 2**30)
            elif match := _SPEED.match(text):  # a small b is a bit, a large B a byte of eight
                gbps = float(match[1]) * _SCALE[match[2].upper()] * (8 if match[3] else 1)
                self.network_gbps = _limited(gbps, MOST_GBPS, "Gb/s")
            else:
                return text
            text = text[match.end() :]
        return ""


def parse(text: str) -> Hardware:
    """The machine that words describe."""
    first, *more = (part.strip() for part in text.split(","))
    nodes, rest = 1, first
    if match := _NODES.match(first):
        nodes, rest = _count(match[1], MOST_NODES, "machines"), first[match.end() :]
    said = _Said()
    card, count = None, 0
    if match := _CPU.match(rest):
        more.insert(0, rest[match.end() :])
    elif not rest or said.read(rest):
        card, count = _read_gpus(rest, text)
    for part in more:
        if wrong := said.read(part):
            raise Problem(f"--hardware {text!r}: {wrong!r} is neither cores, RAM nor a network's Gb/s; write it as {FORM}")
    if not nodes or (card is not None and not (count and card.memory_gb)) or 0 in (said.cores, said.ram, said.network_gbps):
        raise Problem(f"--hardware {text!r}: at least one machine, and one GPU, of what it has some; write it as {FORM}")
    gpus = tuple(Gpu(i, card.name, card.memory_bytes, card.compute_capability) for i in range(count)) if card else ()
    note = "described without one" if card is None else card.source if card.source.startswith(("not in", "the table")) else ""
    return Hardware(
        cpu_cores=said.cores or max(1, count) * CORES_A_GPU,
        memory_bytes=said.ram or max(1, count) * RAM_A_GPU,
        gpus=gpus,
        gpu_note=note,
        nodes=nodes,
        network_gbps=said.network_gbps or 0.0,
        described=text,
    )


def _read_gpus(words: str, whole: str) -> tuple[Card, int]:
    counted = _COUNT.match(words)
    count = _count(counted[1], MOST_GPUS, "GPUs in a machine") if counted else 1
    name, memory = split_memory(words[counted.end() :] if counted else words)
    if not re.fullmatch(r"[A-Za-z0-9][\w ()]*|", name) or (not name and memory is None):
        raise Problem(f"--hardware {whole!r}: {words!r} names no GPU; write it as {FORM}")
    if memory is None:
        card = find(name, None)
        if card is None:
            raise unknown(name)
        return card, count
    _limited(memory, MOST_GPU_GB, "GB of a GPU")
    return (find(name, memory) if name else None) or other_size(name, memory) or generic(name, memory), count


def _count(digits: str, most: int, what: str) -> int:
    return int(_limited(float(digits), most, what))


def _limited(value: float, most: int, what: str) -> float:
    if value > most:
        raise Problem(f"--hardware: {value:,.0f} {what} are more than can be planned for ({most:,} at most)")
    return value
