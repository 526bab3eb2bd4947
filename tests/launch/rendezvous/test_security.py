"""Who may join a run, what a stranger learns, and what one can do to a run."""

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
from tests.patience import until

LOCAL, SECRET = "127.0.0.1", "a secret of many letters"
RECIPE = {"task": "small.py", "settings": {"seed": 12345}}


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRIVETRAIN_TOKEN", SECRET)


class ObservedLeader:
    """A leader that waits for members, with its notices and events."""

    def __init__(self, nodes: tuple[int, int] = (1, 2)) -> None:
        self.port, self.notices, self.events = free_port(), [], []
        me = rendezvous.join((LOCAL, self.port), nodes, 1, None, self.notices.append, RECIPE)
        assert isinstance(me, Leader)
        self.leader = me
        self.leader.log_event = lambda kind, **detail: self.events.append((kind, detail))

    def join(self, recipe: object = RECIPE) -> Member:
        me = rendezvous.join((LOCAL, self.port), (1, 2), 1, 1, lambda text: None, recipe)
        assert isinstance(me, Member)
        return me

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
        assert set(json.loads(greeting)) == {"drivetrain", "nonce"}, "nothing that identifies the run"
        stranger.sendall(b'{"proof": "' + b"0" * 64 + b'"}\n')
        assert json.loads(stranger.recv(4096)) == {"refused": "token"} and stranger.recv(1) == b""
    until(lambda: observed.noticed("away that did not know the token, last from 127.0.0.1"), "a notice")
    monkeypatch.setenv("DRIVETRAIN_TOKEN", "another secret altogether")
    with pytest.raises(Problem, match="the token here is not that of the run"):
        observed.join()
    monkeypatch.delenv("DRIVETRAIN_TOKEN")
    with pytest.raises(Problem, match=r"this machine has no token .* the command that the first machine printed"):
        observed.join()
    assert not observed.leader._peers


