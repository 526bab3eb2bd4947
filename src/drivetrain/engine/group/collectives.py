"""Checks before each collective that all ranks of its group use the same operation, shapes and types (`--check-collectives`).

TORCH_DISTRIBUTED_DEBUG=DETAIL also compares them, but names neither the rank that is out of step nor the user's line.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from drivetrain.engine.data.batches import tensors_in
from drivetrain.engine.group import Group
from drivetrain.outcomes import Outcome, Problem
from drivetrain.project import is_users

CHECKED_FUNCTIONS = (
    "all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "gather", "scatter", "reduce_scatter",
    "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "barrier",
)  # fmt: skip
WITH_UNEQUAL_SHAPES = ("all_gather", "gather", "scatter", "all_to_all")  # one rank's shapes may differ from another's


def check_collectives(group: Group) -> None:
    """From now on, a collective in which ranks differ raises on all of them, and names the rank that differs from the others."""
    if group.size == 1:
        return
    checker = _Checker()
    for name in CHECKED_FUNCTIONS:
        unchecked = getattr(dist, name)
        for module in (dist, dist.distributed_c10d):
            setattr(module, name, checker.checked(name, unchecked))


class _Call(NamedTuple):
    """A rank's next collective."""

    operation: str
    """JSON: the function's name, and the shape and type of each tensor."""
    line: str
    """FILE:LINE of the user's code that calls it; empty if none does."""


class _Members:
    """The ranks of one group, which exchange their calls through torch's store."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.ranks = dist.get_process_group_ranks(group)
        self.own_rank = dist.get_rank()
        store: Any = dist.distributed_c10d._get_default_store()
        # A separate connection: on a shared one, the checkpoint's thread would wait until the training's thread has its answer.
        self.store = PrefixStore(f"drivetrain/collective/{group.group_name}", store.clone())
        self.count = 0

    def exchange(self, call: _Call) -> dict[int, _Call]:
        """Returns each rank's call."""
        self.count += 1
        self.store.set(f"{self.count}/{self.own_rank}", json.dumps(call))
        calls = {rank: _Call(*json.loads(self.store.get(f"{self.count}/{rank}"))) for rank in self.ranks}
        if self.count > 2:  # all ranks have read the calls before the previous one
            self.store.delete_key(f"{self.count - 2}/{self.own_rank}")
        return calls


class _Checker:
    def __init__(self) -> None:
        self.members: dict[str, _Members] = {}
        self.thread = threading.local()

    def checked(self, name: str, unchecked: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(unchecked)
        def collective(*args: Any, **options: Any) -> Any:
            group = options.get("group") or next((a for a in args if isinstance(a, dist.ProcessGroup)), dist.group.WORLD)
            # Calls within another collective, and those of a group without this rank, are not checked.
            if getattr(self.thread, "is_inside", False) or not isinstance(group, dist.ProcessGroup):
                return unchecked(*args, **options)
            self.thread.is_inside = True
            try:
                self._compare(group, name, args, options)
                return unchecked(*args, **options)
            finally:
                self.thread.is_inside = False

        return collective

    def _compare(self, group: dist.ProcessGroup, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        tensors = tensors_in(list(args) + [v for v in options.values() if isinstance(v, (Tensor, list))])
        dtypes = [str(t.dtype).removeprefix("torch.") for t in tensors]
        shapes: list[list[Any]] = [[list(t.shape), dtype] for t, dtype in zip(tensors, dtypes, strict=True)]
        if name in WITH_UNEQUAL_SHAPES:
            shapes = [[[], dtype] for dtype in sorted(set(dtypes))]
        if group.group_name not in self.members:
            self.members[group.group_name] = _Members(group)
        members = self.members[group.group_name]
        calls = members.exchange(_Call(json.dumps([name, shapes]), _users_line()))
        operations = Counter(call.operation for call in calls.values())
        if len(operations) > 1:
            raise Problem(_disagreement(calls, operations, members.count), Outcome.USER_ERROR)


def _disagreement(calls: dict[int, _Call], operations: Counter[str], count: int) -> str:
    usual = operations.most_common(1)[0][0]
    odd = next(rank for rank, call in calls.items() if call.operation != usual)
    if len(set(operations.values())) == 1:  # no majority: name a rank whose collective is called by the user's own code
        odd = next((rank for rank, call in calls.items() if call.line), odd)
        usual = next(call.operation for rank, call in calls.items() if rank != odd)
    line = f" at {calls[odd].line}" if calls[odd].line else ""
    return f"collective {count:,}: rank {odd} is out of step: it is in {_format_operation(calls[odd].operation)}{line}, the others in {_format_operation(usual)}"


def _format_operation(operation: str) -> str:
    name, shapes = json.loads(operation)
    return f"{name}({', '.join(f'{dtype}{shape}' for shape, dtype in shapes)})"


def _users_line() -> str:
    """Returns FILE:LINE of the user's code that called the collective; empty if none did."""
    frame: Any = sys._getframe(3)
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
