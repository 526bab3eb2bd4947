"""Adapters: the losses, what documents see, equal learning with transformers' own trainer, and what a run leaves."""

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
from tests.command import bad, good
from tests.lora.models import sentences, write_jsonl, write_model
from tests.patience import Stopwatch
from tests.samples import TASKS, rows, training


@pytest.fixture
def place(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a tiny model and texts for it, and a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    write_model(folder / "model")
    write_jsonl(folder / "texts.jsonl", [{"text": text} for text in sentences(60)])
    return folder


def small(**settings: Any) -> Lora:
    chosen = {"base": "model", "data": "texts.jsonl", "context": 64, "global_batch": 4, "best": None}
    return Lora(**(chosen | settings))


@pytest.mark.parametrize("room", [1, 500, 1 << 27])
@pytest.mark.parametrize("bias", [False, True])
def test_losses_without_logits(room: int, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_loss, "MAX_LOGITS", room)
    torch.manual_seed(0)
    hidden, weight = torch.randn(23, 16, requires_grad=True), torch.randn(50, 16)
    shift = torch.randn(50) if bias else None
    targets = torch.randint(50, (23,))
    targets[::5] = head_loss.IGNORED
    expected = F.cross_entropy(F.linear(hidden, weight, shift), targets, reduction="sum")
    (wanted,) = torch.autograd.grad(expected * 0.3, hidden)
    total, each = head_loss.losses(hidden, weight, shift, targets)
    (found,) = torch.autograd.grad(total * 0.3, hidden)
    assert torch.allclose(total, expected, rtol=1e-6)
    assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-6)
    assert torch.allclose(each.sum(), total) and (each[::5] == 0).all() and not each.requires_grad
    plain, _ = head_loss.losses_of_logits(F.linear(hidden, weight, shift), targets)
    assert torch.allclose(plain, expected)


@pytest.mark.parametrize("kind", ["llama", "mistral", "gptj", "gemma2", "gpt_oss", "mpt"])
def test_documents_in_a_row_do_not_see_each_other(place: Path, kind: str) -> None:
    """Packed, every token has the loss it has alone. Mistral's here sees only six tokens back, as half the layers of Gemma's and
    gpt-oss's do; the last four have no fused attention in transformers: caps on scores, sinks, biases by distance."""
    write_model(place / "other", kind=kind)
    task, alone = small(base="other"), small(base="other", packing=False)
    seed_everything(0)
    model = task.model()
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    packed, padded = task.train_data()[:], alone.train_data()[:]
    assert len(packed[0]) < 0.7 * len(padded[0]) and int(packed[1].max()) > 2
    sums = []
    for some, settings in ((packed, task), (padded, alone)):
        batch = tuple(torch.as_tensor(np.array(column)) for column in some)
        total, each, counts = model(*batch, settings._has_single_documents)
        sums.append((float(total.detach()), int(counts.sum())))
        assert torch.allclose(each.sum(), total, rtol=1e-5)
    assert sums[0][1] == sums[1][1]
    assert sums[0][0] == pytest.approx(sums[1][0], rel=1e-5)
    mixed = tuple(torch.as_tensor(np.array(column)) for column in packed)
    apart, together = model(*mixed)[1], model(*mixed, True)[1]  # the second as if each row were one document
    assert not torch.allclose(apart, together, rtol=1e-4), "else the test proves nothing"


