"""Applies torch.compile to a task's loss: to all of it, or only to the repeated blocks of a deep model, which compile faster."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import fx, nn

from drivetrain.engine.fast.blocks import describe_blocks, repeated_blocks
from drivetrain.engine.fast.stem import replace_first_convolutions


class Compiled:
    """Calls the compiled function for micro-batches of one form, and the eager function for all others.

    Compiling for another form (the last partial batch) would take longer than that form runs in total."""

    def __init__(self, function: Callable[..., Any], model: nn.Module, form: Hashable, deterministic: bool, custom_passes: bool) -> None:
        self._eager, self._form = function, form
        self.failure: Exception | None = None
        """The compiler's error; after it, every call is eager."""
        self._blocks = repeated_blocks(model)
        self.description = f"its {describe_blocks(self._blocks)}" if self._blocks else "the whole loss"
        from torch._dynamo import config as dynamo_config  # imported here because both take a second
        from torch._inductor import config as inductor_config

        inductor_config.deterministic = deterministic
        # A block that stores its own index compiles once for each index.
        dynamo_config.recompile_limit = max(dynamo_config.recompile_limit, 8 + len(self._blocks))
        backend: Any = _inductor_with_custom_passes if custom_passes else "inductor"
        self._forwards = [torch.compile(block.forward, dynamic=False, backend=backend) for block in self._blocks]
        self._compiled = function if self._blocks else torch.compile(function, dynamic=False, backend=backend)
        self._enabled = False

    def __call__(self, form: Hashable, *args: Any) -> Any:
        use_compiled = form == self._form and self.failure is None
        self.set_enabled(use_compiled)
        if not use_compiled:
            return self._eager(*args)
        try:
            return self._compiled(*args)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self.failure = error
            self.set_enabled(False)
            return self._eager(*args)

    def set_enabled(self, enabled: bool) -> None:
        """Switches blocks to compiled code, or back to eager code. The switch holds in the backward pass too, which may run blocks again."""
        if enabled != self._enabled:
            self._enabled = enabled
            for block, forward in zip(self._blocks, self._forwards, strict=True):
                if enabled:
                    block.forward = forward
                else:
                    del block.forward  # the block then uses its class's forward


def _inductor_with_custom_passes(graph: fx.GraphModule, inputs: Any) -> Any:
    """Compiles with inductor and two extra passes: the im2col stem, and combo kernels (many small kernels in one launch)."""
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(replace_first_convolutions(graph), inputs, config_patches={"combo_kernels": True})
