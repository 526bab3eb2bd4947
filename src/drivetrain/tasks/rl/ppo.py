"""Proximal policy optimisation: play, judge what was done by how it turned out, and move the policy a little."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from drivetrain.data import EpochStepper, StepperContext, Tensors
from drivetrain.outcomes import Problem
from drivetrain.settings import Duration, Range
from drivetrain.task import Task
from drivetrain.tasks.rl.checks import checked
from drivetrain.tasks.rl.envs import Env
from drivetrain.tasks.rl.nets import Agent, ConvAgent, Independent, LstmAgent, MlpAgent, Rivals
from drivetrain.tasks.rl.played import graphs
from drivetrain.tasks.rl.rollout import FIGURES, Rollout, duel, facts_of, full, play


class Ppo(Task):
    """PPO over any `Env`: derive from it and write `env`."""

    epochs: Annotated[int, Range(1)] = 50
    """Collections; what one brings is learned from `passes` times."""
    envs: Annotated[int, Range(1)] = 1024
    """Environments that are played at once, over all processes."""
    horizon: Annotated[int, Range(1)] = 16
    """Steps that each is played before the policy learns."""
    passes: Annotated[int, Range(1)] = 4
    """Times that the policy learns from a collection."""
    global_batch: Annotated[int, Range(1)] = 4096
    """Samples in one optimizer step, over all processes: a multiple of the environments."""
    learning_rate: Annotated[float, Range(0)] = 2.5e-3
    """The optimizer's peak learning rate."""
    weight_decay: Annotated[float, Range(0)] = 0.0
    """Weight decay of the optimizer."""
    decay: Literal["cosine", "linear", "constant"] = "linear"
    """How the learning rate falls after the warm-up."""
    clip: Annotated[float, Range(0)] = 0.5
    """Largest norm of the gradients; 0 does not clip."""
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = "fp32"
    """Number format of the arithmetic; probabilities that are compared want all digits."""
    gamma: Annotated[float, Range(0, 1)] = 0.99
    """What the next step's reward counts against this one's."""
    gae: Annotated[float, Range(0, 1)] = 0.95
    """How far advantages trust what really came (1) rather than the value (0)."""
    ratio_clip: Annotated[float, Range(0)] = 0.2
    """How far an action's probability may move in one collection and still gain."""
    scale_rewards: bool = True
    """Whether rewards are divided by the spread of what they add up to; returns are told as they are."""
    scale_values: bool = False
    """Whether the critic learns what things are worth with mean 0 and spread 1, whatever the size of returns."""
    value_clip: Annotated[float, Range(0)] = 0.0
    """How far a value may move likewise; 0 does not limit it."""
    kl_stop: Annotated[float, Range(0)] = 0.0
    """How far the policy may move in a collection, as a step's mean KL divergence; beyond it learns nothing more from it. 0: no end."""
    value_weight: Annotated[float, Range(0)] = 0.5
    """Weight of the value's error in the loss."""
    entropy_weight: Annotated[float, Range(0)] = 0.01
    """Weight of the policy's entropy, which keeps it trying."""
    rival: Annotated[float, Range(0, 1)] = 0.1
    """Where several play: share of the training after which the policy is kept, to be played against in evaluations (`win`); 0: none."""
    policies: Literal["shared", "independent"] = "shared"
    """Where several play: one policy for all of them, or each its own."""
    fused: bool = True
    """Whether two small perceptrons on one GPU learn by kernels of their own, many times as fast; products then have the digits of tf32."""
    net: Literal["mlp", "conv", "lstm"] = "mlp"
    """The network: two perceptrons, guide 003's small convolutions, or an LSTM that remembers what it saw."""
    chunk: Annotated[int, Range(1)] = 16
    """Steps in a row that an LSTM learns from at once: its samples, which `global_batch` counts."""
    width: Annotated[int, Range(1, 65536)] = 64
    """Width of the perceptrons' layers."""
    layers: Annotated[int, Range(1, 16)] = 2
    """Hidden layers of the perceptrons."""
    activation: Literal["tanh", "relu"] = "tanh"
    """Between the perceptrons' layers."""
    eval_episodes: Annotated[int, Range(0)] = 100
    """Fresh episodes that an evaluation plays; 0 evaluates nothing."""
    greedy: bool = True
    """Whether an evaluation takes the likeliest action, or draws one as training does."""
    eval_every: Duration = "10ep"
    """Steps (or 1ep, 10min) between evaluations; the end always evaluates."""
    save_every: Duration = "10ep"
    """Steps (or 1ep, 10min) between checkpoints; the end always saves."""

    search = {  # none changes the program, so that trials can be a population
        "learning_rate": "1e-4..1e-2,log", "gamma": "0.95..0.999", "gae": "0.8..1", "entropy_weight": "1e-4..3e-2,log", "ratio_clip": "0.1..0.3",
    }  # fmt: skip
    tune_metric = "return"
    tune_population = True

    def env(self) -> Env:
        """The world to learn in."""
        raise Problem(f"{type(self).__name__} has no env(): return the Env to learn in")

    def _checked_env(self) -> Env:
        return checked(self.env(), type(self).__name__)

    def model(self) -> Agent:
        env = self._checked_env()
        agent = self.agent(env)
        if self.policies == "independent" and env.agents > 1:
            if agent.memory:
                raise Problem("net=lstm plays with policies=shared only")
            agent = Independent([agent, *(self.agent(env) for _ in range(env.agents - 1))])
        return Rivals(agent) if self._rival_at(env) else agent

    def agent(self, env: Env) -> Agent:
        """The net, by its settings."""
        size = int(torch.Size(env.shape).numel())
        if self.net == "lstm":
            return LstmAgent(size, env.actions, self.width)
        if self.net == "mlp":
            return MlpAgent(size, env.actions, self.width, self.layers, self.activation)
        if len(env.shape) != 3:
            raise Problem(
                f"net=conv needs observations of [channels, height, width]; {type(env).__name__}'s are {list(env.shape)}: net=mlp"
            )
        return ConvAgent(env.shape, env.actions)

    def train_data(self) -> Rollout:
        env = self._checked_env()
        chunk = self.chunk if self.net == "lstm" else 1
        if self.horizon % chunk:
            raise Problem(f"horizon={self.horizon} is no multiple of chunk={chunk}: an LSTM learns from whole chunks")
        whole = self.envs * self.horizon * env.agents // chunk
        if self.global_batch % self.envs or whole % self.global_batch:
            fits = [self.envs * k for k in range(1, whole // self.envs + 1) if whole % (self.envs * k) == 0]
            nearest = min(fits, key=lambda size: abs(size - self.global_batch))
            raise Problem(
                f"global_batch={self.global_batch} does not divide a collection of {self.envs} environments x {self.horizon} steps"
                f"{f' x {env.agents} agents' if env.agents > 1 else ''}{f' in chunks of {chunk}' if chunk > 1 else ''} evenly: take global_batch={nearest}"
            )
        rollout = self.rollout(
            env, self.envs, self.horizon, self.passes, self.gamma, self.gae, self.scale_rewards, self._rival_at(env),
            chunk, 2 * self.width if self.net == "lstm" else 0, self.scale_values,
        )  # fmt: skip
        if self.kl_stop:
            rollout.limits = {"kl": self.kl_stop}
        if self.fused:
            rollout.make_stepper = self._fused_stepper
        return rollout

    def _fused_stepper(self, source: Rollout, model: Any, context: StepperContext) -> EpochStepper | None:
        from drivetrain.tasks.rl.fused import learner

        return learner.make(self, source, model, context)

    def rollout(self, env: Env, *rest: Any) -> Rollout:
        """How it is played."""
        return Rollout(env, *rest)

    def _rival_at(self, env: Env) -> int:
        """After how many collections; 0 where there is no rival."""
        if env.agents == 1 or not self.rival:
            return 0
        samples = self.envs * self.horizon * env.agents // (self.chunk if self.net == "lstm" else 1)
        steps_each = samples * self.passes // self.global_batch
        return max(1, round(self.rival * (self.steps / steps_each if self.steps else self.epochs)))

    def eval_data(self) -> Tensors | None:
        return Tensors(torch.arange(self.eval_episodes)) if self.eval_episodes else None

    def loss(self, model: Agent, batch: dict[str, Tensor]) -> Any:
        facts = facts_of(batch)
        if model.memory:
            logits, value = model.unrolled(batch["seen"], facts["anew"].view(batch["seen"].shape[:2]))
        else:
            logits, value = model(full(batch["seen"]), facts["who"])
        logits, value = full(logits), full(value)
        logp, alive, advantage = logits.log_softmax(-1), facts["alive"], facts["advantage"]
        moved = logp.gather(-1, facts["action"][:, None])[:, 0] - facts["logp"]
        ratio = moved.exp()
        gain = torch.minimum(ratio * advantage, ratio.clamp(1 - self.ratio_clip, 1 + self.ratio_clip) * advantage)
        error = (value - facts["target"]).square()
        if isinstance(self.value_clip, Tensor) or self.value_clip:  # a tensor is each trial's own, of a population
            near = facts["value"] + (value - facts["value"]).clamp(-self.value_clip, self.value_clip)
            error = torch.maximum(error, (near - facts["target"]).square())
        entropy = -(logp.exp() * logp).sum(-1)
        each = 0.5 * self.value_weight * error - gain - self.entropy_weight * entropy
        count = alive.sum()
        figures = {
            "entropy": entropy, "kl": ratio - 1 - moved, "clipped": ((ratio - 1).abs() > self.ratio_clip).float(), "value_error": error,
            **{name: facts[name] for name in FIGURES},
        }  # fmt: skip
        return ((each * alive).sum(), count), {name: ((figure * alive).sum(), count) for name, figure in figures.items()}

    def summary_fields(self) -> dict[str, Any]:
        return {"Model": self.net}

    def exports(self, model: Agent) -> dict[str, tuple[nn.Module, dict[str, Tensor]]]:
        return graphs(self.env(), model)

    def metrics(self, model: Agent, batch: Any) -> dict[str, Tensor]:
        env = self.env()
        figures = play(env, model, batch, self.greedy)
        return figures | {"win": duel(env, model, batch, self.greedy)} if isinstance(model, Rivals) else figures
