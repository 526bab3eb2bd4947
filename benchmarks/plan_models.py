"""Models that plans are checked on: five that the published table names, and more that no figure was fitted to."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drivetrain import Task, Tensors
from drivetrain.tasks.vision.nets import Conv4, resnet18


class Labelled(Task):
    """Random samples with labels."""

    samples: int = 4096
    """Samples of the made-up data."""
    classes: int = 10
    """Labels."""
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
        self.n1, self.n2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, heads, kv_heads, causal=True, rotary=True)
        self.gate, self.up, self.down = nn.Linear(width, inner, False), nn.Linear(width, inner, False), nn.Linear(inner, width, False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.n1(x))
        y = self.n2(x)
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
    """Random tokens, the next one predicted."""

    samples: int = 512
    """Sequences of the made-up data."""
    length: int = 1024
    """Tokens of a sequence."""
    vocabulary: int = 49152
    """Tokens there are."""
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
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, heads, causal=False, rotary=False)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.n1(x))
        return x + self.inner(self.n2(x))


class Vit(nn.Module):
    def __init__(self, width: int = 768, layers: int = 12, heads: int = 12, classes: int = 1000) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 16, 16)
        self.place = nn.Parameter(torch.zeros(1, 196, width))
        self.blocks = nn.ModuleList(VitBlock(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2) + self.place
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class VitB(Labelled):
    """A ViT-B/16 on images of 224."""

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


# --- further models whose measurements the shares of published rates were set by, too -----------


class BertNet(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 768)
        layer = nn.TransformerEncoderLayer(768, 12, 3072, 0.1, "gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)
        self.head = nn.Linear(768, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(tokens)))


class Bert(Language):
    """torch's own transformer layers, with dropout."""

    length: int = 256
    vocabulary: int = 30522
    samples: int = 2048
    global_batch: int = 128

    def model(self) -> nn.Module:
        return BertNet(self.vocabulary)


class Unet(Labelled):
    """Down and up again, with GroupNorm and SiLU: pixels are predicted."""

    samples: int = 2048
    global_batch: int = 128

    def shape(self) -> tuple[int, ...]:
        return 3, 64, 64

    def model(self) -> nn.Module:
        return UnetNet()

    def loss(self, model: Any, batch: Any) -> Tensor:
        x = batch[0].float() / 255
        return F.mse_loss(model(x), x)


class UnetNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()

        def twice(before: int, after: int) -> nn.Module:
            convs = [nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(8, after), nn.SiLU()]
            return nn.Sequential(*convs, nn.Conv2d(after, after, 3, padding=1), nn.GroupNorm(8, after), nn.SiLU())

        widths = [64, 128, 256, 512]
        self.down = nn.ModuleList(twice(a, b) for a, b in zip([3, *widths], widths, strict=False))
        self.up = nn.ModuleList(twice(b + a, a) for a, b in pairwise(widths))
        self.out = nn.Conv2d(64, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for stage in self.down:
            x = stage(x)
            kept.append(x)
            x = F.max_pool2d(x, 2) if stage is not self.down[-1] else x
        for stage, other in zip(reversed(self.up), reversed(kept[:-1]), strict=True):
            x = stage(torch.cat((F.interpolate(x, scale_factor=2), other), 1))
        return self.out(x)


class Mlp(Labelled):
    """A wide perceptron."""

    samples: int = 8192
    global_batch: int = 1024

    def shape(self) -> tuple[int, ...]:
        return (1024,)

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 4096), nn.GELU(), nn.Linear(4096, 10))


class Residual(Labelled):
    """A ResNet-18 on images of 128."""

    samples: int = 2048

    def shape(self) -> tuple[int, ...]:
        return 3, 128, 128

    def model(self) -> nn.Module:
        return resnet18(3, 10, 128)


class GruNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.Sequential(nn.Conv1d(80, 256, 5, 2, 2), nn.ReLU(), nn.Conv1d(256, 256, 5, 2, 2), nn.ReLU())
        self.gru = nn.GRU(256, 512, 3, batch_first=True, bidirectional=True)
        self.head = nn.Linear(1024, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(self.convs(x).transpose(1, 2))[0].mean(1))


class Gru(Labelled):
    """Convolutions over time and a GRU both ways, as for speech."""

    samples: int = 2048

    def shape(self) -> tuple[int, ...]:
        return 80, 400

    def model(self) -> nn.Module:
        return GruNet()


class MixerBlock(nn.Module):
    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.across = nn.Sequential(nn.Linear(tokens, 2 * tokens), nn.GELU(), nn.Linear(2 * tokens, tokens))
        self.within = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.across(self.n1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.within(self.n2(x))


class MixerNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 512, 16, 16)
        self.blocks = nn.Sequential(*(MixerBlock(196, 512) for _ in range(8)))
        self.head = nn.Linear(512, 1000)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.patch(x).flatten(2).transpose(1, 2)).mean(1))


class Mixer(VitB):
    """An MLP-Mixer on images of 224."""

    def model(self) -> nn.Module:
        return MixerNet()


# --- unseen: nothing was set by these -----------------------------------------------------------


class PlainBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.n1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2) / (width // self.heads) ** 0.5).softmax(-1)
        x = x + self.out((F.dropout(scores, 0.1, self.training) @ v).transpose(1, 2).reshape(batch, length, width))
        return x + self.inner(self.n2(x))


class PlainNet(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 512)
        self.blocks = nn.ModuleList(PlainBlock(512, 8) for _ in range(6))
        self.head = nn.Linear(512, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class ByHand(Language):
    """Attention written out, so that every score is kept."""

    length: int = 256
    vocabulary: int = 8000
    samples: int = 2048
    global_batch: int = 128

    def model(self) -> nn.Module:
        return PlainNet(self.vocabulary)


class Autoencoder(Unet):
    """Convolutions down, and transposed ones up."""

    def model(self) -> nn.Module:
        down = [nn.Conv2d(3, 64, 4, 2, 1), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 128, 4, 2, 1), nn.BatchNorm2d(128), nn.ReLU()]
        up = [nn.ConvTranspose2d(128, 64, 4, 2, 1), nn.BatchNorm2d(64), nn.ReLU(), nn.ConvTranspose2d(64, 3, 4, 2, 1), nn.Sigmoid()]
        return nn.Sequential(*down, *up)


class RecommenderNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(50000, 64) for _ in range(8))
        self.inner = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10))

    def forward(self, ids: Tensor) -> Tensor:
        return self.inner(torch.cat([table(ids[:, i]) for i, table in enumerate(self.tables)], 1))


class Recommender(Labelled):
    """Eight tables of embeddings and a perceptron."""

    samples: int = 16384
    global_batch: int = 2048

    def shape(self) -> tuple[int, ...]:
        return (8,)

    def model(self) -> nn.Module:
        return RecommenderNet()

    def loss(self, model: Any, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0].long() * 190), batch[1])


NAMED = {"CNN (guide 001)": Cnn, "ViT-B/16": VitB, "SmolLM2-135M shape": Smol135, "SmolLM2-1.7B shape": Smol1700, "LSTM": Lstm}
FURTHER = {
    "BERT layers, dropout": Bert, "U-Net": Unet, "MLP": Mlp, "ResNet-18": Residual, "Conv1d + GRU": Gru, "MLP-Mixer": Mixer,
}  # fmt: skip
UNSEEN = {"attention by hand": ByHand, "convolutional autoencoder": Autoencoder, "recommender": Recommender}
