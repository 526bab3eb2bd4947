"""LoRA adapters on a GPU: the loss kernel, fused adapter layers, captured steps, and the same learning as transformers' Trainer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from drivetrain.engine.data.keyed_random import RandomStream, permutation, seed_everything
from drivetrain.engine.group import Group
from drivetrain.tasks.lora import head_loss
from drivetrain.tasks.lora.fused_linear import FusedLoraLinear
from drivetrain.tasks.lora.lora import Lora
from tests.lora.models import sentences, write_jsonl, write_model
from tests.sample_tasks import TASKS, rows, train, training, weights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
GPU = torch.device("cuda", 0)


@pytest.fixture
def workspace(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    write_model(folder / "model", layers=6)
    write_jsonl(folder / "texts.jsonl", [{"text": text} for text in sentences(60)])
    TASKS["Lora"] = Lora
    return folder


def relative_error(computed: torch.Tensor, exact: torch.Tensor) -> float:
    return float((computed.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocabulary", [49152, 1000, 5])
def test_losses_by_the_kernel(kind: torch.dtype, vocabulary: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_loss, "MAX_LOGITS", 100 * vocabulary)
    torch.manual_seed(0)
    hidden = torch.randn(333, 64, device=GPU, dtype=kind, requires_grad=True)
    weight, targets = torch.randn(vocabulary, 64, device=GPU, dtype=kind), torch.randint(vocabulary, (333,), device=GPU)
    targets[::7] = head_loss.IGNORED
    exact = hidden.detach().double().requires_grad_()
    exact_losses = F.cross_entropy(F.linear(exact, weight.double()), targets, reduction="none", ignore_index=head_loss.IGNORED)
    (exact_gradient,) = torch.autograd.grad(exact_losses.sum() * 0.3, exact)
    total, losses = head_loss.losses(hidden, weight, None, targets)
    (gradient,) = torch.autograd.grad(total * 0.3, hidden)
    assert head_loss._kernel("cuda").__module__.endswith("loss_kernel")
    monkeypatch.setattr(head_loss, "_kernel", lambda device: head_loss._losses_and_grad)
    torch_total, torch_losses = head_loss.losses(hidden, weight, None, targets)
    (torch_gradient,) = torch.autograd.grad(torch_total * 0.3, hidden)
    for of_kernel, of_torch, of_float64 in (
        (total, torch_total, exact_losses.sum()),
        (losses, torch_losses, exact_losses),
        (gradient, torch_gradient, exact_gradient),
    ):
        assert relative_error(of_kernel, of_float64) < 1.2 * relative_error(of_torch, of_float64) + 1e-6 < 0.05
    assert (losses[::7] == 0).all() and (gradient[::7] == 0).all()


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_fused_adapter_layers_equal_pefts(precision: str, workspace: Path) -> None:
    seed_everything(0)
    net: Any = Lora(base="model", data="texts.jsonl", precision=precision).model().cuda()
    layer: Any = next(m for m in net.modules() if isinstance(m, FusedLoraLinear))
    torch.nn.init.normal_(layer.lora_B["default"].weight)
    plain = copy.deepcopy(layer)
    plain.__class__ = FusedLoraLinear.__bases__[0]
    x = torch.randn(3, 40, layer.in_features, device=GPU)
    results = []
    for variant in (layer, plain, copy.deepcopy(plain).double()):
        inputs = x.clone().to(torch.float64 if len(results) == 2 else torch.float32).requires_grad_()
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16" and len(results) < 2):
            output = variant(inputs)
        output.square().sum().backward()
        results.append([output, inputs.grad, variant.lora_A["default"].weight.grad, variant.lora_B["default"].weight.grad])
    for fused, peft, exact in zip(*results, strict=True):
        assert relative_error(fused.detach(), exact.detach()) < 1.5 * relative_error(peft.detach(), exact.detach()) + 1e-6


def learn(workspace: Path, name: str, pins: dict[str, Any], **settings: Any) -> Any:
    defaults = {"base": "model", "data": "texts.jsonl", "context": 48, "held_out": 0.0, "global_batch": 4, "steps": 200, "learning_rate": 3e-3,
             "decay": "constant", "clip": 1.0, "best": None, "log_every": 1}  # fmt: skip
    job = training("Lora", str(workspace / name), Group(0, 1, GPU), defaults | settings, pins)
    initial_net = copy.deepcopy(job.setup.model.net)  # type: ignore[attr-defined]
    job.run_to_end()
    job.setup.observer.close()
    return job.setup.task, initial_net, [row["train/loss"] for row in rows(workspace / name)]


def test_captured_steps_are_eager_ones(workspace: Path) -> None:
    runs = {how: learn(workspace, how, {"compile": "off", "capture": how}, steps=60, precision="bf16")[2] for how in ("on", "off")}
    assert runs["on"] == runs["off"] and weights(workspace / "on") == weights(workspace / "off")
    assert runs["on"][-1] < 0.9 * runs["on"][0]


@pytest.mark.parametrize("pins", [{}, {"compile": "off", "capture": "off"}])
def test_a_resumed_run_equals_an_uninterrupted_one(workspace: Path, pins: dict[str, Any]) -> None:
    """They are bit-equal, with dropout and a checkpoint in the middle of an epoch."""
    settings = {"base": "model", "data": "texts.jsonl", "context": 48, "global_batch": 4, "steps": 40, "learning_rate": 3e-3, "dropout": 0.1,
                "best": None, "log_every": 1, "precision": "bf16", "deterministic": True}  # fmt: skip
    for name, parts in (("uninterrupted", [None]), ("resumed", [17, None])):
        for stop in parts:
            train("Lora", str(workspace / name), settings, pins, stop, Group(0, 1, GPU))
    assert rows(workspace / "resumed") == rows(workspace / "uninterrupted") and len(rows(workspace / "uninterrupted")) == 40
    assert weights(workspace / "resumed") == weights(workspace / "uninterrupted")


def test_fp16_learns_as_full_precision_does(workspace: Path) -> None:
    """fp16 may take a few steps to find its loss scale."""
    full, half = (learn(workspace, kind, {}, steps=60, precision=kind)[2] for kind in ("fp32", "fp16"))
    assert half[-1] < 0.9 * half[0] and np.mean(half[-10:]) == pytest.approx(np.mean(full[-10:]), rel=0.05)


def test_recomputed_blocks_change_no_loss(workspace: Path) -> None:
    pins = {"compile": "off", "capture": "off"}
    plain, recomputed = (
        learn(workspace, str(is_on), pins | {"activation_checkpointing": is_on}, steps=30, precision="bf16")[2] for is_on in (False, True)
    )
    assert recomputed == pytest.approx(plain, rel=2e-3)


def test_predict_takes_the_gpu_and_half_the_memory(workspace: Path) -> None:
    task = Lora(base="model", data="texts.jsonl")
    model: Any = task.model().eval()
    assert "".join(task.predict(model, "the cat", tokens=4, temperature=0.0))
    frozen = [p for p in model.net.parameters() if not p.requires_grad]
    assert {(p.device.type, p.dtype) for p in frozen} == {("cuda", torch.bfloat16)}


def test_learning_equals_that_of_transformers_trainer(workspace: Path) -> None:
    """In 200 bf16 steps on the same batches, the losses differ less from the Trainer's than the Trainer's differ between seeds."""
    from torch.utils.data import SequentialSampler
    from transformers import Trainer, TrainingArguments

    task, net, losses = learn(workspace, "ours", {}, packing=False, precision="bf16")
    tokens, document, is_learned = (np.asarray(c) for c in task.train_data().columns)
    per_epoch = -(-len(tokens) // 4)
    order = torch.cat([permutation(len(tokens), 0, epoch, RandomStream.ORDER) for epoch in range(-(-200 // per_epoch))]).tolist()
    columns = {"input_ids": tokens, "attention_mask": document > 0, "labels": np.where(is_learned, tokens, -100)}
    data = [{name: torch.from_numpy(column[i].astype(np.int64)) for name, column in columns.items()} for i in order]

    class InOrder(Trainer):
        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return SequentialSampler(data)  # type: ignore[arg-type]

    def train_with_transformers(start: Any, seed: int) -> list[float]:
        options = TrainingArguments(
            output_dir=str(workspace / f"theirs-{seed}"), per_device_train_batch_size=4, max_steps=200, learning_rate=3e-3, bf16=True, seed=seed,
            lr_scheduler_type="constant", max_grad_norm=1.0, weight_decay=0.0, logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        trainer = InOrder(model=start, args=options, train_dataset=data)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    curves = [train_with_transformers(net, 0)]
    for seed in (1, 2, 3):
        seed_everything(seed)
        curves.append(train_with_transformers(task.model().net, seed))
    same_seed, *others = (np.convolve(c, np.ones(10) / 10, "valid") for c in curves)
    smoothed = np.convolve(losses, np.ones(10) / 10, "valid")
    spread = max(float(np.abs(other - same_seed).max()) for other in others)
    distance = float(np.abs(smoothed - same_seed).max())
    print(f"from the trainer's: {distance:.4f}; between its seeds: {spread:.4f}; loss {losses[0]:.3f} to {losses[-1]:.3f}")
    assert len(losses) == 200 and distance < spread and losses[-1] < 0.9 * losses[0]
