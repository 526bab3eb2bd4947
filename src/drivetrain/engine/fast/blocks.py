"""The repeated blocks of a deep model: what is compiled, sharded and checkpointed one by one."""

from __future__ import annotations

from collections.abc import Hashable

from torch import nn

DEEP = 4  # blocks of one kind from which on a model counts as made of blocks


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The members of the list of like modules that holds most of the model, if there is one."""
    whole = sum(p.numel() for p in model.parameters())
    for module in model.modules():
        members = list(module.children()) if isinstance(module, (nn.ModuleList, nn.Sequential)) else []
        alike = len(members) >= DEEP and len({_kind(m) for m in members}) == 1
        if alike and sum(p.numel() for m in members for p in m.parameters()) > whole / 2:
            return members
    return []


def _kind(module: nn.Module) -> Hashable:
    own_forward = id(module) if "forward" in vars(module) else None  # replaced on the instance: like no other
    return type(module), own_forward, tuple((name, p.shape) for name, p in module.named_parameters())
