"""infra/gcp with the real terraform: format, validity, its own tests, and what its plans contain and refuse."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.machine_scripts import compose
from tests.system.terraform import INFRA, Terraform, copy_of_infra, resources

MACHINE = "google_compute_instance"
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIExample me@here"
L4_SPOT = {"accelerator_type": "nvidia-l4", "gpu_machine_type": "g2-standard-48", "spot": True, "num_workers": 3}
BUILDS = {"cloud_build_user": "someone@example.com", "billing_account": "012345-6789AB-CDEF01", "budget_amount": 20}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "cpu": {"use_gpu": False},
    "t4 x 2": {"gpus_per_machine": 2, "gpu_machine_type": "n1-standard-8", "ssh_public_key": KEY},
    "l4 x 4, spot": L4_SPOT,
    "mixed zones": {"zones": ["us-central1-a", "us-central1-f"], "num_workers": 2, "max_run_minutes": 60} | BUILDS,
}
WITHOUT_LABELS = {
    "google_compute_firewall", "google_compute_network", "google_compute_subnetwork", "google_service_account",
}  # fmt: skip
"""Their description has the deployment instead."""
GRANTS = {
    "google_project_service", "google_project_iam_member", "google_storage_bucket_iam_member", "google_service_account_iam_member",
    "google_artifact_registry_repository_iam_member", "google_billing_budget",
}  # fmt: skip
"""They have neither; they cost nothing, and end with what they belong to."""


@pytest.fixture(scope="module")
def terraform(tmp_path_factory: pytest.TempPathFactory) -> Terraform:
    return copy_of_infra(tmp_path_factory.mktemp("terraform") / "gcp")


def test_format_and_validity(terraform: Terraform) -> None:
    terraform.run("fmt", "-check", "-recursive", "-diff")
    assert "The configuration is valid" in terraform.run("validate", "-no-color")


def test_validity_with_the_backend(tmp_path: Path) -> None:
    """With backend.tf too, which a plan without a bucket cannot have."""
    folder = copy_of_infra(tmp_path / "gcp")
    (folder.folder / "backend.tf").write_text((INFRA / "backend.tf").read_text())
    assert "The configuration is valid" in folder.run("validate", "-no-color")
    sample = (INFRA / "backend.tfvars.sample").read_text()
    assert set(re.findall(r"^(\w+) *=", sample, re.MULTILINE)) == {"bucket", "prefix"}


def test_its_own_tests(terraform: Terraform) -> None:
    (terraform.folder / "terraform.tfvars.json").unlink(missing_ok=True)
    output = terraform.run("test", "-no-color")
    passed = re.search(r"Success! (\d+) passed, 0 failed", output)
    assert passed and int(passed[1]) >= 25, output


def test_the_sample_of_variables_is_valid(terraform: Terraform) -> None:
    """Also with all of its lines, those behind # as well."""
    sample = (INFRA / "terraform.tfvars.sample").read_text().replace("AAAA...", "AAAAC3NzaC1lZDI1NTE5AAAAIExample")
    everything = re.sub(r"^# (?=\w+ +=)", "", sample, flags=re.MULTILINE)
    names = re.findall(r"^(\w+) *=", everything, re.MULTILINE)
    values = dict(re.findall(r"^(\w+) *= (.*?)(?: #.*)?$", everything, re.MULTILINE))  # a later line of the same name counts
    (terraform.folder / "terraform.tfvars.json").unlink(missing_ok=True)
    for text in (sample, "\n".join(f"{name} = {value}" for name, value in values.items())):
        (terraform.folder / "terraform.tfvars").write_text(text)
        terraform.run("plan", "-no-color", "-input=false")
    (terraform.folder / "terraform.tfvars").unlink()
    assert set(names) <= set(re.findall(r'variable "(\w+)"', (INFRA / "variables.tf").read_text()))


GUIDE_OUTPUTS = ("project_id", "region", "zone", "master_zone", "worker_zone", "use_gpu", "master_ip", "worker_ip", "master_internal_ip", "model_bucket",
                 "inference_url")  # fmt: skip
"""What guide 000's scripts read with `terraform output`."""


def test_the_guides_scripts_can_read_their_outputs(terraform: Terraform) -> None:
    outputs = terraform.plan(num_workers=1)["output_changes"]
    assert set(GUIDE_OUTPUTS) <= set(outputs)
    assert outputs["inference_url"]["after"] == "", "with null, `terraform output inference_url` would fail"


