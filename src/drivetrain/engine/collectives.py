"""Every collective compared before it is begun: its operation, shapes and types, over all ranks (`--check-collectives`)."""

from __future__ import annotations

import functools
import json
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from drivetrain.engine.feed import tensors_in
from drivetrain.engine.group import Group
from drivetrain.outcomes import Outcome, Problem
from drivetrain.source import is_users

CHECKED = (
    "all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "gather", "scatter", "reduce_scatter",
    "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "barrier",
)  # fmt: skip
ALIKE = ("all_gather", "gather", "scatter", "all_to_all")  # where one rank's shapes need not be another's


def check_collectives(group: Group) -> None:
    """From now on a collective in which the ranks do not agree raises, on all of them, and names the odd one."""
    if group.size == 1:
        return
    checker = _Checker(group)
    for name in CHECKED:
        plain = getattr(dist, name)
        for module in (dist, dist.distributed_c10d):
            setattr(module, name, checker.checked(name, plain))


class _Checker:
    def __init__(self, group: Group) -> None:
        self.group = group
        self.store = dist.distributed_c10d._get_default_store()
        self.count = 0
        self.inside = False

    def checked(self, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def collective(*args: Any, **options: Any) -> Any:
            whole = options.get("group") is None and not any(isinstance(a, dist.ProcessGroup) for a in args)
            if self.inside or not whole:  # of a part of the ranks, only those could be asked
                return plain(*args, **options)
            self.inside = True
            try:
                self._compare(name, args, options)
                return plain(*args, **options)
            finally:
                self.inside = False

        return collective

    def _compare(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.count += 1
        tensors = tensors_in(list(args) + [v for v in options.values() if isinstance(v, (Tensor, list))])
        types = [str(t.dtype).removeprefix("torch.") for t in tensors]
        shapes = (
            [[[], t] for t in sorted(set(types))] if name in ALIKE else [[list(t.shape), d] for t, d in zip(tensors, types, strict=True)]
        )
        mine = json.dumps([name, shapes])
        key = f"drivetrain/collective/{self.count}"
        self.store.set(f"{key}/{self.group.rank}", json.dumps([mine, _place()]))
        told = [json.loads(self.store.get(f"{key}/{rank}")) for rank in range(self.group.size)]
        if self.count > 2:  # all have read what lies two back
            self.store.delete_key(f"drivetrain/collective/{self.count - 2}/{self.group.rank}")
        kinds = Counter(what for what, _ in told)
        if len(kinds) > 1:
            raise Problem(_disagreement(told, kinds, self.count), Outcome.USER_ERROR)


def _disagreement(told: list[list[str]], kinds: Counter[str], count: int) -> str:
    usual = kinds.most_common(1)[0][0]
    odd = next(rank for rank, (what, _) in enumerate(told) if what != usual)
    if len(set(kinds.values())) == 1:  # of two that disagree, the one that the user's own code began
        odd = next((rank for rank, (_, place) in enumerate(told) if place), odd)
        usual = next(what for rank, (what, _) in enumerate(told) if rank != odd)
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
