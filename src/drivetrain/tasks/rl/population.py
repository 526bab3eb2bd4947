"""Many policies of one shape, trained by PPO as one batched program.

    population = Population(tasks, models, rates, device)
    population.begin(reset)                       # random numbers are handed in, a row a trial
    population.iterate(draws, orders)             # one collection, and all that is learned from it
    population.evaluate(episodes)

The task's own collection and loss run under `vmap`, once for all trials: parameters, worlds and the settings in which trials
differ have a first dimension that counts trials. Nothing in an iteration waits for the device, and everything that lasts
stays at its place in memory: an iteration can be captured as one graph.
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
from drivetrain.tasks.rl.ppo import Ppo
from drivetrain.tasks.rl.rollout import Rollout
from drivetrain.tasks.rl.shape import LIFTED

ALIGNED = 32  # numbers: each weight begins where a GPU reads fastest
FIRST, SECOND, TINY = 0.9, 0.999, 1e-8  # of Adam's averages
OWN = ("loss", "optimizer", "augment", "summary", "counts")  # hooks that the batched program does without


class Population:
    def __init__(self, tasks: Sequence[Ppo], models: Sequence[Agent], rates: Tensor, device: torch.device) -> None:
        """`rates` are learning rates: [steps, trials]."""
        self.task, self.count, self.device = tasks[0], len(tasks), device
        self.source = self.task.train_data()
        self._asked = _Asked(copy.deepcopy(models[0]).eval())
        stacked, fixed = stack_module_state(list(models))
        frozen = {name for name, p in models[0].named_parameters() if not p.requires_grad}
        self.fixed = {name: t.detach().to(device) for name, t in ({k: stacked[k] for k in frozen} | fixed).items()}
        learned = {name: t.detach().to(device) for name, t in stacked.items() if name not in frozen}
        self.flat = _flat(list(learned.values()))
        """All weights that are learned, a row a trial; `parameters` are views of it."""
        self.parameters = dict(zip(learned, _views(self.flat, list(learned.values())), strict=True))
        self._average, self._square = torch.zeros_like(self.flat), torch.zeros_like(self.flat)
        self.varied = {name: _column(tasks, name, device) for name in LIFTED if len({getattr(t, name) for t in tasks}) > 1}
        if "value_clip" in self.varied:
            self.varied["value_clip"].masked_fill_(self.varied["value_clip"] == 0, torch.inf)
        clip = _column(tasks, "clip", device)
        self._clip = clip.masked_fill(clip == 0, torch.inf)
        self._weight_decay = _column(tasks, "weight_decay", device)[:, None]
        self._rates = rates.to(device)
        self._corrections = _corrections(len(rates)).to(device)
        self._done = torch.zeros(1, dtype=torch.int64, device=device)
        """Optimizer steps so far, where captured work finds them."""
        self.state: dict[str, Tensor] = {}
        self.bad = torch.zeros(self.count, dtype=torch.bool, device=device)
        """Which trials had a loss or a gradient that is no number."""
        self.names: list[str] = []
        self.figures = torch.zeros(0, self.count, device=device)
        """Of the last step, by `names`: its loss, the gradient's norm, and what else the loss tells."""

    @property
    def per_group(self) -> int:
        """Samples of an environment in a collection."""
        return len(self.source) // self.source.groups

    @property
    def draws(self) -> int:
        """Random numbers that an environment needs in a collection."""
        return self.source.horizon * (self.source.env.agents + 2 * self.source.env.chances)

    @property
    def resets(self) -> int:
        """And at the beginning."""
        return max(1, self.source.env.chances)

    # --- an iteration ---

    def begin(self, rand: Tensor) -> None:
        """Begin the worlds, from numbers [trials, environments, resets]."""
        self.source.check(self.source.begin(rand[0]))
        self.state = {name: value.clone(memory_format=torch.contiguous_format) for name, value in vmap(self.source.begin)(rand).items()}

    def iterate(self, draws: Tensor, orders: Tensor) -> None:
        """Collect with numbers [trials, environments, draws], and learn in the given orders of each environment's samples:
        [trials, passes, environments, per_group], as rows of the trial's collection."""
        seen = self._collect(draws)
        take = self.task.global_batch // self.source.groups
        first = torch.arange(self.count, device=self.device)[:, None] * len(self.source)
        for turn in range(self.source.passes):
            for rows in orders[:, turn].split(take, -1):
                ids = (rows.flatten(1) + first).flatten()
                self._learn({name: column.index_select(0, ids).unflatten(0, (self.count, -1)) for name, column in seen.items()})

    @torch.no_grad()
    def _collect(self, draws: Tensor) -> dict[str, Tensor]:
        """The samples of all trials, one trial's behind the other's."""

        def one(weights: Any, varied: Any, state: dict[str, Tensor], draws: Tensor) -> Any:
            source = self._own(varied).train_data()
            source.load(dict(state))
            data = self._ask(weights, lambda agent: source.collect(agent, _Given(draws), lambda total: total))
            return dict(zip(data.names, data.columns, strict=True)), source.state()

        seen, state = vmap(one)(self._weights(), self.varied, self.state, draws)
        for name, place in self.state.items():
            place.copy_(state[name])
        return {name: column.flatten(0, 1) for name, column in seen.items()}

    def _learn(self, batch: dict[str, Tensor]) -> None:
        """One optimizer step of every trial: the sum of their losses has gradients that are each one's own."""

        def one(weights: Any, varied: Any, batch: dict[str, Tensor]) -> Any:
            return self._ask(weights, lambda agent: self._own(varied).loss(agent, batch))

        (total, count), told = vmap(one)(self._weights(), self.varied, batch)
        loss = total / count.clamp(min=1)
        gradients = torch.autograd.grad(loss.sum(), list(self.parameters.values()))
        with torch.no_grad():
            norm = self._update(_flat(gradients))
            figures = {"train/loss": loss, "grad_norm": norm} | {f"train/{k}": part / n.clamp(min=1) for k, (part, n) in told.items()}
            if not self.names:
                self.names, self.figures = list(figures), torch.zeros(len(figures), self.count, device=self.device)
            self.figures.copy_(torch.stack([figures[name] for name in self.names]))
            self.bad |= ~torch.isfinite(loss + norm)

    def _update(self, gradient: Tensor) -> Tensor:
        """Clip each trial's gradient and take its optimizer's step; gives the norms."""
        norm: Tensor = gradient.norm(dim=1)
        gradient = gradient * (self._clip / (norm + 1e-6)).clamp(max=1.0)[:, None]
        rate = self._rates.index_select(0, self._done)[0][:, None]
        if self.task.optim == "adamw":
            self.flat.mul_(1 - rate * self._weight_decay)
        else:
            gradient = gradient + self._weight_decay * self.flat
        if self.task.optim == "sgd":
            self._average.mul_(self.task.momentum).add_(gradient)
            self.flat.sub_(rate * self._average)
        else:
            first, second = self._corrections.index_select(0, self._done)[0]
            self._average.lerp_(gradient, 1 - FIRST)
            self._square.mul_(SECOND).addcmul_(gradient, gradient, value=1 - SECOND)
            self.flat.sub_(rate / first * self._average / (self._square.sqrt() / second + TINY))
        self._done += 1
        return norm

    # --- judging ---

    @torch.no_grad()
    def evaluate(self, episodes: Tensor) -> dict[str, Tensor]:
        """Every trial's figures of each episode: [trials, episodes]."""
        told = self.task.metrics(Crew(self), episodes.repeat(self.count))
        return {name: values.unflatten(0, (self.count, -1)) for name, values in told.items()}

    def load_into(self, model: Agent, trial: int, flat: Tensor) -> None:
        """Give a model the weights of a trial, from `flat` or a copy of it."""
        views = _views(flat, list(self.parameters.values()))
        own = {name: view[trial].detach() for name, view in zip(self.parameters, views, strict=True)}
        model.load_state_dict(own | {name: value[trial] for name, value in self.fixed.items()}, strict=False)

    # --- trials as rows ---

    def _weights(self) -> dict[str, Tensor]:
        return {f"agent.{name}": value for name, value in (self.parameters | self.fixed).items()}

    def _ask(self, weights: Mapping[str, Tensor], what: Callable[[Agent], Any]) -> Any:
        return functional_call(self._asked, dict(weights), (what,))

    def _own(self, varied: Mapping[str, Tensor]) -> Ppo:
        """The task with one trial's settings."""
        task = copy.copy(self.task)
        for name, value in varied.items():
            setattr(task, name, value)
        return task

    def each(self, what: Callable[..., Tensor], *rows: Tensor) -> Tensor:
        """Ask every trial's agent about its own rows: the first trial's come first."""
        blocks = [t.unflatten(0, (self.count, -1)) for t in rows]
        answer: Tensor = vmap(lambda weights, *own: self._ask(weights, lambda agent: what(agent, *own)))(self._weights(), *blocks)
        return answer.flatten(0, 1)


