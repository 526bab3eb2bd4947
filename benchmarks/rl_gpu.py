"""CartPole-v1 by PPO on one GPU: PureJaxRL's configuration in JAX and ours in one run, and the time until it is solved.

    python benchmarks/rl.py --gpu --json benchmarks/results/rl-h200.json

Both: 4 passes of 4 minibatches, actor and critic of 2 x 64 tanh, Adam, clip 0.2, entropy 0.01, gradients clipped at 0.5.
Ours is the engine's own loop, logging every 100 collections; `own world` is the same environment as a user would write it, in torch.
Solved: 1,000 fresh episodes of a plain CartPole in float64, with drawn actions, last 475 steps or more in the mean. They are
played off the clock, whenever the training's own return has reached 475; weights are made after kernels and graphs are.
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
PUREJAXRL = {(4096, 64): 32.3e6, (16384, 32): 51.8e6, (65536, 32): 78.2e6}  # measured on an H200 with Gymnax
WARM, WINDOWS = 40, 5
SOLVED, EPISODES, CHECKED_EVERY = 475.0, 1000, 5


class OwnEnv(CartPoleEnv):
    """An environment as a user would write it: there are no kernels for it."""


class Balance(Ppo):
    own: bool = False

    def env(self) -> Env:
        return OwnEnv() if self.own else CartPoleEnv()


class Clock(Observer):
    """Reads the time at some iterations of the loop, after the GPU has finished its work."""

    def __init__(self, at: list[int]) -> None:
        self.at, self.turn, self.times, self.notices = set(at), 0, list[float](), list[str]()

    def reached(self, name: str) -> None:
        if name == "step":
            if self.turn in self.at:
                torch.cuda.synchronize()
                self.times.append(time.perf_counter())
            self.turn += 1

    def notice(self, text: str) -> None:
        self.notices.append(text)


def prepared(task: Ppo, folder: str, *observers: Observer) -> Training:
    plan = choose(task.settings(), detect(), device="cuda", world_size=1, local_procs=1, pins={"compile": "off"})
    return Training(task, plan, Run(folder), Group(0, 1, torch.device("cuda", 0)), Observers([*observers]), False)


def settings(envs: int, horizon: int) -> dict[str, Any]:
    return {"envs": envs, "horizon": horizon, "passes": 4, "global_batch": envs * horizon // 4, "decay": "constant",
            "learning_rate": 2.5e-3, "eval_episodes": 0, "save_every": "1000000ep", "log_every": "100ep"}  # fmt: skip


def ours(envs: int, horizon: int, own: bool, seconds: float) -> dict[str, Any]:
    each = max(20, int(seconds / WINDOWS * (250e6 if own else 450e6) / (envs * horizon)))
    first = 16 + WARM  # turns: the first epoch's 16 steps, then one an epoch
    clock = Clock([first + each * i for i in range(WINDOWS + 1)])
    with tempfile.TemporaryDirectory() as folder:
        files = MetricsFile(Run(folder))
        task = Balance(**settings(envs, horizon), own=own, epochs=1 + WARM + each * WINDOWS + 1)
        training = prepared(task, folder, clock, files)
        training.run_to_end()
        files.close()
    if training.epochs.whole_epochs is None:
        raise SystemExit(f"the kernels were not used: {clock.notices}")
    spans = [b - a for a, b in zip(clock.times, clock.times[1:], strict=False)]
    middle = statistics.median(spans)
    return {
        "envs": envs, "horizon": horizon, "steps_per_second": each * envs * horizon / middle, "iteration_ms": middle / each * 1e3,
        "spread_percent": (max(spans) - min(spans)) / middle * 100,
    }  # fmt: skip


def judged(policy: Any, seed: int) -> float:
    """The mean length of fresh episodes of a plain CartPole, in float64, with drawn actions."""
    exact = policy.double()
    chance = torch.Generator("cuda").manual_seed(seed)
    state = torch.rand(EPISODES, 4, device="cuda", dtype=torch.float64, generator=chance) * 0.1 - 0.05
    alive, total = torch.ones(EPISODES, device="cuda", dtype=torch.bool), torch.zeros(EPISODES, device="cuda")
    with torch.no_grad():
        for _ in range(500):
            total += alive
            right = torch.rand(EPISODES, device="cuda", generator=chance) < exact(state).softmax(-1)[:, 1]
            x, v, angle, spin = state.unbind(1)
            force, sine, cosine = torch.where(right, 10.0, -10.0).double(), angle.sin(), angle.cos()
            push = (force + 0.05 * spin**2 * sine) / 1.1
            turn = (9.8 * sine - cosine * push) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
            state = torch.stack([x + 0.02 * v, v + 0.02 * (push - 0.05 * turn * cosine / 1.1), angle + 0.02 * spin, spin + 0.02 * turn], 1)
            alive &= (state[:, 0].abs() <= 2.4) & (state[:, 2].abs() <= 12 * math.pi / 180)
    return float(total.mean())


def solve(seeds: int, envs: int = 4096, horizon: int = 64, most: int = 400) -> list[dict[str, Any]]:
    """Time to solve by seed; one training's kernels and graph serve all of them."""
    import copy

    with tempfile.TemporaryDirectory() as folder:
        training = prepared(Balance(**settings(envs, horizon), epochs=most + 10), folder)
        training.run_to_end(stop_after=5 * 16)
    assert training.epochs.whole_epochs is not None
    learner: Any = training.epochs.whole_epochs.stepper
    actor: Any = training.setup.model.actor
    found = []
    for seed in range(seeds):
        torch.manual_seed(seed)
        torch.cuda.manual_seed(seed)
        fresh: Any = training.setup.task.model().cuda()
        with torch.no_grad():
            for mine, new in zip(training.setup.model.parameters(), fresh.parameters(), strict=True):
                mine.copy_(new)
            for tensor in (learner.mean, learner.square, learner.counts, *learner.state.values()):
                tensor.zero_()
            learner.state["env.motion"].uniform_(-0.05, 0.05)
        training.setup.feed.seed = seed  # type: ignore[attr-defined]
        torch.cuda.synchronize()
        spent, value, epoch = 0.0, 0.0, 0
        while epoch < most and value < SOLVED:
            begun = time.perf_counter()
            for _ in range(CHECKED_EVERY):
                learner(epoch, epoch * learner.steps)
                epoch += 1
            trained = float(learner.stats[8])  # the mean return of the last collection; this waits for the GPU
            spent += time.perf_counter() - begun
            if trained >= SOLVED:
                value = judged(copy.deepcopy(actor), seed + 1000)
        found.append({"seed": seed, "milliseconds": spent * 1e3, "iterations": epoch, "judged": value, "solved": value >= SOLVED})
    return found


def main(args: argparse.Namespace) -> None:
    import rl_jax

    rows: list[dict[str, Any]] = []
    for envs, horizon in SIZES:
        peer = rl_jax.measure(envs, horizon, args.seconds)
        off = peer["steps_per_second"] / PUREJAXRL[envs, horizon] - 1
        fused, own = (ours(envs, horizon, own, args.seconds) for own in (False, True))
        rows.append({"envs": envs, "horizon": horizon, "peer": peer, "peer_off_percent": off * 100, "built_in": fused, "own_world": own})
        for name, row in (("PureJaxRL's, in JAX", peer), ("drivetrain", fused), ("drivetrain, own world in torch", own)):
            ratio = row["steps_per_second"] / peer["steps_per_second"]
            print(
                f"{envs:6} x {horizon}  {row['steps_per_second'] / 1e6:7.1f} M steps/s  {ratio:5.1f}x  spread {row['spread_percent']:4.1f} %  {name}",
                flush=True,
            )
        print(f"{'':14}the peer is {off:+.1%} off PureJaxRL's measured {PUREJAXRL[envs, horizon] / 1e6} M", flush=True)
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
