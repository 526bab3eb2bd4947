"""Finds the repeated blocks of a deep model. Each block is compiled, sharded or recomputed by itself."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from torch import nn

MIN_BLOCKS = 4  # equal modules in a list; fewer do not count as blocks
MIN_SHARE = 0.1  # of the model's parameters; blocks that hold less in total are not worth separate treatment


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Returns the repeated blocks of a model, in order; none if they hold less than half of its parameters."""
    total = _num_parameters(model)
    large_lists = [blocks for blocks in _lists_of_blocks(model) if sum(map(_num_parameters, blocks)) > MIN_SHARE * total]
    blocks = list(dict.fromkeys(block for blocks in large_lists for block in blocks))  # each once, in order
    return blocks if sum(map(_num_parameters, blocks)) > total / 2 else []


def describe_blocks(blocks: list[nn.Module]) -> str:
    """Returns, for example, "27 ConvNextLayer and 12 BertLayer blocks"."""
    class_names = [type(block).__name__ for block in blocks]
    return " and ".join(f"{class_names.count(name)} {name}" for name in dict.fromkeys(class_names)) + " blocks"


def _lists_of_blocks(module: nn.Module) -> Iterator[list[nn.Module]]:
    """Yields the outermost lists of equal modules: a block contains no further blocks."""
    children = list(module.children())
    is_list = isinstance(module, (nn.ModuleList, nn.Sequential)) and len(children) >= MIN_BLOCKS
    if is_list and len(set(map(_structure, children))) == 1:
        yield children
        return
    for child in children:
        yield from _lists_of_blocks(child)


def _structure(module: nn.Module) -> Hashable:
    """Returns a module's class and parameter shapes: the same value for modules that compile to the same code."""
    own_forward = id(module) if "forward" in vars(module) else None  # a forward of the instance makes the module unique
    return type(module), own_forward, tuple((name, p.shape) for name, p in module.named_parameters())


def _num_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
