"""Tasks that are hard to capture in a CUDA graph or to compile, and a function that trains them on the GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain.data import Tensors
from drivetrain.engine.group import Group
from drivetrain.engine.log.observe import Observer, Observers
from drivetrain.engine.loop import Training
from drivetrain.hardware import detect
from drivetrain.plan.choose import choose
from drivetrain.runs import Run
from drivetrain.task import Task
from drivetrain.watch.files import MetricsFile
from tests.sample_tasks import TASKS, Plain


class Images(Plain):
    """Convolutions with BatchNorm and dropout, uint8 images, keyed augmentation."""

    samples: int = 150
    learning_rate: float = 0.01

    def model(self) -> nn.Module:
        def block(inputs: int, outputs: int) -> nn.Module:
            return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2))

        return nn.Sequential(block(1, 16), block(16, 16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.3), nn.Linear(16, 4))

    def train_data(self) -> Any:
        return self._images(self.samples, 0)

    def eval_data(self) -> Any:
        return self._images(70, 1)

    def _images(self, count: int, seed: int) -> Tensors:
        generator = torch.Generator().manual_seed(seed)
        y = torch.randint(4, (count,), generator=generator)
        x = torch.randint(0, 120, (count, 1, 12, 12), generator=generator)
        x[:, 0, :3] += (y * 30)[:, None, None]
        return Tensors(x.to(torch.uint8), y)

    def augment(self, batch: Any, rand: Any) -> Any:
        x, y = batch
        return x.float() + 20 * rand.normal(1)[:, :, None, None], y

    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        logits = model(x.float() / 255)
        return F.cross_entropy(logits, y), {"accuracy": logits.argmax(-1) == y}

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        x, y = batch
        logits = model(x.float() / 255)
        return {"accuracy": logits.argmax(-1) == y, "loss": F.cross_entropy(logits, y, reduction="none")}


class Sequences(Plain):
    """Next-token prediction; the model is an LSTM."""

    learning_rate: float = 0.01
    dropout: float = 0.2

    def model(self) -> nn.Module:
        return Recurrent(self.dropout)

    def train_data(self) -> Any:
        starts = torch.arange(self.samples) % 11
        return Tensors((starts[:, None] + torch.arange(9)) % 11)

    def eval_data(self) -> Any:
        return self.train_data()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        return {"loss": self.loss(model, batch)}


class Recurrent(nn.Module):
    """An LSTM with tied weights: the embedding is also the output layer."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed, self.drop = nn.Embedding(11, 16), nn.Dropout(dropout)
        self.rnn = nn.LSTM(16, 16, num_layers=2, batch_first=True)
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.rnn(self.embed(x))[0]))


class Attention(Sequences):
    """Next-token prediction by a transformer with dropout, deep enough to be compiled block by block."""

    def model(self) -> nn.Module:
        return Transformer(self.dropout)


class Transformer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 32), nn.Linear(32, 11)
        self.blocks = nn.ModuleList(Block(32, dropout) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2, self.drop = nn.LayerNorm(width), nn.LayerNorm(width), nn.Dropout(dropout)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        n, t, w = x.shape
        q, k, v = (p.view(n, t, 4, w // 4).transpose(1, 2) for p in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(n, t, w)
        x = x + self.drop(self.out(mixed))
        return x + self.drop(self.mlp(self.norm2(x)))


class FrozenBackbone(Plain):
    """A frozen backbone with BatchNorm, a trained head, and an unused module."""

    def model(self) -> nn.Module:
        return Headed()


class Headed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 32), nn.BatchNorm1d(32), nn.ReLU()).requires_grad_(False)
        self.head, self.unused = nn.Sequential(nn.Dropout(0.1), nn.Linear(32, 4)), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))


class HostSync(Plain):
    """Reads a value on the host in its forward pass."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        scale = x.abs().max().item()  # the host waits for the device
        return F.cross_entropy(model(x / max(1.0, scale)), y)


class DataBranch(Plain):
    """Control flow that depends on the data."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        if x.mean() > 0:  # a branch on data
            x = x * 0.5
        return F.cross_entropy(model(x), y)


class DynamicShape(Plain):
    """Shapes that depend on the data."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        selected = y < 3
        return F.cross_entropy(model(x[selected]), y[selected], reduction="sum") / len(x)  # a dynamic shape


class PythonCounter(Plain):
    """Keeps a Python number from step to step."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.calls = getattr(self, "calls", 0) + 1
        return super().loss(model, batch) * (1.0 + 1.0 / self.calls)


GPU_TASKS = {
    k.__name__: k for k in (Images, Sequences, Attention, FrozenBackbone, HostSync, DataBranch, DynamicShape, PythonCounter)
} | TASKS


class Facts(Observer):
    """Records the facts of the plan and the notices."""

    def __init__(self) -> None:
        self.plan: dict[str, Any] = {}
        self.notices: list[str] = []

    def planned(self, facts: dict[str, Any]) -> None:
        self.plan = facts

    def notice(self, text: str) -> None:
        self.notices.append(text)


def train(
    name: str, folder: Path, stop: int | None = None, pins: dict[str, Any] | None = None, group: Group | None = None, **settings: Any
) -> Facts:
    """Trains or resumes a task of `GPU_TASKS` on the GPU, in this process."""
    return train_task(GPU_TASKS[name](**settings), folder, stop, pins, group)


def train_task(task: Task, folder: Path, stop: int | None = None, pins: dict[str, Any] | None = None, group: Group | None = None) -> Facts:
    """Trains or resumes on the GPU, in this process."""
    group = group or Group(0, 1, torch.device("cuda", 0))
    plan = choose(task.settings(), detect(), device="cuda", world_size=group.size, local_procs=group.size, pins=pins)
    facts = Facts()
    observer = Observers([MetricsFile(Run(folder)), facts] if group.is_main else [facts])
    Training(task, plan, Run(folder), group, observer, False).run_to_end(stop)
    observer.close()
    return facts
