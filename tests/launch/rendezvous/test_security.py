"""Only machines with the token can join a run; others learn nothing of it, and an invalid message only excludes its sender."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from drivetrain import Problem
from drivetrain.launch import rendezvous
from drivetrain.launch.rendezvous import handshake, leader, link, messages
from drivetrain.launch.rendezvous.handshake import prove_to_leader
from drivetrain.launch.rendezvous.leader import Leader
from drivetrain.launch.rendezvous.link import Link
from drivetrain.launch.rendezvous.member import Member
from drivetrain.launch.rendezvous.messages import Hello, InvalidMessage, StartAttempt, ToLeader, ToMember, decode, encode
from drivetrain.outcomes import Outcome
from drivetrain.plan import Plan
from drivetrain.watch.time_breakdown import TimeBreakdown
from tests.launching import free_port
from tests.waiting import wait_until

LOCAL, SECRET = "127.0.0.1", "a secret of many letters"
RECIPE = {"task": "small.py", "settings": {"seed": 12345}}


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRIVETRAIN_TOKEN", SECRET)


class ObservedLeader:
    """A leader that waits for members, and the list of its notices and events."""

    def __init__(self, nodes: tuple[int, int] = (1, 2)) -> None:
        self.port, self.notices, self.events = free_port(), [], []
        joined = rendezvous.join((LOCAL, self.port), nodes, 1, None, self.notices.append, RECIPE)
        assert isinstance(joined, Leader)
        self.leader = joined
        self.leader.log_event = lambda kind, **detail: self.events.append((kind, detail))

    def join(self, recipe: object = RECIPE) -> Member:
        joined = rendezvous.join((LOCAL, self.port), (1, 2), 1, 1, lambda text: None, recipe)
        assert isinstance(joined, Member)
        return joined

    def connect(self) -> socket.socket:
        return socket.create_connection((LOCAL, self.port), timeout=5)

    def noticed(self, text: str) -> bool:
        return any(text in line for line in self.notices)


@pytest.fixture
def observed() -> Iterator[ObservedLeader]:
    observed = ObservedLeader()
    yield observed
    observed.leader.end_run(Outcome.OK, "")


class Eavesdropper:
    """Forwards a connection, and records what each side sends."""

    def __init__(self, port: int) -> None:
        self.up, self.down = b"", b""
        self.server = socket.create_server((LOCAL, 0))
        self.port = int(self.server.getsockname()[1])
        threading.Thread(target=self._pass_on, args=(port,), daemon=True).start()

    def _pass_on(self, port: int) -> None:
        near, _ = self.server.accept()
        far = socket.create_connection((LOCAL, port))
        threading.Thread(target=self._copy, args=(near, far, "up"), daemon=True).start()
        self._copy(far, near, "down")

    def _copy(self, source: socket.socket, target: socket.socket, name: str) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                setattr(self, name, getattr(self, name) + data)
                target.sendall(data)
        target.close()


# --- who is admitted ---


def test_without_the_token_nobody_joins_or_learns_anything(observed: ObservedLeader, monkeypatch: pytest.MonkeyPatch) -> None:
    with observed.connect() as stranger:
        stranger.sendall(json.dumps({"drivetrain": handshake.VERSION, "nonce": "0" * 64}).encode() + b"\n")
        greeting = stranger.recv(4096)
        assert set(json.loads(greeting)) == {"drivetrain", "nonce"}, "the greeting does not identify the run"
        stranger.sendall(b'{"proof": "' + b"0" * 64 + b'"}\n')
        assert json.loads(stranger.recv(4096)) == {"refused": "token"} and stranger.recv(1) == b""
    wait_until(lambda: observed.noticed("without the token, the last from 127.0.0.1"), "a notice")
    monkeypatch.setenv("DRIVETRAIN_TOKEN", "another secret altogether")
    with pytest.raises(Problem, match="this machine has another token than the run"):
        observed.join()
    monkeypatch.delenv("DRIVETRAIN_TOKEN")
    with pytest.raises(Problem, match=r"this machine has no token .* the command that the first machine printed"):
        observed.join()
    assert not observed.leader._peers


def test_a_late_answer_is_not_treated_as_a_wrong_token(observed: ObservedLeader, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proof, or the answer to it, comes too late: the machine tries again."""
    monkeypatch.setattr(handshake, "ANSWER_SECONDS", 0.3)
    with observed.connect() as slow_member:
        slow_member.sendall(json.dumps({"drivetrain": handshake.VERSION, "nonce": "0" * 64}).encode() + b"\n")
        answer = b""
        while data := slow_member.recv(4096):
            answer += data
    assert b"refused" not in answer
    with socket.create_server((LOCAL, 0)) as server, socket.create_connection(server.getsockname()) as member_socket:
        leader_socket, _ = server.accept()
        leader_socket.sendall(json.dumps({"drivetrain": handshake.VERSION, "nonce": "0" * 64}).encode() + b"\n")
        with pytest.raises(ConnectionResetError):
            prove_to_leader(member_socket, SECRET.encode())
        leader_socket.close()


