"""Who may join a run's machines, what a stranger learns, and what one can do to a run."""

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
from drivetrain.launch.rendezvous.messages import Hello, OddMessage, StartAttempt, ToLeader, ToMember, decode, encode
from drivetrain.outcomes import Outcome
from drivetrain.plan import Plan
from drivetrain.watch.spent import Spent
from tests.launching import free_port
from tests.patience import until

LOCAL, SECRET = "127.0.0.1", "a secret of many letters"
RECIPE = {"task": "small.py", "settings": {"seed": 12345}}


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRIVETRAIN_TOKEN", SECRET)


class Meeting:
    """A leader that waits, and what it said and noted."""

    def __init__(self, nodes: tuple[int, int] = (1, 2)) -> None:
        self.port, self.said, self.events = free_port(), [], []
        me = rendezvous.join((LOCAL, self.port), nodes, 1, None, self.said.append, RECIPE)
        assert isinstance(me, Leader)
        self.leader = me
        self.leader.event = lambda kind, **detail: self.events.append((kind, detail))

    def join(self, recipe: object = RECIPE) -> Member:
        me = rendezvous.join((LOCAL, self.port), (1, 2), 1, 1, lambda text: None, recipe)
        assert isinstance(me, Member)
        return me

    def connect(self) -> socket.socket:
        return socket.create_connection((LOCAL, self.port), timeout=5)

    def heard(self, text: str) -> bool:
        return any(text in line for line in self.said)


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    made = Meeting()
    yield made
    made.leader.end(Outcome.OK, "")


class Recorder:
    """A connection in the middle that writes down what each side says."""

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


# --- who gets in ---


