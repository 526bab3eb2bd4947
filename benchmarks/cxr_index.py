"""Builds the index of chest X-ray questions for N million questions, and prints its time, size and memory.

The questions are those of the synthetic twin in zips like those of MIMIC-Ext-CXR-QBA; a pool of studies is repeated under other numbers.

python benchmarks/cxr_index.py --questions 5 --json benchmarks/results/cxr-index-cpu.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import platform
import random
import resource
import shutil
import tempfile
import threading
import time
import tracemalloc
import zipfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from drivetrain import __version__
from drivetrain.hardware import cpu_cores
from drivetrain.tasks.cxr.data.layout import split_name
from drivetrain.tasks.cxr.twin.plan import StudyPlan, plan_study
from drivetrain.tasks.cxr.twin.write import study_files, write_tables
from drivetrain.tasks.cxr.vocabulary import SPLITS

POOL_STUDIES = 1000
STUDIES_OF_A_PATIENT = 3


def write_data(folder: Path, questions: int) -> dict[str, Any]:
    """Writes tables and zips with at least so many questions; returns their sizes."""
    mimic, qba = folder / "mimic", folder / "qba"
    mimic.mkdir(parents=True)
    qba.mkdir()
    (folder / "no-image.jpg").touch()  # the build looks whether the files exist, and does not read them
    begin = time.monotonic()
    pool, sizes, plans = [], 0, list[tuple[StudyPlan, tuple[int, int], int]]()
    written, number, last_line = 0, 0, begin
    with (
        zipfile.ZipFile(qba / "qa.zip", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as qa,
        zipfile.ZipFile(qba / "scene_data.zip", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as graphs,
    ):
        while written < questions:
            if number < POOL_STUDIES:
                plan = plan_study(0, number)
                _, asked, graph, size = study_files(plan, 0, with_images=False)
                pool.append((plan, json.dumps(asked), json.dumps(graph), size, len(asked["questions"])))
            plan, asked_text, graph_text, size, count = pool[number % POOL_STUDIES]
            repeated = repeat(plan, number)
            path = f"p{repeated.patient // 1_000_000}/p{repeated.patient}/s{repeated.study}"
            qa.writestr(f"{path}.qa.json", asked_text)
            graphs.writestr(f"{path}.scene_graph.json", graph_text)
            plans.append((repeated, size, count))
            files = mimic / "files" / f"p{repeated.patient // 1_000_000}" / f"p{repeated.patient}" / f"s{repeated.study}"
            files.mkdir(parents=True)
            for image in repeated.images:
                (files / f"{image}.jpg").symlink_to(folder / "no-image.jpg")
            sizes += len(asked_text) + len(graph_text)
            written, number = written + count, number + 1
            if time.monotonic() - last_line > 10:
                last_line = time.monotonic()
                print(f"{written:,} of {questions:,} questions written", flush=True)
    write_tables(mimic, qba, plans)
    zips = sum(path.stat().st_size for path in qba.glob("*.zip"))
    return {"studies": number, "json_bytes": sizes, "zip_bytes": zips, "write_seconds": time.monotonic() - begin}


def repeat(plan: StudyPlan, number: int) -> StudyPlan:
    """Returns a study of the pool under another number."""
    patient = number // STUDIES_OF_A_PATIENT
    values = vars(plan) | {
        "patient": (10 + patient % 10) * 1_000_000 + patient // 10,
        "study": 50_000_000 + number,
        "split": split_of(patient),
    }
    return StudyPlan(**values)


def split_of(patient: int) -> str:
    return split_name(0 if patient % 20 else 2)


def in_child(work: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """Runs work in a process of its own, so that its memory can be seen."""
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    process = context.Process(target=put_result, args=(results, work, *arguments))
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"{work.__name__} failed")
    result: dict[str, Any] = results.get()
    return result


def put_result(results: Any, work: Callable[..., dict[str, Any]], *arguments: Any) -> None:
    results.put(work(*arguments))


class WorkerMemory(threading.Thread):
    """Watches the memory of this process's children."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak_bytes = 0
        self.start()

    def run(self) -> None:
        while True:
            for child in psutil.Process().children():
                with contextlib.suppress(psutil.Error):
                    self.peak_bytes = max(self.peak_bytes, child.memory_info().rss)
            time.sleep(0.2)


def build(folder: Path, processes: int) -> dict[str, Any]:
    """Builds the index; returns its seconds, bytes and peak memory."""
    from drivetrain.tasks.cxr.data.index import find_or_build

    workers = WorkerMemory()
    begin, begin_cpu = time.monotonic(), cpu_seconds()
    index = find_or_build(folder / "mimic", folder / "qba", processes=processes)
    return {
        "questions": index.num_questions,
        "build_seconds": time.monotonic() - begin,
        "build_cpu_seconds": cpu_seconds() - begin_cpu,
        "build_peak_bytes": peak_bytes(),
        "worker_peak_bytes": workers.peak_bytes,
        **{f"{kind}_bytes": size for kind, size in index.bytes_by_kind().items()},
    }


