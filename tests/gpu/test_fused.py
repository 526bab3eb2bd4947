"""PPO's own kernels give the same samples, order, gradients and updates as the engine's steps."""

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
from tests.sample_tasks import rows, weights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
SMALL: dict[str, Any] = {
    "envs": 512, "horizon": 32, "global_batch": 4096, "passes": 4, "learning_rate": 2.5e-3, "width": 64, "activation": "tanh",
}  # fmt: skip


def training(folder: Path, task: Any) -> Training:
    plan = choose(task.settings(), detect(), device="cuda", world_size=1, local_procs=1, pins={"compile": "off"})
    return Training(task, plan, Run(folder), Group(0, 1, torch.device("cuda", 0)), Observers([MetricsFile(Run(folder))]), False)


class OtherCartPoleEnv(CartPoleEnv):
    """An environment for which there are no kernels."""


class OtherCartPole(CartPole):
    def env(self) -> Env:
        return OtherCartPoleEnv()


def train_with_kernels(folder: Path, kind: type[Ppo] = CartPole, **settings: Any) -> tuple[Training, FusedStepper]:
    finished = training(folder, kind(**(SMALL | {"eval_episodes": 0, "log_every": 1, "save_every": "1ep"} | settings)))
    finished.run_to_end()
    assert finished.epochs.whole_epochs is not None and isinstance(finished.epochs.whole_epochs.stepper, FusedStepper)
    return finished, finished.epochs.whole_epochs.stepper


