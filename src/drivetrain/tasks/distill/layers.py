"""A causal transformer (pre-norm) that reads a sequence at once, or token by token with a cache of keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Positions = Literal["learned", "rotary"]


@dataclass(frozen=True)
class Shape:
    """The size of a transformer."""

    width: int
    layers: int
    heads: int
    inner: int
    dropout: float
    attention_dropout: float
    positions: Positions


class Cache:
    """Keys and values of the tokens that a transformer has read, in every layer."""

    def __init__(self, num_layers: int) -> None:
        self.length = 0
        self.layers: list[tuple[Tensor, Tensor] | None] = [None] * num_layers

    def extend(self, layer: int, key: Tensor, value: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
        """Adds the keys and values [rows, heads, tokens, size] of new tokens; returns those of all tokens."""
        stored = self.layers[layer]
        if stored is None:
            shape = (*key.shape[:2], capacity, key.shape[3])
            stored = self.layers[layer] = key.new_zeros(shape), value.new_zeros(shape)
        end = self.length + key.shape[2]
        stored[0][:, :, self.length : end], stored[1][:, :, self.length : end] = key, value
        return stored[0][:, :, :end], stored[1][:, :, :end]


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.dropout, self.is_rotary = shape.heads, shape.attention_dropout, shape.positions == "rotary"
        self.query_key_value = nn.Linear(shape.width, 3 * shape.width)
        self.output = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor, first: int, cache: Cache | None, layer: int, capacity: int) -> Tensor:
        query, key, value = self.query_key_value(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if self.is_rotary:
            query, key = rotate(query, first), rotate(key, first)
        mask = None
        if cache is not None:
            key, value = cache.extend(layer, key, value, capacity)
            if 1 < query.shape[2] < key.shape[2]:
                mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=x.device).tril(key.shape[2] - query.shape[2])
        is_causal = mask is None and query.shape[2] > 1
        dropout = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=is_causal)
        output: Tensor = self.output(attended.transpose(1, 2).flatten(2))
        return output


def rotate(x: Tensor, first: int) -> Tensor:
    """Applies rotary position embedding to [rows, heads, tokens, size]; `first` is the position of the first token."""
    half = x.shape[-1] // 2
    frequency = 10_000.0 ** (-torch.arange(half, device=x.device) / half)
    angle = (first + torch.arange(x.shape[-2], device=x.device))[:, None] * frequency
    cosine, sine = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cosine - b * sine, a * sine + b * cosine), -1)


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(shape.width), Attention(shape)
        self.inner_norm = nn.LayerNorm(shape.width)
        self.expand, self.contract = nn.Linear(shape.width, shape.inner), nn.Linear(shape.inner, shape.width)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor, first: int, cache: Cache | None, layer: int, capacity: int) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), first, cache, layer, capacity))
        output: Tensor = x + self.dropout(self.contract(F.gelu(self.expand(self.inner_norm(x)))))
        return output


class Transformer(nn.Module):
    """Blocks with causal attention, for sequences of at most `capacity` tokens."""

    def __init__(self, shape: Shape, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm, self.dropout = nn.LayerNorm(shape.width), nn.Dropout(shape.dropout)
        self.position = nn.Parameter(torch.randn(capacity, shape.width) * 0.02) if shape.positions == "learned" else None

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        """Returns the outputs for new tokens [rows, tokens, width], which follow those in the cache."""
        first = cache.length if cache is not None else 0
        if self.position is not None:
            x = x + self.position[first : first + x.shape[1]]
        x = self.dropout(x)
        for layer, block in enumerate(self.blocks):
            x = block(x, first, cache, layer, self.capacity)
        if cache is not None:
            cache.length += x.shape[1]
        output: Tensor = self.norm(x)
        return output

    def new_cache(self) -> Cache:
        return Cache(len(self.blocks))
