"""The scripts of infra/gcp as a machine gets them, and a stand-in for such a machine: a folder as its disk, and commands that only record."""

from __future__ import annotations

import base64
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[1] / "infra" / "gcp" / "scripts"

STAND_IN = r"""#!/bin/bash
# A stand-in: records the call, and keeps the machine's state in $MACHINE.
name=${0##*/}
printf '%s %s\n' "$name" "$*" >>"$MACHINE/calls"
[ "$(wc -l <"$MACHINE/calls")" = "${KILL_AT:-0}" ] && kill -9 0  # the script too: they are one process group
[ -e "$MACHINE/fails-$name" ] && { cat "$MACHINE/fails-$name" >&2; exit 1; }
if [ -e "$MACHINE/fails-once-$name" ]; then rm "$MACHINE/fails-once-$name"; echo "a fault of the network" >&2; exit 1; fi
last=${*: -1}
case "$name" in
    apt-get)
        [[ " $* " == *" install "* ]] || exit 0
        for word in ${*#* install }; do [[ $word == -* ]] || echo "$word" >>"$MACHINE/installed"; done ;;
    dpkg) if [ "$1" = -i ]; then echo cuda-keyring >>"$MACHINE/installed"; fi ;;
    dpkg-query) grep -qx "$last" "$MACHINE/installed" && printf 'install ok installed' ;;
    curl)
        while [ $# -gt 0 ]; do [ "$1" = -o ] && file=$2; shift; done
        echo "deb https://example.invalid/ /" >"$file" ;;
    gpg)
        while [ $# -gt 0 ]; do [ "$1" = -o ] && file=$2; shift; done
        mkdir -p "$(dirname "$file")" && touch "$file" ;;
    nvidia-smi)
        [ -e "$MACHINE/loaded" ] || { echo "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."; exit 9; }
        case "$1" in
            --list-gpus) for ((i = 0; i < $(cat "$MACHINE/loaded"); i++)); do echo "GPU $i: Tesla T4 (UUID: GPU-$i)"; done ;;
            --query-gpu*) cat "$MACHINE/gpu-use" ;;
        esac ;;
    id) grep -qx "$last" "$MACHINE/users" ;;
    useradd) echo "$last" >>"$MACHINE/users" ;;
    ss) cat "$MACHINE/connections" ;;
esac
"""
COMMANDS = (
    "apt-get", "dpkg", "dpkg-query", "curl", "gpg", "nvidia-smi", "nvidia-ctk", "systemctl", "shutdown", "useradd", "usermod", "id", "ss", "sync",
)  # fmt: skip
READS = ("dpkg-query", "nvidia-smi --list-gpus", "id", "sync", "dpkg --configure")
"""Calls that change nothing."""


def compose(*, use_gpu: bool, num_gpus: int, idle_minutes: int, ssh_user: str, save_seconds: int) -> dict[str, str]:
    """Returns the scripts as machines.tf joins them."""
    settings = (
        "#!/bin/bash\n# shellcheck disable=SC2034  # not every script uses every setting\n"
        f"USE_GPU={str(use_gpu).lower()}\nNUM_GPUS={num_gpus}\nSSH_USER={ssh_user}\nIDLE_MINUTES={idle_minutes}\nSAVE_SECONDS={save_seconds}\n"
    )
    texts = {name: (SCRIPTS / f"{name}.sh").read_text() for name in ("library", "startup", "idle", "save")}
    library = settings + texts["library"]
    idle = library + texts["idle"]
    startup = f"{library}IDLE_SCRIPT='{base64.b64encode(idle.encode()).decode()}'\n{texts['startup']}"
    return {"startup": startup, "idle": idle, "save": library + texts["save"]}


@dataclass
class StandInMachine:
    """A folder that stands for a machine, with stand-ins for the commands that would change a real one."""

    folder: Path
    num_gpus: int = 0
    """GPUs that are attached."""
    expected_gpus: int | None = None
    idle_minutes: int = 30
    save_seconds: int = 5

    def __post_init__(self) -> None:
        for name in ("dev", "proc/sys/kernel/random", "run", "bin"):
            (self.folder / name).mkdir(parents=True)
        for name in ("installed", "users", "connections", "calls", "dev/ttyS0", "gpu-use"):
            (self.folder / name).touch()
        for number in range(self.num_gpus):
            device = self.folder / f"sys/bus/pci/devices/0000:00:0{number}.0"
            device.mkdir(parents=True)
            (device / "vendor").write_text("0x10de\n")
        for name in COMMANDS:
            (self.folder / "bin" / name).write_text(STAND_IN)
            (self.folder / "bin" / name).chmod(0o755)
        self.set_time(100)
        self.set_load(0.0)
        expected = self.num_gpus if self.expected_gpus is None else self.expected_gpus
        self.scripts = compose(
            use_gpu=expected > 0, num_gpus=expected, idle_minutes=self.idle_minutes, ssh_user="me", save_seconds=self.save_seconds
        )
        self.starts = 0

    def set_time(self, seconds: float) -> None:
        """Sets the time since the start."""
        (self.folder / "proc/uptime").write_text(f"{seconds:.2f} 0.00\n")

    def set_load(self, load: float) -> None:
        (self.folder / "proc/loadavg").write_text(f"{load:.2f} 0.50 1.00 1/100 999\n")

    def add_process(self, pid: int) -> None:
        """Lets the scripts see a real process."""
        (self.folder / f"proc/{pid}").symlink_to(f"/proc/{pid}")

    def start(self, **variables: str) -> int:
        """Starts the machine: an installed driver is loaded then. Returns the code of the start-up script."""
        self.starts += 1
        (self.folder / "proc/sys/kernel/random/boot_id").write_text(f"start-{self.starts}\n")
        if self.has("cuda-drivers") and not (self.folder / "driver-broken").exists() and self.starts > 1:
            (self.folder / "loaded").write_text(str(self.num_gpus))
        return self.run("startup", **variables)

    def run(self, script: str, timeout: float = 60, **variables: str) -> int:
        return subprocess.run(
            ["bash", "-c", self.scripts[script]], env=self.environment(**variables), timeout=timeout, start_new_session=True
        ).returncode

    def environment(self, **variables: str) -> dict[str, str]:
        settings = {"DRIVETRAIN_ROOT": str(self.folder), "MACHINE": str(self.folder), "DRIVETRAIN_PAUSE_SECONDS": "0"}
        return os.environ | settings | {"PATH": f"{self.folder}/bin:{os.environ['PATH']}"} | variables

    def has(self, package: str) -> bool:
        return package in (self.folder / "installed").read_text().split()

    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()

    def changes(self) -> list[str]:
        """Returns the calls that change something."""
        return [call for call in self.calls() if not call.startswith(READS)]

    def console(self) -> list[str]:
        """Returns the lines of the serial console."""
        return (self.folder / "dev/ttyS0").read_text().splitlines()

    @property
    def ready(self) -> str | None:
        """The start that has made the machine ready."""
        path = self.folder / "var/lib/drivetrain/ready"
        return path.read_text().strip() if path.exists() else None

    def fail(self, command: str, text: str = "a fault of the network") -> None:
        (self.folder / f"fails-{command}").write_text(text)

    def mend(self, command: str) -> None:
        (self.folder / f"fails-{command}").unlink()
