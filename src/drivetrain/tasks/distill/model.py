"""Models that read a history of transitions and give the next action. They differ in what they remember of a long history.

A step of a history is one token: the player's place, and the transition before it (action, reward, next place). The model's
output at that token gives the action, so that all steps of a sequence are learned at once. The first step of a sequence has
no transition before it, in training as in play.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from drivetrain.tasks.distill.layers import Cache, Shape, Transformer

OPEN, CLOSE = 1, 2
"""Region markers of tokens, as in guide 002; 0 is a token inside a region."""


@dataclass
class Steps:
    """Consecutive steps of histories: tensors [rows, steps]."""

    place: Tensor
    action: Tensor
    reward: Tensor
    next_place: Tensor

    def __len__(self) -> int:
        return self.place.shape[1]

    def part(self, start: int, stop: int) -> Steps:
        return Steps(*(values[:, start:stop] for values in (self.place, self.action, self.reward, self.next_place)))


@dataclass
class Context:
    """What a model remembers while it plays; every row has its own environment."""

    cache: Cache
    transitions: list[tuple[Tensor, Tensor, Tensor, Tensor]] = field(default_factory=list)
    """The transitions in the cache: (place, action, reward, next place), each a tensor [rows]."""
    in_region: int = 0
    """Steps of the present region in the cache."""

    def recent(self, count: int) -> Steps:
        """Returns the last transitions."""
        return Steps(*(torch.stack(values, 1) for values in zip(*self.transitions[-count:], strict=True)))


class StepEmbedding(nn.Module):
    """Embeds steps. A cell is the sum of its row's and its column's embedding, so that cells never seen as goals have one, too."""

    def __init__(self, width: int, size: int, actions: int, has_regions: bool) -> None:
        super().__init__()
        self.size, self.actions = size, actions
        self.row, self.column = nn.Embedding(size + 1, width), nn.Embedding(size + 1, width)
        self.next_row, self.next_column = nn.Embedding(size + 1, width), nn.Embedding(size + 1, width)
        self.action, self.reward = nn.Embedding(actions + 1, width), nn.Linear(1, width, bias=False)
        self.marker = nn.Embedding(3, width) if has_regions else None
        for module in self.children():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.1)

    def forward(self, place: Tensor, action: Tensor, reward: Tensor, next_place: Tensor, marker: Tensor | None = None) -> Tensor:
        """Embeds tokens: the place now, and the transition before. Negative numbers stand for what a token does not have."""
        none = self.size
        row, column = torch.where(place < 0, none, place // self.size), torch.where(place < 0, none, place % self.size)
        next_row = torch.where(next_place < 0, none, next_place // self.size)
        next_column = torch.where(next_place < 0, none, next_place % self.size)
        x: Tensor = self.row(row) + self.column(column) + self.next_row(next_row) + self.next_column(next_column)
        x = x + self.action(torch.where(action < 0, self.actions, action)) + self.reward(reward[..., None].to(self.reward.weight.dtype))
        if marker is not None and self.marker is not None:
            x = x + self.marker(marker)
        return x

    def of_steps(self, steps: Steps) -> Tensor:
        """Embeds a sequence; its first step has no transition before it."""
        previous = (_shifted(values) for values in (steps.action, steps.reward, steps.next_place))
        action, reward, next_place = previous
        reward = torch.cat((torch.zeros_like(reward[:, :1]), reward[:, 1:]), 1)
        tokens: Tensor = self(steps.place, action, reward, next_place)
        return tokens

    def of_region(self, steps: Steps, is_complete: bool) -> Tensor:
        """Embeds a region: its first token opens it, and after its last step a token with the last transition closes it."""
        action, reward, next_place = (_extended(values) for values in (steps.action, steps.reward, steps.next_place))
        reward = torch.cat((torch.zeros_like(reward[:, :1]), reward[:, 1:]), 1)
        place = torch.cat((steps.place, torch.full_like(steps.place[:, :1], -1)), 1)
        marker = torch.zeros_like(place)
        marker[:, 0], marker[:, -1] = OPEN, CLOSE
        tokens: Tensor = self(place, action, reward, next_place, marker)
        return tokens if is_complete else tokens[:, :-1]


def _shifted(values: Tensor) -> Tensor:
    """Returns each step's previous value; -1 for the first step."""
    return _extended(values)[:, :-1]


