"""Images that Google Cloud Build makes: in which project, with which account, and what it costs."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from drivetrain.outcomes import Problem
from drivetrain.targets.base import Target
from drivetrain.targets.consent import Cost, Price
from drivetrain.targets.gcp.cloud import Cloud, default_project
from drivetrain.targets.gcp.prices import price_list
from drivetrain.targets.gcp.settings import check_project
from drivetrain.targets.gcp.target import GcpTarget

MAX_BUILD_HOURS = 1
REGISTRY = re.compile(r"(?:[a-z0-9-]+-docker\.pkg\.dev|(?:[a-z]+\.)?gcr\.io)/([a-z][a-z0-9-]+)/")
"""The beginning of an image's name in a registry of Google, which contains the project."""


@dataclass(frozen=True)
class Builder:
    """Who builds an image."""

    project: str
    account: str = ""
    """The service account that Terraform made for builds, as projects/P/serviceAccounts/EMAIL; "": the project's own for Cloud Build."""
    bucket: str = ""
    """The bucket that this account reads the sources from."""

    @property
    def cloud(self) -> Cloud:
        return Cloud(self.project)

    def words(self, folder: str, configuration: str) -> list[str]:
        """Returns the words of the build of a folder, after `gcloud builds submit`."""
        own = [f"--service-account={self.account}", f"--gcs-source-staging-dir=gs://{self.bucket}/build"] if self.account else []
        return [folder, f"--config={folder}/{configuration}", "--format=value(results.images[0].digest)", *own]


def find_builder(target: Target | None, push: str, notice: Callable[[str], None]) -> Builder:
    """Returns who builds: the account of a target's deployment, or the project's own for Cloud Build."""
    if target is None:
        match = REGISTRY.match(push)
        return Builder(check_project(match[1] if match else default_project()))
    if not isinstance(target, GcpTarget):
        raise Problem(f"--on {target.name}: Cloud Build needs a target of kind gcp (without --on: the project of --push, or gcloud's own)")
    deployment = target.deployment
    outputs = deployment.outputs()
    account, bucket = str(outputs.get("build_service_account") or ""), str(outputs.get("model_bucket") or "")
    if account and bucket:
        return Builder(deployment.project, account, bucket)
    notice(
        f"{target.name} has no account for builds (set cloud_build_user: YOUR E-MAIL, and drivetrain up {target.name}): the project's own builds"
    )
    return Builder(deployment.project)


def build_cost() -> Cost:
    """Returns the most that a build costs."""
    prices = price_list()["builds"]
    item = f"Cloud Build ({prices['machine_type']}), while it builds; the first {prices['free_minutes']:,} minutes of a month are free"
    after = f"then ${prices['registry_gb_month']:.2f} a month for each GB in the registry"
    return Cost((Price(item, 60 * prices["minute"]),), f"{prices['source']}, read {price_list()['read']}", MAX_BUILD_HOURS, after)
