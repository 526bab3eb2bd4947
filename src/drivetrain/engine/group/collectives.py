"""Every collective compared before it is begun: its operation, shapes and types, over the ranks of its group (`--check-collectives`)."""

from __future__ import annotations

import functools
import json
import os
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from drivetrain.engine.data.batches import tensors_in
from drivetrain.engine.group import Group
from drivetrain.outcomes import Outcome, Problem
from drivetrain.project import is_users

CHECKED = (
    "all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "gather", "scatter", "reduce_scatter",
    "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "barrier",
)  # fmt: skip
ALIKE = ("all_gather", "gather", "scatter", "all_to_all")  # where one rank's shapes need not be another's


def check_collectives(group: Group) -> None:
    """From now on a collective in which the ranks do not agree raises, on all of them, and names the odd one."""
    if group.size == 1:
        return
    checker = _Checker()
    for name in CHECKED:
        plain = getattr(dist, name)
        for module in (dist, dist.distributed_c10d):
            setattr(module, name, checker.checked(name, plain))


class _Members:
    """The ranks of a group, and what they have told each other."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.ranks = dist.get_process_group_ranks(group)
        self.mine = dist.get_rank()
        store: Any = dist.distributed_c10d._get_default_store()
        # Its own connection: on another, the checkpoint's thread would wait for the training's, which waits for another rank.
        self.store = PrefixStore(f"drivetrain/collective/{group.group_name}", store.clone())
        self.count = 0

    def tell(self, text: str) -> dict[int, list[str]]:
        """What each of them says."""
        self.count += 1
        self.store.set(f"{self.count}/{self.mine}", text)
        told = {rank: json.loads(self.store.get(f"{self.count}/{rank}")) for rank in self.ranks}
        if self.count > 2:  # all have read what lies two back
            self.store.delete_key(f"{self.count - 2}/{self.mine}")
        return told


class _Checker:
    def __init__(self) -> None:
        self.members: dict[str, _Members] = {}
        self.thread = threading.local()

    def checked(self, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def collective(*args: Any, **options: Any) -> Any:
            group = options.get("group") or next((a for a in args if isinstance(a, dist.ProcessGroup)), dist.group.WORLD)
            if getattr(self.thread, "inside", False) or not isinstance(group, dist.ProcessGroup):  # a group of others
                return plain(*args, **options)
            self.thread.inside = True
            try:
                self._compare(group, name, args, options)
                return plain(*args, **options)
            finally:
                self.thread.inside = False

        return collective

    def _compare(self, group: dist.ProcessGroup, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        tensors = tensors_in(list(args) + [v for v in options.values() if isinstance(v, (Tensor, list))])
        types = [str(t.dtype).removeprefix("torch.") for t in tensors]
        shapes = (
            [[[], t] for t in sorted(set(types))] if name in ALIKE else [[list(t.shape), d] for t, d in zip(tensors, types, strict=True)]
        )
        if group.group_name not in self.members:
            self.members[group.group_name] = _Members(group)
        members = self.members[group.group_name]
        told = members.tell(json.dumps([json.dumps([name, shapes]), _place()]))
        kinds = Counter(what for what, _ in told.values())
        if len(kinds) > 1:
            raise Problem(_disagreement(told, kinds, members.count), Outcome.USER_ERROR)


def _disagreement(told: dict[int, list[str]], kinds: Counter[str], count: int) -> str:
    usual = kinds.most_common(1)[0][0]
    odd = next(rank for rank, (what, _) in told.items() if what != usual)
    if len(set(kinds.values())) == 1:  # of two that disagree, the one that the user's own code began
        odd = next((rank for rank, (_, place) in told.items() if place), odd)
        usual = next(what for rank, (what, _) in told.items() if rank != odd)
    place = f" at {told[odd][1]}" if told[odd][1] else ""
    return f"collective {count:,}: rank {odd} is out of step: it is in {_shown(told[odd][0])}{place}, the others in {_shown(usual)}"


def _shown(text: str) -> str:
    name, shapes = json.loads(text)
    return f"{name}({', '.join(f'{dtype}{shape}' for shape, dtype in shapes)})"


def _place() -> str:
    """The user's line that began this, if one did."""
    import sys

    frame: Any = sys._getframe(3)
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
