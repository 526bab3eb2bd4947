"""Rules for guide 004's configuration (configs/default_config.yaml), for the task `cxr`: takes its keys, returns pins and settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drivetrain.plan.imported import deepspeed
from drivetrain.plan.imported.deepspeed import NOTHING_SHARDED
from drivetrain.plan.imported.keys import Destination, Draft, Key, Rule, Values, as_bool, as_int, pin, setting, unused_keys, value_of
from drivetrain.settings import coerce

TASK = "cxr"
EPOCHS = 20
"""The guide's default."""
GUIDE_ACCUMULATION, GUIDE_GPUS = 4, 4
"""Its default, and the GPUs that it is written for."""
STAGE, CONFIG_FILE = "deepspeed.stage", "deepspeed.config_path"
PER_GPU, ACCUMULATION = "training.batch_size_per_gpu", "training.gradient_accumulation_steps"
COUNTED = "the index of the data set counts them"
UNREAD = "the guide's own code does not read it"
GRADES = {"all": "unrated"}


def _is_on(values: Values) -> bool:
    return value_of(values, "deepspeed.enabled", as_bool, False)


def _grade(value: Any, values: Values) -> Destination | str:
    return Destination("settings", "grade", GRADES.get(str(value).lower(), str(value).upper()))


def _precision(value: Any, values: Values) -> Destination | str:
    return Destination("settings", "precision", "fp16" if as_bool(value) else "fp32")


def _warmup(value: Any, values: Values) -> Destination | str:
    ratio = float(coerce(float, value))
    if not 0 <= ratio < 1:
        raise ValueError("a share of all steps, from 0 to 1")
    epochs = value_of(values, "training.num_epochs", as_int, EPOCHS)
    return Destination("settings", "warmup", f"{ratio * epochs:.10g}ep")


def _best(value: Any, values: Values) -> Destination | str:
    direction = "max" if value_of(values, "training.greater_is_better", as_bool, True) else "min"
    return Destination("settings", "best", f"{direction}:{str(value).removeprefix('eval_')}")


def _accumulation(value: Any, values: Values) -> Destination | str:
    steps = as_int(value)
    if PER_GPU in values:
        return f"follows from global_batch, plan.micro_batch={values[PER_GPU]} and the number of processes"
    return Destination("pins", "accumulation", steps) if steps > 1 else "1 is where a plan begins: a share that does not fit is split"


def _answers_weight(value: Any, values: Values) -> Destination | str:
    if float(coerce(float, value)) == 1:
        return "1: the weights of the heads hold as they are"
    return "it multiplies the weights of all heads: multiply binary_weight, category_weight, region_weight and severity_weight"


def _fixed(own: float, name: str) -> Rule:
    def rule(value: Any, values: Values) -> Destination | str:
        return f"{name} is {own:g} here" + ("" if value == own else ", too: it cannot be set")

    return rule


def _enabled(value: Any, values: Values) -> Destination | str:
    if not as_bool(value):
        return "false: the plan chooses"
    return Destination("pins", "strategy", "deepspeed") if value_of(values, STAGE, as_int, 2) else NOTHING_SHARDED


def _stage(value: Any, values: Values) -> Destination | str:
    if not _is_on(values):
        return "deepspeed.enabled is false"
    return Destination("pins", "zero_stage", value) if as_int(value) else NOTHING_SHARDED


def _config_file(value: Any, values: Values) -> Destination | str:
    return Destination("pins", "strategy", "deepspeed") if _is_on(values) else "deepspeed.enabled is false"