class Crew(Agent):
    """All policies of a population as one agent, to whom rows are the first trial's, then the second's, and so on."""

    def __init__(self, population: Population) -> None:
        super().__init__()
        self._each = population.each

    def policy(self, seen: Tensor, who: Tensor | None = None) -> Tensor:
        return self._each(lambda agent, own: agent.policy(own), seen)

    def value(self, seen: Tensor, who: Tensor | None = None) -> Tensor:
        return self._each(lambda agent, own: agent.value(own), seen)


class _Asked(nn.Module):
    """Hands an agent to whatever asks it, so that any of its methods can be called with other weights."""

    def __init__(self, agent: Agent) -> None:
        super().__init__()
        self.agent = agent

    def forward(self, what: Callable[[Agent], Any]) -> Any:
        return what(self.agent)


class _Given:
    """Random numbers that were drawn before, for a collection that is not the first."""

    def __init__(self, numbers: Tensor) -> None:
        self.numbers = numbers
        self.ids = torch.arange(len(numbers), device=numbers.device)

    def __len__(self) -> int:
        return len(self.numbers)

    def uniform(self, k: int = 1) -> Tensor:
        if k != self.numbers.shape[1]:
            raise Problem(
                f"a collection asked for {k} random numbers an environment, not {self.numbers.shape[1]}: no population can be made"
            )
        return self.numbers

    def normal(self, k: int = 1) -> Tensor:
        raise Problem("a collection asked for normal numbers: no population can be made of it")


