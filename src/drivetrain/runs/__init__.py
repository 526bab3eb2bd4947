"""The run directory: its layout, the files in it, its lock, and the list of all runs."""

from drivetrain.runs.exported import EXPORT_CARD, check_exported, sha256_of
from drivetrain.runs.files import Follower, cut_rows, parse_row, read_lines, rows_backwards, sweep, tail_begin, write_atomic
from drivetrain.runs.layout import FORMAT, RUNS, Run, record_plan, stop_info
from drivetrain.runs.listing import all_runs, find, find_deletable, is_run, is_study, new_path
from drivetrain.runs.locks import Lock, alive, die_with_parent, holder
from drivetrain.runs.modules import store_task
from drivetrain.runs.provenance import provenance

__all__ = [
    "EXPORT_CARD", "FORMAT", "RUNS", "Follower", "Lock", "Run", "alive", "all_runs", "check_exported", "cut_rows", "die_with_parent", "find",
    "find_deletable", "holder", "is_run", "is_study", "new_path", "parse_row", "provenance", "read_lines", "record_plan",
    "rows_backwards", "sha256_of", "stop_info", "store_task", "sweep", "tail_begin", "write_atomic",
]  # fmt: skip
