"""Two states, two levers: the right one bears the state's number. A probe: less than 100 % is a fault in the learner."""

from __future__ import annotations

import torch
from torch import Tensor

from drivetrain.tasks.rl.envs import Env, State


class Bandit(Env):
    actions, shape, chances, limit = 2, (2,), 1, 100

    def reset(self, rand: Tensor) -> State:
        return {"side": (rand[:, 0] < 0.5).long()}

    def step(self, state: State, action: Tensor, rand: Tensor) -> tuple[State, Tensor, Tensor]:
        reward = (action == state["side"]).to(rand.dtype)
        return self.reset(rand), reward, torch.zeros_like(reward, dtype=torch.bool)

    def observe(self, state: State) -> Tensor:
        return torch.stack((state["side"] == 0, state["side"] == 1), -1).float()
