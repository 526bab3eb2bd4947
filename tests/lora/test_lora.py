"""LoRA adapters: losses, packing of documents, the same learning as transformers' Trainer, and the files of a run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from drivetrain.engine.data.keyed_random import RandomStream, permutation, seed_everything
from drivetrain.engine.group import Group
from drivetrain.outcomes import Problem
from drivetrain.runs import Run
from drivetrain.tasks.lora import head_loss
from drivetrain.tasks.lora.base_model import SHAPES, find_base
from drivetrain.tasks.lora.generation import generate
from drivetrain.tasks.lora.lora import Lora
from tests.command import expect_error, run_ok
from tests.lora.models import sentences, write_jsonl, write_model
from tests.sample_tasks import TASKS, rows, training
from tests.waiting import Stopwatch


@pytest.fixture
def workspace(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a tiny model, texts for it, and its own cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    write_model(folder / "model")
    write_jsonl(folder / "texts.jsonl", [{"text": text} for text in sentences(60)])
    return folder


def lora_task(**settings: Any) -> Lora:
    chosen = {"base": "model", "data": "texts.jsonl", "context": 64, "global_batch": 4, "best": None}
    return Lora(**(chosen | settings))


@pytest.mark.parametrize("max_logits", [1, 500, 1 << 27])
@pytest.mark.parametrize("bias", [False, True])
def test_losses_without_logits(max_logits: int, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_loss, "MAX_LOGITS", max_logits)
    torch.manual_seed(0)
    hidden, weight = torch.randn(23, 16, requires_grad=True), torch.randn(50, 16)
    shift = torch.randn(50) if bias else None
    targets = torch.randint(50, (23,))
    targets[::5] = head_loss.IGNORED
    expected = F.cross_entropy(F.linear(hidden, weight, shift), targets, reduction="sum")
    (expected_gradient,) = torch.autograd.grad(expected * 0.3, hidden)
    total, loss_per_token = head_loss.losses(hidden, weight, shift, targets)
    (gradient,) = torch.autograd.grad(total * 0.3, hidden)
    assert torch.allclose(total, expected, rtol=1e-6)
    assert torch.allclose(gradient, expected_gradient, rtol=1e-5, atol=1e-6)
    assert torch.allclose(loss_per_token.sum(), total) and (loss_per_token[::5] == 0).all() and not loss_per_token.requires_grad
    plain, _ = head_loss.losses_of_logits(F.linear(hidden, weight, shift), targets)
    assert torch.allclose(plain, expected)


@pytest.mark.parametrize("kind", ["llama", "mistral", "gptj", "gemma2", "gpt_oss", "mpt"])
def test_documents_in_a_row_do_not_see_each_other(workspace: Path, kind: str) -> None:
    """In a packed row, every token has the same loss as in a row of its own. This Mistral sees only six tokens back, as do half the
    layers of Gemma and gpt-oss; the last four models have no fused attention in transformers."""
    write_model(workspace / "other", kind=kind)
    task, unpacked_task = lora_task(base="other"), lora_task(base="other", packing=False)
    seed_everything(0)
    model = task.model()
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    packed, padded = task.train_data()[:], unpacked_task.train_data()[:]
    assert len(packed[0]) < 0.7 * len(padded[0]) and int(packed[1].max()) > 2
    totals_and_counts = []
    for columns, settings in ((packed, task), (padded, unpacked_task)):
        batch = tuple(torch.as_tensor(np.array(column)) for column in columns)
        total, loss_per_token, counts = model(*batch, settings._has_single_documents)
        totals_and_counts.append((float(total.detach()), int(counts.sum())))
        assert torch.allclose(loss_per_token.sum(), total, rtol=1e-5)
    assert totals_and_counts[0][1] == totals_and_counts[1][1]
    assert totals_and_counts[0][0] == pytest.approx(totals_and_counts[1][0], rel=1e-5)
    mixed = tuple(torch.as_tensor(np.array(column)) for column in packed)
    apart, together = model(*mixed)[1], model(*mixed, True)[1]  # `together`: as if each row were one document
    assert not torch.allclose(apart, together, rtol=1e-4), "the documents must matter, or the test proves nothing"


@pytest.mark.system  # slow
def test_learning_equals_that_of_transformers_trainer(workspace: Path) -> None:
    """The losses of 200 steps on the same batches agree to 1e-4."""
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import Trainer, TrainingArguments

    settings = {"base": "model", "data": "texts.jsonl", "context": 48, "packing": False, "held_out": 0.0, "global_batch": 4, "steps": 200,
                "learning_rate": 3e-3, "decay": "constant", "clip": 1.0, "best": None, "log_every": 1}  # fmt: skip
    TASKS["Lora"] = Lora
    job = training("Lora", str(workspace / "run"), Group(0, 1, torch.device("cpu")), settings, {"micro_batch": 2})
    task = job.setup.task
    trainer_model = _copy(job.setup.model).net  # type: ignore[attr-defined]
    job.run_to_end()
    job.setup.observer.close()
    losses = [row["train/loss"] for row in rows(workspace / "run")]

    tokens, document, is_learned = (np.asarray(c) for c in task.train_data().columns)
    per_epoch = -(-len(tokens) // 4)
    order = torch.cat([permutation(len(tokens), 0, epoch, RandomStream.ORDER) for epoch in range(-(-200 // per_epoch))]).tolist()
    assert len(tokens) % 4 == 0, "the trainer's batches must end where epochs end"
    labels = np.where(is_learned, tokens, -100)
    data = Dataset.from_dict({"input_ids": tokens[order], "attention_mask": (document > 0)[order].astype(int), "labels": labels[order]})

    class InOrder(Trainer):
        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return SequentialSampler(data)

    options = TrainingArguments(
        output_dir=str(workspace / "theirs"), per_device_train_batch_size=4, max_steps=200, learning_rate=3e-3, lr_scheduler_type="constant",
        max_grad_norm=1.0, weight_decay=0.0, logging_steps=1, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = InOrder(model=trainer_model, args=options, train_dataset=data)
    trainer.train()
    expected = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == len(expected) == 200 and losses[-1] < 0.9 * losses[0]
    assert max(abs(a - b) / b for a, b in zip(losses, expected, strict=True)) < 1e-4


def _copy(model: Any) -> Any:
    import copy

    return copy.deepcopy(model)


@pytest.mark.parametrize("name", ["peft", "transformers"])
def test_a_missing_package_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    with pytest.raises(Problem, match=f"lora needs {name}: pip install 'drivetrain\\[lora\\]'"):
        Lora(base="shape:tiny").model()


@pytest.mark.system
def test_the_run_leaves_an_adapter_that_peft_loads(workspace: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    run_ok("train", "lora", "base=model", "data=texts.jsonl", "context=64", "steps=40", "global_batch=4", "learning_rate=0.03", "eval_first=true",
         "prompt=the cat", "targets=q_proj,v_proj,down_proj", "--name", "one")  # fmt: skip
    run = workspace / "runs" / "one"
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    before = next(e["metrics"]["perplexity"] for e in events if e["event"] == "before")
    after = [row["eval/perplexity"] for row in rows(run) if "eval/perplexity" in row][-1]
    assert after < 0.9 * before
    samples = [(e["step"], e["text"]) for e in events if e["event"] == "remark"]
    assert samples[0][0] == 0 and samples[-1][0] == 40 and all(text.startswith("'the cat' goes on: ") for _, text in samples)
    assert f"remark       {samples[-1][1]}   (step 40)" in run_ok("status", "one")
    net = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(workspace / "model"), str(run / "model")).eval()
    task = lora_task(targets="q_proj,v_proj,down_proj")
    from drivetrain.engine.inference import trained_model

    trained: Any = trained_model(task, Run(run))
    ids = torch.arange(1, 20)[None] % 20
    with torch.no_grad():
        expected = net(input_ids=ids).logits
        # Not bit-equal: PEFT adds two products, drivetrain adds the second within the first, and some CPUs round differently.
        assert torch.allclose(trained.net(input_ids=ids).logits, expected, rtol=1e-5, atol=1e-6)
        assert not torch.allclose(AutoModelForCausalLM.from_pretrained(workspace / "model")(input_ids=ids).logits, expected, atol=1e-3)
    assert "| base model | model |" in (run / "model" / "README.md").read_text()
    assert (run / "model" / "model.safetensors").stat().st_size < 50_000, "it does not contain the base model"

    run_ok("export", "one")
    assert "| steps | 40 |" in (run / "model" / "README.md").read_text(), "the run's own card stays"
    run_ok("export", "one", "--merge", "--out", "merged")
    merged = AutoModelForCausalLM.from_pretrained(workspace / "merged").eval()
    with torch.no_grad():
        assert torch.allclose(merged(input_ids=ids).logits, expected, atol=1e-5)
    text = "".join(generate(trained.net, task.tokenizer, "the cat", 12, 0.0))
    assert run_ok("predict", "one", "the cat", "tokens=12", "temperature=0").strip() == text.strip()
    assert "did you mean tokens" in expect_error("predict", "one", "the cat", "tokns=1")

    config = workspace / "model" / "config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    assert "trained on another base model" in expect_error("predict", "one", "the cat")


def test_a_half_precision_base_stays_in_half_precision(workspace: Path) -> None:
    """The merged weights have the same dtype, and their logits equal those with adapters within bf16's rounding."""
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(workspace / "model", dtype=torch.bfloat16).save_pretrained(workspace / "model")
    task = lora_task()
    seed_everything(0)
    model = task.model().eval()
    assert {p.dtype for p in model.net.parameters() if not p.requires_grad} == {torch.bfloat16}
    ids = torch.arange(1, 20)[None] % 20
    with torch.no_grad():
        base_logits = model.net(input_ids=ids).logits.float()
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.05)
        adapted_logits = model.net(input_ids=ids).logits.float()
    task.model_files(model.state_dict(), workspace / "merged", {}, merge=model)
    merged = AutoModelForCausalLM.from_pretrained(workspace / "merged")
    with torch.no_grad():
        merged_logits = merged(input_ids=ids).logits.float()
    assert merged.dtype == torch.bfloat16
    assert (merged_logits - adapted_logits).norm() < 0.02 * adapted_logits.norm() < 0.2 * (base_logits - adapted_logits).norm()


