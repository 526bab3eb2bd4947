"""Snakes on one grid, by guide 003's rules: all move at once, collisions are settled in the order of their numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from drivetrain.tasks.rl.envs import Env, State

FOOD, DEATH, ALIVE, LONG, NEARER = 100.0, -0.1, 0.01, 1.0, 2.0  # rewards
UP, DOWN, LEFT, RIGHT = range(4)
START = ((1, 1, RIGHT), (3, 1, LEFT), (1, 3, RIGHT), (3, 3, LEFT))  # quarters of width and height, and where to


class Snake(Env):
    """A cell of a body holds the moves after which it is free again: the head its snake's length, the tail's end one."""

    actions, chances, limit, bits = 4, 1, 1000, True

    def __init__(self, agents: int = 4, width: int = 20, height: int = 20, walls: bool = False) -> None:
        self.agents, self.width, self.height, self.walls = agents, width, height, walls
        self.shape = (5, height, width)

    def reset(self, rand: Tensor) -> State:
        rows, cells = rand.shape[0], self.width * self.height
        head, way = (torch.zeros(rows, self.agents, dtype=torch.int64, device=rand.device) for _ in range(2))
        for agent, (x, y, heading) in enumerate(START[: self.agents]):
            head[:, agent] = y * self.height // 4 * self.width + x * self.width // 4
            way[:, agent] = heading
        body = torch.zeros(rows, self.agents, cells, dtype=torch.int64, device=rand.device).scatter(2, head[..., None], 1)
        length = torch.ones_like(head)
        food = (rand[:, 0] * cells).long().clamp(max=cells - 1)
        return {"body": body, "head": head, "way": way, "length": length, "alive": length > 0, "grows": length < 0, "food": food}

    def step(self, state: State, action: Tensor, rand: Tensor) -> tuple[State, Tensor, Tensor]:
        alive, action = state["alive"], action.view(-1, self.agents)
        turned = torch.where((action ^ 1) == state["way"], state["way"], action)  # nobody turns round
        way = torch.where(alive, turned, state["way"])
        ahead, inside = self._ahead(state["head"], way)
        moves = alive & inside
        length = state["length"] + (moves & state["grows"]).long()
        body = (state["body"] - (moves & ~state["grows"]).long()[..., None]).clamp(min=0)
        head = torch.where(moves, ahead, state["head"])
        bitten = moves & (body.gather(2, head[..., None])[..., 0] > 0)  # its own body, the end of the tail moved on
        drawn = torch.where(moves, length, body.gather(2, head[..., None])[..., 0])
        body = body.scatter(2, head[..., None], drawn[..., None])
        survives = self._settle(body, head, alive, bitten | (alive & ~inside))
        eats = survives & (head == state["food"][:, None])
        food = torch.where(eats.any(1), self._spawn(body, state["food"], rand), state["food"])
        reward = self._reward(alive, survives, eats, length, (state["head"], state["food"]), (head, food))
        grows = (alive & eats) | (~alive & state["grows"])
        after = {"body": body, "head": head, "way": way, "length": length, "alive": survives, "grows": grows, "food": food}
        return after, self._by_agent(reward), self._by_agent(~survives)

    def _by_agent(self, figures: Tensor) -> Tensor:
        """A lone snake's have no dimension of agents."""
        return figures if self.agents > 1 else figures[:, 0]

    def _ahead(self, head: Tensor, way: Tensor) -> tuple[Tensor, Tensor]:
        """The next cell, and whether it is on the grid; a torus has no outside."""
        x = head % self.width + (way == RIGHT).long() - (way == LEFT).long()
        y = head // self.width + (way == DOWN).long() - (way == UP).long()
        inside = (x >= 0) & (x < self.width) & (y >= 0) & (y < self.height)
        cell = (y % self.height) * self.width + x % self.width
        return cell, inside if self.walls else torch.ones_like(inside)

    def _settle(self, body: Tensor, head: Tensor, alive: Tensor, lost: Tensor) -> Tensor:
        """Who lives on: one after the other, so that whoever has died no longer blocks those after it."""
        there = body.gather(2, head[:, None, :].expand(-1, self.agents, -1)) > 0  # [row, whose body, whose head]
        living = list(alive.unbind(1))
        for agent in range(self.agents):
            blocked = lost[:, agent]
            for other in range(self.agents):
                if other != agent:
                    blocked = blocked | (there[:, other, agent] & living[other])
            living[agent] = living[agent] & ~blocked
        return torch.stack(living, 1)

    def _spawn(self, body: Tensor, food: Tensor, rand: Tensor) -> Tensor:
        """A cell without a snake, living or dead; where there is none the food stays."""
        free = (body.sum(1) == 0).long()
        order = free.cumsum(1)
        count = order[:, -1]
        wanted = (rand[:, 0] * count).long().clamp(max=count - 1)
        cell = ((order <= wanted[:, None]).sum(1)).clamp(max=free.shape[1] - 1)
        return torch.where(count > 0, cell, food)

    def _reward(
        self, alive: Tensor, survives: Tensor, eats: Tensor, length: Tensor, before: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor]
    ) -> Tensor:
        nearer = (self._distance(*before) - self._distance(*after)) * (NEARER / max(self.width, self.height))
        living = ALIVE + LONG * (length - 3).clamp(min=0) + FOOD * eats + nearer
        return torch.where(survives, living, torch.where(alive, DEATH, 0.0))

    def _distance(self, head: Tensor, food: Tensor) -> Tensor:
        across = (head % self.width - food[:, None] % self.width).float()
        down = (head // self.width - food[:, None] // self.width).float()
        return (across * across + down * down).sqrt()

    def observe(self, state: State) -> Tensor:
        """By agent: its body, its head, the others (dead ones too), the food and the border."""
        bodies = (state["body"] > 0).float()
        others = (bodies.sum(1, keepdim=True) - bodies).clamp(max=1.0)
        heads = torch.zeros_like(bodies).scatter(2, state["head"][..., None], 1.0)
        food = torch.zeros_like(bodies[:, 0]).scatter(1, state["food"][:, None], 1.0)[:, None].expand_as(bodies)
        cell = torch.arange(self.width * self.height, device=bodies.device)
        x, y = cell % self.width, cell // self.width
        edge = ((x == 0) | (x == self.width - 1) | (y == 0) | (y == self.height - 1)).float().expand_as(bodies)
        return self._by_agent(torch.stack((bodies, heads, others, food, edge), 2).unflatten(3, (self.height, self.width)))

    def figures(self, state: State) -> dict[str, Tensor]:
        return {"size": state["length"].float(), "food": (state["length"] - 1 + state["grows"].long()).float()}
