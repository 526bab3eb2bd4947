"""Turns what `sky` prints when it fails into one line that names the fix."""

from __future__ import annotations

import re
from typing import NamedTuple

from drivetrain.outcomes import Outcome, Problem
from drivetrain.terminal import one_line


class SkyFailure(NamedTuple):
    pattern: str
    """A regular expression for what sky prints."""
    text: str
    """What is wrong, and the fix; {0} is the pattern's first group."""
    outcome: Outcome = Outcome.USAGE


ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
STOP = (
    "{0} cannot stop such machines: set down_when_idle: true in the target; idle machines are then removed with their disks, so follow the"
    " run or pull it in time"
)
FAILURES = [
    SkyFailure(r"Could not connect to SkyPilot API server at (\S+?)\.? ", "sky's API server does not answer at {0}: start it with `sky api start`, or"
               " log in to yours with `sky api login`", Outcome.INFRA),
    SkyFailure(r"ApiServerAuthenticationError|Authentication required for SkyPilot API server", "sky's API server asks who you are: `sky api login`"),
    SkyFailure(r"NoCloudAccessError|Cloud access is not set up|No enabled clouds?", "sky may use no cloud: set up the credentials of one; `sky check` tells what is missing"),
    SkyFailure(r"Max retries exceeded with url: \S*skypilot-catalog|Failed to fetch \S+ catalog", "sky cannot download its price lists: is the network up? (sky check)", Outcome.INFRA),
    SkyFailure(r"features are not supported by (\w+):[\s\S]*\bmulti-node\b", "{0} has no clusters of several machines: leave out --nodes, or set another infra: in the target"),
    SkyFailure(r"features are not supported by (\w+):[\s\S]*\b(?:auto-?)?stop\b", STOP),
    SkyFailure(r"max_cost=\$([\d.]+)/hr", "no cloud has such machines for ${0} an hour each any more, the price that you agreed to: repeat the command to see today's price"),
    SkyFailure(r"Catalog does not contain any instances satisfying|No resource satisfying|No launchable resource", "no cloud that sky may use has such machines: correct gpus:, infra:,"
               " cpus: or instance_type: in the target (sky gpus list)"),
    SkyFailure(r"(?i)(?:credentials|token|session)\b[^\n]{0,60}\bexpired|ExpiredToken|InvalidClientTokenId|Reauthentication (?:is needed|failed)|RefreshError", "the cloud refuses your credentials, which"
               " have expired: log in to the cloud again, then `sky api stop; sky check`"),
    SkyFailure(r"(VcpuLimitExceeded|MaxSpotInstanceCountExceeded|(?i:quota '?[\w-]+'? exceeded|quotaExceeded|exceeded quota|QUOTA_EXCEEDED))", "your account may not have so many"
               " such machines ({0}): ask the cloud for more quota, or set another infra: or gpus: in the target"),
    SkyFailure(r"Stopping spot instances is currently not supported on (\w+)|Stopping is currently not supported for (\w+)", STOP),
    SkyFailure(r"Failed to provision all possible launchable|Failed to acquire resources in all zones|Insufficient ?[Cc]apacity|RESOURCE_POOL_EXHAUSTED|no instances available", "no zone that was"
               " tried has such machines free now: try later, or allow more with another gpus: or infra:, or spot: false in the target", Outcome.INFRA),
    SkyFailure(r"ResourcesMismatchError|Requested resources do not match the existing cluster", "the machines that are there differ from the target's present settings: remove them with `drivetrain down`"
               " (pull the runs first), or undo the change"),
    SkyFailure(r"Cluster(?:\(s\))? (?:'?\S+'? )?(?:not found|does not exist)", "sky does not know the cluster any more: `drivetrain resume RUN` starts new machines"),
    SkyFailure(r"No such option: ?'?([^\s']+)|Found unsupported field '(\w+)'", "this sky does not know {0}: drivetrain needs SkyPilot 0.12.1 or later (pip install -U skypilot)"),
]  # fmt: skip


def sky_problem(output: str, code: int) -> Problem:
    """Returns the problem that sky's output tells; for output that is not known, its last line."""
    text = ANSI.sub("", output)
    for failure in FAILURES:
        if match := re.search(failure.pattern, text):
            group = next((group for group in match.groups() if group), "")
            return Problem(one_line(failure.text.format(group)), failure.outcome)
    lines = [line for line in text.splitlines() if line.strip()] or [f"it ended with code {code}"]
    return Problem(f"sky: {one_line(lines[-1])[:300]}", Outcome.INFRA)
