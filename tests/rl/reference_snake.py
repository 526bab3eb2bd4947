"""Snake in plain Python, by the rules of guide 003: slow, but easy to check by reading; tests compare the fast Snake with it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

MOVES = [(0, -1), (0, 1), (-1, 0), (1, 0)]  # up, down, left, right
OPPOSITE = [1, 0, 3, 2]
Cell = tuple[int, int]


@dataclass
class Snake:
    cells: list[Cell]
    """The head first."""
    direction: int
    alive: bool = True
    grows: bool = False


@dataclass
class Game:
    width: int
    height: int
    agents: int
    walls: bool
    snakes: list[Snake] = field(default_factory=list)
    food: Cell = (0, 0)

    def begin(self, random: float) -> None:
        """Places the snakes, and the food by a random number in [0, 1)."""
        w, h = self.width, self.height
        starts = [((w // 4, h // 4), 3), ((3 * w // 4, h // 4), 2), ((w // 4, 3 * h // 4), 3), ((3 * w // 4, 3 * h // 4), 2)]
        self.snakes = [Snake([cell], direction) for cell, direction in starts[: self.agents]]
        cell_number = min(int(random * w * h), w * h - 1)
        self.food = cell_number % w, cell_number // w

    def step(self, actions: list[int], random: float) -> list[float]:
        """Moves all snakes, resolves collisions, places food; returns the rewards."""
        was_alive = [s.alive for s in self.snakes]
        distances_before = [self._distance(s) for s in self.snakes]
        outside = [False] * self.agents
        for number, snake in enumerate(self.snakes):
            if snake.alive:
                outside[number] = not self._move(snake, actions[number])
        for number, snake in enumerate(self.snakes):
            if snake.alive and (outside[number] or self._hits(number)):
                snake.alive = False
        eaters = [s for s in self.snakes if s.alive and s.cells[0] == self.food]
        for number, snake in enumerate(self.snakes):
            if was_alive[number]:
                snake.grows = snake in eaters
        if eaters:
            self._place_food(random)
        return [
            self._reward(snake, alive_before, distance, snake in eaters)
            for snake, alive_before, distance in zip(self.snakes, was_alive, distances_before, strict=True)
        ]

    def observation(self, number: int) -> list[list[Cell]]:
        """Returns the cells of an agent's five channels: its body, its head, the other snakes (dead ones too), the food, the border."""
        own = self.snakes[number].cells
        others = [c for i, other in enumerate(self.snakes) if i != number for c in other.cells]
        return [own, own[:1], others, [self.food], self.border]

    @cached_property
    def border(self) -> list[Cell]:
        w, h = self.width, self.height
        return [(x, y) for y in range(h) for x in range(w) if x in (0, w - 1) or y in (0, h - 1)]

    def _move(self, snake: Snake, action: int) -> bool:
        """Returns whether the snake stays on the board."""
        if action != OPPOSITE[snake.direction]:
            snake.direction = action
        dx, dy = MOVES[snake.direction]
        x, y = snake.cells[0][0] + dx, snake.cells[0][1] + dy
        if self.walls and not (0 <= x < self.width and 0 <= y < self.height):
            return False
        snake.cells.insert(0, (x % self.width, y % self.height))
        if not snake.grows:
            snake.cells.pop()
        return True

    def _hits(self, number: int) -> bool:
        """Returns whether a snake's head is on its own body or on another live snake."""
        snake = self.snakes[number]
        head = snake.cells[0]
        if head in snake.cells[1:]:
            return True
        return any(other.alive and head in other.cells for i, other in enumerate(self.snakes) if i != number)

    def _place_food(self, random: float) -> None:
        occupied = {c for s in self.snakes for c in s.cells}
        free = [(x, y) for y in range(self.height) for x in range(self.width) if (x, y) not in occupied]
        if free:
            self.food = free[min(int(random * len(free)), len(free) - 1)]

    def _distance(self, snake: Snake) -> float:
        return math.dist(snake.cells[0], self.food)

    def _reward(self, snake: Snake, was_alive: bool, distance_before: float, ate: bool) -> float:
        if not snake.alive:
            return -0.1 if was_alive else 0.0
        approach = 2 * (distance_before - self._distance(snake)) / max(self.width, self.height)
        return 0.01 + max(0, len(snake.cells) - 3) + 100 * ate + approach