@pytest.mark.system  # slow
def test_an_interrupted_run_resumes_bit_for_bit(workspace: Path) -> None:
    words = ["lora", "base=model", "data=texts.jsonl", "context=64", "steps=12", "global_batch=4", "dropout=0.1", "save_every=5"]
    assert "is bit-equal to the unbroken run" in run_ok("verify-resume", *words)


def losses_of(workspace: Path, name: str, pins: dict[str, Any], **settings: Any) -> list[float]:
    """Returns the losses of thirty steps, trained in this process."""
    TASKS["Lora"] = Lora
    defaults = {"base": "model", "data": "texts.jsonl", "context": 64, "steps": 30, "global_batch": 4, "learning_rate": 0.02, "dropout": 0.1,
             "held_out": 0.0, "best": None, "log_every": 1}  # fmt: skip
    job = training("Lora", str(workspace / name), Group(0, 1, torch.device("cpu")), defaults | settings, pins)
    job.run_to_end()
    job.setup.observer.close()
    assert not [event for event in job.setup.run.events() if event["event"] == "depends-on-plan"]
    return [row["train/loss"] for row in rows(workspace / name)]


def test_recomputed_blocks_change_no_loss(workspace: Path) -> None:
    """Activation checkpointing uses the same dropout in both forward passes."""
    plain, recomputed = (losses_of(workspace, str(is_on), {"micro_batch": 2, "activation_checkpointing": is_on}) for is_on in (False, True))
    assert len(plain) == 30 and recomputed == plain and plain[-1] < 0.9 * plain[0]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_learns_as_full_does(workspace: Path, precision: str) -> None:
    """fp16 may take a few steps to find its scale."""
    full, half = (losses_of(workspace, kind, {}, precision=kind) for kind in ("fp32", precision))
    assert half != full and half == pytest.approx(full, rel=0.08) and half[-1] == pytest.approx(full[-1], rel=0.03)
    assert half[-1] < 0.9 * half[0]


