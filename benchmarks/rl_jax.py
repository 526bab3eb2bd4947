"""Trains PPO on CartPole-v1 in JAX, entirely on the device: the program that benchmarks/rl.py --gpu compares drivetrain with.

    python benchmarks/rl_jax.py --sizes 4096x64 16384x32 65536x32 --seconds 3 --json FILE   # needs jax, flax and optax
    python benchmarks/rl_jax.py --learn 64x128 --updates 60                                  # shows that it learns

It follows PureJaxRL: the same settings, and one compiled program for environments, rollout, advantages and updates.
It also does the same work: every step computes a reset of every environment and updates its log, and the program returns
the log of every step. CartPole-v1 has Gym's rules; the 500th step ends an episode like any other end. A size is
environments x steps of a rollout. Each figure is the median of five repetitions after a warm-up.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else no GPU memory is left for torch in this process

import flax
import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from jax import Array, lax

LEARNING_RATE, ADAM_EPSILON, MAX_GRAD_NORM = 2.5e-3, 1e-5, 0.5
GAMMA, GAE_LAMBDA = 0.99, 0.95
CLIP_RANGE, ENTROPY_WEIGHT, VALUE_WEIGHT = 0.2, 0.01, 0.5
NUM_PASSES, NUM_MINIBATCHES = 4, 4  # over the steps of one rollout
NUM_REPETITIONS = 5
ITERATIONS_PER_CALL = 10  # of rollout and update, in one compiled program

# --- the environment ----------------------------------------------------------------------------------

GRAVITY, CART_MASS, POLE_MASS, HALF_POLE_LENGTH, FORCE, STEP_SECONDS = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02
MAX_POSITION, MAX_ANGLE, MAX_STEPS = 2.4, math.radians(12), 500  # an episode ends beyond these


class Cart(NamedTuple):
    """The state of one CartPole."""

    position: Array
    velocity: Array
    angle: Array
    angular_velocity: Array
    num_steps: Array  # in this episode


class Env(NamedTuple):
    """A cart and its log: return and length of the current and of the last finished episode, and the number of all steps."""

    cart: Cart
    total: Array
    length: Array
    last_total: Array
    last_length: Array
    num_steps: Array


Info = dict[str, Array]  # the log of a step


def observe(cart: Cart) -> Array:
    return jnp.array([cart.position, cart.velocity, cart.angle, cart.angular_velocity])


def is_over(cart: Cart) -> Array:
    return (jnp.abs(cart.position) > MAX_POSITION) | (jnp.abs(cart.angle) > MAX_ANGLE) | (cart.num_steps >= MAX_STEPS)


def reset(key: Array) -> tuple[Array, Cart]:
    position, velocity, angle, angular_velocity = jax.random.uniform(key, (4,), minval=-0.05, maxval=0.05)
    cart = Cart(position, velocity, angle, angular_velocity, jnp.int32(0))
    return observe(cart), cart


def step_without_reset(cart: Cart, action: Array) -> tuple[Array, Cart, Array, Array, Info]:
    """Returns the observation after an action, the cart, the reward, whether the episode has ended, and the log."""
    reward = 1.0 - is_over(cart)
    sin, cos, mass = jnp.sin(cart.angle), jnp.cos(cart.angle), CART_MASS + POLE_MASS
    push = (FORCE * (2 * action - 1) + POLE_MASS * HALF_POLE_LENGTH * cart.angular_velocity**2 * sin) / mass
    angular_acceleration = (GRAVITY * sin - cos * push) / (HALF_POLE_LENGTH * (4 / 3 - POLE_MASS * cos**2 / mass))
    acceleration = push - POLE_MASS * HALF_POLE_LENGTH * angular_acceleration * cos / mass
    moved = Cart(
        cart.position + STEP_SECONDS * cart.velocity, cart.velocity + STEP_SECONDS * acceleration,
        cart.angle + STEP_SECONDS * cart.angular_velocity, cart.angular_velocity + STEP_SECONDS * angular_acceleration,
        cart.num_steps + 1,
    )  # fmt: skip
    return observe(moved), moved, reward, is_over(moved), {"discount": jnp.where(is_over(moved), 0.0, 1.0)}


def step_with_reset(key: Array, cart: Cart, action: Array) -> tuple[Array, Cart, Array, Array, Info]:
    """Takes a step; if it ends the episode, returns a new cart and its observation. Every step computes them, as in PureJaxRL."""
    _, for_reset = jax.random.split(key)
    observed, moved, reward, done, info = step_without_reset(cart, action)
    new_observed, new_cart = reset(for_reset)
    after = jax.tree.map(lambda new, old: jnp.where(done, new, old), new_cart, moved)
    return jnp.where(done, new_observed, observed).reshape(-1), after, reward, done, info


def reset_with_log(key: Array) -> tuple[Array, Env]:
    observed, cart = reset(key)
    return observed.reshape(-1), Env(cart, jnp.float32(0), jnp.int32(0), jnp.float32(0), jnp.int32(0), jnp.int32(0))


def step_with_log(key: Array, env: Env, action: Array) -> tuple[Array, Env, Array, Array, Info]:
    """Takes a step with reset; updates the log and returns it."""
    observed, cart, reward, done, info = step_with_reset(key, env.cart, action)
    total, length, goes_on = env.total + reward, env.length + 1, 1 - done
    env = Env(
        cart, total * goes_on, length * goes_on,
        env.last_total * goes_on + total * done, env.last_length * goes_on + length * done, env.num_steps + 1,
    )  # fmt: skip
    log = {
        "returned_episode_returns": env.last_total, "returned_episode_lengths": env.last_length,
        "timestep": env.num_steps, "returned_episode": done,
    }  # fmt: skip
    return observed, env, reward, done, info | log


# --- the learner --------------------------------------------------------------------------------


class Categorical:
    """The distribution of actions, from logits; like distrax's, it handles logits that are not finite."""

    def __init__(self, logits: Array):
        self.log_probs = jax.nn.log_softmax(logits)

    def sample(self, key: Array) -> Array:
        probs = jax.nn.softmax(self.log_probs)
        is_valid = (jnp.isfinite(probs) & (probs >= 0)).all(-1)
        return jnp.where(is_valid, jax.random.categorical(key, self.log_probs), -1)

    def log_prob(self, action: Array) -> Array:
        num_actions = self.log_probs.shape[-1]
        one_hot = jax.nn.one_hot(action, num_actions)  # not a gather, whose gradient would be a slow scatter
        is_valid = (action >= 0) & (action < num_actions)
        return jnp.where(is_valid, jnp.where(one_hot == 0, 0.0, self.log_probs * one_hot).sum(-1), -jnp.inf)

    def entropy(self) -> Array:
        log_probs = jax.nn.log_softmax(self.log_probs)
        probs = jnp.exp(log_probs)
        return -(probs * jnp.where(probs == 0, 0.0, log_probs)).sum(-1)


