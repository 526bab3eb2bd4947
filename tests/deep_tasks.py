"""Tasks for the sharding strategies: deep models with tied weights, two towers or BatchNorm."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain.data import Tensors
from drivetrain.engine.group import Group
from tests import sample_tasks
from tests.sample_tasks import Plain

WORDS, WIDTH, LENGTH = 23, 16, 7


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.mix(self.before(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        x = x + self.dropout(self.out(mixed))
        return x + self.dropout(self.narrow(F.gelu(self.wide(self.after(x)))))


class Net(nn.Module):
    """A transformer with tied weights, called through `logits` instead of `forward`."""

    def __init__(self, depth: int, dropout: float, scalar: bool) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.scale = nn.Parameter(torch.tensor(1.0) if scalar else torch.ones(1))
        nn.init.normal_(self.words.weight, std=0.3)

    def logits(self, x: Tensor) -> Tensor:
        x = self.words(x) + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) * self.scale


class Transformer(Plain):
    """Predicts the next word of sequences that repeat four words; the loss is a mean over tokens, and samples differ in length."""

    samples: int = 45
    epochs: int = 2
    global_batch: int = 12
    learning_rate: float = 0.2
    optim: Literal["adamw", "adam", "sgd"] = "sgd"
    clip: float = 0.5
    depth: int = 4
    scalar: bool = False

    def model(self) -> nn.Module:
        return Net(self.depth, self.dropout, self.scalar)

    def train_data(self) -> Any:
        generator = torch.Generator().manual_seed(3)
        words = torch.randint(WORDS, (self.samples, LENGTH + 1), generator=generator)
        words[:, 4:] = words[:, :4]
        return Tensors(words=words, length=torch.randint(2, LENGTH + 1, (self.samples,), generator=generator))

    def eval_data(self) -> Any:
        return self.train_data()

    def loss(self, model: Any, batch: Any) -> Any:
        words = batch["words"]
        losses = F.cross_entropy(model.logits(words[:, :-1]).transpose(1, 2), words[:, 1:], reduction="none")
        is_counted = torch.arange(LENGTH, device=words.device) < batch["length"][:, None]
        return (losses * is_counted).sum(), is_counted.sum()

    def metrics(self, model: Any, batch: Any) -> dict[str, Any]:
        return {"loss": self.loss(model, batch)}


class TwoPartLoss(Transformer):
    """A loss of two parts: a mean over marked samples, counted by `counts`, and a mean over all samples."""

    def counts(self, batch: Any) -> dict[str, Any]:
        return {"marked": (batch["length"] > 4).sum()}

    def loss(self, model: Any, batch: Any) -> Any:
        words = batch["words"]
        logits = model.logits(words[:, :-1]).transpose(1, 2)
        losses = F.cross_entropy(logits, words[:, 1:], reduction="none").mean(-1)
        marked = batch["length"] > 4
        return {"marked": ((losses * marked).sum(), marked.sum()), "penalty": 0.1 * logits.pow(2).mean()}

    def metrics(self, model: Any, batch: Any) -> dict[str, Any]:
        return {"loss": self.loss(model, batch)["penalty"]}


class BatchNormBlocks(Plain):
    """BatchNorm in repeated blocks."""

    samples: int = 96

    def model(self) -> nn.Module:
        blocks = [nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU()) for _ in range(4)]
        return nn.Sequential(nn.Linear(4, 16), nn.Sequential(*blocks), nn.Linear(16, 4))


class ConvBlock(nn.Module):
    """A residual block on images."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv, self.mix = nn.GroupNorm(1, WIDTH), nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.Conv2d(WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(F.gelu(self.conv(self.norm(x))))


class Towers(nn.Module):
    """An image encoder and a text encoder: each has repeated blocks, and neither holds most of the parameters."""

    def __init__(self) -> None:
        super().__init__()
        stages = [nn.Conv2d(3, WIDTH, 2, 2), nn.Sequential(*(ConvBlock() for _ in range(5)))]
        self.images = nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.words = nn.Embedding(4 * WORDS, WIDTH)
        self.texts = nn.ModuleList(Block(0.0) for _ in range(4))
        self.head = nn.Linear(2 * WIDTH, 24 * WORDS)

    def forward(self, images: Tensor, words: Tensor) -> Tensor:
        x = self.words(words)
        for block in self.texts:
            x = block(x)
        return self.head(torch.cat((self.images(images), x.mean(1)), 1))


class TwoTowers(Plain):
    """Classifies pairs of an image and a text: the label is the image's brightness plus the text's first word."""

    samples: int = 45
    epochs: int = 2
    global_batch: int = 12
    learning_rate: float = 0.2
    optim: Literal["adamw", "adam", "sgd"] = "sgd"
    clip: float = 0.5

    def model(self) -> nn.Module:
        return Towers()

    def train_data(self) -> Any:
        generator = torch.Generator().manual_seed(3)
        brightness, first_word = (torch.randint(n, (self.samples,), generator=generator) for n in (4, WORDS))
        images = torch.rand(self.samples, 3, 8, 8, generator=generator) + brightness[:, None, None, None]
        return Tensors(images=images, words=first_word[:, None] + torch.arange(LENGTH), label=brightness + first_word)

    def eval_data(self) -> Any:
        return self.train_data()

    def loss(self, model: Any, batch: Any) -> Any:
        return F.cross_entropy(model(batch["images"], batch["words"]), batch["label"])

    def metrics(self, model: Any, batch: Any) -> dict[str, Any]:
        return {"loss": F.cross_entropy(model(batch["images"], batch["words"]), batch["label"], reduction="none")}


sample_tasks.TASKS |= {t.__name__: t for t in (Transformer, TwoPartLoss, BatchNormBlocks, TwoTowers)}


def train(
    name: str, folder: str, settings: dict[str, Any], pins: dict[str, Any] | None, stop_after: int | None, group: Group
) -> list[dict[str, Any]]:
    return sample_tasks.train(name, folder, settings, pins, stop_after, group)
