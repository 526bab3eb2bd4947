"""Exports a trained model for other programs: ONNX, checked against torch, and safetensors."""

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
from drivetrain.export.graphs import WrittenGraph, write_graph
from drivetrain.outcomes import Problem
from drivetrain.runs import Run
from drivetrain.task import Task

if TYPE_CHECKING:
    from torch import nn

CARD_FORMAT = 2  # of export.json. Since 2 it has complete shapes, with names for free sizes, and SHA-256.
MAX_ONNX_BYTES = 2_000_000_000  # an ONNX file cannot be larger than 2 GiB
WEIGHTS = "model.safetensors"


def export(task: Task, model: nn.Module, run: Run, folder: Path) -> dict[str, WrittenGraph]:
    """Writes `NAME.onnx` for each graph, model.safetensors, and export.json that describes them."""
    _require_onnx()
    if sum(t.nbytes for t in model.state_dict().values()) > MAX_ONNX_BYTES:
        raise Problem(f"the model is larger than an ONNX file can be (2 GiB): use the weights in {run.name}'s model.safetensors")
    graphs = graphs_of(task, model)
    with writable(folder), _staging_folder(folder) as staging:
        written = {name: write_graph(name, graph, staging) for name, graph in graphs.items()}
        _write_weights(model, run, staging)
        folder.mkdir(parents=True, exist_ok=True)
        files = [*(graph.file for graph in written.values()), WEIGHTS]
        card = _card(run, files, staging) | {"graphs": {name: asdict(graph) for name, graph in written.items()}}
        for name in files:  # no file appears before all graphs have passed their check
            (staging / name).replace(folder / name)
        runs.write_atomic(folder / runs.EXPORT_CARD, json.dumps(card, indent=1) + "\n")
    return written


def describe(run: Run, files: list[str], folder: Path) -> None:
    """Writes export.json for files that a task family wrote in its own format."""
    card = _card(run, [name for name in files if name != runs.EXPORT_CARD], folder)  # without the export.json of an earlier export
    runs.write_atomic(folder / runs.EXPORT_CARD, json.dumps(card, indent=1) + "\n")


@contextlib.contextmanager
def writable(folder: Path) -> Iterator[None]:
    """Turns an OSError about writing into a folder into a Problem."""
    for path in (folder, *folder.parents):
        if path.exists() and not path.is_dir():
            raise Problem(f"{path} is a file: name a folder with --out")
    try:
        yield
    except OSError as error:
        raise Problem(f"{folder} cannot be written: {error.strerror or error}; --out DIR names another folder") from None


@contextlib.contextmanager
def _staging_folder(folder: Path) -> Iterator[Path]:
    """Yields a temporary folder on the same disk, so that files can be renamed into `folder`. Removes those of killed exports."""
    parent = folder if folder.is_dir() else folder.parent
    parent.mkdir(parents=True, exist_ok=True)
    prefix = f".export-{socket.gethostname()}-"
    for old_folder in parent.glob(f"{prefix}*-*"):
        pid = old_folder.name.removeprefix(prefix).split("-")[0]
        if pid.isdigit() and not runs.is_alive(int(pid)):
            shutil.rmtree(old_folder, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{prefix}{os.getpid()}-", dir=parent) as staging:
        yield Path(staging)


def _require_onnx() -> None:
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as missing:
        raise Problem(f"export needs {missing.name}: pip install 'drivetrain[export]'") from None


def _write_weights(model: nn.Module, run: Run, folder: Path) -> None:
    from safetensors.torch import save_model

    if run.is_finished:
        shutil.copyfile(run.model_path, folder / WEIGHTS)
    else:
        save_model(model, str(folder / WEIGHTS))


def _card(run: Run, files: Iterable[str], folder: Path) -> dict[str, Any]:
    """Returns the contents of export.json without graphs: the run, its training, and the SHA-256 of each file."""
    info, last_row, evaluation = run.read(), run.last_row(), run.evaluation()
    hardware = info.get("hardware") or {}
    gpus = [gpu["name"] for gpu in hardware.get("gpus", [])]
    return {
        "format": CARD_FORMAT, "run": run.name, "task": info["recipe"]["task"]["label"], "settings": info["recipe"]["settings"],
        "sha256": {name: runs.sha256_of(folder / name) for name in files},
        "training": {
            "date": info["created"][:10], "step": last_row.get("step", 0), "seconds": last_row.get("time", 0.0),
            "hardware": gpus[0] if gpus else f"{hardware.get('cpu_cores', '?')} CPU cores", "versions": info["versions"],
            "metrics": {name: value for name, value in evaluation.items() if name.startswith("eval/")},
            "metrics_step": evaluation.get("step"),
        },
    }  # fmt: skip
