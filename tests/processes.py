"""Runs a function on several gloo processes, forked from a server that has already imported torch."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # without it, DeepSpeed prints at its import that there is no GPU
CONTEXT = multiprocessing.get_context("forkserver")
_PRELOADED = [
    "torch", "drivetrain.cli", "drivetrain.engine.loop", "drivetrain.engine.state.shards", "drivetrain.watch.files", "torch.utils.tensorboard",
    "tests.deep_tasks", "tests.warm", "deepspeed",
]  # fmt: skip
if not Path("/dev/nvidiactl").exists():  # on a machine with a GPU these use it, and then no fork of the server can
    _PRELOADED += [
        "torch._dynamo", "torch._inductor.compile_fx", "deepspeed.module_inject.auto_ep_layer", "deepspeed.runtime.zero.muon.original_muon",
    ]  # fmt: skip
CONTEXT.set_forkserver_preload(_PRELOADED)


def _run_rank(rank: int, size: int, rendezvous_file: str, results: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    import torch
    import torch.distributed as dist

    from drivetrain.engine.group import Group

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    try:
        if size > 1:
            dist.init_process_group("gloo", init_method=f"file://{rendezvous_file}", rank=rank, world_size=size)
        result = function(*arguments, Group(rank, size, torch.device("cpu")))
        results.send((True, result))
    except BaseException:
        results.send((False, traceback.format_exc()))
    os._exit(0)


def on_ranks(size: int, function: Callable[..., Any], *arguments: Any, seconds: float = 400.0) -> list[Any]:
    """Returns the results of `function(*arguments, group)` on `size` ranks."""
    with tempfile.TemporaryDirectory() as folder:
        receivers, children = [], []
        for rank in range(size):
            receiver, sender = CONTEXT.Pipe(duplex=False)
            child = CONTEXT.Process(
                target=_run_rank, args=(rank, size, str(Path(folder) / "rendezvous"), sender, function, arguments), daemon=False
            )
            child.start()
            sender.close()
            receivers.append(receiver)
            children.append(child)
        try:
            results = []
            for rank, receiver in enumerate(receivers):
                assert receiver.poll(seconds), f"rank {rank} gave no answer within {seconds:.0f} s"
                is_ok, value = receiver.recv()
                assert is_ok, f"rank {rank} failed:\n{value}"
                results.append(value)
            return results
        finally:
            for child in children:
                child.kill()
                child.join()
