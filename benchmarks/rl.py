"""Learning CartPole-v1 on a CPU: time until it is solved, Stable-Baselines3's PPO and ours in one run.

    python benchmarks/rl.py --cpu --json benchmarks/results/rl-cpu.json

With --gpu, on a GPU: see rl_gpu.py.

Solved: the likeliest actions balance the pole for a mean of 475 steps or more in 100 fresh episodes of Gymnasium's own
CartPole-v1, whose time does not count, after every few thousand steps. Stable-Baselines3 runs with its defaults on 8
environments, and with the settings its zoo tuned for CartPole; ours as `drivetrain train cartpole` does.
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

SOLVED, EPISODES, EVERY = 475.0, 100, 5000  # mean return, fresh episodes, and steps between checks


@dataclass(frozen=True)
class Row:
    """One training until it was solved; `seconds` is None where it never was."""

    name: str
    seed: int
    seconds: float | None
    steps: int
    steps_per_second: float
    judged: float


def judged(act: Callable[[Any], Any], seed: int) -> float:
    """The mean return of fresh episodes of Gymnasium's own environment."""
    import gymnasium

    worlds = gymnasium.make_vec("CartPole-v1", num_envs=EPISODES, vectorization_mode="sync")
    seen, _ = worlds.reset(seed=10_000 + 1000 * seed)
    going, total = np.ones(EPISODES, dtype=bool), np.zeros(EPISODES)
    while going.any():
        seen, _, ended, cut, _ = worlds.step(act(seen))
        total += going
        going &= ~(ended | cut)
    worlds.close()
    return float(total.mean())


class Clock:
    """Measures the seconds of training, without the checks. It is true once the task is solved, which stops the engine."""

    def __init__(self, seed: int) -> None:
        self.seed, self.off, self.next = seed, 0.0, EVERY
        self.seconds: float | None = None
        self.steps, self.mean = 0, 0.0
        self.begun = time.perf_counter()

    def __bool__(self) -> bool:
        return self.seconds is not None

    def check(self, steps: int, act: Callable[[Any], Any]) -> bool:
        if steps < self.next or self:
            return bool(self)
        now = time.perf_counter()
        self.mean, self.steps, self.next = judged(act, self.seed), steps, steps + EVERY
        if self.mean >= SOLVED:
            self.seconds = now - self.begun - self.off
        self.off += time.perf_counter() - now
        return bool(self)

    def row(self, name: str) -> Row:
        spent = self.seconds or time.perf_counter() - self.begun - self.off
        return Row(name, self.seed, self.seconds and round(self.seconds, 3), self.steps, round(self.steps / spent), round(self.mean, 1))


# --- contestants --------------------------------------------------------------------------------


def ours(seed: int) -> Row:
    task = CartPole(seed=seed, eval_episodes=0)
    plan = choose(task.settings(), detect(), device="cpu", world_size=1, local_procs=1, pins=None)
    each = task.envs * task.horizon
    with tempfile.TemporaryDirectory() as folder:
        observer = Observers([MetricsFile(Run(folder))])
        clock = Clock(seed)
        training = Training(task, plan, Run(folder), Group(0, 1, torch.device("cpu")), observer, clock)
        collect = training.setup.feed.begin_epoch

        def checked(epoch: int, model: Any) -> None:
            def act(seen: Any) -> Any:
                with torch.no_grad():
                    return model.policy(torch.from_numpy(seen)).argmax(-1).numpy()

            clock.check(epoch * each, act)
            collect(epoch, model)

        training.setup.feed.begin_epoch = checked  # type: ignore[method-assign]
        clock.begun = time.perf_counter()
        training.run_to_end()
        observer.close()
    return clock.row("drivetrain")


ZOO = {"n_steps": 32, "batch_size": 256, "n_epochs": 20, "gae_lambda": 0.8, "gamma": 0.98, "ent_coef": 0.0}


def stable_baselines(seed: int, tuned: bool) -> Row:
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env

    clock = Clock(seed)

    class Check(BaseCallback):
        def _on_training_start(self) -> None:
            clock.begun = time.perf_counter()

        def _on_step(self) -> bool:
            return not clock

        def _on_rollout_start(self) -> None:
            clock.check(self.num_timesteps, lambda seen: self.model.predict(seen, deterministic=True)[0])

    rates = {"learning_rate": lambda left: 1e-3 * left, "clip_range": lambda left: 0.2 * left}
    model = PPO("MlpPolicy", make_vec_env("CartPole-v1", 8, seed=seed), seed=seed, device="cpu", **(ZOO | rates if tuned else {}))
    model.learn(100_000 if tuned else 300_000, callback=Check())
    return clock.row("Stable-Baselines3, its zoo's settings" if tuned else "Stable-Baselines3, its defaults")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--cpu", action="store_true", help="time until it is solved, beside Stable-Baselines3")
    where.add_argument("--gpu", action="store_true", help="speed and time until it is solved, beside PureJaxRL's configuration in JAX")
    parser.add_argument("--seconds", type=float, default=3.0, help="with --gpu: to time one contestant at one size")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0, help="of torch; by default as many as there are cores")
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    if args.gpu:
        import rl_gpu

        rl_gpu.main(args)
        return
    threads = args.threads or cpu_cores()
    rows: list[Row] = []
    for seed in range(args.seeds):
        for contestant, count in ((ours, threads), (lambda s: stable_baselines(s, True), 1), (lambda s: stable_baselines(s, False), 1)):
            torch.set_num_threads(count)  # small batches gain nothing from a second thread
            rows.append(contestant(seed))
            r = rows[-1]
            told = "not solved" if r.seconds is None else f"solved after {r.seconds:.2f} s"
            print(
                f"{r.name:<40} seed {seed}: {told}, {r.steps:,} steps, {r.steps_per_second:,.0f} steps/s, judged {r.judged:.0f}", flush=True
            )
    found = {name: [r.seconds for r in rows if r.name == name] for name in dict.fromkeys(r.name for r in rows)}
    mine = statistics.median(s if s is not None else float("inf") for s in found["drivetrain"])
    for name, seconds in found.items():
        middle = statistics.median(s if s is not None else float("inf") for s in seconds)
        print(f"{name:<40} median {middle:7.2f} s   {middle / mine:5.1f}x")
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
