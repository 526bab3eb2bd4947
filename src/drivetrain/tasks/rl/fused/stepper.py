"""Takes all optimizer steps of a collection with a few kernels: the same as `Ppo.loss`, autograd, clipping and Adam."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor

from drivetrain.data import StepperContext
from drivetrain.tasks.rl.checks import first_fault
from drivetrain.tasks.rl.envs import Env, select_rows
from drivetrain.tasks.rl.envs.bandit import BanditEnv
from drivetrain.tasks.rl.envs.cartpole import CartPoleEnv
from drivetrain.tasks.rl.fused.program import KernelsUnavailable, Program
from drivetrain.tasks.rl.nets import Agent, AgentWithRival, MlpAgent
from drivetrain.tasks.rl.rollout import Rollout
from drivetrain.tasks.rl.samples import COLLECTION_METRICS, COLUMNS, at_least_fp32

KERNEL_ENVS: dict[type[Env], tuple[str, str]] = {BanditEnv: ("bandit.cu", "env.side"), CartPoleEnv: ("cartpole.cu", "env.motion")}
"""Environments whose rules are CUDA code: the file, and the name of the state that it reads and writes."""
WIDTHS, LAYERS, MAX_INPUTS, MAX_ACTIONS, MAX_STEPS = range(32, 129, 16), (1, 2, 3), 64, 64, 256
# As in ppo.cu and play.cu: samples and warps of a block, and the lengths of arrays.
TILE, WARPS, NUM_PARTIAL_SUMS, NUM_STATS, NUM_SUMS = 64, 4, 8, 12, 8
KEY_TABLE_EPOCHS = 64
"""Epochs whose random keys are copied to the device at once."""
MEAN, ACTOR_GRADIENT_SCALE, RECENT = 4, 6, 8
"""Positions in `stats`, as in play.cu: the advantages' mean (then their deviation), the scale of the actor's gradients (then the
critic's), and the metrics of recent episodes."""


def why_unsupported(task: Any, source: Rollout, agent: Agent, optimizer: torch.optim.Optimizer) -> str:
    """Returns why the kernels do not support a training; empty if they do."""
    if "loss" in task.replaced_hooks():
        return f"{type(task).__name__} has a loss of its own"
    reason = _unsupported_agent(source, agent)
    if not reason and task.kl_stop:
        reason = "they do not support kl_stop"
    return reason or _unsupported_optimizer(agent, optimizer)


def _unsupported_agent(source: Rollout, agent: Agent) -> str:
    if isinstance(agent, AgentWithRival):
        return "they train one policy, without an earlier copy as its opponent (rival=0 turns that off)"
    if type(agent) is not MlpAgent or agent.width not in WIDTHS or agent.layers not in LAYERS:
        return f"they need net=mlp with 1 to 3 layers of {WIDTHS[0]}, {WIDTHS[1]}, ... {WIDTHS[-1]}"
    if agent.inputs > MAX_INPUTS or agent.actions > MAX_ACTIONS or len(source) // source.groups > MAX_STEPS:
        return f"they support at most {MAX_INPUTS} numbers observed, {MAX_ACTIONS} actions and {MAX_STEPS} samples of one environment"
    return ""


def _unsupported_optimizer(agent: Agent, optimizer: torch.optim.Optimizer) -> str:
    groups = optimizer.param_groups
    if len(groups) != 1 or len(groups[0]["params"]) != len(list(agent.parameters())):
        return "they train all parameters, with one learning rate"
    is_adam = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) and not groups[0]["amsgrad"] and not groups[0]["maximize"]
    if not is_adam or (type(optimizer) is torch.optim.Adam and groups[0]["weight_decay"]):
        return "they support only Adam and AdamW"
    return ""