def cpu_seconds() -> float:
    """Returns the CPU time of this process and of its children that have ended: other work on the machine does not change it."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def peak_bytes() -> int:
    """Returns the largest memory of this process; its `ru_maxrss` would begin with that of its parent."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def private_bytes() -> int:
    """Returns the memory of this process that no other process shares: mapped files are not in it."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))


def use(folder: Path) -> dict[str, Any]:
    """Opens and checks the index as a training does, and reads samples without images; returns seconds and memory."""
    from drivetrain.tasks.cxr.data.check import check_data
    from drivetrain.tasks.cxr.data.index import find_or_build
    from drivetrain.tasks.cxr.data.samples import CxrDataset

    before, begin = private_bytes(), time.monotonic()
    index = find_or_build(folder / "mimic", folder / "qba")
    opened = time.monotonic()
    opened_bytes = private_bytes() - before
    tracemalloc.start()
    check_data(index)
    check_peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    checked = time.monotonic()
    samples = 0
    for split in SPLITS[:1]:
        data = CxrDataset(index, split, grade="unrated", questions_per_image=4, cache_images=False)
        samples += len(data)
        selected = time.monotonic()
        positions = random.Random(0).sample(range(len(data)), min(20_000, len(data)))
        for position in positions:
            data.question_rows(position)
    return {
        "open_seconds": opened - begin,
        "open_private_bytes": opened_bytes,
        "check_seconds": checked - opened,
        "check_peak_bytes": check_peak_bytes,
        "select_seconds": selected - checked,
        "lookup_microseconds": (time.monotonic() - selected) / len(positions) * 1e6,
        "samples": samples,
        "private_bytes": private_bytes() - before,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=float, default=5, help="millions of questions (default 5)")
    parser.add_argument("--processes", type=int, default=cpu_cores())
    parser.add_argument("--folder", metavar="DIR", help="where to write the data (default: a temporary folder, removed in the end)")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    import torch  # here, so that the processes that are measured do not import it

    folder = Path(args.folder) if args.folder else Path(tempfile.mkdtemp(prefix="cxr-index-"))
    try:
        row = write_data(folder, int(args.questions * 1e6))
        row |= in_child(build, folder, args.processes) | {"processes": args.processes}
        row |= in_child(use, folder)
    finally:
        if not args.folder:
            shutil.rmtree(folder, ignore_errors=True)
    total = sum(row[f"{kind}_bytes"] for kind in ("questions", "texts", "studies"))
    print(
        f"{row['questions']:,} questions of {row['studies']:,} studies, {row['json_bytes'] / 1e6:,.0f} MB of JSON in {row['zip_bytes'] / 1e6:,.0f} MB of zips"
    )
    print(
        f"build     {row['build_seconds']:,.0f} s, {row['questions'] / row['build_seconds']:,.0f} questions/s with {row['processes']} processes ({row['build_cpu_seconds']:,.0f} CPU s)"
    )
    print(f"memory    {row['build_peak_bytes'] / 1e6:,.0f} MB, each worker {row['worker_peak_bytes'] / 1e6:,.0f} MB")
    for kind in ("questions", "studies", "texts"):
        print(f"{kind:<10}{row[f'{kind}_bytes'] / 1e6:,.1f} MB, {row[f'{kind}_bytes'] / row['questions']:.1f} bytes a question")
    print(
        f"index     {total / 1e6:,.1f} MB, {total / row['questions']:.1f} bytes a question; 38 million questions: {38e6 * total / row['questions'] / 1e9:.2f} GB of disk"
    )
    print(
        f"training  opened in {row['open_seconds'] * 1000:.0f} ms ({row['open_private_bytes'] / 1e6:,.0f} MB), checked in {row['check_seconds']:.1f} s "
        f"({row['check_peak_bytes'] / 1e6:,.0f} MB at most), questions selected in {row['select_seconds']:.1f} s, "
        f"{row['lookup_microseconds']:.0f} us to find a sample, {row['private_bytes'] / 1e6:,.0f} MB of memory of its own"
    )  # fmt: skip
    if args.json:
        facts = {
            "date": datetime.now(UTC).date().isoformat(), "hardware": f"{cpu_cores()} CPU cores ({platform.machine()})", "torch": torch.__version__,
            "python": platform.python_version(), "drivetrain": __version__, "command": f"python benchmarks/cxr_index.py --questions {args.questions:g}", "rows": [row],
        }  # fmt: skip
        Path(args.json).write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
