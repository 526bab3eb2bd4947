"""All steps of a collection by a few kernels: what `Ppo.loss`, autograd, clipping and Adam do, for two small perceptrons."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor

from drivetrain.data import StepperContext
from drivetrain.tasks.rl.checks import first_fault
from drivetrain.tasks.rl.envs import Env, merged
from drivetrain.tasks.rl.envs.bandit import Bandit
from drivetrain.tasks.rl.envs.cartpole import CartPole
from drivetrain.tasks.rl.fused.device import Program, Unavailable
from drivetrain.tasks.rl.nets import Agent, MlpAgent, Rivals
from drivetrain.tasks.rl.ppo import Ppo
from drivetrain.tasks.rl.rollout import Rollout, full

WORLDS: dict[type[Env], tuple[str, str]] = {Bandit: ("bandit.cu", "env.side"), CartPole: ("cartpole.cu", "env.motion")}
"""Rules, and the state that they keep."""
WIDTHS, LAYERS, MOST_INPUTS, MOST_ACTIONS, MOST_STEPS = range(32, 129, 16), (1, 2, 3), 64, 64, 256
TILE, WARPS, PARTS, STATS, SUMS = 64, 4, 8, 12, 8
TURNS = 64  # epochs whose keys are handed over at once
MEAN, ACTOR_UNIT, RECENT = 4, 6, 8  # places among a collection's figures


def obstacle(task: Any, source: Rollout, agent: Agent, optimizer: torch.optim.Optimizer) -> str:
    """Why the kernels do not fit, if so."""
    if type(task).loss is not Ppo.loss:
        return f"{type(task).__name__} has a loss of its own"
    if isinstance(agent, Rivals):
        return "they learn one policy, and another is kept to play against (rival=0 does without)"
    if type(agent) is not MlpAgent or agent.width not in WIDTHS or agent.layers not in LAYERS:
        return f"they are for net=mlp with 1 to 3 layers of {WIDTHS[0]}, {WIDTHS[1]}, ... {WIDTHS[-1]}"
    if agent.inputs > MOST_INPUTS or agent.actions > MOST_ACTIONS or len(source) // source.groups > MOST_STEPS:
        return f"they are for at most {MOST_INPUTS} numbers seen, {MOST_ACTIONS} actions and {MOST_STEPS} samples of one environment"
    if task.kl_stop:
        return "they know no kl_stop"
    kinds = (torch.optim.Adam, torch.optim.AdamW)
    groups = optimizer.param_groups
    if len(groups) != 1 or len(groups[0]["params"]) != len(list(agent.parameters())):
        return "they learn all parameters, with one rate"
    plain = type(optimizer) in kinds and not groups[0]["amsgrad"] and not groups[0]["maximize"]
    if not plain or (type(optimizer) is torch.optim.Adam and groups[0]["weight_decay"]):
        return "they know Adam and AdamW alone"
    return ""


class FusedStepper:
    """Takes an epoch's steps on the device; parameters, moments and the worlds' state stay the tensors that everybody knows."""

    def __init__(self, task: Any, source: Rollout, agent: MlpAgent, context: StepperContext) -> None:
        self.task, self.source, self.context, self.device = task, source, context, context.device
        env, group = source.env, context.optimizer.param_groups[0]
        rules, self._state_name = WORLDS.get(type(env), ("", ""))
        self.collects = type(source) is Rollout and not source.memory and env.agents == 1 and not source.scaled_values
        """Whether it collects, too: a built-in world in one kernel, any other step by step."""
        small = agent.width * (agent.layers - 1) <= 64
        constants = {"INPUTS": agent.inputs, "WIDTH": agent.width, "ACTIONS": agent.actions, "LAYERS": agent.layers,
                     "RELU": int(agent.activation == "relu"), "RESIDENT": 3 if small else 1}  # fmt: skip
        here = files("drivetrain.tasks.rl.fused")
        names = ["ppo.cu", rules, "play.cu"] if rules else ["ppo.cu", "play.cu"]
        self.program = Program("\n".join(here.joinpath(name).read_text() for name in names), constants, context.device)
        self._rooms = self.program.integers("rooms", 4)
        processors = torch.cuda.get_device_properties(context.device).multi_processor_count
        self.envs, self.horizon, self.count = source.groups, source.horizon, len(source)
        self.batch = task.global_batch
        learners = self.program.resident("learn", 32 * WARPS, self._rooms[0]) * processors // 2
        tiles = -(-self.batch // TILE)
        self.blocks = -(-tiles // -(-tiles // max(1, learners)))  # as few as take no longer
        self._processors = processors
        self.steps = self.count // self.batch * source.passes
        self._adam = (*group["betas"], group["eps"], group["weight_decay"])
        self._flatten([*agent.actor.parameters(), *agent.critic.parameters()])
        self._make_room(agent)
        self._replay: Callable[[], None] | None = None
        self._turns, self._waits = 0, ""
        self._given: tuple[Tensor, ...] = ()

    def _flatten(self, parameters: list[torch.nn.Parameter]) -> None:
        """Parameters and their moments become views of one tensor each."""
        sizes, state = [p.numel() for p in parameters], self.context.optimizer.state
        self.parameters, self.mean, self.square = (torch.zeros(sum(sizes), device=self.device) for _ in range(3))
        self.counts = torch.zeros(len(parameters), device=self.device)
        places = [flat.split(sizes) for flat in (self.parameters, self.mean, self.square)]
        for i, (p, place, mean, square) in enumerate(zip(parameters, *places, strict=True)):
            place.copy_(p.detach().reshape(-1))
            p.data = place.view(p.shape)
            known = state[p]
            if known:
                mean.copy_(known["exp_avg"].reshape(-1))
                square.copy_(known["exp_avg_sq"].reshape(-1))
                self.counts[i].copy_(known["step"])
            known.update(step=self.counts[i], exp_avg=mean.view(p.shape), exp_avg_sq=square.view(p.shape))

    def _make_room(self, agent: MlpAgent) -> None:
        def floats(*shape: int) -> Tensor:
            return torch.zeros(shape, device=self.device)

        size, passes = len(self.parameters), self.source.passes
        self.partial, self.sums = floats(self.blocks, size + SUMS), floats(size + SUMS)
        self.many = -(-(size + SUMS) // 32)
        self.squares, self.stats = floats(self.many), floats(STATS)
        self.rows = torch.zeros(passes, self.count, dtype=torch.int32, device=self.device)
        self.weights = torch.zeros(2, self._rooms[3], dtype=torch.uint8, device=self.device)
        """What products read, made of the parameters."""
        self.step = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.streams, self.table = (torch.zeros(*n, 1 + passes, dtype=torch.int64, device=self.device) for n in ((), (TURNS,)))
        self.turn = torch.zeros(1, dtype=torch.int32, device=self.device)
        self.corrections = floats(2)
        self._next = -1
        self.state: dict[str, Tensor] = {}
        if self.collects:
            self.seen, self.facts, self.beyond = floats(self.count, agent.inputs), floats(self.count, 8), floats(self.count, agent.inputs)
            self.last, self.reward, self.values, self.worth = (floats(n) for n in (self.envs * agent.inputs, *[self.count] * 3))
            self.worth_last = floats(self.envs)
            self.marks = torch.zeros(self.count, dtype=torch.uint8, device=self.device)
            warps = -(-self.envs // 16)
            self.each = 1 if warps <= 4 * self._processors else WARPS  # warps a block: few environments spread over all processors
            self.play_blocks, self.judge_blocks = -(-warps // self.each), -(-self.envs // 128)
            self.parts = floats(max(self.play_blocks, self.judge_blocks), PARTS)
            self.actions = torch.zeros(self.envs, dtype=torch.int64, device=self.device)
            self.over = torch.zeros(self.envs, dtype=torch.bool, device=self.device)
            self.draws = floats(0 if self._state_name else self.horizon, self.envs, 2 * self.source.env.chances)

    # --- an epoch ---

    def __call__(self, epoch: int, first_step: int, samples: dict[str, Tensor] | None = None) -> None:
        """Learn from a collection: the given one, or one that is played here."""
        if epoch != self._next:
            self.step.fill_(first_step)
            self.turn.fill_(epoch % TURNS)
        if epoch != self._next or epoch % TURNS == 0:
            first = epoch - epoch % TURNS
            self.table.copy_(torch.tensor([self.context.random_keys(e) for e in range(first, first + TURNS)]), non_blocking=True)
        self._next = epoch + 1
        if self.collects:
            self._adopt()
        else:
            assert samples is not None
            given = samples["seen"], samples["facts"]
            if any(a is not b for a, b in zip(given, self._given, strict=False)):
                self._replay, self._turns = None, 0
            self._given = given
        self._turns += 1
        if self._turns == 2:  # the first turns are launched one by one
            with self.context.host_waits() as waits:
                self._work()
            self._waits = waits[0] if waits else ""
            if waits:
                self.context.notice(f"collections are not captured: {self._waits}")
        elif self._turns < 2 or self._waits:
            self._work()
        if self._turns <= 2 or self._waits:
            return
        if self._replay is None:
            self._replay = self.context.record(self._work)
        self._replay()

    def _adopt(self) -> None:
        """The worlds' state, always at the same place."""
        now = self.source.state()
        if not self.state:
            self.state = {k: v.clone() for k, v in now.items()}
        elif any(now[k] is not v for k, v in self.state.items()):
            for name, kept in self.state.items():
                kept.copy_(now[name])
        self.source.load(self.state)

    def _work(self) -> None:
        launch, task = self.program.launch, self.task
        launch(
            "prepare",
            (-(-len(self.parameters) // 256),),
            256,
            self.parameters,
            self.weights,
            self.table,
            self.streams,
            self.turn,
            len(self.streams),
        )
        if self.collects:
            self._collect()
            seen, facts = self.seen, self.facts
        else:
            seen, facts = self._given
            seen = full(seen).reshape(len(seen), -1)
            off = (facts[:, 3] - facts[:, 4]).square().mean().sqrt().clamp(min=1e-20)
            self.stats[MEAN].fill_(0.0)
            self.stats[MEAN + 1].fill_(1.0)
            self.stats[ACTOR_UNIT].fill_(1 / 32)
            self.stats[ACTOR_UNIT + 1].copy_(off / 32)
            self.stats[RECENT : RECENT + 3].copy_(facts[0, 8:11])
            self.stats[RECENT + 3].fill_(0.5 * self.task.value_weight)
        each, take = self.count // self.batch, self.batch // self.envs
        blocks = -(-self.envs // WARPS)
        launch("shuffle", (blocks, self.source.passes), 32 * WARPS, self.rows, self.streams[1:], self.envs, self.count // self.envs, take)
        for number in range(self.steps):
            rows = self.rows.view(-1, self.batch)[number]
            launch(
                "learn", (self.blocks, 2), 32 * WARPS, seen, facts, self.stats[MEAN:], self.weights, rows, self.partial, self.batch, facts.stride(0),
                float(task.ratio_clip), float(task.value_clip), float(task.value_weight), float(task.entropy_weight), shared=self._rooms[0],
            )  # fmt: skip
            launch(
                "add_up", (self.many,), 512, self.partial, self.counts, self.sums, self.squares, self.corrections, self.blocks, number,
                *(float(x) for x in self._adam[:2]),
            )  # fmt: skip
            ring = self.context.metric_ring
            launch(
                "update", (-(-len(self.parameters) // 256),), 256, self.parameters, self.mean, self.square, ring, self.weights, self.sums,
                self.squares, self.corrections, self.context.learning_rates, self.stats[RECENT:], self.step, number, self.many, ring.shape[1], self.context.first_metric, len(ring),
                *(float(x) for x in self._adam), float(task.clip),
            )  # fmt: skip
        assert self.steps == each * self.source.passes
        launch("advance", (1,), 32, self.step, self.counts, self.turn, len(self.counts), self.steps, TURNS)

    def _play(self) -> int:
        """All steps of a built-in world; gives the blocks that left sums."""
        state = self.state
        self.program.launch(
            "play", (self.play_blocks,), 32 * self.each, state[self._state_name], state["steps"], state["return"], state["discounted"],
            self.seen, self.facts, self.beyond, self.last, self.reward, self.parts, self.marks, self.weights, self.streams,
            self.envs, self.horizon, float(self.source.gamma), shared=self._rooms[2],
        )  # fmt: skip
        return self.play_blocks

    def _play_tensors(self) -> int:
        """The same for a world of tensor functions: its own operations, and two kernels a step for all others."""
        launch, env, state = self.program.launch, self.source.env, self.state
        world = {k.removeprefix("env."): v for k, v in state.items() if k.startswith("env.")}
        if env.chances:
            launch("draw", (-(-self.draws.numel() // 256),), 256, self.draws, self.streams, self.envs, self.horizon, env.chances)
        for step in range(self.horizon):
            now = env.observe(world).float().reshape(self.envs, -1).contiguous()
            launch(
                "act", (self.play_blocks,), 32 * self.each, now, self.seen, self.facts, self.actions, self.weights, self.streams,
                self.envs, self.horizon, step, 1 + 2 * env.chances, shared=self._rooms[2],
            )  # fmt: skip
            chances, anew = self.draws[step].split(env.chances, 1) if env.chances else (self.draws[step],) * 2
            world, reward, ended = env.step(world, self.actions, chances)
            beyond = env.observe(world).float().reshape(self.envs, -1).contiguous() if env.limit else now
            launch(
                "book", (self.judge_blocks,), 128, reward.float().contiguous(), beyond, ended.contiguous(), state["steps"], state["return"],
                state["discounted"], self.reward, self.beyond, self.parts, self.marks, self.over, self.envs, self.horizon, step,
                env.limit or 0, float(self.source.gamma),
            )  # fmt: skip
            world = merged(self.over, env.reset(anew), world)
        self.last.copy_(env.observe(world).reshape(-1))
        for name, value in world.items():
            state[f"env.{name}"].copy_(value)
        return self.judge_blocks

    def _collect(self) -> None:
        launch, source, task, state = self.program.launch, self.source, self.task, self.state
        blocks = self._play() if self._state_name else self._play_tensors()
        launch(
            "after_play", (1,), 32, self.parts, state["spread"], state["recent"], self.stats, blocks, int(source.scaled),
            0.5 * float(task.value_weight),
        )  # fmt: skip
        for seen, values, marks in (
            (self.seen, self.values, None),
            (self.beyond, self.worth, self.marks),
            (self.last, self.worth_last, None),
        ):
            count = len(values)
            blocks = min(-(-count // TILE), 8 * self._processors)
            launch("value", (blocks,), 32 * WARPS, seen, self.weights, values, marks, count, shared=self._rooms[1])
        launch(
            "judge", (self.judge_blocks,), 128, self.reward, self.values, self.worth, self.worth_last, self.stats, self.marks, self.facts,
            self.parts, self.envs, self.horizon, float(source.gamma), float(source.decay),
        )  # fmt: skip
        launch("after_judging", (1,), 256, self.parts, self.stats, self.judge_blocks)
        launch("finish", (-(-self.envs // 256),), 256, self.stats, state["spread"], state["recent"], state["collections"], self.envs)
        if not self._state_name:  # a world of the user's may give what is not a number
            reward, seen = (t.view(self.envs, self.horizon, -1) for t in (self.reward, self.seen))
            state["fault"].copy_(first_fault(state["fault"], state["collections"], reward, seen))


def make(task: Any, source: Any, model: Agent, context: StepperContext) -> FusedStepper | None:
    """The kernels' learner where there can be one; else why not, said once."""
    why = obstacle(task, source, model, context.optimizer)
    if not why:
        try:
            return FusedStepper(task, source, model, context)  # type: ignore[arg-type]
        except Unavailable as error:
            why = str(error)
    context.notice(f"PPO's own kernels are not used: {why}")
    return None
