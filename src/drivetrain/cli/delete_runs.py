"""`runs rm` and `runs prune`: delete runs, or only the checkpoints of finished ones."""

from __future__ import annotations

import contextlib
import re
import shutil
import sys
from pathlib import Path

from drivetrain import runs
from drivetrain.outcomes import Problem
from drivetrain.runs import Lock, Run
from drivetrain.targets.record import being_submitted, is_being_submitted, read_record
from drivetrain.terminal import one_line


def format_disk_size(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:,.1f} MB" if num_bytes < 1e9 else f"{num_bytes / 1e9:,.1f} GB"


def remove(names: list[str], assume_yes: bool, dry_run: bool) -> int:
    """Deletes runs, after it has shown them and asked. Deletes none if a name is wrong or a run is in use."""
    if not names:
        raise Problem("name the runs to delete: drivetrain runs rm NAME ...")
    deletable = [run for name in names for run in runs.find_deletable(name)]
    chosen = list({run.path.resolve(): run for run in deletable}.values())  # each run once
    for run in chosen:
        _refuse_in_use(run)
    for run in chosen:
        verb = "would delete" if dry_run else "delete"
        print(one_line(f"{verb} {run.path.absolute()}  {format_disk_size(run.disk_bytes())}  {_status(run)}"))
    if dry_run:
        return 0
    if not assume_yes:
        if not sys.stdin.isatty():
            raise Problem("deleting needs --yes where nobody can be asked")
        if input("delete? [y/N] ").strip().lower() not in ("y", "yes"):
            return 1
    for run in chosen:
        _refuse_in_use(run)
        lock = Lock.acquire(run.path)  # so that no training starts in it
        try:
            _delete(run.path)
        finally:
            lock.release()
        _delete_if_empty(run.path.parent)  # a recipe's folder, after its last stage
    return 0


def _status(run: Run) -> str:
    """Returns a run's status, also for a study or an unreadable folder."""
    if runs.is_study(run.path):
        return "study"
    try:
        record = read_record(run)
        return run.status if runs.is_run(run.path) or record is None else record.phase
    except Problem:
        return "unreadable"


def _refuse_in_use(run: Run) -> None:
    """Raises Problem if the run, its study, or one of its trials is in use."""
    studies = [folder for folder in list(run.path.absolute().parents)[:2] if runs.is_study(folder)]
    for folder in (run.path, *studies, *(file.parent for file in run.path.glob("trials/*/lock"))):
        if pid := runs.lock_holder(folder):
            raise Problem(f"{Run(folder).name} is in use by process {pid}: stop it first")
    if is_being_submitted(run):
        raise being_submitted(run)
    record = None
    with contextlib.suppress(Problem):  # a damaged record
        record = read_record(run)
    if record is not None and record.is_active:
        raise Problem(f"{run.name} is {record.phase} on {record.target}: drivetrain stop {run.name} first")


def _delete(path: Path) -> None:
    try:
        shutil.rmtree(path)  # deletes links, not their targets
    except OSError as error:
        raise Problem(f"{error.filename} could not be deleted: {error.strerror}") from None


def _delete_if_empty(folder: Path) -> None:
    if folder.parent.resolve() == runs.RUNS.resolve() and not any(folder.iterdir()):
        folder.rmdir()


def prune(names: list[str], dry_run: bool) -> int:
    """Deletes the checkpoints of finished runs, whose weights are in model/, and incomplete checkpoints of all runs."""
    freed_bytes = 0
    for run in [runs.find(name) for name in names] if names else runs.all_runs():
        if runs.lock_holder(run.path):
            continue
        try:
            folders = _prunable_folders(run)
        except Problem as problem:
            if names:
                raise
            print(one_line(f"skipped {run.name}: {problem}"))
            continue
        if not folders:
            continue
        num_bytes = sum(Run(folder).disk_bytes() for folder in folders)
        freed_bytes += num_bytes
        print(one_line(f"{'would free' if dry_run else 'freed'} {format_disk_size(num_bytes)}  {run.name}"))
        if not dry_run:
            lock = Lock.acquire(run.path)
            try:
                for folder in folders:
                    _delete(folder)
            finally:
                lock.release()
    print(f"{format_disk_size(freed_bytes)} {'could be freed' if dry_run else 'freed'}")
    return 0


def _prunable_folders(run: Run) -> list[Path]:
    has_final_weights = run.is_finished and run.model_path.is_file()
    pattern = r"step-\d+|\..+" if has_final_weights else r"\..+"  # an incomplete checkpoint's name begins with a dot
    paths = [path for path in sorted(run.checkpoints.glob("*")) if re.fullmatch(pattern, path.name)]
    return [path for path in paths if path.is_dir() and not path.is_symlink()]
