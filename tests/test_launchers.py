"""Every launcher is started with two ranks, and trains as `drivetrain train --procs 2` does."""

from __future__ import annotations

import contextlib
import signal
import socket
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
from tests.launching import STEPS, events, free_port, info, is_training, losses, only_run, run, start, write_task
from tests.patience import until

TRAIN = ("train", "small.py")
MODULE = ("drivetrain", *TRAIN)
LOCAL = "127.0.0.1"
ONE_THREAD = "plan.threads=1"  # for ranks that do not know that they share this machine


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of two processes that drivetrain itself started."""
    folder = write_task(tmp_path_factory.mktemp("own"))
    run("drivetrain", *TRAIN, "--procs", 2, folder=folder)
    return only_run(folder)


@pytest.fixture
def task(tmp_path: Path) -> Path:
    return write_task(tmp_path / "a folder")


def check_same(mine: Path, own: Path, launcher: str | None) -> None:
    assert info(mine)["status"] == "finished"
    assert losses(mine) == pytest.approx(losses(own), rel=1e-6)
    begun = events(mine, "started")[-1]
    assert (begun["world_size"], begun.get("launcher")) == (2, launcher)


def check_one_machine(mine: Path, own: Path) -> None:
    """The launcher's processes share the cores: the plan is the one of --procs 2."""
    plan, expected = info(mine)["plan"], info(own)["plan"]
    assert (plan["nodes"], plan["threads"]) == (1, expected["threads"])


def test_torchrun_and_a_stop_from_which_the_repeated_command_goes_on(task: Path, own: Path) -> None:
    command = ("torchrun", "--nproc-per-node", 2, "--master-port", free_port(), "-m", *MODULE)
    with start(*command, folder=task, NAP=0.1) as torchrun:
        until(lambda: is_training(task), "some steps")
        rank_1 = next(p for p in torchrun.children() if p.environ().get("RANK") == "1")
        rank_1.send_signal(signal.SIGTERM)
        assert torchrun.wait() != 0
    stopped = only_run(task)
    assert info(stopped)["outcome"] == "preempted"
    at = events(stopped, "checkpoint")[-1]["step"]
    assert 3 <= at < STEPS

    output = run(*command, folder=task)
    assert "continuing small-001" in output
    assert [event["step"] for event in events(stopped, "resumed")] == [at]
    check_same(only_run(task), own, "torchrun")
    check_one_machine(only_run(task), own)


def test_accelerate_with_two_processes_and_accumulation(task: Path, own: Path) -> None:
    flags = ("--multi_gpu", "--num_processes", 2, "--num_machines", 1, "--mixed_precision", "no", "--dynamo_backend", "no")
    output = run(
        "accelerate", "launch", *flags, "--main_process_port", 0, "-m", *MODULE,
        folder=task, HF_HOME=task, ACCELERATE_GRADIENT_ACCUMULATION_STEPS=2,
    )  # fmt: skip
    assert "plan.accumulation=2, from accelerate launch (the global batch stays 32)" in output
    check_same(only_run(task), own, "accelerate")
    check_one_machine(only_run(task), own)
    plan = info(only_run(task))["plan"]
    assert (plan["accumulation"], plan["micro_batch"], plan["precision"]) == (2, 8, "fp32")


def test_accelerate_on_a_cpu_starts_one_process_and_a_notice_says_so(task: Path, own: Path) -> None:
    flags = ("--cpu", "--num_processes", 2, "--mixed_precision", "bf16")
    output = run("accelerate", "launch", *flags, "-m", *MODULE, folder=task, HF_HOME=task)
    assert "accelerate launch started one process" in output
    assert "precision=bf16, from accelerate launch" in output
    plan = info(only_run(task))["plan"]
    assert (plan["world_size"], plan["precision"]) == (1, "bf16")
    assert losses(only_run(task)) == pytest.approx(losses(own), rel=0.05)


def test_deepspeed(task: Path, own: Path) -> None:
    """Its launcher puts --local_rank=N between `drivetrain` and its verb."""
    run("deepspeed", "--num_gpus", 2, "--master_port", free_port(), "--module", *MODULE, folder=task, DS_ACCELERATOR="cpu")
    check_same(only_run(task), own, "deepspeed")
    check_one_machine(only_run(task), own)


# --- a PyTorchJob's environment ----------------------------------------------------------------


