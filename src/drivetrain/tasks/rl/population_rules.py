"""Decides which trials of PPO can be trained as one population. `Ppo.tune_population` names this module; it does not import torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from drivetrain.tasks.rl.per_trial import PER_TRIAL

if TYPE_CHECKING:
    import torch

    from drivetrain.tasks.rl.population import Population

VARYING = ("learning_rate", "weight_decay", "clip", "warmup", "decay", "seed", *PER_TRIAL)
"""Settings that may differ between the trials of a population. All others change the program: network, samples, number of steps."""


def why_impossible(settings: Mapping[str, Any]) -> str:
    """Returns why a trial with these settings cannot be part of a population, and the fix; empty if it can."""
    if settings["net"] == "lstm":
        return "an LSTM is not batched: net=mlp or conv"
    if settings.get("agents", 1) > 1 and settings["rival"]:
        return f"rival={settings['rival']} keeps a copy of the policy as an opponent, which is not batched: rival=0"
    if settings["kl_stop"]:
        return f"kl_stop={settings['kl_stop']} stops each trial's learning at another step: kl_stop=0"
    if settings["start"]:
        return f"start={settings['start']} is not supported: leave it out"
    if settings["precision"] in ("bf16", "fp16"):
        return f"precision={settings['precision']} is not batched: precision=fp32 or tf32"
    if not settings["eval_episodes"]:
        return "eval_episodes=0 evaluates nothing: set it to 1 or more"
    return ""


def check_task(task: Any) -> None:
    """Raises Problem if a task cannot be trained as a population for reasons that its settings do not show."""
    from drivetrain.tasks.rl import population  # imports torch

    population.check_task(task)


def make_population(tasks: Sequence[Any], models: Sequence[Any], learning_rates: torch.Tensor, device: torch.device) -> Population:
    """Returns the population of trials; `learning_rates` are [steps, trials]."""
    from drivetrain.tasks.rl.population import Population

    return Population(tasks, models, learning_rates, device)
