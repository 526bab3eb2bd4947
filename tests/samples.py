"""Small tasks, each of which exercises one part of the contracts, and functions to train them."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain.data import Source, Tensors
from drivetrain.engine.group import Group
from drivetrain.engine.log.observe import Observer, Observers
from drivetrain.engine.loop import Training
from drivetrain.hardware import Hardware
from drivetrain.plan.choose import choose
from drivetrain.runs import Run
from drivetrain.task import Task
from drivetrain.watch.files import MetricsFile

HARDWARE = Hardware(2, 2**34, gpu_note="a test")


def blobs(samples: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Points around four centres: a problem a small net learns in a few steps."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (samples,), generator=generator)
    centres = torch.tensor([[2.0, 0, 0, 1], [0, 2, 1, 0], [-2, 0, 1, 1], [0, -2, 0, 1]])
    return centres[labels] + 0.7 * torch.randn(samples, 4, generator=generator), labels


class Plain(Task):
    """A small net; 101 samples, so that the last batch is partial."""

    epochs: int = 2
    global_batch: int = 16
    learning_rate: float = 0.05
    log_every: int = 1
    samples: int = 101
    dropout: float = 0.0

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(self.dropout), nn.Linear(16, 4))

    def train_data(self) -> Any:
        return Tensors(*blobs(self.samples))

    def eval_data(self) -> Any:
        return Tensors(*blobs(37, seed=1))

    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        return F.cross_entropy(model(x), y)

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        x, y = batch
        logits = model(x)
        return {"accuracy": (logits.argmax(-1) == y).float(), "loss": F.cross_entropy(logits, y, reduction="none")}


class Augmented(Plain):
    """Dropout and keyed augmentation."""

    dropout: float = 0.3

    def augment(self, batch: Any, rand: Any) -> Any:
        x, y = batch
        return x + 0.3 * rand.normal(4) * rand.uniform(1), y


class Normed(Plain):
    """BatchNorm, whose statistics a forward pass changes, and dropout."""

    samples: int = 96

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 4))


class Listed(torch.utils.data.Dataset[Any]):
    """A map-style data set with randomness of its own and dict samples."""

    def __init__(self, samples: int, noise: float) -> None:
        self.x, self.y = blobs(samples)
        self.noise = noise

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        return {"inputs": {"x": self.x[i] + self.noise * torch.randn(4)}, "y": self.y[i], "id": i}


class Loaded(Plain):
    """A map-style data set with nested dict batches."""

    noise: float = 0.2

    def train_data(self) -> Any:
        return Listed(self.samples, self.noise)

    def eval_data(self) -> Any:
        return Listed(37, self.noise)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return F.cross_entropy(model(batch["inputs"]["x"]), batch["y"])

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        return {"loss": F.cross_entropy(model(batch["inputs"]["x"]), batch["y"], reduction="none")}


class Tokens(Plain):
    """A mean over tokens instead of samples: samples have different numbers of tokens."""

    def train_data(self) -> Any:
        x, y = blobs(self.samples)
        return Tensors(x=x, y=y, tokens=torch.arange(len(x)) % 7)  # some have none at all

    def loss(self, model: nn.Module, batch: Any) -> Any:
        losses = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
        return (losses * batch["tokens"]).sum(), batch["tokens"].sum()

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        x, y = batch
        return {"nll": (F.cross_entropy(model(x), y, reduction="sum"), torch.tensor(len(x)))}


class Parts(Plain):
    """A loss with several parts, each with its own count, and a metric that is only logged."""

    def train_data(self) -> Any:
        x, y = blobs(self.samples)
        return Tensors(x=x, y=y, marked=(torch.arange(len(x)) % 3 == 0))

    def counts(self, batch: Any) -> dict[str, Any]:
        return {"marked": batch["marked"].sum()}

    def loss(self, model: nn.Module, batch: Any) -> Any:
        logits = model(batch["x"])
        losses = F.cross_entropy(logits, batch["y"], reduction="none")
        penalty = logits.pow(2).mean(-1).mean() * 0.1
        return (
            {"all": losses.mean(), "marked": ((losses * batch["marked"]).sum(), batch["marked"].sum()), "penalty": penalty},
            {"confidence": logits.softmax(-1).amax(-1)},
        )

    def eval_data(self) -> Any:
        return None


class Walkers(Source):
    """Groups whose state continues from epoch to epoch: the collected data depends on it and on the model."""

    groups, passes = 6, 2

    def __init__(self) -> None:
        self.place: Tensor | None = None

    def __len__(self) -> int:
        return self.groups * 8

    def collect(self, model: nn.Module, rand: Any, total: Any) -> Tensors:
        if self.place is None:
            self.place = rand.normal(4)
        rows = []
        for _ in range(8):
            self.place = 0.9 * self.place + 0.3 * rand.normal(4) + 0.1 * model(self.place).tanh()
            rows.append(self.place)
        x = torch.stack(rows, 1).reshape(-1, 4)
        mean = total(x.sum(0)) / len(self)
        return Tensors(x, (x - mean).argmax(-1))

    def state(self) -> dict[str, Tensor]:
        assert self.place is not None
        return {"place": self.place}

    def load(self, state: dict[str, Tensor]) -> None:
        self.place = state["place"]


class Walk(Plain):
    epochs: int = 4
    global_batch: int = 12

    def train_data(self) -> Any:
        return Walkers()


class CountingSGD(torch.optim.SGD):
    """Counts steps in its parameter groups and has no fused kernel."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for parameter in group["params"]:
                parameter.data.add_(parameter.grad, alpha=-group["lr"] / group["count"] ** 0.5)


