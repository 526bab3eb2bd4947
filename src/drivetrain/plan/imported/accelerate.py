"""accelerate's default_config.yaml: what each of its keys becomes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drivetrain.outcomes import Problem
from drivetrain.plan.imported import deepspeed
from drivetrain.plan.imported.deepspeed import NOTHING_SHARDED
from drivetrain.plan.imported.keys import REQUEST, Draft, Key, Rule, Use, Values, flag, look, number, unused
from drivetrain.settings import coerce, read_type

PORT = 29500  # accelerate's own, where the file names none
CONFIG_FILE = "deepspeed_config.deepspeed_config_file"
STAGE = "deepspeed_config.zero_stage"
OTHER_DEVICES = ("XLA", *(f"MULTI_{name}" for name in ("NPU", "MLU", "SDAA", "MUSA", "XPU", "HPU", "NEURON")))
SHARDINGS = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "HYBRID_SHARD": 3, "HYBRID_SHARD_ZERO2": 2}


def kind(said: Values) -> str:
    """The file's distributed_type; `NO` without quotes is YAML's word for false."""
    value = said.get("distributed_type", "NO")
    return "NO" if value is False else str(value).upper()


def _count(value: Any) -> int:
    return int(coerce(read_type(REQUEST["nodes"]), value))


def machines(said: Values) -> int:
    return look(said, "num_machines", _count, 1)


def _distributed_type(value: Any, said: Values) -> Use | str:
    word = kind(said)
    if word == "NO":
        return Use("request", "procs", 1)
    if word == "MULTI_CPU":
        return Use("request", "device", "cpu")
    if word == "MULTI_GPU":
        return _replicated(said)
    if word == "FSDP":
        return Use("pins", "strategy", "fsdp") if fsdp_stage(said) else _replicated(said)
    if word == "DEEPSPEED":
        return Use("pins", "strategy", "deepspeed") if deepspeed_stage(said) else _replicated(said)
    if word in OTHER_DEVICES:
        return "devices are NVIDIA's and AMD's GPUs and CPUs (--device)"
    if word in ("MEGATRON_LM", "TP"):
        return "processes share the data, and the model by fsdp or deepspeed (plan.strategy)"
    known = ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP", "DEEPSPEED", "MEGATRON_LM", "TP", *OTHER_DEVICES)
    raise ValueError(f"one of {', '.join(known)}")


def _replicated(said: Values) -> Use | str:
    """DDP where there are processes to share the work, which one alone has not."""
    several = look(said, "num_processes", number, 2) != 1
    return Use("pins", "strategy", "ddp") if several else "one process has nobody to share with"


def _procs(value: Any, said: Values) -> Use | str:
    total, nodes = number(value), machines(said)
    if total == -1:
        return "-1 leaves it to the launcher"
    if total % nodes:
        raise ValueError(f"the processes of all machines together, a multiple of num_machines ({nodes})")
    return Use("request", "procs", total // nodes)


def _machine_rank(value: Any, said: Values) -> Use | str:
    return Use("request", "node_rank", value) if machines(said) > 1 else "one machine needs no number"


def _rendezvous(value: Any, said: Values) -> Use | str:
    if machines(said) == 1:
        return "the processes of one machine find each other"
    host = said.get("main_process_ip")
    port = look(said, "main_process_port", number, PORT)
    return Use("request", "rendezvous", f"{host}:{port}") if host else "main_process_ip is missing"


def _gpus(value: Any, said: Values) -> Use | str:
    return "all is what happens without" if str(value).strip() == "all" else Use("request", "gpus", str(value).replace(" ", ""))


def _use_cpu(value: Any, said: Values) -> Use | str:
    return Use("request", "device", "cpu") if flag(value) else "false: GPUs are used where there are any"


def _mixed_precision(value: Any, said: Values) -> Use | str:
    word = "no" if value is False else str(value).lower()  # `no` without quotes is YAML's word for false
    if word == "fp8":
        return "there is no fp8 among precision's (fp32, tf32, bf16, fp16): the recipe's holds"
    if word not in ("no", "fp16", "bf16"):
        raise ValueError("one of no, fp16, bf16, fp8")
    return Use("settings", "precision", "fp32" if word == "no" else word)


def _old_fp16(value: Any, said: Values) -> Use | str:
    return Use("settings", "precision", "fp16") if flag(value) else "mixed_precision says it"


def _dynamo(value: Any, said: Values) -> Use | str:
    word = "NO" if value is False else str(value).upper()
    if word == "CUDAGRAPHS":
        return Use("pins", "capture", "on")
    if word in ("NO", "INDUCTOR"):
        return Use("pins", "compile", "off" if word == "NO" else "on")
    return f"there is no backend {value}: plan.compile is torch's inductor, or off"


# --- FSDP --------------------------------------------------------------------------------------


def fsdp_stage(said: Values) -> int:
    """3 where parameters are sharded too, 2 where they stay after the forward pass, 0 where nothing is sharded."""
    keys = [f"fsdp_config.fsdp_{key}" for key in ("reshard_after_forward", "sharding_strategy")]
    return look(said, next((key for key in keys if key in said), ""), _shards, "FULL_SHARD")


def _shards(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= len(SHARDINGS):
        return list(SHARDINGS.values())[value - 1]  # the number torch gives each
    word = str(value).upper()
    if word in SHARDINGS:
        return SHARDINGS[word]
    try:
        return 3 if flag(value) else 2
    except ValueError:
        raise ValueError(f"true or false, or one of {', '.join(SHARDINGS)}") from None


def _fsdp(rule: Rule) -> Rule:
    """A rule that counts where accelerate would shard by FSDP."""

    def only(value: Any, said: Values) -> Use | str:
        if kind(said) != "FSDP":
            return f"distributed_type is {kind(said)}, not FSDP"
        return rule(value, said)

    return only


def _sharding(value: Any, said: Values) -> Use | str:
    stage = _shards(value)
    return Use("pins", "zero_stage", stage) if stage else NOTHING_SHARDED


def _fsdp_offload(value: Any, said: Values) -> Use | str:
    return Use("pins", "offload", "all" if flag(value) else "none") if fsdp_stage(said) else NOTHING_SHARDED


def _activation_checkpointing(value: Any, said: Values) -> Use | str:
    return Use("pins", "activation_checkpointing", value)


def _fsdp_unused(why: str, *keys: str) -> list[Key]:
    return unused(why, *(f"fsdp_config.fsdp_{key}" for key in keys))


# --- DeepSpeed ---------------------------------------------------------------------------------


def deepspeed_stage(said: Values) -> int:
    return look(said, STAGE, number, 2)  # accelerate's default


def _deepspeed(rule: Rule) -> Rule:
    """A rule that counts where accelerate would shard by DeepSpeed."""

    def only(value: Any, said: Values) -> Use | str:
        if kind(said) != "DEEPSPEED":
            return f"distributed_type is {kind(said)}, not DEEPSPEED"
        return rule(value, said)

    return only


def _stage(value: Any, said: Values) -> Use | str:
    return Use("pins", "zero_stage", value) if number(value) else NOTHING_SHARDED


def _offload(part: str) -> Rule:
    def rule(value: Any, said: Values) -> Use | str:
        optimizer, param = (said.get(f"deepspeed_config.offload_{p}_device", "none") for p in ("optimizer", "param"))
        stage = deepspeed_stage(said)
        return deepspeed.offload_use(value, part, deepspeed.offload_of(optimizer, param, stage), stage)

    return rule


def _accumulation(value: Any, said: Values) -> Use | str:
    steps = number(value)
    return Use("pins", "accumulation", steps) if steps > 1 else "1 is where a plan begins: a share that does not fit is split"


def _clip(value: Any, said: Values) -> Use | str:
    return Use("settings", "clip", value)


def _config_file(value: Any, said: Values) -> Use | str:
    return Use("pins", "strategy", "deepspeed") if deepspeed_stage(said) else NOTHING_SHARDED


def _deepspeed_unused(why: str, *keys: str) -> list[Key]:
    return unused(why, *(f"deepspeed_config.{key}" for key in keys))


KEYS: list[Key] = [
    Key("distributed_type", "`plan.strategy` (MULTI_GPU ddp, FSDP fsdp, DEEPSPEED deepspeed), `--procs 1` (NO) or `--device cpu` (MULTI_CPU)",
        _distributed_type),
    Key("num_processes", "`--procs`, divided by num_machines", _procs),
    Key("num_machines", "`--nodes`", lambda value, said: Use("request", "nodes", value)),
    Key("machine_rank", "`--node-rank`, with several machines", _machine_rank),
    Key("main_process_ip", "`--rendezvous`, with several machines", _rendezvous),
    Key("main_process_port", "`--rendezvous`, with several machines", _rendezvous),
    Key("gpu_ids", "`--gpus`, unless all", _gpus),
    Key("use_cpu", "`--device cpu` where it is true", _use_cpu),
    Key("mixed_precision", "`precision` (no: fp32; fp8: not used)", _mixed_precision),
    Key("fp16", "`precision=fp16` (files of old versions)", _old_fp16),
    *unused("where a run executes is said on the command line", "compute_environment"),
    *unused("machines meet at --rendezvous, in drivetrain's own way", "rdzv_backend", "same_network"),
    *unused("a task is a class, not a script with a function", "main_training_function"),
    *unused("TORCH_DISTRIBUTED_DEBUG=DETAIL asks torch for such checks", "debug"),
    *unused("processes are not bound to cores; plan.threads says how many each uses", "enable_cpu_affinity"),
    Key("dynamo_config.dynamo_backend", "`plan.compile` (INDUCTOR on, NO off) or `plan.capture` (CUDAGRAPHS)", _dynamo),
    Key("dynamo_backend", "the same (files of old versions)", _dynamo),
    *unused("CUDA graphs are plan.capture, tried by itself", "dynamo_config.dynamo_mode"),
    *unused("shapes are fixed, and what cannot be compiled runs as it is", "dynamo_config.dynamo_use_fullgraph", "dynamo_config.dynamo_use_dynamic"),
    *unused("a deep model is compiled block by block anyway", "dynamo_config.dynamo_use_regional_compilation"),
    Key("fsdp_config.fsdp_reshard_after_forward", "`plan.zero_stage` (true or FULL_SHARD 3, false or SHARD_GRAD_OP 2)", _fsdp(_sharding)),
    Key("fsdp_config.fsdp_sharding_strategy", "`plan.zero_stage` (FULL_SHARD 3, SHARD_GRAD_OP 2; hybrid ones shard over all processes)",
        _fsdp(_sharding)),
    Key("fsdp_config.fsdp_offload_params", "`plan.offload` (true: all)", _fsdp(_fsdp_offload)),
    Key("fsdp_config.fsdp_activation_checkpointing", "`plan.activation_checkpointing`", _fsdp(_activation_checkpointing)),
    *_fsdp_unused("FSDP2 (fully_shard) runs either", "version", "use_orig_params"),
    *_fsdp_unused("the repeated blocks of a model are found and wrapped", "auto_wrap_policy", "transformer_layer_cls_to_wrap", "min_num_params"),
    *_fsdp_unused("runs write checkpoints and the finished model in a form of their own", "state_dict_type"),
    *_fsdp_unused("FSDP2 prefetches by itself", "backward_prefetch", "backward_prefetch_policy", "forward_prefetch"),
    *_fsdp_unused("every process makes the same weights, from the seed or the file", "cpu_ram_efficient_loading", "sync_module_states"),
    *_fsdp_unused("activations are computed again, not moved", "activation_checkpointing_offload"),
    Key(STAGE, "`plan.zero_stage`; 0 leaves it open", _deepspeed(_stage)),
    Key("deepspeed_config.offload_optimizer_device", "`plan.offload=optimizer` where it is cpu", _deepspeed(_offload("optimizer"))),
    Key("deepspeed_config.offload_param_device", "`plan.offload=all` where it is cpu, at stage 3", _deepspeed(_offload("param"))),
    Key("deepspeed_config.gradient_accumulation_steps", "`plan.accumulation`, unless 1", _deepspeed(_accumulation)),
    Key("deepspeed_config.gradient_clipping", "`clip`", _deepspeed(_clip)),
    Key(CONFIG_FILE, "`plan.strategy=deepspeed`, and the file's own keys as below", _deepspeed(_config_file)),
    *_deepspeed_unused("nothing is moved to a disk", "offload_optimizer_nvme_path", "offload_param_nvme_path"),
    *_deepspeed_unused("a model is made whole, then sharded", "zero3_init_flag"),
    *_deepspeed_unused("the finished model is always saved whole", "zero3_save_16bit_model"),
    *_deepspeed_unused("the repeated blocks of a model are found", "deepspeed_moe_layer_cls_names"),
    *_deepspeed_unused("machines meet at --rendezvous: run the same command on each", "deepspeed_multinode_launcher", "deepspeed_hostfile",
                       "deepspeed_inclusion_filter", "deepspeed_exclusion_filter"),
    *unused("processes share the data only: no tensor, context or sequence parallelism", "parallelism_config.*"),
    *unused("there is no Megatron-LM here; fsdp and deepspeed share a model (plan.strategy)", "megatron_lm_config.*"),
    *unused("there is no fp8 among precision's", "fp8_config.*"),
    *unused("processes are started without mpirun", "mpirun_config.*"),
    *unused("there are no TPUs among the devices", "downcast_bf16", "tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "tpu_vm",
            "tpu_env", "command_file", "commands"),
]  # fmt: skip


def deepspeed_file(values: Mapping[Any, Any]) -> str:
    """The file of DeepSpeed's that an accelerate configuration points to and would use; "" where there is none."""
    group = values.get("deepspeed_config")
    named = group.get("deepspeed_config_file") if isinstance(group, Mapping) else None
    return str(named) if named and kind(values) == "DEEPSPEED" else ""


def take(draft: Draft, values: Mapping[Any, Any], inner: Mapping[Any, Any] | None, inner_name: str) -> None:
    """An accelerate configuration into the draft, and the DeepSpeed one (`inner`) it may point to."""
    if values.get("compute_environment", "LOCAL_MACHINE") == "AMAZON_SAGEMAKER":
        raise Problem(
            f"{draft.file} is for Amazon SageMaker, which drivetrain does not start: make one for this machine (accelerate config)"
        )
    also: dict[str, Any] = {}
    if inner is not None:
        also[STAGE] = deepspeed.stage(deepspeed.take(draft, inner, f"{inner_name}: "))
    said = draft.walk(values, KEYS, also=also)
    sharding = [said.get(f"fsdp_config.fsdp_{key}") for key in ("reshard_after_forward", "sharding_strategy")]
    if kind(said) == "FSDP" and any(str(word).upper().startswith("HYBRID") or word in (4, 5) for word in sharding):
        draft.notes.append("a hybrid sharding stays within a machine; fsdp here shards over all processes")
