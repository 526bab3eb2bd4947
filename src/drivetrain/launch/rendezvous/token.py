"""The token: a secret that a machine needs to join a run. The leader creates it.

A machine reads it from DRIVETRAIN_TOKEN, from the file that DRIVETRAIN_TOKEN_FILE names, or from the file that the leader wrote
into the user's state folder, which works if the machines share the home folder.
It is never written to a run directory, and workers do not get it.
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
MIN_CHARACTERS = 16  # a shorter secret can be guessed


@dataclass(frozen=True)
class Token:
    secret: bytes
    is_new: bool = False
    """Whether drivetrain created it, so that it must be shown to the user."""
    file: Path | None = None
    """The file that contains it until the run ends."""

    def delete_file(self) -> None:
        if self.file is not None:
            with contextlib.suppress(OSError):
                self.file.unlink()


def token_file(address: tuple[str, int]) -> Path:
    """Returns the file for the token of the run at this address."""
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return state / "drivetrain" / "tokens" / f"{re.sub(r'[^0-9A-Za-z.-]', '_', address[0])}-{address[1]}"


def find(address: tuple[str, int]) -> Token | None:
    """Returns the token for this address from the environment or the token file; None if there is neither."""
    if (token := _from_environment()) is not None:
        return token
    file = token_file(address)
    try:
        return Token(_read(file)[0], file=file)
    except OSError:
        return None


def find_or_make(address: tuple[str, int], identity: str) -> Token:
    """Returns the leader's token: from the environment, from the token file if the same recipe's run was killed, else a new one."""
    if (token := _from_environment()) is not None:
        return token
    file, digest = token_file(address), hashlib.sha256(identity.encode()).hexdigest()
    with contextlib.suppress(OSError, Problem):
        secret, recipe_digest = _read(file)
        if recipe_digest == digest:
            return Token(secret, is_new=True, file=file)
    text = secrets.token_urlsafe(32)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        os.chmod(file.parent, 0o700)
        file.unlink(missing_ok=True)  # of an earlier run that was killed
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
            stream.write(f"{text}\n{digest}\n")
    except OSError:  # a full or read-only disk: the printed command still contains the token
        return Token(text.encode(), is_new=True)
    return Token(text.encode(), is_new=True, file=file)


def _from_environment() -> Token | None:
    if text := os.environ.get(VARIABLE, "").strip():
        return Token(_checked(text, VARIABLE))
    file = os.environ.get(FILE_VARIABLE)
    if not file:
        return None
    try:
        return Token(_read(Path(file))[0])
    except OSError as error:
        raise Problem(f"{FILE_VARIABLE}={file} cannot be read: {error.strerror}") from None


def _read(file: Path) -> tuple[bytes, str]:
    """Returns the secret in a file, and the digest of its recipe if the leader wrote the file."""
    with open(file, "rb") as stream:
        status = os.fstat(stream.fileno())
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise Problem(f"{file} can be read or written by other users: chmod 600 it, and make a new token if somebody may have read it")
        secret, _, digest = stream.read(4096).decode(errors="replace").strip().partition("\n")
        return _checked(secret, str(file)), digest


def _checked(text: str, source: str) -> bytes:
    if len(text) < MIN_CHARACTERS:
        raise Problem(
            f"{source} is too short to be a secret: use at least {MIN_CHARACTERS} characters, such as `openssl rand -hex 32` gives"
        )
    return text.encode()
