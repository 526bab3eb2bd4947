"""Code that FSDP and DeepSpeed share: the module around the task's model, and the preparation of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from drivetrain.engine.group import Group


class Root(nn.Module):
    """A module around the task's model. Its forward pass calls any function that uses the model, such as the loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)


def use_dense_gradients(model: nn.Module) -> None:
    """Switches embeddings from sparse to dense gradients, because sparse ones cannot be reduce-scattered."""
    for module in model.modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            module.sparse = False


def broadcast_model(model: nn.Module, group: Group) -> None:
    """Copies the weights of rank 0 to every rank, one tensor at a time, because together they may not fit on the device."""
    if group.size == 1:
        return
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            on_device = tensor.detach().to(group.device).contiguous()
            dist.broadcast(on_device, 0)
            tensor.copy_(on_device)
