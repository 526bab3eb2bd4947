"""The run directory: its layout, the files in it, its lock, and the list of all runs."""

from drivetrain.runs.files import read_lines, sweep, write_atomic
from drivetrain.runs.layout import FORMAT, RUNS, Run, record_plan, stop_info
from drivetrain.runs.listing import all_runs, find, new_path
from drivetrain.runs.locks import Lock, alive, die_with_parent, holder
from drivetrain.runs.modules import modules_of, store_task
from drivetrain.runs.provenance import provenance

__all__ = [
    "FORMAT", "RUNS", "Lock", "Run", "alive", "all_runs", "die_with_parent", "find", "holder", "modules_of", "new_path", "provenance",
    "read_lines", "record_plan", "stop_info", "store_task", "sweep", "write_atomic",
]  # fmt: skip
