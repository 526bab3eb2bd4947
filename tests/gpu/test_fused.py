"""PPO's own kernels against the engine's steps: the same samples, order, gradients and updates."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from drivetrain.engine.group import Group
from drivetrain.engine.log.observe import Observers
from drivetrain.engine.loop import Training
from drivetrain.hardware import detect
from drivetrain.plan.choose import choose
from drivetrain.runs import Run
from drivetrain.tasks.rl.envs import Env, State
from drivetrain.tasks.rl.envs.cartpole import CartPoleEnv
from drivetrain.tasks.rl.envs.snake import SnakeEnv
from drivetrain.tasks.rl.fused.stepper import TILE, FusedStepper
from drivetrain.tasks.rl.ppo import Ppo
from drivetrain.tasks.rl.rollout import Rollout
from drivetrain.tasks.rl.worlds import Bandit, CartPole
from drivetrain.watch.files import MetricsFile
from tests.samples import rows, weights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
SMALL: dict[str, Any] = {
    "envs": 512, "horizon": 32, "global_batch": 4096, "passes": 4, "learning_rate": 2.5e-3, "width": 64, "activation": "tanh",
}  # fmt: skip


def training(folder: Path, task: Any) -> Training:
    plan = choose(task.settings(), detect(), device="cuda", world_size=1, local_procs=1, pins={"compile": "off"})
    return Training(task, plan, Run(folder), Group(0, 1, torch.device("cuda", 0)), Observers([MetricsFile(Run(folder))]), False)


class OtherCartPoleEnv(CartPoleEnv):
    """An environment for which there are no kernels."""


class Own(CartPole):
    def env(self) -> Env:
        return OtherCartPoleEnv()


def learned(folder: Path, kind: type[Ppo] = CartPole, **settings: Any) -> tuple[Training, FusedStepper]:
    done = training(folder, kind(**(SMALL | {"eval_episodes": 0, "log_every": 1, "save_every": "1ep"} | settings)))
    done.run_to_end()
    assert done.epochs.whole_epochs is not None and isinstance(done.epochs.whole_epochs.stepper, FusedStepper)
    return done, done.epochs.whole_epochs.stepper


def gradients(stepper: FusedStepper, observations: Any, columns: Any, rows: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the kernels' gradients of some samples, and the sums of their metrics."""
    stepper.gradients(observations, columns, rows.int(), min(stepper.blocks, -(-len(rows) // TILE)))
    size = len(stepper.parameters)
    return stepper.sums[:size].double(), stepper.sums[size:].double()


def compare_gradients(done: Training, stepper: FusedStepper, observations: Any, columns: Any, numbers: Any, strict: bool) -> None:
    """Compares the kernels' gradients and sums of some samples with those of exact arithmetic."""
    got, sums = gradients(stepper, observations, columns, numbers)
    exact: Any = copy.deepcopy(done.setup.model).double()
    exact.zero_grad()
    known = torch.zeros(len(numbers), 11, device="cuda", dtype=torch.float64)
    known[:, :6] = columns[numbers][:, :6].double()
    known[:, 2] = (known[:, 2] - stepper.stats[4]) / stepper.stats[5]
    (total, count), figures = done.setup.task.loss(exact, {"observation": observations[numbers].double(), "columns": known})
    total.backward()
    true = torch.cat([p.grad.reshape(-1) for p in (*exact.actor.parameters(), *exact.critic.parameters())])
    quick: Any = copy.deepcopy(done.setup.model)
    torch.set_float32_matmul_precision("high")
    done.setup.task.loss(quick, {"observation": observations[numbers], "columns": known.float()})[0][0].backward()
    torch.set_float32_matmul_precision("highest")
    rough = torch.cat([p.grad.reshape(-1) for p in (*quick.actor.parameters(), *quick.critic.parameters())]).double()
    actor = sum(p.numel() for p in exact.actor.parameters())
    for name, part in (("actor", slice(0, actor)), ("critic", slice(actor, None))):
        error, usual = (float((some[part] - true[part]).norm() / true[part].norm()) for some in (got, rough))
        print(f"{name}: {error:.1e}, torch with tf32 {usual:.1e}")
        bar = 1e-2 if strict else max(1e-2, 1.5 * usual)  # few samples: a critic's true gradient may be next to nothing
        assert error < bar, f"{name}: {error:.1e}, torch with tf32 {usual:.1e}"
    assert float(sums[5]) == float(count) == float(known[:, 5].sum())
    for place, name in ((1, "entropy"), (2, "kl"), (3, "clipped"), (4, "value_error")):
        assert float(sums[place]) == pytest.approx(float(figures[name][0]), rel=2e-3, abs=2e-4 * len(numbers)), name


@pytest.mark.parametrize(
    "shape",
    [
        {"envs": 4096, "horizon": 64, "global_batch": 65536},  # as it is benchmarked
        {},
        {name: CartPole().settings()[name] for name in ("passes", "learning_rate", "width", "activation")},
        {"width": 32, "layers": 1, "activation": "relu"},
        {"width": 48, "layers": 3, "value_clip": 0.2},
        {"width": 128, "layers": 2},
        {"width": 128, "layers": 3},
    ],
)
@pytest.mark.parametrize("epochs", [2, 30])
def test_gradients_are_those_of_exact_arithmetic(shape: Any, epochs: int, tmp_path: Path) -> None:
    done, stepper = learned(tmp_path, epochs=epochs, **shape)
    numbers = torch.randperm(stepper.count, device="cuda")[: done.setup.task.global_batch - 95]  # not whole tiles
    compare_gradients(done, stepper, stepper.observations, stepper.columns, numbers, "envs" in shape)


class SignsEnv(Env):
    """Shows numbers: the first tells which action is right, the last is added to the reward."""

    limit = 20

    def __init__(self, inputs: int, actions: int) -> None:
        self.shape, self.actions, self.chances = (inputs,), actions, inputs

    def reset(self, rand: Tensor) -> State:
        return {"shown": rand * 2 - 1}

    def step(self, state: State, action: Tensor, rand: Tensor) -> tuple[State, Tensor, Tensor]:
        right = ((state["shown"][:, 0] + 1) / 2 * self.actions).long()
        return self.reset(rand), (action == right).float() + state["shown"][:, -1], rand[:, 0] < 0.1

    def observe(self, state: State) -> Tensor:
        return state["shown"]


class Reads(Ppo):
    """An environment of any size."""

    inputs: int = 5
    """Numbers that are shown."""
    choices: int = 9
    """Actions."""

    def env(self) -> Env:
        return SignsEnv(self.inputs, self.choices)


@pytest.mark.parametrize(
    "shape",
    [
        {"inputs": 5, "choices": 9, "width": 48, "layers": 3},
        {"inputs": 64, "choices": 64, "width": 32},
        {"inputs": 2, "choices": 3},
        {"inputs": 7, "choices": 8, "width": 96, "layers": 1, "activation": "relu"},
    ],
    ids=lambda shape: f"{shape['inputs']}-{shape['choices']}",
)
def test_gradients_are_exact_for_any_number_of_inputs_and_actions(shape: Any, tmp_path: Path) -> None:
    done, stepper = learned(tmp_path, Reads, epochs=30, **shape)
    assert stepper.collects and len(torch.unique(stepper.columns[:, 0])) > shape["choices"] // 2, "most actions are taken"
    numbers = torch.randperm(stepper.count, device="cuda")[: done.setup.task.global_batch - 95]
    compare_gradients(done, stepper, stepper.observations, stepper.columns, numbers, strict=False)


class Pair(Ppo):
    """Two snakes on a small grid, of which one may be dead while the other goes on."""

    net: Literal["mlp", "conv", "lstm"] = "mlp"
    rival: float = 0.0

    def env(self) -> Env:
        return SnakeEnv(2, 3, 3)


def test_dead_agents_have_no_gradient(tmp_path: Path) -> None:
    done, stepper = learned(tmp_path, Pair, epochs=30)
    assert not stepper.collects
    observations, columns = (t.clone() for t in stepper.samples)
    observations = observations.float().flatten(1)
    dead = columns[:, 5] == 0
    assert 0.02 < float(dead.float().mean()) < 0.9
    numbers = torch.randperm(stepper.count, device="cuda")[: done.setup.task.global_batch - 95]
    compare_gradients(done, stepper, observations, columns, numbers, strict=False)
    before = [t.clone() for t in gradients(stepper, observations, columns, numbers)]
    columns[dead, 2:4] = 1e4  # advantage and target
    after = gradients(stepper, observations, columns, numbers)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("kind", [CartPole, Own, Bandit])
def test_samples_and_their_order_are_those_of_the_engine(kind: type[Ppo], tmp_path: Path) -> None:
    done, stepper = learned(tmp_path, kind, epochs=6)
    feed: Any = done.setup.feed
    before = {k: v.clone() for k, v in stepper.state.items()}
    epoch = 6
    stepper.collect(torch.tensor(feed.random_keys(epoch)))
    after = {k: v.clone() for k, v in stepper.state.items()}
    feed.source.load({k: v.clone() for k, v in before.items()})
    feed._graphs = None
    feed.begin_epoch(epoch, done.setup.model)
    plain = {k: v.clone() for k, v in feed.collected_batch().items()}
    plain["columns"] = plain["columns"][:, :6]
    mine = stepper.columns[:, :6].clone()
    mine[:, 2] = (mine[:, 2] - stepper.stats[4]) / stepper.stats[5]
    same = (stepper.columns[:, 0] == plain["columns"][:, 0]).view(stepper.envs, -1)
    whole = same.all(1)  # environments in which no probability was so near to its draw that a digit decided
    assert whole.float().mean() > 0.95
    for name, ours, theirs in (("observation", stepper.observations, plain["observation"]), ("columns", mine, plain["columns"])):
        a, b = (t.view(stepper.envs, stepper.horizon, -1)[whole] for t in (ours, theirs))
        assert torch.allclose(a, b, rtol=2e-2, atol=2e-2), f"{name}: {(a - b).abs().amax((0, 1))}"
    for name, value in after.items():
        assert torch.allclose(value[whole].float(), feed.source.state()[name][whole].float(), rtol=1e-2, atol=1e-3), name
    stepper.shuffle()
    for index in range(feed.steps_per_epoch):
        [micro] = feed.micro_batches(epoch, index)
        assert torch.equal(stepper.rows.view(-1, stepper.batch)[index].long(), micro.ids), index


class EngineRollout(Rollout):
    """The engine collects; the kernels only learn."""


class EngineCollects(CartPole):
    def rollout(self, env: Env, *rest: Any) -> Rollout:
        return EngineRollout(env, *rest)


class Scaled(CartPole):
    """Its critic learns scaled targets, which only the engine's collections make."""

    scale_values: bool = True


@pytest.mark.parametrize(("kind", "epochs"), [(CartPole, 3), (Own, 3), (EngineCollects, 3), (Scaled, 3), (Reads, 3), (Pair, 2)])
def test_an_epoch_updates_the_weights_as_the_engines_steps_do(kind: type[Ppo], epochs: int, tmp_path: Path) -> None:
    """Both take the first epoch with the engine; the others are compared."""
    both = []
    for name, fused in (("kernels", True), ("plain", False)):
        done = training(tmp_path / name, kind(**SMALL, eval_episodes=0, epochs=epochs, decay="constant", fused=fused, log_every=1))
        done.run_to_end()
        assert (done.epochs.whole_epochs is not None) is fused
        both.append(done)
    mine, theirs = (torch.cat([p.detach().reshape(-1) for p in done.setup.model.parameters()]) for done in both)
    assert float((mine - theirs).norm() / theirs.norm()) < 0.02
    a, b = rows(tmp_path / "kernels"), rows(tmp_path / "plain")
    assert [r["step"] for r in a] == [r["step"] for r in b]
    now = len(a) // epochs + 4  # some steps into the second epoch
    for name in (
        "train/loss",
        "train/entropy",
        "train/kl",
        "train/value_error",
        "train/return",
        "train/length",
        "grad_norm",
        "learning_rate",
    ):
        assert a[now][name] == pytest.approx(b[now][name], rel=0.05, abs=2e-3), name


@pytest.mark.parametrize("kind", [CartPole, Own, Bandit])
def test_an_interrupted_run_equals_an_uninterrupted_one(kind: type[Ppo], tmp_path: Path) -> None:
    task = {**SMALL, "eval_episodes": 100, "epochs": 12, "eval_every": "4ep", "log_every": 5, "save_every": "1ep"}
    training(tmp_path / "uninterrupted", kind(**task)).run_to_end()
    per_epoch = 16
    for stop in (3 * per_epoch, 7 * per_epoch + 1, None):
        training(tmp_path / "interrupted", kind(**task)).run_to_end(stop)
    assert rows(tmp_path / "interrupted") == rows(tmp_path / "uninterrupted")
    assert weights(tmp_path / "interrupted") == weights(tmp_path / "uninterrupted")


def test_an_environment_for_which_the_host_waits_is_not_captured(tmp_path: Path) -> None:
    class Waiting(CartPoleEnv):
        def step(self, state: Any, action: Any, rand: Any) -> Any:
            assert action.max().item() <= 1
            return super().step(state, action, rand)

    class Slow(CartPole):
        def env(self) -> Env:
            return Waiting()

    _, stepper = learned(tmp_path, Slow, epochs=5)
    assert not stepper.is_captured and "the host waits" in stepper.host_wait


def test_a_gpu_that_is_too_old_takes_the_engines_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    done = training(tmp_path / "old", CartPole(**SMALL, eval_episodes=0, epochs=3, log_every=1, deterministic=True))
    done.run_to_end()
    monkeypatch.undo()
    plain = training(tmp_path / "plain", CartPole(**SMALL, eval_episodes=0, epochs=3, log_every=1, deterministic=True, fused=False))
    plain.run_to_end()
    assert done.epochs.whole_epochs is None
    assert weights(tmp_path / "old") == weights(tmp_path / "plain")
