"""A pole on a cart: CartPole-v1 of Gymnasium, constant for constant."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from drivetrain.tasks.rl.envs import Env, State

GRAVITY, FORCE, TICK = 9.8, 10.0, 0.02
POLE, TOTAL, HALF = 0.1, 1.1, 0.5  # mass of the pole, of both, and half the pole's length
FARTHEST, STEEPEST = 2.4, 12 * 2 * math.pi / 360


class CartPole(Env):
    actions, shape, chances, limit = 2, (4,), 4, 500

    def reset(self, rand: Tensor) -> State:
        return {"motion": rand * 0.1 - 0.05}

    def step(self, state: State, action: Tensor, rand: Tensor) -> tuple[State, Tensor, Tensor]:
        place, speed, angle, spin = state["motion"].unbind(-1)
        sine, cosine = angle.sin(), angle.cos()
        push = (action * (2 * FORCE) - FORCE + POLE * HALF * spin * spin * sine) / TOTAL
        turn = (GRAVITY * sine - cosine * push) / (HALF * (4.0 / 3.0) - (HALF * POLE / TOTAL) * cosine * cosine)
        pull = push - (POLE * HALF / TOTAL) * turn * cosine
        motion = torch.stack((place + TICK * speed, speed + TICK * pull, angle + TICK * spin, spin + TICK * turn), -1)
        ended = (motion[..., 0].abs() > FARTHEST) | (motion[..., 2].abs() > STEEPEST)
        return {"motion": motion}, torch.ones_like(place), ended

    def observe(self, state: State) -> Tensor:
        return state["motion"]
