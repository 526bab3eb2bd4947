"""Runs a function on several gloo processes, forked from a server that has already imported torch."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

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
    stacks = os.open(_stacks_file(rendezvous_file), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)  # loader workers inherit it
    try:
        if size > 1:
            dist.init_process_group("gloo", init_method=f"file://{rendezvous_file}", rank=rank, world_size=size)
        result = function(*arguments, Group(rank, size, torch.device("cpu")))
        results.send((True, result))
    except BaseException:
        results.send((False, traceback.format_exc()))
    os._exit(0)


def _stacks_file(rendezvous_file: str) -> str:
    """Returns the file into which all processes of a call write their stacks."""
    return f"{rendezvous_file}.stacks"


def _stacks_of(children: list[Any], rendezvous_file: str) -> str:
    """Returns the stacks of processes that give no answer, and of their own children."""
    for child in children:
        if child.is_alive():
            for process in (psutil.Process(child.pid), *psutil.Process(child.pid).children(recursive=True)):
                process.send_signal(signal.SIGUSR2)
                time.sleep(0.2)
    return Path(_stacks_file(rendezvous_file)).read_text()


def on_ranks(size: int, function: Callable[..., Any], *arguments: Any, seconds: float = 400.0) -> list[Any]:
    """Returns the results of `function(*arguments, group)` on `size` ranks."""
    with tempfile.TemporaryDirectory() as folder:
        rendezvous_file = str(Path(folder) / "rendezvous")
        receivers, children = [], []
        for rank in range(size):
            receiver, sender = CONTEXT.Pipe(duplex=False)
            child = CONTEXT.Process(target=_run_rank, args=(rank, size, rendezvous_file, sender, function, arguments), daemon=False)
            child.start()
            sender.close()
            receivers.append(receiver)
            children.append(child)
        try:
            results = []
            for rank, receiver in enumerate(receivers):
                if not receiver.poll(seconds):
                    raise AssertionError(f"rank {rank} gave no answer within {seconds:.0f} s:\n{_stacks_of(children, rendezvous_file)}")
                is_ok, value = receiver.recv()
                assert is_ok, f"rank {rank} failed:\n{value}"
                results.append(value)
            return results
        finally:
            for child in children:
                child.kill()
                child.join()
