"""Proximal policy optimisation (PPO): plays environments, estimates advantages, and improves the policy in small steps."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from drivetrain.data import EpochStepper, StepperContext, Tensors
from drivetrain.outcomes import Problem
from drivetrain.settings import Duration, Range
from drivetrain.task import Task
from drivetrain.tasks.rl.checks import check_env
from drivetrain.tasks.rl.envs import Env
from drivetrain.tasks.rl.episodes import play_episodes, win_rate
from drivetrain.tasks.rl.exported import export_graphs
from drivetrain.tasks.rl.nets import Agent, AgentWithRival, ConvAgent, IndependentAgents, LstmAgent, MlpAgent
from drivetrain.tasks.rl.rollout import Rollout
from drivetrain.tasks.rl.samples import COLLECTION_METRICS, at_least_fp32, columns_of

LEARNING_HOOKS = ("loss", "optimizer", "augment", "summary", "counts")
"""Hooks that the CUDA kernels and populations replace by their own code."""


class Ppo(Task):
    """PPO on any `Env`: derive a class and write `env`."""

    epochs: Annotated[int, Range(1)] = 50
    """Number of collections; the policy learns from each one `passes` times."""
    envs: Annotated[int, Range(1)] = 1024
    """Environments that are played at once, over all processes."""
    horizon: Annotated[int, Range(1)] = 16
    """Steps that each environment is played before the policy learns."""
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
    """Number format of the arithmetic; ratios of probabilities need the precision of fp32."""
    gamma: Annotated[float, Range(0, 1)] = 0.99
    """Discount factor of future rewards."""
    gae: Annotated[float, Range(0, 1)] = 0.95
    """Lambda of generalised advantage estimation: 1 uses the returns that were seen, 0 the critic's values."""
    ratio_clip: Annotated[float, Range(0)] = 0.2
    """Clipping range of the ratio between an action's new and old probability."""
    scale_rewards: bool = True
    """Whether rewards are divided by the standard deviation of their discounted sums; logged returns are not."""
    scale_values: bool = False
    """Whether the critic's targets are scaled to mean 0 and standard deviation 1, whatever the size of returns."""
    value_clip: Annotated[float, Range(0)] = 0.0
    """Clipping range of the change of a value; 0 does not clip."""
    kl_stop: Annotated[float, Range(0)] = 0.0
    """Mean KL divergence of a step above which the policy learns nothing more from the collection; 0 sets no limit."""
    value_weight: Annotated[float, Range(0)] = 0.5
    """Weight of the critic's error in the loss."""
    entropy_weight: Annotated[float, Range(0)] = 0.01
    """Weight of the policy's entropy in the loss, which rewards exploration."""
    rival: Annotated[float, Range(0, 1)] = 0.1
    """With several agents: share of the training after which a copy of the policy is kept as the opponent in evaluations (`win`); 0: none."""
    policies: Literal["shared", "independent"] = "shared"
    """With several agents: one policy for all of them, or one for each."""
    fused: bool = True
    """Whether small perceptrons on one GPU learn with CUDA kernels of their own, many times faster; matrix products then have tf32 precision."""
    net: Literal["mlp", "conv", "lstm"] = "mlp"
    """The network: two perceptrons, the small convolutional network of guide 003, or an LSTM."""
    chunk: Annotated[int, Range(1)] = 16
    """Consecutive steps that an LSTM is unrolled over; `global_batch` counts these chunks as samples."""
    width: Annotated[int, Range(1, 65536)] = 64
    """Width of the perceptrons' layers."""
    layers: Annotated[int, Range(1, 16)] = 2
    """Hidden layers of the perceptrons."""
    activation: Literal["tanh", "relu"] = "tanh"
    """Activation function of the perceptrons."""
    eval_episodes: Annotated[int, Range(0)] = 100
    """New episodes that an evaluation plays; 0 evaluates nothing."""
    greedy: bool = True
    """Whether an evaluation takes the likeliest action, or samples one as training does."""
    eval_every: Duration = "10ep"
    """Steps (or 1ep, 10min) between evaluations; the end always evaluates."""
    save_every: Duration = "10ep"
    """Steps (or 1ep, 10min) between checkpoints; the end always saves."""

    tune_metric = "return"
    tune_population = "drivetrain.tasks.rl.population_rules"
    search = {  # trials that differ only in these can be trained as one population
        "learning_rate": "1e-4..1e-2,log", "gamma": "0.95..0.999", "gae": "0.8..1", "entropy_weight": "1e-4..3e-2,log", "ratio_clip": "0.1..0.3",
    }  # fmt: skip

    def env(self) -> Env:
        """Returns the environment to learn in."""
        raise Problem(f"{type(self).__name__} has no env(): return the Env to learn in")

    def _checked_env(self) -> Env:
        return check_env(self.env(), type(self).__name__)

    def model(self) -> Agent:
        env = self._checked_env()
        agent = self.agent(env)
        if self.policies == "independent" and env.agents > 1:
            if agent.memory:
                raise Problem("net=lstm plays with policies=shared only")
            agent = IndependentAgents([agent, *(self.agent(env) for _ in range(env.agents - 1))])
        return AgentWithRival(agent) if self._rival_at(env) else agent

    def agent(self, env: Env) -> Agent:
        """Returns the network that the settings describe."""
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
        self._check_batch(env, chunk)
        rollout = self.rollout(
            env, self.envs, self.horizon, self.passes, self.gamma, self.gae, self.scale_rewards, self._rival_at(env),
            chunk, 2 * self.width if self.net == "lstm" else 0, self.scale_values,
        )  # fmt: skip
        if self.kl_stop:
            rollout.limits = {"kl": self.kl_stop}
        if self.fused:
            rollout.make_stepper = self._fused_stepper
        return rollout

    def _check_batch(self, env: Env, chunk: int) -> None:
        """Raises Problem if batches do not take the same number of samples from every environment."""
        if self.horizon % chunk:
            raise Problem(f"horizon={self.horizon} is no multiple of chunk={chunk}: an LSTM learns from complete chunks")
        num_samples = self.envs * self.horizon * env.agents // chunk
        if self.global_batch % self.envs or num_samples % self.global_batch:
            divisors = [self.envs * k for k in range(1, num_samples // self.envs + 1) if num_samples % (self.envs * k) == 0]
            nearest = min(divisors, key=lambda size: abs(size - self.global_batch))
            raise Problem(
                f"global_batch={self.global_batch} does not divide a collection of {self.envs} environments x {self.horizon} steps"
                f"{f' x {env.agents} agents' if env.agents > 1 else ''}{f' in chunks of {chunk}' if chunk > 1 else ''} evenly: take global_batch={nearest}"
            )

    def _fused_stepper(self, source: Rollout, model: Any, context: StepperContext) -> EpochStepper | None:
        from drivetrain.tasks.rl.fused.stepper import make_stepper

        return make_stepper(self, source, model, context)

    def rollout(self, env: Env, *rest: Any) -> Rollout:
        """Returns the source that plays the environments; `rest` are the further arguments of `Rollout`."""
        return Rollout(env, *rest)

    def replaced_hooks(self) -> list[str]:
        """Returns the LEARNING_HOOKS that a derived class replaces: kernels and populations would ignore them."""
        return [hook for hook in LEARNING_HOOKS if getattr(type(self), hook) is not getattr(Ppo, hook)]

    def _rival_at(self, env: Env) -> int:
        """Returns the number of collections after which the rival becomes a copy of the policy; 0: no rival."""
        if env.agents == 1 or not self.rival:
            return 0
        num_samples = self.envs * self.horizon * env.agents // (self.chunk if self.net == "lstm" else 1)
        steps_per_epoch = num_samples * self.passes // self.global_batch
        return max(1, round(self.rival * (self.steps / steps_per_epoch if self.steps else self.epochs)))

    def eval_data(self) -> Tensors | None:
        return Tensors(torch.arange(self.eval_episodes)) if self.eval_episodes else None

    def loss(self, model: Agent, batch: dict[str, Tensor]) -> Any:
        columns = columns_of(batch)
        if model.memory:
            logits, value = model.unroll(batch["observation"], columns["is_first"].view(batch["observation"].shape[:2]))
        else:
            logits, value = model(at_least_fp32(batch["observation"]), columns["agent"])
        logits, value = at_least_fp32(logits), at_least_fp32(value)
        log_probs, is_alive, advantage = logits.log_softmax(-1), columns["is_alive"], columns["advantage"]
        log_ratio = log_probs.gather(-1, columns["action"][:, None])[:, 0] - columns["log_prob"]
        ratio = log_ratio.exp()
        gain = torch.minimum(ratio * advantage, ratio.clamp(1 - self.ratio_clip, 1 + self.ratio_clip) * advantage)
        error = (value - columns["target"]).square()
        if isinstance(self.value_clip, Tensor) or self.value_clip:  # in a population it is a tensor, one value for each trial
            clipped = columns["value"] + (value - columns["value"]).clamp(-self.value_clip, self.value_clip)
            error = torch.maximum(error, (clipped - columns["target"]).square())
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        each = 0.5 * self.value_weight * error - gain - self.entropy_weight * entropy
        count = is_alive.sum()
        metrics = {
            "entropy": entropy, "kl": ratio - 1 - log_ratio, "clipped": ((ratio - 1).abs() > self.ratio_clip).float(), "value_error": error,
            **{name: columns[name] for name in COLLECTION_METRICS},
        }  # fmt: skip
        return ((each * is_alive).sum(), count), {name: ((values * is_alive).sum(), count) for name, values in metrics.items()}

    def summary_fields(self) -> dict[str, Any]:
        return {"Model": self.net}

    def exports(self, model: Agent) -> dict[str, tuple[nn.Module, dict[str, Tensor]]]:
        return export_graphs(self.env(), model)

    def metrics(self, model: Agent, batch: Any) -> dict[str, Tensor]:
        env = self.env()
        values = play_episodes(env, model, batch, self.greedy)
        return values | {"win": win_rate(env, model, batch, self.greedy)} if isinstance(model, AgentWithRival) else values
