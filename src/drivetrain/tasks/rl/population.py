"""Many policies of one shape, trained by PPO as one batched program.

    population = Population(tasks, models, learning_rates, device)
    population.begin(reset)                       # the arguments are random numbers: a row for each trial
    population.iterate(uniform, orders)           # one collection, and all optimizer steps on it
    population.evaluate(episodes)

The task's own collection and loss run under `vmap`, once for all trials: the first dimension of parameters, environments and
settings that differ counts trials. An iteration never waits for the device, and its state has fixed addresses, so it can be
captured as one CUDA graph.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn import functional as F

from drivetrain.outcomes import Problem
from drivetrain.tasks.rl.nets import Agent
from drivetrain.tasks.rl.per_trial import PER_TRIAL
from drivetrain.tasks.rl.rollout import Rollout

ALIGNED_NUMBERS = 32
"""Each weight begins at a multiple of this many numbers, where a GPU reads fastest."""
BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8  # Adam's


class Population:
    def __init__(self, tasks: Sequence[Any], models: Sequence[Agent], learning_rates: Tensor, device: torch.device) -> None:
        """`learning_rates` are [steps, trials]."""
        self.task, self.num_trials, self.device = tasks[0], len(tasks), device
        self.source: Rollout = self.task.train_data()
        self._agent_call = _AgentCall(copy.deepcopy(models[0]).eval())
        stacked, buffers = stack_module_state(list(models))
        frozen = {name for name, p in models[0].named_parameters() if not p.requires_grad}
        self.constants = {name: t.detach().to(device) for name, t in ({k: stacked[k] for k in frozen} | buffers).items()}
        learned = {name: t.detach().to(device) for name, t in stacked.items() if name not in frozen}
        self.weights = _flat(list(learned.values()))
        """All learned parameters, a row for each trial; `parameters` are views of it."""
        self.parameters = dict(zip(learned, _views(self.weights, list(learned.values())), strict=True))
        self._average, self._square = torch.zeros_like(self.weights), torch.zeros_like(self.weights)
        self.per_trial = {name: _column(tasks, name, device) for name in PER_TRIAL if len({getattr(t, name) for t in tasks}) > 1}
        if "value_clip" in self.per_trial:
            self.per_trial["value_clip"].masked_fill_(self.per_trial["value_clip"] == 0, torch.inf)
        clip = _column(tasks, "clip", device)
        self._clip = clip.masked_fill(clip == 0, torch.inf)
        self._weight_decay = _column(tasks, "weight_decay", device)[:, None]
        self._learning_rates = learning_rates.to(device)
        self._corrections = _bias_corrections(len(learning_rates)).to(device)
        self._num_steps = torch.zeros(1, dtype=torch.int64, device=device)
        """Optimizer steps so far, on the device because a CUDA graph reads it."""
        self.state: dict[str, Tensor] = {}
        self.failed = torch.zeros(self.num_trials, dtype=torch.bool, device=device)
        """Whether each trial has had a loss or a gradient that is not finite."""
        self.metric_names: list[str] = []
        self.step_metrics = torch.zeros(0, self.num_trials, device=device)
        """Metrics of the last step, a row for each of `metric_names`: loss, gradient norm, and the loss's further metrics."""

    @property
    def samples_per_group(self) -> int:
        """Samples of an environment in a collection."""
        return len(self.source) // self.source.groups

    @property
    def num_uniform(self) -> int:
        """Number of random numbers that an environment needs in a collection."""
        return self.source.horizon * (self.source.env.agents + 2 * self.source.env.chances)

    @property
    def num_reset_uniform(self) -> int:
        """Number of random numbers that an environment needs before the first collection."""
        return max(1, self.source.env.chances)

    # --- an iteration ---

    def begin(self, uniform: Tensor) -> None:
        """Resets the environments, with random numbers [trials, environments, num_reset_uniform]."""
        self.source.check(self.source.begin(uniform[0]))
        state = vmap(self.source.begin)(uniform)
        self.state = {name: value.clone(memory_format=torch.contiguous_format) for name, value in state.items()}

    def iterate(self, uniform: Tensor, orders: Tensor) -> None:
        """Collects with random numbers [trials, environments, num_uniform], and takes all optimizer steps of the collection.

        `orders` are the orders of each environment's samples, [trials, passes, environments, samples_per_group], as rows of the
        trial's collection.
        """
        samples = self._collect(uniform)
        samples_per_step = self.task.global_batch // self.source.groups
        first_rows = torch.arange(self.num_trials, device=self.device)[:, None] * len(self.source)
        for number in range(self.source.passes):
            for rows in orders[:, number].split(samples_per_step, -1):
                ids = (rows.flatten(1) + first_rows).flatten()
                batch = {name: column.index_select(0, ids).unflatten(0, (self.num_trials, -1)) for name, column in samples.items()}
                self._take_step(batch)

    @torch.no_grad()
    def _collect(self, uniform: Tensor) -> dict[str, Tensor]:
        """Returns the samples of all trials: the first trial's rows come first."""

        def collect_one(weights: Any, per_trial: Any, state: dict[str, Tensor], uniform: Tensor) -> Any:
            source = self._task_of_trial(per_trial).train_data()
            source.load(dict(state))
            data = self._call_agent(weights, lambda agent: source.collect(agent, _FixedRandom(uniform), lambda total: total))
            return dict(zip(data.names, data.columns, strict=True)), source.state()

        samples, state = vmap(collect_one)(self._all_weights(), self.per_trial, self.state, uniform)
        for name, tensor in self.state.items():
            tensor.copy_(state[name])
        return {name: column.flatten(0, 1) for name, column in samples.items()}

    def _take_step(self, batch: dict[str, Tensor]) -> None:
        """Takes one optimizer step of every trial. The sum of all losses gives each trial its own gradients."""

        def loss_of_one(weights: Any, per_trial: Any, batch: dict[str, Tensor]) -> Any:
            return self._call_agent(weights, lambda agent: self._task_of_trial(per_trial).loss(agent, batch))

        (total, count), metrics = vmap(loss_of_one)(self._all_weights(), self.per_trial, batch)
        loss = total / count.clamp(min=1)
        gradients = torch.autograd.grad(loss.sum(), list(self.parameters.values()))
        with torch.no_grad():
            norm = self._update_weights(_flat(gradients))
            values = {"train/loss": loss, "grad_norm": norm}
            values |= {f"train/{name}": part / n.clamp(min=1) for name, (part, n) in metrics.items()}
            if not self.metric_names:
                self.metric_names = list(values)
                self.step_metrics = torch.zeros(len(values), self.num_trials, device=self.device)
            self.step_metrics.copy_(torch.stack([values[name] for name in self.metric_names]))
            self.failed |= ~torch.isfinite(loss + norm)

    def _update_weights(self, gradient: Tensor) -> Tensor:
        """Clips each trial's gradient and takes its optimizer step; returns the gradients' norms."""
        norm: Tensor = gradient.norm(dim=1)
        gradient = gradient * (self._clip / (norm + 1e-6)).clamp(max=1.0)[:, None]
        rate = self._learning_rates.index_select(0, self._num_steps)[0][:, None]
        if self.task.optim == "adamw":
            self.weights.mul_(1 - rate * self._weight_decay)
        else:
            gradient = gradient + self._weight_decay * self.weights
        if self.task.optim == "sgd":
            self._average.mul_(self.task.momentum).add_(gradient)
            self.weights.sub_(rate * self._average)
        else:
            first, second = self._corrections.index_select(0, self._num_steps)[0]
            self._average.lerp_(gradient, 1 - BETA1)
            self._square.mul_(BETA2).addcmul_(gradient, gradient, value=1 - BETA2)
            self.weights.sub_(rate / first * self._average / (self._square.sqrt() / second + EPSILON))
        self._num_steps += 1
        return norm

    # --- evaluation ---

    @torch.no_grad()
    def evaluate(self, episodes: Tensor) -> dict[str, Tensor]:
        """Returns every trial's metrics of each episode: [trials, episodes]."""
        metrics = self.task.metrics(_PopulationAgent(self), episodes.repeat(self.num_trials))
        return {name: values.unflatten(0, (self.num_trials, -1)) for name, values in metrics.items()}

    def load_into(self, model: Agent, trial: int, weights: Tensor) -> None:
        """Gives a model the weights of a trial, from `self.weights` or a copy of it."""
        views = _views(weights, list(self.parameters.values()))
        trial_weights = {name: view[trial].detach() for name, view in zip(self.parameters, views, strict=True)}
        model.load_state_dict(trial_weights | {name: value[trial] for name, value in self.constants.items()}, strict=False)

    # --- calls for one trial ---

    def _all_weights(self) -> dict[str, Tensor]:
        return {f"agent.{name}": value for name, value in (self.parameters | self.constants).items()}

    def _call_agent(self, weights: Mapping[str, Tensor], function: Callable[[Agent], Any]) -> Any:
        """Calls a function with the agent that has these weights."""
        return functional_call(self._agent_call, dict(weights), (function,))

    def _task_of_trial(self, per_trial: Mapping[str, Tensor]) -> Any:
        """Returns the task with one trial's settings."""
        task = copy.copy(self.task)
        for name, value in per_trial.items():
            setattr(task, name, value)
        return task

    def map_agents(self, function: Callable[..., Tensor], *rows: Tensor) -> Tensor:
        """Calls a function with every trial's agent and the trial's own rows: the first trial's rows come first."""
        blocks = [t.unflatten(0, (self.num_trials, -1)) for t in rows]

        def call_one(weights: Any, *trial_rows: Tensor) -> Any:
            return self._call_agent(weights, lambda agent: function(agent, *trial_rows))

        outputs: Tensor = vmap(call_one)(self._all_weights(), *blocks)
        return outputs.flatten(0, 1)


