"""Rules for accelerate's default_config.yaml: takes its keys, returns pins, settings and flags (in a `Draft`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drivetrain.outcomes import Problem
from drivetrain.plan.imported import deepspeed
from drivetrain.plan.imported.deepspeed import NOTHING_SHARDED
from drivetrain.plan.imported.keys import REQUEST, Destination, Draft, Key, Rule, Values, as_bool, as_int, unused_keys, value_of
from drivetrain.settings import coerce

DEFAULT_PORT = 29500  # accelerate's
CONFIG_FILE = "deepspeed_config.deepspeed_config_file"
STAGE = "deepspeed_config.zero_stage"
OTHER_DEVICES = ("XLA", *(f"MULTI_{name}" for name in ("NPU", "MLU", "SDAA", "MUSA", "XPU", "HPU", "NEURON")))
STAGE_OF_SHARDING = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "HYBRID_SHARD": 3, "HYBRID_SHARD_ZERO2": 2}


def distributed_type(values: Values) -> str:
    """Returns the file's distributed_type. YAML reads `NO` without quotes as false."""
    value = values.get("distributed_type", "NO")
    return "NO" if value is False else str(value).upper()


def _count(value: Any) -> int:
    return int(coerce(REQUEST["nodes"], value))


def num_machines(values: Values) -> int:
    return value_of(values, "num_machines", _count, 1)


def _distributed_type(value: Any, values: Values) -> Destination | str:
    word = distributed_type(values)
    if word == "NO":
        return Destination("request", "procs", 1)
    if word == "MULTI_CPU":
        return Destination("request", "device", "cpu")
    if word == "MULTI_GPU":
        return _replicated(values)
    if word == "FSDP":
        return Destination("pins", "strategy", "fsdp") if fsdp_stage(values) else _replicated(values)
    if word == "DEEPSPEED":
        return Destination("pins", "strategy", "deepspeed") if deepspeed_stage(values) else _replicated(values)
    if word in OTHER_DEVICES:
        return "devices are NVIDIA's and AMD's GPUs and CPUs (--device)"
    if word in ("MEGATRON_LM", "TP"):
        return "processes share the data, and the model by fsdp or deepspeed (plan.strategy)"
    known = ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP", "DEEPSPEED", "MEGATRON_LM", "TP", *OTHER_DEVICES)
    raise ValueError(f"one of {', '.join(known)}")


def _replicated(values: Values) -> Destination | str:
    """Returns ddp for several processes."""
    several = value_of(values, "num_processes", as_int, 2) != 1
    return Destination("pins", "strategy", "ddp") if several else "a single process needs no DDP"


