"""Reads the environment variables of other launchers: torchrun, accelerate, deepspeed, srun, PyTorchJob."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping, MutableMapping
from dataclasses import replace

from drivetrain.recipe import Recipe


def detect_launcher(environment: MutableMapping[str, str]) -> str | None:
    """Returns the launcher that started this process as a worker, if there is one; sets the variables of torch that are missing."""
    if "RANK" in environment and "WORLD_SIZE" in environment:
        environment.setdefault("LOCAL_RANK", "0")
        environment.setdefault("LOCAL_WORLD_SIZE", environment.get("LOCAL_SIZE", "1"))  # LOCAL_SIZE is DeepSpeed's
        environment.setdefault("MASTER_ADDR", "127.0.0.1")
        environment.setdefault("MASTER_PORT", "29500")
        if "TORCHELASTIC_RUN_ID" in environment:
            return "accelerate" if "ACCELERATE_MIXED_PRECISION" in environment else "torchrun"
        return "deepspeed" if "CROSS_SIZE" in environment else "the environment (RANK, WORLD_SIZE)"
    if "SLURM_STEP_ID" in environment and int(environment.get("SLURM_STEP_NUM_TASKS", 1)) > 1 and "SLURM_PROCID" in environment:
        _add_slurm_variables(environment)
        return "srun"
    return None


def _add_slurm_variables(environment: MutableMapping[str, str]) -> None:
    environment["RANK"] = environment["SLURM_PROCID"]
    environment["WORLD_SIZE"] = environment["SLURM_STEP_NUM_TASKS"]
    environment["LOCAL_RANK"] = environment.get("SLURM_LOCALID", "0")
    tasks = tasks_per_node(environment.get("SLURM_STEP_TASKS_PER_NODE", environment["WORLD_SIZE"]))
    environment["LOCAL_WORLD_SIZE"] = str(tasks[int(environment.get("SLURM_NODEID", 0))])
    environment.setdefault("MASTER_ADDR", _slurm_master(environment))
    step_hash = int(environment.get("SLURM_JOB_ID", 0)) * 31 + int(environment["SLURM_STEP_ID"])  # so that steps use different ports
    environment.setdefault("MASTER_PORT", str(20000 + step_hash % 10000))


def _slurm_master(environment: Mapping[str, str]) -> str:
    """Returns the address of the machine on which all ranks can reach rank 0."""
    if environment.get("SLURM_STEP_NUM_NODES", "1") == "1":
        return "127.0.0.1"
    host = first_host(environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_NODELIST", "")))
    try:
        socket.gethostbyname(host)
    except OSError:  # a name that only Slurm knows: use the machine that runs srun, which all nodes can reach
        return environment.get("SLURM_LAUNCH_NODE_IPADDR", host)
    return host


def first_host(nodes: str) -> str:
    """Returns the first name of a Slurm node list: n[01-03,7],m2 -> n01."""
    match = re.match(r"([^\[,]*)(?:\[(\d+)[^\]]*\])?([^,]*)", nodes)
    return f"{match[1]}{match[2] or ''}{match[3]}" if match else nodes


def tasks_per_node(text: str) -> list[int]:
    """Expands Slurm's short form: 2(x3),1 -> 2, 2, 2, 1."""
    parts = (part.rstrip(")").split("(x") for part in text.split(","))
    counts: list[int] = []
    for count, *repeats in parts:
        counts += [int(count)] * (int(repeats[0]) if repeats else 1)
    return counts


def with_accelerate_choices(recipe: Recipe, environment: Mapping[str, str], launcher: str | None) -> Recipe:
    """Returns the recipe with the precision and accumulation of `accelerate launch`, unless the user set them in the recipe."""
    if "ACCELERATE_MIXED_PRECISION" not in environment:
        return recipe
    notices = list(recipe.notices)
    settings, origin, pins = dict(recipe.settings), dict(recipe.origin), dict(recipe.pins)
    precision = environment["ACCELERATE_MIXED_PRECISION"]
    if precision in ("fp16", "bf16") and origin["precision"] == "default":
        settings["precision"], origin["precision"] = precision, "accelerate"
        notices.append(f"precision={precision}, from accelerate launch")
    steps = environment.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    if steps.isdigit() and int(steps) > 1 and not {"accumulation", "micro_batch"} & pins.keys():
        pins["accumulation"] = steps
        notices.append(f"plan.accumulation={steps}, from accelerate launch (the global batch stays {settings['global_batch']})")
    if launcher is None:
        notices.append(
            "accelerate launch started one process (with --cpu it ignores --num_processes): for more, use --procs N here, or torchrun"
        )
    return replace(recipe, settings=settings, origin=origin, pins=pins, notices=tuple(notices))
