"""Sharding on a real GPU: one process, so that shards are full tensors, but all code runs."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import tests.deep_tasks  # noqa: F401 (adds its tasks)
from tests.engine.test_invariance import assert_same_metrics
from tests.gpu.test_cuda import train
from tests.sample_tasks import rows, weights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

ADAM = {"optim": "adamw", "learning_rate": 0.02, "clip": 0.5}
FSDP = {"strategy": "fsdp", "micro_batch": 3}
STRATEGIES = [FSDP, FSDP | {"offload": "all"}, FSDP | {"zero_stage": 2, "activation_checkpointing": True}]
if find_spec("deepspeed"):
    STRATEGIES += [{"strategy": "deepspeed", "zero_stage": stage, "micro_batch": 3} for stage in (1, 2, 3)]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("pins", STRATEGIES, ids=str)
def test_a_sharded_run_equals_an_unsharded_one_and_is_resumed(pins: dict[str, Any], precision: str, tmp_path: Path) -> None:
    # The same micro-batch, because in fp16 it decides which sums overflow.
    train("Transformer", tmp_path / "single", pins={"micro_batch": pins["micro_batch"]}, precision=precision, **ADAM)
    train("Transformer", tmp_path / "uninterrupted", pins=pins, precision=precision, **ADAM)
    assert_same_metrics(rows(tmp_path / "single"), rows(tmp_path / "uninterrupted"), 2e-4 if precision == "fp32" else 2e-2)
    for stop in (3, None):
        train("Transformer", tmp_path / "resumed", stop, pins, precision=precision, **ADAM)
    assert rows(tmp_path / "resumed") == rows(tmp_path / "uninterrupted")
    assert weights(tmp_path / "resumed") == weights(tmp_path / "uninterrupted")


def test_activation_checkpointing_gives_the_same_and_is_not_captured(tmp_path: Path) -> None:
    options = {"precision": "fp32", "dropout": 0.1, "epochs": 8} | ADAM
    train("Transformer", tmp_path / "saved activations", pins={"capture": "off"}, **options)
    train("Transformer", tmp_path / "recomputed", pins={"activation_checkpointing": True}, **options)
    assert_same_metrics(rows(tmp_path / "saved activations"), rows(tmp_path / "recomputed"), 1e-4)
