"""Joins the process group, and offers the collective operations that the engine uses."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from drivetrain.engine.group.wire import replace_pickles
from drivetrain.outcomes import Outcome, Problem

TIMEOUT = timedelta(minutes=10)  # of a collective, after which torch ends the process


@dataclass(frozen=True)
class Group:
    """The ranks of a training as this process sees them. With one process every operation is free."""

    rank: int
    size: int
    device: torch.device
    host_group: dist.ProcessGroup | None = None
    """The group for collectives on CPU tensors; None if the default group can do that."""

    def __post_init__(self) -> None:
        if self.size > 1:
            replace_pickles()

    @property
    def device_counters(self) -> bool:
        """Whether step, learning rate and sample ids live in device tensors, because the host runs ahead of the device."""
        return self.device.type == "cuda"

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def all_reduce(self, tensor: Tensor) -> None:
        """Sums a tensor over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)

    def sum_on_hosts(self, values: Sequence[float]) -> list[float]:
        """Returns the sums of Python numbers over all ranks, without waiting for a device."""
        if self.size == 1:
            return list(values)
        sums = torch.tensor(values)
        dist.all_reduce(sums, group=self.host_group)
        return [float(value) for value in sums.tolist()]

    def broadcast(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """Overwrites tensors with the source rank's."""
        if self.size > 1:
            for tensor in (t.detach() for t in tensors):
                if tensor.is_contiguous():
                    dist.broadcast(tensor, source)
                else:
                    contiguous = tensor.contiguous()
                    dist.broadcast(contiguous, source)
                    tensor.copy_(contiguous)

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """Returns the source rank's value on every rank."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, source, device=self.device)
        return values[0]

    def gather_objects(self, value: Any) -> list[Any]:
        """Returns every rank's value, in rank order, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def shares_folder(self, folder: Path) -> bool:
        """Returns whether all processes share the folder (a file of rank 0 is visible to all); a collective call."""
        token = folder / self.broadcast_object(f".reach-{uuid.uuid4().hex}")
        if self.is_main:
            folder.mkdir(parents=True, exist_ok=True)
            token.touch()
        self.gather_objects(None)
        is_seen = all(self.gather_objects(token.exists()))
        if self.is_main:
            token.unlink(missing_ok=True)
        return is_seen

    def ensure_initialized(self, backend: str) -> None:
        """Makes a group of only this process if there is no group, for code that requires one."""
        if not dist.is_initialized():
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)

    def destroy(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def join_group(device: str, backend: str, own_port: bool = False) -> Group:
    """Joins the group that RANK, WORLD_SIZE and MASTER_ADDR describe; without these variables, the group is only this process.

    `own_port` says that drivetrain chose the port: it is bound at MASTER_ADDR only, and a port in use is not the user's error."""
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if device == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise Problem(
                f"process {local_rank} of this machine has no GPU of its own ({torch.cuda.device_count()} visible): lower --procs"
            )
        torch.cuda.set_device(local_rank)
        torch_device = torch.device("cuda", local_rank)
    else:
        torch_device = torch.device(device)
    if size > 1 and not dist.is_initialized():
        try:
            store = _bound_store(rank, size) if own_port else _store_of_attempt(size)
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT, device_id=torch_device if device == "cuda" else None
            )
        except (OSError, RuntimeError, ValueError, dist.DistError) as error:
            address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            text = str(error).splitlines()[0]
            if not own_port and ("EADDRINUSE" in str(error) or "in use" in str(error)):
                raise Problem(f"port {os.environ.get('MASTER_PORT')} is in use: choose another in --rendezvous or MASTER_PORT") from None
            raise Problem(f"the {size} processes could not meet at {address}: {text}", Outcome.INFRA) from None
    host_group = dist.new_group(backend="gloo", timeout=TIMEOUT) if size > 1 and backend != "gloo" else None
    return Group(rank, size, torch_device, host_group)


def _store_of_attempt(size: int) -> Store | None:
    """Returns the store of torchrun's agent with the keys of this attempt only, if all ranks have one agent; else None: torch's default.

    All attempts of an agent share one store. In it a restarted rank may find the address of a rank of the attempt before.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or os.environ.get("LOCAL_WORLD_SIZE") != str(size):
        return None  # agents of several machines may count different numbers of restarts
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, is_master=False, timeout=TIMEOUT)
    return PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _bound_store(rank: int, size: int) -> TCPStore:
    """Returns torch's store, bound to MASTER_ADDR only. By default, torch binds it to all network interfaces."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank != 0:
        return TCPStore(address, port, size, is_master=False, timeout=TIMEOUT)
    server = socket.create_server((address, port), backlog=2048)
    return TCPStore(address, port, size, is_master=True, timeout=TIMEOUT, master_listen_fd=server.detach())