def test_a_late_answer_is_no_wrong_token(observed: ObservedLeader, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proof, or its answer, comes too late: the machine tries again."""
    monkeypatch.setattr(handshake, "ANSWER_SECONDS", 0.3)
    with observed.connect() as slow:
        slow.sendall(json.dumps({"drivetrain": handshake.VERSION, "nonce": "0" * 64}).encode() + b"\n")
        answer = b""
        while data := slow.recv(4096):
            answer += data
    assert b"refused" not in answer
    with socket.create_server((LOCAL, 0)) as server, socket.create_connection(server.getsockname()) as near:
        far, _ = server.accept()
        far.sendall(json.dumps({"drivetrain": handshake.VERSION, "nonce": "0" * 64}).encode() + b"\n")
        with pytest.raises(ConnectionResetError):
            prove_to_leader(near, SECRET.encode())
        far.close()


def test_a_false_leader_learns_nothing_of_the_recipe() -> None:
    """It answers as a leader does, but without the token: the member sends nothing more."""
    said = b""

    def pretend(server: socket.socket) -> None:
        nonlocal said
        peer, _ = server.accept()
        said += peer.recv(4096)
        peer.sendall(json.dumps({"drivetrain": handshake.VERSION, "nonce": "0" * 64}).encode() + b"\n")
        said += peer.recv(4096)
        peer.sendall(b'{"proof": "' + b"0" * 64 + b'"}\n')
        said += peer.recv(4096)

    with socket.create_server((LOCAL, 0)) as server:
        thread = threading.Thread(target=pretend, args=(server,), daemon=True)
        thread.start()
        with pytest.raises(Problem, match="the token here is not that of the run"):
            rendezvous.join(server.getsockname(), (1, 2), 1, 1, lambda text: None, RECIPE)
        thread.join(5)
    assert [set(json.loads(line)) for line in said.splitlines()] == [{"drivetrain", "nonce"}, {"proof"}]


def test_an_eavesdropper_reads_no_recipe_and_cannot_replay_what_it_recorded(observed: ObservedLeader) -> None:
    eavesdropper = Eavesdropper(observed.port)
    me = rendezvous.join((LOCAL, eavesdropper.port), (1, 2), 1, 1, lambda text: None, RECIPE)
    assert isinstance(me, Member)
    until(lambda: observed.leader._peers, "a member")
    me.link.close()
    until(lambda: not observed.leader.connected_peers(), "no member")
    assert (
        b"12345" not in eavesdropper.up + eavesdropper.down
        and b"small.py" not in eavesdropper.up
        and SECRET.encode() not in eavesdropper.up + eavesdropper.down
    )
    with observed.connect() as thief, contextlib.suppress(OSError):
        thief.sendall(eavesdropper.up)
        answer = b""
        while data := thief.recv(4096):
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
    until(lambda: observed.noticed("DRIVETRAIN_TOKEN="), "the command for the other machines")
    (file,) = (tmp_path / "state").rglob("127.0.0.1-*")
    assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700
    assert observed.noticed(file.read_text().splitlines()[0]), "printed once, as part of the command"
    observed.join().link.close()  # a machine with the same home folder needs nothing
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


def test_a_message_survives_encoding_and_decoding() -> None:
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
        {"kind": "hang-report", "attempt": 1, "sights": [{"rank": 1}]},
        {"kind": "start-attempt"},
    ],
)
def test_an_invalid_message_of_a_member_is_refused(value: dict[str, Any]) -> None:
    with pytest.raises(InvalidMessage):
        decode(json.dumps(value).encode(), ToLeader)


def join_as(observed: ObservedLeader, name: str = "rogue") -> Link:
    """Joins as a machine that knows token and recipe; it then sends what the test wants."""
    sock = observed.connect()
    keys = prove_to_leader(sock, SECRET.encode())
    me = Link(sock, keys.to_leader, keys.to_member, ToMember).start()
    me.send(Hello(1, name, observed.leader.config.identity_digest(keys)))
    welcome = me.receive(5)
    assert isinstance(welcome, messages.Welcome)
    if not welcome.accepted:
        raise PermissionError(welcome.reason)
    return me


class FakeSupervisor:
    """The part of a supervisor that a leader uses while an attempt runs."""

    steps_taken = 0

    def __init__(self) -> None:
        self.aborted: list[str] = []

    def abort(self, why: str) -> None:
        self.aborted.append(why)


def begin_attempt(observed: ObservedLeader, *names: str) -> FakeSupervisor:
    until(lambda: len(observed.leader._peers) == len(names), "all machines")
    observed.leader.max_nodes = 1 + len(names)
    observed.leader.wait_for_members()
    observed.leader.start_attempt("both", Plan(), {})
    return FakeSupervisor()


def test_a_message_that_is_sent_again_is_refused() -> None:
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


@pytest.mark.parametrize("odd", ["unsigned", "unknown", "others' ranks", "flood"])
def test_one_invalid_message_excludes_its_sender_and_nothing_else(
    observed: ObservedLeader, odd: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rogue = join_as(observed)
    supervisor = begin_attempt(observed, "rogue")
    if odd == "unsigned":
        rogue._peer.sendall(b"0" * 64 + b' {"kind": "heartbeat"}\n')
    elif odd == "unknown":
        monkeypatch.setattr(link, "encode", lambda message: b'{"kind": "surprise"}')
        rogue.send(messages.NodeHeartbeat())
    elif odd == "flood":
        for _ in range(link.MAX_QUEUED + 2):
            rogue.send(messages.HangReport(0, []))
        until(lambda: observed.leader._peers[0].link.fault, "a queue that is full")
    else:
        rogue.send(messages.TimeSpent(TimeBreakdown.unknown(ranks=3)))
    until(lambda: observed.leader.check(supervisor) or supervisor.aborted, "an attempt that ends")  # type: ignore[arg-type, func-returns-value]
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
    join_as(observed).close()  # it may try once more
    until(lambda: not observed.leader.connected_peers(), "no member")


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
    until(lambda: observed.leader.check(supervisor) or supervisor.aborted, "a lost machine")  # type: ignore[arg-type, func-returns-value]
    observed.leader.wait_for_members()
    assert observed.noticed("more machine, without node7 (lost ")
    join_as(observed, "node7").close()
    until(lambda: len(observed.events) > 1, "the machine's return")
    assert [(kind, detail["machine"]) for kind, detail in observed.events][:2] == [("machine-lost", "node7"), ("machine-back", "node7")]


# --- floods ---

FLOOD = """
import os, resource, socket, sys, threading, time
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from drivetrain.launch import rendezvous
me = rendezvous.join(("127.0.0.1", 0), (1, 2), 1, None, lambda text: print(text, flush=True), {"a": 1})
print("port", me.listener.port, flush=True)
hoard = []
try:
    while True:
        hoard.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
print("full", flush=True)
sys.stdin.readline()
for handle in hoard:
    os.close(handle)
print("free", flush=True)
sys.stdin.readline()
"""


def test_a_flood_of_connections_is_survived_and_reported() -> None:
    """Without free descriptors accept() fails; the port opens again once there are some."""
    with (
        subprocess.Popen([sys.executable, "-c", FLOOD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process,
        contextlib.ExitStack() as stack,
    ):
        assert process.stdin is not None and process.stdout is not None
        lines: list[str] = []
        threading.Thread(target=lambda: lines.extend(process.stdout or []), daemon=True).start()
        try:
            until(lambda: "full\n" in lines, "no descriptor left", of=process)
            port = next(int(line.split()[1]) for line in lines if line.startswith("port "))
            for _ in range(100):
                sock = stack.enter_context(socket.socket())
                sock.setblocking(False)
                sock.connect_ex((LOCAL, port))
            until(lambda: any("cannot accept connections for a moment" in line for line in lines), "a notice", of=process)
            process.stdin.write("\n")
            process.stdin.flush()
            until(lambda: "free\n" in lines, "descriptors again", of=process)
            me = rendezvous.join((LOCAL, port), (1, 2), 1, 1, lambda text: None, {"a": 1})
            assert isinstance(me, Member) and me.link.is_alive, "beside a hundred silent connections"
            me.link.close()
        finally:
            process.kill()