def steps_per_epoch(task: Ppo) -> int:
    """Optimizer steps of one collection and all its passes."""
    source = task.train_data()
    return source.passes * len(source) // task.global_batch


def check(task: Any) -> None:
    """What the settings alone do not tell: whether a population can be made of a task."""
    kind = type(task).__name__
    if not isinstance(task, Ppo):
        raise Problem(f"{kind} does not derive from Ppo, which populations are made of")
    own = [hook for hook in OWN if getattr(type(task), hook) is not getattr(Ppo, hook)]
    if own:
        raise Problem(f"{kind} has its own {own[0]}(), which is not batched")
    source = task.train_data()
    if not isinstance(source, Rollout) or not source.pure:
        raise Problem(f"{kind} is not played by functions of tensors alone")
    if source.memory:
        raise Problem(f"{kind}'s policies remember, which is not batched: net=mlp or conv")
    if source.rival:
        raise Problem(f"{kind}'s policies keep a rival to be measured against: rival=0")


def _column(tasks: Sequence[Ppo], name: str, device: torch.device) -> Tensor:
    return torch.tensor([float(getattr(task, name)) for task in tasks], device=device)


def _flat(stacked: Sequence[Tensor]) -> Tensor:
    """Tensors [trials, ...] beside each other, as rows [trials, numbers]."""
    rows = [t.flatten(1) for t in stacked]
    return torch.cat([F.pad(r, (0, -r.shape[1] % ALIGNED)) if r.shape[1] % ALIGNED else r for r in rows], 1)


def _views(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The tensors that such rows are made of, at the same place in memory; each takes gradients by itself."""
    views, start = [], 0
    for tensor in like:
        size = tensor[0].numel()
        views.append(flat[:, start : start + size].view(tensor.shape).detach().requires_grad_())
        start += size + -size % ALIGNED
    return views


def _corrections(steps: int) -> Tensor:
    """What Adam divides its averages by, step by step: they begin at nothing."""
    count = torch.arange(1, steps + 1, dtype=torch.float64)
    return torch.stack((1 - FIRST**count, (1 - SECOND**count).sqrt()), 1).float()
