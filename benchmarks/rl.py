"""Measures the time until CartPole-v1 is solved on a CPU: Stable-Baselines3's PPO and drivetrain in one run.

    python benchmarks/rl.py --cpu --json benchmarks/results/rl-cpu.json

For --gpu see rl_gpu.py.

Every few thousand steps the likeliest actions play 100 new episodes of Gymnasium's own CartPole-v1; their time does not
count. The task is solved at a mean return of 475. Stable-Baselines3 runs with its defaults on 8 environments, and with the
settings that its zoo tuned for CartPole; drivetrain runs as `drivetrain train cartpole` does.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from drivetrain import __version__
from drivetrain.engine.group import Group
from drivetrain.engine.log.observe import Observers
from drivetrain.engine.loop import Training
from drivetrain.hardware import cpu_cores, detect
from drivetrain.plan.choose import choose
from drivetrain.runs import Run
from drivetrain.tasks.rl.worlds import CartPole
from drivetrain.watch.files import MetricsFile

SOLVED_RETURN = 475.0
NUM_EPISODES = 100  # in one check
STEPS_BETWEEN_CHECKS = 5000


@dataclass(frozen=True)
class Row:
    """One training; `seconds` is the time until the task was solved, or None if it never was."""

    name: str
    seed: int
    seconds: float | None
    steps: int
    steps_per_second: float
    judged: float
    """Mean return of the last check."""


def mean_return(act: Callable[[Any], Any], seed: int) -> float:
    """Plays new episodes of Gymnasium's own environment and returns their mean return."""
    import gymnasium

    envs = gymnasium.make_vec("CartPole-v1", num_envs=NUM_EPISODES, vectorization_mode="sync")
    observations, _ = envs.reset(seed=10_000 + 1000 * seed)
    is_running, total = np.ones(NUM_EPISODES, dtype=bool), np.zeros(NUM_EPISODES)
    while is_running.any():
        observations, _, terminated, truncated, _ = envs.step(act(observations))
        total += is_running  # the reward is 1 in every step
        is_running &= ~(terminated | truncated)
    envs.close()
    return float(total.mean())


