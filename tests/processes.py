"""Run a function on several gloo processes, forked from a server that has torch imported already."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed would say at its import that it found no GPU
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([
    "torch", "torch._dynamo", "drivetrain.engine.loop", "drivetrain.engine.state.shards", "tests.deep",
    "deepspeed", "deepspeed.module_inject.auto_ep_layer", "deepspeed.runtime.zero.muon.original_muon", "torch._inductor.compile_fx",
])  # fmt: skip


def _enter(rank: int, size: int, meeting: str, answer: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    import torch
    import torch.distributed as dist

    from drivetrain.engine.group import Group

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    try:
        if size > 1:
            dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
        result = function(*arguments, Group(rank, size, torch.device("cpu")))
        answer.send((True, result))
    except BaseException:
        answer.send((False, traceback.format_exc()))
    os._exit(0)


def on_ranks(size: int, function: Callable[..., Any], *arguments: Any, seconds: float = 400.0) -> list[Any]:
    """The results of `function(*arguments, group)` on each of `size` ranks."""
    with tempfile.TemporaryDirectory() as folder:
        ends, children = [], []
        for rank in range(size):
            here, there = _CONTEXT.Pipe(duplex=False)
            child = _CONTEXT.Process(target=_enter, args=(rank, size, str(Path(folder) / "meet"), there, function, arguments), daemon=False)
            child.start()
            there.close()
            ends.append(here)
            children.append(child)
        try:
            results = []
            for rank, end in enumerate(ends):
                assert end.poll(seconds), f"rank {rank} gave no answer within {seconds:.0f} s"
                good, value = end.recv()
                assert good, f"rank {rank} failed:\n{value}"
                results.append(value)
            return results
        finally:
            for child in children:
                child.kill()
                child.join()
