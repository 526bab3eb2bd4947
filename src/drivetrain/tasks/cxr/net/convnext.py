"""ConvNeXt with the names of timm's state dicts, so that its weights load; and a small one for CPUs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class ConvNextShape:
    """Blocks and channels of the four stages."""

    depths: tuple[int, int, int, int]
    channels: tuple[int, int, int, int]
    weights: str = ""
    """The repository of the ImageNet weights on the hub."""


SHAPES = {
    "nano": ConvNextShape((1, 1, 4, 1), (24, 48, 96, 128)),
    "convnext_tiny": ConvNextShape((3, 3, 9, 3), (96, 192, 384, 768), "timm/convnext_tiny.fb_in22k_ft_in1k"),
    "convnext_small": ConvNextShape((3, 3, 27, 3), (96, 192, 384, 768), "timm/convnext_small.fb_in22k_ft_in1k"),
    "convnext_base": ConvNextShape((3, 3, 27, 3), (128, 256, 512, 1024), "timm/convnext_base.fb_in22k_ft_in1k"),
}


class ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of [n, channels, height, width]."""

    def forward(self, x: Tensor) -> Tensor:
        normed = F.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps)
        return normed.permute(0, 3, 1, 2)


class ConvNextMlp(nn.Module):
    """Two linear layers over the channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(channels, 4 * channels)
        self.fc2 = nn.Linear(4 * channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))  # type: ignore[no-any-return]


class ConvNextBlock(nn.Module):
    """A depthwise convolution and a perceptron over the channels, with a residual connection."""

    def __init__(self, channels: int, scale: float) -> None:
        super().__init__()
        self.conv_dw = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.mlp = ConvNextMlp(channels)
        self.gamma = nn.Parameter(torch.full((channels,), scale))

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv_dw(x).permute(0, 2, 3, 1)
        y = self.gamma * self.mlp(self.norm(y))
        return x + y.permute(0, 3, 1, 2)  # type: ignore[no-any-return]


class ConvNextStage(nn.Module):
    """Halves the map (but in the first stage), then applies the blocks."""

    def __init__(self, before: int, channels: int, depth: int, halves: bool, scale: float) -> None:
        super().__init__()
        self.downsample = (
            nn.Sequential(ChannelNorm(before, eps=1e-6), nn.Conv2d(before, channels, 2, stride=2)) if halves else nn.Identity()
        )
        self.blocks = nn.Sequential(*(ConvNextBlock(channels, scale) for _ in range(depth)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.downsample(x))  # type: ignore[no-any-return]


class ConvNext(nn.Module):
    """Images [n, 3, height, width] to a feature map [n, channels, height / 32, width / 32]."""

    def __init__(self, shape: ConvNextShape, layer_scale: float = 1e-6) -> None:
        super().__init__()
        widths = shape.channels
        self.num_features = widths[-1]
        self.stem = nn.Sequential(nn.Conv2d(3, widths[0], 4, stride=4), ChannelNorm(widths[0], eps=1e-6))
        befores = (widths[0], *widths[:-1])
        self.stages = nn.Sequential(
            *(ConvNextStage(befores[i], widths[i], shape.depths[i], i > 0, layer_scale) for i in range(len(widths)))
        )
        self.head = nn.ModuleDict({"norm": ChannelNorm(widths[-1], eps=1e-6)})
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                nn.init.trunc_normal_(module.weight, std=0.02)
                assert module.bias is not None
                nn.init.zeros_(module.bias)

    def forward_features(self, x: Tensor) -> Tensor:
        """Returns the last feature map, as timm's method of this name does."""
        return self.stages(self.stem(x))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        """Returns the last feature map, normalised over the channels."""
        return self.head["norm"](self.forward_features(x))  # type: ignore[no-any-return]
