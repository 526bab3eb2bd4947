"""The plans that a search compares. Takes world size and pins, returns a list of `Candidate`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from drivetrain.plan.choices import Offload, Strategy, is_sharding

MIN_SPEEDUP = 1.05  # a candidate must be this much faster than a simpler one to win
MIN_SPEEDUP_OF_SHARDING = 1.25  # the same for a candidate that shards a model that fits unsharded


@dataclass(frozen=True)
class Candidate:
    """A plan to consider; it may or may not fit into memory."""

    strategy: Strategy
    micro_batch: int
    accumulation: int
    world_size: int
    nodes: int = 1
    zero_stage: int = 0
    checkpointing: bool = False
    offload: Offload = "none"

    @property
    def is_sharded(self) -> bool:
        return is_sharding(self.strategy)

    def name(self) -> str:
        words = [self.strategy if not self.zero_stage else f"{self.strategy} (ZeRO-{self.zero_stage})"]
        words += ["activation checkpointing"] if self.checkpointing else []
        words += [f"offload of {'the optimizer' if self.offload == 'optimizer' else 'all state'}"] if self.offload != "none" else []
        return " + ".join(words)


def min_speedup(best: Candidate, candidate: Candidate) -> float:
    """Returns the speedup over `best`, a simpler candidate, that a candidate needs to win."""
    return MIN_SPEEDUP_OF_SHARDING if candidate.is_sharded and not best.is_sharded else MIN_SPEEDUP


_FIELD_OF_PIN = {"strategy": "strategy", "zero_stage": "zero_stage", "offload": "offload", "activation_checkpointing": "checkpointing"}


def list_candidates(plain: Candidate, pins: Mapping[str, Any], deepspeed: bool, can_checkpoint: bool, on_gpu: bool) -> list[Candidate]:
    """Returns the candidates that agree with the pins, from the simplest and fastest to the one that needs the least memory.

    `plain` is the candidate without sharding; `deepspeed`: whether it is installed; `can_checkpoint`: whether the model has blocks.
    """
    sharded: list[Candidate] = [replace(plain, strategy="fsdp", zero_stage=stage) for stage in (2, 3)]
    without_extras = [plain, *(sharded if plain.world_size > 1 or pins.get("strategy") == "fsdp" else [])]
    if pins.get("strategy") == "deepspeed":
        stages = (2, 3, 1) if "zero_stage" in pins else (2, 3)
        without_extras = [replace(plain, strategy="deepspeed", zero_stage=stage) for stage in stages]
    candidates = [*without_extras]
    if can_checkpoint:
        candidates += [replace(candidate, checkpointing=True) for candidate in without_extras]
    if not on_gpu:  # a CPU cannot offload: its memory is the host's memory
        deepspeed = False
    elif pins.get("strategy") != "deepspeed":
        candidates += [replace(sharded[1], offload="all", checkpointing=c) for c in ([False, True] if can_checkpoint else [False])]
    if deepspeed:
        offloads: list[tuple[Offload, int]] = [("optimizer", 2), ("all", 3)]
        offloads += [("optimizer", 3), ("optimizer", 1)] if "zero_stage" in pins else []
        candidates += [
            replace(plain, strategy="deepspeed", zero_stage=stage, offload=offload, checkpointing=can_checkpoint)
            for offload, stage in offloads
        ]
    return [c for c in candidates if all(getattr(c, _FIELD_OF_PIN[k]) == v for k, v in pins.items() if k in _FIELD_OF_PIN)]


def micro_batch_sizes(share: int, pins: Mapping[str, Any], has_batchnorm: bool) -> Iterator[int]:
    """Yields the micro-batches to consider: a process's share of the global batch, cut into 1, 2, 3 ... equal pieces."""
    if "micro_batch" in pins:
        yield min(share, pins["micro_batch"])
        return
    seen: set[int] = set()
    pieces = [*range(1, 17), *(a * 2**k for k in range(4, 16) for a in (1, 1.5))]
    for num_pieces in (int(p) for p in pieces):
        size = -(-share // num_pieces)
        if size in seen or (size == 1 < share and has_batchnorm):
            continue
        seen.add(size)
        yield size