class FusedStepper:
    """Takes an epoch's steps with kernels, on the same tensors of parameters, moments and environment states that the engine uses."""

    def __init__(self, task: Any, source: Rollout, agent: MlpAgent, context: StepperContext) -> None:
        self.task, self.source, self.context, self.device = task, source, context, context.device
        env, group = source.env, context.optimizer.param_groups[0]
        rules, self._state_name = KERNEL_ENVS.get(type(env), ("", ""))
        self.collects = type(source) is Rollout and not source.memory and env.agents == 1 and not source.scale_values
        """Whether it also collects: one kernel plays an environment of `KERNEL_ENVS`; any other is played step by step."""
        is_small = agent.width * (agent.layers - 1) <= 64
        constants = {"INPUTS": agent.inputs, "WIDTH": agent.width, "ACTIONS": agent.actions, "LAYERS": agent.layers,
                     "RELU": int(agent.activation == "relu"), "RESIDENT": 3 if is_small else 1}  # fmt: skip
        folder = files("drivetrain.tasks.rl.fused")
        names = ["ppo.cu", rules, "play.cu"] if rules else ["ppo.cu", "play.cu"]
        self.program = Program("\n".join(folder.joinpath(name).read_text() for name in names), constants, context.device)
        self.shared_bytes, self._value_shared_bytes, self._act_shared_bytes, self._weights_bytes = self.program.integers("memory_sizes", 4)
        """Shared memory of a block of `learn`, of `value`, of `act` and `play`; bytes of one network's weights."""
        self._processors = torch.cuda.get_device_properties(context.device).multi_processor_count
        self.envs, self.horizon, self.count = source.groups, source.horizon, len(source)
        self.batch = task.global_batch
        # Half of the blocks that run at the same time compute the actor's gradients, the other half the critic's.
        max_blocks = max(1, self.program.blocks_per_processor("learn", 32 * WARPS, self.shared_bytes) * self._processors // 2)
        tiles = -(-self.batch // TILE)
        tiles_per_block = -(-tiles // max_blocks)
        self.blocks = -(-tiles // tiles_per_block)
        self.steps = self.count // self.batch * source.passes
        self._adam = (*group["betas"], group["eps"], group["weight_decay"])
        self._flatten([*agent.actor.parameters(), *agent.critic.parameters()])
        self._allocate_learning()
        self.state: dict[str, Tensor] = {}
        if self.collects:
            self._allocate_collection(agent)
        self._replay: Callable[[], None] | None = None
        self._num_calls, self.host_wait = 0, ""
        self._next_epoch = -1
        self.samples: tuple[Tensor, ...] = ()

    @property
    def is_captured(self) -> bool:
        """Whether epochs are replayed as a CUDA graph."""
        return self._replay is not None

    def _flatten(self, parameters: list[torch.nn.Parameter]) -> None:
        """Makes the parameters views of one tensor, and likewise their first and their second moments."""
        sizes, state = [p.numel() for p in parameters], self.context.optimizer.state
        self.parameters, self.mean, self.square = (torch.zeros(sum(sizes), device=self.device) for _ in range(3))
        self.counts = torch.zeros(len(parameters), device=self.device)
        views = [flat.split(sizes) for flat in (self.parameters, self.mean, self.square)]
        for i, (p, view, mean, square) in enumerate(zip(parameters, *views, strict=True)):
            view.copy_(p.detach().reshape(-1))
            p.data = view.view(p.shape)
            moments = state[p]
            if moments:
                mean.copy_(moments["exp_avg"].reshape(-1))
                square.copy_(moments["exp_avg_sq"].reshape(-1))
                self.counts[i].copy_(moments["step"])
            moments.update(step=self.counts[i], exp_avg=mean.view(p.shape), exp_avg_sq=square.view(p.shape))

    def _floats(self, *shape: int) -> Tensor:
        return torch.zeros(shape, device=self.device)

    def _allocate_learning(self) -> None:
        size, passes = len(self.parameters), self.source.passes
        self.partial, self.sums = self._floats(self.blocks, size + NUM_SUMS), self._floats(size + NUM_SUMS)
        self.num_reduce_blocks = -(-(size + NUM_SUMS) // 32)
        self.squares, self.stats = self._floats(self.num_reduce_blocks), self._floats(NUM_STATS)
        self.rows = torch.zeros(passes, self.count, dtype=torch.int32, device=self.device)
        self.weights = torch.zeros(2, self._weights_bytes, dtype=torch.uint8, device=self.device)
        """The parameters of both networks, as matrix products read them."""
        self.step = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.random_keys = torch.zeros(1 + passes, dtype=torch.int64, device=self.device)
        """The keys of this epoch's random numbers: of its collection, then of the sample order in each pass."""
        self.key_table = torch.zeros(KEY_TABLE_EPOCHS, 1 + passes, dtype=torch.int64, device=self.device)
        self.key_row = torch.zeros(1, dtype=torch.int32, device=self.device)
        self.corrections = self._floats(2)
        """Adam's bias corrections."""

    def _allocate_collection(self, agent: MlpAgent) -> None:
        """Allocates the buffers of a collection that the kernels play: one row for each of its `count` samples."""
        self.observations = self._floats(self.count, agent.inputs)
        self.columns = self._floats(self.count, COLUMNS.index(COLLECTION_METRICS[0]))
        self.reward = self._floats(self.count)
        self.values = self._floats(self.count)
        self.truncated_observations = self._floats(self.count, agent.inputs)
        self.truncated_values = self._floats(self.count)
        self.last_observations = self._floats(self.envs * agent.inputs)
        """After the last step, of each environment: their values end the advantages."""
        self.last_values = self._floats(self.envs)
        self.end_flags = torch.zeros(self.count, dtype=torch.uint8, device=self.device)
        """For each step: bit 0, the agent has terminated; bit 1, the episode is done."""
        num_warps = -(-self.envs // 16)
        self.warps_per_block = 1 if num_warps <= 4 * self._processors else WARPS  # few environments are spread over all processors
        self.play_blocks, self.advantage_blocks = -(-num_warps // self.warps_per_block), -(-self.envs // 128)
        self.partial_sums = self._floats(max(self.play_blocks, self.advantage_blocks), NUM_PARTIAL_SUMS)
        self.actions = torch.zeros(self.envs, dtype=torch.int64, device=self.device)
        self.done = torch.zeros(self.envs, dtype=torch.bool, device=self.device)
        self.uniform = self._floats(0 if self._state_name else self.horizon, self.envs, 2 * self.source.env.chances)

    # --- an epoch ---

    def __call__(self, epoch: int, first_step: int, samples: dict[str, Tensor] | None = None) -> None:
        """Learns from `samples`, or from a collection that it plays itself."""
        self._update_keys(epoch, first_step)
        if self.collects:
            self._take_state()
        else:
            assert samples is not None
            self._take_samples(samples)
        self._num_calls += 1
        if self._num_calls == 2:  # the first two calls launch the kernels one by one; later calls replay a CUDA graph
            with self.context.host_waits() as waits:
                self._run_epoch()
            self.host_wait = waits[0] if waits else ""
            if waits:
                self.context.notice(f"collections are not captured as a CUDA graph: {self.host_wait}")
        elif self._num_calls < 2 or self.host_wait:
            self._run_epoch()
        if self._num_calls <= 2 or self.host_wait:
            return
        if self._replay is None:
            self._replay = self.context.record(self._run_epoch)
        self._replay()

    def _update_keys(self, epoch: int, first_step: int) -> None:
        """Copies the next random keys to the device once the table is used up. Within the table, the device advances the row itself."""
        if epoch != self._next_epoch:
            self.step.fill_(first_step)
            self.key_row.fill_(epoch % KEY_TABLE_EPOCHS)
        if epoch != self._next_epoch or epoch % KEY_TABLE_EPOCHS == 0:
            first = epoch - epoch % KEY_TABLE_EPOCHS
            keys = [self.context.random_keys(e) for e in range(first, first + KEY_TABLE_EPOCHS)]
            self.key_table.copy_(torch.tensor(keys), non_blocking=True)
        self._next_epoch = epoch + 1

    def _take_state(self) -> None:
        """Makes the source use this stepper's state tensors: a CUDA graph needs fixed addresses."""
        current = self.source.state()
        if not self.state:
            self.state = {k: v.clone() for k, v in current.items()}
        elif any(current[k] is not v for k, v in self.state.items()):
            for name, tensor in self.state.items():
                tensor.copy_(current[name])
        self.source.load(self.state)

    def _take_samples(self, samples: dict[str, Tensor]) -> None:
        """Uses the samples of a collection; new tensors need a new CUDA graph."""
        tensors = samples["observation"], samples["columns"]
        if any(a is not b for a, b in zip(tensors, self.samples, strict=False)):
            self._replay, self._num_calls = None, 0
        self.samples = tensors

    def _run_epoch(self) -> None:
        launch = self.program.launch
        launch(
            "prepare", (-(-len(self.parameters) // 256),), 256, self.parameters, self.weights, self.key_table, self.random_keys,
            self.key_row, len(self.random_keys),
        )  # fmt: skip
        if self.collects:
            self._collect()
            observations, columns = self.observations, self.columns
        else:  # the engine has collected: all COLUMNS of samples.py, also those of the collection's metrics
            observations, columns = self.samples
            observations = at_least_fp32(observations).reshape(len(observations), -1)
            self._fill_stats(columns)
        self.shuffle()
        for number in range(self.steps):
            self._take_step(number, observations, columns)
        launch("advance", (1,), 32, self.step, self.counts, self.key_row, len(self.counts), self.steps, KEY_TABLE_EPOCHS)

    def _fill_stats(self, columns: Tensor) -> None:
        """Sets the statistics of samples that the engine collected: their advantages are already normalised."""
        target, value = columns[:, COLUMNS.index("target")], columns[:, COLUMNS.index("value")]
        error = (target - value).square().mean().sqrt().clamp(min=1e-20)
        self.stats[MEAN].fill_(0.0)
        self.stats[MEAN + 1].fill_(1.0)
        self.stats[ACTOR_GRADIENT_SCALE].fill_(1 / 32)
        self.stats[ACTOR_GRADIENT_SCALE + 1].copy_(error / 32)
        self.stats[RECENT : RECENT + 3].copy_(columns[0, COLUMNS.index(COLLECTION_METRICS[0]) :])
        self.stats[RECENT + 3].fill_(0.5 * self.task.value_weight)

    def shuffle(self) -> None:
        """Writes the order of the samples in each pass to `rows`."""
        blocks = -(-self.envs // WARPS)
        self.program.launch(
            "shuffle", (blocks, self.source.passes), 32 * WARPS, self.rows, self.random_keys[1:], self.envs, self.count // self.envs,
            self.batch // self.envs,
        )  # fmt: skip

    def gradients(self, observations: Tensor, columns: Tensor, rows: Tensor, blocks: int, number: int = 0) -> None:
        """Writes the gradients and metrics of the samples `rows` to `sums`, as sums over samples. `number`: of the step in the epoch."""
        task, launch = self.task, self.program.launch
        launch(
            "learn", (blocks, 2), 32 * WARPS, observations, columns, self.stats[MEAN:], self.weights, rows, self.partial, len(rows), columns.stride(0),
            float(task.ratio_clip), float(task.value_clip), float(task.value_weight), float(task.entropy_weight), shared=self.shared_bytes,
        )  # fmt: skip
        launch(
            "reduce_gradients", (self.num_reduce_blocks,), 512, self.partial, self.counts, self.sums, self.squares, self.corrections, blocks, number,
            *(float(beta) for beta in self._adam[:2]),
        )  # fmt: skip

    def _take_step(self, number: int, observations: Tensor, columns: Tensor) -> None:
        self.gradients(observations, columns, self.rows.view(-1, self.batch)[number], self.blocks, number)
        ring = self.context.metric_ring
        self.program.launch(
            "update", (-(-len(self.parameters) // 256),), 256, self.parameters, self.mean, self.square, ring, self.weights, self.sums,
            self.squares, self.corrections, self.context.learning_rates, self.stats[RECENT:], self.step, number, self.num_reduce_blocks, ring.shape[1],
            self.context.first_metric, len(ring), *(float(x) for x in self._adam), float(self.task.clip),
        )  # fmt: skip

    # --- a collection ---

    def collect(self, random_keys: Tensor) -> None:
        """Plays a collection with an epoch's random keys, without learning from it."""
        self.random_keys.copy_(random_keys)
        self._collect()

    def _collect(self) -> None:
        launch, source, state = self.program.launch, self.source, self.state
        blocks = self._play_in_kernel() if self._state_name else self._play_step_by_step()
        launch(
            "after_play", (1,), 32, self.partial_sums, state["spread"], state["recent"], self.stats, blocks, int(source.scale_rewards),
            0.5 * float(self.task.value_weight),
        )  # fmt: skip
        for observations, values, end_flags in (
            (self.observations, self.values, None),
            (self.truncated_observations, self.truncated_values, self.end_flags),
            (self.last_observations, self.last_values, None),
        ):
            count = len(values)
            blocks = min(-(-count // TILE), 8 * self._processors)
            launch("value", (blocks,), 32 * WARPS, observations, self.weights, values, end_flags, count, shared=self._value_shared_bytes)
        launch(
            "compute_advantages", (self.advantage_blocks,), 128, self.reward, self.values, self.truncated_values, self.last_values, self.stats, self.end_flags,
            self.columns, self.partial_sums, self.envs, self.horizon, float(source.gamma), float(source.gae_lambda),
        )  # fmt: skip
        launch("after_advantages", (1,), 256, self.partial_sums, self.stats, self.advantage_blocks)
        launch("store_state", (-(-self.envs // 256),), 256, self.stats, state["spread"], state["recent"], state["collections"], self.envs)
        if not self._state_name:  # a user's environment may return values that are not finite
            reward, observations = (t.view(self.envs, self.horizon, -1) for t in (self.reward, self.observations))
            state["fault"].copy_(first_fault(state["fault"], state["collections"], reward, observations))

    def _play_in_kernel(self) -> int:
        """Plays all steps with one kernel; returns the number of blocks that wrote partial sums."""
        state = self.state
        self.program.launch(
            "play", (self.play_blocks,), 32 * self.warps_per_block, state[self._state_name], state["steps"], state["return"],
            state["discounted"], self.observations, self.columns, self.truncated_observations, self.last_observations, self.reward,
            self.partial_sums, self.end_flags, self.weights, self.random_keys, self.envs, self.horizon, float(self.source.gamma),
            shared=self._act_shared_bytes,
        )  # fmt: skip
        return self.play_blocks

    def _play_step_by_step(self) -> int:
        """Plays an environment of tensor functions. In each step, two kernels do everything else; returns the number of their blocks."""
        launch, env, state = self.program.launch, self.source.env, self.state
        env_state = {k.removeprefix("env."): v for k, v in state.items() if k.startswith("env.")}
        if env.chances:
            launch("draw", (-(-self.uniform.numel() // 256),), 256, self.uniform, self.random_keys, self.envs, self.horizon, env.chances)
        for step in range(self.horizon):
            observation = env.observe(env_state).float().reshape(self.envs, -1).contiguous()
            launch(
                "act", (self.play_blocks,), 32 * self.warps_per_block, observation, self.observations, self.columns, self.actions, self.weights,
                self.random_keys, self.envs, self.horizon, step, 1 + 2 * env.chances, shared=self._act_shared_bytes,
            )  # fmt: skip
            step_rand, reset_rand = self.uniform[step].split(env.chances, 1) if env.chances else (self.uniform[step],) * 2
            env_state, reward, terminated = env.step(env_state, self.actions, step_rand)
            next_observation = env.observe(env_state).float().reshape(self.envs, -1).contiguous() if env.limit else observation
            launch(
                "record_step", (self.advantage_blocks,), 128, reward.float().contiguous(), next_observation, terminated.contiguous(), state["steps"], state["return"],
                state["discounted"], self.reward, self.truncated_observations, self.partial_sums, self.end_flags, self.done, self.envs, self.horizon, step,
                env.limit or 0, float(self.source.gamma),
            )  # fmt: skip
            env_state = select_rows(self.done, env.reset(reset_rand), env_state)
        self.last_observations.copy_(env.observe(env_state).reshape(-1))
        for name, value in env_state.items():
            state[f"env.{name}"].copy_(value)
        return self.advantage_blocks


def make_stepper(task: Any, source: Any, model: Agent, context: StepperContext) -> FusedStepper | None:
    """Returns the stepper with kernels. Where they cannot be used, tells the user why and returns None."""
    reason = why_unsupported(task, source, model, context.optimizer)
    if not reason:
        try:
            return FusedStepper(task, source, model, context)  # type: ignore[arg-type]
        except KernelsUnavailable as error:
            reason = str(error)
    context.notice(f"PPO's own kernels are not used: {reason}")
    return None
