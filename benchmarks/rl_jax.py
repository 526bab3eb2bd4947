"""Learning CartPole-v1 on the device alone, in JAX: the PPO that benchmarks compare with.

    python benchmarks/rl_jax.py --sizes 4096x64 16384x32 65536x32 --seconds 3 --json FILE   # needs jax, flax and optax
    python benchmarks/rl_jax.py --learn 64x128 --updates 60                                  # that it learns

Its settings and its way of working are PureJaxRL's: one compiled program holds the environments, the rollout, the
advantages and the updates. So is its work: every step makes every environment's reset and brings its log up to date, and
the program returns the log of every step. CartPole-v1 is Gym's, with an episode's 500th step as an end like any other. A
size is environments x steps of a rollout; a figure is the median of five repetitions after a warm-up.
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

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch runs beside it

import flax
import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from jax import Array, lax

LR, EPS, GRAD_NORM = 2.5e-3, 1e-5, 0.5
GAMMA, LAMBDA = 0.99, 0.95
CLIP, ENTROPY, VALUE = 0.2, 0.01, 0.5
EPOCHS, MINIBATCHES = 4, 4
REPETITIONS, CHUNK = 5, 10  # a compiled call holds this many iterations

# --- the world ----------------------------------------------------------------------------------

GRAVITY, CART, POLE, HALF_LENGTH, PUSH, TICK = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02
FURTHEST, STEEPEST, LONGEST = 2.4, math.radians(12), 500


class Cart(NamedTuple):
    """One CartPole."""

    x: Array
    speed: Array
    angle: Array
    turn: Array
    ticks: Array


class Env(NamedTuple):
    """A cart and its log: the episode so far, the last one that ended, and all steps since the beginning."""

    cart: Cart
    total: Array
    length: Array
    last_total: Array
    last_length: Array
    ticks: Array


Info = dict[str, Array]


def seen(cart: Cart) -> Array:
    return jnp.array([cart.x, cart.speed, cart.angle, cart.turn])


def over(cart: Cart) -> Array:
    return (jnp.abs(cart.x) > FURTHEST) | (jnp.abs(cart.angle) > STEEPEST) | (cart.ticks >= LONGEST)


def fresh(key: Array) -> tuple[Array, Cart]:
    x, speed, angle, turn = jax.random.uniform(key, (4,), minval=-0.05, maxval=0.05)
    cart = Cart(x, speed, angle, turn, jnp.int32(0))
    return seen(cart), cart


def push(cart: Cart, action: Array) -> tuple[Array, Cart, Array, Array, Info]:
    """What is seen after an action, the cart, the reward, and whether that ended the episode."""
    reward = 1.0 - over(cart)
    sin, cos, mass = jnp.sin(cart.angle), jnp.cos(cart.angle), CART + POLE
    pull = (PUSH * (2 * action - 1) + POLE * HALF_LENGTH * cart.turn**2 * sin) / mass
    turning = (GRAVITY * sin - cos * pull) / (HALF_LENGTH * (4 / 3 - POLE * cos**2 / mass))
    speeding = pull - POLE * HALF_LENGTH * turning * cos / mass
    moved = Cart(
        cart.x + TICK * cart.speed, cart.speed + TICK * speeding, cart.angle + TICK * cart.turn, cart.turn + TICK * turning,
        cart.ticks + 1,
    )  # fmt: skip
    return seen(moved), moved, reward, over(moved), {"discount": jnp.where(over(moved), 0.0, 1.0)}


def tick(key: Array, cart: Cart, action: Array) -> tuple[Array, Cart, Array, Array, Info]:
    """As `push`; after an episode's end the cart, and what is seen, are a fresh one's, which every step makes."""
    _, for_reset = jax.random.split(key)
    observed, moved, reward, done, info = push(cart, action)
    fresh_observed, fresh_cart = fresh(for_reset)
    after = jax.tree.map(lambda new, old: jnp.where(done, new, old), fresh_cart, moved)
    return jnp.where(done, fresh_observed, observed).reshape(-1), after, reward, done, info


def opened(key: Array) -> tuple[Array, Env]:
    observed, cart = fresh(key)
    return observed.reshape(-1), Env(cart, jnp.float32(0), jnp.int32(0), jnp.float32(0), jnp.int32(0), jnp.int32(0))


def logged(key: Array, env: Env, action: Array) -> tuple[Array, Env, Array, Array, Info]:
    """As `tick`, with the log brought up to date and told."""
    observed, cart, reward, done, info = tick(key, env.cart, action)
    total, length, goes_on = env.total + reward, env.length + 1, 1 - done
    env = Env(
        cart, total * goes_on, length * goes_on,
        env.last_total * goes_on + total * done, env.last_length * goes_on + length * done, env.ticks + 1,
    )  # fmt: skip
    told = {
        "returned_episode_returns": env.last_total, "returned_episode_lengths": env.last_length,
        "timestep": env.ticks, "returned_episode": done,
    }  # fmt: skip
    return observed, env, reward, done, info | told


# --- the learner --------------------------------------------------------------------------------


class Choice:
    """Which action, by logits: distrax's categorical distribution, with its care for values that are not finite."""

    def __init__(self, logits: Array):
        self.logs = jax.nn.log_softmax(logits)

    def sample(self, key: Array) -> Array:
        chances = jax.nn.softmax(self.logs)
        sound = (jnp.isfinite(chances) & (chances >= 0)).all(-1)
        return jnp.where(sound, jax.random.categorical(key, self.logs), -1)

    def log_prob(self, action: Array) -> Array:
        chosen = jax.nn.one_hot(action, self.logs.shape[-1])  # a gather's gradient would be a scatter
        known = (action >= 0) & (action < self.logs.shape[-1])
        return jnp.where(known, jnp.where(chosen == 0, 0.0, self.logs * chosen).sum(-1), -jnp.inf)

    def entropy(self) -> Array:
        logs = jax.nn.log_softmax(self.logs)
        chances = jnp.exp(logs)
        return -(chances * jnp.where(chances == 0, 0.0, logs)).sum(-1)


