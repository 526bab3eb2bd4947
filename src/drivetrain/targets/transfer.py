"""Sends a run that is submitted again to a machine that does not have it, or has less of it than this machine."""

from __future__ import annotations

from collections.abc import Callable

from drivetrain.targets.host.checkpoints import Position, position_of
from drivetrain.targets.host.connection import ReachableHost
from drivetrain.targets.submission import Submission

NOT_SENT = (
    "/target.json",
    "/.target.json.lock",
    "/.target.json.submission",
    "/code.tar.gz",
    "/code",
    "/job",
    "/lock",
    "/*/lock",
    "/checkpoints/.*",
    "/*/checkpoints/.*",
)
"""What belongs to this machine, and half-written checkpoints."""
LOGS_OF_OTHERS = ("--include=/logs/output.log", "--exclude=/logs/*.log", "--exclude=/*/logs/*.log")
"""With several machines each writes its own logs; a copy of them on the first machine would be taken for newer ones."""


def send_run(host: ReachableHost, submission: Submission, run_dir: str, notice: Callable[[str], None]) -> bool:
    """Sends the run if the newest checkpoint, or all of the run, is only here. Returns whether there is a checkpoint to continue from."""
    here, there = position_of(str(submission.run.path.absolute())), host.call("position_of", run=run_dir)
    position_here, position_there = Position(*here["position"]), Position(*there["position"])
    if here["is_run"] and (not there["is_run"] or position_here > position_there):
        size, present = submission.run.disk_bytes() / 1e6, _position_text(position_there) if there["is_run"] else "nothing of it"
        notice(f"{host.name}: sending {submission.run.name} ({_position_text(position_here)}, {size:,.0f} MB); it has {present} there")
        host.call("write", path=f"{run_dir}/logs/output.log", text="", append=True)  # with the folders above it
        filters = [*(LOGS_OF_OTHERS if submission.request.nodes > 1 else ()), *(f"--exclude={pattern}" for pattern in NOT_SENT)]
        host.send_folder(submission.run.path, run_dir, filters)
    return max(position_here, position_there) > Position()


def has_checkpoint(submission: Submission) -> bool:
    """Whether a run that executes in its folder on this machine has a checkpoint to continue from."""
    return Position(*position_of(str(submission.run.path.absolute()))["position"]) > Position()


def _position_text(position: Position) -> str:
    stage = f"stage {position.stage}, " if position.stage else ""
    return f"{stage}{f'step {position.step:,}' if position.step else 'no checkpoint'}"
