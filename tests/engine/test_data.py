"""The data order is a pure function, and every sample is used once per epoch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from drivetrain.engine.data.feed import micro_batch_spans
from drivetrain.engine.data.keyed_random import EpochRand, KeyedRand, RandomStream, key, permutation
from drivetrain.engine.data.make_feed import check_data, eval_feed, train_feed
from drivetrain.engine.group import Group
from drivetrain.outcomes import Problem
from drivetrain.plan import Plan
from tests.sample_tasks import LoaderTask, Plain

CPU = torch.device("cpu")


@given(length=st.integers(1, 200), world=st.integers(1, 9), micro=st.integers(1, 70))
def test_the_ranks_cover_a_batch_once_with_equal_numbers_of_micro_batches(length: int, world: int, micro: int) -> None:
    spans = [micro_batch_spans(length, world, rank, micro) for rank in range(world)]
    assert len({len(s) for s in spans}) == 1
    covered = [i for s in spans for low, high in s for i in range(low, high)]
    assert covered == list(range(length))
    assert max(high - low for s in spans for low, high in s) <= micro
    sizes = [sum(high - low for low, high in s) for s in spans]
    assert max(sizes) - min(sizes) <= 1


@settings(deadline=None, max_examples=25)
@given(samples=st.integers(1, 60), batch=st.integers(1, 70), world=st.integers(1, 4), micro=st.integers(1, 20), workers=st.just(0))
def test_every_sample_is_used_once_per_epoch(samples: int, batch: int, world: int, micro: int, workers: int) -> None:
    task = LoaderTask(samples=samples, global_batch=batch)
    plan = Plan(world_size=world, global_batch=batch, micro_batch=min(micro, batch), workers=workers)
    for epoch in (0, 3):
        used_ids: list[int] = []
        for rank in range(world):
            feed = train_feed(task, task.train_data(), plan, Group(rank, world, CPU))
            for index in range(feed.steps_per_epoch):
                for micro_batch in feed.micro_batches(epoch, index):
                    if micro_batch.num_real:
                        used_ids += micro_batch.loaded["id"].tolist()
                        assert micro_batch.loaded["id"].tolist() == micro_batch.ids.tolist()
        assert sorted(used_ids) == list(range(samples))


def test_batches_are_the_same_with_and_without_loader_workers() -> None:
    """Random numbers in a data set are keyed by sample, not by worker; a feed opened at a later step starts with that step's batches."""
    task = LoaderTask(samples=50, global_batch=8, noise=0.5)

    def batches(workers: int, first: int) -> list[Any]:
        feed = train_feed(task, task.train_data(), Plan(global_batch=8, micro_batch=4, workers=workers), Group(0, 1, CPU))
        feed.open(first)
        inputs = []
        for step in range(first, 14):
            epoch, index = divmod(step, feed.steps_per_epoch)
            inputs += [micro_batch.loaded["inputs"]["x"] for micro_batch in feed.micro_batches(epoch, index)]
        feed.close()
        return inputs

    without_workers, with_workers, from_step_5 = batches(0, 0), batches(2, 0), batches(2, 5)
    assert all(torch.equal(a, b) for a, b in zip(without_workers, with_workers, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(without_workers[-len(from_step_5) :], from_step_5, strict=True))


def test_orders_of_epochs_and_seeds_differ() -> None:
    orders = {tuple(permutation(30, seed, epoch).tolist()) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=20, unique=True), st.integers(1, 5))
def test_keyed_random_numbers_depend_on_the_sample_not_on_the_batch(ids: list[int], k: int) -> None:
    together = KeyedRand(torch.tensor(ids), 7, 2)
    first, second = together.uniform(k), together.normal(k)
    for row, sample in enumerate(ids):
        alone = KeyedRand(torch.tensor([sample]), 7, 2)
        assert torch.equal(alone.uniform(k)[0], first[row])
        assert torch.allclose(alone.normal(k)[0], second[row])


def test_a_feed_shuffles_each_epoch_differently() -> None:
    task = Plain()
    feed = train_feed(task, task.train_data(), Plan(global_batch=16, micro_batch=16), Group(0, 1, CPU))

    def samples(epoch: int) -> list[int]:
        return [i for index in range(feed.steps_per_epoch) for part in feed.micro_batches(epoch, index) for i in part.ids.tolist()]

    first, second = samples(0), samples(1)
    assert first != second and sorted(first) == sorted(second) == list(range(101))
    assert samples(0) == first


@pytest.mark.parametrize("max_table_numbers", [0, 1000], ids=["drawn for each batch", "drawn for the epoch"])
def test_a_sample_is_augmented_differently_in_each_epoch(max_table_numbers: int) -> None:
    rand = EpochRand(10, CPU, 7, RandomStream.TRAIN, max_table_numbers)

    def numbers(epoch: int) -> torch.Tensor:
        rand.begin_epoch(epoch)
        return rand.for_samples(torch.tensor([3, 8])).uniform(2)

    first, second = numbers(0), numbers(1)
    assert not (first == second).any()
    assert torch.equal(numbers(0), first)


def test_keyed_random_numbers_are_uniform_and_normal() -> None:
    rand = KeyedRand(torch.arange(100_000), 0)
    uniform, normal = rand.uniform(2), rand.normal(2)
    assert ((uniform >= 0) & (uniform < 1)).all()
    assert uniform.mean().item() == pytest.approx(0.5, abs=0.005)
    assert uniform.var().item() == pytest.approx(1 / 12, rel=0.02)
    assert normal.mean().item() == pytest.approx(0, abs=0.01)
    assert normal.std().item() == pytest.approx(1, rel=0.01)
    correlations = torch.corrcoef(torch.cat([uniform, normal], 1).T).fill_diagonal_(0)
    assert abs(correlations).max() < 0.02


def test_keys_of_different_parts_differ() -> None:
    assert len({key(a, b, c) for a in range(20) for b in range(20) for c in range(20)}) == 8000


def test_evaluation_uses_the_data_in_order() -> None:
    task = Plain()
    feed = eval_feed(task, task.eval_data(), Plan(eval_micro_batch=5), Group(0, 1, CPU))
    ids = [i for part in feed.micro_batches(0, 0) for i in part.ids.tolist()]
    assert ids == list(range(37))


def test_unusable_data_is_refused_with_a_message_that_names_the_fix() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(3))

    with pytest.raises(Problem, match=r"IterableDataset.*map-style"):
        check_data(Stream(), "train_data()")
    with pytest.raises(Problem, match="empty"):
        check_data([], "train_data()")
    with pytest.raises(Problem, match="int: return Tensors"):
        check_data(3, "train_data()")
