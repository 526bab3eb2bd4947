"""Rules for DeepSpeed's configuration (ds_config.json): takes its keys, returns pins and settings (in a `Draft`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drivetrain.plan.imported.keys import (
    Destination,
    Draft,
    Key,
    Rule,
    Values,
    as_bool,
    as_int,
    is_auto,
    nested,
    pin,
    setting,
    unused_keys,
    value_of,
)
from drivetrain.settings import coerce

STAGE = "zero_optimization.stage"
MICRO_BATCH, ACCUMULATION, GLOBAL_BATCH = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"
NOTHING_SHARDED = "nothing is sharded: the plan replicates the model by itself"
OWN_SCALE = "the engine chooses fp16's loss scale"
OWN_OPTIMIZER = "a task's own optimizer() sets it"
OPTIMIZERS = {"adamw": "adamw", "adam": "adamw", "sgd": "sgd"}
SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}

# Keys that change how fast DeepSpeed runs, not what it computes: they are passed to it unchanged.
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


def zero_stage(values: Values) -> int:
    return value_of(values, STAGE, as_int, 0)


def _stage(value: Any, values: Values) -> Destination | str:
    return Destination("pins", "zero_stage", value) if as_int(value) else NOTHING_SHARDED


def _passed_to_deepspeed(key: str) -> Key:
    def rule(value: Any, values: Values) -> Destination | str:
        return Destination("pins", "deepspeed_config", nested(key, value)) if zero_stage(values) else NOTHING_SHARDED

    return Key(key, "`plan.deepspeed_config`, unchanged", rule)


def offload_of(optimizer: Any, param: Any, stage: int) -> str:
    """Returns the plan's offload for what DeepSpeed moves to the host."""
    if param == "cpu" and stage == 3:
        return "all"
    return "optimizer" if optimizer == "cpu" else "none"


def offload_destination(value: Any, part: str, offload: str, stage: int) -> Destination | str:
    """Returns what `device: VALUE` of one part (optimizer or param) becomes, where both parts together mean `offload`."""
    if value not in ("cpu", "none", "nvme"):
        raise ValueError("one of none, cpu, nvme")
    if value == "nvme":
        return "nothing is moved to a disk: plan.offload knows the host's memory (optimizer, all)"
    if value == "none" and offload != "none":
        return f"the other key says plan.offload={offload}"
    if value == "cpu" and part == "param" and stage != 3:
        return "parameters are sharded, and can be moved, at stage 3 only"
    return Destination("pins", "offload", offload) if stage else NOTHING_SHARDED


def _offload(part: str) -> Rule:
    def rule(value: Any, values: Values) -> Destination | str:
        optimizer = values.get("zero_optimization.offload_optimizer.device", "cpu" if _old_flag(values, "cpu_offload") else "none")
        param = values.get("zero_optimization.offload_param.device", "cpu" if _old_flag(values, "cpu_offload_param") else "none")
        word = {True: "cpu", False: "none"}.get(value, value) if isinstance(value, bool) else value
        return offload_destination(word, part, offload_of(optimizer, param, zero_stage(values)), zero_stage(values))

    return rule


def _old_flag(values: Values, key: str) -> bool:
    return value_of(values, f"zero_optimization.{key}", as_bool, False)


def _precision(name: str, other: str) -> Rule:
    def rule(value: Any, values: Values) -> Destination | str:
        is_other_on = value_of(values, f"{other}.enabled", as_bool, False)
        if as_bool(value):
            if is_other_on:
                raise ValueError(f"on for one of fp16 and bf16 only: turn {other} off")
            return Destination("settings", "precision", name)
        if is_other_on:
            return f"{other} is on"
        if is_auto(values, f"{other}.enabled"):
            return f"{other} is left open (auto)"
        return Destination("settings", "precision", "fp32")

    return rule


