"""PPO: advantages, truncated episodes, dead agents; the metrics are the same after interruptions and on any number of processes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drivetrain.hardware import memory_bytes
from drivetrain.outcomes import Outcome, Problem
from drivetrain.tasks.rl.checks import fault_text, first_fault
from drivetrain.tasks.rl.envs import Env, State
from drivetrain.tasks.rl.envs.cartpole import CartPoleEnv
from drivetrain.tasks.rl.envs.snake import SnakeEnv
from drivetrain.tasks.rl.episode_random import episode_uniform
from drivetrain.tasks.rl.nets import Agent, ConvAgent, IndependentAgents, LstmAgent
from drivetrain.tasks.rl.ppo import Ppo
from drivetrain.tasks.rl.rollout import Rollout
from drivetrain.tasks.rl.samples import COLUMNS, advantages, at_least_fp32, columns_of, sample_action
from drivetrain.tasks.rl.worlds import CartPole
from tests.command import expect_error, run_ok
from tests.engine.test_invariance import assert_same_metrics
from tests.sample_tasks import rows

SMALL = ["epochs=4", "envs=8", "horizon=8", "global_batch=32", "passes=2", "eval_episodes=4", "log_every=1", "save_every=1ep"]


def test_advantages_match_explicit_sums_for_each_environment_and_agent() -> None:
    random = torch.Generator().manual_seed(0)
    shape = (3, 12, 2)
    reward, value, next_value = (torch.randn(shape, generator=random, dtype=torch.float64) for _ in range(3))
    terminated, done = torch.rand(shape, generator=random) < 0.2, (torch.rand(3, 12, 1, generator=random) < 0.15).expand(shape)
    computed = advantages(reward, value, next_value, terminated, done, 0.9, 0.8)
    for env in range(3):
        for agent in range(2):
            for start in range(12):
                total, factor = 0.0, 1.0
                for step in range(start, 12):
                    index = (env, step, agent)
                    expected_next = 0.0 if terminated[index] else float(next_value[index])
                    total += factor * (float(reward[index]) + 0.9 * expected_next - float(value[index]))
                    if terminated[index] or done[index]:
                        break
                    factor *= 0.9 * 0.8
                assert abs(total - float(computed[env, start, agent])) < 1e-9


class Clock(Env):
    """Counts its steps, never terminates, and is truncated after 3 steps."""

    actions, shape, chances, limit = 2, (1,), 0, 3

    def reset(self, rand: Tensor) -> State:
        return {"count": torch.zeros(len(rand))}

    def step(self, state: State, action: Tensor, rand: Tensor) -> tuple[State, Tensor, Tensor]:
        return {"count": state["count"] + 1}, torch.ones(len(action)), torch.zeros(len(action), dtype=torch.bool)

    def observe(self, state: State) -> Tensor:
        return state["count"][:, None]


class TenTimesCount(Agent):
    """Its value of an observation is ten times the count that it shows."""

    def policy(self, observation: Tensor, agent_ids: Tensor | None = None) -> Tensor:
        return torch.zeros(len(observation), 4)

    def value(self, observation: Tensor, agent_ids: Tensor | None = None) -> Tensor:
        return 10.0 * observation.flatten(1)[:, 0]


class SequentialRand:
    """Random numbers with the interface of `Rand`, from one generator."""

    def __init__(self, rows: int) -> None:
        self.ids, self._random = torch.arange(rows), torch.Generator().manual_seed(3)

    def __len__(self) -> int:
        return len(self.ids)

    def uniform(self, k: int = 1) -> Tensor:
        return torch.rand(len(self), k, generator=self._random)

    def normal(self, k: int = 1) -> Tensor:
        return torch.randn(len(self), k, generator=self._random)


def test_a_truncated_episode_counts_the_value_of_its_next_observation() -> None:
    """The third step is truncated: its next observation (a count of 3) has the value 30, not the value 0 of the new episode."""
    columns = columns_of(Rollout(Clock(), 1, 4, 1, 0.5, 1.0).collect(TenTimesCount(), SequentialRand(1), lambda t: t)[:])
    targets = [1 + 0.5 * (1 + 0.5 * (1 + 0.5 * 30)), 1 + 0.5 * (1 + 0.5 * 30), 1 + 0.5 * 30, 1 + 0.5 * 10]
    assert columns["target"].tolist() == targets
    assert columns["return"].tolist() == [3.0] * 4 and columns["length"].tolist() == [3.0] * 4


def test_dead_agents_do_not_count() -> None:
    env = SnakeEnv(2, 5, 5)
    rollout = Rollout(env, 6, 40, 1, 0.99, 0.95)
    batch = rollout.collect(TenTimesCount(), SequentialRand(6), lambda t: t)[:]
    columns = columns_of(batch)
    is_alive, advantage = columns["is_alive"], columns["advantage"]
    assert 0 < float(is_alive.mean()) < 1
    mean = (advantage * is_alive).sum() / is_alive.sum()
    variance = ((advantage - mean).square() * is_alive).sum() / is_alive.sum()
    assert abs(float(mean)) < 1e-4 and abs(float(variance) - 1) < 1e-3, "normalised over living agents"
    task = Ppo(net="conv")
    model = ConvAgent(env.shape, env.actions)
    changed = batch | {"columns": batch["columns"].clone()}
    changed["columns"][is_alive == 0, COLUMNS.index("advantage")] = 1e6
    (loss, count), _ = task.loss(model, batch)
    (loss_of_changed, _), _ = task.loss(model, changed)
    assert float(loss.detach()) == float(loss_of_changed.detach()) and float(count) == float(is_alive.sum())


def test_actions_are_sampled_with_the_policys_probabilities() -> None:
    logits = torch.tensor([0.5, -1.0, 1.5]).expand(200_000, 3)
    drawn = sample_action(logits, episode_uniform(torch.arange(200_000), 7, 1)[:, 0])
    shares = torch.bincount(drawn, minlength=3) / 200_000
    assert torch.allclose(shares, logits[0].softmax(-1), atol=0.005)


def test_the_network_of_guide_003_has_its_number_of_parameters() -> None:
    assert sum(p.numel() for p in ConvAgent((5, 20, 20), 4).parameters()) == 413_845


# --- through the command ------------------------------------------------------------------------


@pytest.mark.system  # slow
def test_an_interrupted_run_equals_an_uninterrupted_one(folder: Path) -> None:
    assert "bit-equal" in run_ok("verify-resume", "cartpole", "--steps", "40", *SMALL, "horizon=6", "global_batch=24")
    assert "bit-equal" in run_ok(
        "verify-resume", "snake", "--steps", "16", *SMALL, "grid=6", "agents=2", "global_batch=64", "eval_episodes=0"
    )


@pytest.mark.parametrize("procs", [2, 4])
def test_processes_share_the_environments_with_the_same_curve(procs: int, folder: Path) -> None:
    run_ok("train", "cartpole", *SMALL, "--procs", "1", "--name", "one")
    run_ok("train", "cartpole", *SMALL, "--procs", str(procs), "--name", "many")
    assert_same_metrics(rows("runs/one"), rows("runs/many"), 2e-4)
    for line in Path("runs/many/metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        assert row["env_steps_per_second"] == row["samples_per_second"] / 2, "two passes"


def test_env_steps_count_steps_of_environments() -> None:
    """All agents act in one step of an environment; a sample of an LSTM has several steps."""
    assert Rollout(SnakeEnv(4, 5, 5), 6, 8, 2, 0.99, 0.95).speeds == {"env_steps": 1 / 8}
    assert Rollout(CartPoleEnv(), 6, 40, 1, 0.99, 0.95, chunk=20, memory=16).speeds == {"env_steps": 20}


def test_cartpole_is_solved_with_its_default_settings(folder: Path) -> None:
    run_ok("train", "cartpole", "--name", "solved", "eval_episodes=1000", "eval_every=1000ep")
    last_row = [json.loads(line) for line in Path("runs/solved/metrics.jsonl").read_text().splitlines()][-1]
    assert last_row["eval/return"] >= 475, last_row


def test_the_bandit_reaches_100_percent(folder: Path) -> None:
    run_ok("train", "bandit", "--name", "probe")
    last_row = rows("runs/probe")[-1]
    assert last_row["eval/return"] == last_row["eval/length"] == 100.0, "a lower return is a fault in the learner"


PAGE = (Path(__file__).parents[2] / "docs" / "rl.md").read_text()
EXAMPLE = PAGE.partition("```python\n")[2].partition("```")[0]
"""The example of an environment in docs/rl.md."""


def test_the_documented_environment_is_learned(folder: Path) -> None:
    Path("walk.py").write_text(EXAMPLE)
    run_ok("train", "walk.py:Walk", "--name", "walk")
    last_row = [json.loads(line) for line in Path("runs/walk/metrics.jsonl").read_text().splitlines()][-1]
    assert last_row["eval/return"] > 0.75 and last_row["eval/length"] < 4.5, last_row


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("there.float() - 0.05, there", "there.float()[:, None], there"), "Corridor.step() gave a reward of shape [32, 1], not [32]"),
        (("there.float() - 0.05, there", "there.float(), there.float()"), "Corridor.step() gave terminations as torch.float32: they must be true or false"),
        (("one_hot(state[\"place\"], 7)", "one_hot(state[\"place\"], 9)"), "Corridor.observe() gave [32, 9] after reset(), not [32, 7]"),
        (("there.float() - 0.05, there", "0.5, there"), "Corridor.step() gave a reward as a float"),
        ((", there.float() - 0.05, there", ", there"), "Corridor.step() gave 2 values: it must return (state, reward, terminated)"),
        (("{\"place\": place.clamp(max=6)}", "{\"place\": place.clamp(max=6), \"new\": place}"), "a state 'new' that reset() does not make"),
        (("7).float()", "7)"), "Corridor.observe() gave torch.int64"),
        ((" 2, (7,), 1, 20", " 2, 7, 1, 20"), "Corridor.shape is 7: write it as a tuple"),
        (("{\"place\": place.clamp(max=6)}", "{\"place\": place.float()}"), "for state 'place', which reset() makes torch.int64"),
    ],
)  # fmt: skip
def test_wrong_shapes_are_named(change: tuple[str, str], message: str) -> None:
    assert message in refusal(EXAMPLE.replace(*change))


def refusal(source: str) -> str:
    """Returns the error with which a training in this environment is refused, at its first collection or before."""
    names: dict[str, Any] = {}
    exec(source, names)
    task = names["Walk"]()
    with pytest.raises(Problem) as refused, torch.no_grad():
        task.train_data().collect(task.model(), SequentialRand(task.envs), lambda t: t)
    return str(refused.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("    def reset(", "    def begin("), "Corridor has no reset(): an environment needs reset, step and observe"),
        (("    def step(", "    def move("), "Corridor has no step()"),
        ((" 2, (7,), 1, 20", " 0, (7,), 1, 20"), "Corridor.actions is 0: it must be a whole number, at least 1"),
        ((" 2, (7,), 1, 20", " 2, (), 1, 20"), "Corridor.shape is (): it must be the sizes of one agent's observation"),
        ((" 2, (7,), 1, 20", " 2, (7,), -1, 20"), "Corridor.chances is -1: it must be a whole number, at least 0"),
        ((" 2, (7,), 1, 20", " 2, (7,), 1, -20"), "Corridor.limit is -20: it must be a whole number, at least 1, or None"),
        ((" 2, (7,), 1, 20", " 2, (7,), 1, 0"), "Corridor.limit is 0"),
        (("return Corridor()", "return object()"), "Walk.env() gave a object, which is no Env"),
        (("return Corridor()", "import gymnasium; return gymnasium.make('CartPole-v1')"), "drivetrain train gym world=NAME"),
        (("7).float()", "7).double()"), "Corridor.observe() gave torch.float64 after reset(): it must be a tensor of float32 (add .float())"),
        (("there.float() - 0.05, there", "there.float() / (place < 0), there"), "Corridor.step() gave a reward of nan in environment 0 at step 1"),
        (("7).float()", "7) / (1.0 - (state[\"place\"] == 5).float())[:, None]"), "Corridor.observe() gave nan in environment"),
        (("there.float() - 0.05, there", "there.float()[:5], there"), "Corridor.step() gave a reward of shape [5], not [32]"),
        (("return {\"place\": (rand[:, 0] * 6).long()}", "return (rand[:, 0] * 6).long()"), "Corridor.reset() must give a dict of tensors"),
    ],
)  # fmt: skip
def test_faults_of_an_environment_name_it_and_the_method(change: tuple[str, str], message: str) -> None:
    assert change[0] in EXAMPLE
    assert message in refusal(EXAMPLE.replace(*change))


def test_a_later_reward_of_nan_names_the_environment_and_the_step(folder: Path) -> None:
    """Only the right end gives nan, which no environment reaches in the first steps; the message does not blame the learning rate."""
    source = EXAMPLE.replace("* 6)", "* 0)").replace("there.float() - 0.05", "torch.where(there, float('nan'), 0.0)")
    Path("walk.py").write_text(source)
    message = expect_error("train", "walk.py:Walk", "horizon=64", code=Outcome.NAN.code)
    assert "Corridor.step() gave a reward that is not finite (nan or inf): environment" in message and "of collection 1" in message
    assert "learning_rate" not in message


def test_rewards_in_float64_are_accepted() -> None:
    names: dict[str, Any] = {}
    exec(EXAMPLE.replace("there.float() - 0.05", "there.double() - 0.05"), names)
    task = names["Walk"]()
    source = task.train_data()
    batch = source.collect(task.model(), SequentialRand(task.envs), lambda t: t)[:]
    assert batch["columns"].dtype == source.state()["return"].dtype == torch.float32


@pytest.mark.parametrize("kind", [0, 1])
def test_the_first_fault_of_a_run_is_stored(kind: int) -> None:
    steps, zeros = 4, torch.zeros(3, dtype=torch.int64)
    observation, reward = torch.zeros(3, steps, 1, 2), torch.zeros(3, steps, 1)
    faults = first_fault(zeros, zeros + 1, reward, observation)
    assert fault_text(Clock(), faults, steps) == ""
    (observation, reward)[kind][2, 1] = float("nan")
    faults = first_fault(faults, zeros + 2, reward, observation)
    later = first_fault(faults, zeros + 3, torch.full_like(reward, torch.inf), observation)
    assert torch.equal(later[2:], faults[2:]), "only the first fault is stored"
    assert fault_text(Clock(), later, steps).endswith("environment 2, step 2 of collection 2")
    assert ("reward" in fault_text(Clock(), later, steps)) == bool(kind)


def test_a_batch_that_does_not_divide_a_collection_is_refused_with_a_size_that_does() -> None:
    with pytest.raises(Problem, match="take global_batch=64"):
        CartPole(envs=32, horizon=8, global_batch=50).train_data()
    assert "envs=0" in expect_error("train", "cartpole", "envs=0")


def test_a_collection_larger_than_memory_is_refused_before_it_begins(folder: Path) -> None:
    message = expect_error("train", "cartpole", "envs=1000000000", "global_batch=1000000000")
    assert "a collection from 1,000,000,000 groups (environments) takes at least 1788 GiB, and this machine has" in message
    max_envs = int(re.search(r"\(`envs`\) to at most ([\d,]+)", message)[1].replace(",", ""))  # type: ignore[index]
    source = CartPole(envs=max_envs, global_batch=max_envs).train_data()
    assert source.group_bytes * max_envs <= memory_bytes() < source.group_bytes * (max_envs + 1)


def test_independent_policies_learn_only_from_their_own_samples() -> None:
    env = SnakeEnv(2, 5, 5)
    task = Ppo(net="conv", policies="independent")
    model = IndependentAgents([ConvAgent(env.shape, env.actions) for _ in range(2)])
    with torch.no_grad():
        batch = Rollout(env, 6, 20, 1, 0.99, 0.95).collect(model, SequentialRand(6), lambda t: t)[:]
    agent_ids = columns_of(batch)["agent"]
    assert torch.equal(agent_ids.view(6, 20, 2), torch.arange(2).expand(6, 20, 2))
    observation = at_least_fp32(batch["observation"])
    assert torch.allclose(model.policy(observation), model.policy(observation, agent_ids))
    first = {k: v[agent_ids == 0] for k, v in batch.items()}
    (total, _), _ = task.loss(model, first)
    total.backward()
    sums = [sum(float(p.grad.abs().sum()) for p in player.parameters() if p.grad is not None) for player in model.players]
    assert sums[0] > 0 and sums[1] == 0


def test_kl_stop_ends_the_learning_from_a_collection(folder: Path) -> None:
    """At the first step of a collection the divergence is 0; after it, any divergence is above the limit."""
    words = ["train", "cartpole", *SMALL, "learning_rate=2.5e-3", "activation=tanh", "eval_episodes=0", "save_every=1000ep"]
    run_ok(*words, "kl_stop=1e-12", "--name", "stopped")
    run_ok(*words, "kl_stop=1e-12", "--procs", "2", "--name", "two")
    run_ok(*words, "--name", "free")
    stopped, free = rows("runs/stopped"), rows("runs/free")
    assert_same_metrics(stopped, rows("runs/two"), 2e-4)
    per_epoch = len(stopped) // stopped[-1]["epoch"]
    assert per_epoch > 3
    for epoch in range(stopped[-1]["epoch"]):
        first, *rest = [row["train/kl"] for row in stopped[epoch * per_epoch : (epoch + 1) * per_epoch]]
        assert abs(first) < 1e-7 and min(rest) > 0, "only one step changed the policy"
    assert max(row["train/kl"] for row in free) > 3 * max(row["train/kl"] for row in stopped)


def test_a_limit_of_an_unknown_metric_is_named(folder: Path) -> None:
    Path("walk.py").write_text(
        EXAMPLE
        + '\n    def rollout(self, *arguments):\n        source = super().rollout(*arguments)\n        source.limits = {"kk": 0.1}\n        return source\n'
    )
    assert "the source's limits name 'kk', which loss() does not give" in expect_error("train", "walk.py:Walk")


RECALL = """
import torch
from drivetrain.tasks.rl.envs import Env
from drivetrain.tasks.rl.ppo import Ppo


