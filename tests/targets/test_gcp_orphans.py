"""Crashes of `up` and `down` on Google Cloud: what they leave behind is found, named and deleted."""

from __future__ import annotations

import json
import re
import signal
import subprocess

import pytest

from tests.command import COMMAND, environment, run_drivetrain
from tests.targets.stand_in_cloud import PROGRAMS, StandInCloud

NOUNS = {"machine": "machine", "disk": "disk", "firewall": "firewall rule", "subnetwork": "subnetwork", "network": "network", "account": "service account",
         "bucket": "bucket", "repository": "image repository"}  # fmt: skip
"""The kinds of resources that infra/gcp makes, and their names in messages."""
OFF = "ERROR: (gcloud.artifacts.repositories.list) PERMISSION_DENIED: Artifact Registry API has not been used in project demo-project before or it is disabled. Enable it by visiting https://console.developers.google.com/apis/api/artifactregistry.googleapis.com/overview?project=demo-project\n"


def unknown_to_terraform(cloud: StandInCloud) -> set[str]:
    """Returns what exists in the project, but not in Terraform's state; a disk goes with its machine."""
    path = cloud.state / "terraform.tfstate"
    known = {values["name"] for values in json.loads(path.read_text()).values()} if path.exists() else set()
    machines = {entry["name"] for entry in cloud.resources if entry["kind"] == "machine"}
    left = [
        entry for entry in cloud.resources if entry["name"] not in known and not (entry["kind"] == "disk" and entry["name"] in machines)
    ]
    return {f"{NOUNS[entry['kind']]} {entry.get('email') or entry['name']}" for entry in left}


def listed(cloud: StandInCloud) -> set[str]:
    """Returns what `down --orphans` lists; it deletes nothing, because nobody can be asked."""
    done = run_drivetrain("down", "gcp", "--orphans", **cloud.variables)
    assert done.returncode == (2 if "removing needs --yes" in done.stderr else 0), done.stdout + done.stderr
    assert ("a crash left nothing behind" in done.stdout) == (done.returncode == 0)
    return set(re.findall(r"^gcp +(.+?)$", done.stdout, re.MULTILINE))


def count_commands(cloud: StandInCloud) -> int:
    cloud.run("up", "gcp", "--yes")
    number = len(cloud.calls)
    cloud.run("down", "gcp", "--yes")
    return number


@pytest.mark.system  # for its length
def test_after_a_crash_at_every_stage_nothing_is_lost(cloud: StandInCloud) -> None:
    """Kills `up` after each of its commands. What is in no state of Terraform is listed as an orphan; what is, is continued by `up`."""
    number = count_commands(cloud)
    assert number >= 8
    for stage in range(1, number + 1):
        for path in ("cloud.json", "calls.jsonl"):
            (cloud.folder / path).unlink(missing_ok=True)
        cloud.inject(kill_after=stage)
        done = subprocess.run(
            [*COMMAND, "up", "gcp", "--yes"], capture_output=True, text=True, env=environment(**cloud.variables), stdin=subprocess.DEVNULL
        )
        assert done.returncode == -signal.SIGKILL, f"stage {stage} of {number}: {done.stdout}{done.stderr}"
        cloud.inject()
        assert listed(cloud) == unknown_to_terraform(cloud), f"stage {stage} of {number}"
        assert "gcp is up" in cloud.run("up", "gcp", "--yes")
        names = [(entry["kind"], entry["name"]) for entry in cloud.resources]
        assert len(names) == len(set(names)) == 11
        cloud.run("down", "gcp", "--yes")
        assert not cloud.resources


