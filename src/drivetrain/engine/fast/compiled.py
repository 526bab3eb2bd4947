"""torch.compile on a task's loss: all of it, or only the repeated blocks of a deep model, so that compiling stays quick."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import fx, nn

from drivetrain.engine.fast.blocks import describe_blocks, repeated_blocks
from drivetrain.engine.fast.stem import replace_first_convolutions


class Compiled:
    """Calls the compiled function for micro-batches of one form, and the eager function for all others.

    Another form (the last partial batch) would be compiled anew, which takes longer than it ever runs."""

    def __init__(self, function: Callable[..., Any], model: nn.Module, form: Hashable, deterministic: bool, custom_passes: bool) -> None:
        self._eager, self._form = function, form
        self.failure: Exception | None = None
        """What the compiler raised; from then on the eager function is called."""
        self._blocks = repeated_blocks(model)
        self.description = f"its {describe_blocks(self._blocks)}" if self._blocks else "the whole loss"
        from torch._dynamo import config as dynamo  # these take a second to import
        from torch._inductor import config

        config.deterministic = deterministic
        dynamo.recompile_limit = max(dynamo.recompile_limit, 8 + len(self._blocks))  # blocks that know their number
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
        """Lets blocks run compiled, also in the backward pass, which may run them again; or eager, as in evaluation."""
        if enabled != self._enabled:
            self._enabled = enabled
            for block, forward in zip(self._blocks, self._forwards, strict=True):
                if enabled:
                    block.forward = forward
                else:
                    del block.forward  # uncovers the class's own


def _inductor_with_custom_passes(graph: fx.GraphModule, inputs: Any) -> Any:
    """Compiles with inductor and two passes that it does not do by itself: the im2col stem, and combo kernels (many small ones in one launch)."""
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(replace_first_convolutions(graph), inputs, config_patches={"combo_kernels": True})
