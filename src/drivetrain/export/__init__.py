"""A trained model as files for other programs: ONNX, checked against torch, and safetensors."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain import runs
from drivetrain.export.calls import graphs_of
from drivetrain.export.graphs import Written, write
from drivetrain.outcomes import Problem
from drivetrain.runs import Run
from drivetrain.task import Task

if TYPE_CHECKING:
    from torch import nn

FORMAT = 2  # of export.json: whole shapes with free sizes by name, and SHA-256
LARGEST = 2_000_000_000  # bytes
WEIGHTS = "model.safetensors"


def export(task: Task, model: nn.Module, run: Run, folder: Path) -> dict[str, Written]:
    """Write everything into a folder: `NAME.onnx` for each graph, model.safetensors, and export.json that describes them."""
    _need()
    if sum(t.nbytes for t in model.state_dict().values()) > LARGEST:
        raise Problem(f"the model is larger than a file of ONNX can be (2 GiB): {run.name}'s model.safetensors has its weights")
    graphs = graphs_of(task, model)
    with told_of(folder), _staged(folder) as place:
        written = {name: write(name, graph, place) for name, graph in graphs.items()}
        _weights(model, run, place)
        folder.mkdir(parents=True, exist_ok=True)
        files = [*(graph.file for graph in written.values()), WEIGHTS]
        card = _card(run, files, place) | {"graphs": {name: asdict(graph) for name, graph in written.items()}}
        for name in files:  # all appear, once the numbers of all graphs are torch's
            (place / name).replace(folder / name)
        runs.write_atomic(folder / runs.EXPORT_CARD, json.dumps(card, indent=1) + "\n")
    return written


def describe(run: Run, files: list[str], folder: Path) -> None:
    """Write export.json for files of a family's own form."""
    card = _card(run, [name for name in files if name != runs.EXPORT_CARD], folder)  # an earlier one may be among them
    runs.write_atomic(folder / runs.EXPORT_CARD, json.dumps(card, indent=1) + "\n")


@contextlib.contextmanager
def told_of(folder: Path) -> Iterator[None]:
    """What the system has against writing into a folder, in one line."""
    for path in (folder, *folder.parents):
        if path.exists() and not path.is_dir():
            raise Problem(f"{path} is a file: name a folder with --out")
    try:
        yield
    except OSError as error:
        raise Problem(f"{folder} cannot be written: {error.strerror or error}; --out DIR names another folder") from None


@contextlib.contextmanager
def _staged(folder: Path) -> Iterator[Path]:
    """A folder on the same disk in which files are complete before they appear; what killed exports left there is removed."""
    beside = folder if folder.is_dir() else folder.parent
    beside.mkdir(parents=True, exist_ok=True)
    prefix = f".export-{socket.gethostname()}-"
    for left in beside.glob(f"{prefix}*-*"):
        writer = left.name.removeprefix(prefix).split("-")[0]
        if writer.isdigit() and not runs.is_alive(int(writer)):
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{prefix}{os.getpid()}-", dir=beside) as place:
        yield Path(place)


def _need() -> None:
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as missing:
        raise Problem(f"export needs {missing.name}: pip install 'drivetrain[export]'") from None


def _weights(model: nn.Module, run: Run, place: Path) -> None:
    from safetensors.torch import save_model

    if run.is_finished:
        shutil.copyfile(run.model_path, place / WEIGHTS)
    else:
        save_model(model, str(place / WEIGHTS))


def _card(run: Run, files: Iterable[str], place: Path) -> dict[str, Any]:
    """What export.json tells of a run and of the files that were written."""
    info, last, evaluated = run.read(), run.last_row(), run.evaluation()
    hardware = info.get("hardware") or {}
    gpus = [gpu["name"] for gpu in hardware.get("gpus", [])]
    return {
        "format": FORMAT, "run": run.name, "task": info["recipe"]["task"]["label"], "settings": info["recipe"]["settings"],
        "sha256": {name: runs.sha256_of(place / name) for name in files},
        "training": {
            "date": info["created"][:10], "step": last.get("step", 0), "seconds": last.get("time", 0.0),
            "hardware": gpus[0] if gpus else f"{hardware.get('cpu_cores', '?')} CPU cores", "versions": info["versions"],
            "metrics": {k: v for k, v in evaluated.items() if k.startswith("eval/")}, "metrics_step": evaluated.get("step"),
        },
    }  # fmt: skip