class OwnOptimizer(Plain):
    """Two parameter groups with different learning rates, an optimizer with state in its groups, and a schedule."""

    kind: str = "rmsprop"

    def optimizer(self, model: Any) -> Any:
        groups = [{"params": model[0].parameters(), "lr": 0.02}, {"params": model[3].parameters(), "lr": 0.01}]
        return torch.optim.RMSprop(groups) if self.kind == "rmsprop" else CountingSGD(groups)

    def schedule(self, step: int, steps: int) -> float:
        return 1.0 - 0.5 * step / steps


class InPlace(Parts):
    """Changes its batch in place, so doing it twice changes the result."""

    def augment(self, batch: Any, rand: Any) -> Any:
        batch["x"].add_(rand.normal(4))
        return batch


class Double(Plain):
    def model(self) -> nn.Module:
        return super().model().double()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return super().loss(model, (batch[0].double(), batch[1]))

    def eval_data(self) -> Any:
        return None


class Bag:
    """A batch class, as other libraries have them."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def to(self, device: torch.device) -> Bag:
        return Bag(self.x.to(device), self.y.to(device))


class Odd(Plain):
    """A sparse embedding, an LSTM, tied weights, a frozen module, an unused one, and batches of a custom class."""

    learning_rate: float = 0.02

    def model(self) -> nn.Module:
        net = nn.ModuleDict({
            "embed": nn.Embedding(11, 8, sparse=True), "rnn": nn.LSTM(8, 8, batch_first=True), "frozen": nn.Linear(8, 8),
            "head": nn.Linear(8, 11, bias=False), "tied": nn.Linear(8, 11, bias=False), "unused": nn.Linear(3, 3),
        })  # fmt: skip
        net["tied"].weight = net["head"].weight
        net["frozen"].requires_grad_(False)
        return net

    def train_data(self) -> Any:
        starts = torch.arange(self.samples) % 11
        return torch.utils.data.TensorDataset((starts[:, None] + torch.arange(6)) % 11, starts)

    def collate(self, samples: list[Any]) -> Bag:
        return Bag(torch.stack([s[0] for s in samples]), torch.stack([s[1] for s in samples]))

    def eval_data(self) -> Any:
        return self.train_data()

    def loss(self, model: Any, batch: Any) -> Any:
        hidden, _ = model["rnn"](model["embed"](batch.x[:, :-1]))
        logits = model["head"](hidden) + model["tied"](model["frozen"](hidden))
        return F.cross_entropy(logits.transpose(1, 2), batch.x[:, 1:])

    def metrics(self, model: Any, batch: Any) -> dict[str, Any]:
        return {"loss": self.loss(model, batch)}


class HostDice(Plain):
    """Draws from Python's and numpy's generators inside the loss."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return super().loss(model, batch) * (1 + random.random() + np.random.rand())


class Gambler(Walkers):
    """Draws from torch's generator instead of `rand`."""

    def collect(self, model: nn.Module, rand: Any, total: Any) -> Tensors:
        found = super().collect(model, rand, total)
        found.columns[0] = found.columns[0] + torch.randn_like(found.columns[0])
        return found


class Gamble(Walk):
    def train_data(self) -> Any:
        return Gambler()


