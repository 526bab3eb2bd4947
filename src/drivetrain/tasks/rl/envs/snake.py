"""Snakes on one grid, by the rules of guide 003: all move at once, then collisions are resolved snake by snake."""

from __future__ import annotations

import torch
from torch import Tensor

from drivetrain.tasks.rl.envs import Env, State

FOOD_REWARD, DEATH_REWARD, ALIVE_REWARD, LENGTH_REWARD, APPROACH_REWARD = 100.0, -0.1, 0.01, 1.0, 2.0
UP, DOWN, LEFT, RIGHT = range(4)
START = ((1, 1, RIGHT), (3, 1, LEFT), (1, 3, RIGHT), (3, 3, LEFT))
"""The start of each snake: x in quarters of the width, y in quarters of the height, and direction."""


class SnakeEnv(Env):
    """The state `body` holds for each cell the number of moves until it is free: the snake's length at its head, 1 at its end."""

    actions, chances, limit, bits = 4, 1, 1000, True

    def __init__(self, agents: int = 4, width: int = 20, height: int = 20, walls: bool = False) -> None:
        self.agents, self.width, self.height, self.walls = agents, width, height, walls
        self.shape = (5, height, width)

    def reset(self, rand: Tensor) -> State:
        rows, cells = rand.shape[0], self.width * self.height
        head, direction = (torch.zeros(rows, self.agents, dtype=torch.int64, device=rand.device) for _ in range(2))
        for agent, (x, y, heading) in enumerate(START[: self.agents]):
            head[:, agent] = y * self.height // 4 * self.width + x * self.width // 4
            direction[:, agent] = heading
        body = torch.zeros(rows, self.agents, cells, dtype=torch.int64, device=rand.device).scatter(2, head[..., None], 1)
        length = torch.ones_like(head)
        food = (rand[:, 0] * cells).long().clamp(max=cells - 1)
        return {"body": body, "head": head, "way": direction, "length": length, "alive": length > 0, "grows": length < 0, "food": food}

    def step(self, state: State, action: Tensor, rand: Tensor) -> tuple[State, Tensor, Tensor]:
        alive, action = state["alive"], action.view(-1, self.agents)
        is_reversal = (action ^ 1) == state["way"]  # a snake cannot reverse its direction
        direction = torch.where(alive & ~is_reversal, action, state["way"])
        next_cell, inside = self._next_cell(state["head"], direction)
        moves = alive & inside
        length = state["length"] + (moves & state["grows"]).long()
        body = (state["body"] - (moves & ~state["grows"]).long()[..., None]).clamp(min=0)
        head = torch.where(moves, next_cell, state["head"])
        hits_itself = moves & (body.gather(2, head[..., None])[..., 0] > 0)  # its last cell has already moved
        head_value = torch.where(moves, length, body.gather(2, head[..., None])[..., 0])
        body = body.scatter(2, head[..., None], head_value[..., None])
        survives = self._resolve_collisions(body, head, alive, hits_itself | (alive & ~inside))
        eats = survives & (head == state["food"][:, None])
        food = torch.where(eats.any(1), self._place_food(body, state["food"], rand), state["food"])
        reward = self._reward(alive, survives, eats, length, (state["head"], state["food"]), (head, food))
        grows = (alive & eats) | (~alive & state["grows"])
        after = {"body": body, "head": head, "way": direction, "length": length, "alive": survives, "grows": grows, "food": food}
        return after, self._by_agent(reward), self._by_agent(~survives)

    def _by_agent(self, values: Tensor) -> Tensor:
        """Removes the dimension of agents where there is only one."""
        return values if self.agents > 1 else values[:, 0]

    def _next_cell(self, head: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the next cell, and whether it is on the grid; without walls every cell is."""
        x = head % self.width + (direction == RIGHT).long() - (direction == LEFT).long()
        y = head // self.width + (direction == DOWN).long() - (direction == UP).long()
        inside = (x >= 0) & (x < self.width) & (y >= 0) & (y < self.height)
        cell = (y % self.height) * self.width + x % self.width
        return cell, inside if self.walls else torch.ones_like(inside)

    def _resolve_collisions(self, body: Tensor, head: Tensor, alive: Tensor, lost: Tensor) -> Tensor:
        """Returns which snakes survive. They are resolved one by one: a snake that has just died does not block the later ones."""
        overlaps = body.gather(2, head[:, None, :].expand(-1, self.agents, -1)) > 0  # [row, whose body, whose head]
        living = list(alive.unbind(1))
        for agent in range(self.agents):
            blocked = lost[:, agent]
            for other in range(self.agents):
                if other != agent:
                    blocked = blocked | (overlaps[:, other, agent] & living[other])
            living[agent] = living[agent] & ~blocked
        return torch.stack(living, 1)

    def _place_food(self, body: Tensor, food: Tensor, rand: Tensor) -> Tensor:
        """Returns a random cell that no snake covers, living or dead; the food stays where no cell is free."""
        free = (body.sum(1) == 0).long()
        order = free.cumsum(1)
        count = order[:, -1]
        chosen = (rand[:, 0] * count).long().clamp(max=count - 1)
        cell = ((order <= chosen[:, None]).sum(1)).clamp(max=free.shape[1] - 1)
        return torch.where(count > 0, cell, food)

    def _reward(
        self, alive: Tensor, survives: Tensor, eats: Tensor, length: Tensor, before: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor]
    ) -> Tensor:
        """`before` and `after` are (head, food)."""
        approach = (self._distance(*before) - self._distance(*after)) * (APPROACH_REWARD / max(self.width, self.height))
        living = ALIVE_REWARD + LENGTH_REWARD * (length - 3).clamp(min=0) + FOOD_REWARD * eats + approach
        return torch.where(survives, living, torch.where(alive, DEATH_REWARD, 0.0))

    def _distance(self, head: Tensor, food: Tensor) -> Tensor:
        across = (head % self.width - food[:, None] % self.width).float()
        down = (head // self.width - food[:, None] // self.width).float()
        return (across * across + down * down).sqrt()

    def observe(self, state: State) -> Tensor:
        """Returns five channels for each agent: its body, its head, the other snakes (dead ones too), the food and the border."""
        bodies = (state["body"] > 0).float()
        others = (bodies.sum(1, keepdim=True) - bodies).clamp(max=1.0)
        heads = torch.zeros_like(bodies).scatter(2, state["head"][..., None], 1.0)
        food = torch.zeros_like(bodies[:, 0]).scatter(1, state["food"][:, None], 1.0)[:, None].expand_as(bodies)
        cell = torch.arange(self.width * self.height, device=bodies.device)
        x, y = cell % self.width, cell // self.width
        border = ((x == 0) | (x == self.width - 1) | (y == 0) | (y == self.height - 1)).float().expand_as(bodies)
        return self._by_agent(torch.stack((bodies, heads, others, food, border), 2).unflatten(3, (self.height, self.width)))

    def figures(self, state: State) -> dict[str, Tensor]:
        return {"size": state["length"].float(), "food": (state["length"] - 1 + state["grows"].long()).float()}