def gradients(stepper: FusedStepper, observations: Any, columns: Any, rows: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the kernels' gradients of some samples, and the sums of their metrics."""
    stepper.gradients(observations, columns, rows.int(), min(stepper.blocks, -(-len(rows) // TILE)))
    size = len(stepper.parameters)
    return stepper.sums[:size].double(), stepper.sums[size:].double()


def compare_gradients(trained: Training, stepper: FusedStepper, observations: Any, columns: Any, numbers: Any, strict: bool) -> None:
    """Compares the kernels' gradients and sums of some samples with those of exact arithmetic."""
    kernel_gradients, sums = gradients(stepper, observations, columns, numbers)
    exact: Any = copy.deepcopy(trained.setup.model).double()
    exact.zero_grad()
    known_columns = torch.zeros(len(numbers), 11, device="cuda", dtype=torch.float64)
    known_columns[:, :6] = columns[numbers][:, :6].double()
    known_columns[:, 2] = (known_columns[:, 2] - stepper.stats[4]) / stepper.stats[5]
    (total, count), figures = trained.setup.task.loss(exact, {"observation": observations[numbers].double(), "columns": known_columns})
    total.backward()
    exact_gradients = torch.cat([p.grad.reshape(-1) for p in (*exact.actor.parameters(), *exact.critic.parameters())])
    tf32_model: Any = copy.deepcopy(trained.setup.model)
    torch.set_float32_matmul_precision("high")
    trained.setup.task.loss(tf32_model, {"observation": observations[numbers], "columns": known_columns.float()})[0][0].backward()
    torch.set_float32_matmul_precision("highest")
    tf32_gradients = torch.cat([p.grad.reshape(-1) for p in (*tf32_model.actor.parameters(), *tf32_model.critic.parameters())]).double()
    actor = sum(p.numel() for p in exact.actor.parameters())
    for name, part in (("actor", slice(0, actor)), ("critic", slice(actor, None))):
        error, tf32_error = (
            float((some[part] - exact_gradients[part]).norm() / exact_gradients[part].norm()) for some in (kernel_gradients, tf32_gradients)
        )
        print(f"{name}: {error:.1e}, torch with tf32 {tf32_error:.1e}")
        max_error = 1e-2 if strict else max(1e-2, 1.5 * tf32_error)  # with few samples, a critic's exact gradient may be almost zero
        assert error < max_error, f"{name}: {error:.1e}, torch with tf32 {tf32_error:.1e}"
    assert float(sums[5]) == float(count) == float(known_columns[:, 5].sum())
    for index, name in ((1, "entropy"), (2, "kl"), (3, "clipped"), (4, "value_error")):
        assert float(sums[index]) == pytest.approx(float(figures[name][0]), rel=2e-3, abs=2e-4 * len(numbers)), name


@pytest.mark.parametrize(
    "shape",
    [
        {"envs": 4096, "horizon": 64, "global_batch": 65536},  # the sizes of the benchmark
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
    done, stepper = train_with_kernels(tmp_path, epochs=epochs, **shape)
    numbers = torch.randperm(stepper.count, device="cuda")[: done.setup.task.global_batch - 95]  # no multiple of the tile size
    compare_gradients(done, stepper, stepper.observations, stepper.columns, numbers, "envs" in shape)


class SignsEnv(Env):
    """Shows numbers: the first determines the right action, the last is added to the reward."""

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


class ReadsSigns(Ppo):
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
    done, stepper = train_with_kernels(tmp_path, ReadsSigns, epochs=30, **shape)
    assert stepper.collects and len(torch.unique(stepper.columns[:, 0])) > shape["choices"] // 2, "most actions are taken"
    numbers = torch.randperm(stepper.count, device="cuda")[: done.setup.task.global_batch - 95]
    compare_gradients(done, stepper, stepper.observations, stepper.columns, numbers, strict=False)


class TwoSnakes(Ppo):
    """Two snakes on a small grid; one may be dead while the other still plays."""

    net: Literal["mlp", "conv", "lstm"] = "mlp"
    rival: float = 0.0

    def env(self) -> Env:
        return SnakeEnv(2, 3, 3)


def test_dead_agents_have_no_gradient(tmp_path: Path) -> None:
    done, stepper = train_with_kernels(tmp_path, TwoSnakes, epochs=30)
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


@pytest.mark.parametrize("kind", [CartPole, OtherCartPole, Bandit])
def test_samples_and_their_order_are_those_of_the_engine(kind: type[Ppo], tmp_path: Path) -> None:
    done, stepper = train_with_kernels(tmp_path, kind, epochs=6)
    feed: Any = done.setup.feed
    before = {k: v.clone() for k, v in stepper.state.items()}
    epoch = 6
    stepper.collect(torch.tensor(feed.random_keys(epoch)))
    after = {k: v.clone() for k, v in stepper.state.items()}
    feed.source.load({k: v.clone() for k, v in before.items()})
    feed._graphs = None
    feed.begin_epoch(epoch, done.setup.model)
    engine_batch = {k: v.clone() for k, v in feed.collected_batch().items()}
    engine_batch["columns"] = engine_batch["columns"][:, :6]
    kernel_columns = stepper.columns[:, :6].clone()
    kernel_columns[:, 2] = (kernel_columns[:, 2] - stepper.stats[4]) / stepper.stats[5]
    same_action = (stepper.columns[:, 0] == engine_batch["columns"][:, 0]).view(stepper.envs, -1)
    same_environments = same_action.all(1)  # in the others, rounding changed an action
    assert same_environments.float().mean() > 0.95
    for name, from_kernels, from_engine in (
        ("observation", stepper.observations, engine_batch["observation"]),
        ("columns", kernel_columns, engine_batch["columns"]),
    ):
        a, b = (t.view(stepper.envs, stepper.horizon, -1)[same_environments] for t in (from_kernels, from_engine))
        assert torch.allclose(a, b, rtol=2e-2, atol=2e-2), f"{name}: {(a - b).abs().amax((0, 1))}"
    for name, value in after.items():
        assert torch.allclose(
            value[same_environments].float(), feed.source.state()[name][same_environments].float(), rtol=1e-2, atol=1e-3
        ), name
    stepper.shuffle()
    for index in range(feed.steps_per_epoch):
        [micro] = feed.micro_batches(epoch, index)
        assert torch.equal(stepper.rows.view(-1, stepper.batch)[index].long(), micro.ids), index


class EngineRollout(Rollout):
    """A rollout without kernels: the engine collects, and the kernels only learn."""


class EngineCollects(CartPole):
    def rollout(self, env: Env, *rest: Any) -> Rollout:
        return EngineRollout(env, *rest)


class ScaledValues(CartPole):
    """The critic learns scaled targets, which only the engine's collections have."""

    scale_values: bool = True


@pytest.mark.parametrize(
    ("kind", "epochs"), [(CartPole, 3), (OtherCartPole, 3), (EngineCollects, 3), (ScaledValues, 3), (ReadsSigns, 3), (TwoSnakes, 2)]
)
def test_an_epoch_updates_the_weights_as_the_engines_steps_do(kind: type[Ppo], epochs: int, tmp_path: Path) -> None:
    """Both runs train the first epoch with the engine's steps; later epochs are compared."""
    both = []
    for name, fused in (("kernels", True), ("plain", False)):
        done = training(tmp_path / name, kind(**SMALL, eval_episodes=0, epochs=epochs, decay="constant", fused=fused, log_every=1))
        done.run_to_end()
        assert (done.epochs.whole_epochs is not None) is fused
        both.append(done)
    kernel_weights, engine_weights = (torch.cat([p.detach().reshape(-1) for p in done.setup.model.parameters()]) for done in both)
    assert float((kernel_weights - engine_weights).norm() / engine_weights.norm()) < 0.02
    a, b = rows(tmp_path / "kernels"), rows(tmp_path / "plain")
    assert [r["step"] for r in a] == [r["step"] for r in b]
    row = len(a) // epochs + 4  # some steps into the second epoch
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
        assert a[row][name] == pytest.approx(b[row][name], rel=0.05, abs=2e-3), name


@pytest.mark.parametrize("kind", [CartPole, OtherCartPole, Bandit])
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

    _, stepper = train_with_kernels(tmp_path, Slow, epochs=5)
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