class Cue(Env):
    \"\"\"Shows a sign once; four steps later the action must name it.\"\"\"

    actions, shape, chances, limit = 2, (3,), 1, 10

    def reset(self, rand):
        return {"sign": (rand[:, 0] < 0.5).long(), "step": torch.zeros_like(rand[:, 0]).long()}

    def step(self, state, action, rand):
        last = state["step"] == 4
        reward = (last & (action == state["sign"])).float()
        return {"sign": state["sign"], "step": state["step"] + 1}, reward, last

    def observe(self, state):
        first = state["step"] == 0
        return torch.stack((first & (state["sign"] == 0), first & (state["sign"] == 1), state["step"] == 4), -1).float()


class Recall(Ppo):
    epochs: int = 25
    envs: int = 64
    horizon: int = 20
    chunk: int = 10
    global_batch: int = 64
    learning_rate: float = 0.005
    width: int = 16

    def env(self):
        return Cue()
"""


@pytest.mark.system  # slow
def test_an_lstm_remembers_what_a_perceptron_cannot(folder: Path) -> None:
    Path("recall.py").write_text(RECALL)
    run_ok("train", "recall.py:Recall", "net=lstm", "epochs=80", "plan.threads=1", "--name", "lstm")
    run_ok("train", "recall.py:Recall", "global_batch=640", "plan.threads=1", "--name", "mlp")
    returns = {name: rows(f"runs/{name}")[-1]["eval/return"] for name in ("lstm", "mlp")}
    assert returns["lstm"] > 0.95 and returns["mlp"] < 0.8, returns
    assert "bit-equal" in run_ok("verify-resume", "recall.py:Recall", "net=lstm", "plan.threads=1", "--steps", "20")
    run_ok("export", "lstm", "-q")
    card = json.loads(Path("runs/lstm/model/export.json").read_text())
    assert [tensor["name"] for tensor in card["graphs"]["policy"]["inputs"]] == ["observation", "random", "memory"]
    assert "take global_batch=64" in expect_error("train", "recall.py:Recall", "net=lstm", "global_batch=50")
    assert "horizon=20 is no multiple of chunk=6" in expect_error("train", "recall.py:Recall", "net=lstm", "chunk=6")


def test_an_unrolled_lstm_gives_the_logits_and_values_of_the_collection() -> None:
    """This holds in every step, also in chunks in which an episode ends."""
    torch.manual_seed(0)
    agent = LstmAgent(4, 2, 8)
    rollout = Rollout(CartPoleEnv(), 16, 60, 1, 0.99, 0.95, chunk=20, memory=16)
    with torch.no_grad():
        batch = rollout.collect(agent, SequentialRand(16), lambda t: t)[:]
    columns = columns_of(batch)
    is_first = columns["is_first"].view(48, 20)
    assert batch["observation"].shape == (48, 20, 20) and float(is_first[:, 1:].sum()) > 0
    logits, value = agent.unroll(batch["observation"], is_first)
    assert torch.allclose(value, columns["value"], atol=1e-5)
    log_probs = logits.log_softmax(-1).gather(1, columns["action"][:, None])[:, 0]
    assert torch.allclose(log_probs, columns["log_prob"], atol=1e-5)


def test_a_smoke_run_takes_two_small_collections(folder: Path) -> None:
    """Batches of a few samples would not fit the environments, so it keeps the batch of the task."""
    assert "train, save, resume and eval work" in run_ok("train", "cartpole", "envs=16", "global_batch=64", "--smoke")
    assert "train, save, resume and eval work" in run_ok("train", "cartpole", "--smoke")
