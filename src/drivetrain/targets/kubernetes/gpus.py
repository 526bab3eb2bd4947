"""What the GPUs of a run's pods do, for `status`."""

from __future__ import annotations

from collections.abc import Iterator

from drivetrain.outcomes import Problem
from drivetrain.targets.kubernetes.pods import PodHost

QUERY = ("nvidia-smi", "--query-gpu=index,utilization.gpu,memory.used,memory.total,power.draw", "--format=csv,noheader,nounits")


def gpu_lines(host: PodHost, node: int = 0, procs: int | None = None) -> Iterator[str]:
    """Yields what the GPUs of a pod do, by rank; nothing for a pod without GPUs.

    `node`: the pod's number; `procs`: the processes of each pod, one for each of its first GPUs; None: one for each GPU."""
    try:
        text = host.cluster.exec(host.pod, host.container, QUERY)
    except Problem:
        return
    rows = [values for line in text.splitlines() if len(values := [value.strip() for value in line.split(",")]) == 5]
    num_ranks = len(rows) if procs is None else procs
    for number, (index, busy, used, total, watts) in enumerate(rows):
        rank = f"rank {node * num_ranks + number}" if number < num_ranks else "no rank"
        yield f"{rank}   GPU {index} of {host.pod}: {busy} % busy, {used} of {total} MiB, {watts} W"
