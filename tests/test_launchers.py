"""Every launcher starts two ranks, and they train exactly as with `drivetrain train --procs 2`."""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from drivetrain import Problem
from drivetrain.launch import rendezvous
from drivetrain.launch.launchers import first_host, tasks_per_node
from drivetrain.launch.rendezvous.messages import StartAttempt
from drivetrain.plan import Plan
from tests.launching import BIN, STEPS, events, free_port, info, is_training, losses, only_run, run, start, write_task
from tests.waiting import wait_until

TRAIN = ("train", "small.py")
MODULE = ("drivetrain", *TRAIN)
LOCAL = "127.0.0.1"
ONE_THREAD = "plan.threads=1"  # for ranks that do not know that they share this machine's cores


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a run of two processes that drivetrain itself has started."""
    folder = write_task(tmp_path_factory.mktemp("own"))
    run("drivetrain", *TRAIN, "--procs", 2, folder=folder)
    return only_run(folder)


@pytest.fixture
def task(tmp_path: Path) -> Path:
    return write_task(tmp_path / "a folder")


def check_same_training(run: Path, reference: Path, launcher: str | None) -> None:
    assert info(run)["status"] == "finished"
    assert losses(run) == pytest.approx(losses(reference), rel=1e-6)
    started = events(run, "started")[-1]
    assert (started["world_size"], started.get("launcher")) == (2, launcher)


def check_one_machine(run: Path, reference: Path) -> None:
    """Checks that the launcher's processes share the cores: the plan is the one of --procs 2."""
    plan, expected = info(run)["plan"], info(reference)["plan"]
    assert (plan["nodes"], plan["threads"]) == (1, expected["threads"])


@pytest.mark.system  # slow
def test_torchrun_stops_and_the_same_command_resumes(task: Path, reference: Path) -> None:
    command = ("torchrun", "--nproc-per-node", 2, "--master-port", free_port(), "-m", *MODULE)
    with start(*command, folder=task, NAP=0.1) as torchrun:
        wait_until(lambda: is_training(task), "some steps")
        rank_1 = next(p for p in torchrun.children() if p.environ().get("RANK") == "1")
        rank_1.send_signal(signal.SIGTERM)
        assert torchrun.wait() != 0
    stopped = only_run(task)
    assert info(stopped)["outcome"] == "preempted"
    stopped_at = events(stopped, "checkpoint")[-1]["step"]
    assert 3 <= stopped_at < STEPS

    output = run(*command, folder=task)
    assert "continuing small-001" in output
    assert [event["step"] for event in events(stopped, "resumed")] == [stopped_at]
    check_same_training(only_run(task), reference, "torchrun")
    check_one_machine(only_run(task), reference)


def test_accelerate_with_two_processes_and_accumulation(task: Path, reference: Path) -> None:
    flags = ("--multi_gpu", "--num_processes", 2, "--num_machines", 1, "--mixed_precision", "no", "--dynamo_backend", "no")
    output = run(
        "accelerate", "launch", *flags, "--main_process_port", 0, "-m", *MODULE,
        folder=task, HF_HOME=task, ACCELERATE_GRADIENT_ACCUMULATION_STEPS=2,
    )  # fmt: skip
    assert "plan.accumulation=2, from accelerate launch (the global batch stays 32)" in output
    check_same_training(only_run(task), reference, "accelerate")
    check_one_machine(only_run(task), reference)
    plan = info(only_run(task))["plan"]
    assert (plan["accumulation"], plan["micro_batch"], plan["precision"]) == (2, 8, "fp32")


def test_accelerate_on_a_cpu_starts_one_process_and_a_notice_says_so(task: Path, reference: Path) -> None:
    flags = ("--cpu", "--num_processes", 2, "--mixed_precision", "bf16")
    output = run("accelerate", "launch", *flags, "-m", *MODULE, folder=task, HF_HOME=task)
    assert "accelerate launch started one process" in output
    assert "precision=bf16, from accelerate launch" in output
    plan = info(only_run(task))["plan"]
    assert (plan["world_size"], plan["precision"]) == (1, "bf16")
    assert losses(only_run(task)) == pytest.approx(losses(reference), rel=0.05)