def _extended(values: Tensor) -> Tensor:
    return torch.cat((torch.full_like(values[:, :1], -1), values), 1)


class InContextModel(nn.Module):
    """Base of the models. `forward` gives the logits of the actions at all steps of a history; `act` at one step after another."""

    def __init__(self, shape: Shape, size: int, actions: int, capacity: int, has_regions: bool) -> None:
        super().__init__()
        self.embedding = StepEmbedding(shape.width, size, actions, has_regions)
        self.transformer = Transformer(shape, capacity)
        self.head = nn.Linear(shape.width, actions)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2 and name.startswith("transformer.blocks"):
                nn.init.normal_(
                    parameter, std=0.02 if "output" not in name and "contract" not in name else 0.02 / (2 * shape.layers) ** 0.5
                )

    @property
    def context_length(self) -> int:
        """Steps of history that reach the model directly."""
        raise NotImplementedError

    @property
    def shortest_context(self) -> int:
        """Steps of history that reach the model directly after it has dropped what does not fit."""
        raise NotImplementedError

    def forward(self, steps: Steps) -> Tensor:
        """Returns logits [rows, steps, actions]."""
        raise NotImplementedError

    def start(self) -> Context:
        """Returns an empty context."""
        return Context(self.transformer.new_cache())

    def act(self, context: Context, place: Tensor) -> Tensor:
        """Returns logits [rows, actions] for the step at this place, and adds the step to the context."""
        raise NotImplementedError

    def observe(self, context: Context, transition: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
        """Adds the transition (place, action, reward, next place) that followed `act`."""
        context.transitions.append(transition)

    def _token(self, context: Context, place: Tensor, marker: Tensor | None) -> Tensor:
        """Embeds the present step, with the transition before it unless it is the first of its region."""
        if context.in_region == 0:
            none = torch.full_like(place, -1)
            before = none, torch.zeros(place.shape, device=place.device), none
        else:
            before = context.transitions[-1][1:]
        token: Tensor = self.embedding(place[:, None], *(values[:, None] for values in before), marker)
        return token


class PlainModel(InContextModel):
    """Reads the last transitions, at most `window`. When the window is full, it keeps the newer half."""

    def __init__(self, shape: Shape, size: int, actions: int, window: int) -> None:
        super().__init__(shape, size, actions, window, has_regions=False)
        self.window = window

    @property
    def context_length(self) -> int:
        return self.window

    @property
    def shortest_context(self) -> int:
        return self.window // 2

    def forward(self, steps: Steps) -> Tensor:
        logits: Tensor = self.head(self.transformer(self.embedding.of_steps(steps)))
        return logits

    def act(self, context: Context, place: Tensor) -> Tensor:
        if context.in_region == self.window:
            self._keep_newer_half(context)
        logits: Tensor = self.head(self.transformer(self._token(context, place, None), context.cache)[:, 0])
        context.in_region += 1
        return logits

    def _keep_newer_half(self, context: Context) -> None:
        kept = self.window // 2
        context.cache, context.in_region = self.transformer.new_cache(), kept
        if kept:
            self.transformer(self.embedding.of_steps(context.recent(kept)), context.cache)
        del context.transitions[: -max(1, kept)]


class CompressedModel(InContextModel):
    """Reads the region before the present one, and the present region: guide 002's compressed context.

    Regions are `region` steps long; markers open and close them. When a region is full, the one before it is dropped.
    """

    def __init__(self, shape: Shape, size: int, actions: int, region: int) -> None:
        super().__init__(shape, size, actions, 2 * (region + 1), has_regions=True)
        self.region = region

    @property
    def context_length(self) -> int:
        return 2 * self.region

    @property
    def shortest_context(self) -> int:
        return self.region

    def forward(self, steps: Steps) -> Tensor:
        """`steps` is a history of one or two regions; the last may be shorter."""
        tokens = [
            self.embedding.of_region(steps.part(i, i + self.region), is_complete=i + self.region < len(steps))
            for i in range(0, len(steps), self.region)
        ]
        hidden = self.transformer(torch.cat(tokens, 1))
        if len(tokens) > 1:
            hidden = torch.cat((hidden[:, : self.region], hidden[:, self.region + 1 :]), 1)
        logits: Tensor = self.head(hidden)
        return logits

    def act(self, context: Context, place: Tensor) -> Tensor:
        if context.in_region == self.region:
            self._begin_region(context)
        marker = torch.full_like(place[:, None], OPEN if context.in_region == 0 else 0)
        logits: Tensor = self.head(self.transformer(self._token(context, place, marker), context.cache)[:, 0])
        context.in_region += 1
        return logits

    def _begin_region(self, context: Context) -> None:
        """Reads the region that has just become full into a new cache."""
        context.cache, context.in_region = self.transformer.new_cache(), 0
        self.transformer(self.embedding.of_region(context.recent(self.region), is_complete=True), context.cache)
        context.transitions.clear()


class LatentModel(InContextModel):
    """Compresses each full region, with what it knew before, into latent tokens, from which the next region goes on."""

    def __init__(self, shape: Shape, size: int, actions: int, region: int, latents: int) -> None:
        super().__init__(shape, size, actions, 2 * latents + region + 1, has_regions=True)
        self.region, self.num_latents = region, latents
        self.first = nn.Parameter(torch.randn(latents, shape.width) * 0.02)
        """The latent tokens before the first region."""
        self.query = nn.Parameter(torch.randn(latents, shape.width) * 0.02)
        """The tokens at whose positions the transformer writes new latents."""

    @property
    def context_length(self) -> int:
        return self.region

    @property
    def shortest_context(self) -> int:
        return self.region

    def forward(self, steps: Steps) -> Tensor:
        latents, logits = self.first.expand(steps.place.shape[0], -1, -1), []
        for i in range(0, len(steps), self.region):
            region, is_last = steps.part(i, i + self.region), i + self.region >= len(steps)
            tokens = self.embedding.of_region(region, is_complete=not is_last)
            queries = [] if is_last else [self.query.expand(tokens.shape[0], -1, -1).to(tokens.dtype)]
            hidden = self.transformer(torch.cat((latents.to(tokens.dtype), tokens, *queries), 1))
            logits.append(self.head(hidden[:, self.num_latents : self.num_latents + len(region)]))
            latents = hidden[:, hidden.shape[1] - self.num_latents :]
        return torch.cat(logits, 1)

    def act(self, context: Context, place: Tensor) -> Tensor:
        if context.in_region == self.region:
            self._compress(context)
        if context.cache.length == 0:
            self.transformer(self.first.expand(len(place), -1, -1), context.cache)
        marker = torch.full_like(place[:, None], OPEN if context.in_region == 0 else 0)
        logits: Tensor = self.head(self.transformer(self._token(context, place, marker), context.cache)[:, 0])
        context.in_region += 1
        return logits

    def _compress(self, context: Context) -> None:
        """Closes the region, writes new latents, and begins the next region from them."""
        _, action, reward, next_place = context.transitions[-1]
        none, close = torch.full_like(action, -1), torch.full_like(action, CLOSE)
        closing = self.embedding(*(values[:, None] for values in (none, action, reward, next_place, close)))
        queries = self.query.expand(len(action), -1, -1)
        latents = self.transformer(torch.cat((closing, queries.to(closing.dtype)), 1), context.cache)[:, 1:]
        context.cache, context.in_region = self.transformer.new_cache(), 0
        self.transformer(latents, context.cache)
        context.transitions.clear()