def test_a_fake_leader_learns_nothing_of_the_recipe() -> None:
    """The fake leader answers like a leader but without the token: the member sends nothing more."""
    received = b""

    def pretend(server: socket.socket) -> None:
        nonlocal received
        peer, _ = server.accept()
        received += peer.recv(4096)
        peer.sendall(json.dumps({"drivetrain": handshake.VERSION, "nonce": "0" * 64}).encode() + b"\n")
        received += peer.recv(4096)
        peer.sendall(b'{"proof": "' + b"0" * 64 + b'"}\n')
        received += peer.recv(4096)

    with socket.create_server((LOCAL, 0)) as server:
        thread = threading.Thread(target=pretend, args=(server,), daemon=True)
        thread.start()
        with pytest.raises(Problem, match="this machine has another token than the run"):
            rendezvous.join(server.getsockname(), (1, 2), 1, 1, lambda text: None, RECIPE)
        thread.join(5)
    assert [set(json.loads(line)) for line in received.splitlines()] == [{"drivetrain", "nonce"}, {"proof"}]


def test_an_eavesdropper_reads_no_recipe_and_cannot_replay_a_connection(observed: ObservedLeader) -> None:
    eavesdropper = Eavesdropper(observed.port)
    joined = rendezvous.join((LOCAL, eavesdropper.port), (1, 2), 1, 1, lambda text: None, RECIPE)
    assert isinstance(joined, Member)
    wait_until(lambda: observed.leader._peers, "a member")
    joined.link.close()
    wait_until(lambda: not observed.leader.connected_peers(), "no member")
    assert (
        b"12345" not in eavesdropper.up + eavesdropper.down
        and b"small.py" not in eavesdropper.up
        and SECRET.encode() not in eavesdropper.up + eavesdropper.down
    )
    with observed.connect() as replay, contextlib.suppress(OSError):
        replay.sendall(eavesdropper.up)
        answer = b""
        while data := replay.recv(4096):
            answer += data
        assert b'"refused": "token"' in answer
    assert not observed.leader.connected_peers()


def test_the_leader_draws_a_new_nonce_for_every_connection(observed: ObservedLeader) -> None:
    """So that a proof that was recorded is of no use in another connection."""
    nonces = ["0" * 64]
    for _ in range(3):
        with observed.connect() as stranger:
            stranger.sendall(json.dumps({"drivetrain": handshake.VERSION, "nonce": nonces[0]}).encode() + b"\n")
            nonces.append(json.loads(stranger.recv(4096))["nonce"])
    assert len(set(nonces)) == len(nonces)


def test_only_its_owner_may_read_the_token_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("DRIVETRAIN_TOKEN")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    observed = ObservedLeader()
    threading.Thread(target=observed.leader.wait_for_members, daemon=True).start()
    wait_until(lambda: observed.noticed("DRIVETRAIN_TOKEN="), "the command for the other machines")
    (file,) = (tmp_path / "state").rglob("127.0.0.1-*")
    assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700
    assert observed.noticed(file.read_text().splitlines()[0]), "the printed command contains the token"
    observed.join().link.close()  # a machine with the same home folder reads the token file
    for mode in (0o640, 0o604):
        file.chmod(mode)
        with pytest.raises(Problem, match="chmod 600"):
            observed.join()
    observed.leader.end_run(Outcome.INFRA, "")
    assert file.exists(), "the repeated command needs it"
    observed.leader.token.delete_file()
    assert not file.exists()


def test_a_short_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRIVETRAIN_TOKEN", "short")
    with pytest.raises(Problem, match="at least 16 characters"):
        ObservedLeader()


# --- messages ---


def start_attempt(**changes: Any) -> bytes:
    start = StartAttempt(1, 1, 1, 2, (LOCAL, 29500), "both", Plan(world_size=2), {})
    return json.dumps({"kind": "start-attempt", **asdict(start)} | changes).encode()


def test_a_message_is_the_same_after_encoding_and_decoding() -> None:
    message = decode(start_attempt(), ToMember)
    assert isinstance(message, StartAttempt) and message.plan.world_size == 2 and message.master == (LOCAL, 29500)
    assert decode(encode(message), ToMember) == message


