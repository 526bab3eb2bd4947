"""Compares PPO on CartPole-v1 on one GPU: PureJaxRL's configuration in JAX and drivetrain; also measures the time until it is solved.

    python benchmarks/rl.py --gpu --json benchmarks/results/rl-h200.json

Both use 4 passes of 4 minibatches, actor and critic of 2 x 64 tanh, Adam, clip 0.2, entropy 0.01, gradients clipped at 0.5.
drivetrain runs the engine's own loop and logs every 100 collections. `own world` is the same environment in torch, as a user
would write it. CartPole is solved when 1,000 new episodes of a plain CartPole in float64, with sampled actions, last 475 steps
in the mean. They are played when the return in training reaches 475. Neither their time counts nor that of compiling kernels.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import tempfile
import time
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from drivetrain import __version__
from drivetrain.engine.group import Group
from drivetrain.engine.log.observe import Observer, Observers
from drivetrain.engine.loop import Training
from drivetrain.hardware import detect
from drivetrain.plan.choose import choose
from drivetrain.runs import Run
from drivetrain.tasks.rl.envs import Env
from drivetrain.tasks.rl.envs.cartpole import CartPoleEnv
from drivetrain.tasks.rl.ppo import Ppo
from drivetrain.watch.files import MetricsFile

SIZES = ((4096, 64), (16384, 32), (65536, 32))
PUREJAXRL_STEPS_PER_SECOND = {(4096, 64): 32.3e6, (16384, 32): 51.8e6, (65536, 32): 78.2e6}  # with Gymnax, on an H200
NUM_WARM_UP_ITERATIONS, NUM_WINDOWS = 40, 5
SOLVED_RETURN = 475.0
NUM_EPISODES = 1000  # in one check
ITERATIONS_BETWEEN_CHECKS = 5
MAX_ITERATIONS = 400  # a seed that needs more is not solved


class OwnEnv(CartPoleEnv):
    """An environment that has no CUDA kernel, like a user's own."""


class Balance(Ppo):
    own: bool = False

    def env(self) -> Env:
        return OwnEnv() if self.own else CartPoleEnv()


class Clock(Observer):
    """Reads the time at the given iterations of the loop, after the GPU has finished its work."""

    def __init__(self, iterations: list[int]) -> None:
        self.iterations, self.iteration, self.times, self.notices = set(iterations), 0, list[float](), list[str]()

    def reached(self, name: str) -> None:
        if name == "step":
            if self.iteration in self.iterations:
                torch.cuda.synchronize()
                self.times.append(time.perf_counter())
            self.iteration += 1

    def notice(self, text: str) -> None:
        self.notices.append(text)


def make_training(task: Ppo, folder: str, *observers: Observer) -> Training:
    plan = choose(task.settings(), detect(), device="cuda", world_size=1, local_procs=1, pins={"compile": "off"})
    return Training(task, plan, Run(folder), Group(0, 1, torch.device("cuda", 0)), Observers([*observers]), False)


def settings(envs: int, horizon: int) -> dict[str, Any]:
    return {"envs": envs, "horizon": horizon, "passes": 4, "global_batch": envs * horizon // 4, "decay": "constant",
            "learning_rate": 2.5e-3, "eval_episodes": 0, "save_every": "1000000ep", "log_every": "100ep"}  # fmt: skip


def measure_drivetrain(envs: int, horizon: int, own: bool, seconds: float) -> dict[str, Any]:
    expected_speed = 250e6 if own else 450e6  # environment steps per second: sets the length of a window
    window = max(20, int(seconds / NUM_WINDOWS * expected_speed / (envs * horizon)))  # in iterations
    first = 16 + NUM_WARM_UP_ITERATIONS  # the first epoch has 16 iterations, each later one has one
    clock = Clock([first + window * i for i in range(NUM_WINDOWS + 1)])
    with tempfile.TemporaryDirectory() as folder:
        files = MetricsFile(Run(folder))
        task = Balance(**settings(envs, horizon), own=own, epochs=1 + NUM_WARM_UP_ITERATIONS + window * NUM_WINDOWS + 1)
        training = make_training(task, folder, clock, files)
        training.run_to_end()
        files.close()
    if training.epochs.whole_epochs is None:
        raise SystemExit(f"the kernels were not used: {clock.notices}")
    window_seconds = [end - start for start, end in pairwise(clock.times)]
    median = statistics.median(window_seconds)
    return {
        "envs": envs, "horizon": horizon, "steps_per_second": window * envs * horizon / median, "iteration_ms": median / window * 1e3,
        "spread_percent": (max(window_seconds) - min(window_seconds)) / median * 100,
    }  # fmt: skip


