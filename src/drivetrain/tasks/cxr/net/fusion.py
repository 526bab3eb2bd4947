"""Joins image, question and scene graph: cross-attention layers, then one vector for each question."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class TokenSet(NamedTuple):
    """Features [n, tokens, width], of which those with a True in the mask [n, tokens] are real."""

    features: Tensor
    is_real: Tensor

    def mean(self) -> Tensor:
        """Returns the mean of the real tokens; zeros where there are none."""
        weight = self.is_real[..., None].to(self.features.dtype)
        return (self.features * weight).sum(1) / weight.sum(1).clamp(min=1)

    def repeat(self, times: int) -> TokenSet:
        """Returns each row `times` times in succession."""
        return TokenSet(*(part[:, None].expand(-1, times, *part.shape[1:]).flatten(0, 1) for part in self))


class CrossAttention(nn.Module):
    """Tokens attend to the real tokens of another set; dropout, residual connection and LayerNorm follow."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))
        self.dropout = nn.Dropout(dropout)
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor, others: TokenSet) -> Tensor:
        query, key, value = (
            self._split(self.query(tokens)),
            self._split(self.key(others.features)),
            self._split(self.value(others.features)),
        )
        mask = others.is_real[:, None, None, :]
        mixed = F.scaled_dot_product_attention(query, key, value, mask, self.dropout.p if self.training else 0.0)
        return self.norm(tokens + self.dropout(self.output(mixed.transpose(1, 2).flatten(2))))  # type: ignore[no-any-return]

    def weights(self, tokens: Tensor, others: TokenSet) -> Tensor:
        """Returns the attention weights, the mean over the heads: [n, tokens, others]."""
        query, key = self._split(self.query(tokens)), self._split(self.key(others.features))
        scores = (query @ key.transpose(-1, -2)).float() / query.shape[-1] ** 0.5
        scores = scores.masked_fill(~others.is_real[:, None, None, :], float("-inf"))
        return scores.softmax(-1).mean(1)  # type: ignore[no-any-return]

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # type: ignore[no-any-return]


class InteractionLayer(nn.Module):
    """Visual tokens and graph nodes attend to the question, the question to the visual tokens."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.visual_to_text = CrossAttention(width, heads, dropout)
        self.text_to_visual = CrossAttention(width, heads, dropout)
        self.scene_to_text = CrossAttention(width, heads, dropout)

    def forward(self, visual: TokenSet, text: TokenSet, scene: TokenSet) -> tuple[TokenSet, TokenSet, TokenSet]:
        return (
            TokenSet(self.visual_to_text(visual.features, text), visual.is_real),
            TokenSet(self.text_to_visual(text.features, visual), text.is_real),
            TokenSet(self.scene_to_text(scene.features, text), scene.is_real),
        )


class Fusion(nn.Module):
    """Interaction layers; the means of the three sets are added, and a perceptron follows."""

    def __init__(self, width: int, heads: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(InteractionLayer(width, heads, dropout) for _ in range(layers))
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(dropout), nn.Linear(4 * width, width))
        self.norm = nn.LayerNorm(width)

    def forward(self, visual: TokenSet, text: TokenSet, scene: TokenSet) -> Tensor:
        """Returns one vector for each row of the three sets."""
        for layer in self.layers:
            visual, text, scene = layer(visual, text, scene)
        joined = text.mean() + visual.mean() + scene.mean()
        return self.norm(joined + self.perceptron(joined))  # type: ignore[no-any-return]

    def attention(self, visual: TokenSet, text: TokenSet, scene: TokenSet) -> Tensor:
        """Returns how much the question attends to each visual token in the last layer: [n, visual tokens]."""
        *earlier, last = self.layers
        for layer in earlier:
            visual, text, scene = layer(visual, text, scene)
        assert isinstance(last, InteractionLayer)
        weights = last.text_to_visual.weights(text.features, visual)
        return TokenSet(weights, text.is_real).mean()


def head(inputs: int, hidden: int, outputs: int, dropout: float) -> nn.Sequential:
    """Returns a perceptron with one hidden layer."""
    return nn.Sequential(nn.Linear(inputs, hidden), nn.GELU(), nn.Dropout(dropout), nn.Linear(hidden, outputs))


def is_token(num_tokens: Tensor, length: int) -> Tensor:
    """Returns which of `length` tokens are real; the first one always is, so that an attention has something to attend to."""
    return torch.arange(length, device=num_tokens.device) < num_tokens.clamp(min=1)[..., None]
