"""What a run of adapters leaves for other programs: a peft folder, a merged model, a card."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import save_file
from torch import Tensor, nn

from drivetrain.outcomes import Problem

if TYPE_CHECKING:
    from drivetrain.tasks.lora.lora import Lora

ADAPTER = "adapter_model.safetensors"


def write_adapter(task: Lora, tensors: dict[str, Tensor], folder: Path, facts: dict[str, Any]) -> list[str]:
    """adapter_model.safetensors, adapter_config.json and README.md."""
    folder.mkdir(parents=True, exist_ok=True)
    named = {n.removeprefix("net.").replace(".default", ""): t.detach().cpu().contiguous() for n, t in tensors.items() if n != "base"}
    half = folder / f".{ADAPTER}"
    save_file(named, half, {"format": "pt"})
    half.replace(folder / ADAPTER)
    config = task.adapter()
    config.inference_mode = True
    config.base_model_name_or_path = task.place
    if task.targets == "all-linear":  # by name, as a reader of the file expects
        config.target_modules = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in named})
    config.save_pretrained(str(folder))
    if "steps" in facts or not (folder / "README.md").is_file():  # the run's own card says more
        (folder / "README.md").write_text(card(task, named, facts))
    return [ADAPTER, "adapter_config.json", "README.md"]


def card(task: Lora, named: dict[str, Tensor], facts: dict[str, Any]) -> str:
    """The run's facts, as hubs show them."""
    count = sum(t.numel() for t in named.values())
    rows = {
        "base model": task.base, "data": task.data, "adapters": f"rank {task.rank}, alpha {task.alpha:g}, dropout {task.dropout:g}, {task.targets}"
        + (", DoRA" if task.dora else "") + (", rsLoRA" if task.rslora else ""), "learned parameters": f"{count:,}",
        "a step": f"{task.global_batch} rows of {task.context} tokens", "learning rate": f"{task.learning_rate:g}, {task.decay}",
        **{name.replace("_", " "): facts[name] for name in ("steps", "weights_step", "precision", "processes", "seconds") if name in facts},
        **{f"held-out {name}": f"{value:.4g}" for name, value in facts["metrics"].items()},
    }  # fmt: skip
    lines = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return (
        f"---\nlibrary_name: peft\nbase_model: {task.place}\ntags: [lora]\n---\n\n# {facts['run']}\n\n"
        f"Trained with drivetrain.\n\n| | |\n|---|---|\n{lines}\n\n"
        f"```python\nfrom peft import PeftModel\nfrom transformers import AutoModelForCausalLM\n\n"
        f'base = AutoModelForCausalLM.from_pretrained("{task.place}")\nmodel = PeftModel.from_pretrained(base, "{{this folder}}")\n```\n'
    )


def write_merged(task: Lora, model: Any, folder: Path) -> list[str]:
    """The base with the adapters added to its weights: a model like any other."""
    if task.base.startswith("shape:"):
        raise Problem(f"base={task.base} has random weights: there is nothing to merge for")
    net: nn.Module = model.net.merge_and_unload()
    folder.mkdir(parents=True, exist_ok=True)
    net.save_pretrained(str(folder), max_shard_size="5GB")  # type: ignore[operator]  # of which there is a second copy while it is written
    task.tokenizer.save_pretrained(str(folder))
    return sorted(file.name for file in folder.iterdir() if file.suffix in (".safetensors", ".json"))