class ActorCritic(nn.Module):
    """The choice between the two actions, and the value, by perceptrons that share nothing."""

    @nn.compact
    def __call__(self, x: Array) -> tuple[Choice, Array]:
        def perceptron(width: int, scale: float) -> Array:
            hidden = x
            for _ in range(2):
                hidden = nn.tanh(nn.Dense(64, kernel_init=nn.initializers.orthogonal(math.sqrt(2)))(hidden))
            return nn.Dense(width, kernel_init=nn.initializers.orthogonal(scale))(hidden)

        return Choice(perceptron(2, 0.01)), perceptron(1, 1.0).squeeze(-1)


class Steps(NamedTuple):
    """What a rollout leaves: every array begins with (horizon, envs)."""

    seen: Array
    action: Array
    log_prob: Array
    value: Array
    reward: Array
    done: Array
    info: Info


class State(NamedTuple):
    """All that one iteration hands to the next."""

    learner: TrainState
    envs: Env
    seen: Array
    key: Array


def begin(key: Array, envs: int) -> State:
    key, for_net, for_envs = jax.random.split(key, 3)
    net = ActorCritic()
    rule = optax.chain(optax.clip_by_global_norm(GRAD_NORM), optax.adam(LR, eps=EPS))
    learner = TrainState.create(apply_fn=net.apply, params=net.init(for_net, jnp.zeros(4)), tx=rule)
    observed, begun = jax.vmap(opened)(jax.random.split(for_envs, envs))
    return State(learner, begun, observed, key)


def play(state: State, _: None) -> tuple[State, Steps]:
    """One step of every environment."""
    key, for_action = jax.random.split(state.key)
    choice, value = state.learner.apply_fn(state.learner.params, state.seen)
    action = choice.sample(for_action)
    log_prob = choice.log_prob(action)
    key, for_step = jax.random.split(key)
    observed, envs, reward, done, info = jax.vmap(logged)(jax.random.split(for_step, len(action)), state.envs, action)
    return State(state.learner, envs, observed, key), Steps(state.seen, action, log_prob, value, reward, done, info)


def advantages(steps: Steps, last: Array) -> Array:
    def back(carry: tuple[Array, Array], step: Steps) -> tuple[tuple[Array, Array], Array]:
        advantage, following = carry
        goes_on = 1 - step.done
        surprise = step.reward + GAMMA * following * goes_on - step.value
        advantage = surprise + GAMMA * LAMBDA * goes_on * advantage
        return (advantage, step.value), advantage

    return lax.scan(back, (jnp.zeros_like(last), last), steps, reverse=True, unroll=16)[1]


def loss(params: Any, apply: Callable[..., Any], steps: Steps, advantage: Array, target: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    """What an update lessens, and its parts: the value's, the actor's, and the entropy."""
    choice, value = apply(params, steps.seen)
    log_prob = choice.log_prob(steps.action)
    near = steps.value + jnp.clip(value - steps.value, -CLIP, CLIP)
    off = 0.5 * jnp.maximum((value - target) ** 2, (near - target) ** 2).mean()
    ratio = jnp.exp(log_prob - steps.log_prob)
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantage).mean()
    entropy = choice.entropy().mean()
    return VALUE * off - gain - ENTROPY * entropy, (off, -gain, entropy)


