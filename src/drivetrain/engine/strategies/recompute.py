"""Activation checkpointing: a block keeps its inputs only, and runs again when the backward pass comes to it."""

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


def recompute_blocks(model: nn.Module, observer: Observer, main: bool) -> None:
    """Let each repeated block run again in the backward pass."""
    blocks = repeated_blocks(model)
    if not blocks and main:
        observer.notice("activation checkpointing is left out: this model has no repeated blocks")
    for block in blocks:
        # By class, so that names, hooks, and what else is set on the block stay as they are.
        kind = type(block)
        block.__class__ = _KINDS.get(kind) or _KINDS.setdefault(kind, _recomputed(kind))


_KINDS: dict[type[nn.Module], type[nn.Module]] = {}


def _recomputed(kind: type[nn.Module]) -> type[nn.Module]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not self.training:
            return kind.forward(self, *args, **kwargs)
        plain = functools.partial(kind.forward, self)
        return checkpoint(plain, *args, use_reentrant=False, context_fn=functools.partial(_contexts, self), **kwargs)

    return type(f"Recomputed{kind.__name__}", (kind,), {"forward": forward, "__module__": kind.__module__})


def _contexts(block: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), _statistics_kept(block)


@contextmanager
def _statistics_kept(block: nn.Module) -> Iterator[None]:
    """The second run of a block must not count its batch again: running statistics are copies inside."""
    owners = [m for m in block.modules() if isinstance(m, _NormBase)]
    kept = [dict(m._buffers) for m in owners]
    for owner in owners:
        owner._buffers.update({name: None if b is None else b.clone() for name, b in owner._buffers.items()})
    try:
        yield
    finally:
        for owner, buffers in zip(owners, kept, strict=True):
            owner._buffers.update(buffers)