class _PopulationAgent(Agent):
    """All policies of a population as one agent: its first rows belong to the first trial, and so on."""

    def __init__(self, population: Population) -> None:
        super().__init__()
        self._map_agents = population.map_agents

    def policy(self, observation: Tensor, agent_ids: Tensor | None = None) -> Tensor:
        return self._map_agents(lambda agent, rows: agent.policy(rows), observation)

    def value(self, observation: Tensor, agent_ids: Tensor | None = None) -> Tensor:
        return self._map_agents(lambda agent, rows: agent.value(rows), observation)


class _AgentCall(nn.Module):
    """Calls a function with its agent, so that `functional_call` can call any of the agent's methods with other weights."""

    def __init__(self, agent: Agent) -> None:
        super().__init__()
        self.agent = agent

    def forward(self, function: Callable[[Agent], Any]) -> Any:
        return function(self.agent)


class _FixedRandom:
    """Gives a collection random numbers that are already drawn."""

    def __init__(self, numbers: Tensor) -> None:
        self.numbers = numbers
        self.ids = torch.arange(len(numbers), device=numbers.device)

    def __len__(self) -> int:
        return len(self.numbers)

    def uniform(self, k: int = 1) -> Tensor:
        if k != self.numbers.shape[1]:
            raise Problem(
                f"a collection asked for {k} random numbers per environment, not {self.numbers.shape[1]}: it cannot run as a population"
            )
        return self.numbers

    def normal(self, k: int = 1) -> Tensor:
        raise Problem("a collection asked for normal numbers: it cannot run as a population")


