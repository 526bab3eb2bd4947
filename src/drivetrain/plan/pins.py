"""Pins: takes the user's `plan.KEY=VALUE`, returns each value in its type, or raises Problem."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from drivetrain.outcomes import Problem
from drivetrain.plan.plan import json_types
from drivetrain.settings import Range, brief, coerce, nearest

_PINNABLE_KEYS = ("micro_batch", "eval_micro_batch", "accumulation", "strategy", "zero_stage", "activation_checkpointing", "offload",
                  "deepspeed_config", "threads", "data", "workers", "prefetch", "capture", "compile", "channels_last")  # fmt: skip
PINNABLE: dict[str, Any] = {key: kind for key, kind in json_types().items() if key in _PINNABLE_KEYS} | {
    "zero_stage": Annotated[int, Range(1, 3)],  # 0 belongs to strategies that do not shard
    "deepspeed_config": str,  # the path of a file
}
"""Key -> type of its value."""


def read_pins(values: Mapping[str, object]) -> dict[str, Any]:
    pins = {}
    for key, value in values.items():
        if key not in PINNABLE:
            raise Problem(f"the plan has no choice {brief(key)} to pin{nearest(key, PINNABLE)} (these can be: {', '.join(PINNABLE)})")
        if key == "deepspeed_config" and isinstance(value, Mapping):
            pins[key] = dict(value)  # the content of the file, already read
            continue
        try:
            pins[key] = coerce(PINNABLE[key], value)
        except ValueError as error:
            raise Problem(f"plan.{key}={brief(value)} does not fit: it is {error}") from None
    return pins