def mean_length(policy: Any, seed: int) -> float:
    """Plays new episodes of a plain CartPole in float64, with sampled actions; returns their mean length."""
    policy = policy.double()
    generator = torch.Generator("cuda").manual_seed(seed)
    state = torch.rand(NUM_EPISODES, 4, device="cuda", dtype=torch.float64, generator=generator) * 0.1 - 0.05
    is_running, total = torch.ones(NUM_EPISODES, device="cuda", dtype=torch.bool), torch.zeros(NUM_EPISODES, device="cuda")
    with torch.no_grad():
        for _ in range(500):
            total += is_running
            right = torch.rand(NUM_EPISODES, device="cuda", generator=generator) < policy(state).softmax(-1)[:, 1]
            _, velocity, angle, angular_velocity = state.unbind(1)
            force, sine, cosine = torch.where(right, 10.0, -10.0).double(), angle.sin(), angle.cos()
            push = (force + 0.05 * angular_velocity**2 * sine) / 1.1
            angular_acceleration = (9.8 * sine - cosine * push) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
            acceleration = push - 0.05 * angular_acceleration * cosine / 1.1
            changes = torch.stack([velocity, acceleration, angular_velocity, angular_acceleration], 1)
            state = state + 0.02 * changes
            is_running &= (state[:, 0].abs() <= 2.4) & (state[:, 2].abs() <= 12 * math.pi / 180)
    return float(total.mean())


def solve(seeds: int, envs: int = 4096, horizon: int = 64) -> list[dict[str, Any]]:
    """Measures the time to solve CartPole for each seed. All seeds use the kernels and the graph of one training."""
    import copy

    with tempfile.TemporaryDirectory() as folder:
        training = make_training(Balance(**settings(envs, horizon), epochs=MAX_ITERATIONS + 10), folder)
        training.run_to_end(stop_after=5 * 16)  # steps
    assert training.epochs.whole_epochs is not None
    learner: Any = training.epochs.whole_epochs.stepper
    actor: Any = training.setup.model.actor
    results = []
    for seed in range(seeds):
        torch.manual_seed(seed)
        torch.cuda.manual_seed(seed)
        new_model: Any = training.setup.task.model().cuda()
        with torch.no_grad():
            for parameter, new_parameter in zip(training.setup.model.parameters(), new_model.parameters(), strict=True):
                parameter.copy_(new_parameter)
            for tensor in (learner.mean, learner.square, learner.counts, *learner.state.values()):
                tensor.zero_()
            learner.state["env.motion"].uniform_(-0.05, 0.05)
        training.setup.feed.seed = seed  # type: ignore[attr-defined]
        torch.cuda.synchronize()
        seconds, length, epoch = 0.0, 0.0, 0
        while epoch < MAX_ITERATIONS and length < SOLVED_RETURN:
            started = time.perf_counter()
            for _ in range(ITERATIONS_BETWEEN_CHECKS):
                learner(epoch, epoch * learner.steps)
                epoch += 1
            training_return = float(learner.stats[8])  # the mean return of the last collection; this waits for the GPU
            seconds += time.perf_counter() - started
            if training_return >= SOLVED_RETURN:
                length = mean_length(copy.deepcopy(actor), seed + 1000)
        results.append(
            {"seed": seed, "milliseconds": seconds * 1e3, "iterations": epoch, "judged": length, "solved": length >= SOLVED_RETURN}
        )
    return results


def main(args: argparse.Namespace) -> None:
    import rl_jax

    rows: list[dict[str, Any]] = []
    for envs, horizon in SIZES:
        peer = rl_jax.measure(envs, horizon, args.seconds)
        deviation = peer["steps_per_second"] / PUREJAXRL_STEPS_PER_SECOND[envs, horizon] - 1
        built_in = measure_drivetrain(envs, horizon, False, args.seconds)
        own = measure_drivetrain(envs, horizon, True, args.seconds)
        rows.append(
            {"envs": envs, "horizon": horizon, "peer": peer, "peer_off_percent": deviation * 100, "built_in": built_in, "own_world": own}
        )
        for name, row in (("PureJaxRL's, in JAX", peer), ("drivetrain", built_in), ("drivetrain, own world in torch", own)):
            ratio = row["steps_per_second"] / peer["steps_per_second"]
            print(
                f"{envs:6} x {horizon}  {row['steps_per_second'] / 1e6:7.1f} M steps/s  {ratio:5.1f}x  spread {row['spread_percent']:4.1f} %  {name}",
                flush=True,
            )
        print(
            f"{'':14}the peer is {deviation:+.1%} off PureJaxRL's measured {PUREJAXRL_STEPS_PER_SECOND[envs, horizon] / 1e6} M", flush=True
        )
    solved = solve(args.seeds if args.seeds > 3 else 16)
    times = sorted(r["milliseconds"] for r in solved)
    print(
        f"solved at 4096 x 64: {sum(r['solved'] for r in solved)} of {len(solved)} seeds, median {statistics.median(times):.1f} ms"
        f" ({times[0]:.1f} to {times[-1]:.1f}), worst judged {min(r['judged'] for r in solved):.0f}"
    )
    if args.json:
        import jax

        facts = {
            "date": datetime.now(UTC).date().isoformat(), "hardware": torch.cuda.get_device_name(0), "python": platform.python_version(),
            "torch": torch.__version__, "jax": jax.__version__, "drivetrain": __version__, "command": "python benchmarks/rl.py --gpu",
            "rows": rows, "solved": solved,
        }  # fmt: skip
        Path(args.json).write_text(json.dumps(facts, indent=1) + "\n")
