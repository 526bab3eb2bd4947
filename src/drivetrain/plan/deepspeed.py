"""DeepSpeed's configuration: takes the plan and the user's own keys, returns the dict that DeepSpeed runs with, or raises Problem."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from drivetrain.outcomes import Problem
from drivetrain.plan.plan import Plan

# Keys that the plan or the recipe sets -> what the user sets instead. Dots lead into objects.
RESERVED_KEYS = {
    "train_batch_size": "global_batch",
    "train_micro_batch_size_per_gpu": "plan.micro_batch",
    "gradient_accumulation_steps": "plan.accumulation",
    "managed_gradient_accumulation": "plan.accumulation",
    "gradient_clipping": "clip",
    "prescale_gradients": "",
    "gradient_predivide_factor": "",
    "gradient_allreduce_op": "",
    "optimizer": "optim, or optimizer() of the task",
    "scheduler": "decay and warmup, or schedule() of the task",
    "fp16": "precision",
    "bf16": "precision",
    "bfloat16": "precision",
    "amp": "precision",
    "torch_autocast": "precision",
    "data_types": "precision",
    "communication_data_type": "precision",
    "zero_allow_untested_optimizer": "",
    "zero_force_ds_cpu_optimizer": "",
    "zero_optimization.stage": "plan.zero_stage",
    "zero_optimization.offload_optimizer.device": "plan.offload",
    "zero_optimization.offload_param.device": "plan.offload",
    "zero_optimization.cpu_offload": "plan.offload",
    "compile": "",
    "pipeline": "",
    "tensor_parallel": "",
    "autotuning": "",
    "elasticity": "",
    "hybrid_engine": "",
    "zenflow": "",
}


def configuration(plan: Plan, clip: float) -> dict[str, Any]:
    """Returns the user's keys with the plan's keys added."""
    from_plan = _from_plan(plan, clip)
    from_user = _without_auto(plan.deepspeed_config)
    for key, instead in RESERVED_KEYS.items():
        users, plans = _value_at(from_user, key), _value_at(from_plan, key)
        if users is None or users == plans or (plans is None and _is_off(users)):
            continue
        value = f": the plan has {plans}" if plans is not None and not isinstance(plans, dict) else ""
        raise Problem(f"plan.deepspeed_config: {key} is not its to set{value}" + (f"; use {instead}" if instead else ""))
    return _merged(from_user, from_plan)


def is_deepspeed_installed() -> bool:
    return find_spec("deepspeed") is not None


def _from_plan(plan: Plan, clip: float) -> dict[str, Any]:
    on_host = {"device": "cpu", "pin_memory": plan.device == "cuda"}
    zero: dict[str, Any] = {"stage": plan.zero_stage}
    if plan.offload != "none":
        zero["offload_optimizer"] = on_host
    if plan.offload == "all":
        zero["offload_param"] = on_host
    # The engine's own autocast runs the forward pass over fp32 parameters, with its own loss scale for fp16, so that the maths are
    # those of single and ddp. DeepSpeed's bf16 would also round the sums between blocks, and its autocast the sums over ranks.
    return {
        "train_batch_size": plan.micro_batch * plan.world_size,
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,  # the engine ends a step: an epoch's last step has fewer micro-batches
        "gradient_clipping": clip,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # torch's own kernels also run on the host and need no compiler
        "steps_per_print": None,
    }


def _without_auto(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_auto(v) for k, v in value.items() if v != "auto"}
    return value


def _value_at(config: dict[str, Any], key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _is_off(value: Any) -> bool:
    """Returns whether a value turns its feature off."""
    return value in (False, {}, "none") or (isinstance(value, dict) and value.get("enabled") is False)


def _merged(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Returns two nested dicts as one; `over` wins."""
    both = {k: _merged(under[k], v) if isinstance(v, dict) and isinstance(under.get(k), dict) else v for k, v in over.items()}
    return under | both
