"""Watches the workers of another launcher for hangs, and copies what they print into the run's logs.

The process that the launcher starts forks the worker before torch is imported, and becomes its watcher. So it can end a worker that
reacts to nothing, with the exit code of the outcome. Rank 0's watcher is the leader: it decides from all ranks' reports which one hangs.

- `start`: forks the worker                     - `process`: the watcher
- `worker_side`: what the worker sends to it    - `links`: connects the watchers of all ranks     - `output`: what the worker prints
"""

from drivetrain.launch.watcher.start import start_worker
from drivetrain.launch.watcher.worker_side import LaunchedWorker

__all__ = ["LaunchedWorker", "start_worker"]
