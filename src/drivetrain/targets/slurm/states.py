"""What Slurm's states, reasons and accounts say about a job. Pure: values from text."""

from __future__ import annotations

from drivetrain.outcomes import EXIT_CODES, Outcome, outcome_of_code
from drivetrain.targets.base import JobState, Phase

WAITING = {"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
ACTIVE = {"RUNNING", "COMPLETING", "CONFIGURING", "SIGNALING", "STAGE_OUT", "STOPPED", "SUSPENDED", "RESIZING"}
CANCELLED = "it was cancelled"
STOPPED = JobState("ended", Outcome.PREEMPTED.code, "it was stopped")
ENDINGS = {
    "CANCELLED": CANCELLED, "TIMEOUT": "its time limit passed", "NODE_FAIL": "a machine was lost", "PREEMPTED": "a job of higher"
    " priority took its place", "OUT_OF_MEMORY": "it used more memory than it had asked for: raise mem: in the target", "BOOT_FAIL": "a machine did not start",
    "DEADLINE": "its deadline passed",
}  # fmt: skip
IMPOSSIBLE = {
    "PartitionNodeLimit": "the partition allows fewer machines", "PartitionTimeLimit": "the partition allows less time: give --time-limit",
    "BadConstraints": "no machine has what it asks for", "AssocGrpGRES": "your account may not use so many GPUs",
    "QOSMaxGRESPerUser": "your qos allows fewer GPUs", "ReqNodeNotAvail": "the machines it needs are down or reserved",
}  # fmt: skip
ACCOUNTED = {str(code - 128): str(code) for code in EXIT_CODES.values() if code > 128}
"""sacct prints exit codes from 128 up without their highest bit: 75 for 203."""


def phase_of(state: str) -> Phase | None:
    """Returns the phase of a state of Slurm; None for a job that has ended."""
    if state in WAITING:
        return "queued"
    return "running" if state in ACTIVE else None


def end_of(state: str, code: str | None) -> JobState:
    """Returns the end of a job in this state; `code` is the exit code of its script, where that is known."""
    if state == "COMPLETED":
        return JobState("ended", 0)
    number = int(code) if code and code.isdigit() and int(code) else None
    reason = ENDINGS.get(state, "")
    if number is not None and not reason:
        reason = f"it ended with code {number} ({outcome_of_code(number)})"
    return JobState("ended", number if number is not None else Outcome.INFRA.code, reason or f"it ended as {state.lower()}")


def state_of_accounting(text: str) -> JobState:
    """Returns the state of a job from what `sacct --format=State,ExitCode` prints; the last line is that of its last start."""
    state, _, codes = text.splitlines()[-1].partition("|")
    state, code = state.partition(" ")[0], codes.partition(":")[0]  # CANCELLED by 0|0:0
    if phase_of(state):
        return JobState("lost", None, "Slurm's controller has forgotten the job, and its accounting has not seen the end of it")
    return end_of(state, ACCOUNTED.get(code, code))
