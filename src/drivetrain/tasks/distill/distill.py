"""The task `distill`: a transformer learns from the learning histories of many tasks how to learn a new one in its context."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from functools import cached_property
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drivetrain.data import Picture, Rand, Tensors
from drivetrain.outcomes import Problem
from drivetrain.settings import Duration, Range
from drivetrain.task import Task
from drivetrain.tasks.distill import histories
from drivetrain.tasks.distill.envs import TaskEnv
from drivetrain.tasks.distill.histories import Facts, Histories
from drivetrain.tasks.distill.layers import Shape
from drivetrain.tasks.distill.model import CompressedModel, InContextModel, LatentModel, PlainModel, Steps
from drivetrain.tasks.distill.pictures import TaskResult, draw_curves, draw_episodes
from drivetrain.tasks.distill.play import play
from drivetrain.tasks.run_files import read_run_file, write_run_file

COLUMNS = ("place", "action", "reward", "next_place")
ENVIRONMENT_FILE = "environment.json"
"""In the run's folder: the environment and the tasks of the histories, so that a trained model is used without them."""
LAST_EPISODES = 10
"""`return` is the mean over so many episodes at the end of a stream."""


class HistoryGraph(nn.Module):
    """The model as a graph for `export`: a history of whole numbers to the logits of the action at each step."""

    def __init__(self, model: InContextModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, place: Tensor, action: Tensor, reward: Tensor, next_place: Tensor) -> dict[str, Tensor]:
        return {"logits": self.model(Steps(place, action, reward, next_place))}


def held_out_tasks(facts: Facts) -> list[int]:
    """Returns the recorded tasks that no model is trained on."""
    return [task for task in facts.env().split(facts.split_seed)[1] if task in facts.tasks]


