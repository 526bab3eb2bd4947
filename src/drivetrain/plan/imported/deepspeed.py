"""DeepSpeed's configuration (ds_config.json): what each of its keys becomes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drivetrain.plan.imported.keys import Draft, Key, Rule, Use, Values, flag, left_open, look, nested, number, pin, setting, unused
from drivetrain.settings import coerce

STAGE = "zero_optimization.stage"
MICRO, STEPS, BATCH = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"
NOTHING_SHARDED = "nothing is sharded: the plan replicates the model by itself"
OWN_SCALE = "the scale of fp16's loss is chosen and kept by the engine"
OWN_OPTIMIZER = "a task's own optimizer() sets it"
OPTIMIZERS = {"adamw": "adamw", "adam": "adamw", "sgd": "sgd"}
SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}

# Keys that change only how DeepSpeed does its part, not what is computed: it gets them as they stand.
TUNING = (
    *(
        f"zero_optimization.{key}"
        for key in (
            "contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "use_multi_rank_bucket_allreduce", "allgather_partitions",
            "allgather_bucket_size", "overlap_comm", "round_robin_gradients", "sub_group_size", "stage3_prefetch_bucket_size",
            "stage3_param_persistence_threshold", "stage3_model_persistence_threshold", "stage3_max_live_parameters",
            "stage3_max_reuse_distance", "stage3_module_granularity_threshold", "stage3_use_all_reduce_for_fetch_params",
            "memory_efficient_linear", "ignore_unused_parameters", "log_trace_cache_warnings",
        )
    ),
    *(f"zero_optimization.offload_optimizer.{key}" for key in ("buffer_count", "fast_init", "pipeline_read", "pipeline_write", "ratio")),
    *(f"zero_optimization.offload_param.{key}" for key in ("buffer_count", "buffer_size", "max_in_cpu")),
    "disable_allgather", "wall_clock_breakdown", "memory_breakdown", "dump_state",
    *(f"flops_profiler.{key}" for key in ("enabled", "profile_step", "module_depth", "top_modules", "detailed", "output_file")),
    *(f"comms_logger.{key}" for key in ("enabled", "verbose", "prof_all", "prof_ops", "debug")),
)  # fmt: skip


def stage(said: Values) -> int:
    return look(said, STAGE, number, 0)


def _stage(value: Any, said: Values) -> Use | str:
    return Use("pins", "zero_stage", value) if number(value) else NOTHING_SHARDED


def _through(key: str) -> Key:
    def rule(value: Any, said: Values) -> Use | str:
        return Use("pins", "deepspeed_config", nested(key, value)) if stage(said) else NOTHING_SHARDED

    return Key(key, "`plan.deepspeed_config`, as it stands", rule)


def offload_of(optimizer: Any, param: Any, zero_stage: int) -> str:
    """The plan's word for what DeepSpeed moves to the host."""
    if param == "cpu" and zero_stage == 3:
        return "all"
    return "optimizer" if optimizer == "cpu" else "none"


def offload_use(value: Any, part: str, offload: str, zero_stage: int) -> Use | str:
    """What `device: VALUE` of the optimizer's or the parameters' offload becomes, where both together mean `offload`."""
    if value not in ("cpu", "none", "nvme"):
        raise ValueError("one of none, cpu, nvme")
    if value == "nvme":
        return "nothing is moved to a disk: plan.offload knows the host's memory (optimizer, all)"
    if value == "none" and offload != "none":
        return f"the other key says plan.offload={offload}"
    if value == "cpu" and part == "param" and zero_stage != 3:
        return "parameters are sharded, and can be moved, at stage 3 only"
    return Use("pins", "offload", offload) if zero_stage else NOTHING_SHARDED


def _offload(part: str) -> Rule:
    def rule(value: Any, said: Values) -> Use | str:
        optimizer = said.get("zero_optimization.offload_optimizer.device", "cpu" if _old(said, "cpu_offload") else "none")
        param = said.get("zero_optimization.offload_param.device", "cpu" if _old(said, "cpu_offload_param") else "none")
        word = {True: "cpu", False: "none"}.get(value, value) if isinstance(value, bool) else value
        return offload_use(word, part, offload_of(optimizer, param, stage(said)), stage(said))

    return rule