class ActorCritic(nn.Module):
    """Two separate perceptrons: one gives the distribution of the two actions, the other the value."""

    @nn.compact
    def __call__(self, x: Array) -> tuple[Categorical, Array]:
        def perceptron(width: int, scale: float) -> Array:
            hidden = x
            for _ in range(2):
                hidden = nn.tanh(nn.Dense(64, kernel_init=nn.initializers.orthogonal(math.sqrt(2)))(hidden))
            return nn.Dense(width, kernel_init=nn.initializers.orthogonal(scale))(hidden)

        return Categorical(perceptron(2, 0.01)), perceptron(1, 1.0).squeeze(-1)


class Steps(NamedTuple):
    """All steps of a rollout: the first dimensions of every array are (horizon, envs)."""

    observation: Array
    action: Array
    log_prob: Array
    value: Array
    reward: Array
    done: Array
    info: Info


class State(NamedTuple):
    """The state between two iterations."""

    learner: TrainState
    envs: Env
    observation: Array
    key: Array


def initial_state(key: Array, envs: int) -> State:
    key, for_net, for_envs = jax.random.split(key, 3)
    net = ActorCritic()
    optimizer = optax.chain(optax.clip_by_global_norm(MAX_GRAD_NORM), optax.adam(LEARNING_RATE, eps=ADAM_EPSILON))
    learner = TrainState.create(apply_fn=net.apply, params=net.init(for_net, jnp.zeros(4)), tx=optimizer)
    observed, env_states = jax.vmap(reset_with_log)(jax.random.split(for_envs, envs))
    return State(learner, env_states, observed, key)


