"""Chooses the feed of a task's data, and refuses data that no feed can use."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from drivetrain.data import Source, Tensors
from drivetrain.engine.data.batches import as_tensor
from drivetrain.engine.data.feed import Feed, OrderedFeed
from drivetrain.engine.data.keyed_random import BatchRand, EpochRand, RandomStream
from drivetrain.engine.data.loader_feed import LoaderFeed
from drivetrain.engine.data.source_feed import SourceFeed
from drivetrain.engine.data.tensor_feed import TensorFeed
from drivetrain.engine.group import Group
from drivetrain.outcomes import Problem
from drivetrain.plan import Plan
from drivetrain.task import Task, overrides


def train_feed(task: Task, data: Any, plan: Plan, group: Group) -> Feed:
    """Returns the feed of a task's training data."""
    seed = int(task.seed)
    if isinstance(data, Source):
        return SourceFeed(data, plan, group, seed)
    check_data(data, "train_data()")
    return _ordered_feed(task, data, plan, RandomStream.TRAIN, (plan.global_batch, plan.micro_batch, group, seed))


def eval_feed(task: Task, data: Any, plan: Plan, group: Group) -> OrderedFeed:
    """Returns a feed with a single step, which holds all samples of the data set in their own order."""
    check_data(data, "eval_data()")
    return _ordered_feed(task, data, plan, RandomStream.EVAL, (len(data), plan.eval_micro_batch, group, None))


def _ordered_feed(task: Task, data: Any, plan: Plan, stream: RandomStream, order: tuple[Any, ...]) -> OrderedFeed:
    collate = task.collate if overrides(task, "collate") else None
    if isinstance(data, Tensors) and collate is None:
        return TensorFeed(data, plan.data != "loader" and _fits(data, order[2].device), *order)
    if plan.data == "device":
        raise Problem("plan.data=device needs Tensors from train_data(), without a collate()")
    return LoaderFeed(data, collate, plan, stream, *order, seed=int(task.seed))


def check_data(data: Any, hook: str) -> None:
    """Refuses data that has no length and sample numbers, has no samples, or lists columns where samples are expected."""
    if isinstance(data, IterableDataset):
        raise Problem(
            f"{hook} gave an IterableDataset: it has no sample numbers, so order and resume could not be exact."
            f" Give a map-style Dataset (__len__ and __getitem__), for example a list or an index of files"
        )
    if _is_columns(data):
        raise Problem(
            f"{hook} gave a {type(data).__name__} of {len(data)} tensors, which would be {len(data)} samples: return Tensors(x, y)"
        )
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise Problem(f"{hook} gave a {type(data).__name__}: return Tensors(...) or a map-style Dataset (__len__ and __getitem__)")
    if len(data) == 0:
        raise Problem(f"{hook} gave an empty data set: check the path or the filter that made it")


def _is_columns(data: Any) -> bool:
    """Returns whether a tuple or list holds the columns (x, y) of a data set: arrays of equal length but different forms."""
    if not isinstance(data, (tuple, list)) or not 1 <= len(data) <= 16 or not all(isinstance(c, (Tensor, np.ndarray)) for c in data):
        return False
    if isinstance(data, tuple):
        return True
    have_one_length = len({column.shape[:1] for column in data}) == 1
    have_different_forms = len({(column.ndim, column.dtype) for column in data}) == len(data)
    return have_one_length and have_different_forms and len(data) > 1 and data[0].ndim > 0


def _fits(data: Tensors, device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    size_bytes = sum(as_tensor(c).nbytes for c in data.columns)
    return size_bytes < torch.cuda.mem_get_info(device)[0] // 2


def augment_rand(task: Task, feed: Feed, device: torch.device) -> EpochRand | None:
    """Returns the random numbers of the task's augmentation; None for a task without `augment`."""
    return EpochRand(feed.length, device, int(task.seed), RandomStream.TRAIN) if overrides(task, "augment") else None


def augment_batch(task: Task, batch: Any, rand: BatchRand) -> Any:
    """Returns the batch that the task's `augment` gives."""
    augmented = task.augment(batch, rand)
    if augmented is None:
        raise Problem("augment(batch, rand) gave None: return the changed batch")
    return augmented
