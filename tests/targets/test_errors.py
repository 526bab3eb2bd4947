"""What real programs print (in `outputs/`, written by ssh, rsync and Slurm), and the line that a user gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from drivetrain.outcomes import Outcome
from drivetrain.targets.errors import SLURM, explain

OUTPUTS = Path(__file__).with_name("outputs")
EXPECTED = {
    "ssh-unknown-name": "there is no machine of this name",
    "ssh-refused": "no SSH server answers there (connection refused)",
    "ssh-unreachable": "it cannot be reached: is it on, and is the network or VPN up?",
    "ssh-permission": "because others can read or write it: chmod 600 /dev/null",
    "ssh-permission-plain": "it refused the login (publickey): check the user and the key with `ssh box`",
    "ssh-key-changed": "its host key has changed",
    "ssh-key-changed-quiet": "ssh-keygen -R box",
    "ssh-key-unknown": "connect once by hand (ssh box) and compare the key",
    "ssh-key-readable": "chmod 600 /home/me/keys/id",
    "ssh-no-python": "install one, or set python: /path/to/python3 in the target",
    "ssh-proxy-refused": "ask the project's owner for the role IAP-secured Tunnel User (roles/iap.tunnelResourceAccessor)",
    "ssh-proxy-no-machine": "it does not answer behind Google's Identity-Aware Proxy: is it running?",
    "ssh-closed": "the connection broke: try again; what runs there goes on",
    "rsync-no-folder": "the run's folder is not there any more",
    "rsync-disk-full": "the disk is full: make room there",
    "rsync-missing": "there is no rsync: install it there",
    "slurm-partition": "Slurm has no partition nix: sinfo lists them",
    "slurm-nodes": "ask for less (--nodes, --procs, gpus: in the target)",
    "slurm-gpus": "ask for less (--nodes, --procs, gpus: in the target)",
    "slurm-gres": "ask for less (--nodes, --procs, gpus: in the target)",
    "slurm-constraint": "no machine of Slurm has what constraint: asks for",
    "slurm-job": "Slurm does not know the job any more",
    "slurm-no-config": "is this a login node of the cluster? (scontrol ping)",
}


@pytest.mark.parametrize("name", EXPECTED)
def test_known_output_names_the_fix(name: str) -> None:
    is_slurm = name.startswith("slurm")
    problem = explain("box", (OUTPUTS / f"{name}.txt").read_text(), 255, SLURM if is_slurm else None)
    assert EXPECTED[name] in str(problem)
    assert "\n" not in str(problem)
    assert problem.outcome is (Outcome.USAGE if is_slurm and name != "slurm-no-config" else Outcome.INFRA)


def test_unknown_output_is_shown() -> None:
    assert str(explain("box", "one\n\x1b[31mlast line\n\n", 3)) == "box: last line"
    assert str(explain("box", "", 3)) == "box: it ended with code 3"


def test_every_output_is_expected() -> None:
    assert {path.stem for path in OUTPUTS.glob("ssh*")} | {path.stem for path in OUTPUTS.glob("slurm*")} <= set(EXPECTED)
