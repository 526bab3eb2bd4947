"""A pole on a cart: Gymnasium's CartPole-v1, with the same constants."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from drivetrain.tasks.rl.envs import Env, State

GRAVITY, FORCE, STEP_SECONDS = 9.8, 10.0, 0.02
POLE_MASS, TOTAL_MASS, HALF_LENGTH = 0.1, 1.1, 0.5
MAX_POSITION, MAX_ANGLE = 2.4, 12 * 2 * math.pi / 360


class CartPoleEnv(Env):
    actions, shape, chances, limit = 2, (4,), 4, 500

    def reset(self, rand: Tensor) -> State:
        return {"motion": rand * 0.1 - 0.05}

    def step(self, state: State, action: Tensor, rand: Tensor) -> tuple[State, Tensor, Tensor]:
        position, speed, angle, angular_speed = state["motion"].unbind(-1)
        sine, cosine = angle.sin(), angle.cos()
        push = (action * (2 * FORCE) - FORCE + POLE_MASS * HALF_LENGTH * angular_speed * angular_speed * sine) / TOTAL_MASS
        angular_acceleration = (GRAVITY * sine - cosine * push) / (
            HALF_LENGTH * (4.0 / 3.0) - (HALF_LENGTH * POLE_MASS / TOTAL_MASS) * cosine * cosine
        )
        acceleration = push - (POLE_MASS * HALF_LENGTH / TOTAL_MASS) * angular_acceleration * cosine
        motion = torch.stack(
            (
                position + STEP_SECONDS * speed,
                speed + STEP_SECONDS * acceleration,
                angle + STEP_SECONDS * angular_speed,
                angular_speed + STEP_SECONDS * angular_acceleration,
            ),
            -1,
        )
        terminated = (motion[..., 0].abs() > MAX_POSITION) | (motion[..., 2].abs() > MAX_ANGLE)
        return {"motion": motion}, torch.ones_like(position), terminated

    def observe(self, state: State) -> Tensor:
        return state["motion"]
