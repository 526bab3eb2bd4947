"""Plays environments with a policy and makes samples with advantages, separate for each agent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from drivetrain.data import EpochStepper, Rand, Source, StepperContext, Tensors
from drivetrain.tasks.rl.checks import check_first_steps, check_reset, fault_text, first_fault
from drivetrain.tasks.rl.envs import Env, State, select_rows
from drivetrain.tasks.rl.nets import Agent, AgentWithRival
from drivetrain.tasks.rl.samples import (
    COLLECTION_METRICS,
    COLUMNS,
    advantages,
    at_least_fp32,
    log_probability,
    mean_and_deviation,
    sample_action,
    with_memory,
)


def _any(condition: Tensor) -> bool:
    """Returns whether the condition holds anywhere; under vmap, in any of the trials."""
    while torch._C._functorch.is_batchedtensor(condition):
        condition = torch._C._functorch.get_unwrapped(condition)
    return bool(condition.any())


class Rollout(Source):
    """Environments that continue from collection to collection. A group is one environment."""

    pure = True
    make_stepper: Callable[[Rollout, Any, StepperContext], EpochStepper | None] | None = None
    """Makes the task's own stepper, if it has one."""

    def __init__(
        self,
        env: Env,
        num_envs: int,
        horizon: int,
        passes: int,
        gamma: float,
        gae_lambda: float,
        scale_rewards: bool = False,
        rival_at: int = 0,
        chunk: int = 1,
        memory: int = 0,
        scale_values: bool = False,
    ) -> None:
        """`scale_rewards` divides rewards by the standard deviation of their discounted sums, so that values are near 1.

        With `scale_values` the critic learns targets of mean 0 and deviation 1. After `rival_at` collections the rival becomes
        a copy of the policy. With a `memory` (numbers per agent), a sample is `chunk` consecutive steps.
        """
        self.env, self.groups, self.horizon, self.passes = env, num_envs, horizon, passes
        self.gamma, self.gae_lambda = gamma, gae_lambda
        self.scale_rewards, self.scale_values = scale_rewards, scale_values
        self.rival_at, self.chunk, self.memory = rival_at, chunk, memory
        observation_bytes = torch.Size(env.shape).numel() * (1 if env.bits and not memory else 4) + 4 * memory
        # Each step is held twice: as it was played, and as the sample made of it.
        self.group_bytes = 2 * horizon * env.agents * (observation_bytes + 4 * len(COLUMNS))
        self._state: State = {}
        self._truncated_observation: Tensor | None = None
        """On a GPU: the observation after the last step of each environment that was truncated in this collection."""

    @property
    def truncates_once(self) -> bool:
        """Whether each environment is truncated at most once in a collection."""
        return self.env.limit is None or self.horizon <= self.env.limit

    @property
    def speeds(self) -> dict[str, float]:
        """Environment steps; in each step all agents act."""
        return {"env_steps": self.chunk / (self.passes * self.env.agents)}

    def __len__(self) -> int:
        return self.groups * self.horizon * self.env.agents // self.chunk

    def stepper(self, model: Any, context: StepperContext) -> EpochStepper | None:
        return None if self.make_stepper is None else self.make_stepper(self, model, context)

    def state(self) -> dict[str, Tensor]:
        return self._state

    def load(self, state: dict[str, Tensor]) -> None:
        if state:  # checkpoints of earlier versions hold no faults
            state.setdefault("fault", torch.zeros_like(state["collections"]))
        self._state = state

    # --- a collection ---

    def begin(self, rand: Tensor) -> State:
        """Returns the state before the first collection; rows of `rand` are environments."""
        agents = self.env.agents
        env_state = self.env.reset(rand)
        check_reset(self.env, env_state, len(rand))
        zeros = rand.new_zeros(len(rand), agents)
        targets = {"targets": zeros.new_zeros(len(rand), 3)} if self.scale_values else {}
        return {f"env.{k}": v for k, v in env_state.items()} | targets | {
            "steps": zeros[:, 0].long(), "return": zeros, "ended": zeros > 0, "recent": zeros.new_zeros(len(rand), 2),
            "discounted": zeros, "spread": zeros.new_zeros(len(rand), 3), "collections": zeros[:, 0].long(),
            "memory": zeros.new_zeros(len(rand), agents, self.memory), "fault": zeros[:, 0].long(),
        }  # fmt: skip

    def collect(self, model: Any, rand: Rand, total: Callable[[Tensor], Tensor]) -> Tensors:
        uniform = rand.uniform(self.horizon * (self.env.agents + 2 * self.env.chances)).view(len(rand), self.horizon, -1)
        if not self._state:
            self._state = self.begin(rand.uniform(max(1, self.env.chances)))
            self.check(self._state)
        if isinstance(model, AgentWithRival):
            model.update_rival(self._state["collections"][0] == self.rival_at)
        self._state["collections"] = self._state["collections"] + 1
        self._truncated_observation = None
        steps = [self._step(model, uniform[:, t]) for t in range(self.horizon)]
        played = {name: torch.stack([step[name] for step in steps], 1) for name in steps[0]}
        self.record(played)
        columns = self._columns(model, played, total)
        stacked = torch.stack([columns[name].to(columns["value"].dtype).expand_as(columns["value"]) for name in COLUMNS], -1)
        return Tensors(observation=self._samples(played["observation"]), columns=self._samples(stacked))

    def _step(self, model: Agent, uniform: Tensor) -> dict[str, Tensor]:
        """Plays one step of every environment, and starts a new episode where one is done."""
        env, agents, state = self.env, self.env.agents, self._state
        env_state = self._env_state(state)
        observation = self._observe(env_state, state["memory"])
        output = {}
        if model.shares_body:
            raw_logits, value = model(observation)
            output["value"] = at_least_fp32(value).view(len(uniform), agents)
        else:
            raw_logits = model.policy(observation)
        logits = at_least_fp32(raw_logits).view(len(uniform), agents, -1)
        action = sample_action(logits, uniform[:, :agents])
        step_rand, reset_rand = uniform[:, agents:].split(env.chances, 1) if env.chances else (uniform[:, :0], uniform[:, :0])
        env_state, reward, terminated = env.step(env_state, action if agents > 1 else action[:, 0], step_rand)
        reward, terminated, is_alive = reward.float().view(-1, agents), terminated.view(-1, agents), ~state["ended"]
        length, episode_return = state["steps"] + 1, state["return"] + reward * is_alive
        discounted = state["discounted"] * self.gamma + reward * is_alive
        done = self._done(terminated, length, env_state)
        finished = done[:, None].expand_as(terminated).float()
        truncated = done[:, None] & ~terminated
        memory = model.next_memory(observation).view_as(state["memory"]) if self.memory else state["memory"]
        is_first = (state["steps"] == 0).float()[:, None].expand_as(finished)
        self._state = state | {f"env.{k}": v for k, v in self._reset(done, env_state, reset_rand).items()} | {
            "steps": torch.where(done, 0, length), "return": episode_return * (1 - finished), "ended": terminated & ~done[:, None],
            "discounted": discounted * (1 - finished), "memory": memory * (1 - finished[..., None]),
        }  # fmt: skip
        return {
            "observation": self._stored(observation).unflatten(0, (-1, agents)), "is_first": is_first, "action": action, "logits": logits,
            "reward": reward * is_alive, "terminated": terminated, "is_alive": is_alive, "done": done[:, None].expand_as(terminated),
            "finished": finished, **self._after_truncation(model, env_state, memory, truncated),
            "return": episode_return * finished, "length": length.float()[:, None] * finished, "discounted": discounted, **output,
        }  # fmt: skip

    def _columns(self, model: Agent, played: dict[str, Tensor], total: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Returns the columns of the samples; statistics are over all ranks."""
        output, next_output, log_prob = self._evaluate(model, played)
        values, next_values = self._unscaled_values(output), self._unscaled_values(next_output)
        reward = played["reward"] / self._reward_scale(played, total) if self.scale_rewards else played["reward"]
        advantage = advantages(reward, values, next_values, played["terminated"], played["done"], self.gamma, self.gae_lambda)
        is_alive, target = played["is_alive"].float(), advantage + values
        sums = total(_collection_sums(is_alive, advantage, target, played))
        if self.scale_values:
            target = self._scaled_targets(target, torch.stack((sums[0], *sums[3:5])))
        mean, deviation = mean_and_deviation(sums[0], sums[1], sums[2])
        _, target_deviation = mean_and_deviation(sums[0], sums[3], sums[4])
        recent = torch.where(sums[5] > 0, sums[6:8] / sums[5].clamp(min=1), self._state["recent"][0])
        self._state["recent"] = recent.expand(len(values), 2).clone()
        explained = torch.where(target_deviation > 1e-4, 1 - (deviation / target_deviation.clamp(min=1e-4)) ** 2, 0.0)
        columns = {
            "action": played["action"], "log_prob": log_prob, "advantage": (advantage - mean) / (deviation + 1e-8), "target": target,
            "value": output, "is_alive": is_alive, "agent": torch.arange(self.env.agents, device=values.device),
            "is_first": played["is_first"],
        }  # fmt: skip
        return columns | dict(zip(COLLECTION_METRICS, (*recent, explained), strict=True))

    def _evaluate(self, model: Agent, played: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Returns for all steps the value, the next observation's value, and the log probability of the action.

        At the end of a truncated episode, the next observation is the one before the reset.
        """

        def value(observation: Tensor) -> Tensor:
            return at_least_fp32(model.value(observation))

        shape = played["reward"].shape
        values = played["value"] if "value" in played else value(at_least_fp32(played["observation"].flatten(0, 2))).view(shape)
        last = value(self._observe(self._env_state(self._state), self._state["memory"])).view(values[:, :1].shape)
        if self._truncated_observation is not None:
            truncated_value = value(self._truncated_observation.flatten(0, 1)).view(values[:, :1].shape)
        elif "truncated_value" in played:
            truncated_value = played["truncated_value"]
        else:
            truncated_value = value(played["truncated_observation"].flatten(0, 2)).view(values.shape)
        next_values = torch.where(played["done"], truncated_value, torch.cat((values[:, 1:], last), 1))
        return values, next_values, log_probability(played["logits"], played["action"])

    def _after_truncation(self, model: Agent, env_state: State, memory: Tensor, truncated: Tensor) -> dict[str, Tensor]:
        """Returns the last observations of truncated episodes, or their values.

        On a GPU, checking whether any episode was truncated would make the host wait; there, the values are computed later for all steps.
        """
        if self.env.limit is None or (truncated.device.type == "cpu" and not _any(truncated)):
            return {"truncated_value": torch.zeros(truncated.shape, device=truncated.device)}
        observation = self._observe(env_state, memory)
        if truncated.device.type == "cpu":
            return {"truncated_value": at_least_fp32(model.value(observation)).view(truncated.shape)}
        observation = observation.unflatten(0, truncated.shape)
        if not self.truncates_once:
            return {"truncated_observation": observation}
        earlier = torch.zeros_like(observation) if self._truncated_observation is None else self._truncated_observation
        condition = truncated.view(*truncated.shape, *(1,) * (observation.dim() - 2))
        self._truncated_observation = torch.where(condition, observation, earlier)
        return {}

    # --- scales of rewards and values ---

    def _reward_scale(self, played: dict[str, Tensor], total: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns the standard deviation of discounted sums of rewards, over all collections so far and all processes."""
        is_alive, sums = played["is_alive"].float(), played["discounted"] * played["is_alive"]
        new = total(torch.stack((is_alive.sum(), sums.sum(), sums.square().sum())))
        all_so_far = self._state["spread"][0] + new
        self._state["spread"] = all_so_far.expand(len(sums), 3).clone()
        _, deviation = mean_and_deviation(*all_so_far)
        return deviation.clamp(min=1e-4)

    def _unscaled_values(self, output: Tensor) -> Tensor:
        """Returns the critic's output in the scale of returns."""
        if not self.scale_values:
            return output
        mean, deviation = self._target_statistics()
        return output * deviation + mean

    def _scaled_targets(self, target: Tensor, new: Tensor) -> Tensor:
        """Returns the targets in the critic's scale. First adds `new`, this collection's count and sums, to the statistics."""
        self._state["targets"] = (self._state["targets"][0] + new).expand(len(target), 3).clone()
        mean, deviation = self._target_statistics()
        return (target - mean) / deviation

    def _target_statistics(self) -> tuple[Tensor, Tensor]:
        """Returns the mean and deviation of all targets so far; 0 and 1 before the first collection."""
        count, total, squares = self._state["targets"][0]
        mean, deviation = mean_and_deviation(count.clamp(min=1), total, squares)
        return mean, torch.where(count > 0, deviation.clamp(min=1e-4), 1.0)

    # --- environments ---

    def _done(self, terminated: Tensor, length: Tensor, env_state: State) -> Tensor:
        """Returns whether each episode is done after this step: all agents have terminated, or the episode is truncated."""
        return terminated.all(1) if self.env.limit is None else terminated.all(1) | (length >= self.env.limit)

    def _reset(self, done: Tensor, env_state: State, rand: Tensor) -> State:
        """Begins new episodes where one is done."""
        return select_rows(done, self.env.reset(rand), env_state)

    def _env_state(self, state: State) -> State:
        return {k.removeprefix("env."): v for k, v in state.items() if k.startswith("env.")}

    def _observe(self, env_state: State, memory: Tensor) -> Tensor:
        """Returns a row for each agent: its observation, and its memory."""
        return with_memory(self.env.observe(env_state).reshape(-1, *self.env.shape), memory.flatten(0, 1))

    def _stored(self, observation: Tensor) -> Tensor:
        """Returns observations as a collection stores them: as bytes if they are only zeros and ones."""
        return observation.to(torch.uint8) if self.env.bits and not self.memory else observation

    def _samples(self, column: Tensor) -> Tensor:
        """Turns [environments, steps, agents, ...] into samples: single steps, or chunks of steps."""
        if not self.memory:
            return column.flatten(0, 2)
        chunks: Tensor = column.unflatten(1, (-1, self.chunk))
        return chunks.transpose(2, 3).flatten(0, 2)

    # --- faults ---

    def check(self, state: State) -> None:
        """Raises Problem if the environment's first steps return wrong types, shapes or values."""
        check_first_steps(self.env, self._env_state(state))

    def record(self, played: dict[str, Tensor]) -> None:
        """Stores in the state the step at which an environment first returned a value that is not finite, without waiting for the device.

        `played` holds the columns of all steps of a collection: [environments, steps, agents, ...]. A derived class may store more.
        """
        state, observation = self._state, played["observation"]
        if self.memory:  # the memory comes from the model, not from the environment
            observation = observation[..., : observation.shape[-1] - self.memory]
        state["fault"] = first_fault(state["fault"], state["collections"], played["reward"], observation)

    def fault(self) -> str:
        return fault_text(self.env, self._state["fault"], self.horizon) if "fault" in self._state else ""


def _collection_sums(is_alive: Tensor, advantage: Tensor, target: Tensor, played: dict[str, Tensor]) -> Tensor:
    """Returns the sums from which all ranks compute the statistics of advantages, targets and finished episodes."""
    terms = (is_alive, advantage * is_alive, advantage * advantage * is_alive, target * is_alive, target * target * is_alive)
    return torch.stack([t.sum() for t in (*terms, played["finished"], played["return"], played["length"])])
