"""Networks for small images."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class SmallCNN(nn.Module):
    """Guide 000's net for 28x28 images: two convolutions and two linear layers (225,034 parameters)."""

    def __init__(self, classes: int = 10, dropout: float = 0.25) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.dropout = nn.Dropout(dropout)
        self.fc1 = nn.Linear(1600, 128)
        self.fc2 = nn.Linear(128, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = self.dropout(F.relu(self.fc1(x.flatten(1))))
        return self.fc2(x)  # type: ignore[no-any-return]


def mlp(inputs: int, hidden: int, classes: int) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, classes))
