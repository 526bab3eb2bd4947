"""Two machines prove to each other that both know the run's token, without sending it or anything about the run.

Each sends a random nonce, and an HMAC over both nonces as its proof. The keys that sign all later messages are derived from the
token and both nonces, so that messages recorded from one connection are invalid in another.
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

VERSION = 6  # of the messages: machines with different versions cannot connect
ANSWER_SECONDS = 5.0  # another program on the port may never answer
MAX_LINE_BYTES = 4096


class UnknownProtocol(Exception):
    """The peer does not speak this protocol."""


class WrongToken(Exception):
    """The peer speaks this protocol, but does not know the token."""


@dataclass(frozen=True)
class Keys:
    """The keys that sign the messages of one connection, by direction."""

    to_leader: bytes
    to_member: bytes


def prove_to_leader(peer: socket.socket, token: bytes) -> Keys:
    """The member's side. Raises UnknownProtocol or WrongToken; ConnectionResetError if the answer is late."""
    deadline = time.monotonic() + ANSWER_SECONDS
    own_nonce = secrets.token_hex(32)
    _send(peer, {"drivetrain": VERSION, "nonce": own_nonce})
    leader_nonce = _read_nonce(_read_line(peer, deadline))
    _send(peer, {"proof": _digest(token, "member", own_nonce, leader_nonce)})
    answer = _read_line(peer, deadline)
    if not answer:
        raise ConnectionResetError(0, "no answer in time")  # perhaps a slow network: the token may be right
    if answer.get("refused") == "token" or not _is_proof(answer, token, "leader", own_nonce, leader_nonce):
        raise WrongToken
    return _keys(token, own_nonce, leader_nonce)


def prove_to_member(peer: socket.socket, token: bytes) -> Keys:
    """The leader's side: it sends its proof only to a machine that has sent a correct one. Raises UnknownProtocol or WrongToken."""
    deadline = time.monotonic() + ANSWER_SECONDS
    member_nonce = _read_nonce(_read_line(peer, deadline))
    own_nonce = secrets.token_hex(32)
    _send(peer, {"drivetrain": VERSION, "nonce": own_nonce})
    answer = _read_line(peer, deadline)
    if not answer:
        raise UnknownProtocol
    if not _is_proof(answer, token, "member", member_nonce, own_nonce):
        with contextlib.suppress(OSError):
            _send(peer, {"refused": "token"})
        raise WrongToken
    _send(peer, {"proof": _digest(token, "leader", member_nonce, own_nonce)})
    return _keys(token, member_nonce, own_nonce)


def _keys(token: bytes, member_nonce: str, leader_nonce: str) -> Keys:
    to_leader, to_member = (
        bytes.fromhex(_digest(token, f"messages to the {side}", member_nonce, leader_nonce)) for side in ("leader", "member")
    )
    return Keys(to_leader, to_member)


def _digest(token: bytes, purpose: str, member_nonce: str, leader_nonce: str) -> str:
    return hmac.new(token, f"drivetrain {VERSION} {purpose} {member_nonce} {leader_nonce}".encode(), "sha256").hexdigest()


def _is_proof(answer: dict[str, Any], token: bytes, purpose: str, member_nonce: str, leader_nonce: str) -> bool:
    proof = answer.get("proof")
    return isinstance(proof, str) and hmac.compare_digest(proof.encode(), _digest(token, purpose, member_nonce, leader_nonce).encode())


def _read_nonce(greeting: dict[str, Any]) -> str:
    nonce = greeting.get("nonce")
    if greeting.get("drivetrain") != VERSION or not isinstance(nonce, str) or len(nonce) != 64 or not nonce.isalnum():
        raise UnknownProtocol
    return nonce


def _send(peer: socket.socket, message: dict[str, Any]) -> None:
    peer.sendall(json.dumps(message).encode() + b"\n")


def _read_line(peer: socket.socket, deadline: float) -> dict[str, Any]:
    """Returns the JSON object on the next line; {} if none comes in time. Reads byte by byte, because the bytes after the line belong to
    Link."""
    line = b""
    with contextlib.suppress(OSError):
        while not line.endswith(b"\n") and len(line) < MAX_LINE_BYTES and (seconds_left := deadline - time.monotonic()) > 0:
            peer.settimeout(seconds_left)
            byte = peer.recv(1)
            if not byte:
                break
            line += byte
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
