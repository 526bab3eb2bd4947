"""The built-in environments as tasks."""

from __future__ import annotations

from typing import Annotated, Literal

from drivetrain.settings import Duration, Range
from drivetrain.tasks.rl.envs import Env
from drivetrain.tasks.rl.envs.bandit import BanditEnv
from drivetrain.tasks.rl.envs.cartpole import CartPoleEnv
from drivetrain.tasks.rl.envs.snake import SnakeEnv
from drivetrain.tasks.rl.ppo import Ppo


class Bandit(Ppo):
    """Two states and two actions; the state shows which action is right. A test of the learner, which must reach 100 %."""

    epochs: Annotated[int, Range(1)] = 20
    """Number of collections; the policy learns from each one `passes` times."""
    gamma: Annotated[float, Range(0, 1)] = 0.0
    """Discount factor of future rewards."""
    gae: Annotated[float, Range(0, 1)] = 0.0
    """Lambda of generalised advantage estimation: 1 uses the returns that were seen, 0 the critic's values."""
    search = {"learning_rate": "1e-4..1e-2,log", "entropy_weight": "1e-4..3e-2,log", "ratio_clip": "0.1..0.3"}

    def env(self) -> Env:
        return BanditEnv()


class CartPole(Ppo):
    """CartPole-v1: balance a pole on a cart for 500 steps."""

    epochs: Annotated[int, Range(1)] = 60
    """Number of collections; the policy learns from each one `passes` times."""
    passes: Annotated[int, Range(1)] = 3
    """Times that the policy learns from a collection."""
    learning_rate: Annotated[float, Range(0)] = 8e-3
    """The optimizer's peak learning rate."""
    width: Annotated[int, Range(1, 65536)] = 32
    """Width of the perceptrons' layers."""
    activation: Literal["tanh", "relu"] = "relu"
    """Activation function of the perceptrons."""

    def env(self) -> Env:
        return CartPoleEnv()


class Snake(Ppo):
    """Up to four snakes on one grid, by the rules of guide 003; one policy plays them all."""

    epochs: Annotated[int, Range(1)] = 250
    """Number of collections; the policy learns from each one `passes` times."""
    agents: Annotated[int, Range(1, 4)] = 4
    """Snakes."""
    grid: Annotated[int, Range(4, 255)] = 20
    """Width and height."""
    walls: bool = False
    """Whether deadly walls surround the grid; without them a snake that leaves it comes back on the other side."""
    envs: Annotated[int, Range(1)] = 1024
    """Environments that are played at once, over all processes."""
    horizon: Annotated[int, Range(1)] = 32
    """Steps that each environment is played before the policy learns."""
    global_batch: Annotated[int, Range(1)] = 4096
    """Samples in one optimizer step, over all processes: a multiple of the environments."""
    passes: Annotated[int, Range(1)] = 1
    """Times that the policy learns from a collection."""
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = "auto"
    """Number format of the network; probabilities and values are always in fp32."""
    learning_rate: Annotated[float, Range(0)] = 1.5e-3
    """The optimizer's peak learning rate."""
    entropy_weight: Annotated[float, Range(0)] = 0.01
    """Weight of the policy's entropy in the loss, which rewards exploration."""
    eval_every: Duration = "250ep"
    """Steps (or 1ep, 10min) between evaluations; the end always evaluates."""
    save_every: Duration = "100ep"
    """Steps (or 1ep, 10min) between checkpoints; the end always saves."""
    greedy: bool = False
    """Whether an evaluation takes the likeliest action, or samples one as training does."""
    net: Literal["mlp", "conv"] = "conv"
    """The network: two perceptrons, or the small convolutional network of guide 003."""

    def env(self) -> Env:
        return SnakeEnv(self.agents, self.grid, self.grid, self.walls)