@contextlib.contextmanager
def pods(folder: Path, **variables: object) -> Iterator[list[Any]]:
    """Starts what the training operator starts: one process a pod, with these four variables and no LOCAL_RANK."""
    common = {"MASTER_ADDR": LOCAL, "MASTER_PORT": free_port(), "WORLD_SIZE": 2} | variables
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(start("drivetrain", *TRAIN, ONE_THREAD, folder=folder, RANK=rank, **common)) for rank in (0, 1)]


def test_the_environment_of_a_pytorchjob(task: Path, own: Path) -> None:
    with pods(task) as (first, second):
        assert "2 processes, started by the environment" in first.succeed()
        assert second.succeed() == "", "only rank 0 prints"
    check_same(only_run(task), own, "the environment (RANK, WORLD_SIZE)")


def test_the_run_ends_with_the_cause_even_if_another_rank_failed(task: Path) -> None:
    with pods(task, FAIL=1) as (first, second):
        assert (first.wait(), second.wait()) == (1, 1)
        assert "the fifth batch is bad" in first.output
    ended = info(only_run(task))
    assert ended["outcome"] == "user-error"
    assert "the fifth batch is bad" in ended["message"]


def test_a_worker_that_waits_for_the_others_ends_on_ctrl_c(task: Path) -> None:
    port = free_port()
    with start("drivetrain", *TRAIN, folder=task, RANK=0, WORLD_SIZE=2, MASTER_ADDR=LOCAL, MASTER_PORT=port) as alone:
        process = psutil.Process(alone.process.pid)
        until(lambda: any(c.laddr.port == port for c in process.net_connections() if c.status == "LISTEN"), "a store that listens")
        alone.process.send_signal(signal.SIGINT)
        assert alone.wait(5) != 0
    assert not (task / "runs").exists()


# --- two machines by hand ----------------------------------------------------------------------


@contextlib.contextmanager
def start_on_two_machines(*folders: Path, port: int, **variables: object) -> Iterator[list[Any]]:
    """Starts the same command on each machine; the second after the first listens."""
    command = ("drivetrain", *TRAIN, ONE_THREAD, "--nodes", 2, "--rendezvous", f"{LOCAL}:{port}")
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(start(*command, folder=folders[0], **variables))
        until(lambda: "waiting at" in first.output, "a machine that waits")
        yield [first, stack.enter_context(start(*command, folder=folders[1], **variables))]


def test_two_machines_with_a_shared_folder(task: Path, own: Path) -> None:
    with start_on_two_machines(task, task, port=free_port()) as (first, second):
        assert "2 of 2 machines have joined" in first.succeed()
        second.succeed()
    check_same(only_run(task), own, None)
    assert info(only_run(task))["plan"]["nodes"] == 2


def test_two_machines_without_one_stop_and_go_on(task: Path, own: Path, tmp_path: Path) -> None:
    """Only the first machine has the run; the second gets its state from there."""
    other, port = write_task(tmp_path / "another folder"), free_port()
    with start_on_two_machines(task, other, port=port, NAP=0.1) as (first, second):
        until(lambda: is_training(task), "some steps")
        second.process.send_signal(signal.SIGTERM)
        assert (first.wait(), second.wait()) == (200, 200)
    assert info(only_run(task))["outcome"] == "preempted"
    with start_on_two_machines(task, other, port=port) as (first, second):
        assert "continuing small-001" in first.succeed()
        second.succeed()
    assert len(events(only_run(task), "resumed")) == 1
    check_same(only_run(task), own, None)
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
    until(lambda: any("waiting at" in text for text in notices), "a machine that waits")
    with pytest.raises(Problem, match=f"the run at {LOCAL}:{port} rejected this machine: another task, code or settings"):
        join({"seed": 1})
    until(lambda: any("rejected" in text and ": another task" in text for text in notices), "a notice")
    join({"seed": 0})
    first.join(5)
    assert sorted(ranks) == [0, 1]


def test_processes_of_one_machine_listen_on_loopback_only(task: Path) -> None:
    with start("drivetrain", *TRAIN, "--procs", 2, folder=task, NAP=0.1) as training:
        until(lambda: is_training(task), "some steps", of=training.process)
        sockets = [(process.pid, s.laddr.ip) for process in training.children() for s in listening(process)]
    assert len({pid for pid, _ in sockets}) == 2, "torch's store and gloo listen"
    assert {address for _, address in sockets} == {LOCAL}, sockets


def listening(process: psutil.Process) -> list[Any]:
    return [connection for connection in process.net_connections() if connection.status == "LISTEN"]


# --- ports that are taken ----------------------------------------------------------------------


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


def test_a_master_port_that_is_taken(task: Path) -> None:
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