@pytest.mark.system
def test_the_launcher_of_deepspeed(task: Path, reference: Path) -> None:
    """Its launcher puts --local_rank=N between `drivetrain` and its verb."""
    script = (sys.executable, BIN / "deepspeed")  # the interpreter in its first line may be in a folder with a space
    run(*script, "--num_gpus", 2, "--master_port", free_port(), "--module", *MODULE, folder=task, DS_ACCELERATOR="cpu")
    check_same_training(only_run(task), reference, "deepspeed")
    check_one_machine(only_run(task), reference)


# --- a PyTorchJob's environment ----------------------------------------------------------------


@contextlib.contextmanager
def pods(folder: Path, **variables: object) -> Iterator[list[Any]]:
    """Starts one process per pod as the training operator does, with these four variables and no LOCAL_RANK."""
    common = {"MASTER_ADDR": LOCAL, "MASTER_PORT": free_port(), "WORLD_SIZE": 2} | variables
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(start("drivetrain", *TRAIN, ONE_THREAD, folder=folder, RANK=rank, **common)) for rank in (0, 1)]


def test_the_environment_of_a_pytorchjob(task: Path, reference: Path) -> None:
    with pods(task) as (first, second):
        assert "2 processes, started by the environment" in first.succeed()
        assert second.succeed() == "", "only rank 0 prints"
    check_same_training(only_run(task), reference, "the environment (RANK, WORLD_SIZE)")


def test_the_run_ends_with_the_cause_even_if_another_rank_failed(task: Path) -> None:
    with pods(task, FAIL=1) as (first, second):
        assert (first.wait(), second.wait()) == (1, 1)
        assert "the fifth batch is bad" in first.output
    ended = info(only_run(task))
    assert ended["outcome"] == "user-error"
    assert "the fifth batch is bad" in ended["message"]


def test_a_worker_that_waits_for_the_others_ends_on_ctrl_c(task: Path) -> None:
    port = free_port()
    with start("drivetrain", *TRAIN, folder=task, RANK=0, WORLD_SIZE=2, MASTER_ADDR=LOCAL, MASTER_PORT=port) as worker:
        wait_until(lambda: any(c.laddr.port == port for p in worker.children() for c in listening(p)), "a store that listens")
        worker.process.send_signal(signal.SIGINT)
        assert worker.wait(5) != 0
    assert not (task / "runs").exists()


# --- two machines without a launcher ----------------------------------------------------------------------


@contextlib.contextmanager
def start_on_two_machines(*folders: Path, port: int, **variables: object) -> Iterator[list[Any]]:
    """Starts the same command on each machine; the second after the first listens."""
    command = ("drivetrain", *TRAIN, ONE_THREAD, "--nodes", 2, "--rendezvous", f"{LOCAL}:{port}")
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(start(*command, folder=folders[0], **variables))
        wait_until(lambda: "waiting at" in first.output, "a machine that waits")
        yield [first, stack.enter_context(start(*command, folder=folders[1], **variables))]


@pytest.mark.system
def test_two_machines_with_a_shared_folder(task: Path, reference: Path) -> None:
    with start_on_two_machines(task, task, port=free_port()) as (first, second):
        assert "2 of 2 machines have joined" in first.succeed()
        second.succeed()
    check_same_training(only_run(task), reference, None)
    assert info(only_run(task))["plan"]["nodes"] == 2


@pytest.mark.system
def test_two_machines_without_a_shared_folder_stop_and_resume(task: Path, reference: Path, tmp_path: Path) -> None:
    """Only the first machine has the run; the second gets the state from the first."""
    other, port = write_task(tmp_path / "another folder"), free_port()
    with start_on_two_machines(task, other, port=port, NAP=0.1) as (first, second):
        wait_until(lambda: is_training(task), "some steps")
        second.process.send_signal(signal.SIGTERM)
        assert (first.wait(), second.wait()) == (200, 200)
    assert info(only_run(task))["outcome"] == "preempted"
    with start_on_two_machines(task, other, port=port) as (first, second):
        assert "continuing small-001" in first.succeed()
        second.succeed()
    assert len(events(only_run(task), "resumed")) == 1
    check_same_training(only_run(task), reference, None)
    assert not list(other.glob("runs/*/checkpoints")) and not list(other.glob("runs/*/run.json"))