def check_task(task: Any) -> None:
    """Raises Problem if a task cannot be trained as a population for reasons that its settings do not show."""
    kind = type(task).__name__
    if replaced := task.replaced_hooks():
        raise Problem(f"{kind} has its own {replaced[0]}(), which is not batched")
    source = task.train_data()
    if not isinstance(source, Rollout) or not source.pure:
        raise Problem(f"{kind}'s environments are not functions of tensors alone")
    if source.memory:
        raise Problem(f"{kind}'s policies have a memory, which is not batched: net=mlp or conv")
    if source.rival_at:
        raise Problem(f"{kind}'s policies keep a rival to play against, which is not batched: rival=0")


def _column(tasks: Sequence[Any], name: str, device: torch.device) -> Tensor:
    return torch.tensor([float(getattr(task, name)) for task in tasks], device=device)


def _flat(stacked: Sequence[Tensor]) -> Tensor:
    """Joins tensors [trials, ...] to rows [trials, numbers], and pads each tensor to a multiple of ALIGNED_NUMBERS."""
    rows = []
    for tensor in stacked:
        row = tensor.flatten(1)
        num_padding = -row.shape[1] % ALIGNED_NUMBERS
        rows.append(F.pad(row, (0, num_padding)) if num_padding else row)
    return torch.cat(rows, 1)


def _views(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Returns the tensors that `_flat` joined, as views of its rows; each view is a leaf that requires gradients."""
    views, start = [], 0
    for tensor in like:
        size = tensor[0].numel()
        views.append(flat[:, start : start + size].view(tensor.shape).detach().requires_grad_())
        start += size + -size % ALIGNED_NUMBERS
    return views


def _bias_corrections(steps: int) -> Tensor:
    """Returns Adam's bias corrections for each step: of the first moment, and the square root of the second moment's."""
    count = torch.arange(1, steps + 1, dtype=torch.float64)
    return torch.stack((1 - BETA1**count, (1 - BETA2**count).sqrt()), 1).float()
