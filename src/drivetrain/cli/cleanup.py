"""`runs rm` and `runs prune`: deleting runs, and the checkpoints of finished ones."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

from drivetrain import runs
from drivetrain.outcomes import Problem
from drivetrain.runs import Lock, Run
from drivetrain.terminal import one_line


def disk_size(count: float) -> str:
    return f"{count / 1e6:,.1f} MB" if count < 1e9 else f"{count / 1e9:,.1f} GB"


def remove(names: list[str], yes: bool, dry: bool) -> int:
    """Show what goes, ask, delete. Nothing is deleted where one of the names is wrong, or one of the runs is in use."""
    if not names:
        raise Problem("name the runs to delete: drivetrain runs rm NAME ...")
    doomed = list({run.path.resolve(): run for name in names for run in runs.find_deletable(name)}.values())
    for run in doomed:
        _refuse_in_use(run)
    for run in doomed:
        state = status_of(run)
        print(one_line(f"{'would delete' if dry else 'delete'} {run.path.absolute()}  {disk_size(run.disk_bytes())}  {state}"))
    if dry:
        return 0
    if not yes:
        if not sys.stdin.isatty():
            raise Problem("deleting needs --yes where nobody can be asked")
        if input("delete? [y/N] ").strip().lower() not in ("y", "yes"):
            return 1
    for run in doomed:
        _refuse_in_use(run)
        lock = Lock.acquire(run.path)  # so that no training begins in it meanwhile
        try:
            _delete(run.path)
        finally:
            lock.release()
        _delete_if_empty(run.path.parent)  # of stages
    return 0


def status_of(run: Run) -> str:
    """A run's state in a word, whatever its folder holds."""
    if runs.is_study(run.path):
        return "study"
    try:
        return run.status
    except Problem:
        return "unreadable"


def _refuse_in_use(run: Run) -> None:
    """Neither it, nor a trial of a study, nor the study it is a trial of, may be in use."""
    study = [folder for folder in list(run.path.absolute().parents)[:2] if runs.is_study(folder)]
    for folder in (run.path, *study, *(file.parent for file in run.path.glob("trials/*/lock"))):
        if pid := runs.lock_holder(folder):
            raise Problem(f"{Run(folder).name} is in use by process {pid}: stop it first")


def _delete(path: Path) -> None:
    try:
        shutil.rmtree(path)  # which deletes links, and leaves what they lead to
    except OSError as error:
        raise Problem(f"{error.filename} could not be deleted: {error.strerror}") from None


def _delete_if_empty(folder: Path) -> None:
    if folder.parent.resolve() == runs.RUNS.resolve() and not any(folder.iterdir()):
        folder.rmdir()


def prune(names: list[str], dry: bool) -> int:
    """Checkpoints of finished runs, whose weights are in model/ already; and what interrupted saves left."""
    freed = 0
    for run in [runs.find(name) for name in names] if names else runs.all_runs():
        if runs.lock_holder(run.path):
            continue
        try:
            finished = run.is_finished and run.model_path.is_file()
        except Problem as problem:
            if names:
                raise
            print(one_line(f"left alone {run.name}: {problem}"))
            continue
        pattern = r"step-\d+|\..+" if finished else r"\..+"
        doomed = [p for p in sorted(run.checkpoints.glob("*")) if re.fullmatch(pattern, p.name) and p.is_dir() and not p.is_symlink()]
        count = sum(Run(path).disk_bytes() for path in doomed)
        if doomed:
            print(one_line(f"{'would free' if dry else 'freed'} {disk_size(count)}  {run.name}"))
            freed += count
        if doomed and not dry:
            lock = Lock.acquire(run.path)
            try:
                for path in doomed:
                    _delete(path)
            finally:
                lock.release()
    print(f"{disk_size(freed)} {'could be freed' if dry else 'freed'}")
    return 0
