"""The run directory: its layout, its files, its lock, and the list of all runs.

- `layout`: `Run`, one run directory         - `files`: JSON lines and atomic writes
- `listing`: finding runs by name            - `locks`: who may write a run directory
- `modules`: the copy of the task's code     - `provenance`: how a run was started     - `exported`: checksums of exported files
"""

from drivetrain.runs.exported import EXPORT_CARD, check_exported, sha256_of
from drivetrain.runs.files import (
    Follower,
    offset_of_last_lines,
    parse_row,
    read_lines,
    remove_half_written_files,
    rows_backwards,
    truncate_rows,
    write_atomic,
)
from drivetrain.runs.layout import FORMAT, RUNS, Run, record_plan, record_total_steps, stop_info
from drivetrain.runs.listing import all_runs, find, find_deletable, is_run, is_study, new_path, stages_of
from drivetrain.runs.locks import Lock, die_with_parent, is_alive, lock_holder
from drivetrain.runs.modules import store_task
from drivetrain.runs.provenance import provenance

__all__ = [
    "EXPORT_CARD", "FORMAT", "RUNS", "Follower", "Lock", "Run", "all_runs", "check_exported", "die_with_parent", "find", "find_deletable",
    "is_alive", "is_run", "is_study", "lock_holder", "new_path", "offset_of_last_lines", "parse_row", "provenance", "read_lines",
    "record_plan", "record_total_steps", "remove_half_written_files", "rows_backwards", "sha256_of", "stages_of", "stop_info", "store_task", "truncate_rows", "write_atomic",
]  # fmt: skip
