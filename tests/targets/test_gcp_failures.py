"""What gcloud and terraform print when they fail (in `outputs/`: written by the programs, or reported to their makers), and the line that a user gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from drivetrain.outcomes import Outcome
from drivetrain.targets.gcp.failures import NoCapacity, explain_cloud

OUTPUTS = Path(__file__).with_name("outputs")
EXPECTED = {
    "gcloud-no-login": "gcloud has no login on this machine: gcloud auth login && gcloud auth application-default login",
    "gcloud-no-default-login": "Terraform has no login on this machine: gcloud auth application-default login",
    "terraform-no-login": "Terraform has no login on this machine: gcloud auth application-default login",
    "gcloud-reauthentication": "the login to Google Cloud has expired: gcloud auth login",
    "terraform-reauthentication": "the login to Google Cloud has expired: gcloud auth login",
    "gcloud-quota": "the quota GPUS_ALL_REGIONS of the project demo-project is 0.0 (globally): ask for more at https://console.cloud.google.com/iam-admin/quotas",
    "terraform-quota": "the quota CPUS_PER_VM_FAMILY of the project demo-project is 176.0 (us-central1): ask for more",
    "gcloud-capacity": "europe-west4-a has no machine of this kind at present",
    "terraform-capacity": "us-central1-a has no machine of this kind at present",
    "terraform-api-off": "the API compute.googleapis.com is off in the project demo-project: gcloud services enable compute.googleapis.com --project=demo-project",
    "gcloud-billing": "the project demo-project has no billing account: link one at https://console.cloud.google.com/billing/linkedaccount?project=demo-project",
    "terraform-permission": "your account lacks the permission compute.zones.get in the project demo-project: ask its owner for the role Compute Admin",
    "terraform-bucket": "the bucket of Terraform's state does not exist: gcloud storage buckets create gs://BUCKET --project=demo-project",
    "terraform-bucket-access": "your account lacks the permission storage.objects.list in the project demo-project: ask its owner for the role Storage Admin (roles/storage.admin)",
    "terraform-lock": "lock of me@laptop): wait for it; if it was killed: terraform -chdir=/state force-unlock 6b0d573a-20f8-40da-1ac1-f90ad1c8c1e3",
    "terraform-registry": "Terraform cannot load Google's provider from its registry: is the network up?",
    "terraform-variable": "Terraform refuses a setting of the target: The zone europe-west4-a is not in the region us-central1: change zone or region (traffic",
}
PASSING = {"gcloud-capacity", "terraform-capacity", "terraform-lock", "terraform-registry"}
"""What may be over when the command is repeated."""


@pytest.mark.parametrize("name", EXPECTED)
def test_known_output_names_the_fix(name: str) -> None:
    text = (OUTPUTS / f"{name}.txt").read_text()
    problem = explain_cloud(name.partition("-")[0], text, 1, "demo-project", Path("/state"))
    assert EXPECTED[name] in str(problem)
    assert "\n" not in str(problem)
    assert problem.outcome is (Outcome.INFRA if name in PASSING else Outcome.USAGE)
    assert isinstance(problem, NoCapacity) == ("capacity" in name)


def test_every_output_is_expected() -> None:
    assert {path.stem for program in ("gcloud", "terraform") for path in OUTPUTS.glob(f"{program}-*")} == set(EXPECTED)


def test_unknown_output_is_shown() -> None:
    text = "╷\n│ Warning: Something else\n╵\n╷\n│ Error: a new \x1b[31mfault\n│\n│   with x\n╵\n"
    assert str(explain_cloud("terraform", text, 1, "p")) == "terraform: Error: a new fault"
    assert str(explain_cloud("gcloud", "", 3, "p")) == "gcloud: it ended with code 3"


@pytest.mark.parametrize(("text", "expected"), [
    ("Error: Error creating instance: googleapi: Error 409: The resource 'projects/p/zones/z/instances/dt-master' already exists, alreadyExists", "drivetrain down --orphans"),
    ("Error: Error resolving image name 'debian-cloud/debian-99': Could not find image or family debian-cloud/debian-99", "the image debian-cloud/debian-99"),
    ("ERROR: (gcloud.compute.instances.list) Some requests did not succeed:\n - The resource 'projects/nowhere' was not found", "there is no project nowhere"),
    ("googleapi: Error 404: The resource 'projects/p/zones/europe-west1-b/acceleratorTypes/nvidia-tesla-t9' was not found", "the zone has no nvidia-tesla-t9"),
    ("googleapi: Error 403: Permission 'iam.serviceAccounts.create' denied on resource (or it may not exist)., forbidden", "the role Service Account Admin (roles/iam.serviceAccountAdmin)"),
    ("Required 'iam.serviceAccounts.actAs' permission for 'x'", "the role Service Account User (roles/iam.serviceAccountUser)"),
    ("Permission 'artifactregistry.repositories.create' denied on resource", "the role Artifact Registry Administrator"),
    ("Permission 'serviceusage.services.enable' denied", "the role Service Usage Admin"),
    ("googleapi: Error 403: The caller does not have permission, forbidden", "the roles Compute Admin (roles/compute.admin), Service Account User (roles/iam.serviceAccountUser), Service Account Admin"),
    ("Permission 'spanner.x' denied", "Storage Admin (roles/storage.admin), Artifact Registry Administrator (roles/artifactregistry.admin), Service Usage Admin"),
    ("googleapi: Error 409: Service account dt-vm-gcp already exists within project projects/p., alreadyExists", "(Service account dt-vm-gcp already exists within project projects/p): `drivetrain down --orphans`"),
    ("dial tcp: lookup compute.googleapis.com on 127.0.0.53:53: no such host", "Google Cloud cannot be reached: is the network up?"),
])  # fmt: skip
def test_other_failures(text: str, expected: str) -> None:
    """Texts in the form of the programs, which no report has word by word."""
    assert expected in str(explain_cloud("terraform", text, 1, "demo-project"))