@pytest.mark.system  # for its length
@pytest.mark.parametrize("kind", NOUNS)
def test_a_crash_while_a_resource_is_made(cloud: StandInCloud, kind: str) -> None:
    """Terraform is killed when the resource exists, but is not in its state yet."""
    cloud.inject(kill_in_apply=kind)
    assert "what was made so far may cost money" in cloud.run("up", "gcp", "--yes", code=201)
    cloud.inject()
    (orphan,) = unknown_to_terraform(cloud)
    assert orphan.startswith(f"{NOUNS[kind]} ") and orphan.partition("@")[0].endswith("-gcp")
    assert listed(cloud) == {orphan}
    assert re.search("drivetrain down (gcp )?--orphans", cloud.run("up", "gcp", "--yes", code=2)), "a repeated `up` says where to look"
    assert f"deleted {orphan}" in cloud.run("down", "--orphans", "--yes")
    assert listed(cloud) == unknown_to_terraform(cloud) == set()
    assert "gcp is up" in cloud.run("up", "gcp", "--yes")
    cloud.run("down", "gcp", "--yes")
    assert not cloud.resources


def test_orphans_are_found_when_the_state_is_lost(cloud: StandInCloud) -> None:
    cloud.run("up", "gcp", "--yes")
    subprocess.run(["rm", "-r", str(cloud.state)], check=True)
    assert "drivetrain down gcp --orphans" in cloud.run("down", "gcp", "--yes", code=2)
    facts = json.loads((cloud.folder / "cloud.json").read_text())
    others = [{"kind": "machine", "name": "dt-master-other", "id": "1", "zone": "us-central1-a", "status": "RUNNING", "spot": False, "address": "", "internal": "",
               "started": "2026-01-01T00:00:00.000-07:00", "labels": {"drivetrain": "other"}}]  # fmt: skip
    (cloud.folder / "cloud.json").write_text(json.dumps(facts | {"resources": facts["resources"] + others}))
    output = cloud.run("down", "gcp", "--orphans", "--yes")
    for text in (
        "machine dt-master-gcp",
        "machine dt-worker-gcp",
        "network dt-network-gcp",
        "subnetwork dt-subnet-gcp",
        "firewall rule dt-between-machines-gcp",
        "firewall rule dt-ssh-gcp",
        "service account dt-vm-gcp@demo-project.iam.gserviceaccount.com",
        "image repository drivetrain-gcp",
        "bucket demo-project-distributed",
    ):
        assert f"deleted {text}" in output
    assert [entry["name"] for entry in cloud.resources] == ["dt-master-other"], "the machines of another deployment are left alone"


def test_an_api_that_is_off_has_no_orphans(cloud: StandInCloud) -> None:
    """`up` switches the APIs on. If it was killed before that, its orphans are still found."""
    cloud.inject(kill_in_apply="account")
    cloud.run("up", "gcp", "--yes", code=201)
    cloud.inject(fail={"gcloud artifacts repositories list": {"err": OFF}})
    assert listed(cloud) == {"service account dt-vm-gcp@demo-project.iam.gserviceaccount.com"}


def test_a_cloud_that_does_not_answer_is_no_empty_one(cloud: StandInCloud) -> None:
    """After an expired login nothing is known of orphans; the other targets are still looked at."""
    expired = {"gcloud compute": {"err": PROGRAMS.with_name("outputs").joinpath("gcloud-reauthentication.txt").read_text()}}
    cloud.inject(fail=expired)
    output = cloud.run("down", "--orphans", code=201)
    assert "gcp: the login to Google Cloud has expired: gcloud auth login" in output
    assert "what a crash left on gcp is not known" in output and "left nothing behind" not in output
    cloud.inject()
    assert "a crash left nothing behind" in cloud.run("down", "--orphans")


def test_a_bucket_with_files_is_kept_and_named(cloud: StandInCloud) -> None:
    cloud.run("up", "gcp", "--yes")
    cloud.change_machine("demo-project-distributed-training-gcp", num_files=3)
    assert "gcloud storage rm -r gs://demo-project-distributed-training-gcp deletes it" in cloud.run("down", "gcp", "--yes")
    assert [entry["kind"] for entry in cloud.resources] == ["bucket"]