def update(learner: TrainState, minibatch: tuple[Steps, Array, Array]) -> tuple[TrainState, Any]:
    losses, grads = jax.value_and_grad(loss, has_aux=True)(learner.params, learner.apply_fn, *minibatch)
    return learner.apply_gradients(grads=grads), losses


Work = tuple[TrainState, Steps, Array, Array, Array]  # learner, steps, advantages, targets, key


def epoch(work: Work, _: None) -> tuple[Work, Any]:
    """An update from each minibatch of the steps in a new order; the compiler leaves out what no update reads, as the log."""
    learner, steps, advantage, target, key = work
    key, for_order = jax.random.split(key)
    order = jax.random.permutation(for_order, advantage.size)
    batch = jax.tree.map(lambda a: a.reshape(advantage.size, *a.shape[2:]), (steps, advantage, target))
    shuffled = jax.tree.map(lambda a: jnp.take(a, order, axis=0), batch)
    minibatches = jax.tree.map(lambda a: a.reshape(MINIBATCHES, -1, *a.shape[1:]), shuffled)
    learner, losses = lax.scan(update, learner, minibatches)
    return (learner, steps, advantage, target, key), losses


def iterate(state: State, horizon: int) -> tuple[State, Info]:
    """A rollout and the updates from it; also what every step of every environment told."""
    (learner, envs, observed, key), steps = lax.scan(play, state, None, horizon)
    advantage = advantages(steps, learner.apply_fn(learner.params, observed)[1])
    work = (learner, steps, advantage, advantage + steps.value, key)
    (learner, *_, key), _ = lax.scan(epoch, work, None, EPOCHS)
    return State(learner, envs, observed, key), steps.info


def compiled(envs: int, horizon: int, iterations: int, seed: int) -> tuple[Callable[[State], tuple[State, Info]], State]:
    """A program of so many iterations, which gives what each step of each one told, and the state to begin from."""
    if envs * horizon % MINIBATCHES:
        raise ValueError(f"{envs}x{horizon} steps do not divide into {MINIBATCHES} minibatches")
    program = jax.jit(lambda state: lax.scan(lambda s, _: iterate(s, horizon), state, None, iterations), donate_argnums=0)
    return program, jax.jit(begin, static_argnums=1)(jax.random.key(seed), envs)


# --- figures ------------------------------------------------------------------------------------


def measure(envs: int, horizon: int, seconds: float) -> dict[str, Any]:
    """Steps of environments a second, learning included: five repetitions take about `seconds` together."""
    program, state = compiled(envs, horizon, CHUNK, seed=0)

    def timed(calls: int) -> float:
        nonlocal state
        begun = time.perf_counter()
        for _ in range(calls):
            state, _ = program(state)
        jax.block_until_ready(state)
        return time.perf_counter() - begun

    timed(1)  # compiles
    calls = max(1, round(seconds / REPETITIONS / timed(1)))
    took = [timed(calls) / (calls * CHUNK) for _ in range(REPETITIONS)]
    middle = statistics.median(took)
    return {
        "envs": envs,
        "horizon": horizon,
        "steps_per_second": round(envs * horizon / middle),
        "spread_percent": round(100 * (max(took) / min(took) - 1), 1),
        "iteration_ms": round(1000 * middle, 3),
    }


def learn(envs: int, horizon: int, updates: int, seed: int) -> float:
    """The mean training return of the last of so many iterations: over each environment's last finished episode."""
    program, state = compiled(envs, horizon, updates, seed)
    return float(program(state)[1]["returned_episode_returns"][-1].mean())


def size(text: str) -> tuple[int, int]:
    envs, horizon = text.split("x")
    return int(envs), int(horizon)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=size, nargs="+", default=[(4096, 64), (16384, 32), (65536, 32)], help="environments x steps")
    parser.add_argument("--seconds", type=float, default=3.0, help="of timing, for each size")
    parser.add_argument("--learn", type=size, help="instead of timing, learn at this size and print the training return")
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
        told = f"{r['steps_per_second']:>13,} steps/s, spread {r['spread_percent']:.1f} %, {r['iteration_ms']:.2f} ms an iteration"
        print(f"{envs:>6} x {horizon:<4} {told}", flush=True)
    if args.json:
        kept = [w for w in sys.argv[1:] if w not in ("--json", args.json)]
        facts = {
            "date": datetime.now(UTC).date().isoformat(), "hardware": jax.devices()[0].device_kind, "python": platform.python_version(),
            "jax": jax.__version__, "flax": flax.__version__, "optax": optax.__version__,
            "command": "python benchmarks/rl_jax.py" + "".join(f" {w}" for w in kept), "rows": rows,
        }  # fmt: skip
        Path(args.json).write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
