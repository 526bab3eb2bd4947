"""Playing: from a policy and a world to samples with advantages, each agent's its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from drivetrain.data import EpochStepper, Rand, Source, StepperContext, Tensors
from drivetrain.outcomes import Problem
from drivetrain.tasks.rl.chance import chance
from drivetrain.tasks.rl.checks import check_first_steps, check_reset, fault_text, first_fault
from drivetrain.tasks.rl.envs import Env, State, merged
from drivetrain.tasks.rl.nets import Agent, Rivals

FIGURES = ("return", "length", "explained_variance")  # of the last collection that finished an episode
FACTS = ("action", "logp", "advantage", "target", "value", "alive", "who", "anew", *FIGURES)  # of a sample, beside what was seen


def facts_of(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """A batch's facts by name. They lie in one tensor, so that one look finds all of a sample's."""
    facts = dict(zip(FACTS, batch["facts"].flatten(0, -2).unbind(-1), strict=True))
    return facts | {"action": facts["action"].long(), "who": facts["who"].long()}


def choose(logits: Tensor, draw: Tensor) -> Tensor:
    """An action with the policy's probabilities, from a uniform number."""
    action, reached = torch.zeros_like(draw, dtype=torch.int64), torch.zeros_like(draw)
    for probability in logits.softmax(-1).unbind(-1)[:-1]:  # a GPU's cumsum need not repeat to the last bit
        reached = reached + probability
        action = action + (reached <= draw).long()
    return action


def full(x: Tensor) -> Tensor:
    """With all digits, whatever it was computed or kept in."""
    return x.float() if x.element_size() < 4 else x


def log_probability(logits: Tensor, action: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, action[..., None])[..., 0]


def with_memory(seen: Tensor, memory: Tensor) -> Tensor:
    """Rows as agents with a memory expect them."""
    return torch.cat((seen.flatten(1), memory), 1) if memory.shape[1] else seen


def _any(flags: Tensor) -> bool:
    """Whether any is true; where several trials are played as one program (vmap), of all of them."""
    while torch._C._functorch.is_batchedtensor(flags):
        flags = torch._C._functorch.get_unwrapped(flags)
    return bool(flags.any())


def advantages(reward: Tensor, value: Tensor, after: Tensor, ended: Tensor, over: Tensor, gamma: float, decay: float) -> Tensor:
    """Generalised advantages over time, the second dimension: `after` is what comes next's worth, nothing where an agent
    has ended; where the episode is over, what the next one brings does not count."""
    surprise = reward + gamma * torch.where(ended, 0.0, after) - value
    carried = gamma * decay * (~(ended | over)).to(value.dtype)
    rows, total = [], torch.zeros_like(value[:, 0])
    for step in reversed(range(value.shape[1])):
        total = surprise[:, step] + carried[:, step] * total
        rows.append(total)
    return torch.stack(rows[::-1], 1)


def _sums(alive: Tensor, gain: Tensor, target: Tensor, record: dict[str, Tensor]) -> Tensor:
    """What statistics over all ranks need: of advantages, targets and finished episodes."""
    finished = record["finished"]
    figures = (alive, gain * alive, gain * gain * alive, target * alive, target * target * alive)
    return torch.stack([t.sum() for t in (*figures, finished, record["return"], record["length"])])


def _spread(count: Tensor, total: Tensor, squares: Tensor) -> tuple[Tensor, Tensor]:
    mean = total / count
    return mean, (squares / count - mean * mean).clamp(min=0).sqrt()


