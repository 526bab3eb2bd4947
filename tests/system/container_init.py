"""Starts process 1 of a container of the stand-in kubelet: builds the container's files from a JSON description, then becomes its command.

It runs in mount, process and host name namespaces of its own; the process that made them waits for it, and ends with its exit code. The files are those of this machine, which is the image, apart from the
volumes, an own /tmp, /root, /home and /run, and /dev/shm with 64 MiB as a container runtime makes it.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

NEW_NAMESPACES = 0x00020000 | 0x04000000 | 0x08000000 | 0x20000000  # mounts, host name, shared memory, processes
DEATH_SIGNAL = 1
READ_ONLY, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 32, 4096, 16384, 1 << 18
FRESH = {"tmp", "root", "home", "run"}
LIBRARY = ctypes.CDLL(None, use_errno=True)


def mount(source: str, target: Path | str, kind: str, flags: int = 0, options: str = "") -> None:
    if LIBRARY.mount(source.encode(), str(target).encode(), kind.encode(), flags, options.encode()) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"mount {source} at {target}: {os.strerror(error)}")


def build_root(root: Path, image: list[str]) -> None:
    """Makes a root folder with this machine's programs; `image` lists further paths of it that the programs need."""
    mount("tmpfs", root, "tmpfs", options="mode=755")
    for entry in os.scandir("/"):
        path = root / entry.name
        if entry.is_symlink():
            path.symlink_to(os.readlink(entry.path))
        elif entry.name in FRESH:
            path.mkdir(mode=0o700)
            path.chmod(0o1777 if entry.name == "tmp" else 0o755)
        elif entry.is_dir() and entry.name != "proc":
            path.mkdir()
            mount(entry.path, path, "", BIND | RECURSIVE)
    (root / "proc").mkdir()
    mount("proc", root / "proc", "proc")
    for needed in image:
        if needed.strip("/").partition("/")[0] in FRESH:
            bind(needed, root / needed.lstrip("/"))
    mount("tmpfs", root / "dev" / "shm", "tmpfs", options="size=64m,mode=1777")


def bind(source: str, target: Path, is_read_only: bool = False) -> None:
    if os.path.isdir(source):
        target.mkdir(parents=True, exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    mount(source, target, "", BIND | RECURSIVE)
    if is_read_only:
        mount("none", target, "", BIND | REMOUNT | READ_ONLY)


def main() -> None:
    facts: dict[str, Any] = json.load(sys.stdin)
    sys.stdin.close()
    if LIBRARY.unshare(NEW_NAMESPACES) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        os._exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status))
    LIBRARY.prctl(DEATH_SIGNAL, signal.SIGKILL)
    mount("none", "/", "", RECURSIVE | PRIVATE)
    socket.sethostname(facts["hostname"])
    root = Path(facts["root"])
    build_root(root, facts["image"])
    for volume in sorted(facts["mounts"], key=lambda volume: volume["path"]):
        target = root / volume["path"].lstrip("/")
        if volume["source"]:
            bind(volume["source"], target, volume["read_only"])
        else:
            target.mkdir(parents=True, exist_ok=True)
            mount("tmpfs", target, "tmpfs", options=f"size={volume['size']},mode=1777")
    bind(facts["hosts"], root / "etc/hosts")
    os.open("/dev/null", os.O_RDONLY)  # the lowest free number: stdin
    os.chroot(root)
    os.chdir("/")
    folder = facts["folder"] or "/"
    os.makedirs(folder, exist_ok=True)
    os.chdir(folder)
    if facts["user"] is not None:
        os.setgroups(facts["groups"])
        os.setgid(facts["group"])
        os.setuid(facts["user"])
    try:
        os.execvpe(facts["command"][0], facts["command"], facts["env"])
    except OSError as error:
        print(f'exec: "{facts["command"][0]}": {error.strerror}', file=sys.stderr, flush=True)
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


if __name__ == "__main__":
    main()
