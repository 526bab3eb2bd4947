"""Defines further models that check the predictions of plans: most also set the predictions' constants, the last three did not."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from plan_models import Labelled, Language, VitB
from torch import Tensor, nn

from drivetrain.tasks.vision.nets import resnet18

# --- models that were used to set constants -----------------------------------------------------


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
    """A U-Net with GroupNorm and SiLU that reconstructs its images."""

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

        def two_convs(inputs: int, outputs: int) -> nn.Module:
            convs = [nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(8, outputs), nn.SiLU()]
            return nn.Sequential(*convs, nn.Conv2d(outputs, outputs, 3, padding=1), nn.GroupNorm(8, outputs), nn.SiLU())

        widths = [64, 128, 256, 512]
        self.down = nn.ModuleList(two_convs(a, b) for a, b in zip([3, *widths], widths, strict=False))
        self.up = nn.ModuleList(two_convs(b + a, a) for a, b in pairwise(widths))
        self.out = nn.Conv2d(64, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for stage in self.down:
            x = stage(x)
            skips.append(x)
            x = F.max_pool2d(x, 2) if stage is not self.down[-1] else x
        for stage, skip in zip(reversed(self.up), reversed(skips[:-1]), strict=True):
            x = stage(torch.cat((F.interpolate(x, scale_factor=2), skip), 1))
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
    """A ResNet-18 on images of 128x128."""

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
    """Convolutions over time and a bidirectional GRU, as for speech."""

    samples: int = 2048

    def shape(self) -> tuple[int, ...]:
        return 80, 400

    def model(self) -> nn.Module:
        return GruNet()


class MixerBlock(nn.Module):
    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.across = nn.Sequential(nn.Linear(tokens, 2 * tokens), nn.GELU(), nn.Linear(2 * tokens, tokens))
        self.within = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.across(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.within(self.norm2(x))


class MixerNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 512, 16, 16)
        self.blocks = nn.Sequential(*(MixerBlock(196, 512) for _ in range(8)))
        self.head = nn.Linear(512, 1000)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.patch(x).flatten(2).transpose(1, 2)).mean(1))


class Mixer(VitB):
    """An MLP-Mixer on images of 224x224."""

    def model(self) -> nn.Module:
        return MixerNet()


class PlainBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2) / (width // self.heads) ** 0.5).softmax(-1)
        x = x + self.out((F.dropout(scores, 0.1, self.training) @ v).transpose(1, 2).reshape(batch, length, width))
        return x + self.inner(self.norm2(x))


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
    """Attention in single operations, which keep all scores in memory."""

    length: int = 256
    vocabulary: int = 8000
    samples: int = 2048
    global_batch: int = 128

    def model(self) -> nn.Module:
        return PlainNet(self.vocabulary)


class Autoencoder(Unet):
    """An autoencoder of convolutions and transposed convolutions."""

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


class DepthwiseBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.across, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.LayerNorm(width)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(self.across(x).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)


class Depthwise(Labelled):
    """Depthwise convolutions with perceptrons between them, on images of 96x96."""

    samples: int = 2048

    def shape(self) -> tuple[int, ...]:
        return 3, 96, 96

    def model(self) -> nn.Module:
        stages: list[nn.Module] = []
        for inputs, width in ((3, 96), (96, 192), (192, 384)):
            stages += [nn.Conv2d(inputs, width, 2, 2), *(DepthwiseBlock(width) for _ in range(3))]
        return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(384, self.classes))


class TranslatorNet(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 512)
        self.transformer = nn.Transformer(512, 8, 4, 4, 2048, 0.1, batch_first=True)
        self.head = nn.Linear(512, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(self.transformer(x, x))


class Translator(Language):
    """An encoder and a decoder with cross-attention."""

    length: int = 192
    vocabulary: int = 16000
    samples: int = 2048
    global_batch: int = 128

    def model(self) -> nn.Module:
        return TranslatorNet(self.vocabulary)


class PointsNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = (3, 64, 128, 512)
        layers = [layer for a, b in pairwise(widths) for layer in (nn.Conv1d(a, b, 1), nn.BatchNorm1d(b), nn.ReLU())]
        self.per_point, self.head = nn.Sequential(*layers), nn.Sequential(nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.per_point(x).amax(2))


class Points(Labelled):
    """Clouds of 1,024 points: a network for each point, then the maximum over all."""

    samples: int = 4096

    def shape(self) -> tuple[int, ...]:
        return 3, 1024

    def model(self) -> nn.Module:
        return PointsNet()


class GraphNet(nn.Module):
    """A graph network: nodes sum the messages of their neighbours, four times."""

    edges: Tensor

    def __init__(self, nodes: int, width: int) -> None:
        super().__init__()
        self.register_buffer("edges", torch.randint(nodes, (2, 8 * nodes), generator=torch.Generator().manual_seed(0)))
        self.first, self.last = nn.Linear(16, width), nn.Linear(width, 10)
        self.rounds = nn.ModuleList(nn.Sequential(nn.Linear(2 * width, width), nn.SiLU(), nn.Linear(width, width)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for message in self.rounds:
            messages = message(torch.cat([x[:, self.edges[0]], x[:, self.edges[1]]], 2))
            x = x + torch.zeros_like(x).index_add(1, self.edges[1], messages.to(x.dtype))
        return self.last(x.mean(1))


class Graph(Labelled):
    samples: int = 4096

    def shape(self) -> tuple[int, ...]:
        return 64, 16

    def model(self) -> nn.Module:
        return GraphNet(64, 128)


class Film(Labelled):
    """Three-dimensional convolutions on films of eight small images."""

    samples: int = 2048

    def shape(self) -> tuple[int, ...]:
        return 3, 8, 48, 48

    def model(self) -> nn.Module:
        widths = (3, 32, 64, 128)
        blocks = [m for a, b in pairwise(widths) for m in (nn.Conv3d(a, b, 3, padding=1), nn.BatchNorm3d(b), nn.ReLU(), nn.MaxPool3d(2))]
        return nn.Sequential(*blocks, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(128, 10))


# --- unseen models: they did not set any constant ------------------------------------------------


class DenseNet(nn.Module):
    """Each layer gets the outputs of all layers before it in its stage."""

    def __init__(self, growth: int, depth: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        self.stages, self.transitions, width = nn.ModuleList(), nn.ModuleList(), 64
        for _ in range(3):
            widths = [width + growth * i for i in range(depth)]
            self.stages.append(
                nn.ModuleList(nn.Sequential(nn.BatchNorm2d(w), nn.ReLU(), nn.Conv2d(w, growth, 3, padding=1, bias=False)) for w in widths)
            )
            width += growth * depth
            self.transitions.append(nn.Sequential(nn.Conv2d(width, width // 2, 1, bias=False), nn.AvgPool2d(2)))
            width //= 2
        self.last = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for stage, transition in zip(self.stages, self.transitions, strict=True):
            for layer in stage:  # type: ignore[attr-defined]
                x = torch.cat([x, layer(x)], 1)
            x = transition(x)
        return self.last(x.mean((2, 3)))


class Dense(Labelled):
    samples: int = 2048

    def shape(self) -> tuple[int, ...]:
        return 3, 64, 64

    def model(self) -> nn.Module:
        return DenseNet(32, 6)


class WaveNet(nn.Module):
    """Dilated convolutions over a wave, each with a gate, a norm and a residual connection."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.first, self.last = nn.Conv1d(1, width, 3, padding=1), nn.Linear(width, 10)
        self.convs = nn.ModuleList(nn.Conv1d(width, 2 * width, 3, padding=2 ** (i % 8), dilation=2 ** (i % 8)) for i in range(depth))
        self.norms = nn.ModuleList(nn.GroupNorm(8, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            value, gate = conv(norm(x)).chunk(2, 1)
            x = x + value.tanh() * gate.sigmoid()
        return self.last(x.mean(2))


class Waves(Labelled):
    samples: int = 1024

    def shape(self) -> tuple[int, ...]:
        return 1, 2048

    def model(self) -> nn.Module:
        return WaveNet(128, 12)


class ExpertsNet(nn.Module):
    """A soft mixture of experts: each expert gets weighted sums of all tokens."""

    def __init__(self, width: int, experts: int, depth: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(48, width), nn.Linear(width, 10)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.gates = nn.ModuleList(nn.Linear(width, 4 * experts) for _ in range(depth))
        self.up = nn.ParameterList(torch.randn(experts, width, 2 * width) * width**-0.5 for _ in range(depth))
        self.down = nn.ParameterList(torch.randn(experts, 2 * width, width) * width**-0.5 for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for norm, gate, up, down in zip(self.norms, self.gates, self.up, self.down, strict=True):
            normed = norm(x)
            scores = gate(normed)
            slots = torch.einsum("btd,bts->bsd", normed, scores.softmax(1)).unflatten(1, (len(up), 4))
            hidden = torch.einsum("besd,edf->besf", slots, up)
            outputs = torch.einsum("besf,efd->besd", F.gelu(hidden), down).flatten(1, 2)
            x = x + torch.einsum("bsd,bts->btd", outputs, scores.softmax(2))
        return self.last(x.mean(1))


class Experts(Labelled):
    samples: int = 2048

    def shape(self) -> tuple[int, ...]:
        return 256, 48

    def model(self) -> nn.Module:
        return ExpertsNet(384, 16, 6)


FURTHER = {
    "BERT layers, dropout": Bert, "U-Net": Unet, "MLP": Mlp, "ResNet-18": Residual, "Conv1d + GRU": Gru, "MLP-Mixer": Mixer,
    "attention by hand": ByHand, "convolutional autoencoder": Autoencoder, "recommender": Recommender,
    "depthwise convolutions": Depthwise, "encoder and decoder": Translator, "clouds of points": Points,
    "messages in a graph": Graph, "three-dimensional convolutions": Film,
}  # fmt: skip
UNSEEN = {"dense connections": Dense, "dilated convolutions of waves": Waves, "experts": Experts}