@pytest.mark.system  # it takes its time
def test_it_learns_as_transformers_trainer_does(place: Path) -> None:
    """200 steps on the same batches, to 1e-4."""
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import Trainer, TrainingArguments

    settings = {"base": "model", "data": "texts.jsonl", "context": 48, "packing": False, "held_out": 0.0, "global_batch": 4, "steps": 200,
                "learning_rate": 3e-3, "decay": "constant", "clip": 1.0, "best": None, "log_every": 1}  # fmt: skip
    TASKS["Lora"] = Lora
    job = training("Lora", str(place / "run"), Group(0, 1, torch.device("cpu")), settings, {"micro_batch": 2})
    task = job.setup.task
    theirs = _copy(job.setup.model).net  # type: ignore[attr-defined]
    job.run_to_end()
    job.setup.observer.close()
    ours = [row["train/loss"] for row in rows(place / "run")]

    tokens, document, learned = (np.asarray(c) for c in task.train_data().columns)
    per_epoch = -(-len(tokens) // 4)
    order = torch.cat([permutation(len(tokens), 0, epoch, RandomStream.ORDER) for epoch in range(-(-200 // per_epoch))]).tolist()
    assert len(tokens) % 4 == 0, "so that batches of theirs end where epochs do"
    labels = np.where(learned, tokens, -100)
    data = Dataset.from_dict({"input_ids": tokens[order], "attention_mask": (document > 0)[order].astype(int), "labels": labels[order]})

    class InOrder(Trainer):
        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return SequentialSampler(data)

    options = TrainingArguments(
        output_dir=str(place / "theirs"), per_device_train_batch_size=4, max_steps=200, learning_rate=3e-3, lr_scheduler_type="constant",
        max_grad_norm=1.0, weight_decay=0.0, logging_steps=1, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = InOrder(model=theirs, args=options, train_dataset=data)
    trainer.train()
    expected = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(ours) == len(expected) == 200 and ours[-1] < 0.9 * ours[0]
    assert max(abs(a - b) / b for a, b in zip(ours, expected, strict=True)) < 1e-4


def _copy(model: Any) -> Any:
    import copy

    return copy.deepcopy(model)


@pytest.mark.parametrize("name", ["peft", "transformers"])
def test_what_is_not_installed_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    with pytest.raises(Problem, match=f"lora needs {name}: pip install 'drivetrain\\[lora\\]'"):
        Lora(base="shape:tiny").model()


def test_the_run_leaves_an_adapter_that_peft_loads(place: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    good("train", "lora", "base=model", "data=texts.jsonl", "context=64", "steps=40", "global_batch=4", "learning_rate=0.03", "eval_first=true",
         "prompt=the cat", "targets=q_proj,v_proj,down_proj", "--name", "one")  # fmt: skip
    run = place / "runs" / "one"
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    before = next(e["metrics"]["perplexity"] for e in events if e["event"] == "before")
    after = [row["eval/perplexity"] for row in rows(run) if "eval/perplexity" in row][-1]
    assert after < 0.9 * before
    samples = [(e["step"], e["text"]) for e in events if e["event"] == "remark"]
    assert samples[0][0] == 0 and samples[-1][0] == 40 and all(text.startswith("'the cat' goes on: ") for _, text in samples)
    assert f"remark       {samples[-1][1]}   (step 40)" in good("status", "one")
    net = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(place / "model"), str(run / "model")).eval()
    task = small(targets="q_proj,v_proj,down_proj")
    from drivetrain.engine.inference import trained_model

    ours: Any = trained_model(task, Run(run))
    ids = torch.arange(1, 20)[None] % 20
    with torch.no_grad():
        expected = net(input_ids=ids).logits
        # not to the bit: PEFT adds two products, ours adds the second within the first, which some CPUs round otherwise
        assert torch.allclose(ours.net(input_ids=ids).logits, expected, rtol=1e-5, atol=1e-6)
        assert not torch.allclose(AutoModelForCausalLM.from_pretrained(place / "model")(input_ids=ids).logits, expected, atol=1e-3)
    assert "| base model | model |" in (run / "model" / "README.md").read_text()
    assert (run / "model" / "model.safetensors").stat().st_size < 50_000, "the base is not in it"

    good("export", "one")
    assert "| steps | 40 |" in (run / "model" / "README.md").read_text(), "the run's own card stays"
    good("export", "one", "--merge", "--out", "merged")
    merged = AutoModelForCausalLM.from_pretrained(place / "merged").eval()
    with torch.no_grad():
        assert torch.allclose(merged(input_ids=ids).logits, expected, atol=1e-5)
    text = "".join(generate(ours.net, task.tokenizer, "the cat", 12, 0.0))
    assert good("predict", "one", "the cat", "tokens=12", "temperature=0").strip() == text.strip()
    assert "did you mean tokens" in bad("predict", "one", "the cat", "tokns=1")

    config = place / "model" / "config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    assert "trained on another base model" in bad("predict", "one", "the cat")


def test_a_half_precision_base_stays_one(place: Path) -> None:
    """Merged, its weights are of the same kind, and its logits within bf16's tolerance of the adapters' beside it."""
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(place / "model", dtype=torch.bfloat16).save_pretrained(place / "model")
    task = small()
    seed_everything(0)
    model = task.model().eval()
    assert {p.dtype for p in model.net.parameters() if not p.requires_grad} == {torch.bfloat16}
    ids = torch.arange(1, 20)[None] % 20
    with torch.no_grad():
        plain = model.net(input_ids=ids).logits.float()
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.05)
        adapted = model.net(input_ids=ids).logits.float()
    task.model_files(model.state_dict(), place / "merged", {}, merge=model)
    merged = AutoModelForCausalLM.from_pretrained(place / "merged")
    with torch.no_grad():
        found = merged(input_ids=ids).logits.float()
    assert merged.dtype == torch.bfloat16
    assert (found - adapted).norm() < 0.02 * adapted.norm() < 0.2 * (plain - adapted).norm()


def test_a_broken_run_goes_on_to_the_last_bit(place: Path) -> None:
    words = ["lora", "base=model", "data=texts.jsonl", "context=64", "steps=12", "global_batch=4", "dropout=0.1", "save_every=5"]
    assert "is bit-equal to the unbroken run" in good("verify-resume", *words)


def losses_of(place: Path, name: str, pins: dict[str, Any], **settings: Any) -> list[float]:
    """Of thirty steps in this process."""
    TASKS["Lora"] = Lora
    given = {"base": "model", "data": "texts.jsonl", "context": 64, "steps": 30, "global_batch": 4, "learning_rate": 0.02, "dropout": 0.1,
             "held_out": 0.0, "best": None, "log_every": 1}  # fmt: skip
    job = training("Lora", str(place / name), Group(0, 1, torch.device("cpu")), given | settings, pins)
    job.run_to_end()
    job.setup.observer.close()
    assert not [event for event in job.setup.run.events() if event["event"] == "depends-on-plan"]
    return [row["train/loss"] for row in rows(place / name)]


def test_blocks_that_run_again_change_no_loss(place: Path) -> None:
    """Activation checkpointing, with the same dropout in both passes."""
    plain, again = (losses_of(place, str(on), {"micro_batch": 2, "activation_checkpointing": on}) for on in (False, True))
    assert len(plain) == 30 and again == plain and plain[-1] < 0.9 * plain[0]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_learns_as_full_does(place: Path, precision: str) -> None:
    """fp16 may take a few steps to find its scale."""
    full, half = (losses_of(place, kind, {}, precision=kind) for kind in ("fp32", precision))
    assert half != full and half == pytest.approx(full, rel=0.08) and half[-1] == pytest.approx(full[-1], rel=0.03)
    assert half[-1] < 0.9 * half[0]


@pytest.mark.system  # it takes its time
def test_micro_batches_and_processes_change_no_loss(place: Path) -> None:
    """Rows have from few to many tokens to learn: a mean of means would show."""
    pairs = [{"prompt": text, "completion": " ".join(text.split()[: 1 + i % 9])} for i, text in enumerate(sentences(60, 3))]
    write_jsonl(place / "pairs.jsonl", pairs)
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
    good(*words, "--name", "whole")
    good(*words, "plan.micro_batch=1", "--name", "single")
    good(*words, "--procs", "2", "plan.micro_batch=2", "--name", "two")
    good(*words, "--procs", "2", "plan.strategy=fsdp", "prompt=the cat", "--name", "sharded")
    assert [e["step"] for e in Run(place / "runs" / "sharded").events() if e["event"] == "remark"] == [5, 8], "a sample of all shards"
    whole = [row["train/loss"] for row in rows(place / "runs" / "whole")]
    for other in ("single", "two", "sharded"):
        found = [row["train/loss"] for row in rows(place / "runs" / other)]
        assert len(found) == 8 and found == pytest.approx(whole, rel=2e-5)


def test_what_cannot_be_used_is_named(place: Path) -> None:
    with pytest.raises(Problem, match="linear layers of this model: down_proj, gate_proj"):
        small(targets="query").model()
    for name, why in (("./nowhere", "there is no such folder"), (".", "has no config.json"), ("shape:big", "the shapes are tiny")):
        with pytest.raises(Problem, match=why):
            find_base(name)
    write_model(place / "plain", template=None)
    write_jsonl(place / "chats.jsonl", [{"messages": [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]}])
    assert "no chat template" in bad("train", "lora", "base=plain", "data=chats.jsonl", "steps=1")
    watch = Stopwatch()
    message = bad("train", "lora", "data=texts.jsonl", "steps=1", "base=nobody/no-such-model", lines=3, HF_ENDPOINT="http://127.0.0.1:9")
    assert "could not be fetched from the hub" in message and "hf download nobody/no-such-model" in message
    message = bad("train", "lora", "data=nobody/no-such-set", "steps=1", "base=model", lines=3, HF_ENDPOINT="http://127.0.0.1:9")
    assert "could not be fetched from the hub" in message and "hf download nobody/no-such-set --repo-type dataset" in message
    assert watch.seconds < 60, "the hub's client would try again and again"


def test_half_a_mistake_in_the_targets_is_named_too(place: Path) -> None:
    with pytest.raises(Problem, match=r"no layer is called v_prj .*down_proj"):
        small(targets="q_proj,v_prj").model()


def test_a_plain_file_trains_as_it_is(place: Path) -> None:
    """One document, whose end is held out."""
    Path("story.txt").write_text("\n".join(sentences(60)))
    good("train", "lora", "base=model", "data=story.txt", "context=64", "steps=4", "--name", "story")
    assert "eval/perplexity" in rows("runs/story")[-1]
    good("train", "lora", "base=model", "data=story.txt", "context=64", "steps=4", "held_out=0", "--name", "all")
    assert "eval/perplexity" not in rows("runs/all")[-1]


@pytest.mark.parametrize(("share", "out"), [(0.4, 24), (0.05, 3), (0.03, 1), (0.01, 1), (0.5, 30), (0.0, 0)])
def test_the_share_that_is_held_out_is_the_one_asked_for(place: Path, share: float, out: int) -> None:
    _, learned, held = small(held_out=share)._split
    assert (len(learned), len(held)) == (60 - out, out) and not {*learned} & {*held}


def test_predict_begins_as_training_does(place: Path) -> None:
    write_model(place / "begins", begins=True)
    write_jsonl(place / "one.jsonl", [{"text": "the cat sat"}])
    task = small(base="begins", data="one.jsonl", held_out=0)
    net = task.model().net
    seen: list[Any] = []
    net.register_forward_pre_hook(lambda _, args, given: seen.append(given["input_ids"]), with_kwargs=True)
    list(generate(net, task.tokenizer, "the cat sat", 1, 0.0))
    assert seen[0][0].tolist() == task.train_data().columns[0][0, :4].tolist()
    assert seen[0][0, 0] == task.tokenizer.bos_token_id != seen[0][0, 1]


def test_prompts_that_leave_nothing_to_learn_are_refused(place: Path) -> None:
    write_jsonl(place / "long.jsonl", [{"prompt": " ".join(["cat"] * 90), "completion": "sat"} for _ in range(4)])
    message = bad("train", "lora", "base=model", "data=long.jsonl", "long=truncate", "context=64", "steps=1")
    assert "nothing is left to learn: raise context" in message


def test_layers_that_carry_one_document_into_the_next_are_not_packed(place: Path) -> None:
    from transformers import Lfm2Config, Lfm2ForCausalLM

    config = Lfm2Config(
        vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        layer_types=["conv", "full_attention"],
    )  # fmt: skip
    write_model(place / "carries")
    Lfm2ForCausalLM(config).save_pretrained(place / "carries")
    with pytest.raises(Problem, match=r"layers \(conv\) that carry one document .*packing=false"):
        small(base="carries").model()
    assert small(base="carries", packing=False).model()


def test_attention_that_takes_no_mask_is_not_packed(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(place / "bloom", kind="bloom")
    with pytest.raises(Problem, match=r"BloomForCausalLM cannot keep documents of a row apart: set packing=false"):
        small(base="bloom").model()
    assert small(base="bloom", packing=False).model()
    assert "no fused attention for BloomForCausalLM" in capsys.readouterr().err


def test_a_head_that_is_more_than_a_matrix_is_asked_for_its_logits(place: Path) -> None:
    from transformers import RobertaConfig, RobertaForCausalLM

    config = RobertaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, is_decoder=True, type_vocab_size=1,
        pad_token_id=1, max_position_embeddings=80,
    )  # fmt: skip
    write_model(place / "more")
    torch.manual_seed(0)
    RobertaForCausalLM(config).save_pretrained(place / "more")
    model = small(base="more", packing=False, targets="query,value").model()
    tokens = torch.arange(5, 37)[None]
    each = torch.ones_like(tokens)
    total, _, counts = model(tokens, each, each.bool(), True)
    expected = model.net(input_ids=tokens, labels=tokens).loss
    assert float(total / counts.sum()) == pytest.approx(float(expected), rel=1e-5)


def test_what_was_fetched_once_needs_no_network(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = place / "hub" / "models--some--model"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("1" * 40)
    write_model(kept / "snapshots" / ("1" * 40))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(place / "hub"))
    monkeypatch.setattr("drivetrain.tasks.lora.base_model.hub_answers", lambda: False)
    base = find_base("some/model")
    assert base.tokenizer().vocab_size and sum(p.numel() for p in base.model(torch.float32).parameters())


def test_another_base_is_not_taken_for_the_first(place: Path) -> None:
    seed_everything(0)
    state = small().model().state_dict()
    other = write_model(place / "other", kind="mistral")
    with pytest.raises(Problem, match="another base model"):
        small(base=str(other)).model().load_state_dict(state)


@pytest.mark.parametrize("settings", [{"dora": True}, {"rslora": True}, {"targets": "q_proj, v_proj"}])
def test_pefts_own_options(place: Path, settings: dict[str, Any]) -> None:
    model = small(**settings).model()
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    assert set(model.state_dict()) == {*names, "base"}
    assert any("magnitude" in name for name in names) == settings.get("dora", False)
    if "targets" in settings:
        assert {name.split(".lora_")[0].rpartition(".")[2] for name in names} == {"q_proj", "v_proj"}


def test_guide_000s_recipe_trains(place: Path) -> None:
    recipe = Path(__file__).parents[2] / "recipes" / "lora-guide-000.yaml"
    assert "drivetrain train recipes/lora-guide-000.yaml" in recipe.read_text()
    (place / "lines.txt").write_text("\n\n".join(sentences(40)) + "\n")
    out = good("train", str(recipe), "base=model", "data=lines.txt", "unit=lines", "steps=3", "context=30")
    assert "40 documents" in out and "longer ones were truncated" in out, "all lines are learned, each in a row of its own"
    assert "step 3/3" in out and "perplexity" not in out
    config = json.loads((place / "runs" / "lora-001" / "model" / "adapter_config.json").read_text())
    assert sorted(config["target_modules"]) == ["q_proj", "v_proj"]


@pytest.mark.system  # half a minute
def test_a_plan_needs_neither_weights_nor_a_gpu(folder: Path) -> None:
    """Frozen weights count in half precision, and only the adapters have gradients and an optimizer's state."""
    words = ["plan", "lora", "base=shape:135m", "context=64", "global_batch=8", "--hardware", "2xL4-24GB", "--json"]
    plan = json.loads(good(*words, XDG_CACHE_HOME=str(folder / "cache")))["plan"]
    parts = plan["predicted"]["memory_bytes"]
    assert plan["precision"] == "bf16"
    assert 0.26e9 < parts["parameters"] < 0.31e9, parts
    assert parts["gradients"] + parts["optimizer"] < 0.06e9, parts


@pytest.mark.system  # a minute each
@pytest.mark.parametrize(("machine", "precision", "again"), [("4xL4-24GB", "bf16", False), ("2xT4-16GB", "fp16", True)])
def test_a_7b_shape_is_planned_and_explained(place: Path, machine: str, precision: str, again: bool) -> None:
    """From its config alone: 13 GB of frozen weights, with room beside them on an L4, and none for activations on a T4."""
    from transformers import LlamaConfig

    (place / "model" / "model.safetensors").unlink()
    LlamaConfig(**SHAPES["7b"]).save_pretrained(place / "model")
    words = ["plan", "lora", "base=model", "data=texts.jsonl", "context=512", "global_batch=16", "--hardware", machine]
    told = json.loads(good(*words, "--json"))
    plan = told["plan"]
    assert (plan["precision"], plan["world_size"]) == (precision, int(machine[0]))
    assert plan["activation_checkpointing"] is again or plan["strategy"] == "fsdp"
    assert sum(plan["predicted"]["memory_bytes"].values()) < float(machine[-4:-2]) * 1e9
    whole = plan["predicted"]["memory_bytes"]["parameters"] * (plan["world_size"] if plan["zero_stage"] == 3 else 1)
    assert 12.5e9 < whole < 17e9, "beside the parts of some blocks that are gathered at once"
    assert {"strategy", "micro_batch", "precision", "activation_checkpointing"} <= {*plan["reasons"]}
    assert any("needs" in lost["why"] for lost in plan["rejected"]) == (machine == "2xT4-16GB")
