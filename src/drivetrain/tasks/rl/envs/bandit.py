"""A contextual bandit with two states and two actions; the right action is the state's number.

It tests the learner: a return below 100 % means that the learner has a bug.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drivetrain.tasks.rl.envs import Env, State


class BanditEnv(Env):
    actions, shape, chances, limit = 2, (2,), 1, 100

    def reset(self, rand: Tensor) -> State:
        return {"side": (rand[:, 0] < 0.5).long()}

    def step(self, state: State, action: Tensor, rand: Tensor) -> tuple[State, Tensor, Tensor]:
        reward = (action == state["side"]).to(rand.dtype)
        return self.reset(rand), reward, torch.zeros_like(reward, dtype=torch.bool)

    def observe(self, state: State) -> Tensor:
        return torch.stack((state["side"] == 0, state["side"] == 1), -1).float()