@pytest.mark.system  # slow
def test_micro_batches_and_processes_change_no_loss(workspace: Path) -> None:
    """The rows have very different numbers of learned tokens, so that a mean of means would give another loss."""
    pairs = [{"prompt": text, "completion": " ".join(text.split()[: 1 + i % 9])} for i, text in enumerate(sentences(60, 3))]
    write_jsonl(workspace / "pairs.jsonl", pairs)
    words = [
        "train",
        "lora",
        "base=model",
        "data=pairs.jsonl",
        "context=64",
        "steps=8",
        "global_batch=6",
        "learning_rate=0.01",
        "log_every=1",
    ]
    run_ok(*words, "--name", "one process")
    run_ok(*words, "plan.micro_batch=1", "--name", "single")
    run_ok(*words, "--procs", "2", "plan.micro_batch=2", "--name", "two")
    run_ok(*words, "--procs", "2", "plan.strategy=fsdp", "prompt=the cat", "--name", "sharded")
    assert [e["step"] for e in Run(workspace / "runs" / "sharded").events() if e["event"] == "remark"] == [5, 8], (
        "text was generated with all shards"
    )
    expected = [row["train/loss"] for row in rows(workspace / "runs" / "one process")]
    for other in ("single", "two", "sharded"):
        losses = [row["train/loss"] for row in rows(workspace / "runs" / other)]
        assert len(losses) == 8 and losses == pytest.approx(expected, rel=2e-5)


