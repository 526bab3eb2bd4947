"""What the stand-in for `sky` starts and ends as machines: SSH servers of this machine on ports of loopback, each with a home folder of its own.

`start CLUSTER TASK_FILE LAUNCH NODES` does what `sky launch` does: it runs the task's setup on each machine and writes the SSH configuration.
`end CLUSTER` kills the servers and all that was started through them, and deletes the disks, as a cloud does.
The folder $SKY_STAND_IN has `id`, `id.pub` and the machines; their disk is the folder `disk` beside it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import yaml

from tests.launching import free_port

STATE = Path(os.environ.get("SKY_STAND_IN", "/nowhere"))
SSHD = "/usr/sbin/sshd"
SERVER = """\
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host-key
PidFile {folder}/pid
AuthorizedKeysFile {keys}
SetEnv HOME={folder}
StrictModes no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
UsePAM no
MaxStartups 100
"""
CLIENT = """\
# Added by sky (use `sky stop/down {cluster}` to remove)
Host {name}
  HostName 127.0.0.1
  User root
  IdentityFile {key}
  IdentitiesOnly yes
  StrictHostKeyChecking no
  UserKnownHostsFile=/dev/null
  GlobalKnownHostsFile=/dev/null
  Port {port}

"""


def start(cluster: str, task_file: str, launch: str, nodes: str) -> None:
    task = yaml.safe_load(Path(task_file).read_text())
    text, addresses = "", "\n".join(["127.0.0.1"] * int(nodes))
    for number in range(int(nodes)):
        folder, name = STATE / f"{cluster}-{number}", cluster if number == 0 else f"{cluster}-worker{number}"
        port = _start_server(folder)
        text += CLIENT.format(cluster=cluster, name=name, key=STATE / "id", port=port)
        variables = {"HOME": str(folder), "DRIVETRAIN_LAUNCH": launch, "SKYPILOT_SETUP_NODE_IPS": addresses}
        subprocess.run(["bash", "-c", task["setup"]], env=os.environ | variables, check=True)
    path = Path.home() / ".sky" / "generated" / "ssh" / cluster
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _start_server(folder: Path) -> int:
    """Starts a machine's SSH server, unless it runs; returns its port."""
    if (folder / "port").exists():
        return int((folder / "port").read_text())
    folder.mkdir()
    port = free_port()
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "host-key"], check=True)
    (folder / "sshd").write_text(SERVER.format(port=port, folder=folder, keys=STATE / "id.pub"))
    subprocess.run([SSHD, "-f", folder / "sshd", "-E", folder / "log"], check=True)
    (folder / "port").write_text(str(port))
    return port


def end(cluster: str) -> None:
    marks = [f"DRIVETRAIN_JOB={STATE.parent / 'disk'}/".encode()]
    for folder in STATE.glob(f"{cluster}-[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            os.kill(int((folder / "pid").read_text()), signal.SIGKILL)
        marks.append(f"HOME={folder}\0".encode())
    for _ in range(3):
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if int(process.name) != os.getpid() and any(mark in (process / "environ").read_bytes() for mark in marks):
                    os.kill(int(process.name), signal.SIGKILL)
        time.sleep(0.1)
    for folder in [STATE.parent / "disk", *STATE.glob(f"{cluster}-[0-9]*")]:
        shutil.rmtree(folder, ignore_errors=True)
    (Path.home() / ".sky" / "generated" / "ssh" / cluster).unlink(missing_ok=True)


if __name__ == "__main__":
    {"start": start, "end": end}[sys.argv[1]](*sys.argv[2:])
