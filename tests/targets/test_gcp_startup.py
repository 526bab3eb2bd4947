"""`up` waits for the machines of Google Cloud: it reads their consoles through the driver's installation, and through restarts."""

from __future__ import annotations

import subprocess

import pytest

from drivetrain.outcomes import Problem
from drivetrain.targets.gcp import startup
from drivetrain.targets.gcp.machines import Machine
from tests.command import COMMAND, environment
from tests.targets.stand_in_cloud import StandInCloud

CONSOLE = [
    "SeaBIOS (version 1.8.2-google)\r\n[    9.1] google_metadata_script_runner[512]: startup-script: drivetrain: preparing this machine\r\n",
    "drivetrain: the GPU's driver (some minutes)\r\n",
    "drivetrain: restarting once, to load the GPU's driver\r\n[   99.0] reboot: Restarting system\r\n",
    "drivetrain: preparing this machine\r\ndrivetrain: checking the GPUs\r\n",
    "drivetrain: ready\r\n",
]


def test_progress_lines_of_a_console() -> None:
    console = startup.Console(Machine("dt-master", "1", "us-central1-a"))
    lines = [line for text in CONSOLE for line in console.take(text)]
    assert lines[0] == "preparing this machine" and lines[2] == "restarting once, to load the GPU's driver"
    assert console.is_ready
    console.take("drivetrain: preparing this machine\r\n")
    assert not console.is_ready, "it was restarted"
    with pytest.raises(Problem, match=r"E: Unable to fetch.*gcloud compute instances reset dt-master --zone=us-central1-a"):
        console.take("drivetrain: failed: packages: E: Unable to fetch some archives\r\n")


def test_up_waits_through_the_restart(cloud: StandInCloud) -> None:
    cloud.write_target(nodes=1)
    console = cloud.folder / "consoles" / "dt-master-gcp"
    console.write_text("".join(CONSOLE[:2]))
    process = subprocess.Popen([*COMMAND, "up", "gcp", "--yes"], stdout=subprocess.PIPE, text=True, env=environment(**cloud.variables))
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line.strip())
        if "some minutes" in line:
            console.write_text("".join(CONSOLE[:4]))
        if "checking the GPUs" in line:
            console.write_text("".join(CONSOLE))
    assert process.wait() == 0
    text = "\n".join(seen)
    assert text.count("the GPU's driver (some minutes)") == 1, "each line is shown once"
    assert text.index("restarting once") < text.index("checking the GPUs") < text.index("gcp is up")


def test_a_machine_that_is_not_ready_in_time(cloud: StandInCloud) -> None:
    cloud.write_target(nodes=1, start_minutes=0)
    (cloud.folder / "consoles" / "dt-master-gcp").write_text("".join(CONSOLE[:2]))
    output = cloud.run("up", "gcp", "--yes", code=201)
    assert "dt-master-gcp is not ready after 0 minutes; its last line: the GPU's driver (some minutes): repeat `drivetrain up`" in output
    assert "gcp has no machines: drivetrain up gcp" in cloud.run("train", "digits", "--on", "gcp", code=2)


FAILURE = "drivetrain: preparing this machine\r\ndrivetrain: failed: packages: E: Unable to fetch some archives\r\n"


def test_a_failure_from_before_a_restart_is_not_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user has restarted the machine, and repeats `up` at once: the console still ends with the old failure."""
    console = startup.Console(Machine("dt-master", "1", "us-central1-a"))
    lines = console.take(FAILURE)
    assert lines[-1] == "waiting 120 s for its restart (gcloud compute instances reset dt-master --zone=us-central1-a)"
    assert console.take("[    0.0] Linux version 6.1\r\n") == console.take("") == []
    assert console.take(CONSOLE[3]) == ["preparing this machine", "checking the GPUs"]
    assert console.take(CONSOLE[4]) == ["ready"] and console.is_ready
    again = startup.Console(Machine("dt-master", "1", "us-central1-a"))
    again.take(FAILURE + CONSOLE[3]), again.take(CONSOLE[4])
    assert again.is_ready, "the start after the failure counts"


def test_a_failure_counts_if_it_is_new_or_nothing_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(startup.time, "monotonic", lambda: clock[0])
    console = startup.Console(Machine("dt-master", "1", "us-central1-a"))
    console.take(FAILURE)
    with pytest.raises(Problem, match="could not be prepared"):
        console.take(FAILURE)  # the restart has failed too
    waiting = startup.Console(Machine("dt-master", "1", "us-central1-a"))
    waiting.take(FAILURE)
    clock[0] += startup.RESTART_SECONDS - 1
    assert waiting.take("") == []
    clock[0] += 2
    with pytest.raises(
        Problem, match=r"E: Unable to fetch some archives: restart it \(gcloud compute instances reset dt-master --zone=us-central1-a\)"
    ):
        waiting.take("")
