"""Builds the index once, in parallel, and in parts of up to a thousand studies: a build that was killed goes on where it was.

The index lies in `.drivetrain-cache` of the questions' folder, or in the user's cache folder where that is not writable. Its name is a hash of
the sizes and times of the tables and zips (of a folder of JSON files: of its groups p10, p11, ...). Parts are removed when it is complete.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np

from drivetrain.outcomes import Outcome, Problem
from drivetrain.tasks.cxr.data import merge, parts
from drivetrain.tasks.cxr.data.columns import FORMAT, CxrIndex, open_index, replace_column
from drivetrain.tasks.cxr.data.layout import (
    JsonFile,
    Listing,
    find_graphs,
    find_questions,
    find_table,
    info_names,
    list_json,
    read_chexpert,
    read_images,
    read_info,
)  # fmt: skip

CACHE_FOLDER = ".drivetrain-cache"
STUDIES_PER_PART = 1000
LOCK_NOTICE_SECONDS = 5.0
PROGRESS_SECONDS = 2.0
MAX_LOOKED_FOR = 1000
Notice = Callable[[str], None]


def print_notice(text: str) -> None:
    """Prints a line of progress, on rank 0 only."""
    if os.environ.get("RANK", "0") == "0":
        print(f"note    {text}", file=sys.stderr, flush=True)


def find_or_build(
    mimic: Path | str, qba: Path | str, folder: Path | None = None, processes: int | None = None, notice: Notice = print_notice
) -> CxrIndex:
    """Returns the index of the two data sets; builds it if there is none. Of several processes one builds it and the others wait."""
    mimic, qba = Path(mimic).expanduser().absolute(), Path(qba).expanduser().absolute()
    key = index_key(mimic, qba)
    parents = [folder] if folder else _cache_parents(qba)
    for parent in parents:
        if index := open_index(parent / key, mimic):
            return _with_new_images(index, parent, notice)
    failures = []
    for parent in parents:
        try:
            with _lock(parent, key, notice):
                return open_index(parent / key, mimic) or _build(parent / key, mimic, qba, processes, notice)
        except OSError as error:
            failures.append(f"{parent}: {error.strerror or error}")
    raise Problem(f"the index of the questions cannot be written ({'; '.join(failures)}): free disk space, or name another folder")


def index_key(mimic: Path, qba: Path) -> str:
    """Returns the name of the index of these folders; raises Problem if they are not the two data sets."""
    tables = [find_table(mimic, kind) for kind in ("metadata", "split", "chexpert")]
    sources = [path for path in (find_questions(qba), find_graphs(qba)) if path is not None]
    digest = hashlib.sha256(f"{FORMAT} {STUDIES_PER_PART} {mimic.resolve()}\0".encode())
    files = [*tables, *(path for path in sources if path.is_file())]
    for source in sources:
        if source.is_dir():
            files += sorted(path for path in source.iterdir() if re.fullmatch(r"p\d+", path.name))
    for path in (*files, *(path for path in (qba / "metadata" / "dataset_info.json", qba / "dataset_info.json") if path.is_file())):
        stat = path.stat()
        digest.update(f"{path}\0{stat.st_size if path.is_file() else 0} {stat.st_mtime_ns}\0".encode())
    return f"cxr-{digest.hexdigest()[:24]}"


def _cache_parents(qba: Path) -> list[Path]:
    name = hashlib.sha256(os.fsencode(qba.resolve())).hexdigest()[:16]
    user_caches = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    return [qba / CACHE_FOLDER, user_caches / "drivetrain" / "cxr" / name]


@contextmanager
def _lock(parent: Path, key: str, notice: Notice) -> Iterator[None]:
    """Locks an index for one process; while another one has it, a notice says so."""
    parent.mkdir(parents=True, exist_ok=True)
    with open(parent / f".{key}.lock", "w") as file:
        last_notice = time.monotonic()
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.1)
            if time.monotonic() - last_notice > LOCK_NOTICE_SECONDS:
                last_notice = time.monotonic()
                notice("index: waiting for another process that builds it")
        yield


def _with_new_images(index: CxrIndex, parent: Path, notice: Notice) -> CxrIndex:
    """Returns the index with the images that were missing when it was built and exist now.

    Up to a thousand of the missing ones are looked for; if any exists, all are. Every process does the same, so that all agree.
    """
    missing = np.flatnonzero(~index.image["is_present"])
    looked_for = missing[np.linspace(0, len(missing) - 1, min(len(missing), MAX_LOOKED_FOR)).astype(int)] if len(missing) else missing
    if not any(index.image_path(int(row)).is_file() for row in looked_for):
        return index
    try:
        with _lock(parent, index.folder.name, notice):
            is_present = index.image["is_present"].copy()
            is_present[missing] = [index.image_path(int(row)).is_file() for row in missing]
            num_found = int(is_present.sum()) - (len(is_present) - len(missing))
            notice(f"index: {num_found:,} of {len(missing):,} missing images exist now")
            replace_column(index.folder, "image", "is_present", is_present)
    except OSError as error:
        notice(f"index: images that exist now are still left out ({index.folder}: {error.strerror or error})")
    return open_index(index.folder, index.mimic) or index


def _build(folder: Path, mimic: Path, qba: Path, processes: int | None, notice: Notice) -> CxrIndex:
    work = folder.with_name(f".{folder.name}.parts")
    notice(f"index: reading the tables of {mimic} and listing the files of {qba}")
    specs, without_images = part_specs(mimic, qba, work)
    missing = [spec for spec in specs if (facts := parts.read_facts(Path(spec["folder"]))) is None or facts["digest"] != parts.digest(spec)]
    if len(missing) < len(specs):
        notice(f"index: {len(specs) - len(missing)} of {len(specs)} parts exist already")
    _build_parts(missing, processes or len(os.sched_getaffinity(0)), _Progress(sum(len(spec["studies"]) for spec in missing), notice))
    notice(f"index: joining {len(specs)} parts")
    info = read_info(qba)
    regions = info_names(info, "regions", "region_names")
    entities = info_names(info, "finding_entities", "entities", "entity_names", "obs_entities")
    hidden = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(hidden, ignore_errors=True)
    hidden.mkdir(parents=True)
    merge.merge_parts([Path(spec["folder"]) for spec in specs], hidden, regions, entities, without_images)
    shutil.rmtree(folder, ignore_errors=True)
    hidden.rename(folder)
    shutil.rmtree(work, ignore_errors=True)
    index = open_index(folder, mimic)
    if index is None:
        raise OSError(f"{folder} cannot be read back")
    sizes = index.bytes_by_kind()
    notice(f"index: {index.num_questions:,} questions of {index.num_studies:,} studies, {sum(sizes.values()) / 1e6:,.0f} MB in {folder}")
    return index


def part_specs(mimic: Path, qba: Path, work: Path) -> tuple[list[parts.Spec], list[str]]:
    """Returns what each part holds, and the labels of studies with questions but without an image in the tables."""
    images, labels = read_images(mimic), read_chexpert(mimic)
    questions = list_json(find_questions(qba), "qa")
    graph_source = find_graphs(qba)
    graphs = list_json(graph_source, "scene_graph") if graph_source else {}
    if not questions:
        raise Problem(f"{find_questions(qba)} holds no p10/p10000032/s50414267.qa.json: give the folder of MIMIC-Ext-CXR-QBA", Outcome.DATA)
    rows = _rows_by_study(images.patient, images.study)
    groups: dict[str, list[dict[str, Any]]] = {}
    for patient, study in sorted(questions):
        first, last = rows.get((patient, study), (0, 0))
        groups.setdefault(f"p{str(patient)[:2]}", []).append(
            {
                "patient": patient,
                "study": study,
                "chexpert": labels.get(study),
                "images": [
                    (images.name[i].decode(), int(images.view[i]), int(images.split[i]), int(images.size[i, 0]), int(images.size[i, 1]))
                    for i in range(first, last)
                ],
                "qa": astuple(questions[patient, study]),
                "graph": _location(graphs, patient, study),
            }
        )
    without_images = [f"p{s['patient']}/s{s['study']}" for studies in groups.values() for s in studies if not s["images"]]
    specs = [
        {"mimic": str(mimic), "folder": str(work / f"{group}-{begin // STUDIES_PER_PART:03d}"), "studies": studies[begin : begin + STUDIES_PER_PART]}
        for group, studies in groups.items()
        for begin in range(0, len(studies), STUDIES_PER_PART)
    ]  # fmt: skip
    if len(without_images) == len(questions):
        raise Problem(
            f"none of the {len(questions):,} studies of {qba} is in the tables of {mimic}: the folders do not belong together", Outcome.DATA
        )
    return specs, without_images


def _location(files: Listing, patient: int, study: int) -> tuple[Any, ...] | None:
    file: JsonFile | None = files.get((patient, study))
    return None if file is None else astuple(file)


def _rows_by_study(patients: Any, studies: Any) -> dict[tuple[int, int], tuple[int, int]]:
    """Returns the first row of each study and the row after its last one."""
    changes = np.flatnonzero((np.diff(studies) != 0) | (np.diff(patients) != 0)) + 1
    starts, ends = [0, *changes.tolist()], [*changes.tolist(), len(studies)]
    return {(int(patients[a]), int(studies[a])): (a, b) for a, b in zip(starts, ends, strict=True)}


class _Progress:
    """Counts studies and questions, and prints a line every few seconds."""

    def __init__(self, total: int, notice: Notice) -> None:
        self.total, self.notice, self.studies, self.questions = total, notice, 0, 0
        self.begin = self.last_line = time.monotonic()
        self.lock = threading.Lock()

    def add(self, studies: int, questions: int) -> None:
        with self.lock:
            self.studies, self.questions = self.studies + studies, self.questions + questions
            now = time.monotonic()
            if now - self.last_line < PROGRESS_SECONDS:
                return
            self.last_line, seconds = now, now - self.begin
            left = seconds * (self.total - self.studies) / max(self.studies, 1)
            speed = f"{self.questions / seconds:,.0f} questions/s"
            self.notice(f"index: {self.studies:,} of {self.total:,} studies, {self.questions:,} questions, {speed}, {left:,.0f} s left")


def _build_parts(specs: Sequence[parts.Spec], processes: int, progress: _Progress) -> None:
    """Builds parts, in this process or in several."""
    if processes < 2 or len(specs) < 2 or progress.total < STUDIES_PER_PART:  # a process takes half a second to start
        for spec in specs:
            progress.add(len(spec["studies"]), parts.build_part(spec))
        return
    todo = iter(specs)
    lock, failures = threading.Lock(), list[str]()

    def next_spec() -> parts.Spec | None:
        with lock:
            return None if failures else next(todo, None)

    def serve() -> None:
        try:
            _serve_worker(next_spec, progress)
        except (OSError, ValueError, RuntimeError) as error:
            failures.append(str(error))

    threads = [threading.Thread(target=serve) for _ in range(min(processes, len(specs)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise Problem(
            f"a worker of the index build failed ({failures[0]}): start again, it goes on with the parts that are missing", Outcome.INFRA
        )


def _serve_worker(next_spec: Callable[[], parts.Spec | None], progress: _Progress) -> None:
    """Starts a worker and hands it parts until none is left. It ends when its input is closed."""
    command = [sys.executable, "-m", "drivetrain.tasks.cxr.data.parts"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdin is not None and process.stdout is not None
        while (spec := next_spec()) is not None:
            process.stdin.write(json.dumps(spec) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
            answer: dict[str, Any] = json.loads(line) if line else {"error": "it ended"}
            if "error" in answer:
                raise RuntimeError(answer["error"])
            progress.add(len(spec["studies"]), answer["questions"])
        process.stdin.close()