class Distill(Task):
    """Algorithm distillation: a transformer that learns a new task within its context, from the histories of other learners."""

    data: str = "noise"
    """Histories to learn from: a run of the task `histories`, its folder, or noise (an optimal policy with fewer and fewer random actions)."""
    world: Literal["darkroom", "darkroom-permuted", "key-to-door"] | None = None
    """The environment; by default that of the histories, or darkroom for data=noise."""
    size: Annotated[int, Range(2, 181)] | None = None
    """Width and height of the room; by default that of the histories, or 9 for data=noise."""
    streams: Annotated[int, Range(1)] = 100
    """With data=noise: histories of each task."""
    episodes: Annotated[int, Range(2)] = 50
    """With data=noise: episodes of each history."""
    num_tasks: Annotated[int, Range(2)] | None = None
    """With data=noise: number of tasks, held-out tasks first; by default all."""
    variant: Literal["ad", "compressed", "latent"] = "ad"
    """What the model remembers: the last `window` steps; the last two regions; or latent tokens of everything before the present region."""
    window: Annotated[int, Range(1)] = 80
    """Steps in the context of variant=ad."""
    region: Annotated[int, Range(1)] | None = None
    """Steps of a region, for the other variants; by default those of the histories' markers, or 80 for data=noise."""
    regions: Annotated[int, Range(2)] = 4
    """With variant=latent: consecutive regions of a training sample."""
    latents: Annotated[int, Range(1)] = 16
    """With variant=latent: tokens that hold the compressed history."""
    skip: Annotated[int, Range(0)] = 0
    """Steps at the beginning of each history that are left out: there, the recorded learner still acts at random."""
    width: Annotated[int, Range(2, 65536)] = 64
    """Width of the transformer."""
    layers: Annotated[int, Range(1, 256)] = 3
    """Layers of the transformer."""
    heads: Annotated[int, Range(1, 1024)] = 4
    """Attention heads in each layer."""
    inner: Annotated[int, Range(1)] = 128
    """Width of the layers between the attentions."""
    dropout: Annotated[float, Range(0, 1)] = 0.0
    """Share of the activations that training drops."""
    attention_dropout: Annotated[float, Range(0, 1)] = 0.0
    """Share of the attention weights that training drops."""
    positions: Literal["learned", "rotary"] = "learned"
    """How a token knows its position in the context."""
    label_smoothing: Annotated[float, Range(0, 1)] = 0.0
    """Probability that the targets give to all other actions together."""
    steps: Annotated[int, Range(1)] | None = 3000
    """Optimizer steps; if set, `epochs` is ignored."""
    global_batch: Annotated[int, Range(1)] = 128
    """Sequences in one optimizer step, over all processes."""
    learning_rate: Annotated[float, Range(0)] = 2e-3
    """The optimizer's peak learning rate."""
    warmup: Duration = 100
    """Steps (or epochs, 1ep) over which the learning rate rises to its peak."""
    clip: Annotated[float, Range(0)] = 1.0
    """Largest norm of the gradients; 0 does not clip."""
    eval_tasks: Annotated[int, Range(0)] = 8
    """Held-out tasks that an evaluation plays; 0 evaluates nothing."""
    eval_streams: Annotated[int, Range(1)] = 100
    """Streams of episodes in each of these tasks, with a context each."""
    eval_episodes: Annotated[int, Range(1)] = 50
    """Episodes of a stream; `return` is the mean of the last ten."""
    greedy: bool = False
    """Whether an evaluation takes the likeliest action, or samples one."""
    eval_every: Duration = 1000
    """Steps (or 1ep, 10min) between evaluations; the end always evaluates."""
    save_every: Duration = 1000
    """Steps (or 1ep, 10min) between checkpoints; the end always saves."""

    tune_metric = "return"
    search = {"learning_rate": "1e-4..3e-3,log", "width": "32|64|128", "dropout": "0..0.3"}

    def histories(self) -> Histories:
        """Returns the histories that `data` names; reads or makes them once."""
        if not hasattr(self, "_histories"):
            self._histories = self._read_histories()
        return self._histories

    @cached_property
    def _recorded_facts(self) -> Facts | None:
        """The environment and the tasks that the run keeps; None where a run begins."""
        content = read_run_file(self.run_folder, ENVIRONMENT_FILE)
        try:
            return None if content is None else Facts.from_json(content)
        except (ValueError, AttributeError) as error:
            raise Problem(f"{self.run_folder}/{ENVIRONMENT_FILE} cannot be read ({error}): remove it, and the histories are read") from None

    def facts(self) -> Facts:
        """Returns the environment and the tasks: those that the run keeps, else those of the histories."""
        return self._recorded_facts or self.histories().facts

    def env(self) -> TaskEnv:
        """Returns the environment: always the same one, which keeps its constants on the device."""
        if not hasattr(self, "_env"):
            self._env = self.facts().env()
        return self._env

    def _read_histories(self) -> Histories:
        if self.data == "noise":
            world, size, region = self.world or "darkroom", self.size or 9, self.region or 80
            found = histories.noisy_histories(world, size, None, self.streams, self.episodes, region, self.num_tasks, self.seed)
        else:
            found = histories.read(self.data)
        facts = found.facts
        for name, expected in (("world", self.world), ("size", self.size)):
            if expected not in (None, getattr(facts, name)):
                raise Problem(
                    f"data={self.data} has histories of {name}={getattr(facts, name)}, not of {name}={expected}: leave out one of the two"
                )
        self._check_context(facts)
        needed = self._sample_steps(facts)
        if needed + self._first_step(facts) > facts.steps:
            raise Problem(f"the histories have {facts.steps} steps, fewer than a training sample ({needed}): shorten it, or collect more")
        if not found.split()[0]:
            raise Problem(f"data={self.data} has no task to train on, only held-out ones: collect with more num_tasks")
        return found

    def _check_context(self, facts: Facts) -> None:
        """Raises Problem if an episode does not fit into what the model remembers when its context is emptiest."""
        remembered = self.model_for(facts).shortest_context
        if remembered < facts.limit:
            fix = f"window={2 * facts.limit}" if self.variant == "ad" else f"region={facts.limit}"
            raise Problem(
                f"variant={self.variant} would remember {remembered} steps when its context is full, fewer than an episode of"
                f" {facts.world} ({facts.limit} steps): take {fix} or more"
            )

    def _region(self, facts: Facts) -> int:
        return self.region or facts.region

    def _sample_steps(self, facts: Facts) -> int:
        """Returns the steps of a training sample."""
        region = self._region(facts)
        return {"ad": self.window, "compressed": 2 * region, "latent": self.regions * region}[self.variant]

    def _grid(self, facts: Facts) -> int:
        """Returns the number of steps of which a sample begins at a multiple: anywhere, or where a region does."""
        return 1 if self.variant == "ad" else self._region(facts)

    def _first_step(self, facts: Facts) -> int:
        """Returns the first step of a history that is learned."""
        return -(-self.skip // self._grid(facts)) * self._grid(facts)

    def model_for(self, facts: Facts) -> InContextModel:
        """Returns the model for an environment."""
        if self.width % (2 * self.heads):
            raise Problem(
                f"width={self.width} is no multiple of 2 x heads={self.heads}: take width={2 * self.heads * max(1, self.width // (2 * self.heads))}"
            )
        shape = Shape(self.width, self.layers, self.heads, self.inner, self.dropout, self.attention_dropout, self.positions)
        size, actions, region = facts.size, facts.env().actions, self._region(facts)
        if self.variant == "ad":
            return PlainModel(shape, size, actions, self.window)
        if self.variant == "compressed":
            return CompressedModel(shape, size, actions, region)
        return LatentModel(shape, size, actions, region, self.latents)

    def model(self) -> InContextModel:
        return self.model_for(self.facts())

    def train_data(self) -> Tensors:
        found = self.histories()
        write_run_file(self.run_folder, ENVIRONMENT_FILE, asdict(found.facts))
        rows = found.split()[0]
        return Tensors(**{name: getattr(found, name)[rows].flatten(0, 1) for name in COLUMNS})

    def augment(self, batch: dict[str, Tensor], rand: Rand) -> dict[str, Tensor]:
        """Cuts a random sequence out of each history; regions begin at their markers."""
        facts = self.facts()
        length, first, grid, steps = self._sample_steps(facts), self._first_step(facts), self._grid(facts), batch["place"].shape[1]
        choices = (steps - first - length) // grid + 1
        start = (rand.uniform(1) * choices).long().clamp(max=choices - 1) * grid + first
        index = start + torch.arange(length, device=start.device)
        return {name: values.gather(1, index) for name, values in batch.items()}

    def eval_data(self) -> Tensors | None:
        if not self.eval_tasks:
            return None
        facts = self.facts()
        tasks = held_out_tasks(facts)[: self.eval_tasks]
        if not tasks:
            return None
        task, stream = torch.tensor(tasks).repeat_interleave(self.eval_streams), torch.arange(self.eval_streams).repeat(len(tasks))
        return Tensors(task=task, stream=stream, **self._eval_parts(task, stream))

    def _eval_parts(self, task: Tensor, stream: Tensor) -> dict[str, Tensor]:
        """Returns the parts of held-out histories whose loss is evaluated; none if a trained model's histories are gone."""
        if self._has_lost_histories():
            return {}
        found = self.histories()
        length, grid = self._sample_steps(found.facts), self._grid(found.facts)
        choices = (found.facts.steps - length) // grid + 1
        index = (stream * choices // self.eval_streams * grid)[:, None] + torch.arange(length)
        row = torch.tensor([found.facts.tasks.index(number) for number in task.tolist()])
        return {name: getattr(found, name)[row, stream % found.facts.streams].gather(1, index) for name in COLUMNS}

    def _has_lost_histories(self) -> bool:
        return self._recorded_facts is not None and self.data != "noise" and not histories.are_at(self.data)

    def loss(self, model: InContextModel, batch: dict[str, Tensor]) -> Any:
        logits, action = self._logits(model, batch)
        loss = F.cross_entropy(logits.flatten(0, 1), action.flatten(), label_smoothing=self.label_smoothing)
        return loss, {"accuracy": (logits.argmax(-1) == action).float().mean(1)}

    def _logits(self, model: InContextModel, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        steps = Steps(batch["place"].long(), batch["action"].long(), batch["reward"], batch["next_place"].long())
        return model(steps).float(), steps.action

    def metrics(self, model: InContextModel, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        played = play(self.env(), model, batch["task"], batch["stream"], self.eval_episodes, self.greedy)
        values = {
            "return": played.returns[:, -LAST_EPISODES:].mean(1), "first_return": played.returns[:, 0],
            "task": batch["task"], "curve": played.returns, "places": played.places,
        }  # fmt: skip
        if "place" not in batch:
            return values
        logits, action = self._logits(model, batch)
        loss = F.cross_entropy(logits.transpose(1, 2), action, reduction="none").mean(1)
        return {"loss": loss, "accuracy": (logits.argmax(-1) == action).float().mean(1)} | values

    def summary(self, values: dict[str, Tensor]) -> dict[str, Any]:
        env, facts = self.env(), self.facts()
        source = torch.zeros(len(facts.tasks), 0) if self._has_lost_histories() else self.histories().returns()
        self._results = []
        for task in values["task"].unique().tolist():
            is_task = values["task"] == task
            returns, places = values["curve"][is_task].float().cpu(), values["places"][is_task][0].cpu()
            optimum = float(env.optimum(torch.tensor([task])))
            learned = source[facts.tasks.index(task)]
            self._results.append(TaskResult(env.label(task), optimum, returns, learned, places, env.goals(task)))
        last = [result.last_return for result in self._results]
        return {"of_optimum": sum(last) / sum(result.optimum for result in self._results), "worst_return": min(last)}

    def remarks(self, model: InContextModel) -> list[str | Picture]:
        shown = [f"{result.label} {result.last_return:.1f}/{result.optimum:.0f}" for result in self._results]
        return [
            f"return of the last {LAST_EPISODES} episodes by held-out task: {', '.join(shown)}",
            Picture("in-context-return", draw_curves(self._results, self.facts().learner)),
            Picture("last-episodes", draw_episodes(self._results, self.env())),
        ]

    def exports(self, model: InContextModel) -> dict[str, tuple[nn.Module, dict[str, Tensor]]]:
        example = torch.zeros(2, self._sample_steps(self.facts()), dtype=torch.long)
        return {"model": (HistoryGraph(model), {"place": example, "action": example, "reward": example.float(), "next_place": example})}

    def predict(self, model: InContextModel, given: str) -> Iterator[str]:
        """Plays one stream of the task with this number or label, and yields each episode's return."""
        facts, env = self.facts(), self.env()
        labels = {env.label(task): task for task in range(env.num_tasks)}
        task = labels.get(given.replace(" ", ""), int(given) if given.isdecimal() else -1)
        if not 0 <= task < env.num_tasks:
            raise Problem(
                f"{given!r} is no task of {facts.world}: give a number from 0 to {env.num_tasks - 1}, or a label such as {env.label(1)}"
            )
        device = next(model.parameters()).device
        row = torch.tensor([task], device=device)
        optimum = float(env.optimum(row.cpu()))
        for number, value in enumerate(
            play(env, model, row, torch.zeros_like(row), self.eval_episodes, self.greedy).returns[0].tolist(), 1
        ):
            yield f"episode {number}: return {value:.0f} of {optimum:.0f}\n"