KEYS: list[Key] = [
    setting("model.visual_backbone", "encoder"),
    setting("model.text_encoder", "text"),
    setting("model.hidden_size", "width"),
    setting("model.num_attention_heads", "heads"),
    setting("model.sim_layers", "layers"),
    setting("model.hidden_dropout_prob", "dropout"),
    setting("model.max_question_length", "max_tokens"),
    *unused_keys("dropout is the share for attention, too", "model.attention_probs_dropout_prob"),
    *unused_keys(UNREAD, "model.intermediate_size", "model.num_hidden_layers", "model.visual_embedding_dim"),
    Key("model.visual_feature_dim", "not used: the feature of a box has 512 numbers here", _fixed(512, "the width of a box's feature")),
    Key("model.scene_graph_dim", "not used: a node has 6 + 64 + 64 numbers", _fixed(134, "a node's width")),
    Key("model.region_embedding_dim", "not used: 64", _fixed(64, "the width of a region's embedding")),
    Key("model.entity_embedding_dim", "not used: 64", _fixed(64, "the width of an entity's embedding")),
    *unused_keys(COUNTED, "model.num_regions", "model.num_entities", "model.num_region_classes"),
    *unused_keys("the classes of the answers are fixed", "model.num_binary_classes", "model.num_category_classes", "model.num_severity_classes"),
    *unused_keys("the text encoder brings its vocabulary", "model.vocab_size"),
    setting("data.mimic_cxr_jpg_path", "data"),
    setting("data.mimic_ext_cxr_qba_path", "questions"),
    *unused_keys("the labels are read from the folder of MIMIC-CXR-JPG", "data.chexpert_labels_path", "data.test_labels_csv_path"),
    Key("data.quality_grade", "`grade` (all: unrated)", _grade),
    setting("data.view_filter", "views"),
    setting("data.question_types", "types"),
    *unused_keys("grade and views choose the same questions from the full data set", "data.use_exports", "data.export_grade"),
    setting("data.cache_dir", "cache"),
    setting("data.image_size", "image_size"),
    *unused_keys("images are normalised as the encoder's ImageNet weights expect", "data.normalize_mean", "data.normalize_std"),
    *unused_keys("a run has a folder of its own: --run-dir", "training.output_dir"),
    *unused_keys("the stages of a recipe are the phases: recipes/guide-004.yaml", "training.phase"),
    Key(PER_GPU, "`plan.micro_batch`", pin(PER_GPU, "micro_batch").rule),
    Key(ACCUMULATION, "`plan.accumulation`, without batch_size_per_gpu", _accumulation),
    setting("training.learning_rate", "learning_rate"),
    setting("training.weight_decay", "weight_decay"),
    Key("training.warmup_ratio", "`warmup`, as epochs", _warmup),
    setting("training.max_grad_norm", "clip"),
    setting("training.num_epochs", "epochs"),
    Key("training.fp16", "`precision` (false: fp32)", _precision),
    pin("training.gradient_checkpointing", "activation_checkpointing"),
    Key("training.vqa_loss_weight", "not used: the heads have weights of their own", _answers_weight),
    setting("training.chexpert_loss_weight", "chexpert_weight"),
    *(setting(f"training.{head}_head_weight", f"{head}_weight") for head in ("binary", "category", "region", "severity")),
    setting("training.logging_steps", "log_every"),
    setting("training.save_steps", "save_every"),
    setting("training.save_total_limit", "keep"),
    setting("training.eval_steps", "eval_every"),
    Key("training.metric_for_best_model", "`best`", _best),
    *unused_keys("metric_for_best_model and this make best", "training.greater_is_better"),
    setting("training.early_stopping_patience", "patience"),
    pin("training.dataloader_num_workers", "workers"),
    pin("training.dataloader_prefetch_factor", "prefetch"),
    *unused_keys("batches are in pinned memory where there is a GPU", "training.dataloader_pin_memory"),
    *unused_keys("a finished model goes to a bucket with --upload", "training.hub_model_id", "training.hub_private_repo",
                 "training.push_to_hub_strategy", "training.hub_*"),
    setting("training.seed", "seed"),
    *unused_keys("a run writes metrics.jsonl and files for TensorBoard", "wandb.*"),
    Key("deepspeed.enabled", "`plan.strategy=deepspeed` where it is true", _enabled),
    Key(CONFIG_FILE, "`plan.strategy=deepspeed`, and the file's own keys", _config_file),
    Key(STAGE, "`plan.zero_stage`, where DeepSpeed is enabled", _stage),
]  # fmt: skip
GROUPS = ("model", "data", "training", "wandb", "deepspeed")


def is_guide(values: Mapping[Any, Any]) -> bool:
    """Returns whether a file has the guide's groups of keys."""
    groups = [key for key, value in values.items() if key in GROUPS and isinstance(value, Mapping)]
    return "training" in groups or {"model", "data"} <= set(groups)


def deepspeed_file(content: Mapping[Any, Any]) -> str:
    """Returns the DeepSpeed file that the configuration names and would use; "" if there is none."""
    group = content.get("deepspeed")
    name = group.get("config_path") if isinstance(group, Mapping) and group.get("enabled") is True else None
    return str(name or "")


def read_into(draft: Draft, content: Mapping[Any, Any], inner: Mapping[Any, Any] | None, inner_name: str) -> None:
    """Reads the configuration into the draft, and the DeepSpeed file (`inner`) that it may name."""
    if inner is not None:
        deepspeed.read_into(draft, inner, f"{inner_name}: ")
    values = draft.read(content, KEYS)
    draft.settings["questions_per_image"] = 1
    draft.notes.append("a sample of the guide is one question: questions_per_image=1; more questions per image cost little more time")
    if PER_GPU in values:
        each = as_int(values[PER_GPU]) * value_of(values, ACCUMULATION, as_int, GUIDE_ACCUMULATION)
        total = draft.settings.setdefault("global_batch", each * GUIDE_GPUS)
        draft.notes.append(f"global_batch={total}: the guide's on its four GPUs ({each} on each); another one is given as global_batch=N")