class Rollout(Source):
    """Environments that are played on from collection to collection. A group is an environment."""

    pure = True
    make_stepper: Callable[[Rollout, Any, StepperContext], EpochStepper | None] | None = None
    """Makes the task's own stepper, where it has one."""

    def __init__(
        self,
        env: Env,
        envs: int,
        horizon: int,
        passes: int,
        gamma: float,
        decay: float,
        scaled: bool = False,
        rival: int = 0,
        chunk: int = 1,
        memory: int = 0,
        scaled_values: bool = False,
    ) -> None:
        """`scaled` divides rewards by the spread of what they add up to, so that values are of the size of one; `scaled_values` has
        the critic learn targets of mean 0 and spread 1. After `rival` collections the policy becomes its own rival. With a `memory`,
        samples are `chunk` steps in a row."""
        self.rival, self.chunk, self.memory = rival, chunk, memory
        self.env, self.groups, self.horizon, self.passes, self.gamma, self.decay = env, envs, horizon, passes, gamma, decay
        self.scaled, self.scaled_values = scaled, scaled_values
        seen = torch.Size(env.shape).numel() * (1 if env.bits and not memory else 4) + 4 * memory
        # Each step's observation and figures are held as they were played, and as the samples they become.
        self.group_bytes = 2 * horizon * env.agents * (seen + 4 * len(FACTS))
        self._state: State = {}
        self._cut: Tensor | None = None
        """On a GPU: what the episode of each environment that was cut off in this collection would have gone on from."""

    @property
    def cut_once(self) -> bool:
        """Whether an environment's episodes are cut off at most once in a collection."""
        return self.env.limit is None or self.horizon <= self.env.limit

    @property
    def speeds(self) -> dict[str, float]:
        """Steps of environments, in each of which all agents move."""
        return {"env_steps": self.chunk / (self.passes * self.env.agents)}

    def __len__(self) -> int:
        return self.groups * self.horizon * self.env.agents // self.chunk

    def stepper(self, model: Any, context: StepperContext) -> EpochStepper | None:
        return None if self.make_stepper is None else self.make_stepper(self, model, context)

    def state(self) -> dict[str, Tensor]:
        return self._state

    def load(self, state: dict[str, Tensor]) -> None:
        if state:  # checkpoints of earlier versions have no faults noted
            state.setdefault("fault", torch.zeros_like(state["collections"]))
        self._state = state

    def collect(self, model: Any, rand: Rand, total: Callable[[Tensor], Tensor]) -> Tensors:
        env, rows, agents = self.env, len(rand), self.env.agents
        draws = rand.uniform(self.horizon * (agents + 2 * env.chances)).view(rows, self.horizon, -1)
        if not self._state:
            self._state = self.begin(rand.uniform(max(1, env.chances)))
            self.check(self._state)
        if isinstance(model, Rivals):
            model.keep(self._state["collections"][0] == self.rival)
        self._state["collections"] = self._state["collections"] + 1
        self._cut = None
        steps = [self._step(model, draws[:, t]) for t in range(self.horizon)]
        record = {name: torch.stack([step[name] for step in steps], 1) for name in steps[0]}
        self._note_fault(record)
        said, after, logp = self._judge(model, record)
        values, after = self._worth(said), self._worth(after)
        reward = record["reward"] / self._scale(record, total) if self.scaled else record["reward"]
        gain = advantages(reward, values, after, record["ended"], record["over"], self.gamma, self.decay)
        alive, target = record["alive"].float(), gain + values
        sums = total(_sums(alive, gain, target, record))
        if self.scaled_values:
            target = self._standard(target, torch.stack((sums[0], *sums[3:5])))
        mean, spread = _spread(sums[0], sums[1], sums[2])
        _, wide = _spread(sums[0], sums[3], sums[4])
        recent = torch.where(sums[5] > 0, sums[6:8] / sums[5].clamp(min=1), self._state["recent"][0])
        self._state["recent"] = recent.expand(rows, 2).clone()
        explained = torch.where(wide > 1e-4, 1 - (spread / wide.clamp(min=1e-4)) ** 2, 0.0)  # nothing to explain: nothing explained
        known = {
            "action": record["action"], "logp": logp, "advantage": (gain - mean) / (spread + 1e-8), "target": target,
            "value": said, "alive": alive, "who": torch.arange(agents, device=values.device), "anew": record["anew"],
        }  # fmt: skip
        known |= dict(zip(FIGURES, (*recent, explained), strict=True))
        facts = torch.stack([known[name].to(values.dtype).expand_as(values) for name in FACTS], -1)
        return Tensors(seen=self._samples(record["seen"]), facts=self._samples(facts))

    def _note_fault(self, record: dict[str, Tensor]) -> None:
        """Remembers, without waiting for the device, where the world first gave what is not a number."""
        kept, seen = self._state, record["seen"]
        if self.memory:  # behind what was seen stands what the model remembers, which is its own
            seen = seen[..., : seen.shape[-1] - self.memory]
        kept["fault"] = first_fault(kept["fault"], kept["collections"], record["reward"], seen)

    def _samples(self, column: Tensor) -> Tensor:
        """From [environments, steps, agents, ...] to samples: single steps, or chunks of them."""
        if not self.memory:
            return column.flatten(0, 2)
        chunks: Tensor = column.unflatten(1, (-1, self.chunk))
        return chunks.transpose(2, 3).flatten(0, 2)

    def begin(self, rand: Tensor) -> State:
        """The state before the first collection; rows of `rand` are environments."""
        agents = self.env.agents
        made = self.env.reset(rand)
        check_reset(self.env, made, len(rand))
        world = {f"env.{k}": v for k, v in made.items()}
        nothing = rand.new_zeros(len(rand), agents)
        targets = {"targets": nothing.new_zeros(len(rand), 3)} if self.scaled_values else {}
        return world | targets | {
            "steps": nothing[:, 0].long(), "return": nothing, "ended": nothing > 0, "recent": nothing.new_zeros(len(rand), 2),
            "discounted": nothing, "spread": nothing.new_zeros(len(rand), 3), "collections": nothing[:, 0].long(),
            "memory": nothing.new_zeros(len(rand), agents, self.memory), "fault": nothing[:, 0].long(),
        }  # fmt: skip

    def _step(self, model: Agent, draws: Tensor) -> dict[str, Tensor]:
        """Play one step everywhere; what is over begins anew."""
        env, agents = self.env, self.env.agents
        kept, world = self._state, self._world(self._state)
        seen = self._seen(world, kept["memory"])
        known = {}
        if model.together:
            said, worth = model(seen)
            known["value"] = full(worth).view(len(draws), agents)
        else:
            said = model.policy(seen)
        logits = full(said).view(len(draws), agents, -1)
        action = choose(logits, draws[:, :agents])
        chances, anew = draws[:, agents:].split(env.chances, 1) if env.chances else (draws[:, :0], draws[:, :0])
        world, reward, ended = env.step(world, action if agents > 1 else action[:, 0], chances)
        reward, ended, alive = reward.float().view(-1, agents), ended.view(-1, agents), ~kept["ended"]
        count, sums, discounted = kept["steps"] + 1, kept["return"] + reward * alive, kept["discounted"] * self.gamma + reward * alive
        over = self._over(ended, count, world)
        finished = over[:, None].expand_as(ended).float()
        cut = over[:, None] & ~ended
        memory = model.remember(seen).view_as(kept["memory"]) if self.memory else kept["memory"]
        self._state = kept | {f"env.{k}": v for k, v in self._anew(over, world, anew).items()} | {
            "steps": torch.where(over, 0, count), "return": sums * (1 - finished), "ended": ended & ~over[:, None],
            "discounted": discounted * (1 - finished), "memory": memory * (1 - finished[..., None]),
        }  # fmt: skip
        return {
            "seen": self._kept(seen).unflatten(0, (-1, agents)), "anew": (kept["steps"] == 0).float()[:, None].expand_as(finished), "action": action, "logits": logits, "reward": reward * alive, "ended": ended,
            "alive": alive, "over": over[:, None].expand_as(ended), "finished": finished, **self._beyond(model, world, memory, cut),
            "return": sums * finished, "length": count.float()[:, None] * finished, "discounted": discounted, **known,
        }  # fmt: skip

    def _kept(self, seen: Tensor) -> Tensor:
        """A collection holds what was seen at every step: zeros and ones in a byte each."""
        return seen.to(torch.uint8) if self.env.bits and not self.memory else seen

    def _over(self, ended: Tensor, count: Tensor, world: State) -> Tensor:
        """Which episodes are over after this step: all agents have ended, or it is cut off."""
        return ended.all(1) if self.env.limit is None else ended.all(1) | (count >= self.env.limit)

    def _anew(self, over: Tensor, world: State, rand: Tensor) -> State:
        """New episodes where one is over."""
        return merged(over, self.env.reset(rand), world)

    def _scale(self, record: dict[str, Tensor], total: Callable[[Tensor], Tensor]) -> Tensor:
        """The standard deviation of discounted sums of rewards, over all collections so far and all processes."""
        alive, sums = record["alive"].float(), record["discounted"] * record["alive"]
        new = total(torch.stack((alive.sum(), sums.sum(), sums.square().sum())))
        all_so_far = self._state["spread"][0] + new
        self._state["spread"] = all_so_far.expand(len(sums), 3).clone()
        _, spread = _spread(*all_so_far)
        return spread.clamp(min=1e-4)

    def _worth(self, said: Tensor) -> Tensor:
        """What the critic says, in the scale of returns: it learns targets of mean 0 and spread 1, over all collections so far."""
        if not self.scaled_values:
            return said
        mean, spread = self._of_targets()
        return said * spread + mean

    def _standard(self, target: Tensor, new: Tensor) -> Tensor:
        """Targets as the critic learns them, those of this collection, whose count and sums are `new`, among them."""
        self._state["targets"] = (self._state["targets"][0] + new).expand(len(target), 3).clone()
        mean, spread = self._of_targets()
        return (target - mean) / spread

    def _of_targets(self) -> tuple[Tensor, Tensor]:
        """Mean and spread so far; before the first collection, of a critic that is taken at its word."""
        count, total, squares = self._state["targets"][0]
        mean, spread = _spread(count.clamp(min=1), total, squares)
        return mean, torch.where(count > 0, spread.clamp(min=1e-4), 1.0)

    def _world(self, state: State) -> State:
        return {k.removeprefix("env."): v for k, v in state.items() if k.startswith("env.")}

    def _seen(self, world: State, memory: Tensor) -> Tensor:
        """Rows of what each agent sees, and remembers."""
        return with_memory(self.env.observe(world).reshape(-1, *self.env.shape), memory.flatten(0, 1))

    def _beyond(self, model: Agent, world: State, memory: Tensor, cut: Tensor) -> dict[str, Tensor]:
        """What episodes that were cut off would have gone on from, or its worth. A GPU would have to wait to know whether any
        was; it judges all steps at once, later."""
        if self.env.limit is None or (cut.device.type == "cpu" and not _any(cut)):
            return {"worth": torch.zeros(cut.shape, device=cut.device)}
        seen = self._seen(world, memory)
        if cut.device.type == "cpu":
            return {"worth": full(model.value(seen)).view(cut.shape)}
        seen = seen.unflatten(0, cut.shape)
        if not self.cut_once:
            return {"beyond": seen}
        kept = torch.zeros_like(seen) if self._cut is None else self._cut
        self._cut = torch.where(cut.view(*cut.shape, *(1,) * (seen.dim() - 2)), seen, kept)
        return {}

    def _judge(self, model: Agent, record: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """What each step's observation is worth, what comes after it (the next one, or where an episode was cut off the one it
        would have gone on from), and the logarithm of the action's probability: for all steps at once."""

        def value(seen: Tensor) -> Tensor:
            return full(model.value(seen))

        values = record["value"] if "value" in record else value(full(record["seen"].flatten(0, 2))).view(record["reward"].shape)
        last = value(self._seen(self._world(self._state), self._state["memory"])).view(values[:, :1].shape)
        if self._cut is not None:
            worth = value(self._cut.flatten(0, 1)).view(values[:, :1].shape)
        else:
            worth = record["worth"] if "worth" in record else value(record["beyond"].flatten(0, 2)).view(values.shape)
        after = torch.where(record["over"], worth, torch.cat((values[:, 1:], last), 1))
        return values, after, log_probability(record["logits"], record["action"])

    def check(self, state: State) -> None:
        """Refuses a world that gives what cannot be learned from."""
        check_first_steps(self.env, self._world(state))

    def fault(self) -> str:
        return fault_text(self.env, self._state["fault"], self.horizon) if "fault" in self._state else ""


def duel(env: Env, model: Rivals, episodes: Tensor, greedy: bool) -> Tensor:
    """The share of won episodes against the rival: half of the agents are its, changing seats from episode to episode. The
    side that gained more has won."""
    seat = torch.arange(env.agents, device=episodes.device) + episodes[:, None]
    mine = seat % 2 == 0
    gained = _played(env, (model.agent, model.rival), mine, episodes, greedy)["return"]
    ahead = (gained * mine).sum(1) - (gained * ~mine).sum(1)
    return (1 + ahead.sign()) / 2


def play(env: Env, model: Agent, episodes: Tensor, greedy: bool) -> dict[str, Tensor]:
    """Figures of whole episodes, one a row: their chance follows from their numbers alone."""
    everyone = torch.ones(len(episodes), env.agents, dtype=torch.bool, device=episodes.device)
    return {k: v.mean(1) for k, v in _played(env, (model, model), everyone, episodes, greedy).items()}


def _played(env: Env, sides: tuple[Agent, Agent], first: Tensor, episodes: Tensor, greedy: bool) -> dict[str, Tensor]:
    """Figures by agent of whole episodes, in which the `first` are the first side's."""
    if env.limit is None:
        raise Problem(f"{type(env).__name__} has no limit: episodes that are judged need one")
    world = env.reset(chance(episodes, 0, env.chances))
    rows, agents = len(episodes), env.agents
    ended = torch.zeros(rows, agents, dtype=torch.bool, device=episodes.device)
    sums, length = torch.zeros(rows, agents, device=episodes.device), torch.zeros(rows, agents, device=episodes.device)
    kept = [torch.zeros(rows * agents, side.memory, device=episodes.device) for side in sides]
    for step in range(1, env.limit + 1):
        seen = env.observe(world).reshape(-1, *env.shape)
        own = [with_memory(seen, memory) for memory in kept]
        logits = full(sides[0].policy(own[0])).view(rows, agents, -1)
        if sides[0] is not sides[1]:
            logits = torch.where(first[..., None], logits, full(sides[1].policy(own[1])).view(rows, agents, -1))
        if sides[0].memory:
            kept = [side.remember(mine) for side, mine in zip(sides, own, strict=True)]
        draws = chance(episodes, step, env.chances + agents)
        action = logits.argmax(-1) if greedy else choose(logits, draws[:, env.chances :])
        after, reward, now = env.step(world, action if agents > 1 else action[:, 0], draws[:, : env.chances])
        over = ended.all(1)
        world = merged(over, world, after)
        sums += reward.view(-1, agents) * ~ended
        length += (~ended).float()
        ended = ended | now.view(-1, agents)
        if episodes.device.type == "cpu" and bool(ended.all()):
            break
    return {"return": sums, "length": length} | {k: v.view(rows, -1) for k, v in env.figures(world).items()}
