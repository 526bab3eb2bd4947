"""Described hardware: takes text such as "4xL4-24GB" or "2 nodes x 8xA100-40GB, 100Gb/s", returns `Hardware`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from drivetrain.hardware.cards import Card, find_card, generic_card, resized_card, split_memory, unknown_card
from drivetrain.hardware.hardware import Gpu, Hardware
from drivetrain.outcomes import Problem

FORM = '"4xL4-24GB", "2 nodes x 8xA100-40GB, 100Gb/s", "1x6GB", or "cpu, 16 cores, 64GB RAM"'
CORES_PER_GPU, RAM_BYTES_PER_GPU = 8, 64 * 2**30  # assumed if a description does not state them
MAX_NODES, MAX_GPUS, MAX_CORES = 100_000, 1_024, 100_000
MAX_GPU_GB, MAX_RAM_GB, MAX_GBPS = 10_000, 10_000_000, 1_000_000

_NUMBER = r"(\d+(?:\.\d+)?)"
_NODES = re.compile(r"(\d+)\s*(?:(?:nodes?|machines?|hosts?)\s*(?:[x×*]|of)|[x×*](?=\s*\d+\s*[x×*]))\s*", re.I)
_COUNT = re.compile(r"(\d+)\s*[x×*]\s*", re.I)
_CPU = re.compile(r"(?:cpu|no gpu|none)\b[\s:]*", re.I)
_CORES = re.compile(r"(\d+)[\s-]*(?:v?cpus?|cores?)\b\s*", re.I)
_RAM = re.compile(_NUMBER + r"\s*(G|T)i?B\s*(?:of\s*)?RAM\b\s*", re.I)
_SPEED = re.compile(_NUMBER + r"\s*([MGTmgt])(?:(?:b/s|bps|bits?/s|[bB]E)|(B/s|Bps|[bB]ytes?/s))\s*$")
_SCALE = {"M": 1e-3, "G": 1.0, "T": 1e3}


@dataclass
class _HostFacts:
    """What a description states besides the GPUs."""

    cores: int | None = None
    ram_bytes: int | None = None
    network_gbps: float | None = None

    def read(self, text: str) -> str:
        """Reads facts from the beginning of a text and returns the rest of the text."""
        while text:
            if match := _CORES.match(text):
                self.cores = _count(match[1], MAX_CORES, "cores")
            elif match := _RAM.match(text):
                gigabytes = float(match[1]) * (1 if match[2].upper() == "G" else 1024)
                self.ram_bytes = int(_limited(gigabytes, MAX_RAM_GB, "GB of RAM") * 2**30)
            elif match := _SPEED.match(text):  # b: bits, B: bytes
                gbps = float(match[1]) * _SCALE[match[2].upper()] * (8 if match[3] else 1)
                self.network_gbps = _limited(gbps, MAX_GBPS, "Gb/s")
            else:
                return text
            text = text[match.end() :]
        return ""


def parse(text: str) -> Hardware:
    """Returns the hardware that a text describes."""
    first, *more = (part.strip() for part in text.split(","))
    nodes, rest = 1, first
    if match := _NODES.match(first):
        nodes, rest = _count(match[1], MAX_NODES, "machines"), first[match.end() :]
    facts = _HostFacts()
    card, count = None, 0
    if match := _CPU.match(rest):
        more.insert(0, rest[match.end() :])
    elif not rest or facts.read(rest):
        card, count = _read_gpus(rest, text)
    for part in more:
        if wrong := facts.read(part):
            raise Problem(f"--hardware {text!r}: {wrong!r} is neither cores, RAM nor a network's Gb/s; write it as {FORM}")
    if not nodes or (card is not None and not (count and card.memory_gb)) or 0 in (facts.cores, facts.ram_bytes, facts.network_gbps):
        raise Problem(f"--hardware {text!r}: at least one machine and one GPU, and nothing it states may be 0; write it as {FORM}")
    gpus = tuple(Gpu(i, card.name, card.memory_bytes, card.compute_capability) for i in range(count)) if card else ()
    note = "described without one" if card is None else card.source if card.source.startswith(("not in", "the table")) else ""
    return Hardware(
        cpu_cores=facts.cores or max(1, count) * CORES_PER_GPU,
        memory_bytes=facts.ram_bytes or max(1, count) * RAM_BYTES_PER_GPU,
        gpus=gpus,
        gpu_note=note,
        nodes=nodes,
        network_gbps=facts.network_gbps or 0.0,
        described=text,
    )


def _read_gpus(words: str, description: str) -> tuple[Card, int]:
    counted = _COUNT.match(words)
    count = _count(counted[1], MAX_GPUS, "GPUs in a machine") if counted else 1
    name, memory = split_memory(words[counted.end() :] if counted else words)
    if not re.fullmatch(r"[A-Za-z0-9][\w ()]*|", name) or (not name and memory is None):
        raise Problem(f"--hardware {description!r}: {words!r} names no GPU; write it as {FORM}")
    if memory is None:
        card = find_card(name, None)
        if card is None:
            raise unknown_card(name)
        return card, count
    _limited(memory, MAX_GPU_GB, "GB of a GPU")
    return (find_card(name, memory) if name else None) or resized_card(name, memory) or generic_card(name, memory), count


def _count(digits: str, maximum: int, unit: str) -> int:
    return int(_limited(float(digits), maximum, unit))


def _limited(value: float, maximum: int, unit: str) -> float:
    if value > maximum:
        raise Problem(f"--hardware: {value:,.0f} {unit} are more than can be planned for ({maximum:,} at most)")
    return value