@pytest.mark.system  # slow
def test_unusable_targets_bases_and_data_are_named(workspace: Path) -> None:
    with pytest.raises(Problem, match="linear layers of this model: down_proj, gate_proj"):
        lora_task(targets="query").model()
    for name, message in (("./nowhere", "there is no such folder"), (".", "has no config.json"), ("shape:big", "the shapes are tiny")):
        with pytest.raises(Problem, match=message):
            find_base(name)
    write_model(workspace / "plain", template=None)
    write_jsonl(
        workspace / "chats.jsonl", [{"messages": [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]}]
    )
    assert "no chat template" in expect_error("train", "lora", "base=plain", "data=chats.jsonl", "steps=1")
    stopwatch = Stopwatch()
    message = expect_error(
        "train", "lora", "data=texts.jsonl", "steps=1", "base=nobody/no-such-model", max_lines=3, HF_ENDPOINT="http://127.0.0.1:9"
    )
    assert "could not be fetched from the hub" in message and "hf download nobody/no-such-model" in message
    message = expect_error(
        "train", "lora", "data=nobody/no-such-set", "steps=1", "base=model", max_lines=3, HF_ENDPOINT="http://127.0.0.1:9"
    )
    assert "could not be fetched from the hub" in message and "hf download nobody/no-such-set --repo-type dataset" in message
    assert stopwatch.seconds < 60, "the hub's client must not retry for long"


def test_one_unknown_target_of_two_is_named(workspace: Path) -> None:
    with pytest.raises(Problem, match=r"no layer is called v_prj .*down_proj"):
        lora_task(targets="q_proj,v_prj").model()


def test_a_plain_file_trains_as_it_is(workspace: Path) -> None:
    """The file is one document, and its end is held out for evaluation."""
    Path("story.txt").write_text("\n".join(sentences(60)))
    run_ok("train", "lora", "base=model", "data=story.txt", "context=64", "steps=4", "--name", "story")
    assert "eval/perplexity" in rows("runs/story")[-1]
    run_ok("train", "lora", "base=model", "data=story.txt", "context=64", "steps=4", "held_out=0", "--name", "all")
    assert "eval/perplexity" not in rows("runs/all")[-1]


