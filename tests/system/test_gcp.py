"""What `up gcp` writes, with the real terraform: infra/gcp accepts its variables, and its plan is read rightly."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from drivetrain.outcomes import Problem
from drivetrain.targets.gcp.deployment import PLAN, Deployment
from drivetrain.targets.gcp.machines import Machine, order_of
from drivetrain.targets.gcp.orphans import KINDS, owner_of
from drivetrain.targets.gcp.prices import cost_of
from drivetrain.targets.gcp.settings import ATTACHED, SPECIFIC, GcpSettings, terraform_variables
from drivetrain.targets.gcp.up import check_changes
from tests.system.terraform import CONFIGURATION, PROVIDER, copy_of_infra

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIExample me@here"
ZONES = {"nvidia-tesla-v100": "us-central1-a", "nvidia-tesla-p100": "us-central1-c"}


@pytest.fixture
def deployment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Deployment:
    terraform = copy_of_infra(tmp_path / "copy")
    configuration = tmp_path / "terraform.rc"
    configuration.write_text(CONFIGURATION % PROVIDER)
    monkeypatch.setenv("TF_CLI_CONFIG_FILE", str(configuration))
    monkeypatch.setenv("TF_SCHEMA_PYTHON", str(terraform.python))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return Deployment("my-project", "exp-7")


def write(deployment: Deployment, settings: GcpSettings, minutes: int = 0) -> None:
    deployment.write_configuration(terraform_variables(settings, deployment.project, deployment.name, KEY, minutes))


def planned(deployment: Deployment) -> list[dict[str, Any]]:
    """Returns the resources that the plan would make."""
    deployment.plan()
    facts = json.loads(deployment.cloud.terraform(deployment.folder, "show", "-json", PLAN).out)
    return list(facts["planned_values"]["root_module"]["resources"])


@pytest.mark.parametrize(
    ("gpu", "number"), [(gpu, number) for gpu, numbers in (ATTACHED | SPECIFIC).items() for number in (min(numbers), max(numbers))]
)
def test_each_gpu_is_accepted_and_has_a_price(deployment: Deployment, gpu: str, number: int) -> None:
    settings = GcpSettings(accelerator_type=gpu, gpus_per_machine=number, zone=ZONES.get(gpu, "us-central1-a"))
    write(deployment, settings)
    assert deployment.plan().new_machines == ("dt-master-exp-7",)
    assert cost_of(settings, None).hourly > 0.5


def test_a_plan_of_several_machines(deployment: Deployment) -> None:
    settings = GcpSettings(nodes=12, use_gpu=False, spot=True, zones=["us-central1-a", "us-central1-f"], budget_amount=20,
                           billing_account="012345-6789AB-CDEF01", ssh_source_ranges=["203.0.113.7/32"], cloud_build_user="me@example.com")  # fmt: skip
    write(deployment, settings, minutes=600)
    changes = deployment.plan()
    expected = ["dt-master-exp-7", "dt-worker-exp-7", *(f"dt-worker-{number}-exp-7" for number in range(2, 12))]
    assert sorted(changes.new_machines, key=order_of) == expected
    assert not changes.replaced_machines
    check_changes(changes, [], "gcp")
    with pytest.raises(Problem, match="dt-worker-7-exp-7 exists, but not in Terraform's state here"):
        check_changes(changes, [Machine("dt-worker-7-exp-7", "1", "us-central1-a")], "gcp")


def test_only_googles_proxy_reaches_the_machines_by_default(deployment: Deployment) -> None:
    """The firewall that the default settings make: port 22 for the proxy, all ports between the machines, and no more."""
    write(deployment, GcpSettings())
    rules = [row["values"] for row in planned(deployment) if row["type"] == "google_compute_firewall"]
    outside = [(rule["source_ranges"], rule["allow"]) for rule in rules if not rule["source_service_accounts"]]
    assert outside == [(["35.235.240.0/20"], [{"protocol": "tcp", "ports": ["22"]}])]
    assert len(rules) == 2


def test_what_is_made_can_be_found_as_an_orphan(deployment: Deployment) -> None:
    """Everything that the plan makes and that has a name is of a kind that `down --orphans` lists, and carries the deployment's name."""
    write(deployment, GcpSettings(nodes=2))
    rows = planned(deployment)
    nouns = {"google_compute_instance": "machine", "google_compute_firewall": "firewall rule", "google_compute_subnetwork": "subnetwork",
             "google_compute_network": "network", "google_service_account": "service account", "google_storage_bucket": "bucket",
             "google_artifact_registry_repository": "image repository"}  # fmt: skip
    grants = {"google_project_service", "google_storage_bucket_iam_member", "google_artifact_registry_repository_iam_member"}
    assert {row["type"] for row in rows} == set(nouns) | grants
    assert set(nouns.values()) | {"disk", "address"} == {kind.noun for kind in KINDS}
    for row in rows:
        if row["type"] in nouns:
            assert owner_of(row["values"]) == "exp-7", row["address"]


def test_a_refused_setting_is_one_line(deployment: Deployment) -> None:
    write(deployment, GcpSettings(zone="europe-north1-a"))
    with pytest.raises(Problem) as refusal:
        deployment.plan()
    assert "Terraform refuses a setting of the target: europe-north1-a has no nvidia-tesla-t4" in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_the_state_in_a_bucket(deployment: Deployment) -> None:
    """The backend's file is valid; without a login terraform gets as far as asking for one."""
    remote = dataclasses.replace(deployment, bucket="my-project-tfstate")
    write(remote, GcpSettings())
    with pytest.raises(Problem, match=r"Terraform has no login|cannot be reached"):
        remote.init()
    write(deployment, GcpSettings())
    assert not (deployment.folder / "backend.tf").exists()
