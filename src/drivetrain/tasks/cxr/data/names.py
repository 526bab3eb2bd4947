"""The names that give a model its sizes. A run keeps them, so that its model can be used without the data, and on no other data by mistake."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from drivetrain.outcomes import Outcome, Problem
from drivetrain.runs import find, write_atomic
from drivetrain.tasks.cxr.data.columns import CxrIndex
from drivetrain.tasks.cxr.data.index import print_notice
from drivetrain.tasks.cxr.data.words import all_words

FILE = "cxr-names.json"
"""In the run's folder."""


@dataclass(frozen=True)
class DataNames:
    """Words, regions and entities in the order of their numbers."""

    words: list[str]
    """With text=small; else empty."""
    regions: list[str]
    entities: list[str]
    num_nodes: int
    """Nodes of the largest scene graph."""

    def difference(self, other: DataNames) -> str:
        """Returns which names differ; empty if the same numbers mean the same."""
        return next((kind for kind in ("words", "regions", "entities") if getattr(self, kind) != getattr(other, kind)), "")


def names_of_index(index: CxrIndex, with_words: bool) -> DataNames:
    words = all_words(index.question_texts) if with_words else []
    return DataNames(words, list(index.region_names), list(index.entity_names), max(index.largest_graph, 1))


def read_names(run_folder: Path | None) -> DataNames | None:
    """Returns the names that a run keeps; None if it has none."""
    if run_folder is None:
        return None
    path = run_folder / FILE
    try:
        return DataNames(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise Problem(f"{path} cannot be read ({error}): remove it, and the names are read from the data") from None


def write_run_file(run_folder: Path | None, name: str, content: object) -> None:
    """Writes a JSON file into a run's folder, on rank 0; if it cannot be written, a notice says so."""
    if run_folder is None or os.environ.get("RANK", "0") != "0":
        return
    try:
        write_atomic(run_folder / name, json.dumps(content, indent=1) + "\n")
    except OSError as error:
        print_notice(f"{run_folder / name} cannot be written: {error.strerror or error}")


def write_names(run_folder: Path | None, names: DataNames) -> None:
    write_run_file(run_folder, FILE, asdict(names))


def check_same(stored: DataNames | None, names: DataNames, origin: str) -> None:
    """Raises Problem if a model would give numbers of these data another meaning than it learned."""
    if stored and (kind := stored.difference(names)):
        raise Problem(f"{origin} was trained on data with other {kind}: use the data that it was trained on", Outcome.DATA)


def names_of_start(start: str) -> DataNames | None:
    """Returns the names of the run whose weights `start` names; None if it has none, or is not on this machine."""
    with contextlib.suppress(Problem):
        return read_names(Path(start).parent.parent if start.endswith(".safetensors") else find(start).path)
    return None
