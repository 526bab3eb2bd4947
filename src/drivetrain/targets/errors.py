"""Turns what ssh, rsync, Slurm and Docker print into one line that names the fix."""

from __future__ import annotations

import re
from typing import NamedTuple

from drivetrain.outcomes import Outcome, Problem
from drivetrain.terminal import one_line


class Unsure(Problem):
    """Whether the request was carried out is not known, or only a part of it was: a connection broke, or one of several machines refused."""


class FolderMissing(Problem):
    """The folder to copy from is not on the machine."""


class FolderStopped(FolderMissing):
    """The folder to copy from is on the disk of a machine that is stopped, which can be started again."""


class Explanation(NamedTuple):
    pattern: str
    """A regular expression for what the program prints."""
    text: str
    """What is wrong, and the fix; {host} is the machine, {0} the pattern's first group."""


CONNECTION_BROKE = "the connection broke"
NO_FOLDER = "the run's folder is not there"
SSH = [
    Explanation(r"REMOTE HOST IDENTIFICATION HAS CHANGED|Host key for \S+ has changed", "{host}: its host key has changed: somebody may listen in, or it was installed"
                " again. If you know that it was, remove the old key: ssh-keygen -R {host}"),
    Explanation(r"Host key verification failed|No \w+ host key is known", "{host}: its host key is not known: connect once by hand (ssh {host}) and compare the key"),
    Explanation(r"Load key \"([^\"]+)\": bad permissions|Bad owner or permissions on (\S+)", "{host}: ssh refuses the file {0}{1}, because others can read or write it: chmod 600 {0}{1}"),
    Explanation(r"4033: 'not authorized'", "{host}: Google's Identity-Aware Proxy refuses your account: ask the project's owner for the role IAP-secured Tunnel User"
                " (roles/iap.tunnelResourceAccessor), or set ssh_source_ranges: in the target"),
    Explanation(r"4003: 'failed to connect to backend'|4047: 'Failed to lookup instance'", "{host}: it does not answer behind Google's Identity-Aware Proxy: is it running?"
                " (drivetrain doctor --on TARGET)"),
    Explanation(r"Permission denied \(([^)]*)\)", "{host}: it refused the login ({0}): check the user and the key with `ssh {host}`; with a"
                " passphrase, add the key to your agent: ssh-add"),
    Explanation(r"Could not resolve hostname (\S+?):", "{host}: there is no machine of this name: correct hosts: in the target, or add it to ~/.ssh/config"),
    Explanation(r"Connection refused", "{host}: no SSH server answers there (connection refused): is it running, and is the port right?"),
    Explanation(r"timed out|No route to host|Network is unreachable|Operation timed out", "{host}: it cannot be reached: is it on, and is the network or VPN up? (ssh {host})"),
    Explanation(r"drivetrain: no Python 3.11", "{host}: it has no Python 3.11 or later: install one, or set python: /path/to/python3 in the target"),
    Explanation(r"No space left on device|Disk quota exceeded", "{host}: the disk is full: make room there, or set dir: in the target"),
    Explanation(r"remote command not found|rsync: (?:command )?not found", "{host}: there is no rsync: install it there"),
    Explanation(r"change_dir \"[^\"]*\" failed: No such file", "{host}: the run's folder is not there any more: what was copied before is in runs/ here"),
    Explanation(r"(?:closed|reset) by (?:remote host|peer|UNKNOWN)|Broken pipe|client_loop|Timeout, server", "{host}: the connection broke: try again; what runs there goes on"),
]  # fmt: skip
SLURM = [
    Explanation(r"Invalid job id|Invalid job", "Slurm does not know the job any more"),
    Explanation(r"[Ii]nvalid partition (?:name )?specified:? ?(\S*)", "Slurm has no partition {0}: sinfo lists them; set partition: in the target"),
    Explanation(r"Invalid account or account/partition", "Slurm refuses the account: set account: in the target (sacctmgr show associations user=$USER)"),
    Explanation(r"Invalid qos", "Slurm refuses the qos: set qos: in the target (sacctmgr show qos)"),
    Explanation(r"Invalid feature specification", "no machine of Slurm has what constraint: asks for: sinfo -o '%f' lists the features"),
    Explanation(r"Requested node configuration is not available|Invalid generic resource|Invalid Trackable RESource|gres.*(?:not|in)valid", "no machine of Slurm has"
                " as many GPUs or cores as the run asks for: ask for less (--nodes, --procs, gpus: in the target); sinfo -o '%P %D %c %G' shows what there is"),
    Explanation(r"[Nn]ode count specification invalid|More processors requested than permitted|cannot be satisfied|too many (?:nodes|cpus)", "Slurm cannot give this many"
                " machines: ask for fewer with --nodes (sinfo shows how many there are)"),
    Explanation(r"[Tt]ime limit .*(?:invalid|exceed)|Requested time limit is invalid", "the time limit is longer than the partition allows: give a shorter --time-limit (sinfo -o '%P %l')"),
    Explanation(r"Unable to contact slurm controller|slurm_load_\w+ error|Unable to process configuration file|Unable to establish configuration source|Could not establish a configuration source", "Slurm's controller does not"
                " answer: is this a login node of the cluster? (scontrol ping)"),
    Explanation(r"AssocMaxSubmitJobLimit|QOSMaxSubmitJob|Job violates accounting/QOS policy", "Slurm refuses more jobs of yours: wait until some have ended, or ask for another qos: or account:"),
]  # fmt: skip
UNREACHABLE = (
    r"no such host|dial tcp|pinging container registry|TLS handshake timeout|i/o timeout|server misbehaving|network is unreachable"
)
DOCKER = [
    Explanation(r"Cannot connect to the Docker daemon|Is the docker daemon running|connection refused.*podman|unable to connect to Podman", "the container engine does not answer: start"
                " Docker, or `podman system service`"),
    Explanation(r"permission denied.*docker.*sock|dial unix \S+: connect: permission denied", "you may not use Docker's socket: join the group docker (sudo usermod -aG docker $USER, then log in again), or use podman"),
    Explanation(UNREACHABLE, "the registry of {image} cannot be reached: is the network up, and is the name right? (an image of this machine: drivetrain image build)"),
    Explanation(r"(?:pull access denied|manifest unknown|manifest for \S+ not found|repository does not exist|initializing source|unable to find image|No such image|name unknown|not known|short-name)", "there is"
                " no image {image}: build it with `drivetrain image build`, or set image: in the target"),
    Explanation(r"toomanyrequests", "the registry refuses more pulls for now: log in to it, or wait"),
    Explanation(r"unauthorized|authentication required|denied: ", "the registry refuses {image}: log in to it with `docker login`"),
    Explanation(r"could not select device driver|nvidia-container|[Uu]nknown (?:or invalid )?runtime (?:name: |specified )nvidia|CDI device|unresolvable CDI", "the container engine cannot give GPUs to containers: install the NVIDIA Container"
                " Toolkit (drivetrain doctor --on TARGET), or set gpus: none in the target"),
    Explanation(r"no space left on device", "the disk of the container engine is full: remove old images (docker system prune)"),
    Explanation(r"executable file \S*not found", "{image} does not have drivetrain as its entry point: build one with `drivetrain image build`, or correct image: in the target"),
    Explanation(r"network (\S+) not found|unable to find network with name or ID (\S+?):", "the container engine has no network {0}{1}: correct network: in the target"),
    Explanation(r"unable to set memory limit|[Mm]inimum memory limit", "the memory that the container may use is too small: raise memory: in the target"),
    Explanation(r"[Cc]onflict.*name|name \S+ is already in use", "a container of this name is there already: drivetrain stop the run, or choose another --name"),
]  # fmt: skip


def explain(host: str, output: str, code: int, known: list[Explanation] | None = None, **values: str) -> Problem:
    """Returns the problem that a program's output tells; for output that is not known, its last line.

    `known`: the explanations for a program on this side, whose refusals the user must answer; None: for the connection to `host`.
    """
    outcome = Outcome.INFRA if known is None else Outcome.USAGE
    for explanation in known or SSH:
        if match := re.search(explanation.pattern, output):
            groups = [group or "" for group in match.groups()]
            text = one_line(explanation.text.format(*groups, host=host, **values))
            if CONNECTION_BROKE in text:
                return Unsure(text, outcome)
            if NO_FOLDER in text:
                return FolderMissing(text, outcome)
            return Problem(text, Outcome.INFRA if "controller does not answer" in text else outcome)
    lines = [line for line in output.splitlines() if line.strip()] or [f"it ended with code {code}"]
    text = f"{host}: {one_line(lines[-1])[:300]}"
    return Unsure(text, outcome) if known is None else Problem(text, outcome)