@pytest.mark.parametrize(
    "line",
    [
        start_attempt(plan={"env": {"PYTHONPATH": "/tmp/theirs"}}),
        start_attempt(plan={"env": {"LD_PRELOAD": "/tmp/theirs.so"}}),
        start_attempt(plan={"micro_batch": "many"}),
        start_attempt(plan={"surprise": 1}),
        start_attempt(run="../../home"),
        start_attempt(run="/etc"),
        start_attempt(run="a/b/c"),
        start_attempt(run=""),
        start_attempt(run="\x1b[2J"),
        start_attempt(path="/etc"),
        start_attempt(master=["host", 22]),
        start_attempt(first_rank=7),
        start_attempt(diagnostics={"armed": "rm"}),
        b'{"kind": "abort"}',
        b'{"kind": "run-ended", "outcome": "wonderful", "message": ""}',
        b'{"kind": "surprise"}',
        b"[]",
        b"null",
        b"not JSON",
        b'{"kind": ' + b"[" * 100_000,
    ],
)
def test_an_invalid_message_of_a_leader_is_refused(line: bytes) -> None:
    with pytest.raises(InvalidMessage):
        decode(line, ToMember)


def smaller(**plan: Any) -> dict[str, Any]:
    return {"plan": plan, "sizes": {}, "oom": {"step": 1}, "sentence": ""}


ENDED = {"kind": "attempt-ended", "attempt": 1, "outcome": "oom", "message": "", "lost": False, "stopped": False}


@pytest.mark.parametrize(
    "value",
    [
        {"kind": "hello", "procs": 0, "name": "n", "identity": ""},
        {"kind": "hello", "procs": 1, "name": "\x1b]0;owned\x07", "identity": ""},
        {"kind": "hello", "procs": 1, "name": "n", "identity": "", "node_rank": "1"},
        {"kind": "attempt-ended"},
        ENDED | {"smaller": smaller(env={"PYTHONPATH": "x"})},
        ENDED | {"smaller": smaller(micro_batch="x")},
        ENDED | {"spent": {"ranks": [{}], "steps": 1}},
        ENDED | {"outcome": 5},
        {"kind": "time-spent", "spent": {"ranks": [{"surprise": 1.0}], "steps": 1}},
        {"kind": "hang-report", "attempt": 1, "reports": [{"rank": 1}]},
        {"kind": "start-attempt"},
    ],
)
def test_an_invalid_message_of_a_member_is_refused(value: dict[str, Any]) -> None:
    with pytest.raises(InvalidMessage):
        decode(json.dumps(value).encode(), ToLeader)


def join_as(observed: ObservedLeader, name: str = "rogue") -> Link:
    """Joins as a machine that knows the token and the recipe; returns its connection."""
    sock = observed.connect()
    keys = prove_to_leader(sock, SECRET.encode())
    joined = Link(sock, keys.to_leader, keys.to_member, ToMember).start()
    joined.send(Hello(1, name, observed.leader.config.identity_digest(keys)))
    welcome = joined.receive(5)
    assert isinstance(welcome, messages.Welcome)
    if not welcome.accepted:
        raise PermissionError(welcome.reason)
    return joined


class FakeSupervisor:
    """Has the methods of a supervisor that a leader uses while an attempt runs."""

    steps_taken = 0

    def __init__(self) -> None:
        self.aborted: list[str] = []

    def abort(self, why: str) -> None:
        self.aborted.append(why)


def begin_attempt(observed: ObservedLeader, *names: str) -> FakeSupervisor:
    wait_until(lambda: len(observed.leader._peers) == len(names), "all machines")
    observed.leader.max_nodes = 1 + len(names)
    observed.leader.wait_for_members()
    observed.leader.start_attempt("both", Plan(), {})
    return FakeSupervisor()


def test_a_repeated_message_is_refused() -> None:
    with socket.create_server((LOCAL, 0)) as server, socket.create_connection(server.getsockname()) as near:
        far, _ = server.accept()
        sender, receiver = Link(near, b"one", b"two", ToMember), Link(far, b"two", b"one", ToLeader)
        sender.send(messages.NodeHeartbeat(attempt=3))
        line = far.recv(4096)
        receiver._accept(line)
        assert receiver.peer_attempt == 3
        with pytest.raises(InvalidMessage, match="not signed"):
            receiver._accept(line)
        far.close()


