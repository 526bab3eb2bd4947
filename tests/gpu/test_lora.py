"""Adapters on a GPU: the head's kernel, products beside frozen layers, captured steps, and learning as transformers' trainer does."""

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
def place(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    write_model(folder / "model", layers=6)
    write_jsonl(folder / "texts.jsonl", [{"text": text} for text in sentences(60)])
    TASKS["Lora"] = Lora
    return folder


def apart(found: torch.Tensor, true: torch.Tensor) -> float:
    return float((found.double() - true).norm() / true.norm())


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocabulary", [49152, 1000, 5])
def test_losses_by_the_kernel(kind: torch.dtype, vocabulary: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_loss, "MAX_LOGITS", 100 * vocabulary)
    torch.manual_seed(0)
    hidden = torch.randn(333, 64, device=GPU, dtype=kind, requires_grad=True)
    weight, targets = torch.randn(vocabulary, 64, device=GPU, dtype=kind), torch.randint(vocabulary, (333,), device=GPU)
    targets[::7] = head_loss.IGNORED
    exact = hidden.detach().double().requires_grad_()
    true = F.cross_entropy(F.linear(exact, weight.double()), targets, reduction="none", ignore_index=head_loss.IGNORED)
    (wanted,) = torch.autograd.grad(true.sum() * 0.3, exact)
    total, each = head_loss.losses(hidden, weight, None, targets)
    (found,) = torch.autograd.grad(total * 0.3, hidden)
    assert head_loss._kernel("cuda").__module__.endswith("loss_kernel")
    monkeypatch.setattr(head_loss, "_kernel", lambda device: head_loss._losses_and_grad)
    plain_total, plain_each = head_loss.losses(hidden, weight, None, targets)
    (plain,) = torch.autograd.grad(plain_total * 0.3, hidden)
    for mine, usual, exactly in ((total, plain_total, true.sum()), (each, plain_each, true), (found, plain, wanted)):
        assert apart(mine, exactly) < 1.2 * apart(usual, exactly) + 1e-6 < 0.05
    assert (each[::7] == 0).all() and (found[::7] == 0).all()


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_adapters_beside_a_layer_are_pefts(precision: str, place: Path) -> None:
    seed_everything(0)
    net: Any = Lora(base="model", data="texts.jsonl", precision=precision).model().cuda()
    layer: Any = next(m for m in net.modules() if isinstance(m, FusedLoraLinear))
    torch.nn.init.normal_(layer.lora_B["default"].weight)
    plain = copy.deepcopy(layer)
    plain.__class__ = FusedLoraLinear.__bases__[0]
    x = torch.randn(3, 40, layer.in_features, device=GPU)
    found = []
    for one in (layer, plain, copy.deepcopy(plain).double()):
        mine = x.clone().to(torch.float64 if len(found) == 2 else torch.float32).requires_grad_()
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16" and len(found) < 2):
            out = one(mine)
        out.square().sum().backward()
        found.append([out, mine.grad, one.lora_A["default"].weight.grad, one.lora_B["default"].weight.grad])
    for ours, theirs, true in zip(*found, strict=True):
        assert apart(ours.detach(), true.detach()) < 1.5 * apart(theirs.detach(), true.detach()) + 1e-6


def learn(place: Path, name: str, pins: dict[str, Any], **settings: Any) -> Any:
    given = {"base": "model", "data": "texts.jsonl", "context": 48, "held_out": 0.0, "global_batch": 4, "steps": 200, "learning_rate": 3e-3,
             "decay": "constant", "clip": 1.0, "best": None, "log_every": 1}  # fmt: skip
    job = training("Lora", str(place / name), Group(0, 1, GPU), given | settings, pins)
    before = copy.deepcopy(job.setup.model.net)  # type: ignore[attr-defined]
    job.run_to_end()
    job.setup.observer.close()
    return job.setup.task, before, [row["train/loss"] for row in rows(place / name)]


def test_captured_steps_are_eager_ones(place: Path) -> None:
    runs = {how: learn(place, how, {"compile": "off", "capture": how}, steps=60, precision="bf16")[2] for how in ("on", "off")}
    assert runs["on"] == runs["off"] and weights(place / "on") == weights(place / "off")
    assert runs["on"][-1] < 0.9 * runs["on"][0]


@pytest.mark.parametrize("pins", [{}, {"compile": "off", "capture": "off"}])
def test_a_run_that_goes_on_is_the_unbroken_one(place: Path, pins: dict[str, Any]) -> None:
    """To the last bit, with dropout, from a checkpoint in the middle of an epoch."""
    settings = {"base": "model", "data": "texts.jsonl", "context": 48, "global_batch": 4, "steps": 40, "learning_rate": 3e-3, "dropout": 0.1,
                "best": None, "log_every": 1, "precision": "bf16", "deterministic": True}  # fmt: skip
    for name, parts in (("whole", [None]), ("broken", [17, None])):
        for stop in parts:
            train("Lora", str(place / name), settings, pins, stop, Group(0, 1, GPU))
    assert rows(place / "broken") == rows(place / "whole") and len(rows(place / "whole")) == 40
    assert weights(place / "broken") == weights(place / "whole")


def test_fp16_learns_as_full_precision_does(place: Path) -> None:
    """It may take a few steps to find its scale."""
    full, half = (learn(place, kind, {}, steps=60, precision=kind)[2] for kind in ("fp32", "fp16"))
    assert half[-1] < 0.9 * half[0] and np.mean(half[-10:]) == pytest.approx(np.mean(full[-10:]), rel=0.05)


def test_blocks_that_run_again_change_no_loss(place: Path) -> None:
    pins = {"compile": "off", "capture": "off"}
    plain, again = (learn(place, str(on), pins | {"activation_checkpointing": on}, steps=30, precision="bf16")[2] for on in (False, True))
    assert again == pytest.approx(plain, rel=2e-3)


def test_predict_takes_the_gpu_and_half_the_memory(place: Path) -> None:
    task = Lora(base="model", data="texts.jsonl")
    model: Any = task.model().eval()
    assert "".join(task.predict(model, "the cat", tokens=4, temperature=0.0))
    frozen = [p for p in model.net.parameters() if not p.requires_grad]
    assert {(p.device.type, p.dtype) for p in frozen} == {("cuda", torch.bfloat16)}


def test_it_learns_as_transformers_trainer_does(place: Path) -> None:
    """200 steps on the same batches in bf16: no further from the trainer's than the trainer is from itself with another seed."""
    from torch.utils.data import SequentialSampler
    from transformers import Trainer, TrainingArguments

    task, net, ours = learn(place, "ours", {}, packing=False, precision="bf16")
    tokens, document, learned = (np.asarray(c) for c in task.train_data().columns)
    per_epoch = -(-len(tokens) // 4)
    order = torch.cat([permutation(len(tokens), 0, epoch, RandomStream.ORDER) for epoch in range(-(-200 // per_epoch))]).tolist()
    columns = {"input_ids": tokens, "attention_mask": document > 0, "labels": np.where(learned, tokens, -100)}
    data = [{name: torch.from_numpy(column[i].astype(np.int64)) for name, column in columns.items()} for i in order]

    class InOrder(Trainer):
        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return SequentialSampler(data)  # type: ignore[arg-type]

    def theirs(start: Any, seed: int) -> list[float]:
        options = TrainingArguments(
            output_dir=str(place / f"theirs-{seed}"), per_device_train_batch_size=4, max_steps=200, learning_rate=3e-3, bf16=True, seed=seed,
            lr_scheduler_type="constant", max_grad_norm=1.0, weight_decay=0.0, logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        trainer = InOrder(model=start, args=options, train_dataset=data)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    curves = [theirs(net, 0)]
    for seed in (1, 2, 3):
        seed_everything(seed)
        curves.append(theirs(task.model().net, seed))
    same, *others = (np.convolve(c, np.ones(10) / 10, "valid") for c in curves)
    mine = np.convolve(ours, np.ones(10) / 10, "valid")
    spread = max(float(np.abs(other - same).max()) for other in others)
    distance = float(np.abs(mine - same).max())
    print(f"from the trainer's: {distance:.4f}; between its seeds: {spread:.4f}; loss {ours[0]:.3f} to {ours[-1]:.3f}")
    assert len(ours) == 200 and distance < spread and ours[-1] < 0.9 * ours[0]