class Taught(Plain):
    """A teacher that is a moving average of the net, updated in the loss."""

    def model(self) -> nn.Module:
        return nn.ModuleDict({"net": super().model(), "teacher": super().model().requires_grad_(False)})

    def loss(self, model: Any, batch: Any) -> Any:
        x, y = batch
        with torch.no_grad():
            for kept, now in zip(model["teacher"].parameters(), model["net"].parameters(), strict=True):
                kept.data.mul_(0.9).add_(now.data, alpha=0.1)
        logits = model["net"](x)
        return F.cross_entropy(logits, y) + F.mse_loss(logits, model["teacher"](x))

    def metrics(self, model: Any, batch: Any) -> dict[str, Any]:
        x, y = batch
        return {"loss": F.cross_entropy(model["net"](x), y, reduction="none")}


class RankLogs(Plain):
    """Only rank 0 counts calls in a Python attribute."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        if os.environ.get("RANK") == "0":
            self.seen = getattr(self, "seen", 0) + 1
        return super().loss(model, batch)


class DerivedAdamW(torch.optim.AdamW):
    """A subclass of a fused optimizer that deletes the attributes its kernel reads."""

    def step(self, closure: Any = None) -> Any:
        for name in ("grad_scale", "found_inf"):
            if hasattr(self, name):
                delattr(self, name)
        return super().step(closure)


class Derived(Plain):
    derived: bool = True

    def optimizer(self, model: Any) -> Any:
        kind = DerivedAdamW if self.derived else torch.optim.AdamW
        return kind(model.parameters(), lr=self.learning_rate, weight_decay=0.01, fused=True)


class Stretching(Walkers):
    """Collects columns of different width and order in each epoch."""

    def collect(self, model: nn.Module, rand: Any, total: Any) -> Tensors:
        found = super().collect(model, rand, total)
        self.turn = getattr(self, "turn", 0) + 1
        x, y = found.columns
        padded = torch.cat([x, torch.zeros(len(x), self.turn % 3, device=x.device)], 1)
        return Tensors(x=padded, y=y) if self.turn % 2 else Tensors(y=y, x=padded)


class Stretched(Walk):
    def train_data(self) -> Any:
        return Stretching()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return F.cross_entropy(model(batch["x"][:, :4]), batch["y"])


class Exploding(Plain):
    """The loss is `spike` times larger, and NaN from call number `bad` on if that is not 0."""

    spike: float = 1.0
    bad: int = 0

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self._calls = getattr(self, "_calls", 0) + 1
        value = super().loss(model, batch)
        return value * (float("nan") if self.bad and self._calls >= self.bad else self.spike)


TASKS = {
    t.__name__: t
    for t in (
        Plain,
        Augmented,
        Normed,
        Loaded,
        Tokens,
        Parts,
        Walk,
        OwnOptimizer,
        InPlace,
        Double,
        Odd,
        HostDice,
        Gamble,
        Exploding,
        Taught,
        RankLogs,
        Derived,
        Stretched,
    )
}


def training(
    name: str, folder: str, group: Group, settings: dict[str, Any], pins: dict[str, Any] | None = None, stop: Observer | None = None
) -> Training:
    """`stop` sees every observation point, and is true once it asks for a stop."""
    task = TASKS[name](**settings)
    plan = choose(
        task.settings(), HARDWARE, device="cpu", world_size=group.size, local_procs=group.size, pins={"threads": 1} | (pins or {})
    )
    run = Run(folder)
    observers: list[Observer] = [MetricsFile(run)] if group.is_main else []
    if stop is None:
        return Training(task, plan, run, group, Observers(observers), False)
    return Training(task, plan, run, group, Observers([*observers, stop]), stop)


def train(
    name: str, folder: str, settings: dict[str, Any], pins: dict[str, Any] | None, stop_after: int | None, group: Group
) -> list[dict[str, Any]]:
    """Train (or go on) in a folder; gives its metrics, without those of the clock."""
    job = training(name, folder, group, settings, pins)
    job.run_to_end(stop_after)
    job.setup.observer.close()
    return rows(folder) if group.is_main else []


def rows(folder: str | Path) -> list[dict[str, Any]]:
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    clock = ("time", "memory_bytes")
    return [{k: v for k, v in json.loads(line).items() if k not in clock and not k.endswith("_per_second")} for line in lines]


def weights(folder: str | Path) -> bytes:
    return (Path(folder) / "model" / "model.safetensors").read_bytes()
