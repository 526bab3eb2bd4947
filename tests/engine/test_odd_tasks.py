"""What tasks give that is unusual: it trains, saves and goes on, or one line names the hook and the way out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from drivetrain.data import Source, Tensors
from drivetrain.engine.group import Group
from drivetrain.engine.log.observe import Observer, Observers
from drivetrain.engine.loop import Training
from drivetrain.outcomes import Problem
from drivetrain.plan.choose import choose
from drivetrain.runs import Run
from drivetrain.watch.files import MetricsFile
from tests.processes import on_ranks
from tests.samples import HARDWARE, Plain, blobs, rows

Hooks = dict[str, Any]


class With(nn.Module):
    """A small net beside a tensor of an unusual form."""

    def __init__(self, tensor: Any = None, persistent: bool = True) -> None:
        super().__init__()
        self.net = nn.Linear(4, 4)
        self.register_buffer("odd", tensor, persistent)

    def forward(self, x: Any) -> Any:
        return self.net(x)


class Mixing(With):
    """Uses its sparse buffer."""

    def forward(self, x: Any) -> Any:
        return self.net(torch.sparse.mm(self.odd, x.T).T)


class SparseEmbedding(With):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 4, sparse=True)

    def forward(self, x: Any) -> Any:
        return self.net(x) + self.embed(x.argmax(-1))


class Twice(nn.Module):
    """One layer under two names, and one of its parameters under a third."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.again, self.other.weight = self.one, self.one.weight

    def forward(self, x: Any) -> Any:
        return self.other(self.again(x))


