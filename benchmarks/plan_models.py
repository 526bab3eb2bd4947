"""Defines the five models that check the predictions of plans first, and their layers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drivetrain import Task, Tensors
from drivetrain.tasks.vision.nets import Conv4


class Labelled(Task):
    """Random samples with labels."""

    samples: int = 4096
    """Number of random samples."""
    classes: int = 10
    """Number of labels."""
    global_batch: int = 256

    def shape(self) -> tuple[int, ...]:
        raise NotImplementedError

    def train_data(self) -> Tensors:
        generator = torch.Generator().manual_seed(0)
        x = torch.randint(0, 256, (self.samples, *self.shape()), dtype=torch.uint8, generator=generator)
        return Tensors(x, torch.randint(0, self.classes, (self.samples,), generator=generator))

    def loss(self, model: Any, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x.float() / 255), y)


class Cnn(Labelled):
    """Guide 001's four convolutions."""

    samples: int = 8192

    def shape(self) -> tuple[int, ...]:
        return 1, 28, 28

    def model(self) -> nn.Module:
        return Conv4(10)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, causal: bool, rotary: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.causal, self.rotary = causal, rotary
        self.q = nn.Linear(width, width, bias=not causal)
        self.kv = nn.Linear(width, 2 * kv_heads * self.size, bias=not causal)
        self.out = nn.Linear(width, width, bias=not causal)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q = self.q(x).view(batch, length, self.heads, self.size).transpose(1, 2)
        k, v = self.kv(x).view(batch, length, 2 * self.kv_heads, self.size).transpose(1, 2).chunk(2, 1)
        if self.rotary:
            angle = torch.arange(length, device=x.device)[:, None] / 10000 ** (torch.arange(0, self.size, 2, device=x.device) / self.size)
            cos, sin = (f(angle).to(q.dtype).repeat(1, 2) for f in (torch.cos, torch.sin))
            q, k = (t * cos + torch.cat((-t[..., self.size // 2 :], t[..., : self.size // 2]), -1) * sin for t in (q, k))
        if self.kv_heads < self.heads:
            k, v = (t.repeat_interleave(self.heads // self.kv_heads, 1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class LlamaBlock(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, inner: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, heads, kv_heads, causal=True, rotary=True)
        self.gate, self.up, self.down = nn.Linear(width, inner, False), nn.Linear(width, inner, False), nn.Linear(inner, width, False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, kv_heads: int, inner: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, heads, kv_heads, inner) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Language(Task):
    """Next-token prediction on random tokens."""

    samples: int = 512
    """Number of random sequences."""
    length: int = 1024
    """Tokens in a sequence."""
    vocabulary: int = 49152
    """Number of different tokens."""
    global_batch: int = 64

    def train_data(self) -> Tensors:
        return Tensors(torch.randint(0, self.vocabulary, (self.samples, self.length), generator=torch.Generator().manual_seed(0)))

    def loss(self, model: Any, batch: Any) -> Tensor:
        logits = model(batch)[:, :-1]
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), batch[:, 1:].reshape(-1))


class Smol135(Language):
    """SmolLM2-135M's shape."""

    def model(self) -> nn.Module:
        return Llama(self.vocabulary, 576, 30, 9, 3, 1536)


class Smol1700(Language):
    """SmolLM2-1.7B's shape."""

    def model(self) -> nn.Module:
        return Llama(self.vocabulary, 2048, 24, 32, 32, 8192)


class VitBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, heads, causal=False, rotary=False)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.inner(self.norm2(x))


class Vit(nn.Module):
    def __init__(self, width: int = 768, layers: int = 12, heads: int = 12, classes: int = 1000) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 16, 16)
        self.positions = nn.Parameter(torch.zeros(1, 196, width))
        self.blocks = nn.ModuleList(VitBlock(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class VitB(Labelled):
    """A ViT-B/16 on images of 224x224."""

    samples: int = 1024
    classes: int = 1000

    def shape(self) -> tuple[int, ...]:
        return 3, 224, 224

    def model(self) -> nn.Module:
        return Vit()


class LstmNet(nn.Module):
    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(tokens))[0])


class Lstm(Language):
    """A language model of two LSTM layers."""

    length: int = 128
    vocabulary: int = 10000
    samples: int = 4096
    global_batch: int = 256

    def model(self) -> nn.Module:
        return LstmNet(self.vocabulary, 1024)


NAMED = {"CNN (guide 001)": Cnn, "ViT-B/16": VitB, "SmolLM2-135M shape": Smol135, "SmolLM2-1.7B shape": Smol1700, "LSTM": Lstm}