def test_without_the_token_nobody_joins_and_nothing_is_learnt(meeting: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    with meeting.connect() as stranger:
        stranger.sendall(json.dumps({"drivetrain": handshake.VERSION, "nonce": "0" * 64}).encode() + b"\n")
        greeting = stranger.recv(4096)
        assert set(json.loads(greeting)) == {"drivetrain", "nonce"}, "nothing that identifies the run"
        stranger.sendall(b'{"proof": "' + b"0" * 64 + b'"}\n')
        assert json.loads(stranger.recv(4096)) == {"refused": "token"} and stranger.recv(1) == b""
    until(lambda: meeting.heard("away that did not know the token, last from 127.0.0.1"), "a notice")
    monkeypatch.setenv("DRIVETRAIN_TOKEN", "another secret altogether")
    with pytest.raises(Problem, match="the token here is not that of the run"):
        meeting.join()
    monkeypatch.delenv("DRIVETRAIN_TOKEN")
    with pytest.raises(Problem, match=r"this machine has no token .* the command that the first machine printed"):
        meeting.join()
    assert not meeting.leader._peers


def test_a_slow_network_is_no_wrong_token(meeting: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proof, or its answer, that comes too late: the machine tries again."""
    monkeypatch.setattr(handshake, "ANSWER_SECONDS", 0.3)
    with meeting.connect() as slow:
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


def test_a_rogue_leader_learns_nothing_of_the_recipe() -> None:
    """It answers as a leader does, without the token: the machine that came says nothing more."""
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


def test_who_listens_reads_no_recipe_and_cannot_repeat_what_it_heard(meeting: Meeting) -> None:
    ear = Recorder(meeting.port)
    me = rendezvous.join((LOCAL, ear.port), (1, 2), 1, 1, lambda text: None, RECIPE)
    assert isinstance(me, Member)
    until(lambda: meeting.leader._peers, "a machine that joined")
    me.link.close()
    until(lambda: not meeting.leader._present(), "one that left")
    assert b"12345" not in ear.up + ear.down and b"small.py" not in ear.up and SECRET.encode() not in ear.up + ear.down
    with meeting.connect() as thief, contextlib.suppress(OSError):
        thief.sendall(ear.up)
        answer = b""
        while data := thief.recv(4096):
            answer += data
        assert b'"refused": "token"' in answer
    assert not meeting.leader._present()


def test_the_token_file_is_for_its_owner_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("DRIVETRAIN_TOKEN")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    made = Meeting()
    threading.Thread(target=made.leader.gather, daemon=True).start()
    until(lambda: made.heard("DRIVETRAIN_TOKEN="), "the command for the other machines")
    (file,) = (tmp_path / "state").rglob("127.0.0.1-*")
    assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700
    assert made.heard(file.read_text().splitlines()[0]), "printed once, as part of the command"
    made.join().link.close()  # a machine with the same home folder finds it by itself
    file.chmod(0o644)
    with pytest.raises(Problem, match="chmod 600"):
        made.join()
    made.leader.end(Outcome.INFRA, "")
    assert file.exists(), "the repeated command goes on, and the others look for it"
    made.leader.token.forget()
    assert not file.exists()


def test_a_short_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRIVETRAIN_TOKEN", "short")
    with pytest.raises(Problem, match="at least 16 characters"):
        Meeting()


# --- what is said ---


def start_attempt(**changes: Any) -> bytes:
    start = StartAttempt(1, 1, 1, 2, (LOCAL, 29500), "both", Plan(world_size=2), {})
    return json.dumps({"kind": "start-attempt", **asdict(start)} | changes).encode()


def test_what_machines_say_comes_back_whole() -> None:
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
def test_a_leader_s_odd_message_is_refused(line: bytes) -> None:
    with pytest.raises(OddMessage):
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
        {"kind": "sighted", "attempt": 1, "sights": [{"rank": 1}]},
        {"kind": "start-attempt"},
    ],
)
def test_a_member_s_odd_message_is_refused(value: dict[str, Any]) -> None:
    with pytest.raises(OddMessage):
        decode(json.dumps(value).encode(), ToLeader)


def joined(meeting: Meeting, name: str = "rogue") -> Link:
    """A machine that knows the token and the recipe, and then does as it likes."""
    sock = meeting.connect()
    keys = prove_to_leader(sock, SECRET.encode())
    me = Link(sock, keys.to_leader, keys.to_member, ToMember).begin()
    me.send(Hello(1, name, meeting.leader.meeting.identity_digest(keys)))
    welcome = me.receive(5)
    assert isinstance(welcome, messages.Welcome)
    if not welcome.accepted:
        raise PermissionError(welcome.reason)
    return me


class FakeSupervisor:
    """What a leader needs of a supervisor while an attempt runs."""

    steps_taken = 0

    def __init__(self) -> None:
        self.aborted: list[str] = []

    def abort(self, why: str) -> None:
        self.aborted.append(why)


def begun(meeting: Meeting, *names: str) -> FakeSupervisor:
    until(lambda: len(meeting.leader._peers) == len(names), "all machines")
    meeting.leader.high = 1 + len(names)
    meeting.leader.gather()
    meeting.leader.begin("both", Plan(), {})
    return FakeSupervisor()


@pytest.mark.parametrize("odd", ["unsigned", "unknown", "others' ranks", "flood"])
def test_one_odd_message_costs_the_sender_its_place_and_nothing_else(meeting: Meeting, odd: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rogue = joined(meeting)
    supervisor = begun(meeting, "rogue")
    if odd == "unsigned":
        rogue._peer.sendall(b"0" * 64 + b' {"kind": "beat"}\n')
    elif odd == "unknown":
        monkeypatch.setattr(link, "encode", lambda message: b'{"kind": "surprise"}')
        rogue.send(messages.Beat())
    elif odd == "flood":
        for _ in range(link.MAX_WAITING + 2):
            rogue.send(messages.Sighted(0, []))
        until(lambda: meeting.leader._peers[0].link.fault, "a queue that is full")
    else:
        rogue.send(messages.TimeSpent(Spent.unknown(ranks=3)))
    until(lambda: meeting.leader.look(supervisor) or supervisor.aborted, "an attempt that ends")  # type: ignore[arg-type, func-returns-value]
    assert supervisor.aborted == ["the machine rogue was lost"]
    assert [kind for kind, _ in meeting.events] == ["machine-lost"] and meeting.heard("lost rogue: ")
    monkeypatch.undo()
    monkeypatch.setenv("DRIVETRAIN_TOKEN", SECRET)
    with pytest.raises(PermissionError, match="excluded"):
        joined(meeting)
    joined(meeting, "honest").close()


def test_a_machine_that_only_beats_is_excluded(meeting: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    rogue = joined(meeting)
    monkeypatch.setattr(leader, "PACE_SECONDS", 0.5)
    supervisor = begun(meeting, "rogue")
    meeting.leader.look(supervisor)  # type: ignore[arg-type]
    assert not supervisor.aborted
    time.sleep(0.6)
    meeting.leader.look(supervisor)  # type: ignore[arg-type]
    assert supervisor.aborted == ["the machine rogue was lost"] and meeting.heard("excluded, for it did not begin the attempt")
    rogue.close()
    joined(meeting).close()  # once more it may try
    until(lambda: not meeting.leader._present(), "one that left")


def test_a_machine_that_keeps_pace_stays(meeting: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = joined(meeting, "honest")
    honest.own_attempt = lambda: 1
    monkeypatch.setattr(leader, "PACE_SECONDS", 1.5)
    supervisor = begun(meeting, "honest")
    time.sleep(2.0)
    meeting.leader.look(supervisor)  # type: ignore[arg-type]
    assert not supervisor.aborted and meeting.leader._peers


def test_which_machine_is_away_is_said_and_noted(meeting: Meeting) -> None:
    honest = joined(meeting, "node7")
    supervisor = begun(meeting, "node7")
    honest.close()
    until(lambda: meeting.leader.look(supervisor) or supervisor.aborted, "a lost machine")  # type: ignore[arg-type, func-returns-value]
    meeting.leader.gather()
    assert meeting.heard("more machine, without node7 (lost ")
    joined(meeting, "node7").close()
    assert [(kind, detail["machine"]) for kind, detail in meeting.events][:2] == [("machine-lost", "node7"), ("machine-back", "node7")]


# --- floods ---

FLOOD = """
import os, resource, socket, sys, threading, time
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from drivetrain.launch import rendezvous
me = rendezvous.join(("127.0.0.1", 0), (1, 2), 1, None, lambda text: print(text, flush=True), {"a": 1})
print("port", me._listener._server.getsockname()[1], flush=True)
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


def test_a_flood_of_connections_is_survived_and_said() -> None:
    """At the limit of descriptors accept() fails: the port is open again once there are some."""
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
            assert isinstance(me, Member) and me.link.alive, "beside a hundred silent connections"
            me.link.close()
        finally:
            process.kill()