def _procs(value: Any, values: Values) -> Destination | str:
    total, nodes = as_int(value), num_machines(values)
    if total == -1:
        return "-1 leaves it to the launcher"
    if total % nodes:
        raise ValueError(f"the processes of all machines together, a multiple of num_machines ({nodes})")
    return Destination("request", "procs", total // nodes)


def _machine_rank(value: Any, values: Values) -> Destination | str:
    return Destination("request", "node_rank", value) if num_machines(values) > 1 else "one machine needs no number"


def _rendezvous(value: Any, values: Values) -> Destination | str:
    if num_machines(values) == 1:
        return "the processes of one machine find each other"
    host = values.get("main_process_ip")
    port = value_of(values, "main_process_port", as_int, DEFAULT_PORT)
    return Destination("request", "rendezvous", f"{host}:{port}") if host else "main_process_ip is missing"


def _gpus(value: Any, values: Values) -> Destination | str:
    return "all GPUs are used by default" if str(value).strip() == "all" else Destination("request", "gpus", str(value).replace(" ", ""))


def _use_cpu(value: Any, values: Values) -> Destination | str:
    return Destination("request", "device", "cpu") if as_bool(value) else "false: GPUs are used where there are any"


def _mixed_precision(value: Any, values: Values) -> Destination | str:
    word = "no" if value is False else str(value).lower()  # YAML reads `no` without quotes as false
    if word == "fp8":
        return "there is no fp8 among precision's (fp32, tf32, bf16, fp16): the recipe's holds"
    if word not in ("no", "fp16", "bf16"):
        raise ValueError("one of no, fp16, bf16, fp8")
    return Destination("settings", "precision", "fp32" if word == "no" else word)


def _old_fp16(value: Any, values: Values) -> Destination | str:
    return Destination("settings", "precision", "fp16") if as_bool(value) else "mixed_precision says it"


def _dynamo(value: Any, values: Values) -> Destination | str:
    word = "NO" if value is False else str(value).upper()
    if word == "CUDAGRAPHS":
        return Destination("pins", "capture", "on")
    if word in ("NO", "INDUCTOR"):
        return Destination("pins", "compile", "off" if word == "NO" else "on")
    return f"there is no backend {value}: plan.compile is torch's inductor, or off"


# --- FSDP --------------------------------------------------------------------------------------


def fsdp_stage(values: Values) -> int:
    """Returns 3 if parameters are sharded too, 2 if they stay after the forward pass, 0 if nothing is sharded."""
    keys = [f"fsdp_config.fsdp_{key}" for key in ("reshard_after_forward", "sharding_strategy")]
    return value_of(values, next((key for key in keys if key in values), ""), _stage_of, "FULL_SHARD")


def _stage_of(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= len(STAGE_OF_SHARDING):
        return list(STAGE_OF_SHARDING.values())[value - 1]  # torch's numbers for them
    word = str(value).upper()
    if word in STAGE_OF_SHARDING:
        return STAGE_OF_SHARDING[word]
    try:
        return 3 if as_bool(value) else 2
    except ValueError:
        raise ValueError(f"true or false, or one of {', '.join(STAGE_OF_SHARDING)}") from None


def _fsdp(rule: Rule) -> Rule:
    """Returns a rule that applies only if the file's distributed_type is FSDP."""

    def checked_rule(value: Any, values: Values) -> Destination | str:
        if distributed_type(values) != "FSDP":
            return f"distributed_type is {distributed_type(values)}, not FSDP"
        return rule(value, values)

    return checked_rule


def _sharding(value: Any, values: Values) -> Destination | str:
    stage = _stage_of(value)
    return Destination("pins", "zero_stage", stage) if stage else NOTHING_SHARDED


def _fsdp_offload(value: Any, values: Values) -> Destination | str:
    return Destination("pins", "offload", "all" if as_bool(value) else "none") if fsdp_stage(values) else NOTHING_SHARDED


def _activation_checkpointing(value: Any, values: Values) -> Destination | str:
    return Destination("pins", "activation_checkpointing", value)


def _fsdp_unused(why: str, *keys: str) -> list[Key]:
    return unused_keys(why, *(f"fsdp_config.fsdp_{key}" for key in keys))


# --- DeepSpeed ---------------------------------------------------------------------------------


def deepspeed_stage(values: Values) -> int:
    return value_of(values, STAGE, as_int, 2)  # accelerate's default


def _deepspeed(rule: Rule) -> Rule:
    """Returns a rule that applies only if the file's distributed_type is DEEPSPEED."""

    def checked_rule(value: Any, values: Values) -> Destination | str:
        if distributed_type(values) != "DEEPSPEED":
            return f"distributed_type is {distributed_type(values)}, not DEEPSPEED"
        return rule(value, values)

    return checked_rule


def _stage(value: Any, values: Values) -> Destination | str:
    return Destination("pins", "zero_stage", value) if as_int(value) else NOTHING_SHARDED


def _offload(part: str) -> Rule:
    def rule(value: Any, values: Values) -> Destination | str:
        optimizer, param = (values.get(f"deepspeed_config.offload_{p}_device", "none") for p in ("optimizer", "param"))
        stage = deepspeed_stage(values)
        return deepspeed.offload_destination(value, part, deepspeed.offload_of(optimizer, param, stage), stage)

    return rule


def _accumulation(value: Any, values: Values) -> Destination | str:
    steps = as_int(value)
    return Destination("pins", "accumulation", steps) if steps > 1 else "1 is where a plan begins: a share that does not fit is split"


def _clip(value: Any, values: Values) -> Destination | str:
    return Destination("settings", "clip", value)


def _config_file(value: Any, values: Values) -> Destination | str:
    return Destination("pins", "strategy", "deepspeed") if deepspeed_stage(values) else NOTHING_SHARDED


def _deepspeed_unused(why: str, *keys: str) -> list[Key]:
    return unused_keys(why, *(f"deepspeed_config.{key}" for key in keys))


KEYS: list[Key] = [
    Key("distributed_type", "`plan.strategy` (MULTI_GPU ddp, FSDP fsdp, DEEPSPEED deepspeed), `--procs 1` (NO) or `--device cpu` (MULTI_CPU)",
        _distributed_type),
    Key("num_processes", "`--procs`, divided by num_machines", _procs),
    Key("num_machines", "`--nodes`", lambda value, values: Destination("request", "nodes", value)),
    Key("machine_rank", "`--node-rank`, with several machines", _machine_rank),
    Key("main_process_ip", "`--rendezvous`, with several machines", _rendezvous),
    Key("main_process_port", "`--rendezvous`, with several machines", _rendezvous),
    Key("gpu_ids", "`--gpus`, unless all", _gpus),
    Key("use_cpu", "`--device cpu` where it is true", _use_cpu),
    Key("mixed_precision", "`precision` (no: fp32; fp8: not used)", _mixed_precision),
    Key("fp16", "`precision=fp16` (files of old versions)", _old_fp16),
    *unused_keys("the command line says where a run executes", "compute_environment"),
    *unused_keys("machines find each other through --rendezvous", "rdzv_backend", "same_network"),
    *unused_keys("a task is a class, not a script with a function", "main_training_function"),
    *unused_keys("TORCH_DISTRIBUTED_DEBUG=DETAIL asks torch for such checks", "debug"),
    *unused_keys("processes are not bound to cores; plan.threads says how many each uses", "enable_cpu_affinity"),
    Key("dynamo_config.dynamo_backend", "`plan.compile` (INDUCTOR on, NO off) or `plan.capture` (CUDAGRAPHS)", _dynamo),
    Key("dynamo_backend", "the same (files of old versions)", _dynamo),
    *unused_keys("CUDA graphs are plan.capture, tried by itself", "dynamo_config.dynamo_mode"),
    *unused_keys("shapes are fixed, and code that cannot be compiled runs eagerly", "dynamo_config.dynamo_use_fullgraph", "dynamo_config.dynamo_use_dynamic"),
    *unused_keys("a deep model is compiled block by block anyway", "dynamo_config.dynamo_use_regional_compilation"),
    Key("fsdp_config.fsdp_reshard_after_forward", "`plan.zero_stage` (true or FULL_SHARD 3, false or SHARD_GRAD_OP 2)", _fsdp(_sharding)),
    Key("fsdp_config.fsdp_sharding_strategy", "`plan.zero_stage` (FULL_SHARD 3, SHARD_GRAD_OP 2; hybrid ones shard over all processes)",
        _fsdp(_sharding)),
    Key("fsdp_config.fsdp_offload_params", "`plan.offload` (true: all)", _fsdp(_fsdp_offload)),
    Key("fsdp_config.fsdp_activation_checkpointing", "`plan.activation_checkpointing`", _fsdp(_activation_checkpointing)),
    *_fsdp_unused("FSDP2 (fully_shard) runs either", "version", "use_orig_params"),
    *_fsdp_unused("the repeated blocks of a model are found and wrapped", "auto_wrap_policy", "transformer_layer_cls_to_wrap", "min_num_params"),
    *_fsdp_unused("runs write checkpoints and the finished model in a form of their own", "state_dict_type"),
    *_fsdp_unused("FSDP2 prefetches by itself", "backward_prefetch", "backward_prefetch_policy", "forward_prefetch"),
    *_fsdp_unused("each process makes the same weights, from the seed or the file", "cpu_ram_efficient_loading", "sync_module_states"),
    *_fsdp_unused("activations are computed again, not moved", "activation_checkpointing_offload"),
    Key(STAGE, "`plan.zero_stage`; 0 leaves it open", _deepspeed(_stage)),
    Key("deepspeed_config.offload_optimizer_device", "`plan.offload=optimizer` where it is cpu", _deepspeed(_offload("optimizer"))),
    Key("deepspeed_config.offload_param_device", "`plan.offload=all` where it is cpu, at stage 3", _deepspeed(_offload("param"))),
    Key("deepspeed_config.gradient_accumulation_steps", "`plan.accumulation`, unless 1", _deepspeed(_accumulation)),
    Key("deepspeed_config.gradient_clipping", "`clip`", _deepspeed(_clip)),
    Key(CONFIG_FILE, "`plan.strategy=deepspeed`, and the file's own keys as below", _deepspeed(_config_file)),
    *_deepspeed_unused("nothing is moved to a disk", "offload_optimizer_nvme_path", "offload_param_nvme_path"),
    *_deepspeed_unused("each process makes the full model, then shards it", "zero3_init_flag"),
    *_deepspeed_unused("the finished model is always saved unsharded", "zero3_save_16bit_model"),
    *_deepspeed_unused("the repeated blocks of a model are found", "deepspeed_moe_layer_cls_names"),
    *_deepspeed_unused("machines find each other through --rendezvous: run the same command on each", "deepspeed_multinode_launcher", "deepspeed_hostfile",
                       "deepspeed_inclusion_filter", "deepspeed_exclusion_filter"),
    *unused_keys("processes share the data only: no tensor, context or sequence parallelism", "parallelism_config.*"),
    *unused_keys("there is no Megatron-LM here; fsdp and deepspeed share a model (plan.strategy)", "megatron_lm_config.*"),
    *unused_keys("there is no fp8 among precision's", "fp8_config.*"),
    *unused_keys("processes are started without mpirun", "mpirun_config.*"),
    *unused_keys("there are no TPUs among the devices", "downcast_bf16", "tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "tpu_vm",
            "tpu_env", "command_file", "commands"),
]  # fmt: skip


def deepspeed_file(content: Mapping[Any, Any]) -> str:
    """Returns the DeepSpeed file that an accelerate configuration names and would use; "" if there is none."""
    group = content.get("deepspeed_config")
    name = group.get("deepspeed_config_file") if isinstance(group, Mapping) else None
    return str(name) if name and distributed_type(content) == "DEEPSPEED" else ""


def read_into(draft: Draft, content: Mapping[Any, Any], inner: Mapping[Any, Any] | None, inner_name: str) -> None:
    """Reads an accelerate configuration into the draft, and the DeepSpeed file (`inner`) that it may name."""
    if content.get("compute_environment", "LOCAL_MACHINE") == "AMAZON_SAGEMAKER":
        raise Problem(
            f"{draft.file} is for Amazon SageMaker, which drivetrain does not start: make one for this machine (accelerate config)"
        )
    also: dict[str, Any] = {}
    if inner is not None:
        also[STAGE] = deepspeed.zero_stage(deepspeed.read_into(draft, inner, f"{inner_name}: "))
    values = draft.read(content, KEYS, also=also)
    shardings = [values.get(f"fsdp_config.fsdp_{key}") for key in ("reshard_after_forward", "sharding_strategy")]
    if distributed_type(values) == "FSDP" and any(str(word).upper().startswith("HYBRID") or word in (4, 5) for word in shardings):
        draft.notes.append("a hybrid sharding stays within a machine; fsdp here shards over all processes")
