"""Two machines prove to each other that both know the run's token, without sending it or anything about the run.

Each sends a random nonce; each proves itself by an HMAC over both nonces. The keys that sign all later messages
come from the token and both nonces, so that nothing recorded from one connection is of use in another.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import time
from dataclasses import dataclass
from typing import Any

VERSION = 4
ANSWER_SECONDS = 5.0  # a machine of ours answers at once; another program that holds the port may stay silent
MAX_LINE_BYTES = 4096


class NotOurs(Exception):
    """The peer does not speak this protocol."""


class WrongToken(Exception):
    """The peer speaks this protocol, and does not know the token."""


@dataclass(frozen=True)
class Keys:
    """What signs the messages of one connection, by direction."""

    to_leader: bytes
    to_member: bytes


def prove_to_leader(peer: socket.socket, token: bytes) -> Keys:
    """The joining machine's side."""
    deadline = time.monotonic() + ANSWER_SECONDS
    mine = secrets.token_hex(32)
    _send(peer, {"drivetrain": VERSION, "nonce": mine})
    theirs = _nonce(_read_line(peer, deadline))
    _send(peer, {"proof": _digest(token, "member", mine, theirs)})
    answer = _read_line(peer, deadline)
    if not answer:
        raise ConnectionResetError(0, "no answer in time")  # of a slow network: that says nothing about the token
    if answer.get("refused") == "token" or not _proves(answer, token, "leader", mine, theirs):
        raise WrongToken
    return _keys(token, mine, theirs)


def prove_to_member(peer: socket.socket, token: bytes) -> Keys:
    """The leading machine's side: it proves itself only to a machine that has done so."""
    deadline = time.monotonic() + ANSWER_SECONDS
    theirs = _nonce(_read_line(peer, deadline))
    mine = secrets.token_hex(32)
    _send(peer, {"drivetrain": VERSION, "nonce": mine})
    answer = _read_line(peer, deadline)
    if not answer:
        raise NotOurs
    if not _proves(answer, token, "member", theirs, mine):
        with contextlib.suppress(OSError):
            _send(peer, {"refused": "token"})
        raise WrongToken
    _send(peer, {"proof": _digest(token, "leader", theirs, mine)})
    return _keys(token, theirs, mine)


def _keys(token: bytes, member_nonce: str, leader_nonce: str) -> Keys:
    to_leader, to_member = (
        bytes.fromhex(_digest(token, f"messages to the {side}", member_nonce, leader_nonce)) for side in ("leader", "member")
    )
    return Keys(to_leader, to_member)


def _digest(token: bytes, purpose: str, member_nonce: str, leader_nonce: str) -> str:
    return hmac.new(token, f"drivetrain {VERSION} {purpose} {member_nonce} {leader_nonce}".encode(), "sha256").hexdigest()


def _proves(answer: dict[str, Any], token: bytes, purpose: str, member_nonce: str, leader_nonce: str) -> bool:
    proof = answer.get("proof")
    return isinstance(proof, str) and hmac.compare_digest(proof.encode(), _digest(token, purpose, member_nonce, leader_nonce).encode())


def _nonce(greeting: dict[str, Any]) -> str:
    nonce = greeting.get("nonce")
    if greeting.get("drivetrain") != VERSION or not isinstance(nonce, str) or len(nonce) != 64 or not nonce.isalnum():
        raise NotOurs
    return nonce


def _send(peer: socket.socket, message: dict[str, Any]) -> None:
    peer.sendall(json.dumps(message).encode() + b"\n")


def _read_line(peer: socket.socket, deadline: float) -> dict[str, Any]:
    """One line, and not a byte more of what follows it; empty where none comes in time."""
    line = b""
    with contextlib.suppress(OSError):
        while not line.endswith(b"\n") and len(line) < MAX_LINE_BYTES and (left := deadline - time.monotonic()) > 0:
            peer.settimeout(left)
            byte = peer.recv(1)
            if not byte:
                break
            line += byte
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
