"""Makes a task's profile: the memory and work of its model, data and loss, which do not depend on a machine."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map
from torch.utils.data import default_collate

from drivetrain.data import Source, Tensors
from drivetrain.engine.data.batches import as_tensor, tensors_in
from drivetrain.engine.data.make_feed import check_data
from drivetrain.engine.fast.blocks import repeated_blocks
from drivetrain.engine.measure.trace import ShapesOnly, replace_with_fake_tensors, trace, trace_evaluation
from drivetrain.engine.numerics.losses import read_loss
from drivetrain.engine.numerics.optim import make_optimizer
from drivetrain.engine.numerics.precision import Precision
from drivetrain.engine.state.tensors import unsavable_form
from drivetrain.outcomes import Problem
from drivetrain.plan.profile import MAX_PARAMETERS_WITH_VALUES, Profile
from drivetrain.runs import die_with_parent
from drivetrain.task import Task, overrides

T = TypeVar("T")

SIZES = (8, 16)
"""Samples of the two micro-batches that are traced."""
REAL_SIZES = (1, 2)
"""The same for real tensors, whose operations are really computed."""


def survey(
    task: Task, precision: str, on_model_facts: Callable[[dict[str, Any]], None] = lambda facts: None, with_values: bool = False
) -> Profile:
    """Returns the profile of a task in one precision; if its passes cannot be traced, `traced` says why.

    `on_model_facts` is called with the facts about the model before passes are traced. `with_values` uses only real tensors;
    it is for a second process, after the first has crashed on fake tensors.
    """
    task.precision = precision  # type: ignore[assignment]
    data = task.train_data()
    if not isinstance(data, Source):
        check_data(data, "train_data()")
    mode = ShapesOnly(allow_non_fake_inputs=True)
    model = _real_model(task) if with_values else _fake_model(task, mode)
    if with_values:
        optimizer_bytes = _adamw_bytes(model)
    else:
        with mode:
            optimizer_bytes = _optimizer_bytes(task, model)
    facts = _facts(task, model, data) | {"optimizer_bytes": optimizer_bytes, "precision": precision}
    on_model_facts(facts)
    if isinstance(data, Source):
        return Profile(**facts, traced="its data are made by the model itself (a Source)")
    make_batch = _batch_maker(task, data)
    facts["sample_bytes"] = sum(t.nbytes for t in tensors_in(make_batch(1)))
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    reason = ""
    for kind, sizes in (("fake", SIZES), ("real", REAL_SIZES)):
        if kind == "fake" and with_values:
            continue
        if kind == "real" and facts["parameters"] > MAX_PARAMETERS_WITH_VALUES:
            reason = reason or "its pass without values crashed"
            break
        try:
            traced_model = model if kind == "fake" else task.model()
            return Profile(
                **facts, **_passes(task, traced_model, make_batch, precision, half, mode if kind == "fake" else None, sizes), traced=kind
            )
        except Problem:
            raise
        except Exception as error:  # the code reads values, or an operation does not support fake tensors
            reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"[:200]
    return Profile(**facts, traced=reason)


def _fake_model(task: Task, mode: FakeTensorMode) -> nn.Module:
    """Returns the model with fake tensors; a model that cannot be built with them is built with real ones, which are then replaced."""
    try:
        with mode, _conversions_of_fake_tensors():
            model = task.model()
        if isinstance(model, nn.Module):
            return model
    except Problem:
        raise
    except Exception:  # model() reads weights from a file, or depends on values
        pass
    model = _real_model(task)
    replace_with_fake_tensors(model, mode)
    return model


def _real_model(task: Task) -> nn.Module:
    model = task.model()
    if not isinstance(model, nn.Module):
        raise Problem(f"model() gave a {type(model).__name__}: return an nn.Module")
    return model


@contextmanager
def _conversions_of_fake_tensors() -> Iterator[None]:
    """A context in which a module's `.to()` replaces its tensors, because fake tensors cannot be swapped in place."""
    converted: dict[tuple[Tensor, torch.dtype, torch.device], nn.Parameter] = {}
    original = nn.Module._apply

    def apply(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for child in module.children() if recurse else ():
            child._apply(function)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                changed = function(parameter.detach())
                new = nn.Parameter(changed, parameter.requires_grad)
                # One replacement for each parameter, so that tied parameters stay tied.
                module._parameters[name] = converted.setdefault((parameter, changed.dtype, changed.device), new)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = function(buffer)
        return module

    nn.Module._apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = original  # type: ignore[method-assign]


def _optimizer_bytes(task: Task, model: nn.Module) -> int:
    """Returns the bytes of the optimizer's state for all parameters, after its first step."""
    trained = [p for p in model.parameters() if p.requires_grad]
    try:
        optimizer = make_optimizer(task, model, torch.device("cpu"))
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        return sum(v.nbytes for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor) and v.dim())
    except Problem:
        raise
    except Exception:  # the optimizer reads values
        return _adamw_bytes(model)
    finally:
        for parameter in trained:
            parameter.grad = None


