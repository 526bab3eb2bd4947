"""Writes a run's files for other programs: a peft folder with a model card, or a merged model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

ADAPTER = "adapter_model.safetensors"


def write_adapter(
    tensors: dict[str, Tensor], folder: Path, config: Any, all_linear: bool, card_rows: Mapping[str, str], facts: dict[str, Any]
) -> list[str]:
    """Writes adapter_model.safetensors, adapter_config.json (peft's `config`) and README.md; returns their names."""
    folder.mkdir(parents=True, exist_ok=True)
    adapters = {n.removeprefix("net.").replace(".default", ""): t.detach().cpu().contiguous() for n, t in tensors.items() if n != "base"}
    temporary = folder / f".{ADAPTER}"
    save_file(adapters, temporary, {"format": "pt"})
    temporary.replace(folder / ADAPTER)
    config.inference_mode = True
    if all_linear:  # programs that read the file expect names of layers
        config.target_modules = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in adapters})
    config.save_pretrained(str(folder))
    if "steps" in facts or not (folder / "README.md").is_file():  # an export has fewer facts, so it keeps the run's card
        (folder / "README.md").write_text(model_card(config.base_model_name_or_path, card_rows, facts))
    return [ADAPTER, "adapter_config.json", "README.md"]


def model_card(base: str, card_rows: Mapping[str, str], facts: dict[str, Any]) -> str:
    """Returns a model card, as hubs show it: a table of the run's facts and how to load the adapters."""
    rows = {
        **card_rows,
        **{name.replace("_", " "): facts[name] for name in ("steps", "weights_step", "precision", "processes", "seconds") if name in facts},
        **{f"held-out {name}": f"{value:.4g}" for name, value in facts["metrics"].items()},
    }  # fmt: skip
    lines = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return (
        f"---\nlibrary_name: peft\nbase_model: {base}\ntags: [lora]\n---\n\n# {facts['run']}\n\n"
        f"Trained with drivetrain.\n\n| | |\n|---|---|\n{lines}\n\n"
        f"```python\nfrom peft import PeftModel\nfrom transformers import AutoModelForCausalLM\n\n"
        f'base = AutoModelForCausalLM.from_pretrained("{base}")\nmodel = PeftModel.from_pretrained(base, "{{this folder}}")\n```\n'
    )


def write_merged(net: Any, tokenizer: Any, folder: Path) -> list[str]:
    """Writes the base with the adapters added to its weights, as a model of transformers; returns the files' names."""
    merged = net.merge_and_unload()
    folder.mkdir(parents=True, exist_ok=True)
    merged.save_pretrained(str(folder), max_shard_size="5GB")  # a shard needs as much memory again while it is written
    tokenizer.save_pretrained(str(folder))
    return sorted(file.name for file in folder.iterdir() if file.suffix in (".safetensors", ".json"))