def _autocast(value: Any, values: Values) -> Destination | str:
    if not value_of(values, "torch_autocast.enabled", as_bool, False):
        return "torch_autocast is off"
    names = {"bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "fp16": "fp16", "half": "fp16", "float32": "fp32", "fp32": "fp32"}
    word = str(value).removeprefix("torch.")
    if word not in names:
        raise ValueError("one of bfloat16, float16, float32")
    return Destination("settings", "precision", names[word])


def _accumulation(value: Any, values: Values) -> Destination | str:
    steps = as_int(value)
    if MICRO_BATCH in values:
        return f"follows from global_batch, plan.micro_batch={values[MICRO_BATCH]} and the number of processes"
    if steps == 1:
        return "1 is where a plan begins: a share that does not fit is split"
    return Destination("pins", "accumulation", steps)


def _optim(value: Any, values: Values) -> Destination | str:
    word = str(value).lower()
    if word == "adam" and not value_of(values, "optimizer.params.adam_w_mode", as_bool, True):
        return Destination("settings", "optim", "adam")
    if word not in OPTIMIZERS:
        return f"there is no optimizer {value} among optim's (adamw, adam, sgd): the recipe's holds; a task's own optimizer() may return it"
    return Destination("settings", "optim", OPTIMIZERS[word])


def _adam_w_mode(value: Any, values: Values) -> Destination | str:
    kind = values.get("optimizer.type")
    return _optim(kind, values) if str(kind).lower() == "adam" else "says something for the optimizer Adam only"


def _rate(value: Any) -> float:
    return float(coerce(float, value))


def _learning_rate(value: Any, values: Values) -> Destination | str:
    peak = value_of(values, "scheduler.params.warmup_max_lr", _rate, value)
    if peak != _rate(value):
        return f"the schedule's warmup_max_lr={peak} is the peak"
    return Destination("settings", "learning_rate", value)


def _decay(value: Any, values: Values) -> Destination | str:
    word = str(value)
    if word not in SCHEDULES:
        return f"decay has no schedule {value}: the recipe's decay is used; a task's own schedule() may define it"
    return Destination("settings", "decay", SCHEDULES[word])


def _checkpointing(value: Any, values: Values) -> Destination | str:
    return Destination("pins", "activation_checkpointing", True) if as_bool(value) else "false asks for nothing"


KEYS: list[Key] = [
    setting(GLOBAL_BATCH, "global_batch"),
    pin(MICRO_BATCH, "micro_batch"),
    Key(ACCUMULATION, f"`plan.accumulation`; not used beside {MICRO_BATCH}, or when 1", _accumulation),
    setting("gradient_clipping", "clip"),
    Key("fp16.enabled", "`precision` (fp16; fp32 where neither fp16 nor bf16 is on)", _precision("fp16", "bf16")),
    Key("bf16.enabled", "`precision` (bf16)", _precision("bf16", "fp16")),
    Key("bfloat16.enabled", "`precision` (bf16)", _precision("bf16", "fp16")),
    *unused_keys(OWN_SCALE, *(f"fp16.{key}" for key in (
        "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis", "min_loss_scale"))),
    *unused_keys("precision says the number format; the engine does the rest", "fp16.*", "bf16.*", "bfloat16.*", "data_types.*"),
    *unused_keys("its dtype says it", "torch_autocast.enabled"),
    Key("torch_autocast.dtype", "`precision`", _autocast),
    *unused_keys("torch chooses what is safe in half precision", "torch_autocast.*"),
    Key(STAGE, "`plan.zero_stage`, with `plan.strategy=deepspeed`; 0 leaves both open", _stage),
    Key("zero_optimization.offload_optimizer.device", "`plan.offload=optimizer` where it is cpu", _offload("optimizer")),
    Key("zero_optimization.offload_param.device", "`plan.offload=all` where it is cpu, at stage 3", _offload("param")),
    Key("zero_optimization.cpu_offload", "`plan.offload=optimizer`", _offload("optimizer")),
    Key("zero_optimization.cpu_offload_param", "`plan.offload=all`, at stage 3", _offload("param")),
    *unused_keys("offloaded state is always in pinned memory", "zero_optimization.offload_optimizer.pin_memory",
            "zero_optimization.offload_param.pin_memory", "zero_optimization.cpu_offload_use_pin_memory"),
    *unused_keys("nothing is moved to a disk", "zero_optimization.offload_optimizer.nvme_path", "zero_optimization.offload_param.nvme_path", "aio.*"),
    *unused_keys("runs write checkpoints and the finished model in a form of their own", "zero_optimization.load_from_fp32_weights",
            "zero_optimization.elastic_checkpoint", "zero_optimization.stage3_gather_16bit_weights_on_model_save",
            "zero_optimization.stage3_gather_fp16_weights_on_model_save", "checkpoint.*"),
    *unused_keys("it changes the numbers, which a plan never does", "zero_optimization.zero_quantized_weights",
            "zero_optimization.zero_quantized_gradients", "zero_optimization.zero_quantized_nontrainable_weights", "compression_training.*",
            "communication_data_type", "seq_parallel_communication_data_type"),
    *(_passed_to_deepspeed(key) for key in TUNING),
    Key("optimizer.type", "`optim` (DeepSpeed's Adam is AdamW unless adam_w_mode is false)", _optim),
    Key("optimizer.params.lr", "`learning_rate`, unless the schedule has a peak of its own", _learning_rate),
    setting("optimizer.params.weight_decay", "weight_decay"),
    setting("optimizer.params.momentum", "momentum"),
    Key("optimizer.params.adam_w_mode", "`optim` (false: adam), with the type Adam", _adam_w_mode),
    *unused_keys(OWN_OPTIMIZER, "optimizer.params.*", "optimizer.legacy_fusion"),
    Key("scheduler.type", "`decay` (WarmupLR constant, WarmupDecayLR linear, WarmupCosineLR cosine)", _decay),
    setting("scheduler.params.warmup_num_steps", "warmup"),
    setting("scheduler.params.warmup_max_lr", "learning_rate"),
    *unused_keys("a schedule ends with its run: epochs or steps", "scheduler.params.total_num_steps"),
    *unused_keys("the warm-up rises from 0 in a straight line", "scheduler.params.warmup_min_lr", "scheduler.params.warmup_min_ratio",
            "scheduler.params.warmup_type"),
    *unused_keys("a task's own schedule() sets it", "scheduler.params.*"),
    Key("activation_checkpointing.partition_activations", "`plan.activation_checkpointing` where it is true", _checkpointing),
    *unused_keys("blocks are checkpointed one by one, where they are", "activation_checkpointing.*"),
    *unused_keys("log_every says when a row is logged", "steps_per_print"),
    *unused_keys("a run's metrics have observers of their own", "tensorboard.*", "wandb.*", "csv_monitor.*", "comet.*", "monitor_config.*"),
    *unused_keys("gradients are the mean over the global batch's samples", "prescale_gradients", "gradient_predivide_factor",
            "sparse_gradients", "gradient_allreduce_op"),
    *unused_keys("the engine makes the optimizer", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
    *unused_keys("the plan chooses micro-batches; processes may change at a resume", "autotuning.*", "elasticity.*"),
    *unused_keys("the data order is drivetrain's", "dataloader_drop_last", "data_efficiency.*", "curriculum_learning.*"),
    *unused_keys("the last partial batch counts in full", "managed_gradient_accumulation"),
    *unused_keys("processes share the data only", "pipeline.*", "tensor_parallel.*", "sequence_parallel_size"),
]  # fmt: skip


def read_into(draft: Draft, content: Mapping[Any, Any], prefix: str = "") -> Values:
    """Reads a DeepSpeed configuration into the draft and returns its values."""
    values = draft.read(content, KEYS, prefix)
    if zero_stage(values):
        draft.pins["strategy"] = "deepspeed"
    if MICRO_BATCH in values and ACCUMULATION in values and GLOBAL_BATCH not in values:
        each = as_int(values[MICRO_BATCH]) * as_int(values[ACCUMULATION])
        draft.notes.append(
            f"DeepSpeed's global batch is {values[MICRO_BATCH]} x {values[ACCUMULATION]} x processes; the recipe's holds here: global_batch={each} times them"
        )
    return values
