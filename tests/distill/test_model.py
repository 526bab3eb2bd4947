"""The three models: no step sees its future, playing equals reading the history at once, and regions end where they should."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from drivetrain.tasks.distill.layers import Shape
from drivetrain.tasks.distill.model import CompressedModel, InContextModel, LatentModel, PlainModel, Steps

REGION = 80


def make(variant: str, positions: Any = "learned", region: int = REGION) -> InContextModel:
    torch.manual_seed(0)
    shape = Shape(32, 2, 2, 64, 0.1, 0.1, positions)
    if variant == "ad":
        return PlainModel(shape, 9, 5, region).eval()
    if variant == "compressed":
        return CompressedModel(shape, 9, 5, region).eval()
    return LatentModel(shape, 9, 5, region, 4).eval()


def history(rows: int, steps: int, seed: int = 0) -> Steps:
    random = torch.Generator().manual_seed(seed)
    place, next_place = (torch.randint(81, (rows, steps), generator=random) for _ in range(2))
    action = torch.randint(5, (rows, steps), generator=random)
    return Steps(place, action, torch.randint(2, (rows, steps), generator=random).float(), next_place)


def length_of(variant: str, region: int = REGION) -> int:
    return {"ad": region, "compressed": 2 * region, "latent": 3 * region}[variant]


def play_history(model: InContextModel, steps: Steps) -> Tensor:
    """Returns the logits of `act` at each step of a history."""
    context, logits = model.start(), []
    for i in range(len(steps)):
        logits.append(model.act(context, steps.place[:, i]))
        model.observe(context, (steps.place[:, i], steps.action[:, i], steps.reward[:, i], steps.next_place[:, i]))
    return torch.stack(logits, 1)


@torch.no_grad()
@pytest.mark.parametrize("positions", ["learned", "rotary"])
@pytest.mark.parametrize("variant", ["ad", "compressed", "latent"])
def test_no_step_sees_its_own_action_or_its_future(variant: str, positions: str) -> None:
    region, length = 8, length_of(variant, 8)
    model, steps = make(variant, positions, region), history(2, length)
    before = model(steps)
    for i in range(length):
        changed = history(2, length, seed=1)
        for name in ("place", "action", "reward", "next_place"):
            values = getattr(steps, name).clone()
            first = i + 1 if name == "place" else i  # a step sees its place, but not what follows
            values[:, first:] = getattr(changed, name)[:, first:]
            setattr(changed, name, values)
        after = model(changed)
        assert torch.equal(before[:, : i + 1], after[:, : i + 1])
        assert i + 1 == length or not torch.equal(before[:, i + 1 :], after[:, i + 1 :])


@torch.no_grad()
@pytest.mark.parametrize("variant", ["ad", "compressed", "latent"])
@pytest.mark.parametrize("cause", ["place", "action", "reward", "next_place"])
def test_every_part_of_a_transition_reaches_the_next_step(variant: str, cause: str) -> None:
    model, steps = make(variant, region=8), history(1, length_of(variant, 8))
    before = model(steps)
    values = getattr(steps, cause)
    values[0, 3] = (values[0, 3] + 1) % 2
    assert not torch.allclose(before[:, 4], model(steps)[:, 4])


@torch.no_grad()
@pytest.mark.parametrize("positions", ["learned", "rotary"])
@pytest.mark.parametrize("variant", ["ad", "compressed", "latent"])
def test_playing_with_the_cache_equals_reading_the_history_at_once(variant: str, positions: str) -> None:
    model, steps = make(variant, positions), history(3, length_of(variant))
    at_once, played = model(steps), play_history(model, steps)
    assert (at_once - played).abs().max() < 2e-5
    for i in (0, 1, 79, 80, 81, 159):
        if i < len(steps):
            assert torch.allclose(at_once[:, i], played[:, i], atol=2e-5)


@torch.no_grad()
@pytest.mark.parametrize("variant", ["ad", "compressed", "latent"])
def test_rows_do_not_reach_each_other(variant: str) -> None:
    model, steps = make(variant, region=8), history(4, 30)
    together = play_history(model, steps)
    for row in range(4):
        alone = play_history(model, Steps(*(getattr(steps, n)[row : row + 1] for n in ("place", "action", "reward", "next_place"))))
        assert torch.allclose(together[row : row + 1], alone, atol=2e-5)


@torch.no_grad()
def test_a_full_window_keeps_its_newer_half() -> None:
    model, steps = make("ad", region=8), history(2, 19)
    played = play_history(model, steps)
    assert torch.allclose(played[:, 8:12], model(steps.part(4, 12))[:, 4:], atol=2e-5)
    assert torch.allclose(played[:, 12:16], model(steps.part(8, 16))[:, 4:], atol=2e-5)
    assert torch.allclose(played[:, 16:19], model(steps.part(12, 20))[:, 4:], atol=2e-5)


@torch.no_grad()
def test_a_third_region_drops_the_first() -> None:
    model, steps = make("compressed", region=8), history(2, 29)
    played = play_history(model, steps)
    assert torch.allclose(played[:, 16:24], model(steps.part(8, 24))[:, 8:], atol=2e-5)
    assert torch.allclose(played[:, 24:], model(steps.part(16, 29))[:, 8:], atol=2e-5)
    other = history(2, 29, seed=5)
    for name in ("place", "action", "reward", "next_place"):
        getattr(other, name)[:, 8:] = getattr(steps, name)[:, 8:]
    assert torch.equal(played[:, 16:], play_history(model, other)[:, 16:])


@torch.no_grad()
def test_latents_carry_the_first_region_through_all_later_ones() -> None:
    model, steps = make("latent", region=8).double(), history(2, 40)
    played, other = play_history(model, steps), history(2, 40, seed=5)
    for name in ("place", "action", "reward", "next_place"):
        getattr(other, name)[:, 8:] = getattr(steps, name)[:, 8:]
    difference = (played - play_history(model, other)).abs().amax((0, 2))
    assert (difference[32:] > 1e-12).all()


@pytest.mark.parametrize("variant", ["ad", "compressed", "latent"])
def test_every_parameter_gets_a_gradient(variant: str) -> None:
    model = make(variant, region=8).train()
    model(history(4, length_of(variant, 8))).logsumexp(-1).sum().backward()
    unused = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert not unused
