"""The secret that lets a machine into a run: made by the machine that leads, known to nobody else.

A machine takes it from DRIVETRAIN_TOKEN, from the file that DRIVETRAIN_TOKEN_FILE names, or from the file that the
leading machine wrote into this user's state folder, which machines with a shared home folder see by themselves.
It never enters a run directory, and workers do not get it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path

from drivetrain.outcomes import Problem

VARIABLE, FILE_VARIABLE = "DRIVETRAIN_TOKEN", "DRIVETRAIN_TOKEN_FILE"
SHORTEST = 16  # characters: a shorter secret can be guessed by trying


@dataclass(frozen=True)
class Token:
    secret: bytes
    is_new: bool = False
    """Whether drivetrain made it, so that the user has to be told."""
    file: Path | None = None
    """The file it is kept in until the run has ended."""

    def forget(self) -> None:
        """Removes the file: the run has ended."""
        if self.file is not None:
            with contextlib.suppress(OSError):
                self.file.unlink()


def kept_file(address: tuple[str, int]) -> Path:
    """Where the token of the run at this address is kept until its end: a repeated command finds it again."""
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return state / "drivetrain" / "tokens" / f"{re.sub(r'[^0-9A-Za-z.-]', '_', address[0])}-{address[1]}"


def find(address: tuple[str, int]) -> Token | None:
    """Returns the token that this machine was given, if it was."""
    if (given := _given()) is not None:
        return given
    file = kept_file(address)
    try:
        return Token(_read(file)[0], file=file)
    except OSError:
        return None


def find_or_make(address: tuple[str, int], identity: str) -> Token:
    """For the machine that leads: the token it was given, that of the same recipe's killed run, or a new one."""
    if (given := _given()) is not None:
        return given
    file, digest = kept_file(address), hashlib.sha256(identity.encode()).hexdigest()
    with contextlib.suppress(OSError, Problem):
        secret, owner = _read(file)
        if owner == digest:
            return Token(secret, is_new=True, file=file)
    text = secrets.token_urlsafe(32)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        os.chmod(file.parent, 0o700)
        file.unlink(missing_ok=True)  # of another run, which was killed
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
            stream.write(f"{text}\n{digest}\n")
    except OSError:  # a full or read-only disk: the printed command still hands it on
        return Token(text.encode(), is_new=True)
    return Token(text.encode(), is_new=True, file=file)


def _given() -> Token | None:
    """The token that the environment names."""
    if text := os.environ.get(VARIABLE, "").strip():
        return Token(_checked(text, VARIABLE))
    named = os.environ.get(FILE_VARIABLE)
    if not named:
        return None
    try:
        return Token(_read(Path(named))[0])
    except OSError as error:
        raise Problem(f"{FILE_VARIABLE}={named} cannot be read: {error.strerror}") from None


def _read(file: Path) -> tuple[bytes, str]:
    """The secret in a file, and the digest of the recipe it was made for, if that stands there."""
    with open(file, "rb") as stream:
        facts = os.fstat(stream.fileno())
        if facts.st_uid != os.geteuid() or stat.S_IMODE(facts.st_mode) & 0o077:
            raise Problem(f"{file} can be read or written by other users: chmod 600 it, and make a new token if somebody may have read it")
        secret, _, digest = stream.read(4096).decode(errors="replace").strip().partition("\n")
        return _checked(secret, str(file)), digest


def _checked(text: str, source: str) -> bytes:
    if len(text) < SHORTEST:
        raise Problem(f"{source} is too short to be a secret: use at least {SHORTEST} characters, such as `openssl rand -hex 32` gives")
    return text.encode()
