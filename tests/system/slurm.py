"""Starts a real Slurm cluster of three nodes on this machine for the time of a test."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.launching import free_port
from tests.waiting import wait_until

NODES = ("n1", "n2", "n3")
PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel", "squeue", "sinfo")

SLURM_CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={base}/run/munge.sock,cred_expire=5
StateSaveLocation={base}/spool/ctld
SlurmdSpoolDir={base}/spool/%n
SlurmctldPidFile={base}/run/slurmctld.pid
SlurmdPidFile={base}/run/slurmd.%n.pid
SlurmctldLogFile={base}/log/slurmctld.log
SlurmdLogFile={base}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1,batch_sched_delay=0
SlurmdParameters=config_overrides
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout=30
KillWait=5
MinJobAge=600
AccountingStorageType=accounting_storage/none
GresTypes=gpu
FirstJobId={first_job}
"""
# The first job's number differs, because srun's ranks meet at a port that depends on it, and other tests may have a cluster at the same time.
GPUS = 2  # of each node: device files that do nothing


@dataclass(frozen=True)
class Cluster:
    config: Path

    def kill_node(self, node: str) -> None:
        """Kills a node's daemon and every process of its jobs."""
        for process in psutil.process_iter(["cmdline", "environ"]):
            with contextlib.suppress(psutil.Error):
                words, variables = process.info["cmdline"] or [], process.info["environ"] or {}
                is_daemon = words[:1] == ["slurmd"] and words[-1] == node and variables.get("SLURM_CONF") == str(self.config)
                if is_daemon or variables.get("SLURMD_NODENAME") == node:
                    process.kill()

    def start_node(self, node: str) -> None:
        """Starts a node's daemon again."""
        environment = os.environ | {"SLURM_CONF": str(self.config)}
        subprocess.Popen(["slurmd", "-D", "-N", node], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def run(self, *words: str) -> str:
        """Returns the output of a client command; with a timeout, because a client waits forever for a cluster that has ended."""
        environment = os.environ | {"SLURM_CONF": str(self.config)}
        return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=180, check=True).stdout


@contextlib.contextmanager
def cluster() -> Iterator[Cluster]:
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)} (tests/system/install)")
    if os.geteuid() != 0:
        pytest.skip("needs root, to start Slurm's daemons")
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, contextlib.ExitStack() as daemons:
        base = Path(folder)
        base.chmod(0o755)  # munge requires a socket that every user can reach
        config = _write(base)

        def start(*words: str) -> None:
            log = open(base / "log" / f"{words[0]}.{words[-1]}.out", "wb")  # noqa: SIM115
            process = subprocess.Popen(words, env=os.environ | {"SLURM_CONF": str(config)}, stdout=log, stderr=log)
            daemons.callback(log.close)
            daemons.callback(_end, process)

        munge = {"key-file": "etc/munge.key", "socket": "run/munge.sock", "pid-file": "run/munged.pid", "log-file": "log/munged.log"}
        start("munged", *(f"--{flag}={base / file}" for flag, file in munge.items()), f"--seed-file={base}/run/seed", "--foreground")
        wait_until((base / "run" / "munge.sock").exists, "munged")
        start("slurmctld", "-i", "-D")
        for node in NODES:
            start("slurmd", "-D", "-N", node)
        slurm = Cluster(config)

        def idle() -> bool:
            with contextlib.suppress(subprocess.CalledProcessError):
                return len(slurm.run("sinfo", "-h", "-N", "-t", "idle", "-o", "%N").split()) == len(NODES)
            return False

        wait_until(idle, "three idle nodes")
        try:
            yield slurm
        finally:  # a job would run on after the daemons have ended
            slurm.run("scancel", "--user=root")
            wait_until(idle, "the end of all jobs")


def _write(base: Path) -> Path:
    for name in ("etc", "run", "log", "spool/ctld", *(f"spool/{node}" for node in NODES)):
        (base / name).mkdir(parents=True)
    host = socket.gethostname().split(".")[0]
    text = SLURM_CONF.format(host=host, port=free_port(), base=base, first_job=1 + secrets.randbelow(50_000))
    for node in NODES:
        text += f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=4 RealMemory=1000 Gres=gpu:{GPUS} State=UNKNOWN\n"
    text += f"PartitionName=main Nodes={','.join(NODES)} Default=YES MaxTime=INFINITE State=UP\n"
    config = base / "etc" / "slurm.conf"
    config.write_text(text)
    (base / "etc" / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    (base / "dev").mkdir()
    for number in range(GPUS):
        os.mknod(base / "dev" / f"gpu{number}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    (base / "etc" / "gres.conf").write_text(f"NodeName={NODES[0]},{NODES[1]},{NODES[2]} Name=gpu File={base}/dev/gpu[0-{GPUS - 1}]\n")
    key = base / "etc" / "munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    return config


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
