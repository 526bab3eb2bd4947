"""Guide 004's configuration loads with `--plan`: every key becomes something, or a reason says why not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from drivetrain.describe import task_settings
from drivetrain.launch.plan_file import apply_plan_file
from drivetrain.launch.request import Request
from drivetrain.outcomes import Problem
from drivetrain.plan.imported import read
from drivetrain.plan.imported.guide import KEYS
from drivetrain.recipe import load
from drivetrain.task_ref import find_task
from drivetrain.watch.screen import Screen

# As written in the guide ("For 4x NVIDIA L4").
PRINTED = """\
training:
  batch_size_per_gpu: 16
  gradient_accumulation_steps: 4
  # Effective batch: 16 * 4 * 4 = 256
  fp16: true
  gradient_checkpointing: true
  dataloader_num_workers: 12  # 3 per GPU

deepspeed:
  enabled: true
  stage: 2
"""
DEEPSPEED = """\
{
  "zero_optimization": {
    "stage": 2,
    "offload_optimizer": {
      "device": "cpu",
      "pin_memory": true
    }
  },
  "fp16": {
    "enabled": true
  },
  "activation_checkpointing": {
    "partition_activations": true
  }
}
"""
FULL: dict[str, Any] = {
    "model": {
        "visual_backbone": "convnext_base", "text_encoder": "emilyalsentzer/Bio_ClinicalBERT", "visual_feature_dim": 512, "scene_graph_dim": 134,
        "visual_embedding_dim": 646, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 6, "num_attention_heads": 12,
        "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, "sim_layers": 2, "num_regions": 310, "num_entities": 237,
        "region_embedding_dim": 64, "entity_embedding_dim": 64, "num_binary_classes": 2, "num_category_classes": 14, "num_region_classes": 26,
        "num_severity_classes": 4, "max_question_length": 128, "vocab_size": 30522,
    },
    "data": {
        "mimic_cxr_jpg_path": "/data/cxr", "mimic_ext_cxr_qba_path": "/data/qba", "chexpert_labels_path": "", "quality_grade": "A",
        "view_filter": "frontal_only", "question_types": None, "use_exports": False, "export_grade": "", "cache_dir": "cache",
        "image_size": 224, "normalize_mean": [0.485, 0.456, 0.406], "normalize_std": [0.229, 0.224, 0.225],
    },
    "training": {
        "output_dir": "out", "phase": "finetune", "batch_size_per_gpu": 16, "gradient_accumulation_steps": 4, "learning_rate": 5e-5,
        "weight_decay": 0.01, "warmup_ratio": 0.1, "max_grad_norm": 1.0, "num_epochs": 20, "fp16": True, "gradient_checkpointing": True,
        "vqa_loss_weight": 1.0, "chexpert_loss_weight": 0.3, "binary_head_weight": 1.0, "category_head_weight": 0.5, "region_head_weight": 0.5,
        "severity_head_weight": 0.3, "logging_steps": 100, "save_steps": 5000, "save_total_limit": 5, "eval_steps": 2500,
        "metric_for_best_model": "accuracy", "greater_is_better": True, "early_stopping_patience": 5, "dataloader_num_workers": 12,
        "dataloader_pin_memory": True, "dataloader_prefetch_factor": 4, "hub_model_id": "", "push_to_hub_strategy": "best", "seed": 42,
    },
    "wandb": {"enabled": True, "project": "mimic-cxr-vqa", "tags": ["a"]},
    "deepspeed": {"enabled": True, "config_path": "configs/deepspeed_config.json", "stage": 2},
}  # fmt: skip


def write(tmp_path: Path, content: str | dict[str, Any], with_deepspeed: bool = True) -> str:
    (tmp_path / "configs").mkdir(exist_ok=True)
    path = tmp_path / "configs" / "default_config.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    if with_deepspeed:
        (tmp_path / "configs" / "deepspeed_config.json").write_text(DEEPSPEED)
    return str(path)


def test_the_configuration_as_the_guide_prints_it(tmp_path: Path) -> None:
    imported = read(write(tmp_path, PRINTED))
    assert imported.kind == "guide" and imported.task == "cxr"
    assert imported.pins == {"micro_batch": 16, "activation_checkpointing": True, "workers": 12, "strategy": "deepspeed", "zero_stage": 2}
    assert imported.settings == {"precision": "fp16", "questions_per_image": 1, "global_batch": 256}
    assert [key for key, _ in imported.unused] == ["training.gradient_accumulation_steps"]
    assert any("global_batch=256" in note for note in imported.notes)


def test_the_full_configuration_with_its_deepspeed_file(tmp_path: Path) -> None:
    imported = read(write(tmp_path, FULL))
    assert imported.pins == {
        "micro_batch": 16, "activation_checkpointing": True, "workers": 12, "prefetch": 4, "strategy": "deepspeed", "zero_stage": 2, "offload": "optimizer",
    }  # fmt: skip
    assert imported.settings == {
        "encoder": "convnext_base", "text": "emilyalsentzer/Bio_ClinicalBERT", "width": 768, "heads": 12, "layers": 2, "dropout": 0.1,
        "max_tokens": 128, "data": "/data/cxr", "questions": "/data/qba", "grade": "A", "views": "frontal_only", "cache": "cache",
        "image_size": 224, "learning_rate": 5e-5, "weight_decay": 0.01, "warmup": "2ep", "clip": 1.0, "epochs": 20, "precision": "fp16",
        "chexpert_weight": 0.3, "binary_weight": 1.0, "category_weight": 0.5, "region_weight": 0.5, "severity_weight": 0.3, "log_every": 100,
        "save_every": 5000, "keep": 5, "eval_every": 2500, "best": "max:accuracy", "patience": 5, "seed": 42, "questions_per_image": 1,
        "global_batch": 256,
    }  # fmt: skip
    assert all(why and "no key that is known" not in why for _, why in imported.unused)


def test_all_settings_are_those_of_the_task(tmp_path: Path) -> None:
    known = task_settings(find_task("cxr"))
    recipes, request = apply_plan_file(load("cxr", []), Request(plan_file=write(tmp_path, FULL)), Screen(quiet=True))
    for name, value in read(write(tmp_path, FULL)).settings.items():
        assert recipes[0].settings[name] == known[name].coerce(value)
        assert recipes[0].origin[name] == request.plan_file


def test_the_command_line_wins(tmp_path: Path) -> None:
    recipes, _ = apply_plan_file(load("cxr", ["epochs=3", "global_batch=8"]), Request(plan_file=write(tmp_path, FULL)), Screen(quiet=True))
    assert recipes[0].settings["epochs"] == 3 and recipes[0].settings["global_batch"] == 8


@pytest.mark.parametrize(
    ("given", "types"), [(["D02_has_finding", "B10_is_abnormal_region"], ["D02_has_finding", "B10_is_abnormal_region"]), (None, [])]
)
def test_the_question_types_of_the_file_are_used(given: list[str] | None, types: list[str], tmp_path: Path) -> None:
    path = write(tmp_path, {"training": {}, "data": {"question_types": given}})
    recipes, _ = apply_plan_file(load("cxr", []), Request(plan_file=path), Screen(quiet=True))
    assert recipes[0].settings["types"] == types


def test_the_global_batch_is_that_of_the_guides_four_gpus(tmp_path: Path) -> None:
    path = write(tmp_path, {"training": {"batch_size_per_gpu": 8}})
    recipes, _ = apply_plan_file(load("cxr", []), Request(plan_file=path), Screen(quiet=True))
    assert recipes[0].settings["global_batch"] == 8 * 4 * 4, "with the guide's own accumulation"


def test_unknown_keys_are_named(tmp_path: Path) -> None:
    imported = read(write(tmp_path, PRINTED + "  zero: 1\nexplainability:\n  maps: true\n"))
    unused = dict(imported.unused)
    assert unused["deepspeed.zero"].startswith("no key that is known here")
    assert unused["explainability.maps"].startswith("no key that is known here")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"training": {"warmup_ratio": 3}}, "a share of all steps"),
        ({"training": {"fp16": "sometimes"}}, "training.fp16"),
        ({"training": 3, "model": {}, "data": {}}, "training is a group of keys"),
        ({"training": {}, "deepspeed": {"enabled": True, "config_path": "nowhere.json"}}, "nowhere.json"),
    ],
)  # fmt: skip
def test_wrong_values_are_refused(tmp_path: Path, content: dict[str, Any], words: str) -> None:
    with pytest.raises(Problem, match=words):
        read(write(tmp_path, content, with_deepspeed=False))


def test_values_are_checked_against_the_task(tmp_path: Path) -> None:
    path = write(tmp_path, {"training": {}, "data": {"view_filter": "sideways"}})
    with pytest.raises(Problem, match="views"):
        apply_plan_file(load("cxr", []), Request(plan_file=path), Screen(quiet=True))


def test_the_file_is_for_one_task_only(tmp_path: Path) -> None:
    with pytest.raises(Problem, match="is for cxr, not for digits: train that task"):
        apply_plan_file(load("digits", []), Request(plan_file=write(tmp_path, PRINTED)), Screen(quiet=True))


def test_deepspeed_off_leaves_the_plan_open(tmp_path: Path) -> None:
    imported = read(write(tmp_path, FULL | {"deepspeed": {"enabled": False, "config_path": "configs/deepspeed_config.json", "stage": 2}}))
    assert "strategy" not in imported.pins and "offload" not in imported.pins


def test_every_setting_of_the_table_exists() -> None:
    known = task_settings(find_task("cxr"))
    names = [
        key.becomes.strip("`") for key in KEYS if key.becomes.count("`") == 2 and key.becomes.startswith("`") and key.becomes.endswith("`")
    ]
    assert [name for name in names if not name.startswith("plan.") and name not in known] == []
    assert json.loads(DEEPSPEED)["zero_optimization"]["stage"] == 2
