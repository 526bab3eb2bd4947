"""The built-in worlds as tasks."""

from __future__ import annotations

from typing import Annotated, Literal

from drivetrain.settings import Duration, Range
from drivetrain.tasks.rl.envs import Env
from drivetrain.tasks.rl.envs.bandit import Bandit as BanditEnv
from drivetrain.tasks.rl.envs.cartpole import CartPole as CartPoleEnv
from drivetrain.tasks.rl.envs.snake import Snake as SnakeEnv
from drivetrain.tasks.rl.ppo import Ppo


class Bandit(Ppo):
    """Two levers, of which the state tells the right one: a probe that must reach 100 %."""

    epochs: Annotated[int, Range(1)] = 20
    """Collections; what one brings is learned from `passes` times."""
    gamma: Annotated[float, Range(0, 1)] = 0.0
    """What the next step's reward counts against this one's."""
    gae: Annotated[float, Range(0, 1)] = 0.0
    """How far advantages trust what really came (1) rather than the value (0)."""
    search = {"learning_rate": "1e-4..1e-2,log", "entropy_weight": "1e-4..3e-2,log", "ratio_clip": "0.1..0.3"}

    def env(self) -> Env:
        return BanditEnv()


class CartPole(Ppo):
    """CartPole-v1: balance a pole on a cart for 500 steps."""

    epochs: Annotated[int, Range(1)] = 60
    """Collections; what one brings is learned from `passes` times."""
    passes: Annotated[int, Range(1)] = 3
    """Times that the policy learns from a collection."""
    learning_rate: Annotated[float, Range(0)] = 8e-3
    """The optimizer's peak learning rate."""
    width: Annotated[int, Range(1, 65536)] = 32
    """Width of the perceptrons' layers."""
    activation: Literal["tanh", "relu"] = "relu"
    """Between the perceptrons' layers."""

    def env(self) -> Env:
        return CartPoleEnv()


class Snake(Ppo):
    """Up to four snakes on one grid, by guide 003's rules; one policy plays them all."""

    epochs: Annotated[int, Range(1)] = 250
    """Collections; what one brings is learned from `passes` times."""
    agents: Annotated[int, Range(1, 4)] = 4
    """Snakes."""
    grid: Annotated[int, Range(4, 255)] = 20
    """Width and height."""
    walls: bool = False
    """Whether the grid ends at its border, deadly, or goes on at the other side."""
    envs: Annotated[int, Range(1)] = 1024
    """Environments that are played at once, over all processes."""
    horizon: Annotated[int, Range(1)] = 32
    """Steps that each is played before the policy learns."""
    global_batch: Annotated[int, Range(1)] = 4096
    """Samples in one optimizer step, over all processes: a multiple of the environments."""
    passes: Annotated[int, Range(1)] = 1
    """Times that the policy learns from a collection."""
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = "auto"
    """Number format of the net; probabilities and values always have all digits."""
    learning_rate: Annotated[float, Range(0)] = 1.5e-3
    """The optimizer's peak learning rate."""
    entropy_weight: Annotated[float, Range(0)] = 0.01
    """Weight of the policy's entropy, which keeps it trying."""
    eval_every: Duration = "250ep"
    """Steps (or 1ep, 10min) between evaluations; the end always evaluates."""
    save_every: Duration = "100ep"
    """Steps (or 1ep, 10min) between checkpoints; the end always saves."""
    greedy: bool = False
    """Whether an evaluation takes the likeliest action, or draws one as training does."""
    net: Literal["mlp", "conv"] = "conv"
    """The network: two perceptrons, or guide 003's small convolutions."""

    def env(self) -> Env:
        return SnakeEnv(self.agents, self.grid, self.grid, self.walls)
