"""Machines that are not here, from words: "4xL4-24GB", "2 nodes x 8xA100-40GB, 100Gb/s", "cpu, 16 cores, 64GB RAM"."""

from __future__ import annotations

import re

from drivetrain.hardware import NETWORK, Gpu, Hardware
from drivetrain.hardware.cards import Card, find, generic, other_size, unknown
from drivetrain.outcomes import Problem

FORM = '"4xL4-24GB", "2 nodes x 8xA100-40GB, 100Gb/s", "1x6GB", or "cpu, 16 cores, 64GB RAM"'
CORES_A_GPU, RAM_A_GPU = 8, 64 * 2**30  # of a described machine that does not say

_NODES = re.compile(r"(\d+)\s*(?:nodes?|machines?)\s*[x×*]\s*", re.I)
_GPUS = re.compile(r"(?:(\d+)\s*[x×*]\s*)?([A-Za-z][\w ]*?)?\s*-?\s*(?:(\d+(?:\.\d+)?)\s*G(?:i?B)?)?$", re.I)
_CORES = re.compile(r"(\d+)\s*(?:cores?|cpus?)$", re.I)
_RAM = re.compile(r"(\d+(?:\.\d+)?)\s*(G|T)i?B\s*RAM$", re.I)
_SPEED = re.compile(r"(\d+(?:\.\d+)?)\s*G(?:b/s|bps|bit/s|bE)$", re.I)


def parse(text: str) -> Hardware:
    """The machine that words describe."""
    first, *more = (part.strip() for part in text.split(","))
    nodes, rest = 1, first
    if match := _NODES.match(first):
        nodes, rest = int(match[1]), first[match.end() :]
    card, count = (None, 0) if rest.lower() in ("cpu", "no gpu", "none") else _read_gpus(rest, text)
    cores = ram = network = None
    for part in more:
        if match := _CORES.match(part):
            cores = int(match[1])
        elif match := _RAM.match(part):
            ram = int(float(match[1]) * 2 ** (30 if match[2].upper() == "G" else 40))
        elif match := _SPEED.match(part):
            network = float(match[1])
        else:
            raise Problem(f"--hardware {text!r}: {part!r} is neither cores, RAM nor a network's Gb/s; write it as {FORM}")
    if not nodes or (card is not None and not (count and card.memory_gb)) or cores == 0 or ram == 0 or network == 0:
        raise Problem(f"--hardware {text!r}: at least one machine, and one GPU, of what it has some; write it as {FORM}")
    gpus = tuple(Gpu(i, card.name, card.memory_bytes, card.compute_capability) for i in range(count)) if card else ()
    note = "described without one" if card is None else card.source if card.source.startswith(("not in", "the table")) else ""
    return Hardware(
        cpu_cores=cores or max(1, count) * CORES_A_GPU,
        memory_bytes=ram or max(1, count) * RAM_A_GPU,
        gpus=gpus,
        gpu_note=note,
        nodes=nodes,
        network_gbps=network or (NETWORK if nodes > 1 else 0.0),
        described=text,
    )


def _read_gpus(words: str, whole: str) -> tuple[Card, int]:
    match = _GPUS.match(words)
    if match is None or (match[2] is None and match[3] is None):
        raise Problem(f"--hardware {whole!r}: {words!r} names no GPU; write it as {FORM}")
    count, name, memory = int(match[1] or 1), (match[2] or "").strip(), float(match[3]) if match[3] else None
    card = find(name, memory) if name else None
    if card is None and memory is None:
        raise unknown(name)
    return card or other_size(name, float(memory or 0)) or generic(name, float(memory or 0)), count
