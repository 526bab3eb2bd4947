"""Text encoders: BERT with the names of Hugging Face's state dicts, and any other Hugging Face model in a wrapper."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._guards import detect_fake_mode

from drivetrain.outcomes import Problem
from drivetrain.tasks.cxr.net.encoders import load_named_weights
from drivetrain.tasks.lora.base_model import hub_answers


@dataclass(frozen=True)
class TextShape:
    """Sizes of a BERT."""

    num_tokens: int
    width: int = 768
    layers: int = 12
    heads: int = 12
    inner: int = 3072
    positions: int = 512
    segments: int = 2
    dropout: float = 0.1
    epsilon: float = 1e-12


class BertSelfAttention(nn.Module):
    def __init__(self, shape: TextShape) -> None:
        super().__init__()
        self.heads, self.dropout = shape.heads, shape.dropout
        self.query = nn.Linear(shape.width, shape.width)
        self.key = nn.Linear(shape.width, shape.width)
        self.value = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(q, k, v, mask, self.dropout if self.training else 0.0)
        return y.transpose(1, 2).flatten(2)


class BertAddNorm(nn.Module):
    """A linear layer, dropout, the residual connection and LayerNorm."""

    def __init__(self, inputs: int, shape: TextShape) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, shape.width)
        self.LayerNorm = nn.LayerNorm(shape.width, eps=shape.epsilon)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.LayerNorm(residual + self.dropout(self.dense(x)))  # type: ignore[no-any-return]


class BertBlock(nn.Module):
    """A layer of BERT. The names of its parts are Hugging Face's."""

    def __init__(self, shape: TextShape) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({"self": BertSelfAttention(shape), "output": BertAddNorm(shape.width, shape)})
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(shape.width, shape.inner)})
        self.output = BertAddNorm(shape.inner, shape)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.attention["output"](self.attention["self"](x, mask), x)
        return self.output(F.gelu(self.intermediate["dense"](x)), x)  # type: ignore[no-any-return]


class BertEmbeddings(nn.Module):
    """The sum of the embeddings of a token, its position and the first segment."""

    def __init__(self, shape: TextShape) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(shape.num_tokens, shape.width, padding_idx=0)
        self.position_embeddings = nn.Embedding(shape.positions, shape.width)
        self.token_type_embeddings = nn.Embedding(shape.segments, shape.width)
        self.LayerNorm = nn.LayerNorm(shape.width, eps=shape.epsilon)

    def forward(self, tokens: Tensor) -> Tensor:
        others = self.position_embeddings.weight[: tokens.shape[1]] + self.token_type_embeddings.weight[0]
        return self.LayerNorm(self.word_embeddings(tokens) + others)  # type: ignore[no-any-return]


class BertBlocks(nn.Module):
    """All layers of a BERT."""

    def __init__(self, shape: TextShape) -> None:
        super().__init__()
        self.layer = nn.ModuleList(BertBlock(shape) for _ in range(shape.layers))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for block in self.layer:
            x = block(x, mask)
        return x


class Bert(nn.Module):
    """Tokens [n, t] with the number of real ones [n] to features [n, t, width]."""

    def __init__(self, shape: TextShape) -> None:
        super().__init__()
        self.width = shape.width
        self.embeddings = BertEmbeddings(shape)
        self.dropout = nn.Dropout(shape.dropout)
        self.encoder = BertBlocks(shape)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, is_token: Tensor) -> Tensor:
        return self.encoder(self.dropout(self.embeddings(tokens)), is_token[:, None, None, :])  # type: ignore[no-any-return]


class PretrainedText(nn.Module):
    """Any other model of Hugging Face that turns tokens into features."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net
        self.width = int(net.config.hidden_size)

    def forward(self, tokens: Tensor, is_token: Tensor) -> Tensor:
        return self.net(input_ids=tokens.long(), attention_mask=is_token.long()).last_hidden_state  # type: ignore[no-any-return]


def build_small(num_tokens: int, width: int, layers: int, max_tokens: int, dropout: float) -> Bert:
    """Returns a small BERT with random weights."""
    return Bert(TextShape(num_tokens, width, layers, max(1, width // 32), 4 * width, max_tokens, 1, dropout))


class PretrainedSource:
    """A text model of Hugging Face: a folder, or a name on the hub."""

    def __init__(self, name: str) -> None:
        if importlib.util.find_spec("transformers") is None:
            raise Problem(f"text={name} needs transformers: pip install 'drivetrain[cxr]', or take text=small, which needs no download")
        if os.environ.get("DRIVETRAIN_OFFLINE"):
            os.environ["HF_HUB_OFFLINE"] = "1"
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        self.name = name

    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return self._read(AutoTokenizer)

    def model(self, max_tokens: int) -> Bert | PretrainedText:
        """Returns the model; while a plan is made its weights are not read."""
        from transformers import AutoConfig, AutoModel
        from transformers.utils import logging

        logging.disable_progress_bar()
        logging.set_verbosity_error()
        config = self._read(AutoConfig)
        limit = int(getattr(config, "max_position_embeddings", max_tokens))
        if max_tokens > limit:
            raise Problem(f"max_tokens={max_tokens} is more than text={self.name} can read ({limit}): take max_tokens={limit} or fewer")
        is_real = detect_fake_mode() is None
        if config.model_type != "bert":
            return PretrainedText(self._read(AutoModel, dtype=torch.float32) if is_real else AutoModel.from_config(config))
        own = Bert(_shape_of(config))
        if is_real:
            tensors = self._read(AutoModel, dtype=torch.float32).state_dict()
            load_named_weights(own, tensors, f"text={self.name}", ("pooler.", "embeddings.position_ids"))
        return own

    def _read(self, kind: Any, **options: Any) -> Any:
        is_local = Path(self.name).is_dir() or not hub_answers()
        try:
            return kind.from_pretrained(self.name, local_files_only=is_local, **options)
        except (OSError, ValueError, ImportError) as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise Problem(
                f"text={self.name} cannot be read ({reason}): give a folder with the model, a name on the hub, or text=small, which needs no download"
            ) from None


def _shape_of(config: Any) -> TextShape:
    if config.hidden_act != "gelu":
        raise Problem(f"a BERT with {config.hidden_act} instead of gelu cannot be loaded: take another model for text")
    return TextShape(
        config.vocab_size, config.hidden_size, config.num_hidden_layers, config.num_attention_heads, config.intermediate_size,
        config.max_position_embeddings, config.type_vocab_size, config.hidden_dropout_prob, config.layer_norm_eps,
    )  # fmt: skip
