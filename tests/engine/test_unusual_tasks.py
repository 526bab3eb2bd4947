"""A task with unusual hooks either trains, saves and resumes, or is refused with one line that names the hook and the fix."""

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
from tests.sample_tasks import HARDWARE, Plain, blobs, rows

Hooks = dict[str, Any]


class WithBuffer(nn.Module):
    """A small net and a buffer with an unusual tensor."""

    def __init__(self, tensor: Any = None, persistent: bool = True) -> None:
        super().__init__()
        self.net = nn.Linear(4, 4)
        self.register_buffer("odd", tensor, persistent)

    def forward(self, x: Any) -> Any:
        return self.net(x)


class UsesBuffer(WithBuffer):
    """Uses its sparse buffer."""

    def forward(self, x: Any) -> Any:
        return self.net(torch.sparse.mm(self.odd, x.T).T)


class SparseEmbedding(WithBuffer):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 4, sparse=True)

    def forward(self, x: Any) -> Any:
        return self.net(x) + self.embed(x.argmax(-1))


class SharedLayer(nn.Module):
    """One layer under two names, and its weight under a third name."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.same_as_first, self.second.weight = self.first, self.first.weight

    def forward(self, x: Any) -> Any:
        return self.second(self.same_as_first(x))


class ComplexWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.cfloat))

    def forward(self, x: Any) -> Any:
        return (x.to(torch.cfloat) @ self.weight).abs()


class PairDataset(torch.utils.data.Dataset[Any]):
    def __init__(self) -> None:
        self.x, self.y = blobs(20)

    def __len__(self) -> int:
        return 20

    def __getitem__(self, i: int) -> Any:
        return self.x[i], self.y[i]


class FixedSource(Source):
    groups = 2

    """Returns the same data in each epoch."""

    def __init__(self, data: Any, state: Any = None) -> None:
        self.data, self.saved_state = data, state

    def __len__(self) -> int:
        return 16

    def collect(self, model: Any, rand: Any, total: Any) -> Any:
        return self.data

    def state(self) -> Any:
        return {} if self.saved_state is None else self.saved_state


class SparseState(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["mask"] = torch.eye(2).to_sparse()


# Each of these functions returns hooks that replace those of a task.


def model(make: Callable[[], Any]) -> Hooks:
    return {"model": lambda self: make()}


def loss(compute: Callable[[Any, Any], Any]) -> Hooks:
    return {"loss": lambda self, model, batch: compute(F.cross_entropy(model(batch[0]), batch[1]), batch[0])}


def metrics(compute: Callable[[Any], Any]) -> Hooks:
    return {"metrics": lambda self, model, batch: compute(model(batch[0]))}


def metrics_by_batch(compute: Callable[[int, Any], Any]) -> Hooks:
    """Metrics that depend on the number of the batch."""

    def metrics_of(self: Any, model: Any, batch: Any) -> Any:
        self._num_batches = getattr(self, "_num_batches", 0) + 1
        return compute(self._num_batches, model(batch[0]))

    return {"metrics": metrics_of}


def optimizer(make: Callable[[Any], Any]) -> Hooks:
    return {"optimizer": lambda self, model: make(model)}


def loss_with_counts(count: Any) -> Hooks:
    return loss(lambda value, x: {"a": (value, 3), "b": value}) | {"counts": lambda self, batch: count}


def model_and_loss_in(dtype: torch.dtype) -> Hooks:
    def loss_of(self: Any, model: Any, batch: Any) -> Any:
        return F.cross_entropy(model(batch[0].to(dtype)), batch[1])

    return model(lambda: nn.Linear(4, 4).to(dtype)) | {"loss": loss_of, "metrics": lambda self, m, b: {"loss": loss_of(self, m, b)}}


def with_scheduler(model: Any) -> torch.optim.Optimizer:
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(sgd, 3)
    return sgd


def source_with_limits(limits: Any) -> Hooks:
    def train_data(self: Any) -> Any:
        fixed_source = FixedSource(Tensors(*blobs(16)))
        fixed_source.limits = limits
        return fixed_source

    return {"train_data": train_data, "global_batch": 8}


def source(*arguments: Any) -> Hooks:
    return {"train_data": lambda self: FixedSource(*arguments), "global_batch": 8}


# Each case: the hooks, and the message that refuses them.
REFUSED: dict[str, tuple[Hooks, str]] = {
    # the model
    "sparse buffer": (model(lambda: UsesBuffer(torch.eye(4).to_sparse())), r"model\(\) has a sparse tensor 'odd'.*persistent=False"),
    "csr buffer": (model(lambda: UsesBuffer(torch.eye(4).to_sparse_csr())), r"model\(\) has a sparse csr tensor 'odd'"),
    "quantized buffer": (
        model(lambda: WithBuffer(torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8))), r"model\(\) has a quantized tensor 'odd'"),
    "nested buffer": (model(lambda: WithBuffer(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))), "a nested tensor 'odd'"),
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
    "counts list": (loss_with_counts(["a"]), r"counts\(\) gave a list"),
    "counts letters": (loss_with_counts({"a": "x"}), r"count counts\(\) gave for 'a' is 'x'"),
    "counts of many": (loss_with_counts({"a": torch.ones(3)}), r"tensor of shape \[3\]"),
    "counts none": (loss_with_counts({"a": None}), "is None"),
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
    "other widths": (metrics_by_batch(lambda n, out: {"a": out[:, :n]}), r"metrics\(\) gave rows of shape \[2\] for 'a', but rows of shape \[1\]"),
    "other forms": (metrics_by_batch(lambda n, out: {"a": out if n % 2 else out.mean()}), r"metrics\(\) gave one mean for 'a', but rows"),
    "other names": (metrics_by_batch(lambda n, out: {f"a{n}": out[:, 0]}), r"metrics\(\) gave \['a2'\], but \['a1'\]"),
    "a name too many": (metrics_by_batch(lambda n, out: {"a": out.mean()} | ({"b": out.mean()} if n == 2 else {})), "names must stay the same"),
    "no summary": ({"summary": lambda self, values: None}, r"summary\(\) gave None"),
    "complex summary": ({"summary": lambda self, values: {"s": torch.tensor(3j)}}, r"summary\(\) gave a complex tensor"),
    "remarks none": ({"remarks": lambda self, model: None}, r"remarks\(\) gave None"),
    # data
    "no samples": ({"train_data": lambda self: Tensors(torch.zeros(0, 4), torch.zeros(0))}, r"train_data\(\) gave an empty data set"),
    "column of words": ({"train_data": lambda self: Tensors(["a"] * 20, [1] * 20)}, "holds what is no number"),
    "collate none": ({"train_data": lambda self: PairDataset(), "collate": lambda self, samples: None}, r"collate\(samples\) gave None"),
    "collate nothing": (
        {"train_data": lambda self: PairDataset(), "collate": lambda self, samples: (torch.zeros(0, 4), torch.zeros(0))},
        r"collate\(samples\) gave an empty batch for 16 samples"),
    "augment none": ({"augment": lambda self, batch, rand: None}, r"augment\(batch, rand\) gave None"),
    "collect tuple": (source(blobs(16)), r"collect\(\) gave a tuple"),
    "sparse source": (source(Tensors(*blobs(16)), {"place": torch.eye(2).to_sparse()}), "the source's state 'place' is a sparse tensor"),
    "source of lists": (source(Tensors(*blobs(16)), {"place": [1, 2]}), r"state\(\) of the source"),
    # optimizer and schedule
    "sparse state": (optimizer(lambda m: SparseState(m.parameters(), lr=0.1)), "the optimizer's state '0.weight/mask' is a sparse tensor"),
    "SparseAdam": (
        model(SparseEmbedding) | optimizer(lambda m: torch.optim.SparseAdam(m.embed.parameters())), r"optimizer\(\) gave SparseAdam"),
    "LBFGS": (optimizer(lambda m: torch.optim.LBFGS(m.parameters())), r"optimizer\(\) gave LBFGS.*step\(closure\)"),
    "scheduler": (optimizer(with_scheduler), r"optimizer\(\) made a learning-rate scheduler.*define schedule\(step, steps\)"),
    "schedule of letters": ({"schedule": lambda self, step, steps: "x"}, r"schedule\(0, 3\) gave 'x'"),
    "schedule nan": ({"schedule": lambda self, step, steps: float("nan")}, r"schedule\(0, 3\) gave nan"),
    "schedule ends": ({"schedule": lambda self, step, steps: 1.0 if step < 2 else None}, r"schedule\(2, 3\) gave None"),
    "limits list": (source_with_limits(["loss"]), r"the source's limits are \['loss'\]"),
}  # fmt: skip

TRAINED: dict[str, Hooks] = {
    "sparse gradients": model(SparseEmbedding),
    "sparse buffer that is not saved": model(lambda: UsesBuffer(torch.eye(4).to_sparse(), persistent=False)),
    "expanded buffer": model(lambda: WithBuffer(torch.arange(4.0)[:, None].expand(4, 3))),
    "buffers of other formats": model(lambda: nn.Sequential(*(
        WithBuffer(t) for t in (torch.zeros(()), torch.zeros(0), torch.tensor([True]), torch.ones(2) * 1j, torch.zeros(2).to(torch.float8_e4m3fn))))),
    "a layer under two names": model(SharedLayer),
    "complex weights": model(ComplexWeights),
    "float64": model_and_loss_in(torch.float64),
    "bfloat16": model_and_loss_in(torch.bfloat16),
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


class Notices(Observer):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def notice(self, text: str) -> None:
        self.texts.append(text)


def training(hooks: Hooks, folder: Path | str, group: Group, micro: int, observer: Observer) -> Training:
    task = type("Unusual", (Plain,), hooks)(steps=3, samples=20, save_every=2)
    pins = {"threads": 1, "workers": 0, "micro_batch": micro, "eval_micro_batch": 10}
    plan = choose(task.settings(), HARDWARE, device="cpu", world_size=group.size, local_procs=group.size, pins=pins)
    run = Run(folder)
    return Training(task, plan, run, group, Observers([MetricsFile(run), observer] if group.is_main else []), False)


ALONE = Group(0, 1, torch.device("cpu"))


@pytest.mark.parametrize("name", REFUSED)
def test_the_message_names_the_hook_in_one_line(name: str, tmp_path: Path) -> None:
    hooks, message = REFUSED[name]
    with pytest.raises(Problem, match=message) as refused:
        training(hooks, tmp_path, ALONE, 16, Notices()).run_to_end()
    assert len(str(refused.value)) < 300 and "\n" not in str(refused.value)


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("micro", [16, 5])
def test_unusual_hooks_train_and_resume(name: str, micro: int, tmp_path: Path) -> None:
    for steps in (2, None):
        job = training(TRAINED[name], tmp_path, ALONE, micro, Notices())
        job.run_to_end(steps)
        assert job.saver.writer is not None
        job.saver.writer.wait()
        assert job.saver.writer.failure is None
    last_row = rows(tmp_path)[-1]
    assert last_row["step"] == 3 and all(value is not None for value in last_row.values())


def _error_messages(names: list[str], folder: str, group: Group) -> list[str]:
    messages = []
    for name in names:
        hooks = REFUSED[name][0] if name in REFUSED else TRAINED[name]
        try:
            training(hooks, f"{folder}/{name}", group, 16, Notices()).run_to_end()
            messages.append("")
        except Problem as problem:
            messages.append(str(problem))
    return messages


def test_two_processes_raise_the_same_errors(tmp_path: Path) -> None:
    names = ["sparse buffer that is not saved", "expanded buffer", "a name too many", "other widths", "count tensor below 0"]
    of_rank_0, of_rank_1 = on_ranks(2, _error_messages, names, str(tmp_path))
    assert of_rank_0 == of_rank_1
    assert of_rank_0[:2] == ["", ""] and all(of_rank_0[2:])