@pytest.mark.parametrize("variables", CONFIGURATIONS.values(), ids=CONFIGURATIONS.keys())
@pytest.mark.parametrize("deployment", ["default", "exp-7"])
def test_everything_can_be_found_by_its_deployment(terraform: Terraform, variables: dict[str, Any], deployment: str) -> None:
    plan = terraform.plan(**variables, deployment=deployment)
    for entry in plan["planned_values"]["root_module"]["resources"]:
        values, address = entry["values"], entry["address"]
        if entry["type"] in WITHOUT_LABELS:
            assert values["description"] == f"drivetrain={deployment}", address
        elif entry["type"] not in GRANTS:
            assert values["labels"]["drivetrain"] == deployment, address
        for name in (values.get("name"), values.get("account_id"), values.get("repository_id")):
            if name and entry["type"] not in GRANTS and deployment != "default":
                assert name.endswith(f"-{deployment}"), address
    for address, machine in resources(plan, MACHINE).items():
        assert machine["boot_disk"][0]["initialize_params"][0]["labels"] == {"drivetrain": deployment}, address
        assert machine["boot_disk"][0]["initialize_params"][0]["image"] == "debian-cloud/debian-12"
        assert machine["tags"] == ["distributed-training"]


@pytest.mark.parametrize("variables", CONFIGURATIONS.values(), ids=CONFIGURATIONS.keys())
def test_only_ssh_is_open(terraform: Terraform, variables: dict[str, Any]) -> None:
    rules = resources(terraform.plan(**variables, ssh_source_ranges=["203.0.113.7/32"]), "google_compute_firewall")
    outside = [rule for rule in rules.values() if rule["source_ranges"]]
    inside = [rule for rule in rules.values() if not rule["source_ranges"]]
    assert [(rule["source_ranges"], rule["allow"]) for rule in outside] == [(["203.0.113.7/32"], [{"protocol": "tcp", "ports": ["22"]}])]
    assert len(inside) == 1
    assert {(allowed["protocol"], allowed["ports"]) for allowed in inside[0]["allow"]} == {("tcp", None), ("udp", None), ("icmp", None)}
    assert len(inside[0]["source_service_accounts"]) == 1  # the machines' own
    default = resources(terraform.plan(**variables), "google_compute_firewall")
    assert [rule["source_ranges"] for rule in default.values() if rule["source_ranges"]] == [["35.235.240.0/20"]], "Google's proxy"
    closed = resources(terraform.plan(**variables, ssh_source_ranges=[]), "google_compute_firewall")
    assert [rule["source_ranges"] for rule in closed.values()] == [None]


def test_spot_machines(terraform: Terraform) -> None:
    machines = resources(terraform.plan(**L4_SPOT, max_run_minutes=90), MACHINE)
    assert len(machines) == 4
    for machine in machines.values():
        assert machine["machine_type"] == "g2-standard-48" and machine["guest_accelerator"] == []
        scheduling = machine["scheduling"][0]
        assert {name: scheduling[name] for name in ("provisioning_model", "preemptible", "automatic_restart", "on_host_maintenance")} == {
            "provisioning_model": "SPOT", "preemptible": True, "automatic_restart": False, "on_host_maintenance": "TERMINATE",
        }  # fmt: skip
        assert scheduling["instance_termination_action"] == "STOP"
        assert [limit["seconds"] for limit in scheduling["max_run_duration"]] == [5400]
    ordinary = resources(terraform.plan(use_gpu=False), MACHINE)
    assert all(machine["scheduling"][0]["instance_termination_action"] is None for machine in ordinary.values())


def test_what_a_machine_may_do(terraform: Terraform) -> None:
    plan = terraform.plan(**BUILDS)
    roles = {
        values["role"]
        for kind in ("google_project_iam_member", "google_storage_bucket_iam_member", "google_artifact_registry_repository_iam_member")
        for address, values in resources(plan, kind).items()
        if ".machine[" in address
    }
    assert roles == {"roles/storage.objectUser", "roles/artifactregistry.reader"}
    bucket = next(iter(resources(plan, "google_storage_bucket").values()))
    assert bucket["public_access_prevention"] == "enforced" and bucket["force_destroy"] is False


def test_without_machines_only_the_bucket_and_the_images_stay(terraform: Terraform) -> None:
    plan = terraform.plan(enable_gcp_backend=False)
    kinds = {entry["type"] for entry in plan["planned_values"]["root_module"]["resources"]}
    assert kinds == {"google_project_service", "google_storage_bucket", "google_artifact_registry_repository"}


