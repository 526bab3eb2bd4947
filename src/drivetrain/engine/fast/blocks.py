"""The repeated blocks of a deep model: they are compiled, sharded and checkpointed one by one."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from torch import nn

MIN_BLOCKS = 4  # in a list of alike modules, to count them as blocks
MIN_SHARE = 0.1  # of the model's parameters in a list: in less, units of their own gain nothing


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Returns the blocks of all towers of a model, in order; none if they hold less than half of its parameters."""
    total = _num_parameters(model)
    towers = [blocks for blocks in _lists_of_blocks(model) if sum(map(_num_parameters, blocks)) > MIN_SHARE * total]
    blocks = list(dict.fromkeys(block for tower in towers for block in tower))
    return blocks if sum(map(_num_parameters, blocks)) > total / 2 else []


def describe_blocks(blocks: list[nn.Module]) -> str:
    """Returns, for example, "27 ConvNextLayer and 12 BertLayer blocks"."""
    kinds = [type(block).__name__ for block in blocks]
    return " and ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)) + " blocks"


def _lists_of_blocks(module: nn.Module) -> Iterator[list[nn.Module]]:
    """Yields the outermost lists of alike modules: blocks do not lie within blocks."""
    children = list(module.children())
    if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(children) >= MIN_BLOCKS and len(set(map(_kind, children))) == 1:
        yield children
        return
    for child in children:
        yield from _lists_of_blocks(child)


def _kind(module: nn.Module) -> Hashable:
    """Returns equal values for alike modules."""
    own_forward = id(module) if "forward" in vars(module) else None  # replaced on the instance: like no other
    return type(module), own_forward, tuple((name, p.shape) for name, p in module.named_parameters())


def _num_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