def rollout_step(state: State, _: None) -> tuple[State, Steps]:
    """Takes one step of every environment."""
    key, for_action = jax.random.split(state.key)
    policy, value = state.learner.apply_fn(state.learner.params, state.observation)
    action = policy.sample(for_action)
    log_prob = policy.log_prob(action)
    key, for_step = jax.random.split(key)
    observed, envs, reward, done, info = jax.vmap(step_with_log)(jax.random.split(for_step, len(action)), state.envs, action)
    return State(state.learner, envs, observed, key), Steps(state.observation, action, log_prob, value, reward, done, info)


def advantages(steps: Steps, last_value: Array) -> Array:
    """Returns generalised advantage estimates; `last_value` is the value of the observation after the rollout."""

    def previous_step(carry: tuple[Array, Array], step: Steps) -> tuple[tuple[Array, Array], Array]:
        advantage, next_value = carry
        goes_on = 1 - step.done
        td_error = step.reward + GAMMA * next_value * goes_on - step.value
        advantage = td_error + GAMMA * GAE_LAMBDA * goes_on * advantage
        return (advantage, step.value), advantage

    return lax.scan(previous_step, (jnp.zeros_like(last_value), last_value), steps, reverse=True, unroll=16)[1]


def loss(params: Any, apply: Callable[..., Any], steps: Steps, advantage: Array, target: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    """Returns PPO's loss, and its parts: the value's loss, the policy's loss, and the entropy."""
    policy, value = apply(params, steps.observation)
    log_prob = policy.log_prob(steps.action)
    clipped_value = steps.value + jnp.clip(value - steps.value, -CLIP_RANGE, CLIP_RANGE)
    value_loss = 0.5 * jnp.maximum((value - target) ** 2, (clipped_value - target) ** 2).mean()
    ratio = jnp.exp(log_prob - steps.log_prob)
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    clipped_ratio = jnp.clip(ratio, 1 - CLIP_RANGE, 1 + CLIP_RANGE)
    gain = jnp.minimum(ratio * advantage, clipped_ratio * advantage).mean()
    entropy = policy.entropy().mean()
    return VALUE_WEIGHT * value_loss - gain - ENTROPY_WEIGHT * entropy, (value_loss, -gain, entropy)


def update(learner: TrainState, minibatch: tuple[Steps, Array, Array]) -> tuple[TrainState, Any]:
    losses, grads = jax.value_and_grad(loss, has_aux=True)(learner.params, learner.apply_fn, *minibatch)
    return learner.apply_gradients(grads=grads), losses


PassState = tuple[TrainState, Steps, Array, Array, Array]  # learner, steps, advantages, targets, key


def one_pass(state: PassState, _: None) -> tuple[PassState, Any]:
    """Shuffles the steps and updates from each minibatch. The compiler removes what no update reads, such as the log."""
    learner, steps, advantage, target, key = state
    key, for_order = jax.random.split(key)
    order = jax.random.permutation(for_order, advantage.size)
    batch = jax.tree.map(lambda a: a.reshape(advantage.size, *a.shape[2:]), (steps, advantage, target))
    shuffled = jax.tree.map(lambda a: jnp.take(a, order, axis=0), batch)
    minibatches = jax.tree.map(lambda a: a.reshape(NUM_MINIBATCHES, -1, *a.shape[1:]), shuffled)
    learner, losses = lax.scan(update, learner, minibatches)
    return (learner, steps, advantage, target, key), losses


def iterate(state: State, horizon: int) -> tuple[State, Info]:
    """Collects a rollout and updates from it; also returns the log of every step of every environment."""
    (learner, envs, observed, key), steps = lax.scan(rollout_step, state, None, horizon)
    _, last_value = learner.apply_fn(learner.params, observed)
    advantage = advantages(steps, last_value)
    target = advantage + steps.value
    (learner, *_, key), _ = lax.scan(one_pass, (learner, steps, advantage, target, key), None, NUM_PASSES)
    return State(learner, envs, observed, key), steps.info


def compiled(envs: int, horizon: int, iterations: int, seed: int) -> tuple[Callable[[State], tuple[State, Info]], State]:
    """Returns a program that runs `iterations` and returns the logs of their steps, and the state to begin from."""
    if envs * horizon % NUM_MINIBATCHES:
        raise ValueError(f"{envs}x{horizon} steps do not divide into {NUM_MINIBATCHES} minibatches")
    program = jax.jit(lambda state: lax.scan(lambda s, _: iterate(s, horizon), state, None, iterations), donate_argnums=0)
    return program, jax.jit(initial_state, static_argnums=1)(jax.random.key(seed), envs)


# --- measurements -------------------------------------------------------------------------------


def measure(envs: int, horizon: int, seconds: float) -> dict[str, Any]:
    """Measures environment steps per second, with learning; all repetitions together take about `seconds`."""
    program, state = compiled(envs, horizon, ITERATIONS_PER_CALL, seed=0)

    def seconds_of(calls: int) -> float:
        nonlocal state
        started = time.perf_counter()
        for _ in range(calls):
            state, _ = program(state)
        jax.block_until_ready(state)
        return time.perf_counter() - started

    seconds_of(1)  # compiles
    calls = max(1, round(seconds / NUM_REPETITIONS / seconds_of(1)))
    iteration_seconds = [seconds_of(calls) / (calls * ITERATIONS_PER_CALL) for _ in range(NUM_REPETITIONS)]
    median = statistics.median(iteration_seconds)
    return {
        "envs": envs,
        "horizon": horizon,
        "steps_per_second": round(envs * horizon / median),
        "spread_percent": round(100 * (max(iteration_seconds) / min(iteration_seconds) - 1), 1),
        "iteration_ms": round(1000 * median, 3),
    }


def learn(envs: int, horizon: int, updates: int, seed: int) -> float:
    """Trains, and returns the mean over all environments of the return of their last finished episode."""
    program, state = compiled(envs, horizon, updates, seed)
    return float(program(state)[1]["returned_episode_returns"][-1].mean())


def parse_size(text: str) -> tuple[int, int]:
    envs, horizon = text.split("x")
    return int(envs), int(horizon)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=parse_size, nargs="+", default=[(4096, 64), (16384, 32), (65536, 32)], help="environments x steps")
    parser.add_argument("--seconds", type=float, default=3.0, help="time to measure each size")
    parser.add_argument("--learn", type=parse_size, help="instead of timing, learn at this size and print the training return")
    parser.add_argument("--updates", type=int, default=60, help="iterations of --learn")
    parser.add_argument("--seed", type=int, default=0, help="of --learn")
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    if args.learn:
        envs, horizon = args.learn
        print(f"mean training return {learn(envs, horizon, args.updates, args.seed):.1f} after {args.updates} iterations")
        return
    rows = []
    for envs, horizon in args.sizes:
        rows.append(measure(envs, horizon, args.seconds))
        r = rows[-1]
        figures = f"{r['steps_per_second']:>13,} steps/s, spread {r['spread_percent']:.1f} %, {r['iteration_ms']:.2f} ms an iteration"
        print(f"{envs:>6} x {horizon:<4} {figures}", flush=True)
    if args.json:
        arguments = [w for w in sys.argv[1:] if w not in ("--json", args.json)]
        facts = {
            "date": datetime.now(UTC).date().isoformat(), "hardware": jax.devices()[0].device_kind, "python": platform.python_version(),
            "jax": jax.__version__, "flax": flax.__version__, "optax": optax.__version__,
            "command": "python benchmarks/rl_jax.py" + "".join(f" {w}" for w in arguments), "rows": rows,
        }  # fmt: skip
        Path(args.json).write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