def test_machines_with_different_commands_do_not_train_together() -> None:
    port, notices, ranks = free_port(), [], []

    def join(identity: dict[str, Any]) -> None:
        node = rendezvous.join((LOCAL, port), (2, 2), 1, None, notices.append, identity)
        if isinstance(node, rendezvous.Leader):
            node.wait_for_members()
            ranks.append(node.start_attempt("small-001", Plan(), {}).first_rank)
        else:
            start = node.wait()
            assert isinstance(start, StartAttempt)
            ranks.append(start.first_rank)

    first = threading.Thread(target=join, args=({"seed": 0},), daemon=True)
    first.start()
    wait_until(lambda: any("waiting at" in text for text in notices), "a machine that waits")
    with pytest.raises(Problem, match=f"the run at {LOCAL}:{port} rejected this machine: another task, code or settings"):
        join({"seed": 1})
    wait_until(lambda: any("rejected" in text and ": another task" in text for text in notices), "a notice")
    join({"seed": 0})
    first.join(5)
    assert sorted(ranks) == [0, 1]


def test_processes_of_one_machine_listen_on_loopback_only(task: Path) -> None:
    with start("drivetrain", *TRAIN, "--procs", 2, folder=task, NAP=0.1) as training:
        wait_until(lambda: is_training(task), "some steps", process=training.process)
        sockets = [(process.pid, s.laddr.ip) for process in training.children() for s in listening(process)]
    assert len({pid for pid, _ in sockets}) == 2, "torch's store and gloo listen"
    assert {address for _, address in sockets} == {LOCAL}, sockets


def listening(process: psutil.Process) -> list[Any]:
    return [connection for connection in process.net_connections() if connection.status == "LISTEN"]


# --- ports in use ----------------------------------------------------------------------


def test_a_rendezvous_port_that_another_program_holds(task: Path) -> None:
    with socket.create_server((LOCAL, 0)) as server:
        port = server.getsockname()[1]
        threading.Thread(target=lambda: server.accept()[0].sendall(b"220 mail.example ESMTP\r\n"), daemon=True).start()
        words = ("--nodes", 2, "--rendezvous", f"{LOCAL}:{port}")
        with start("drivetrain", *TRAIN, *words, folder=task, DRIVETRAIN_TOKEN="a secret of many letters") as started:
            assert started.wait() == 2
            assert f"port {port} on {LOCAL} is in use by another program: choose another" in started.output


def test_a_rendezvous_port_whose_holder_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous.handshake, "ANSWER_SECONDS", 0.2)
    monkeypatch.setenv("DRIVETRAIN_TOKEN", "a secret of many letters")
    with socket.create_server((LOCAL, 0)) as server, pytest.raises(Problem, match="is in use by another program"):
        rendezvous.join(server.getsockname(), (2, 2), 1, None, lambda text: None)


def test_a_master_port_in_use(task: Path) -> None:
    with socket.create_server((LOCAL, 0)) as server:
        port = server.getsockname()[1]
        with start("drivetrain", *TRAIN, folder=task, RANK=0, WORLD_SIZE=2, MASTER_ADDR=LOCAL, MASTER_PORT=port) as started:
            assert started.wait() == 2
            assert f"port {port} is in use: choose another" in started.output


# --- Slurm's short forms -----------------------------------------------------------------------


@pytest.mark.parametrize(("nodes", "first"), [("n1", "n1"), ("n[1-3]", "n1"), ("gpu[007,012-020],login1", "gpu007"), ("a-b.c,d", "a-b.c")])
def test_first_host(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


@pytest.mark.parametrize(("text", "tasks"), [("4", [4]), ("1(x2)", [1, 1]), ("2(x3),1", [2, 2, 2, 1])])
def test_tasks_per_node(text: str, tasks: list[int]) -> None:
    assert tasks_per_node(text) == tasks
