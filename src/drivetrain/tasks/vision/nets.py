"""Networks for images: the guides' small ones, ResNet-18 and a small ViT, each adapted to the image size."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain.outcomes import Problem


def build(net: str, channels: int, size: int, classes: int, dropout: float, hidden: int) -> nn.Module:
    """Returns the net of this name for square images. `dropout` applies before the last linear layers; `hidden` is the mlp's width."""
    if net == "cnn":
        return SmallCNN(classes, dropout, channels, size)
    if net == "conv4":
        return Conv4(classes, dropout, channels)
    if net == "resnet18":
        return resnet18(channels, classes, size, dropout)
    if net == "vit-s":
        return vit_s(channels, classes, size, dropout)
    if net == "mlp":
        return mlp(channels * size * size, hidden, classes)
    raise ValueError(f"there is no net {net!r}")


def mlp(inputs: int, hidden: int, classes: int) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, classes))


class SmallCNN(nn.Module):
    """Guide 000's net: two convolutions and two linear layers (225,034 parameters for its 28x28 grey images)."""

    def __init__(self, classes: int = 10, dropout: float = 0.25, channels: int = 1, size: int = 28) -> None:
        super().__init__()
        pooled_size = ((size - 2) // 2 - 2) // 2  # after both convolutions and poolings
        self.conv1 = nn.Conv2d(channels, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.dropout = nn.Dropout(dropout)
        self.fc1 = nn.Linear(64 * pooled_size * pooled_size, 128)
        self.fc2 = nn.Linear(128, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = self.dropout(F.relu(self.fc1(x.flatten(1))))
        return self.fc2(x)  # type: ignore[no-any-return]


class Conv4(nn.Module):
    """Guide 001's net, with padded convolutions, so that images from 16x16 up fit (463,882 parameters for grey digits)."""

    def __init__(self, classes: int = 10, dropout: float = 0.5, channels: int = 1) -> None:
        super().__init__()
        widths, kernels = (channels, 32, 64, 128, 256), (5, 5, 3, 3)
        self.features = nn.Sequential(*(self._block(*sizes) for sizes in zip(widths, widths[1:], kernels, strict=False)))
        self.head = nn.Sequential(
            nn.Linear(256, 128), nn.ReLU(), nn.Dropout(dropout),
            nn.Linear(128, 64), nn.ReLU(), nn.Dropout(dropout),
            nn.Linear(64, classes),
        )  # fmt: skip

    @staticmethod
    def _block(inputs: int, outputs: int, kernel: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.adaptive_avg_pool2d(self.features(x), 1).flatten(1))  # type: ignore[no-any-return]


class ResidualBlock(nn.Module):
    """ResNet's basic block: two 3x3 convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


def resnet18(channels: int, classes: int, size: int = 224, dropout: float = 0.0) -> nn.Sequential:
    """Returns a ResNet-18. For images under 64 pixels the stem has no stride and no pooling, which would shrink them too much."""
    stem: OrderedDict[str, nn.Module] = OrderedDict()
    if size >= 64:
        stem["conv"] = nn.Conv2d(channels, 64, 7, 2, 3, bias=False)
    else:
        stem["conv"] = nn.Conv2d(channels, 64, 3, 1, 1, bias=False)
    stem["bn"], stem["relu"] = nn.BatchNorm2d(64), nn.ReLU()
    if size >= 64:
        stem["pool"] = nn.MaxPool2d(3, 2, 1)
    blocks: list[nn.Module] = []
    width = 64
    for outputs, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        blocks += [ResidualBlock(width, outputs, stride), ResidualBlock(outputs, outputs, 1)]
        width = outputs
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout), nn.Linear(512, classes))
    net = nn.Sequential(OrderedDict(stem=nn.Sequential(stem), blocks=nn.Sequential(*blocks), head=head))
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, ResidualBlock):
            nn.init.zeros_(module.bn2.weight)  # each block starts as the identity
    return net


class TransformerBlock(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        n, tokens, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, tokens, width)
        x = x + self.out(mixed)
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class ViT(nn.Module):
    """A vision transformer with learned positions that classifies the mean of its tokens."""

    def __init__(
        self, channels: int, classes: int, size: int, patch: int, width: int, depth: int, heads: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, width, patch, patch)
        self.positions = nn.Parameter(torch.empty(1, (size // patch) ** 2, width))
        self.blocks = nn.ModuleList(TransformerBlock(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, classes)
        nn.init.trunc_normal_(self.positions, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.dropout(self.norm(x).mean(1)))  # type: ignore[no-any-return]


def vit_s(channels: int, classes: int, size: int, dropout: float = 0.0) -> ViT:
    """Returns a ViT-S: width 384, 12 blocks, 6 heads, with patches of 16, 8 or 4 pixels depending on the image size."""
    patch = 16 if size >= 128 else 8 if size >= 64 else 4
    if size % patch:
        low = size // patch * patch
        raise Problem(f"net=vit-s cuts {size}x{size} images into patches of {patch} pixels: set size={low} or size={low + patch}")
    return ViT(channels, classes, size, patch, width=384, depth=12, heads=6, dropout=dropout)
