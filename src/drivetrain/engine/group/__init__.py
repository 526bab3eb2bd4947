"""The process group: join it, and the few collective operations the engine needs."""

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
from torch._C._distributed_c10d import HashStore, TCPStore

from drivetrain.engine.group.wire import use_plain_objects
from drivetrain.outcomes import Outcome, Problem

TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class Group:
    """This process's place among all: with one process every operation is free."""

    rank: int
    size: int
    device: torch.device
    host_group: dist.ProcessGroup | None = None
    """Where the ranks' devices talk to each other: another way, from host to host."""

    def __post_init__(self) -> None:
        if self.size > 1:
            use_plain_objects()

    @property
    def device_counters(self) -> bool:
        """Whether the host runs ahead of the device: then a step finds its number and all that follows from it there."""
        return self.device.type == "cuda"

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def all_reduce(self, tensor: Tensor) -> None:
        if self.size > 1:
            dist.all_reduce(tensor)

    def sum_on_hosts(self, values: Sequence[float]) -> list[float]:
        """The sums over all ranks of plain numbers: no device is waited for."""
        if self.size == 1:
            return list(values)
        told = torch.tensor(values)
        dist.all_reduce(told, group=self.host_group)
        return [float(value) for value in told.tolist()]

    def broadcast(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        if self.size > 1:
            for tensor in (t.detach() for t in tensors):
                if tensor.is_contiguous():
                    dist.broadcast(tensor, source)
                else:
                    whole = tensor.contiguous()
                    dist.broadcast(whole, source)
                    tensor.copy_(whole)

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """The source rank's value, on every rank."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, source, device=self.device)
        return box[0]

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def shares_folder(self, folder: Path) -> bool:
        """Whether every process sees the same folder."""
        token = folder / self.broadcast_object(f".reach-{uuid.uuid4().hex}")
        if self.is_main:
            folder.mkdir(parents=True, exist_ok=True)
            token.touch()
        self.gather_objects(None)
        seen = all(self.gather_objects(token.exists()))
        if self.is_main:
            token.unlink(missing_ok=True)
        return seen

    def ensure_initialized(self, backend: str) -> None:
        """Make the group of a process that is alone, for what works on a group only."""
        if not dist.is_initialized():
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)

    def destroy(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def join_group(device: str, backend: str, own_port: bool = False) -> Group:
    """Join the group that RANK, WORLD_SIZE and MASTER_ADDR describe; alone where they do not. With `own_port` the address
    is one that drivetrain chose: it is bound there alone, and where it is taken that is bad luck, not a mistake."""
    rank, size, local = (int(os.environ.get(k, d)) for k, d in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
    if device == "cuda":
        if local >= torch.cuda.device_count():
            raise Problem(f"process {local} of this machine has no GPU of its own ({torch.cuda.device_count()} visible): lower --procs")
        torch.cuda.set_device(local)
        place = torch.device("cuda", local)
    else:
        place = torch.device(device)
    if size > 1 and not dist.is_initialized():
        try:
            store = _bound_store(rank, size) if own_port else None
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT, device_id=place if device == "cuda" else None
            )
        except (OSError, RuntimeError, ValueError, dist.DistError) as error:
            where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            text = str(error).splitlines()[0]
            if not own_port and ("EADDRINUSE" in str(error) or "in use" in str(error)):
                raise Problem(f"port {os.environ.get('MASTER_PORT')} is in use: choose another in --rendezvous or MASTER_PORT") from None
            raise Problem(f"the {size} processes could not meet at {where}: {text}", Outcome.INFRA) from None
    side = dist.new_group(backend="gloo", timeout=TIMEOUT) if size > 1 and backend != "gloo" else None
    return Group(rank, size, place, side)


def _bound_store(rank: int, size: int) -> TCPStore:
    """torch's store at MASTER_ADDR. By itself torch would open it on all of the machine's interfaces."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank != 0:
        return TCPStore(address, port, size, is_master=False, timeout=TIMEOUT)
    server = socket.create_server((address, port), backlog=2048)
    return TCPStore(address, port, size, is_master=True, timeout=TIMEOUT, master_listen_fd=server.detach())