@pytest.mark.parametrize(("share", "num_held_out"), [(0.4, 24), (0.05, 3), (0.03, 1), (0.01, 1), (0.5, 30), (0.0, 0)])
def test_the_share_that_is_held_out_is_the_one_asked_for(workspace: Path, share: float, num_held_out: int) -> None:
    _, learned, held = lora_task(held_out=share)._split
    assert (len(learned), len(held)) == (60 - num_held_out, num_held_out) and not {*learned} & {*held}


def test_predict_starts_a_text_with_the_tokens_of_training(workspace: Path) -> None:
    write_model(workspace / "begins", begins=True)
    write_jsonl(workspace / "one.jsonl", [{"text": "the cat sat"}])
    task = lora_task(base="begins", data="one.jsonl", held_out=0)
    net = task.model().net
    inputs: list[Any] = []
    net.register_forward_pre_hook(lambda _, args, kwargs: inputs.append(kwargs["input_ids"]), with_kwargs=True)
    list(generate(net, task.tokenizer, "the cat sat", 1, 0.0))
    assert inputs[0][0].tolist() == task.train_data().columns[0][0, :4].tolist()
    assert inputs[0][0, 0] == task.tokenizer.bos_token_id != inputs[0][0, 1]


def test_prompts_that_leave_nothing_to_learn_are_refused(workspace: Path) -> None:
    write_jsonl(workspace / "long.jsonl", [{"prompt": " ".join(["cat"] * 90), "completion": "sat"} for _ in range(4)])
    message = expect_error("train", "lora", "base=model", "data=long.jsonl", "long=truncate", "context=64", "steps=1")
    assert "nothing is left to learn: raise context" in message


def test_packing_is_refused_for_layers_that_mix_documents(workspace: Path) -> None:
    from transformers import Lfm2Config, Lfm2ForCausalLM

    config = Lfm2Config(
        vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        layer_types=["conv", "full_attention"],
    )  # fmt: skip
    write_model(workspace / "carries")
    Lfm2ForCausalLM(config).save_pretrained(workspace / "carries")
    with pytest.raises(Problem, match=r"layers \(conv\) that carry one document .*packing=false"):
        lora_task(base="carries").model()
    assert lora_task(base="carries", packing=False).model()


def test_packing_is_refused_for_attention_without_masks(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(workspace / "bloom", kind="bloom")
    with pytest.raises(Problem, match=r"BloomForCausalLM cannot keep documents of a row apart: set packing=false"):
        lora_task(base="bloom").model()
    assert lora_task(base="bloom", packing=False).model()
    assert "no fused attention for BloomForCausalLM" in capsys.readouterr().err


def test_a_head_of_several_layers_gives_the_same_loss(workspace: Path) -> None:
    from transformers import RobertaConfig, RobertaForCausalLM

    config = RobertaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, is_decoder=True, type_vocab_size=1,
        pad_token_id=1, max_position_embeddings=80,
    )  # fmt: skip
    write_model(workspace / "more")
    torch.manual_seed(0)
    RobertaForCausalLM(config).save_pretrained(workspace / "more")
    model = lora_task(base="more", packing=False, targets="query,value").model()
    tokens = torch.arange(5, 37)[None]
    each = torch.ones_like(tokens)
    total, _, counts = model(tokens, each, each.bool(), True)
    expected = model.net(input_ids=tokens, labels=tokens).loss
    assert float(total / counts.sum()) == pytest.approx(float(expected), rel=1e-5)


def test_a_downloaded_model_needs_no_network(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = workspace / "hub" / "models--some--model"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("1" * 40)
    write_model(cached / "snapshots" / ("1" * 40))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(workspace / "hub"))
    monkeypatch.setattr("drivetrain.tasks.lora.base_model.hub_answers", lambda: False)
    base = find_base("some/model")
    assert base.tokenizer().vocab_size and sum(p.numel() for p in base.model(torch.float32).parameters())


