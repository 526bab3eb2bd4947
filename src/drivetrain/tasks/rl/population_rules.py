"""Which trials of PPO can be trained as one population; `Ppo.tune_population` names this module. It does not import torch itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from drivetrain.tasks.rl.per_trial import PER_TRIAL

if TYPE_CHECKING:
    import torch

    from drivetrain.tasks.rl.population import Population

VARYING = ("learning_rate", "weight_decay", "clip", "warmup", "decay", "seed", *PER_TRIAL)
"""Settings in which trials of one program may differ. All others change the program: the network, the samples, the number of steps."""


def why_impossible(settings: Mapping[str, Any]) -> str:
    """Returns why a trial with these settings cannot be part of a population, and the fix; empty if it can."""
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
        return "eval_episodes=0 evaluates nothing: set it to 1 or more"
    return ""


def check_task(task: Any) -> None:
    """Refuses a task of which no population can be made, for reasons that its settings do not show."""
    from drivetrain.tasks.rl import population

    population.check_task(task)


def make_population(tasks: Sequence[Any], models: Sequence[Any], learning_rates: torch.Tensor, device: torch.device) -> Population:
    """Returns the population of trials; `learning_rates` are [steps, trials]."""
    from drivetrain.tasks.rl.population import Population

    return Population(tasks, models, learning_rates, device)
