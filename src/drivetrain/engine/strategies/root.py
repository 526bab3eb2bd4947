"""What the strategies that shard have in common: the module around the task's own, and the model before it is sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from drivetrain.engine.group import Group


class Root(nn.Module):
    """The module around the task's own: its forward pass is whatever uses the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)


def dense_gradients(model: nn.Module) -> None:
    """Sparse gradients cannot be scattered: embeddings give dense ones, which are the same numbers."""
    for module in model.modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            module.sparse = False


def share_weights(model: nn.Module, group: Group) -> None:
    """Rank 0's weights on every rank, tensor by tensor: all of them may not fit the device."""
    if group.size == 1:
        return
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            place = tensor.detach().to(group.device).contiguous()
            dist.broadcast(place, 0)
            tensor.copy_(place)
