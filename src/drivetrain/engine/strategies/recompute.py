"""Activation checkpointing: a block stores only its inputs, and its forward runs again in the backward pass."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from drivetrain.engine.fast.blocks import repeated_blocks
from drivetrain.engine.log.observe import Observer


def recompute_blocks(model: nn.Module, observer: Observer, is_main: bool) -> None:
    """Turns on activation checkpointing for each repeated block of a model."""
    blocks = repeated_blocks(model)
    if not blocks and is_main:
        observer.notice("activation checkpointing is left out: this model has no repeated blocks")
    for block in blocks:
        # A new class instead of a wrapper: names, hooks and attributes of the block stay the same.
        kind = type(block)
        block.__class__ = _RECOMPUTED_CLASSES.get(kind) or _RECOMPUTED_CLASSES.setdefault(kind, _make_recomputed_class(kind))


_RECOMPUTED_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def _make_recomputed_class(kind: type[nn.Module]) -> type[nn.Module]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not self.training:
            return kind.forward(self, *args, **kwargs)
        eager_forward = functools.partial(kind.forward, self)
        return checkpoint(eager_forward, *args, use_reentrant=False, context_fn=functools.partial(_contexts, self), **kwargs)

    return type(f"Recomputed{kind.__name__}", (kind,), {"forward": forward, "__module__": kind.__module__})


def _contexts(block: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Returns the contexts of a block's first forward and of its recomputation."""
    return nullcontext(), _unchanged_statistics(block)


@contextmanager
def _unchanged_statistics(block: nn.Module) -> Iterator[None]:
    """A context in which running statistics are temporary copies, because a recomputation must not count its batch again."""
    norms = [m for m in block.modules() if isinstance(m, _NormBase)]
    originals = [dict(m._buffers) for m in norms]
    for norm in norms:
        norm._buffers.update({name: None if b is None else b.clone() for name, b in norm._buffers.items()})
    try:
        yield
    finally:
        for norm, buffers in zip(norms, originals, strict=True):
            norm._buffers.update(buffers)