class Clock:
    """Measures the seconds of training, without the checks. Its truth value asks the engine to stop: True once the task is solved."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.check_seconds, self.next_check = 0.0, STEPS_BETWEEN_CHECKS
        self.seconds: float | None = None
        self.steps, self.mean = 0, 0.0
        self.started = time.perf_counter()

    def __bool__(self) -> bool:
        return self.seconds is not None

    def check(self, steps: int, act: Callable[[Any], Any]) -> bool:
        """Plays episodes if a check is due; returns whether the task is solved."""
        if steps < self.next_check or self:
            return bool(self)
        now = time.perf_counter()
        self.mean, self.steps, self.next_check = mean_return(act, self.seed), steps, steps + STEPS_BETWEEN_CHECKS
        if self.mean >= SOLVED_RETURN:
            self.seconds = now - self.started - self.check_seconds
        self.check_seconds += time.perf_counter() - now
        return bool(self)

    def row(self, name: str) -> Row:
        training_seconds = self.seconds or time.perf_counter() - self.started - self.check_seconds
        return Row(
            name,
            self.seed,
            self.seconds and round(self.seconds, 3),
            self.steps,
            round(self.steps / training_seconds),
            round(self.mean, 1),
        )


# --- the compared programs ----------------------------------------------------------------------


def train_drivetrain(seed: int) -> Row:
    task = CartPole(seed=seed, eval_episodes=0)
    plan = choose(task.settings(), detect(), device="cpu", world_size=1, local_procs=1, pins=None)
    steps_per_collection = task.envs * task.horizon
    with tempfile.TemporaryDirectory() as folder:
        observer = Observers([MetricsFile(Run(folder))])
        clock = Clock(seed)
        training = Training(task, plan, Run(folder), Group(0, 1, torch.device("cpu")), observer, clock)
        collect = training.setup.feed.begin_epoch

        def check_and_collect(epoch: int, model: Any) -> None:
            def act(observations: Any) -> Any:
                with torch.no_grad():
                    return model.policy(torch.from_numpy(observations)).argmax(-1).numpy()

            clock.check(epoch * steps_per_collection, act)
            collect(epoch, model)

        training.setup.feed.begin_epoch = check_and_collect  # type: ignore[method-assign]
        clock.started = time.perf_counter()
        training.run_to_end()
        observer.close()
    return clock.row("drivetrain")


ZOO_SETTINGS = {"n_steps": 32, "batch_size": 256, "n_epochs": 20, "gae_lambda": 0.8, "gamma": 0.98, "ent_coef": 0.0}


def train_stable_baselines(seed: int, tuned: bool) -> Row:
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env

    clock = Clock(seed)

    class Check(BaseCallback):
        def _on_training_start(self) -> None:
            clock.started = time.perf_counter()

        def _on_step(self) -> bool:
            return not clock

        def _on_rollout_start(self) -> None:
            clock.check(self.num_timesteps, lambda observations: self.model.predict(observations, deterministic=True)[0])

    # Both fall linearly; stable_baselines3 calls them with the remaining share of the training.
    schedules = {"learning_rate": lambda remaining: 1e-3 * remaining, "clip_range": lambda remaining: 0.2 * remaining}
    settings = ZOO_SETTINGS | schedules if tuned else {}
    model = PPO("MlpPolicy", make_vec_env("CartPole-v1", 8, seed=seed), seed=seed, device="cpu", **settings)
    model.learn(100_000 if tuned else 300_000, callback=Check())
    return clock.row("Stable-Baselines3, its zoo's settings" if tuned else "Stable-Baselines3, its defaults")


def median_seconds(rows: list[Row]) -> float:
    return statistics.median(float("inf") if r.seconds is None else r.seconds for r in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    device = parser.add_mutually_exclusive_group(required=True)
    device.add_argument("--cpu", action="store_true", help="time until it is solved, compared with Stable-Baselines3")
    device.add_argument(
        "--gpu", action="store_true", help="speed and time until it is solved, compared with PureJaxRL's configuration in JAX"
    )
    parser.add_argument("--seconds", type=float, default=3.0, help="with --gpu: time to measure one program at one size")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0, help="threads of torch (default: the number of cores)")
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    if args.gpu:
        import rl_gpu

        rl_gpu.main(args)
        return
    threads = args.threads or cpu_cores()
    rows: list[Row] = []
    programs: list[tuple[Callable[[int], Row], int]] = [
        (train_drivetrain, threads),
        # Stable-Baselines3's small batches gain nothing from a second thread.
        (lambda seed: train_stable_baselines(seed, True), 1),
        (lambda seed: train_stable_baselines(seed, False), 1),
    ]
    for seed in range(args.seeds):
        for program, num_threads in programs:
            torch.set_num_threads(num_threads)
            rows.append(program(seed))
            r = rows[-1]
            result = "not solved" if r.seconds is None else f"solved after {r.seconds:.2f} s"
            print(
                f"{r.name:<40} seed {seed}: {result}, {r.steps:,} steps, {r.steps_per_second:,.0f} steps/s, judged {r.judged:.0f}",
                flush=True,
            )
    names = list(dict.fromkeys(r.name for r in rows))
    medians = {name: median_seconds([r for r in rows if r.name == name]) for name in names}
    for name, median in medians.items():
        print(f"{name:<40} median {median:7.2f} s   {median / medians['drivetrain']:5.1f}x")
    if args.json:
        facts = {
            "date": datetime.now(UTC).date().isoformat(), "hardware": f"{cpu_cores()} CPU cores ({platform.machine()})",
            "python": platform.python_version(), "torch": torch.__version__, "drivetrain": __version__,
            "stable_baselines3": __import__("stable_baselines3").__version__, "command": "python benchmarks/rl.py --cpu",
            "rows": [asdict(r) for r in rows],
        }  # fmt: skip
        Path(args.json).write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
