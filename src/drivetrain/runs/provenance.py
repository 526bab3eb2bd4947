"""How a run was started: versions, command line, git state, host."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
from datetime import UTC, datetime
from typing import Any


def provenance() -> dict[str, Any]:
    """Returns what run.json records of the start of a run."""
    from importlib import metadata  # slow, and every command imports this module

    versions = {"python": platform.python_version()}
    for name in ("drivetrain", "torch", "numpy", "safetensors"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions,
        "command": sys.argv,
        "folder": os.getcwd(),
        "host": socket.gethostname(),
        "git": _git_state(),
    }


def _git_state() -> dict[str, Any] | None:
    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", *words], capture_output=True, text=True, timeout=5, stdin=subprocess.DEVNULL)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    return None if commit is None else {"commit": commit, "changed": bool(git("status", "--porcelain", "-uno"))}