REFUSALS = {
    "nvidia-l4 on n1": (
        {"accelerator_type": "nvidia-l4"},
        "n1-standard-4 cannot have a nvidia-l4. gpu_machine_type must be one of: g2-standard-12 (1)",
    ),
    "T4 on g2": ({"gpu_machine_type": "g2-standard-4"}, "gpu_machine_type must be one of: n1-standard-N, n1-highmem-N or n1-highcpu-N."),
    "wrong count": (
        {"accelerator_type": "nvidia-l4", "gpu_machine_type": "g2-standard-48", "gpus_per_machine": 2},
        "g2-standard-48 has 4 nvidia-l4, not 2. Leave gpus_per_machine away, or choose among g2-standard-12 (1)",
    ),
    "three T4": ({"gpus_per_machine": 3}, "A machine can have 1 or 2 or 4 nvidia-tesla-t4, not 3."),
    "too many cores": (
        {"accelerator_type": "nvidia-tesla-v100", "gpu_machine_type": "n1-standard-32"},
        "n1-standard-32 has too many vCPUs for 1 nvidia-tesla-v100: at most 12.",
    ),
    "zone": ({"zone": "us-central1-d"}, "us-central1-d has no nvidia-tesla-t4. It is in us-central1-a, us-central1-b"),
    "zones": (
        {"zones": ["us-central1-d", "us-central1-a"]},
        "us-central1-d has no nvidia-tesla-t4. In us-central1 it is in: us-central1-a, us-central1-b, us-central1-c, us-central1-f.",
    ),
    "region": ({"zone": "europe-west4-a"}, "The zone europe-west4-a is not in the region us-central1: change zone or region"),
    "unknown": ({"accelerator_type": "nvidia-rtx-4090"}, "accelerator_type must be one of nvidia-a100-80gb, nvidia-l4,"),
}


@pytest.mark.parametrize(("variables", "message"), REFUSALS.values(), ids=REFUSALS.keys())
def test_refusals_name_what_is_right(terraform: Terraform, variables: dict[str, Any], message: str) -> None:
    assert message in terraform.refusal(**variables)


def test_every_gpu_has_a_machine_type_and_a_zone(terraform: Terraform) -> None:
    """Each entry of the tables in gpus.tf can be planned."""
    text = (INFRA / "gpus.tf").read_text()
    gpus = re.findall(r'^    "?(nvidia[\w-]+)"? += \[', text, re.MULTILINE)
    assert len(gpus) == 7
    types = {"nvidia-l4": "g2-standard-8", "nvidia-tesla-a100": "a2-highgpu-1g", "nvidia-a100-80gb": "a2-ultragpu-1g"}
    for gpu in gpus:
        zone = re.search(rf'"{gpu}" += \[\s*"([\w-]+)"', text)
        assert zone is not None
        plan = terraform.plan(
            accelerator_type=gpu,
            gpu_machine_type=types.get(gpu, "n1-standard-4"),
            zone=zone[1],
            region=zone[1].rpartition("-")[0],
            num_workers=0,
        )
        assert len(resources(plan, MACHINE)) == 1


@pytest.mark.parametrize("spot", [False, True])
def test_the_scripts_are_those_that_their_tests_run(terraform: Terraform, spot: bool) -> None:
    settings = {
        "use_gpu": True,
        "gpus_per_machine": 2,
        "gpu_machine_type": "n1-standard-8",
        "idle_minutes": 30,
        "ssh_user": "me",
        "spot": spot,
    }
    machines = resources(terraform.plan(**settings), MACHINE)
    scripts = compose(use_gpu=True, num_gpus=2, idle_minutes=30, ssh_user="me", save_seconds=25 if spot else 80)
    for machine in machines.values():
        assert machine["metadata"]["startup-script"] == scripts["startup"]
        assert machine["metadata"]["shutdown-script"] == scripts["save"]
        assert all(len(text) < 256 * 1024 for text in machine["metadata"].values())  # Google's limit
        assert "ssh-keys" not in machine["metadata"]


def test_ssh_key(terraform: Terraform) -> None:
    machine = resources(terraform.plan(ssh_public_key=f"{KEY}\n"), MACHINE)['google_compute_instance.machine["dt-master"]']
    assert machine["metadata"]["ssh-keys"] == f"drivetrain:{KEY}"
    assert machine["metadata"]["block-project-ssh-keys"] == "TRUE"


def test_nothing_of_terraform_s_own_is_tracked() -> None:
    """The folder can be a part of the package: plain files only."""
    tracked = subprocess.run(["git", "ls-files", "-s", str(INFRA)], capture_output=True, text=True, cwd=INFRA).stdout.splitlines()
    assert tracked
    assert all(line.startswith("100644") for line in tracked)
    assert not [line for line in tracked if re.search(r"\.terraform|tfstate|\.tfvars$", line)]