class Rotations(nn.Module):
    """Complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.cfloat))

    def forward(self, x: Any) -> Any:
        return (x.to(torch.cfloat) @ self.weight).abs()


class Listed(torch.utils.data.Dataset[Any]):
    def __init__(self) -> None:
        self.x, self.y = blobs(20)

    def __len__(self) -> int:
        return 20

    def __getitem__(self, i: int) -> Any:
        return self.x[i], self.y[i]


class Collected(Source):
    groups = 2

    def __init__(self, given: Any, kept: Any = None) -> None:
        self.given, self.kept = given, kept

    def __len__(self) -> int:
        return 16

    def collect(self, model: Any, rand: Any, total: Any) -> Any:
        return self.given

    def state(self) -> Any:
        return {} if self.kept is None else self.kept


class SparseState(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["mask"] = torch.eye(2).to_sparse()


def model(make: Callable[[], Any]) -> Hooks:
    return {"model": lambda self: make()}


def loss(give: Callable[[Any, Any], Any]) -> Hooks:
    return {"loss": lambda self, model, batch: give(F.cross_entropy(model(batch[0]), batch[1]), batch[0])}


def metrics(give: Callable[[Any], Any]) -> Hooks:
    return {"metrics": lambda self, model, batch: give(model(batch[0]))}


def batches(give: Callable[[int, Any], Any]) -> Hooks:
    """Metrics that depend on which batch it is."""

    def metrics_of(self: Any, model: Any, batch: Any) -> Any:
        self._batches = getattr(self, "_batches", 0) + 1
        return give(self._batches, model(batch[0]))

    return {"metrics": metrics_of}


def optimizer(make: Callable[[Any], Any]) -> Hooks:
    return {"optimizer": lambda self, model: make(model)}


def counted(count: Any) -> Hooks:
    return loss(lambda value, x: {"a": (value, 3), "b": value}) | {"counts": lambda self, batch: count}


def in_format(dtype: torch.dtype) -> Hooks:
    def loss_of(self: Any, model: Any, batch: Any) -> Any:
        return F.cross_entropy(model(batch[0].to(dtype)), batch[1])

    return model(lambda: nn.Linear(4, 4).to(dtype)) | {"loss": loss_of, "metrics": lambda self, m, b: {"loss": loss_of(self, m, b)}}


def with_scheduler(model: Any) -> torch.optim.Optimizer:
    made = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(made, 3)
    return made


def limited(limits: Any) -> Hooks:
    def train_data(self: Any) -> Any:
        source = Collected(Tensors(*blobs(16)))
        source.limits = limits
        return source

    return {"train_data": train_data, "global_batch": 8}


def collected(*source: Any) -> Hooks:
    return {"train_data": lambda self: Collected(*source), "global_batch": 8}


REFUSED: dict[str, tuple[Hooks, str]] = {
    # the model
    "sparse buffer": (model(lambda: Mixing(torch.eye(4).to_sparse())), r"model\(\) has a sparse tensor 'odd'.*persistent=False"),
    "csr buffer": (model(lambda: Mixing(torch.eye(4).to_sparse_csr())), r"model\(\) has a sparse csr tensor 'odd'"),
    "quantized buffer": (
        model(lambda: With(torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8))), r"model\(\) has a quantized tensor 'odd'"),
    "nested buffer": (model(lambda: With(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))), "a nested tensor 'odd'"),
    "meta weights": (model(lambda: nn.Linear(4, 4, device="meta")), r"model\(\) has no values for 'weight' \(device meta\)"),
    "no parameters": (model(nn.Identity), "there is nothing to train"),
    "frozen": (model(lambda: nn.Linear(4, 4).requires_grad_(False)), "there is nothing to train"),
    # the loss
    "complex loss": (loss(lambda value, x: value * 1j), r"loss\(\) gave a complex tensor.*real number"),
    "complex part": (loss(lambda value, x: {"a": value, "b": value * 1j}), "complex tensor of shape .* for 'b'"),
    "complex total": (loss(lambda value, x: (value * 1j, len(x))), "complex tensor"),
    "meta loss": (loss(lambda value, x: value.to("meta")), r"loss\(\) gave a tensor .*without values"),
    "whole number": (loss(lambda value, x: (value > 0).sum()), "without a gradient"),
    "detached": (loss(lambda value, x: value.detach()), "without a gradient"),
    "float": (loss(lambda value, x: value.item()), r"loss\(\) gave a float"),
    "no loss": (loss(lambda value, x: None), r"loss\(\) gave a NoneType"),
    "vector": (loss(lambda value, x: value[None]), r"with shape \[1\]"),
    "count of many": (loss(lambda value, x: (value, torch.ones(len(x)))), r"count loss\(\) gave for 'loss' is a tensor of shape \[16\]"),
    "count of letters": (loss(lambda value, x: (value, "16")), "is '16'"),
    "count nan": (loss(lambda value, x: (value, float("nan"))), "is nan"),
    "count below 0": (loss(lambda value, x: (value, -16)), "is -16"),
    "count complex": (loss(lambda value, x: (value, torch.tensor(3j))), "complex tensor"),
    "count tensor nan": (loss(lambda value, x: (value, torch.tensor(float("nan")))), "sum to nan at step 1"),
    "count tensor below 0": (loss(lambda value, x: (value, -torch.tensor(len(x)))), r"loss\(\) gave counts for 'loss' that sum to -16 at step 1"),
    "counts list": (counted(["a"]), r"counts\(\) gave a list"),
    "counts letters": (counted({"a": "x"}), r"count counts\(\) gave for 'a' is 'x'"),
    "counts of many": (counted({"a": torch.ones(3)}), r"tensor of shape \[3\]"),
    "counts none": (counted({"a": None}), "is None"),
    "logged letters": (loss(lambda value, x: (value, {"s": "x"})), r"logged figure 's' of loss\(\) is 'x'"),
    "logged complex": (loss(lambda value, x: (value, {"s": x * 1j})), "logged figure 's'.*complex"),
    "logged total": (loss(lambda value, x: (value, {"s": ("x", 1)})), "has the total 'x'"),
    "logged totals": (loss(lambda value, x: (value, {"s": (x.sum(0), 1)})), r"has the total a tensor of shape \[4\]"),
    "logged count": (loss(lambda value, x: (value, {"s": (value, "x")})), "logged figure 's' is 'x'"),
    # metrics
    "letters": (metrics(lambda out: {"a": "x"}), r"metrics\(\) gave 'x' for 'a'"),
    "none": (metrics(lambda out: {"a": None}), r"metrics\(\) gave None for 'a'"),
    "truth": (metrics(lambda out: {"a": True}), r"metrics\(\) gave True for 'a'"),
    "numpy": (metrics(lambda out: {"a": out.numpy()}), r"metrics\(\) gave a ndarray for 'a'"),
    "complex metric": (metrics(lambda out: {"a": out[:, 0] * 1j}), r"metrics\(\) gave a complex tensor"),
    "sparse metric": (metrics(lambda out: {"a": out.to_sparse()}), r"metrics\(\) gave a sparse_coo tensor"),
    "pair of letters": (metrics(lambda out: {"a": ("x", 1)}), r"metrics\(\) gave \('x', 1\) for 'a'"),
    "pair of totals": (metrics(lambda out: {"a": (out.sum(0), 3)}), "two real numbers"),
    "triple": (metrics(lambda out: {"a": (out.sum(), 1, 2)}), "two real numbers"),
    "pair below 0": (metrics(lambda out: {"a": (out.sum(), -3)}), r"metrics\(\) gave the count -12 for 'a'"),
    "no metrics": (metrics(lambda out: None), r"metrics\(\) gave NoneType"),
    "other widths": (batches(lambda n, out: {"a": out[:, :n]}), r"metrics\(\) gave rows of shape \[2\] for 'a', but rows of shape \[1\]"),
    "other forms": (batches(lambda n, out: {"a": out if n % 2 else out.mean()}), r"metrics\(\) gave one mean for 'a', but rows"),
    "other names": (batches(lambda n, out: {f"a{n}": out[:, 0]}), r"metrics\(\) gave \['a2'\], but \['a1'\]"),
    "a name too many": (batches(lambda n, out: {"a": out.mean()} | ({"b": out.mean()} if n == 2 else {})), "names must stay the same"),
    "no summary": ({"summary": lambda self, values: None}, r"summary\(\) gave None"),
    "complex summary": ({"summary": lambda self, values: {"s": torch.tensor(3j)}}, r"summary\(\) gave a complex tensor"),
    "remarks none": ({"remarks": lambda self, model: None}, r"remarks\(\) gave None"),
    # data
    "no samples": ({"train_data": lambda self: Tensors(torch.zeros(0, 4), torch.zeros(0))}, r"train_data\(\) gave an empty data set"),
    "column of words": ({"train_data": lambda self: Tensors(["a"] * 20, [1] * 20)}, "holds what is no number"),
    "collate none": ({"train_data": lambda self: Listed(), "collate": lambda self, samples: None}, r"collate\(samples\) gave None"),
    "collate nothing": (
        {"train_data": lambda self: Listed(), "collate": lambda self, samples: (torch.zeros(0, 4), torch.zeros(0))},
        r"collate\(samples\) gave an empty batch for 16 samples"),
    "augment none": ({"augment": lambda self, batch, rand: None}, r"augment\(batch, rand\) gave None"),
    "collect tuple": (collected(blobs(16)), r"collect\(\) gave a tuple"),
    "sparse source": (collected(Tensors(*blobs(16)), {"place": torch.eye(2).to_sparse()}), "the source's state 'place' is a sparse tensor"),
    "source of lists": (collected(Tensors(*blobs(16)), {"place": [1, 2]}), r"state\(\) of the source"),
    # optimizer and schedule
    "sparse state": (optimizer(lambda m: SparseState(m.parameters(), lr=0.1)), "the optimizer's state '0.weight/mask' is a sparse tensor"),
    "SparseAdam": (
        model(SparseEmbedding) | optimizer(lambda m: torch.optim.SparseAdam(m.embed.parameters())), r"optimizer\(\) gave SparseAdam"),
    "LBFGS": (optimizer(lambda m: torch.optim.LBFGS(m.parameters())), r"optimizer\(\) gave LBFGS.*step\(closure\)"),
    "scheduler": (optimizer(with_scheduler), r"optimizer\(\) made a learning-rate scheduler.*define schedule\(step, steps\)"),
    "schedule of letters": ({"schedule": lambda self, step, steps: "x"}, r"schedule\(0, 3\) gave 'x'"),
    "schedule nan": ({"schedule": lambda self, step, steps: float("nan")}, r"schedule\(0, 3\) gave nan"),
    "schedule ends": ({"schedule": lambda self, step, steps: 1.0 if step < 2 else None}, r"schedule\(2, 3\) gave None"),
    "limits list": (limited(["loss"]), r"the source's limits are \['loss'\]"),
}  # fmt: skip

TRAINED: dict[str, Hooks] = {
    "sparse gradients": model(SparseEmbedding),
    "sparse buffer that is not saved": model(lambda: Mixing(torch.eye(4).to_sparse(), persistent=False)),
    "expanded buffer": model(lambda: With(torch.arange(4.0)[:, None].expand(4, 3))),
    "buffers of other formats": model(lambda: nn.Sequential(*(
        With(t) for t in (torch.zeros(()), torch.zeros(0), torch.tensor([True]), torch.ones(2) * 1j, torch.zeros(2).to(torch.float8_e4m3fn))))),
    "a layer under two names": model(Twice),
    "complex weights": model(Rotations),
    "float64": in_format(torch.float64),
    "bfloat16": in_format(torch.bfloat16),
    "count as numpy's number": loss(lambda value, x: (value * len(x), np.array(len(x)))),
    "count with a gradient": loss(lambda value, x: (value * len(x), value * 0 + len(x))),
    "count of one value": loss(lambda value, x: (value * len(x), torch.ones(1) * len(x))),
    "nothing to count": loss(lambda value, x: (value * 0, 0)),
    "a part without a gradient": loss(lambda value, x: {"a": value, "b": value.detach()}),
    "metrics of all forms": metrics(lambda out: {
        "mean": out.mean(), "sum": (out.sum(), torch.tensor(out.numel())), "numbers": (3, 4), "truths": out[:, 0] > 0, "rows": out,
        "none": (0.0, 0)}),
    "one remark": {"remarks": lambda self, model: "learns"},
}  # fmt: skip


class Heard(Observer):
    def __init__(self) -> None:
        self.notices: list[str] = []

    def notice(self, text: str) -> None:
        self.notices.append(text)


def made(hooks: Hooks, folder: Path | str, group: Group, micro: int, heard: Observer) -> Training:
    kind = type("Odd", (Plain,), hooks)
    task = kind(steps=3, samples=20, save_every=2)
    pins = {"threads": 1, "workers": 0, "micro_batch": micro, "eval_micro_batch": 10}
    plan = choose(task.settings(), HARDWARE, device="cpu", world_size=group.size, local_procs=group.size, pins=pins)
    run = Run(folder)
    return Training(task, plan, run, group, Observers([MetricsFile(run), heard] if group.is_main else []), False)


ALONE = Group(0, 1, torch.device("cpu"))


@pytest.mark.parametrize("name", REFUSED)
def test_one_line_names_the_hook(name: str, tmp_path: Path) -> None:
    hooks, words = REFUSED[name]
    with pytest.raises(Problem, match=words) as refused:
        made(hooks, tmp_path, ALONE, 16, Heard()).run_to_end()
    assert len(str(refused.value)) < 300 and "\n" not in str(refused.value)


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("micro", [16, 5])
def test_it_trains_and_goes_on(name: str, micro: int, tmp_path: Path) -> None:
    for steps in (2, None):
        job = made(TRAINED[name], tmp_path, ALONE, micro, Heard())
        job.run_to_end(steps)
        assert job.saver.writer is not None
        job.saver.writer.wait()
        assert job.saver.writer.failure is None
    last = rows(tmp_path)[-1]
    assert last["step"] == 3 and all(value is not None for value in last.values())


def _odd(names: list[str], folder: str, group: Group) -> list[str]:
    said = []
    for name in names:
        try:
            made((REFUSED[name][0] if name in REFUSED else TRAINED[name]), f"{folder}/{name}", group, 16, Heard()).run_to_end()
            said.append("")
        except Problem as problem:
            said.append(str(problem))
    return said


def test_two_processes_say_the_same(tmp_path: Path) -> None:
    names = ["sparse buffer that is not saved", "expanded buffer", "a name too many", "other widths", "count tensor below 0"]
    said = on_ranks(2, _odd, names, str(tmp_path))
    assert said[0] == said[1]
    assert said[0][:2] == ["", ""] and all(said[0][2:])