def test_adapters_of_another_base_are_refused(workspace: Path) -> None:
    seed_everything(0)
    state = lora_task().model().state_dict()
    other = write_model(workspace / "other", kind="mistral")
    with pytest.raises(Problem, match="another base model"):
        lora_task(base=str(other)).model().load_state_dict(state)


@pytest.mark.parametrize("settings", [{"dora": True}, {"rslora": True}, {"targets": "q_proj, v_proj"}])
def test_pefts_own_options(workspace: Path, settings: dict[str, Any]) -> None:
    model = lora_task(**settings).model()
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    assert set(model.state_dict()) == {*names, "base"}
    assert any("magnitude" in name for name in names) == settings.get("dora", False)
    if "targets" in settings:
        assert {name.split(".lora_")[0].rpartition(".")[2] for name in names} == {"q_proj", "v_proj"}


def test_guide_000s_recipe_trains(workspace: Path) -> None:
    recipe = Path(__file__).parents[2] / "recipes" / "lora-guide-000.yaml"
    assert "drivetrain train recipes/lora-guide-000.yaml" in recipe.read_text()
    (workspace / "lines.txt").write_text("\n\n".join(sentences(40)) + "\n")
    output = run_ok("train", str(recipe), "base=model", "data=lines.txt", "unit=lines", "steps=3", "context=30")
    assert "40 documents" in output and "longer ones were truncated" in output, "all lines are learned, each in a row of its own"
    assert "step 3/3" in output and "perplexity" not in output
    config = json.loads((workspace / "runs" / "lora-001" / "model" / "adapter_config.json").read_text())
    assert sorted(config["target_modules"]) == ["q_proj", "v_proj"]


@pytest.mark.system  # takes half a minute
def test_a_plan_needs_neither_weights_nor_a_gpu(folder: Path) -> None:
    """Frozen weights count in half precision, and only the adapters have gradients and an optimizer's state."""
    words = ["plan", "lora", "base=shape:135m", "context=64", "global_batch=8", "--hardware", "2xL4-24GB", "--json"]
    plan = json.loads(run_ok(*words, XDG_CACHE_HOME=str(folder / "cache")))["plan"]
    parts = plan["predicted"]["memory_bytes"]
    assert plan["precision"] == "bf16"
    assert 0.26e9 < parts["parameters"] < 0.31e9, parts
    assert parts["gradients"] + parts["optimizer"] < 0.06e9, parts


@pytest.mark.system  # takes a minute each
@pytest.mark.parametrize(("machine", "precision", "again"), [("4xL4-24GB", "bf16", False), ("2xT4-16GB", "fp16", True)])
def test_a_7b_shape_is_planned_and_explained(workspace: Path, machine: str, precision: str, again: bool) -> None:
    """It is planned from its config only: 13 GB of frozen weights leave memory for activations on an L4, but not on a T4."""
    from transformers import LlamaConfig

    (workspace / "model" / "model.safetensors").unlink()
    LlamaConfig(**SHAPES["7b"]).save_pretrained(workspace / "model")
    words = ["plan", "lora", "base=model", "data=texts.jsonl", "context=512", "global_batch=16", "--hardware", machine]
    facts = json.loads(run_ok(*words, "--json"))
    plan = facts["plan"]
    assert (plan["precision"], plan["world_size"]) == (precision, int(machine[0]))
    assert plan["activation_checkpointing"] is again or plan["strategy"] == "fsdp"
    assert sum(plan["predicted"]["memory_bytes"].values()) < float(machine[-4:-2]) * 1e9
    parameter_bytes = plan["predicted"]["memory_bytes"]["parameters"] * (plan["world_size"] if plan["zero_stage"] == 3 else 1)
    assert 12.5e9 < parameter_bytes < 17e9, "with the blocks that are gathered at the same time"
    assert {"strategy", "micro_batch", "precision", "activation_checkpointing"} <= {*plan["reasons"]}
    assert any("needs" in rejected["why"] for rejected in plan["rejected"]) == (machine == "2xT4-16GB")