def _old(said: Values, key: str) -> bool:
    return look(said, f"zero_optimization.{key}", flag, False)


def _precision(mine: str, other: str) -> Rule:
    def rule(value: Any, said: Values) -> Use | str:
        also = look(said, f"{other}.enabled", flag, False)
        if flag(value):
            if also:
                raise ValueError(f"on for one of fp16 and bf16 only: turn {other} off")
            return Use("settings", "precision", mine)
        if also:
            return f"{other} is on"
        if left_open(said, f"{other}.enabled"):
            return f"{other} is left open (auto)"
        return Use("settings", "precision", "fp32")

    return rule


def _autocast(value: Any, said: Values) -> Use | str:
    if not look(said, "torch_autocast.enabled", flag, False):
        return "torch_autocast is off"
    names = {"bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "fp16": "fp16", "half": "fp16", "float32": "fp32", "fp32": "fp32"}
    word = str(value).removeprefix("torch.")
    if word not in names:
        raise ValueError("one of bfloat16, float16, float32")
    return Use("settings", "precision", names[word])


def _accumulation(value: Any, said: Values) -> Use | str:
    steps = number(value)
    if MICRO in said:
        return f"follows from global_batch, plan.micro_batch={said[MICRO]} and the number of processes"
    if steps == 1:
        return "1 is where a plan begins: a share that does not fit is split"
    return Use("pins", "accumulation", steps)


def _optim(value: Any, said: Values) -> Use | str:
    word = str(value).lower()
    if word == "adam" and not look(said, "optimizer.params.adam_w_mode", flag, True):
        return Use("settings", "optim", "adam")
    if word not in OPTIMIZERS:
        return f"there is no optimizer {value} among optim's (adamw, adam, sgd): the recipe's holds; a task's own optimizer() may return it"
    return Use("settings", "optim", OPTIMIZERS[word])


def _adam_w_mode(value: Any, said: Values) -> Use | str:
    kind = said.get("optimizer.type")
    return _optim(kind, said) if str(kind).lower() == "adam" else "says something for the optimizer Adam only"


def _rate(value: Any) -> float:
    return float(coerce(float, value))


def _learning_rate(value: Any, said: Values) -> Use | str:
    peak = look(said, "scheduler.params.warmup_max_lr", _rate, value)
    if peak != _rate(value):
        return f"the schedule's warmup_max_lr={peak} is the peak"
    return Use("settings", "learning_rate", value)


def _decay(value: Any, said: Values) -> Use | str:
    word = str(value)
    if word not in SCHEDULES:
        return (
            f"there is no schedule {value} among decay's (cosine, linear, constant): the recipe's holds; a task's own schedule() may be it"
        )
    return Use("settings", "decay", SCHEDULES[word])


def _checkpointing(value: Any, said: Values) -> Use | str:
    return Use("pins", "activation_checkpointing", True) if flag(value) else "false asks for nothing"


KEYS: list[Key] = [
    setting(BATCH, "global_batch"),
    pin(MICRO, "micro_batch"),
    Key(STEPS, f"`plan.accumulation`; not used beside {MICRO}, or when 1", _accumulation),
    setting("gradient_clipping", "clip"),
    Key("fp16.enabled", "`precision` (fp16; fp32 where neither fp16 nor bf16 is on)", _precision("fp16", "bf16")),
    Key("bf16.enabled", "`precision` (bf16)", _precision("bf16", "fp16")),
    Key("bfloat16.enabled", "`precision` (bf16)", _precision("bf16", "fp16")),
    *unused(OWN_SCALE, *(f"fp16.{key}" for key in (
        "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis", "min_loss_scale"))),
    *unused("precision says the number format; the engine does the rest", "fp16.*", "bf16.*", "bfloat16.*", "data_types.*"),
    *unused("its dtype says it", "torch_autocast.enabled"),
    Key("torch_autocast.dtype", "`precision`", _autocast),
    *unused("torch chooses what is safe in half precision", "torch_autocast.*"),
    Key(STAGE, "`plan.zero_stage`, with `plan.strategy=deepspeed`; 0 leaves both open", _stage),
    Key("zero_optimization.offload_optimizer.device", "`plan.offload=optimizer` where it is cpu", _offload("optimizer")),
    Key("zero_optimization.offload_param.device", "`plan.offload=all` where it is cpu, at stage 3", _offload("param")),
    Key("zero_optimization.cpu_offload", "`plan.offload=optimizer`", _offload("optimizer")),
    Key("zero_optimization.cpu_offload_param", "`plan.offload=all`, at stage 3", _offload("param")),
    *unused("what is moved to a GPU's host lies in pinned memory anyway", "zero_optimization.offload_optimizer.pin_memory",
            "zero_optimization.offload_param.pin_memory", "zero_optimization.cpu_offload_use_pin_memory"),
    *unused("nothing is moved to a disk", "zero_optimization.offload_optimizer.nvme_path", "zero_optimization.offload_param.nvme_path", "aio.*"),
    *unused("runs write checkpoints and the finished model in a form of their own", "zero_optimization.load_from_fp32_weights",
            "zero_optimization.elastic_checkpoint", "zero_optimization.stage3_gather_16bit_weights_on_model_save",
            "zero_optimization.stage3_gather_fp16_weights_on_model_save", "checkpoint.*"),
    *unused("it changes the numbers, which a plan never does", "zero_optimization.zero_quantized_weights",
            "zero_optimization.zero_quantized_gradients", "zero_optimization.zero_quantized_nontrainable_weights", "compression_training.*",
            "communication_data_type", "seq_parallel_communication_data_type"),
    *(_through(key) for key in TUNING),
    Key("optimizer.type", "`optim` (DeepSpeed's Adam is AdamW unless adam_w_mode is false)", _optim),
    Key("optimizer.params.lr", "`learning_rate`, unless the schedule has a peak of its own", _learning_rate),
    setting("optimizer.params.weight_decay", "weight_decay"),
    setting("optimizer.params.momentum", "momentum"),
    Key("optimizer.params.adam_w_mode", "`optim` (false: adam), with the type Adam", _adam_w_mode),
    *unused(OWN_OPTIMIZER, "optimizer.params.*", "optimizer.legacy_fusion"),
    Key("scheduler.type", "`decay` (WarmupLR constant, WarmupDecayLR linear, WarmupCosineLR cosine)", _decay),
    setting("scheduler.params.warmup_num_steps", "warmup"),
    setting("scheduler.params.warmup_max_lr", "learning_rate"),
    *unused("a schedule ends with its run: epochs or steps", "scheduler.params.total_num_steps"),
    *unused("the warm-up rises from 0 in a straight line", "scheduler.params.warmup_min_lr", "scheduler.params.warmup_min_ratio",
            "scheduler.params.warmup_type"),
    *unused("a task's own schedule() sets it", "scheduler.params.*"),
    Key("activation_checkpointing.partition_activations", "`plan.activation_checkpointing` where it is true", _checkpointing),
    *unused("blocks are checkpointed one by one, where they are", "activation_checkpointing.*"),
    *unused("log_every says when a row is logged", "steps_per_print"),
    *unused("a run's metrics have observers of their own", "tensorboard.*", "wandb.*", "csv_monitor.*", "comet.*", "monitor_config.*"),
    *unused("gradients are the mean over the global batch's samples", "prescale_gradients", "gradient_predivide_factor",
            "sparse_gradients", "gradient_allreduce_op"),
    *unused("the engine makes the optimizer", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
    *unused("the plan chooses micro-batches; processes may change at a resume", "autotuning.*", "elasticity.*"),
    *unused("the data order is drivetrain's", "dataloader_drop_last", "data_efficiency.*", "curriculum_learning.*"),
    *unused("the last partial batch counts in full", "managed_gradient_accumulation"),
    *unused("processes share the data only", "pipeline.*", "tensor_parallel.*", "sequence_parallel_size"),
]  # fmt: skip


def take(draft: Draft, values: Mapping[Any, Any], prefix: str = "") -> Values:
    """A DeepSpeed configuration into the draft."""
    said = draft.walk(values, KEYS, prefix)
    if stage(said):
        draft.pins["strategy"] = "deepspeed"
    if MICRO in said and STEPS in said and BATCH not in said:
        each = number(said[MICRO]) * number(said[STEPS])
        draft.notes.append(
            f"DeepSpeed's global batch is {said[MICRO]} x {said[STEPS]} x processes; the recipe's holds here: global_batch={each} times them"
        )
    return said
