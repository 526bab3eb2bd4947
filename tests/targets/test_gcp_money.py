"""`--max-cost` from `up` to `down`: the run saves before Google stops its machine, or when it does, and nothing that costs money stays."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from drivetrain.targets.gcp.target import SAVE_SECONDS
from tests.command import run_drivetrain, write_task
from tests.machine_scripts import StandInMachine
from tests.targets.cloud_programs import timestamp
from tests.targets.stand_in_cloud import StandInCloud

SETTINGS = ("epochs=1000", "save_every=1000000", "plan.threads=1", "plan.compile=off")
MASTER = "dt-master-gcp"


def up_with_limit(cloud: StandInCloud, seconds_left: float) -> None:
    """Makes a machine with --max-cost, and lets its time go by until only so much is left."""
    write_task("slow.py", ("def augment(self, batch, rand):", "def augment(self, batch, rand):\n        import time; time.sleep(0.1)"))
    cloud.write_target(nodes=1, device="cpu")
    output = cloud.run("up", "gcp", "--yes", "--max-cost", "20")
    assert "then $5.00 a month for the disks, which stay until `drivetrain down`" in output
    cloud.change_machine(MASTER, ends=timestamp(time.time() + seconds_left))
    assert "Google stops it in" in cloud.run("up", "gcp"), "it looks again"


def google_stops(cloud: StandInCloud) -> None:
    cloud.change_machine(MASTER, status="TERMINATED", ends=timestamp(time.time() - 1))
    facts = json.loads((cloud.state / "machines.json").read_text())
    facts["machines"][0]["ends"] = time.time() - 1
    (cloud.state / "machines.json").write_text(json.dumps(facts))


@pytest.mark.system  # for its length
def test_a_run_saves_in_time_and_comes_here(cloud: StandInCloud) -> None:
    """Three minutes before the stop the run saves and ends, and --wait copies it. Then `down` removes also the disk."""
    up_with_limit(cloud, SAVE_SECONDS + 60)
    cloud.run("train", "slow.py", *SETTINGS, "--on", "gcp", "--name", "one", "--procs", "1", "--wait", code=200)
    (checkpoint,) = Path("runs/one/checkpoints").glob("step-*")
    assert int(checkpoint.name.removeprefix("step-")) > 0
    google_stops(cloud)
    assert {entry["kind"] for entry in cloud.resources} >= {"machine", "disk"}, "Google stops the machine; it and its disk stay"
    cloud.run("down", "gcp", "--yes")
    assert not cloud.resources and checkpoint.exists()


@pytest.mark.system  # for its length
def test_a_run_that_google_stops_saves_and_is_not_lost(cloud: StandInCloud, tmp_path: Path) -> None:
    """The machine's own script asks the run to save. `down` removes no disk with a run that is not here."""
    up_with_limit(cloud, 3600)
    cloud.run("train", "slow.py", *SETTINGS, "--on", "gcp", "--name", "one", "--procs", "1")
    home = cloud.folder / "machines" / MASTER
    deadline = time.monotonic() + 300
    while not run_drivetrain("logs", "one", **cloud.variables).stdout.count("loss"):
        assert time.monotonic() < deadline
        time.sleep(1)
    machine = StandInMachine(tmp_path / "machine", save_seconds=120)
    for pid in processes_of(home):
        machine.add_process(pid)
    machine.run("save", timeout=150)
    assert machine.console() == ["drivetrain: shutting down: asking 1 runs to save", "drivetrain: all runs have saved"]
    assert list(home.glob(".drivetrain/projects/*/runs/one/checkpoints/step-*"))
    google_stops(cloud)
    assert "was stopped at its time limit" in cloud.run("status", "one")
    assert "drivetrain up gcp, then drivetrain pull one" in cloud.run("down", "gcp", "--yes", code=201)
    assert "at most $20.0" in cloud.run("up", "gcp", "--yes", "--max-cost", "20"), "it asks again, and counts anew"
    cloud.run("down", "gcp", "--yes")
    assert list(Path("runs/one/checkpoints").glob("step-*")) and not cloud.resources


def processes_of(home: Path) -> list[int]:
    """Returns the processes of a machine: those that have its home folder in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"HOME={home}".encode() in path.read_bytes() and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found