def _adamw_bytes(model: nn.Module) -> int:
    """Returns the bytes of AdamW's state, the largest of the usual optimizers."""
    return sum(2 * p.nbytes for p in model.parameters() if p.requires_grad)


def _facts(task: Task, model: nn.Module, data: Any) -> dict[str, Any]:
    parameters = list(model.parameters())
    trained = [p for p in parameters if p.requires_grad]
    if not trained:
        raise Problem("model() has no parameter that requires a gradient: there is nothing to train")
    blocks = repeated_blocks(model)
    columns = data.columns if isinstance(data, Tensors) and not overrides(task, "collate") else []
    return {
        "parameters": sum(p.numel() for p in parameters),
        "parameter_bytes": sum(p.nbytes for p in parameters),
        "trained": sum(p.numel() for p in trained),
        "trained_bytes": sum(p.nbytes for p in trained),
        "largest_bytes": max(p.nbytes for p in trained),
        "buffer_bytes": sum(b.nbytes for b in model.buffers() if not unsavable_form(b)),
        "blocks": len(blocks),
        "block_bytes": max((sum(p.nbytes for p in b.parameters()) for b in blocks), default=0),
        "samples": len(data),
        "sample_bytes": 0,
        "data_bytes": sum(as_tensor(c).nbytes for c in columns),
        "batchnorm": any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()),
        "conv2d": any(isinstance(m, nn.Conv2d) for m in model.modules()),
    }


def _batch_maker(task: Task, data: Any) -> Callable[[int], Any]:
    """Returns a function that gives a batch of the first samples."""
    if isinstance(data, Tensors) and not overrides(task, "collate"):
        columns = [as_tensor(c) for c in data.columns]

        def select_rows(size: int) -> Any:
            selected = torch.arange(size) % len(data)
            return data.batch([c[selected] for c in columns])

        return select_rows
    collate = (task.collate if overrides(task, "collate") else None) or default_collate
    return lambda size: collate([data[i % len(data)] for i in range(size)])


class _FakeRand:
    """The `rand` of `augment` in a trace: only the shapes of its numbers matter."""

    def __init__(self, size: int) -> None:
        self.ids = torch.arange(size)

    def __len__(self) -> int:
        return len(self.ids)

    def uniform(self, k: int = 1) -> Tensor:
        return torch.rand(len(self.ids), k)

    def normal(self, k: int = 1) -> Tensor:
        return torch.randn(len(self.ids), k)


def _passes(
    task: Task, model: nn.Module, make_batch: Callable[[int], Any], name: str, half: torch.dtype | None,
    mode: FakeTensorMode | None, sizes: tuple[int, int],
) -> dict[str, Any]:  # fmt: skip
    precision = Precision(name, torch.device("cpu"))
    batches = {size: make_batch(size) for size in sizes}
    model.train()

    def loss(size: int) -> Tensor:
        batch = batches[size]
        if mode is not None:
            batch = tree_map(lambda x: mode.from_tensor(x) if isinstance(x, Tensor) else x, batch)
        if overrides(task, "augment"):
            batch = task.augment(batch, _FakeRand(size))
        with precision.forward():
            value = task.loss(model, batch)
        parts, _ = read_loss(value)
        terms = [p.value if p.count is None else p.value / max(1, size) for p in parts]
        return torch.stack([term.float().reshape(()) for term in terms]).sum()

    if mode is None:
        return {"plain": trace(loss, model, half, sizes, [])}
    with mode:
        blocks = repeated_blocks(model)
        checkpointed = _start_in_child(lambda: trace(loss, model, half, sizes, blocks)) if blocks else lambda: None
        plain = trace(loss, model, half, sizes, [])
        model.eval()
        evaluated = trace_evaluation(loss, model, half, sizes)
        model.train()
        return {"plain": plain, "checkpointed": checkpointed(), "evaluated": evaluated}


def _start_in_child(work: Callable[[], T]) -> Callable[[], T]:
    """Starts `work` in a forked child process; returns a function that waits for the result.

    If no child can be started, or it fails, the returned function does the work in this process.
    """
    if sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2:
        return work
    context, start, parent = get_context("fork"), time.monotonic(), os.getpid()
    receiver, sender = context.Pipe(duplex=False)

    def run() -> None:
        die_with_parent(parent)
        torch.set_num_threads(1)  # a fork does not copy threads
        with contextlib.suppress(Exception):
            sender.send(work())

    child = context.Process(target=run, daemon=True)
    try:
        child.start()
    except (AssertionError, OSError):  # a daemonic process may have no children; or there are too many processes
        return work
    sender.close()

    def result() -> T:
        timeout_seconds = 10 + 3 * (time.monotonic() - start)  # this process has done similar work since then
        try:
            if receiver.poll(timeout_seconds):
                return receiver.recv()  # type: ignore[no-any-return]
        except EOFError:  # the child failed; `work()` below raises the same error
            pass
        finally:
            child.kill()
            child.join()
        return work()

    return result
