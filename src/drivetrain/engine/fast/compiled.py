"""torch.compile on a task's loss: whole, or only the repeated blocks of a deep model, so that it stays quick."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import fx, nn

from drivetrain.engine.fast.blocks import repeated_blocks
from drivetrain.engine.fast.stem import replace_first_convolutions


class Compiled:
    """Calls the compiled function for the form it was made for, and the plain one for all others (the last
    partial batch): another form would be compiled anew, for longer than it ever runs."""

    def __init__(self, function: Callable[..., Any], model: nn.Module, form: Hashable, deterministic: bool, custom_passes: bool) -> None:
        self._plain, self._form = function, form
        self.failure: Exception | None = None
        self._blocks = repeated_blocks(model)
        self.description = f"its {len(self._blocks)} {type(self._blocks[0]).__name__} blocks" if self._blocks else "the whole loss"
        from torch._dynamo import config as dynamo  # these take a second to import
        from torch._inductor import config

        config.deterministic = deterministic
        dynamo.recompile_limit = max(dynamo.recompile_limit, 8 + len(self._blocks))  # blocks that know their number
        backend: Any = _cunning if custom_passes else "inductor"
        self._forwards = [torch.compile(block.forward, dynamic=False, backend=backend) for block in self._blocks]
        self._whole = function if self._blocks else torch.compile(function, dynamic=False, backend=backend)
        self._on = False

    def __call__(self, form: Hashable, *args: Any) -> Any:
        """A compiler that fails is noted, and the plain function is called from then on."""
        mine = form == self._form and self.failure is None
        self.set_enabled(mine)
        if not mine:
            return self._plain(*args)
        try:
            return self._whole(*args)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self.failure = error
            self.set_enabled(False)
            return self._plain(*args)

    def set_enabled(self, on: bool) -> None:
        """Whether blocks run compiled: in the backward pass too, which may run them again; never in evaluation."""
        if on != self._on:
            self._on = on
            for block, forward in zip(self._blocks, self._forwards, strict=True):
                if on:
                    block.forward = forward
                else:
                    del block.forward  # the class's own is behind it


def _cunning(graph: fx.GraphModule, inputs: Any) -> Any:
    """Inductor, with what it does not do by itself: first convolutions as products, and many small kernels in one launch."""
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(replace_first_convolutions(graph), inputs, config_patches={"combo_kernels": True})
