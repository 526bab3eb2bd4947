"""DeepSpeed's configuration: what follows from the plan and the recipe, and what of the user's own goes with it."""

from __future__ import annotations

from typing import Any

from drivetrain.outcomes import Problem
from drivetrain.plan import Plan

# Keys that are the plan's or the recipe's, and what to set instead. Dots lead into objects.
OWNED = {
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
    """What DeepSpeed runs with: the user's keys under the plan's."""
    ours = _ours(plan, clip)
    given = _without_auto(plan.deepspeed_config)
    for key, instead in OWNED.items():
        value, own = _look(given, key), _look(ours, key)
        if value is None or value == own or _is_off(value, own):
            continue
        there = f": the plan has {own}" if own is not None and not isinstance(own, dict) else ""
        raise Problem(f"plan.deepspeed_config: {key} is not its to set{there}" + (f"; use {instead}" if instead else ""))
    return _merged(given, ours)


def _ours(plan: Plan, clip: float) -> dict[str, Any]:
    pinned = {"device": "cpu", "pin_memory": plan.device == "cuda"}
    zero: dict[str, Any] = {"stage": plan.zero_stage}
    if plan.offload != "none":
        zero["offload_optimizer"] = pinned
    if plan.offload == "all":
        zero["offload_param"] = pinned
    # The engine's own autocast runs the forward pass, over parameters in fp32, and its own scale serves fp16: the maths of
    # single and ddp. DeepSpeed's bf16 would also round the sums between blocks, and its autocast the sums over ranks.
    return {
        "train_batch_size": plan.micro_batch * plan.world_size,
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,  # the engine says when a step ends: the last of an epoch has fewer parts
        "gradient_clipping": clip,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # torch's own kernels run on the host as well, without a compiler
        "steps_per_print": None,
    }


def _without_auto(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_auto(v) for k, v in value.items() if v != "auto"}
    return value


def _look(config: dict[str, Any], key: str) -> Any:
    found: Any = config
    for name in key.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return found


def _is_off(value: Any, own: Any) -> bool:
    """Whether a key of the user's says no to what the plan does not do either."""
    off = value in (False, {}, "none") or (isinstance(value, dict) and value.get("enabled") is False)
    return own is None and off


def _merged(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    both = {k: _merged(under[k], v) if isinstance(v, dict) and isinstance(under.get(k), dict) else v for k, v in over.items()}
    return under | both