@pytest.mark.parametrize("fault", ["unsigned", "unknown", "others' ranks", "flood"])
def test_an_invalid_message_excludes_only_its_sender(observed: ObservedLeader, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rogue = join_as(observed)
    supervisor = begin_attempt(observed, "rogue")
    if fault == "unsigned":
        rogue._peer.sendall(b"0" * 64 + b' {"kind": "heartbeat"}\n')
    elif fault == "unknown":
        monkeypatch.setattr(link, "encode", lambda message: b'{"kind": "surprise"}')
        rogue.send(messages.NodeHeartbeat())
    elif fault == "flood":
        for _ in range(link.MAX_QUEUED + 2):
            rogue.send(messages.HangReport(0, []))
        wait_until(lambda: observed.leader._peers[0].link.fault, "a queue that is full")
    else:
        rogue.send(messages.TimeSpent(TimeBreakdown.unknown(ranks=3)))
    wait_until(lambda: observed.leader.check(supervisor) or supervisor.aborted, "an attempt that ends")  # type: ignore[arg-type, func-returns-value]
    assert supervisor.aborted == ["the machine rogue was lost"]
    assert [kind for kind, _ in observed.events] == ["machine-lost"] and observed.noticed("lost rogue: ")
    monkeypatch.undo()
    monkeypatch.setenv("DRIVETRAIN_TOKEN", SECRET)
    with pytest.raises(PermissionError, match="excluded"):
        join_as(observed)
    join_as(observed, "honest").close()


def test_a_machine_that_only_sends_heartbeats_is_excluded(observed: ObservedLeader, monkeypatch: pytest.MonkeyPatch) -> None:
    rogue = join_as(observed)
    monkeypatch.setattr(leader, "START_TIMEOUT_SECONDS", 0.5)
    supervisor = begin_attempt(observed, "rogue")
    observed.leader.check(supervisor)  # type: ignore[arg-type]
    assert not supervisor.aborted
    time.sleep(0.6)
    observed.leader.check(supervisor)  # type: ignore[arg-type]
    assert supervisor.aborted == ["the machine rogue was lost"] and observed.noticed("excluded, for it did not begin the attempt")
    rogue.close()
    join_as(observed).close()  # a new attempt to join is accepted
    wait_until(lambda: not observed.leader.connected_peers(), "no member")


def test_a_machine_that_starts_the_attempt_stays(observed: ObservedLeader, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = join_as(observed, "honest")
    honest.own_attempt = lambda: 1
    monkeypatch.setattr(leader, "START_TIMEOUT_SECONDS", 1.5)
    supervisor = begin_attempt(observed, "honest")
    time.sleep(2.0)
    observed.leader.check(supervisor)  # type: ignore[arg-type]
    assert not supervisor.aborted and observed.leader._peers


def test_a_lost_machine_is_named_and_logged(observed: ObservedLeader) -> None:
    honest = join_as(observed, "node7")
    supervisor = begin_attempt(observed, "node7")
    honest.close()
    wait_until(lambda: observed.leader.check(supervisor) or supervisor.aborted, "a lost machine")  # type: ignore[arg-type, func-returns-value]
    observed.leader.wait_for_members()
    assert observed.noticed("more machine, without node7 (lost ")
    join_as(observed, "node7").close()
    wait_until(lambda: len(observed.events) > 1, "the machine's return")
    assert [(kind, detail["machine"]) for kind, detail in observed.events][:2] == [("machine-lost", "node7"), ("machine-back", "node7")]


# --- floods ---

FLOOD = """
import os, resource, socket, sys, threading, time
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from drivetrain.launch import rendezvous
me = rendezvous.join(("127.0.0.1", 0), (1, 2), 1, None, lambda text: print(text, flush=True), {"a": 1})
print("port", me.listener.port, flush=True)
handles = []
try:
    while True:
        handles.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
print("full", flush=True)
sys.stdin.readline()
for handle in handles:
    os.close(handle)
print("free", flush=True)
sys.stdin.readline()
"""


def test_the_leader_survives_a_flood_of_connections() -> None:
    """Without free file descriptors accept() fails; the leader accepts again once there are some."""
    with (
        subprocess.Popen([sys.executable, "-c", FLOOD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process,
        contextlib.ExitStack() as stack,
    ):
        assert process.stdin is not None and process.stdout is not None
        lines: list[str] = []
        threading.Thread(target=lambda: lines.extend(process.stdout or []), daemon=True).start()
        try:
            wait_until(lambda: "full\n" in lines, "no descriptor left", process=process)
            port = next(int(line.split()[1]) for line in lines if line.startswith("port "))
            for _ in range(100):
                sock = stack.enter_context(socket.socket())
                sock.setblocking(False)
                sock.connect_ex((LOCAL, port))
            wait_until(lambda: any("cannot accept connections for a moment" in line for line in lines), "a notice", process=process)
            process.stdin.write("\n")
            process.stdin.flush()
            wait_until(lambda: "free\n" in lines, "descriptors again", process=process)
            joined = rendezvous.join((LOCAL, port), (1, 2), 1, 1, lambda text: None, {"a": 1})
            assert isinstance(joined, Member) and joined.link.is_alive, "in spite of a hundred silent connections"
            joined.link.close()
        finally:
            process.kill()
