"""Which settings trials of PPO may differ in and still be trained as one program. Nothing here needs torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

LIFTED = ("gamma", "gae", "ratio_clip", "value_clip", "value_weight", "entropy_weight")  # what the loss and the collection compute with
VARIED = ("learning_rate", "weight_decay", "clip", "warmup", "decay", "seed", *LIFTED)
"""All else changes the program: the net's form, how much is played and learned at once, and for how long."""


def shape_of(settings: Mapping[str, Any]) -> str:
    """The same for trials that can be one program."""
    return json.dumps({k: v for k, v in settings.items() if k not in VARIED}, sort_keys=True)


def obstacle(settings: Mapping[str, Any]) -> str:
    """Why a trial with these settings cannot be part of a population, and the way out; nothing where it can."""
    if settings["net"] == "lstm":
        return "an LSTM is not batched: net=mlp or conv"
    if settings.get("agents", 1) > 1 and settings["rival"]:
        return f"after a share of {settings['rival']} of the training the policy is kept as a rival, which is not batched: rival=0"
    if settings["kl_stop"]:
        return f"kl_stop={settings['kl_stop']} ends a collection's learning trial by trial: kl_stop=0"
    if settings["start"]:
        return f"its trials begin from start={settings['start']}: leave start out"
    if settings["precision"] in ("bf16", "fp16"):
        return f"precision={settings['precision']} is not batched: precision=fp32 or tf32"
    if not settings["eval_episodes"]:
        return "eval_episodes=0 judges nothing: give it some"
    return ""
